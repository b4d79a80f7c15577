"""One engine on one GPU: its start, its steps, the load of the prediction, and its end.

    python -m bench.hardware.measure 8b --prediction DIR --out DIR [--arg=--flag ...]

Needs an interpreter with vLLM, and `vllm` on the PATH. `result.json` is rewritten after each stage, so that an
interrupted run keeps its results. A rehearsal without a GPU: `--runtime simulated --arg=--profile --arg=h200-8b`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, dummy_models, engine, step_probes

NVIDIA_SMI_FIELDS: Final = "timestamp,index,clocks.sm,power.draw,utilization.gpu,memory.used,temperature.gpu"
_ARGS: Final = ("--load-format", "dummy", "--max-model-len", "40960", "--max-num-seqs", "256")
_TOKEN_BUDGET_ARGS: Final = ("--max-num-batched-tokens", "8192")
_READY_S: Final = 400.0
_SETTLE_S: Final = 15.0


class MeasurementRecord:
    """What was found so far, on disk after each stage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: dict[str, Any] = {}
        self.began = time.monotonic()

    def save(self, stage: str, value: Any) -> None:
        self.found[stage] = value
        self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"[{time.monotonic() - self.began:6.1f}] {stage}", flush=True)


def arguments(module: str) -> argparse.ArgumentParser:
    """What every measurement of engines is asked."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--arg", action="append", default=[], help="of vLLM, beside the usual ones")
    parser.add_argument("--runtime", choices=("vllm", "simulated"), default="vllm")
    parser.add_argument("--workers", type=int, default=6)
    return parser


@contextlib.contextmanager
def recording(out: Path) -> Iterator[MeasurementRecord]:
    """The record of a measurement, in a folder that is made, with the cards' clocks beside it.

    SIGTERM ends the block as an exception would.
    """
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    watcher = _monitor(out)
    try:
        yield MeasurementRecord(out / "result.json")
    finally:
        if watcher is not None:
            watcher.terminate()


def _monitor(out: Path) -> subprocess.Popen[bytes] | None:
    """nvidia-smi's clocks and power once a second; None where there is none. Its file begins with both clocks."""
    (out / "clock.json").write_text(json.dumps({"wall_s": time.time(), "monotonic_s": time.monotonic()}))
    try:
        return subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,nounits", "-lms", "1000"],
            stdout=(out / "gpu.csv").open("wb"),
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


@contextlib.contextmanager
def running_engine(
    record: MeasurementRecord, out: Path, arguments_given: argparse.Namespace, api: int, args: Sequence[str]
) -> Iterator[engine.LaunchedEngine | None]:
    """One engine of `given.model` until the block ends; None where it did not become ready."""
    model = dummy_models.write_model(out / "models", arguments_given.model)
    engine_run = engine.launch(
        "engine", model, out, api=api, args=(*args, *arguments_given.arg), runtime=arguments_given.runtime
    )
    try:
        if _record_startup(record, engine_run, out):
            yield engine_run
        else:
            print((out / "engine.log").read_text(errors="replace")[-4000:])
            yield None
    finally:
        engine_run.kill()


def wait_idle(engine_run: engine.LaunchedEngine) -> None:
    """Waits until no request is left, at most some seconds."""
    end = time.monotonic() + _SETTLE_S
    while time.monotonic() < end:
        lines = [line for line in engine_run.metrics().splitlines() if line.startswith("vllm:num_requests_running")]
        if lines and all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines):
            return
        time.sleep(0.3)


def _record_startup(record: MeasurementRecord, engine_run: engine.LaunchedEngine, out: Path) -> bool:
    """The start: its phases as they came, what the engine says of itself, its command line."""
    ready = engine_run.wait_ready(_READY_S)
    record.save("command", engine.command_line(out, engine_run.name))
    record.save("timeline", engine_run.timeline)
    record.save("about", engine_run.last_documents)
    if ready:
        record.save("own_metrics", engine_run.own_metrics())
    return ready


def replay_loads(
    record: MeasurementRecord, engine_run: engine.LaunchedEngine, given: argparse.Namespace, out: Path
) -> None:
    """Each predicted trace, open loop, one after another."""
    prediction = json.loads((given.prediction / "prediction.json").read_text())
    record.save("prediction", {"traces": prediction["traces"]})
    for number, name in enumerate(sorted(prediction["traces"])):
        path, predicted = given.prediction / name, out / f"{Path(name).stem}.requests.json"
        rows = client.run(path, engine_run.url, predicted, workers=given.workers, seed=100 + number)
        lateness = max((row["late_s"] for row in rows), default=0.0)
        record.save(
            f"load {name}",
            {"requests": len(rows), "ok": sum(row["ok"] for row in rows), "latest_s": round(lateness, 4)},
        )
        wait_idle(engine_run)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("bench.hardware.measure")
    parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    parser.add_argument("--prediction", type=Path, required=True, metavar="DIR")
    parser.add_argument("--api", type=int, default=8000, help="port; the launcher's is the next")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    with (
        recording(out) as record,
        running_engine(record, out, given, given.api, (*_ARGS, *_TOKEN_BUDGET_ARGS)) as engine_run,
    ):
        if engine_run is None:
            return 1
        record.save("alone", asyncio.run(step_probes.probe_prompts(engine_run.url, 40_000)))
        record.save("batches", asyncio.run(step_probes.probe_batches(engine_run.url)))
        replay_loads(record, engine_run, given, out)
        (out / "metrics.txt").write_text(engine_run.metrics())
        record.save("drain", asyncio.run(engine.check_drain(engine_run)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
