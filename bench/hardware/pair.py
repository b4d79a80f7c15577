"""Two GPUs: the image's prefill and decode engines against two engines that do both, with the same arrivals.

    python -m bench.hardware.pair --out DIR --run agg:FILE --run pd:FILE --run pd:FILE:2048 ...

Problem: whether reading prompts elsewhere pays depends on links, block sizes and load, and each layer on the way can
spoil it: the launcher's flags, the middleware's leg, NIXL, the driver.
Idea: all four engines at once, two on each GPU, started by the launcher as the operator would (blocks of 128 tokens on
prefill and decode engines). Clients send to the decode engine with the header that the gateway sets, or in turn to the
two others. `pd:FILE:2048` has only prompts of at least 2,048 tokens read on the prefill engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, engine, shapes
from bench.hardware.measure import PLUGIN, Record, monitor, settle

_GIB: Final = 1 << 30
_KV_BYTES: Final = 40 * _GIB  # of each engine: two share a GPU
_ARGS: Final = ("--load-format", "dummy", "--max-model-len", "40960", "--max-num-batched-tokens", "8192")
_READY_S: Final = 300.0
_LENGTHS: Final = (128, 512, 1024, 2048, 4096, 8192, 16384)
_REPEATS: Final = 4
# name: GPU order (its own first, both visible, so that memory can be reached over NVLink), role, first port
_ENGINES: Final = {
    "p": ("0,1", "prefill", 8000),
    "d": ("1,0", "decode", 8010),
    "a0": ("0,1", "serve", 8020),
    "a1": ("1,0", "serve", 8030),
}


def start(engines: dict[str, engine.Engine], out: Path, given: argparse.Namespace) -> None:
    """Adds each engine as it is started, so that those which were can be ended whatever comes."""
    model = shapes.write(out / "models", "8b")
    environment = {"PLIMSOLL_RUNTIME": given.runtime, "STEPLOG_WEIGHTS": "1"}
    environment["PYTHONPATH"] = ":".join([str(engine.IMAGE), str(PLUGIN), os.environ.get("PYTHONPATH", "")])
    cache = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(_KV_BYTES))
    for name, (gpus, role, port) in _ENGINES.items():
        engines[name] = engine.start(
            name,
            model,
            out,
            role=role,
            api=given.port + port - 8000,
            gpus=gpus,
            args=(*_ARGS, *cache, *given.arg),
            default_args=() if role == "serve" else ("--block-size", "128"),
            environment=environment,
        )


async def alone(engines: dict[str, engine.Engine]) -> list[dict[str, Any]]:
    """Seconds to the first token of single prompts: read where they are decoded, elsewhere, and by a serving engine."""
    leg = {client.PREFILL: f"127.0.0.1:{engines['p'].api}"}
    ways: dict[str, tuple[str, dict[str, str]]] = {
        "serve": (engines["a1"].url, {}),
        "local": (engines["d"].url, {}),
        "remote": (engines["d"].url, leg),
    }
    rows = []
    async with client.session() as http:
        for tokens in _LENGTHS:
            row: dict[str, Any] = {"prompt": tokens}
            for number, (way, (url, headers)) in enumerate(ways.items()):
                times = []
                for repeat in range(_REPEATS):
                    asked = client.body(client.prompt((5, tokens, number, repeat), tokens), 4, stream=True)
                    times.append((await client.streamed(http, url, asked, headers))["first_s"])
                kept = sorted(one for one in times[1:] if one is not None)  # the first has a connection to make
                row[f"{way}_ttft_s"] = kept[len(kept) // 2] if kept else None
            rows.append(row)
    return rows


def loads(record: Record, engines: dict[str, engine.Engine], given: argparse.Namespace, out: Path) -> None:
    for number, word in enumerate(given.run):
        mode, file, *rest = word.split(":")
        told = out / f"{number}.{mode}.{Path(file).stem}{'.' + rest[0] if rest else ''}.requests.json"
        url = engines["d"].url if mode == "pd" else f"{engines['a0'].url},{engines['a1'].url}"
        leg = f"127.0.0.1:{engines['p'].api}" if mode == "pd" else ""
        least = int(rest[0]) if rest else 0
        rows = client.run(
            Path(file), url, told, workers=given.workers, seed=500 + number, prefill=leg, remote_from=least
        )
        (out / f"{told.stem}.d.metrics.txt").write_text(engines["d"].metrics())
        legs = [line for line in engines["d"].own_metrics() if "prefill_legs_total" in line]
        record.keep(f"load {told.stem}", {"requests": len(rows), "ok": sum(row["ok"] for row in rows), "legs": legs})
        for one in engines.values():
            settle(one)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.pair", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--run", action="append", default=[], metavar="agg|pd:TRACE[:TOKENS]")
    parser.add_argument("--arg", action="append", default=[], help="of vLLM, beside the usual ones")
    parser.add_argument("--runtime", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--port", type=int, default=8000, help="the first of forty")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    record, watcher = Record(out / "result.json"), monitor(out)
    engines: dict[str, engine.Engine] = {}
    try:
        start(engines, out, given)
        ready = {name: one.wait_ready(_READY_S) for name, one in engines.items()}
        for name, one in engines.items():
            one.look()
            record.keep(name, {"command": engine.command_line(out, name), "timeline": one.timeline, "about": one.said})
        if not all(ready.values()):
            for name in (name for name, up in ready.items() if not up):
                print((out / f"{name}.log").read_text(errors="replace")[-3000:])
            return 1
        record.keep("alone", asyncio.run(alone(engines)))
        loads(record, engines, given, out)
        for name, one in engines.items():
            (out / f"{name}.metrics.txt").write_text(one.metrics())
        record.keep("drain of the decode engine", asyncio.run(engine.drain(engines["d"])))
        return 0
    finally:
        for one in engines.values():
            one.kill()
        if watcher is not None:
            watcher.terminate()


if __name__ == "__main__":
    sys.exit(main())
