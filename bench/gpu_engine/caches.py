"""vLLM's caches on one GPU: prefix routing to two engines, KV blocks in CPU memory, and sleep. Prints JSON.

    python -m bench.gpu_engine.caches --out DIR [--only prefix,memory] [--seconds 70] [--rate 2.2] [--arg=--flag ...]

Problem: the gateway's belief about caches, the gain of `spec.kvOffload` and the cost of vLLM's sleep mode were known
from simulations and documents.
Idea: two engines of one model share the GPU. `prefix` replays one trace several times, each with empty caches: by least
work, by the gateway's index, and by the engines' KV events, with one and two gateways. `memory` has one engine that
offloads and one that can sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu_engine import machine, prefix_routing, prefix_trace
from bench.gpu_engine.check import Session
from bench.gpu_engine.kv_events import EventReader
from bench.hardware import client, measure
from bench.hardware.engine import LaunchedEngine
from plimsoll.core.engine_model.step_time import EngineLimits

READY_S: Final = 330.0
_BLOCKS: Final = 8_192  # of an engine's cache in `prefix`: smaller than the trace, so that blocks are evicted
_SMALL_BLOCKS: Final = 2_048  # in `memory`: two long prompts
_ARMS: Final = (("least work", 1), ("affinity", 1), ("affinity", 2), ("KV events", 1), ("KV events", 2))
_SHARED_ARGS: Final = ("--max-model-len", "32000", "--gpu-memory-utilization", "0.4")  # two engines on one GPU
_OFFLOAD_GIB: Final = 20
_LENGTHS: Final = (2_000, 8_000, 16_000)
_ROUNDS: Final = 4
_PORTS: Final = (8000, 8010)
_ASLEEP_S: Final = 50.0  # longer than the launcher lets an engine without progress live
_RESET: Final = "/reset_prefix_cache"
_COUNTERS: Final = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
                    "vllm:external_prefix_cache_queries_total", "vllm:external_prefix_cache_hits_total")  # fmt: skip


def counters(page: str, prefixes: Sequence[str] = _COUNTERS) -> dict[str, float]:
    """Counters of a metrics page that begin with one of these names, with their labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(tuple(prefixes)) and "_created" not in line:
            name, _, value = line.rpartition(" ")
            found[name.replace('engine="0",', "").replace('model_name="m"', "").replace("{}", "")] = float(value)
    return found


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """What counters grew by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


@contextlib.contextmanager
def engines(session: Session, arguments: Mapping[str, Sequence[str]]) -> Iterator[dict[str, LaunchedEngine]]:
    """Engines that start at once, each with its arguments and ports, and are ready; killed at the end.

    Raises RuntimeError if one does not become ready.
    """
    before_mib = machine.used_mib()
    started = {
        name: session.launch(name, args, api=port) for (name, args), port in zip(arguments.items(), _PORTS, strict=True)
    }
    try:
        for name, run in started.items():
            if not run.wait_ready(READY_S):
                print((session.out / f"{name}.log").read_text(errors="replace")[-5000:])
                raise RuntimeError(f"{name} did not become ready")
            phases = {phase: round(value, 2) for phase, value in dict(run.last_documents.get("phases", ())).items()}
            session.results.check(f"{name}: ready", True, seconds=run.timeline[-1]["at_s"], phases=phases)
        yield started
    finally:
        for run in started.values():
            run.kill()
        freed, now_mib = machine.wait_memory_freed(before_mib)
        session.results.check("GPU memory is free after the end", freed, before_mib=before_mib, after_mib=now_mib)


def _post(run: LaunchedEngine, path: str) -> tuple[int, str]:
    return asyncio.run(_send(run.url + path, {}))


async def _send(url: str, document: Mapping[str, Any]) -> tuple[int, str]:
    async with client.session() as http, http.post(url, json=document) as response:
        return response.status, await response.text()


def prefix(session: Session, seconds: float, rate: float) -> None:
    """One trace for each of `_ARMS`."""
    template = session.out / "template.jinja"
    template.write_text(prefix_trace.TEMPLATE)
    arguments = {}
    for number, name in enumerate(("left", "right")):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{5557 + number}"}
        arguments[name] = (
            "--kv-cache-memory-bytes", str(_BLOCKS * prefix_trace.ENGINE_BLOCK * session.kv_token_bytes),
            "--chat-template", str(template), "--enable-prompt-tokens-details",
            "--kv-events-config", json.dumps(events),
        )  # fmt: skip
    found = prefix_trace.sessions(seconds, rate, seed=27)
    limits = EngineLimits(256, _BLOCKS * prefix_trace.ENGINE_BLOCK, 8192)
    model = prefix_routing.cost_model(found, limits)
    with engines(session, arguments) as started:
        readers = {name: EventReader(5557 + number) for number, name in enumerate(started)}
        for reader in readers.values():
            reader.start()
        urls = {name: run.url for name, run in started.items()}
        session.results.note("requests of the trace", sum(len(one.turns) for one in found))
        for arm, count in _ARMS:
            for run in started.values():
                session.results.check(f"{run.name}: reset of the cache", '"success":true' in _post(run, _RESET)[1])
            before = {name: counters(run.metrics()) for name, run in started.items()}
            seen = {name: one.counters() for name, one in readers.items()}
            gateways = [
                prefix_routing.Gateway(
                    model, list(urls), 1 / count, prefix_aware=arm != "least work", events=arm == "KV events"
                )
                for _ in range(count)
            ]
            replay, began = prefix_routing.Replay(gateways, urls, readers), time.monotonic()
            asyncio.run(replay.run(found))
            lasted_s = time.monotonic() - began
            title = f"{arm}, {count} gateway{'s' * (count > 1)}"
            (session.out / f"{title.replace(', ', '-').replace(' ', '-')}.json").write_text(
                json.dumps(prefix_routing.rows_of(replay.outcomes))
            )
            summary = prefix_routing.summarise(replay.outcomes)
            summary["seconds"] = round(lasted_s, 1)
            summary["counters"] = {
                name: difference(counters(run.metrics()), before[name]) for name, run in started.items()
            }
            summary["kv_events"] = {
                name: {**difference(one.counters(), seen[name]), "blocks": len(one.index)}
                for name, one in readers.items()
            }
            session.results.check(f"prefix: {title}", summary["failed"] == 0, **summary)
        for reader in readers.values():
            reader.stop()


def memory(session: Session) -> None:
    """One engine that offloads, and one that sleeps."""
    cache = ("--kv-cache-memory-bytes", str(_SMALL_BLOCKS * prefix_trace.ENGINE_BLOCK * session.kv_token_bytes))
    offloading = (*cache, "--kv-offloading-size", str(_OFFLOAD_GIB), "--enable-prompt-tokens-details")
    with engines(session, {"offload": offloading, "sleep": (*cache, "--enable-sleep-mode")}) as started:
        for stage, name in ((offload, "offload"), (sleep, "sleep")):
            try:
                stage(session, started[name])
            except Exception as error:  # noqa: BLE001  the other engine's figures are still worth their time
                session.results.check(f"{name}: completed", False, error=f"{type(error).__name__}: {error}"[:500])


def offload(session: Session, run: LaunchedEngine) -> None:
    """TTFT of prompts that are new, in the GPU's cache, and evicted from it into CPU memory."""
    asyncio.run(_ttft(run, (0, 0), 500))
    for length in _LENGTHS:
        new, on_gpu, from_cpu, cached = [], [], [], []
        before = counters(run.metrics(), (*_COUNTERS, "vllm:prompt_tokens_by_source"))
        for number in range(_ROUNDS):
            seed = (length, number)
            new.append(asyncio.run(_ttft(run, seed, length))[0])
            on_gpu.append(asyncio.run(_ttft(run, seed, length))[0])
            others = -(-2 * _SMALL_BLOCKS * prefix_trace.ENGINE_BLOCK // length)
            asyncio.run(_fill(run, seed, length, others))
            seconds, tokens = asyncio.run(_ttft(run, seed, length))
            from_cpu.append(seconds)
            cached.append(tokens)
        grown = difference(counters(run.metrics(), (*_COUNTERS, "vllm:prompt_tokens_by_source")), before)
        median = {
            name: round(1000 * statistics.median(values), 1)
            for name, values in (("new_ms", new), ("gpu_ms", on_gpu), ("cpu_ms", from_cpu))
        }
        passed = min(cached) >= length - 2 * prefix_trace.ENGINE_BLOCK
        session.results.check(f"offload: {length} tokens come back from CPU memory", passed, **median, cached=cached,
                              cpu_each_ms=[round(1000 * value, 1) for value in from_cpu], counters=grown)  # fmt: skip
    names = sorted({line.split("{")[0].split(" ")[0] for line in run.metrics().splitlines() if "offload" in line})
    session.results.note("names of offload metrics", [name for name in names if name.startswith("vllm:")])


async def _ttft(run: LaunchedEngine, seed: Sequence[int], tokens: int) -> tuple[float, int]:
    """Seconds to the first token of a prompt, and how many of its tokens were cached. Raises RuntimeError."""
    body = client.request_body(client.prompt(tuple(seed), tokens), 4, stream=True)
    first_s, cached, began = None, 0, time.monotonic()
    async with client.session() as http, http.post(run.url + client.COMPLETIONS, json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"] and first_s is None:
                    first_s = time.monotonic() - began
                details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                cached = details.get("cached_tokens") or cached
    if first_s is None:
        raise RuntimeError(f"no first token of a prompt of {tokens} tokens: status {response.status}")
    return first_s, cached


async def _fill(run: LaunchedEngine, seed: tuple[int, int], tokens: int, count: int) -> None:
    for number in range(count):
        await _ttft(run, (*seed, number + 1), tokens)


def sleep(session: Session, run: LaunchedEngine) -> None:
    """Level 1, three times; in the last, longer than the launcher waits for progress."""
    asyncio.run(_ttft(run, (1, 1), 500))
    for number, asleep_s in enumerate((1.0, 1.0, _ASLEEP_S)):
        awake_mib, began = machine.used_mib(), time.monotonic()
        status, text = _post(run, "/sleep?level=1")
        if not session.results.check(f"sleep {number}: accepted", status == 200, status=status, text=text[:200]):
            return
        sleep_s, asleep_mib = time.monotonic() - began, machine.used_mib()
        probes = []
        while time.monotonic() - began < asleep_s and run.process.poll() is None:
            probes.append((run.get("/readyz")[0], run.get("/livez")[0]))
            time.sleep(0.5)
        alive = run.process.poll() is None
        figures = {"ready": sorted({ready for ready, _ in probes}), "live": sorted({live for _, live in probes})}
        session.results.check(f"sleep {number}: the launcher lets a sleeping engine live", alive, **figures,
                              seconds=round(time.monotonic() - began, 1))  # fmt: skip
        if not alive:
            return
        began = time.monotonic()
        status, text = _post(run, "/wake_up")
        wake_s = time.monotonic() - began
        ttft_s, _ = asyncio.run(_ttft(run, (2, number), 500))
        session.results.check(
            f"sleep {number}: wakes and answers", status == 200, sleep_s=round(sleep_s, 3), wake_s=round(wake_s, 3),
            first_token_s=round(ttft_s, 4), awake_mib=awake_mib, asleep_mib=asleep_mib,
            woken_mib=machine.used_mib(), ready=run.get("/readyz")[0],
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments("bench.gpu_engine.caches")
    parser.add_argument("--only", default="prefix,memory")
    parser.add_argument("--seconds", type=float, default=70.0, help="of the trace")
    parser.add_argument("--rate", type=float, default=2.2, help="sessions/s")
    given = parser.parse_args(argv)
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines that run are killed on the way out
    session = Session(out, "8b", given.runtime, (*_SHARED_ARGS, *given.arg))
    session.results.note("versions", machine.versions())
    stages = {"prefix": lambda: prefix(session, given.seconds, given.rate), "memory": lambda: memory(session)}
    for name in given.only.split(","):
        try:
            stages[name]()
        except Exception as error:  # noqa: BLE001  the next engines are still worth their time
            session.results.check(f"{name}: completed", False, error=f"{type(error).__name__}: {error}"[:500])
    print(json.dumps({name: session.results.document()[name] for name in ("passed", "failed")}))
    return 1 if session.results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
