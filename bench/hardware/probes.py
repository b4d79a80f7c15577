"""What the law of a step is fitted to beside the load: prompts alone, and even batches of growing size.

Problem: under load most steps are alike, and alike steps tell few coefficients apart.
Idea: prompts of nine lengths, one at a time, and batches of some sizes at three contexts, until each sequence has made
a hundred tokens. The engine's step log has the times; the client's are kept for the first token alone.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from bench.hardware import client

PROMPTS: Final = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32000)
BATCHES: Final = ((512, (1, 4, 8, 16, 32, 64, 128, 192, 256)), (2048, (1, 32, 64, 128)), (8192, (1, 16, 40)))
REPEATS: Final = 3
TOKENS: Final = 100


async def alone(url: str, longest: int) -> list[dict[str, Any]]:
    """Seconds to the first token of single prompts, medians of some."""
    rows = []
    async with client.session() as http:
        await client.streamed(http, url, client.body(client.prompt((1, 0), 64), 4, stream=True))
        for tokens in (length for length in PROMPTS if length < longest):
            times = []
            for number in range(REPEATS):
                asked = client.body(client.prompt((2, tokens, number), tokens), 2, stream=True)
                times.append((await client.streamed(http, url, asked))["first_s"])
            kept = sorted(one for one in times if one is not None)
            rows.append({"prompt": tokens, "ttft_s": kept[len(kept) // 2] if kept else None})
    return rows


async def batches(url: str) -> list[dict[str, Any]]:
    """Even batches, each until its end; which time on the monotonic clock each of them had."""
    rows = []
    async with client.session() as http:
        for context, sizes in BATCHES:
            for size in sizes:
                bodies = [
                    client.body(client.prompt((3, context, size, row), context), TOKENS, stream=False)
                    for row in range(size)
                ]
                began = time.monotonic()
                answers = await asyncio.gather(*(_whole(http, url, one) for one in bodies))
                rows.append(
                    {"context": context, "size": size, "from": began, "to": time.monotonic(), "ok": sum(answers)}
                )
    return rows


async def _whole(http: Any, url: str, asked: dict[str, Any]) -> bool:
    async with http.post(url + client.COMPLETIONS, json=asked) as answer:
        await answer.read()
        return bool(answer.status == 200)
