"""Requests whose lengths are exact for any tokenizer and that no prefix cache has seen.

Prompts are token ids: above the special tokens that tokenizers put first, and below the smallest vocabulary. Their
first two ids count them, so that no two of some ten thousand begin alike.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

COMPLETIONS_PATH = "/v1/completions"
FIRST_TOKEN_ID, TOKEN_ID_COUNT = 10, 200


class PromptFactory:
    """Bodies of requests to one model, each with a prompt of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._serial = itertools.count()

    def new_prompt(self, tokens: int) -> list[int]:
        """Returns a prompt with this number of tokens that differs from all earlier ones."""
        serial = next(self._serial)
        offsets = [serial, serial // TOKEN_ID_COUNT, *(serial + place for place in range(2, tokens))]
        return [FIRST_TOKEN_ID + place % TOKEN_ID_COUNT for place in offsets[:tokens]]

    def completion_request(self, prompt: list[int], max_tokens: int) -> bytes:
        """A greedy completion that ends after exactly `max_tokens` tokens."""
        return self.request_json(max_tokens, prompt=prompt)

    def task_json(self, **fields: Any) -> bytes:
        """A request to a model that generates no text."""
        return json.dumps({"model": self._model, **fields}).encode()

    def request_json(self, max_tokens: int, **fields: Any) -> bytes:
        """A greedy request with these fields."""
        common = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return json.dumps({**common, **fields}).encode()
