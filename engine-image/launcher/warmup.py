"""Warm-up requests before the first user: prompts of several lengths, batches of several sizes.

Problem: an engine whose /health is 200 still compiles, allocates and imports at its first requests, for seconds. Idea:
send each kind of request once, over the users' API, and become ready only then. A model that rejects a request (no chat
template) is not broken: the rejection is logged and the engine becomes ready. An engine without the route of the
service's task is of no use to any client: it does not become ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from launcher.client import Response
from launcher.contract import Warmup
from launcher.prompts import COMPLETIONS_PATH, PromptFactory

EMBEDDINGS_PATH = "/v1/embeddings"
SCORE_PATH = "/score"
TRANSCRIPTIONS_PATH = "/v1/audio/transcriptions"
TASK_PATHS = {
    "generate": COMPLETIONS_PATH,
    "embed": EMBEDDINGS_PATH,
    "score": SCORE_PATH,
    "transcribe": TRANSCRIPTIONS_PATH,
}
CHAT_PATH = "/v1/chat/completions"
MODELS_PATH = "/v1/models"
NO_ROUTE_STATUSES = {404, 405}  # of a path that the model's task does not have

log = logging.getLogger(__name__)

# (path, JSON body or None for a GET) -> answer
SendRequest = Callable[[str, bytes | None], Awaitable[Response]]


class TaskNotServed(Exception):
    """The engine does not have the route of the service's task."""


@dataclass(frozen=True)
class WarmupBatch:
    """Requests that run at the same time: `size` prompts of `prompt_tokens` each."""

    size: int
    prompt_tokens: int


def plan_batches(warmup: Warmup, max_model_len: int) -> list[WarmupBatch]:
    """Return each prompt length alone, then each batch size with short prompts, as far as they fit the model."""
    max_prompt_tokens = max_model_len - warmup.completion_tokens
    lengths = [length for length in warmup.prompt_tokens if length <= max_prompt_tokens] or [max(1, max_prompt_tokens)]
    return [
        *(WarmupBatch(1, length) for length in lengths),
        *(WarmupBatch(size, lengths[0]) for size in warmup.batches if size > 1),
    ]


def request_bodies(
    batches: list[WarmupBatch], prompts: PromptFactory, completion_tokens: int, task: str = "generate"
) -> Iterator[list[bytes]]:
    """Yield the requests of each batch for the path of the task; audio has no batches, only a request without sound."""
    if task == "transcribe":
        yield [prompts.task_json()]
        return
    for batch in batches:
        token_ids = [prompts.new_prompt(batch.prompt_tokens) for _ in range(batch.size)]
        if task == "embed":
            yield [prompts.task_json(input=ids) for ids in token_ids]
        elif task == "score":
            yield [prompts.task_json(text_1="warm-up", text_2="a " * batch.prompt_tokens) for _ in token_ids]
        else:
            yield [prompts.completion_request(ids, completion_tokens) for ids in token_ids]


async def run(send_request: SendRequest, warmup: Warmup, prompts: PromptFactory, task: str = "generate") -> None:
    """Warm the engine up, within the contract's time. Raises TaskNotServed."""
    try:
        async with asyncio.timeout(warmup.timeout_seconds):
            batches = plan_batches(warmup, parse_max_model_len((await send_request(MODELS_PATH, None)).body))
            for requests in request_bodies(batches, prompts, warmup.completion_tokens, task):
                statuses = await asyncio.gather(*(_send(send_request, TASK_PATHS[task], one) for one in requests))
                if set(statuses) <= NO_ROUTE_STATUSES:
                    raise TaskNotServed(
                        f"the engine does not serve {TASK_PATHS[task]}, so the model's task is not {task}: "
                        "set spec.model.task to what the model does"
                    )
            if task == "generate":
                chat_request = prompts.request_json(2, messages=[{"role": "user", "content": "warm-up"}], stream=True)
                await _send(send_request, CHAT_PATH, chat_request)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("warm-up ended early: %s: %s", type(error).__name__, error)


def parse_max_model_len(body: bytes) -> int:
    """Return the largest sum of prompt and output tokens, from the engine's list of models; raises ValueError."""
    try:
        length = json.loads(body)["data"][0]["max_model_len"]
    except (ValueError, LookupError, TypeError, RecursionError):
        length = None
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{MODELS_PATH} names no max_model_len")
    return length


async def _send(send_request: SendRequest, path: str, body: bytes) -> int:
    response = await send_request(path, body)
    if response.status != 200:
        log.warning("warm-up: %s answered %d: %s", path, response.status, response.body[:200].decode(errors="replace"))
    return response.status
