"""The openai SDK for Python as users run it, with its default retries, while a service refuses. Usage: URL MODEL

Prints "ready" and waits for a line, because imports take long on a busy machine. Then COUNT users ask once each,
spread over SPREAD seconds. Prints, for each: statuses in their order, seconds that each
refusal asked for (null where there is no Retry-After), and whether an answer came at last.
"""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import sys
from contextvars import ContextVar

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

COUNT, SPREAD, TOKENS = 30, 20.0, 48
url, model = sys.argv[1:]
attempts: ContextVar[list] = ContextVar("seen")


async def note(answer) -> None:
    """Every answer on the way, before the SDK acts on it."""
    attempts.get().append((answer.status_code, answer.headers.get("retry-after")))


async def ask(client: AsyncOpenAI, number: int) -> dict:
    """One user's request, from first try to last."""
    tries: list = []
    attempts.set(tries)
    await asyncio.sleep(number * SPREAD / COUNT)
    words = f"user {number} " + "of the fleet " * 120
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": TOKENS, "extra_body": {"ignore_eos": True}}
    try:
        answer = await client.chat.completions.create(model=model, **body)
        answered = answer.usage.completion_tokens == TOKENS
    except APIStatusError:
        answered = False
    waits = [None if wait is None else int(wait) for status, wait in tries if status != 200]
    return {"statuses": [status for status, _ in tries], "waits": waits, "succeeded": answered}


async def main() -> None:
    """All users."""
    http = DefaultAsyncHttpxClient(event_hooks={"response": [note]}, trust_env=False)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, http_client=http) as client:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(await asyncio.gather(*(ask(client, number) for number in range(COUNT)))))


asyncio.run(main())
