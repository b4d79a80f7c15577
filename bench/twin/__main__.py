"""`python -m bench.twin --vllm VENV/bin/vllm --out DIR`: a twin under load, and the simulator on the same arrivals.

Open-loop Poisson arrivals with the lengths of a chat (`bench.hardware.traces`) at each rate in turn. All seconds are
the accelerator's; on the clock everything takes `--scale` times as long, so that two cores can serve a fast card.
Requests go to 127.0.0.1 only. DIR gets the record in the form of bench/trust/data, which is compared at once.

VENV is an environment with vLLM for the CPU (engine-image/cpu.lock); it needs nothing of this project.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, dummy_models, traces
from bench.trust import twin
from bench.trust.check import shown
from bench.twin import twin_load, vllm_server
from plimsoll.sim import profile, profiles

_SHAPE: Final = "8b"
_MAX_REQUESTS: Final = 3000
_MAX_CLOCK_S: Final = 900.0  # of one rate, the last answers included
_REST_S: Final = 5.0  # of the accelerator before each load: its card cools down, as it is when a simulation begins


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m bench.twin", description=__doc__)
    options.add_argument("--vllm", type=Path, required=True, help="the command of an environment with vLLM")
    options.add_argument("--out", type=Path, required=True, metavar="DIR")
    options.add_argument("--profile", default="h200-8b", help="a built-in name")
    options.add_argument("--rates", type=float, nargs="+", default=[18.0, 22.0, 26.0], help="requests a second")
    options.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    options.add_argument(
        "--drain", type=float, default=8.0, help="seconds that answers may take after the last arrival"
    )
    options.add_argument("--scale", type=float, default=8.0, help="seconds of the clock for one of the accelerator")
    options.add_argument("--seed", type=int, default=1)
    return options


def check_bounds(given: argparse.Namespace) -> None:
    """Raises ValueError for a load beyond what this is meant for."""
    if max(given.rates) * given.seconds > _MAX_REQUESTS:
        raise ValueError(f"more than {_MAX_REQUESTS} requests at one rate")
    if (given.seconds + given.drain) * given.scale > _MAX_CLOCK_S:
        raise ValueError(f"more than {_MAX_CLOCK_S:g} s on the clock at one rate")


def main(server_arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(server_arguments)
    check_bounds(given)
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    port, hardware_profile = vllm_server.free_port(), profile.load(given.profile)
    model = dummy_models.write_model(given.out / "models", _SHAPE)
    arguments = vllm_server.arguments(model, hardware_profile, given.profile, given.scale, port)
    document: dict[str, Any] = {
        "made": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "time_scale": given.scale,
        "arguments": ["PORT" if word == str(port) else word.replace(str(given.out), "OUT") for word in arguments],
        "profile": json.loads((profiles.PROFILE_FOLDER / f"{given.profile}.json").read_text()),
        "runs": [],
    }
    lines: list[tuple[str | int, ...]] = []
    with vllm_server.running(given.vllm, arguments, port, given.out / "vllm.log") as url:
        document["vllm"] = vllm_server.version(url)
        frontend_s, frontend_token_s = asyncio.run(twin_load.frontend_overhead(url, hardware_profile, given.scale))
        document |= {"frontend_s": round(frontend_s, 6), "frontend_token_s": round(frontend_token_s, 9)}
        for number, rate in enumerate(given.rates):
            run, run_rows = _measure_rate(given, url, rate, given.seed + number)
            document["runs"].append(run)
            lines += run_rows
            (given.out / twin.RUNS_FILE).write_text(json.dumps(document, indent=1) + "\n")
            twin_load.write(given.out / twin.REQUESTS_FILE, lines)
    runs = twin.checks(twin.read_runs(given.out))
    print("\n".join(shown(runs)))
    return 0 if all(run_found.holds for run_found in runs) else 1


def _measure_rate(
    given: argparse.Namespace, url: str, rate: float, seed: int
) -> tuple[dict[str, Any], list[tuple[str | int, ...]]]:
    """One rate, on a card that has rested: what is told of the run, and its requests."""
    name, scale = f"{rate:g}/s", given.scale
    time.sleep(_REST_S * scale)
    trace = given.out / "trace.csv"
    planned = traces.poisson(rate, given.seconds, seed)
    traces.write(trace, [replace(request, at_s=request.at_s * scale) for request in planned])
    run_document = given.out / "requests.json"
    rows = client.run(trace, url, run_document, workers=1, seed=seed, drain_s=given.drain * scale)
    run = {
        "name": name,
        "asked_per_s": rate,
        "seed": seed,
        "patience_s": given.drain,
        "latest_s": round(max(row["late_s"] for row in rows) / scale, 5),
        "load_average": round(os.getloadavg()[0], 1),
    }
    return run, twin_load.record_lines(name, rows, scale)


if __name__ == "__main__":
    sys.exit(main())
