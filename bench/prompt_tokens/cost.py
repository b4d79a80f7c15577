"""`python -m bench.prompt_tokens.cost`: what counting tokens would cost the gateway, against its estimate.

Prints the least CPU time of one chat of English text in ms: of the whole parse with its estimate, and of two
tokenizers. Each runs in one thread, as it would beside the picker's event loop.

Then the least wall time of a request to an engine simulator's `/tokenize` on loopback, with its launcher's middleware.
The simulator splits words instead of tokenizing, so a real engine takes a tokenizer's time more.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import aiohttp

from bench.prompt_tokens.corpus import english
from bench.prompt_tokens.counting import load_tokenizers
from plimsoll.gateway.api_routes import CHAT_ROUTE
from plimsoll.gateway.request_parser import parse_body
from tests.gateway.simulated_engine import simulated_engine

SIZES = (8_000, 100_000)  # characters
RUNS = 10


def least_cpu_ms(run: Callable[[], object]) -> float:
    """The least CPU time of this thread for one run, in ms."""
    found = []
    for _ in range(RUNS):
        start_s = time.thread_time()
        run()
        found.append(1e3 * (time.thread_time() - start_s))
    return min(found)


async def print_tokenize() -> None:
    """The least wall time of a request to `/tokenize`, and the size of the response."""
    print("\n| characters | /tokenize | response |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--max-model-len", "131072")
        async with (
            simulated_engine(Path(folder), "team/chat", "generate", flags=flags) as address,
            aiohttp.ClientSession(f"http://{address}") as client,
        ):
            for size in SIZES:
                messages = [{"role": "user", "content": english(size, Random(1))}]
                body = {"model": "team/chat", "messages": messages}
                found = []
                for _ in range(RUNS):
                    start_s = time.perf_counter()
                    async with client.post("/tokenize", json=body) as response:
                        text = await response.read()
                    assert response.status == 200, text
                    found.append(1e3 * (time.perf_counter() - start_s))
                print(f"| {size:,} | {min(found):.1f} ms | {len(text) / 1e3:.0f} kB |", flush=True)


if __name__ == "__main__":
    tokenizers = load_tokenizers()
    names = ("cl100k", "anthropic")
    print(f"| characters | tokens | parse and estimate | {' | '.join(names)} |\n|---|---|---|---|---|")
    for size in SIZES:
        text = english(size, Random(1))
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
        runs = [partial(parse_body, body, CHAT_ROUTE), *(partial(tokenizers[name], text) for name in names)]
        costs = " | ".join(f"{least_cpu_ms(run):.2f} ms" for run in runs)
        print(f"| {size:,} | {tokenizers['cl100k'](text):,} | {costs} |", flush=True)
    asyncio.run(print_tokenize())
