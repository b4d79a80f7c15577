"""Open-loop clients: each request of a trace is sent at its time, independent of earlier ones.

    python -m bench.hardware.client TRACE --url http://127.0.0.1:8000 --start T --worker 0/6 --out FILE

Problem: one process cannot read thousands of streamed tokens per second without adding its own delays to the
measurement.

Idea: several processes share a trace, each takes every n-th request, and all use one start on the system's monotonic
clock. The delay of each send is recorded with its result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np

from bench.hardware import archive, itl_histogram, traces
from bench.hardware.admission import static_cap
from bench.hardware.summary import ObservedRequest

COMPLETIONS: Final = "/v1/completions"
PREFILL: Final = "x-plimsoll-prefill"  # the gateway's word to a decode engine: where to have the prompt read
_MIN_TOKEN_ID, _MAX_TOKEN_ID = 1000, 100_000  # token ids of prompts: none of them special
START_S: Final = 3.5  # until the trace's first instant: processes need a moment to import and to draw their prompts
CLIENT_DRAIN_S: Final = 25.0  # that a request may take after the last one was sent
REJECTED_STATUS: Final = 429  # the status of a request that a turnstile turned away
IDLE_S: Final = 2.0  # after which a connection is not used again: vLLM closes it after 5 s, and a request on it is lost


def session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=600, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)


def prompt(seed: Sequence[int], tokens: int) -> list[int]:
    """A prompt that no other seed shares a beginning with."""
    token_ids: list[int] = np.random.default_rng(list(seed)).integers(_MIN_TOKEN_ID, _MAX_TOKEN_ID, tokens).tolist()
    return token_ids


def request_body(tokens: list[int], output: int, *, stream: bool, model: str = "m") -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": model,
        "prompt": tokens,
        "max_tokens": output,
        "ignore_eos": True,
        "temperature": 0,
    }
    return document | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})


async def send_streamed(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One streamed request: seconds from its sending to the first and last token, gaps, and how it ended.

    `ok` only for the exact count of tokens by the engine's own usage, and a proper end.
    """
    result = _empty_result()
    started_s, done = time.monotonic(), False
    try:
        async with http.post(url + COMPLETIONS, json=body, headers=dict(headers or {})) as response:
            result["status"] = response.status
            if response.status != 200:
                result["error"] = (await response.text())[:300]
                result["headers"] = {
                    key: value for key, value in response.headers.items() if key.startswith("x-plimsoll")
                }
                return result
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: {"):
                    _record_event(result, line, time.monotonic() - started_s)
    except (aiohttp.ClientError, OSError, asyncio.CancelledError) as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    result["ok"] = done and result["tokens"] == body["max_tokens"]
    return result


def _empty_result() -> dict[str, Any]:
    """What is seen of a request before anything has come."""
    return {
        "status": 0,
        "first_s": None,
        "last_s": None,
        "gap_s": None,
        "tokens": 0,
        "ok": False,
        "gaps_s": [],
    }


def _record_event(result: dict[str, Any], line: bytes, at_s: float) -> None:
    if b'"choices":[]' in line and b'"usage"' in line:
        result["tokens"] = json.loads(line[6:])["usage"]["completion_tokens"]
    elif b'"text":' in line:
        if result["first_s"] is None:
            result["first_s"] = at_s
        else:
            result["gaps_s"].append(round(at_s - result["last_s"], 5))
            result["gap_s"] = max(result["gap_s"] or 0.0, at_s - result["last_s"])
        result["last_s"] = at_s


async def worker(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Sends this process's share of the trace; unfinished requests are cut some time after the last one was sent."""
    index, workers = (int(rows) for rows in given.worker.split("/"))
    requests = traces.read(given.trace)
    own_rows = range(index, len(requests), workers)
    models = given.model.split(",")
    bodies = {
        row: request_body(
            prompt((given.seed, row), requests[row].prompt),
            requests[row].output,
            stream=True,
            model=models[row % len(models)],
        )
        for row in own_rows
    }
    tasks: list[asyncio.Task[dict[str, Any]]] = []
    async with session() as http:
        for row in own_rows:
            await asyncio.sleep(max(0.0, given.start + requests[row].at_s - time.monotonic()))
            remote = given.prefill and requests[row].prompt >= given.remote_from
            headers = {PREFILL: given.prefill} if remote else {}
            tasks.append(asyncio.create_task(_send_one(http, given, row, requests[row], bodies.pop(row), headers)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=given.drain)
            for task in late:
                task.cancel()
        return list(await asyncio.gather(*tasks))


async def _send_one(
    http: aiohttp.ClientSession,
    given: argparse.Namespace,
    row: int,
    request: traces.PlannedRequest,
    body: dict[str, Any],
    headers: Mapping[str, str],
) -> dict[str, Any]:
    late = time.monotonic() - given.start - request.at_s
    urls = given.url.split(",")
    send = partial(send_streamed, http, urls[row % len(urls)], body, headers)
    result = await (_with_cap(given.turnstile, request.prompt, send) if given.turnstile else send())
    return {
        "row": row,
        "at_s": request.at_s,
        "late_s": late,
        "prompt": request.prompt,
        "output": request.output,
        **result,
    }


async def _with_cap(path: str, prompt: int, send: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """One request through a turnstile: what it sees, counted from its coming, or that it was turned away."""
    began = time.monotonic()
    slot = await static_cap.acquire_slot(path, prompt)
    if slot is None:
        return _empty_result() | {"status": REJECTED_STATUS}
    try:
        waited_s = time.monotonic() - began
        result = await send()
    finally:
        slot.close()
    return result | {key: result[key] + waited_s for key in ("first_s", "last_s") if result[key] is not None}


def run(
    trace: Path,
    url: str,
    out: Path,
    *,
    workers: int,
    seed: int,
    prefill: str = "",
    remote_from: int = 0,
    drain_s: float = CLIENT_DRAIN_S,
    cap_socket: str = "",
    models: Sequence[str] = ("m",),
) -> list[dict[str, Any]]:
    """Replays a trace from several processes; the rows they wrote, by time, with the start on the monotonic clock.

    Raises ValueError where a process ended badly or a request has no row; what there is has been written then.
    """
    start = time.monotonic() + START_S
    parts = [out.with_suffix(f".{number}") for number in range(workers)]
    command = [sys.executable, "-m", "bench.hardware.client", str(trace), "--url", url, "--start", str(start)]
    command += ["--seed", str(seed), "--prefill", prefill, "--remote-from", str(remote_from), "--drain", str(drain_s)]
    command += ["--turnstile", cap_socket, "--model", ",".join(models)]
    started = [
        subprocess.Popen([*command, "--worker", f"{number}/{workers}", "--out", str(part)])
        for number, part in enumerate(parts)
    ]
    codes = [process.wait() for process in started]
    rows = [row for part in parts if part.exists() for row in json.loads(part.read_text())]
    for part in parts:
        part.unlink(missing_ok=True)
    rows.sort(key=lambda row: row["at_s"])
    counts = itl_histogram.count_itl(rows)
    for row in rows:
        del row["gaps_s"]
    document = {"trace": trace.name, "start": start, "codes": codes, "gaps": counts, "requests": rows}
    out.write_text(json.dumps(document))
    archive.check_complete(out.name, rows, codes, len(traces.read(trace)))
    return rows


def to_observed(rows: Sequence[Mapping[str, Any]]) -> list[ObservedRequest]:
    """The rows as what predictions are compared with: a time is the client's, the delay of its sending included."""
    return [_observed(row) for row in rows]


def _observed(row: Mapping[str, Any]) -> ObservedRequest:
    first, last, output = row["first_s"], row["last_s"], row["output"]
    each = (last - first) / (output - 1) if row["ok"] and output > 1 else None
    return ObservedRequest(
        row["at_s"], output, None if first is None else first + row["late_s"], each, row["gap_s"], row["ok"]
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.client", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", required=True, help="of the engine, or several with commas, taken in turn")
    parser.add_argument("--start", type=float, required=True, help="on the monotonic clock")
    parser.add_argument("--worker", default="0/1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--prefill", default="", help="host:port of a prefill engine")
    parser.add_argument("--remote-from", type=int, default=0, help="tokens from which a prompt is read there")
    parser.add_argument("--drain", type=float, default=CLIENT_DRAIN_S, help="seconds after the last request was sent")
    parser.add_argument("--turnstile", default="", help="socket of a turnstile that each request goes through")
    parser.add_argument("--model", default="m", help="name that requests have, or several with commas, taken in turn")
    given = parser.parse_args(words)
    given.out.write_text(json.dumps(asyncio.run(worker(given))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
