"""First requests before the first user: prompts of several lengths, batches of several sizes.

Problem: an engine that answers /health still compiles, allocates and imports at its first requests, for seconds.
Idea: ask it once for what is coming, by the same road that users take, and be ready only then. A model that refuses a
request (no chat template, another task) is not broken: the refusal is logged and the engine becomes ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from launcher.client import Response
from launcher.contract import Warmup
from launcher.prompts import COMPLETIONS, Prompts

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"

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


def bodies(batches: list[Batch], prompts: Prompts, completion_tokens: int) -> Iterator[list[bytes]]:
    """The requests of each batch."""
    for batch in batches:
        yield [prompts.completion(prompts.new(batch.prompt_tokens), completion_tokens) for _ in range(batch.size)]


async def run(ask: Ask, warmup: Warmup, prompts: Prompts) -> None:
    """Warms the engine up; never fails, and ends at the contract's time at the latest."""
    try:
        async with asyncio.timeout(warmup.timeout_seconds):
            batches = plan(warmup, max_model_len((await ask(MODELS, None)).body))
            for requests in bodies(batches, prompts, warmup.completion_tokens):
                await asyncio.gather(*(_ask(ask, COMPLETIONS, request) for request in requests))
            chat = prompts.body(2, messages=[{"role": "user", "content": "warm-up"}], stream=True)
            await _ask(ask, CHAT, chat)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("warm-up ended early: %s: %s", type(error).__name__, error)


def max_model_len(models: bytes) -> int:
    """The longest prompt and output together, in tokens, from the engine's list of models; raises ValueError."""
    try:
        found = json.loads(models)["data"][0]["max_model_len"]
    except (ValueError, LookupError, TypeError, RecursionError):
        found = None
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"{MODELS} names no max_model_len")
    return found


async def _ask(ask: Ask, path: str, body: bytes) -> None:
    answer = await ask(path, body)
    if answer.status != 200:
        log.warning("warm-up: %s answered %d: %s", path, answer.status, answer.body[:200].decode(errors="replace"))
