"""Plimsoll on real GPUs, in steps, as README.md shows them: `python -m e2e.gpu VERB`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from e2e.gpu import bringup, caches, detached, parts, processes
from e2e.gpu import run as measure
from e2e.gpu.processes import StepFailed, log_line
from e2e.gpu.scenarios import SCENARIOS

_GOES_ON: Final = 3  # exit status


def main(words: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m e2e.gpu", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare", help="here: collect everything and cut it into folders that calls carry")
    prepare.add_argument("target", type=Path)
    prepare.add_argument("--work", type=Path, required=True, help="a folder for what is built")
    prepare.add_argument("--site", type=Path, help="an unpacked vLLM with what it needs; without it, to rehearse")
    verbs.add_parser("chart", help="here: the chart's objects, which `prepare` also lays into the last folder")
    predict = verbs.add_parser("predict", help="anywhere, before: what the plan and the simulator say of each scenario")
    predict.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    predict.add_argument("--hardware", required=True, help="a profile of `plimsoll simulate`")
    predict.add_argument("--start-up", default="uniform:80,110", help="as `plimsoll simulate` takes it")
    predict.add_argument("--capacity", type=float, help="requests/s that the loads are multiples of, if another")
    predict.add_argument("--after", choices=sorted(SCENARIOS), help="whose load the service has had before")
    predict.add_argument("--shorten", type=float, default=1.0, help="factor of all times")
    predict.add_argument("--out", type=Path, required=True)
    receive = verbs.add_parser("receive", help="there: keep the pieces of one folder, unpack what is whole")
    receive.add_argument("folder", type=Path)
    fill = verbs.add_parser(
        "fill-caches", help="there, meanwhile: an engine outside the cluster compiles what pods need"
    )
    fill.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS), help="whose engines' arguments are compiled")
    fill.add_argument("--model", default="8b", help="a shape of bench.hardware.dummy_models")
    up = verbs.add_parser("up", help="there: the node, the images, the chart")
    up.add_argument("--model", default="8b", help="a shape of bench.hardware.dummy_models")
    up.add_argument("--simulated", default="", help="arguments of the simulated engine in vLLM's place")
    up.add_argument("--fake-gpus", type=int, default=0, help="devices that do not exist")
    run = verbs.add_parser("run", help="there: one scenario or several, one after another")
    run.add_argument("scenarios", nargs="+", choices=sorted(SCENARIOS))
    where = run.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="a folder for the results")
    where.add_argument("--detached", action="store_true", help="go on after this command ends; `wait` has the results")
    run.add_argument("--capacity", type=float, required=True, help="requests/s of one engine, as `plimsoll plan` says")
    run.add_argument("--simulated", action="store_true", help="the engines are simulated")
    run.add_argument("--workers", type=int, default=8, help="processes of the load")
    run.add_argument("--shorten", type=float, default=1.0, help="factor of all times, to rehearse")
    wait = verbs.add_parser("wait", help="there: until a scenario of the detached run is over; 3 while the run goes on")
    wait.add_argument("--out", type=Path, required=True, help="where results of scenarios that are over are copied")
    wait.add_argument("--seconds", type=float, default=540.0, help="at most")
    collect = verbs.add_parser("collect", help="there: state and logs, such as after a step that failed")
    collect.add_argument("--out", type=Path, required=True)
    verbs.add_parser("down", help="there: end everything that was started")
    given = parser.parse_args(words)
    try:
        return _carry_out(given)
    except StepFailed as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1


def _carry_out(given: argparse.Namespace) -> int:
    match given.verb:
        case "prepare":
            from e2e.gpu.prepare import prepare  # needs Docker's modules, which the machine has no use for

            prepare(given.target.resolve(), given.work.resolve(), given.site)
        case "chart":
            from e2e.gpu.prepare import render_chart

            print(render_chart())
        case "predict":
            from e2e.gpu.predict import predict  # needs the packages of the CLI

            loads = {"load": given.capacity, "after": given.after, "shorten": given.shorten}
            predict(given.scenarios, given.hardware, given.start_up, given.out, **loads)
        case "receive":
            log_line(f"received {given.folder}: {parts.receive(given.folder)}")
        case "fill-caches":
            caches.begin(given.model, given.scenarios)
        case "up":
            bringup.up(given.model, given.simulated, given.fake_gpus)
        case "run" | "wait":
            return _run_or_wait(given)
        case "collect":
            measure.collect(given.out)
        case "down":
            processes.stop_all()
    return 0


def _run_or_wait(given: argparse.Namespace) -> int:
    if given.verb == "wait":
        return 0 if detached.follow(given.out, given.seconds) else _GOES_ON
    if given.detached:
        words = ["--capacity", str(given.capacity), "--workers", str(given.workers), "--shorten", str(given.shorten)]
        detached.begin([*given.scenarios, *words, *(["--simulated"] if given.simulated else [])])
        return 0
    for name in given.scenarios:
        measure.run(
            name,
            given.out,
            given.capacity,
            simulated=given.simulated,
            workers=given.workers,
            shorten=given.shorten,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
