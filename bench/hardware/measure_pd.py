"""Two GPUs: the image's prefill and decode engines against two aggregated engines, with the same arrivals.

    python -m bench.hardware.measure_pd --out DIR --run agg:FILE --run pd:FILE --run pd:FILE:2048 ...

Problem: whether remote prefill pays off depends on links, block sizes and load, and each layer can spoil it: the
launcher's flags, the middleware's remote prefill, NIXL, the driver.

Idea: all four engines at once, two on each GPU, started by the launcher as by the operator (blocks of 128 tokens on
prefill and decode engines). Clients send to the decode engine with the header that the gateway sets, or in turn to the
two others. In `pd:FILE:2048` only prompts of at least 2,048 tokens are prefilled remotely. With `--alone` only the two
engines of a run are there, each with the whole GPU's cache: those of the first run, then, when the next run needs
others, those. `agg:FILE:1024` then gives the two a budget of 1,024 tokens per step.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, dummy_models, engine
from bench.hardware.measure import MeasurementRecord, arguments, recording, wait_idle

_GIB: Final = 1 << 30
_KV_BYTES: Final = 40 * _GIB  # of each engine: two share a GPU
_ARGS: Final = ("--load-format", "dummy", "--max-model-len", "40960")
_STEP_BUDGET_TOKENS: Final = 8192
_READY_S: Final = 300.0
_PROMPT_LENGTHS: Final = (128, 512, 1024, 2048, 4096, 8192, 16384)
_REPEATS: Final = 4
# name: GPU order (its own first, both visible, so that memory can be reached over NVLink), role, first port
_ENGINES: Final = {
    "p": ("0,1", "prefill", 8000),
    "d": ("1,0", "decode", 8010),
    "a0": ("0,1", "serve", 8020),
    "a1": ("1,0", "serve", 8030),
}
_ENGINES_OF_MODE: Final = {"agg": ("a0", "a1"), "pd": ("p", "d")}


@dataclass(frozen=True)
class PairRun:
    """One run. tokens: of a pair, those from which a prompt is read on the prefill engine; of two that do both, of a
    step."""

    number: int
    mode: str
    trace: Path
    tokens: int | None

    @classmethod
    def parse(cls, number: int, word: str) -> PairRun:
        mode, file, *remote_tokens = word.split(":")
        return cls(number, mode, Path(file), int(remote_tokens[0]) if remote_tokens else None)

    @property
    def budget(self) -> int:
        """Tokens of a step that its engines are started with."""
        return _STEP_BUDGET_TOKENS if self.mode == "pd" or self.tokens is None else self.tokens

    @property
    def remote_from(self) -> int:
        """Tokens from which a pair's prompts are read elsewhere."""
        return self.tokens or 0 if self.mode == "pd" else 0

    @property
    def name(self) -> str:
        return f"{self.number:02d}.{self.mode}.{self.trace.stem}{f'.{self.tokens}' if self.tokens else ''}"


def start_engines(
    engines: dict[str, engine.LaunchedEngine], names: Sequence[str], budget: int, out: Path, given: argparse.Namespace
) -> None:
    """Adds each engine as it is started, so that those which were can be ended whatever comes."""
    model = dummy_models.write_model(out / "models", "8b")
    shared = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(_KV_BYTES))
    engine_args = (*_ARGS, "--max-num-batched-tokens", str(budget), *(() if given.alone else shared))
    for name in names:
        gpus, role, port = _ENGINES[name]
        engines[name] = engine.launch(
            name if budget == _STEP_BUDGET_TOKENS else f"{name}.{budget}",
            model,
            out,
            role=role,
            api=given.port + port - 8000,
            gpus=gpus,
            args=(*engine_args, *given.arg),
            default_args=() if role == "serve" else ("--block-size", "128"),
            runtime=given.runtime,
        )


