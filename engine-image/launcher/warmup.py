"""First requests before the first user: prompts of several lengths, batches of several sizes.

Problem: an engine that answers /health still compiles, allocates and imports at its first requests, for seconds.
Idea: ask it once for what is coming, by the same road that users take, and be ready only then. Prompts are token ids,
so that lengths are exact for any tokenizer, and all differ, so that the prefix cache does not answer. A model that
refuses a request (no chat template, another task) is not broken: the refusal is logged and the engine becomes ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher.client import Response
from launcher.contract import Warmup

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
# Ids above the special tokens that tokenizers put first, and below the smallest vocabulary.
FIRST_ID, IDS = 10, 200

log = logging.getLogger(__name__)

# (path, JSON body or None for a GET) -> answer
Ask = Callable[[str, bytes | None], Awaitable[Response]]


@dataclass(frozen=True)
class Batch:
    """Requests that run at the same time: `size` prompts of `prompt_tokens` each."""

    size: int
    prompt_tokens: int


def plan(warmup: Warmup, max_model_len: int) -> list[Batch]:
    """Each prompt length alone, then each batch size with short prompts; what does not fit the model is left out."""
    room = max_model_len - warmup.completion_tokens
    lengths = [length for length in warmup.prompt_tokens if length <= room] or [max(1, room)]
    return [
        *(Batch(1, length) for length in lengths),
        *(Batch(size, lengths[0]) for size in warmup.batches if size > 1),
    ]


def bodies(batches: list[Batch], model: str, completion_tokens: int) -> Iterator[list[bytes]]:
    """The requests of each batch; no two prompts start with the same tokens."""
    serial = 0
    for batch in batches:
        requests = []
        for _ in range(batch.size):
            prompt = [FIRST_ID + (serial + place) % IDS for place in range(batch.prompt_tokens)]
            serial += 1
            requests.append(_body(model, completion_tokens, prompt=prompt))
        yield requests


def _body(model: str, max_tokens: int, **fields: Any) -> bytes:
    common = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({**common, **fields}).encode()


async def run(ask: Ask, warmup: Warmup, model: str) -> None:
    """Warms the engine up; never fails, and ends at the contract's time at the latest."""
    try:
        async with asyncio.timeout(warmup.timeout_seconds):
            batches = plan(warmup, await _max_model_len(ask))
            for requests in bodies(batches, model, warmup.completion_tokens):
                await asyncio.gather(*(_ask(ask, COMPLETIONS, request) for request in requests))
            chat = _body(model, 2, messages=[{"role": "user", "content": "warm-up"}], stream=True)
            await _ask(ask, CHAT, chat)
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        log.warning("warm-up ended early: %s: %s", type(error).__name__, error)


async def _max_model_len(ask: Ask) -> int:
    answer = await ask(MODELS, None)
    return int(json.loads(answer.body)["data"][0]["max_model_len"])


async def _ask(ask: Ask, path: str, body: bytes) -> None:
    answer = await ask(path, body)
    if answer.status != 200:
        log.warning("warm-up: %s answered %d: %s", path, answer.status, answer.body[:200].decode(errors="replace"))
