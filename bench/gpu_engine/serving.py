"""Checks of a ready engine: responses, heavy load, a core that pauses, hangs or dies, a limit that is reached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any, Final

import aiohttp

from bench.gpu_engine import machine
from bench.gpu_engine.results import Results
from bench.gpu_engine.watch import ProbeWatch, wait_readiness
from bench.hardware import client
from bench.hardware.engine import LaunchedEngine
from launcher.contract import Contract

_CHAT: Final = "/v1/chat/completions"
_ABOVE_LIMIT: Final = 100


async def check_answers(run: LaunchedEngine, contract: Contract, results: Results) -> None:
    """A streamed completion, a chat under another name, a request for another engine, the engine's own progress."""
    async with client.session() as http:
        bodies = [client.request_body(client.prompt((1, row), 300), 64, stream=True) for row in range(8)]
        streams = await asyncio.gather(*(client.send_streamed(http, run.url, body) for body in bodies))
        first_s = sorted(stream["first_s"] or 0.0 for stream in streams)
        results.check(
            f"{run.name}: streams have every token and end well", all(stream["ok"] for stream in streams),
            first_token_s=round(first_s[len(first_s) // 2], 4), errors=[s["error"] for s in streams if "error" in s],
        )  # fmt: skip
        again = [await client.send_streamed(http, run.url, bodies[0]) for _ in range(2)]
        results.check(f"{run.name}: a prompt that comes again ends well", all(stream["ok"] for stream in again))
        message = [{"role": "user", "content": "w5000 w5001 w5002"}]
        chat = {"model": "public", "messages": message, "max_tokens": 8, "stream": True}
        status, text = await _post(http, run.url + _CHAT, chat, {contract.headers["model"]: "m"})
        named = status == 200 and '"model":"public"' in text.replace(" ", "") and text.rstrip().endswith("data: [DONE]")
        results.check(f"{run.name}: a chat under the client's model name", named, status=status, end=text[-160:])
        status, text = await _post(http, run.url + _CHAT, chat, {contract.headers["model"]: "other"})
        results.check(f"{run.name}: another engine's request is refused", status == 503 and "wrong_engine" in text)
    status, body = run.get(contract.paths["progress"], port=run.api)
    results.check(f"{run.name}: the engine core answers for its progress", status == 200, answer=body.decode()[:80])


async def _post(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[int, str]:
    async with http.post(url, json=body, headers=headers or {}) as response:
        return response.status, await response.text()


async def check_heavy_load(
    run: LaunchedEngine, contract: Contract, results: Results, sequences: int, long_tokens: int
) -> None:
    """One very long prompt alone; all sequences at once; both together. The pod must stay ready and be scraped."""
    await _under_watch(run, contract, results, f"a prompt of {long_tokens} tokens", [(long_tokens, 16)])
    await _under_watch(run, contract, results, f"{sequences} sequences", [(2000, 200)] * sequences)
    both = [(500, 300)] * (sequences - 1) + [(long_tokens, 16)]
    await _under_watch(run, contract, results, f"{sequences} sequences, one of {long_tokens} tokens", both)


async def _under_watch(
    run: LaunchedEngine, contract: Contract, results: Results, what: str, requests: list[tuple[int, int]]
) -> None:
    began = time.monotonic()
    with ProbeWatch(run, contract) as watch:
        async with client.session() as http:
            seed = int(began * 1000)
            streams = await asyncio.gather(
                *(
                    client.send_streamed(
                        http, run.url, client.request_body(client.prompt((seed, row), prompt), output, stream=True)
                    )
                    for row, (prompt, output) in enumerate(requests)
                )
            )
    ok = sum(stream["ok"] for stream in streams)
    figures = {
        "seconds": round(time.monotonic() - began, 2),
        "ok": ok,
        "last_first_token_s": round(max(stream["first_s"] or 0.0 for stream in streams), 3),
        "longest_gap_s": round(max(stream["gap_s"] or 0.0 for stream in streams), 3),
        **watch.seen,
    }
    results.check(f"{run.name}: ready and live under {what}", watch.never_unready and ok == len(requests), **figures)
    results.check(f"{run.name}: scraped under {what}", watch.always_scraped)


async def check_stopped_core(run: LaunchedEngine, contract: Contract, results: Results, limit_s: float) -> None:
    """A core that stands still is unready in time and ready again afterwards; its stream goes on."""
    pid, ready_path = machine.core_pid(run), contract.paths["ready"]
    async with client.session() as http:
        body = client.request_body(client.prompt((3,), 200), 600, stream=True)
        stream = asyncio.create_task(client.send_streamed(http, run.url, body))
        await asyncio.sleep(1.0)
        os.kill(pid, signal.SIGSTOP)
        try:
            unready_s = await asyncio.to_thread(wait_readiness, run, ready_path, False, limit_s + 10.0)
            live = run.get(contract.paths["live"])[0]
        finally:
            os.kill(pid, signal.SIGCONT)
        ready_s = await asyncio.to_thread(wait_readiness, run, ready_path, True, limit_s)
        result = await stream
    in_time = unready_s is not None and unready_s <= limit_s
    results.check(f"{run.name}: a core that stands still is unready in time", in_time, seconds=unready_s, livez=live)
    went_on = ready_s is not None and result["ok"]
    results.check(f"{run.name}: it is ready again and its stream ends well", went_on, seconds=ready_s, ok=result["ok"])


async def check_queue_limit(run: LaunchedEngine, results: Results, limit: int) -> None:
    """More requests than the limit at once: some are refused with a reason, all others are answered."""
    async with client.session() as http:
        bodies = [
            client.request_body(client.prompt((4, row), 100), 200, stream=True) for row in range(limit + _ABOVE_LIMIT)
        ]
        streams = await asyncio.gather(*(client.send_streamed(http, run.url, body) for body in bodies))
    refused = [stream for stream in streams if stream["status"] != 200]
    marked = all((stream.get("headers") or {}).get("x-plimsoll-reason") == "queue_full" for stream in refused)
    answered = sum(stream["ok"] for stream in streams)
    results.check(
        f"{run.name}: requests above --max-num-queued-reqs are refused with a reason",
        bool(refused) and marked and answered + len(refused) == len(streams),
        sent=len(streams), answered=answered, refused=len(refused),
        statuses=sorted({stream["status"] for stream in streams}),
        example=next(((stream.get("headers"), stream.get("error")) for stream in refused), None),
    )  # fmt: skip


async def check_hung_core(run: LaunchedEngine, results: Results, limit_s: float) -> None:
    """A core that stands still for good, with a stream running: the launcher ends with a failure."""
    async with client.session() as http:
        body = client.request_body(client.prompt((5,), 200), 2000, stream=True)
        stream = asyncio.create_task(client.send_streamed(http, run.url, body))
        await asyncio.sleep(1.0)
        os.kill(machine.core_pid(run), signal.SIGSTOP)
        await _check_end(run, results, "a core that hangs ends the launcher with a failure", limit_s)
        stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stream


async def check_killed_core(run: LaunchedEngine, contract: Contract, results: Results, limit_s: float) -> None:
    """A core that is killed, with a stream running: unready soon, the stream does not end well, the launcher fails."""
    async with client.session() as http:
        body = client.request_body(client.prompt((6,), 200), 2000, stream=True)
        stream = asyncio.create_task(client.send_streamed(http, run.url, body))
        await asyncio.sleep(1.0)
        os.kill(machine.core_pid(run), signal.SIGKILL)
        unready_s = await asyncio.to_thread(wait_readiness, run, contract.paths["ready"], False, limit_s)
        await _check_end(run, results, "a core that is killed ends the launcher with a failure", limit_s, unready_s)
        result = await stream
    results.check(
        f"{run.name}: the killed core's stream does not end well", not result["ok"], error=result.get("error")
    )


async def _check_end(
    run: LaunchedEngine, results: Results, what: str, limit_s: float, unready_s: float | None = None
) -> None:
    began = time.monotonic()
    while run.process.poll() is None and time.monotonic() - began < limit_s:  # noqa: ASYNC110  another process
        await asyncio.sleep(0.1)
    code, seconds = run.process.poll(), round(time.monotonic() - began, 2)
    results.check(f"{run.name}: {what}", code not in (None, 0), code=code, seconds=seconds, unready_s=unready_s)


async def check_adapter(run: LaunchedEngine, results: Results, name: str) -> None:
    """The adapter is among the models, and its answers differ from the base model's."""
    async with client.session() as http:
        async with http.get(run.url + "/v1/models") as response:
            models = [model["id"] for model in (await response.json())["data"]]
        results.check(f"{run.name}: the adapter is listed", name in models, models=models)
        texts = {}
        for model in ("m", name):
            body = client.request_body(client.prompt((9,), 64), 24, stream=False) | {"model": model}
            status, texts[model] = await _post(http, run.url + client.COMPLETIONS, body)
            results.check(f"{run.name}: {model} answers", status == 200, status=status)
    results.check(f"{run.name}: the adapter changes the answer", _text(texts["m"]) != _text(texts[name]))


def _text(answer: str) -> str:
    return answer.split('"text":', 1)[-1].split('"logprobs"', 1)[0]