async def unloaded_ttft(engines: dict[str, engine.LaunchedEngine]) -> list[dict[str, Any]]:
    """Seconds to the first token of single prompts: read where they are decoded, elsewhere, and by a serving engine."""
    routes: dict[str, tuple[str, dict[str, str]]] = {}
    if "a1" in engines:
        routes["serve"] = (engines["a1"].url, {})
    if "d" in engines:
        routes["local"] = (engines["d"].url, {})
        routes["remote"] = (engines["d"].url, {client.PREFILL: f"127.0.0.1:{engines['p'].api}"})
    rows = []
    async with client.session() as http:
        for tokens in _PROMPT_LENGTHS:
            row: dict[str, Any] = {"prompt": tokens}
            for number, (route, (url, headers)) in enumerate(routes.items()):
                times = []
                for repeat in range(_REPEATS):
                    body = client.request_body(client.prompt((5, tokens, number, repeat), tokens), 4, stream=True)
                    times.append((await client.send_streamed(http, url, body, headers))["first_s"])
                results = sorted(
                    result for result in times[1:] if result is not None
                )  # the first has a connection to make
                row[f"{route}_ttft_s"] = results[len(results) // 2] if results else None
            rows.append(row)
    return rows


def replay_load(
    record: MeasurementRecord, engines: dict[str, engine.LaunchedEngine], load: PairRun, workers: int, out: Path
) -> None:
    engine_pair = load.mode == "pd"
    rows_by_run = out / f"{load.name}.requests.json"
    url = ",".join(engines[name].url for name in (("d",) if engine_pair else _ENGINES_OF_MODE["agg"]))
    rows = client.run(
        load.trace,
        url,
        rows_by_run,
        workers=workers,
        seed=500 + load.number,
        prefill=f"127.0.0.1:{engines['p'].api}" if engine_pair else "",
        remote_from=load.remote_from,
    )
    histogram: dict[str, Any] = {"requests": len(rows), "ok": sum(row["ok"] for row in rows)}
    if "d" in engines:
        (out / f"{rows_by_run.stem}.d.metrics.txt").write_text(engines["d"].metrics())
        histogram["remote_prefills"] = [line for line in engines["d"].own_metrics() if "prefill_legs_total" in line]
    record.save(f"load {rows_by_run.stem}", histogram)
    for row_dict in engines.values():
        wait_idle(row_dict)


def run_group(
    record: MeasurementRecord, loads: Sequence[PairRun], names: Sequence[str], out: Path, given: argparse.Namespace
) -> bool:
    """Runs of which all need the same engines, from their start to their end; False where one did not become ready."""
    engines: dict[str, engine.LaunchedEngine] = {}
    group_name = f" of {loads[0].name}" if given.alone else ""
    try:
        start_engines(engines, names, loads[0].budget, out, given)
        ready = {name: run_load.wait_ready(_READY_S) for name, run_load in engines.items()}
        for name, run_load in engines.items():
            run_load.poll()
            results = {
                "command": engine.command_line(out, run_load.name),
                "timeline": run_load.timeline,
                "about": run_load.last_documents,
            }
            record.save(f"{name}{group_name}", results)
        if not all(ready.values()):
            for name in (name for name, engines_up in ready.items() if not engines_up):
                print((out / f"{engines[name].name}.log").read_text(errors="replace")[-3000:])
            return False
        record.save(f"alone{group_name}", asyncio.run(unloaded_ttft(engines)))
        for load in loads:
            replay_load(record, engines, load, given.workers, out)
        for run_load in engines.values():
            (out / f"{run_load.name}.metrics.txt").write_text(run_load.metrics())
        if "d" in engines:
            record.save("drain of the decode engine", asyncio.run(engine.check_drain(engines["d"])))
        return True
    finally:
        for run_load in engines.values():
            run_load.kill()


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("bench.hardware.measure_pd")
    parser.add_argument("--run", action="append", default=[], metavar="agg|pd:TRACE[:TOKENS]")
    parser.add_argument("--alone", action="store_true", help="each engine alone on its card, with all of its cache")
    parser.add_argument("--port", type=int, default=8000, help="the first of forty")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    loads = [PairRun.parse(number, run_word) for number, run_word in enumerate(given.run)]
    with recording(out) as record:
        if not given.alone:
            return 0 if run_group(record, loads, tuple(_ENGINES), out, given) else 1
        for (mode, _), group in groupby(loads, key=lambda one: (one.mode, one.budget)):
            if not run_group(record, list(group), _ENGINES_OF_MODE[mode], out, given):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
