"""Load for fitting the step model, in addition to the traces: single prompts, and uniform batches of growing size.

Problem: under load most steps are alike, and such steps do not separate the coefficients.

Idea: prompts of nine lengths, one at a time, and batches of some sizes at three contexts, until each sequence has a
hundred tokens. The engine's step log has the times; the clients' times are stored for the first token only.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from bench.hardware import client

PROMPT_LENGTHS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000)
BATCH_SIZES: Final = ((512, (1, 4, 8, 16, 32, 64, 128, 192, 256)), (2048, (1, 32, 64, 128)), (8192, (1, 16, 40)))
REPEATS: Final = 3
OUTPUT_TOKENS: Final = 100


async def probe_prompts(url: str, longest: int) -> list[dict[str, Any]]:
    """Seconds to the first token of single prompts, medians of some."""
    rows = []
    async with client.session() as http:
        await client.send_streamed(http, url, client.request_body(client.prompt((1, 0), 64), 4, stream=True))
        for tokens in (length for length in PROMPT_LENGTHS if length < longest):
            times = []
            for number in range(REPEATS):
                body = client.request_body(client.prompt((2, tokens, number), tokens), 2, stream=True)
                times.append((await client.send_streamed(http, url, body))["first_s"])
            results = sorted(result for result in times if result is not None)
            rows.append({"prompt": tokens, "ttft_s": results[len(results) // 2] if results else None})
    return rows


async def probe_batches(url: str) -> list[dict[str, Any]]:
    """Even batches, each until its end; which time on the monotonic clock each of them had."""
    rows = []
    async with client.session() as http:
        for context, sizes in BATCH_SIZES:
            for size in sizes:
                bodies = [
                    client.request_body(client.prompt((3, context, size, row), context), OUTPUT_TOKENS, stream=False)
                    for row in range(size)
                ]
                started_s = time.monotonic()
                responses = await asyncio.gather(*(_complete(http, url, body_document) for body_document in bodies))
                rows.append(
                    {"context": context, "size": size, "from": started_s, "to": time.monotonic(), "ok": sum(responses)}
                )
    return rows


async def _complete(http: Any, url: str, body: dict[str, Any]) -> bool:
    async with http.post(url + client.COMPLETIONS, json=body) as response:
        await response.read()
        return bool(response.status == 200)
