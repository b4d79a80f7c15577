"""Requests of a trace as prompts: texts of the right length that no cache can serve.

Problem: thousands of prompts of many kilobytes must cost the client next to nothing, for the engines share its cores.
Idea: each prompt is its own number and a piece of one long text that was made once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from e2e.demo.trace import TraceRequest
from e2e.lib.client import Prompt
from e2e.lib.load import Arrival, OpenLoop, unique_text

CLASS_HEADER: Final = "x-gateway-inference-objective"
TENANT_HEADER: Final = "x-gateway-inference-fairness-id"
LIGHT_TOKEN_BYTES: Final = 4  # of the light engine's tokenizer
LIGHT_CHAT_TOKENS: Final = 2  # that its chat template adds to one message
_LONGEST_WORDS: Final = 40_000


def plan_load(rows: Sequence[TraceRequest], bytes_per_token: float, run: str, extra_tokens: int = 0) -> OpenLoop:
    """The load: prompts of the rows' lengths, unique in this run; `extra_tokens` are the chat template's."""
    text = unique_text(_LONGEST_WORDS, "demo")
    return OpenLoop(_arrivals(rows, bytes_per_token, run, extra_tokens, text))


def _arrivals(
    rows: Sequence[TraceRequest], bytes_per_token: float, run: str, extra_tokens: int, text: str
) -> Iterator[Arrival]:
    for n, row in enumerate(rows):
        length = max(1, round((row.prompt_tokens - extra_tokens) * bytes_per_token))
        words = f"{run}-{n:x} {text}"[:length]
        headers = ((CLASS_HEADER, row.request_class), (TENANT_HEADER, row.tenant))
        labels = (("class", row.request_class), ("tenant", row.tenant), ("prompt_tokens", str(row.prompt_tokens)))
        yield Arrival(row.at_s, Prompt(words, max_tokens=row.output_tokens, headers=headers, labels=labels))
