"""What the project's own simulator says of a gate before a real engine, written before it runs.

    python -m bench.hardware.gate.predict 8b --out DIR [--gpu H100-SXM] [--profile FILE]

Problem: "goodput stays at the load line" is easily found in a measurement that is known.
Idea: DIR gets the traces, at factors of the load line that the core computes from the data sheet, and
`prediction.json`: of every run what `plimsoll simulate` says, from the data sheet alone and from a profile that was
measured before. The gate is the operator's core with a gateway's; through the gated runs of a call one operator learns,
from the ladder on, as in the measurement. Constant caps are searched on a grid, each with the follower's patience;
three go into the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from bench.hardware import predict, shapes, traces
from bench.hardware.gate.runs import CAP, GATE, NONE, One, Run, call, judged, slo_to
from bench.hardware.summary import Seen
from plimsoll.cli.main import main as plimsoll
from plimsoll.core import knee, load_line
from plimsoll.core.latency import EngineLimits, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

SLO: Final = Slo(0.95, ttft_s=1.0, tpot_s=0.05)
WARM_S, WINDOW_S = 6.0, 40.0
REST_S: Final = 20.0  # between two runs of a call, in the simulation
CAPS: Final = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240)
OVERLOAD: Final = 2.0  # at which caps are compared
FACTORS: Final = (1.0, 1.3, 2.0, 2.6)
NAME: Final = "m"  # of the service and its model
_SAMPLES: Final = 20_000


def calls(caps: Sequence[int]) -> dict[str, list[str]]:
    """The words of each call, those that matter least last, since a call may be cut short; `c` is a repetition, and `d`
    has the gate and two caps twice on one engine."""
    low, best, high = (f"cap{cap}@{OVERLOAD:g}" for cap in caps)
    return {
        "a": [*(f"gate@{factor:g}" for factor in FACTORS), best, f"none@{OVERLOAD:g}"],
        "b": [low, high, "none@1.3", "none@1", "none@2.6"],
        "c": ["gate@1", f"gate@{OVERLOAD:g}", best],
        "d": ["gate@1", *[f"gate@{OVERLOAD:g}"] * 2, low, best, low, best],
    }


def line_rps(model: StepModel, kv_tokens: int, slo: Slo) -> float:
    """The highest rate that the core says keeps the promise without admission."""
    prompt, output = traces.lengths(np.random.default_rng(0), _SAMPLES)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    limits = EngineLimits(predict.SEQUENCES, kv_tokens, predict.BUDGET)
    return float(
        load_line.slo_rate(knee.profile(knee.Tier(Role.SERVE, model, workload, limits, slo)), 1, admission=False)[0]
    )


def alone_s(law: StepModel, prompt: int) -> float:
    """From a request's arrival at an idle engine to its first token."""
    chunks = -(-prompt // predict.BUDGET)
    steps_s = chunks * (law.base_s + law.any_prefill_s)
    read_s = prompt * (law.prefill_token_s + law.prefill_pair_s * prompt / 2)
    return knee.HTTP_S + knee.HTTP_TOKEN_S * prompt + steps_s + read_s


def service(slo: Slo) -> dict[str, Any]:
    """The manifest of one engine that is always there and promises this."""
    ttft, tpot = (f"{round(1000 * (value or 0.0))}ms" for value in (slo.ttft_s, slo.tpot_s))
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "hf://org/model", "name": NAME},
            "slo": {"percentile": round(100 * slo.share), "ttft": ttft, "tpot": tpot},
            "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 1}},
        },
    }


def simulated(
    plant: dict[str, Any],
    config: dict[str, Any],
    requests: list[traces.Request],
    policy: str,
    work: Path,
    sequences: int = predict.SEQUENCES,
) -> list[One]:
    """What `plimsoll simulate` says of each request: one replica, one gateway, no spread, no noise, no retries."""
    limits = {"max_num_seqs": sequences, "budget": predict.BUDGET, "block_size": predict.BLOCK}
    (work / "plant.json").write_text(json.dumps(plant | limits))
    (work / "config.json").write_text(json.dumps(config))
    (work / "service.yaml").write_text(yaml.safe_dump(service(SLO)))
    traces.write(work / "sent.csv", requests)
    told = work / "requests.jsonl"
    command = [
        "simulate",
        "--output",
        "json",
        "--trace",
        str(work / "sent.csv"),
        "--policy",
        policy,
        "--clients",
        "none",
    ]
    command += ["--service", str(work / "service.yaml"), "--hardware", str(work / "plant.json"), "--initial", "1"]
    command += ["--model-config", str(work / "config.json"), "--spread", "0", "--noise", "0", "--gateways", "1"]
    with contextlib.redirect_stdout(io.StringIO()):
        if plimsoll([*command, "--requests-out", str(told)]):
            raise SystemExit("plimsoll simulate failed")
    first_s = requests[0].at_s  # the simulator counts from its first request on
    return [_one(json.loads(line), first_s) for line in told.read_text().splitlines()]


def _one(row: dict[str, Any], first_s: float) -> One:
    ok = row["outcome"] == "ok"
    seen = Seen(row["sent_s"] + first_s, row["output_tokens_asked"], row["ttft_s"], row["tpot_s"], None, ok)
    return One(seen, row["outcome"] == "shed")


def policy(run: Run) -> str:
    """The simulator's word for an arm."""
    return {GATE: "static:1,gated=1", NONE: "static:1", CAP: f"follower:cap={run.cap}"}[run.arm]


def gated(
    plant: dict[str, Any],
    config: dict[str, Any],
    runs: Sequence[list[traces.Request]],
    work: Path,
    lasts_s: float = WARM_S + WINDOW_S,
    sequences: int = predict.SEQUENCES,
) -> list[list[One]]:
    """Runs with the gate one after another, under one operator."""
    slot_s = lasts_s + REST_S
    sent = [replace(one, at_s=one.at_s + number * slot_s) for number, run in enumerate(runs) for one in run]
    found: list[list[One]] = [[] for _ in runs]
    for one in simulated(plant, config, sent, "static:1,gated=1", work, sequences):
        number = int(one.seen.sent_s // slot_s)
        found[number].append(replace(one, seen=replace(one.seen, sent_s=one.seen.sent_s - number * slot_s)))
    return found


def said(plant: dict[str, Any], config: dict[str, Any], words: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """The figures of a call's runs."""
    runs = call(words)
    sent = [traces.read(out / run.trace) for run in runs]
    first = sum(run.arm == GATE for run in runs)
    ones = gated(plant, config, sent[:first], out) if first else []
    ones += [
        simulated(plant, config, mine, policy(run), out) for run, mine in zip(runs[first:], sent[first:], strict=True)
    ]
    return [{"run": run.word, **judged(mine, SLO, WARM_S, WINDOW_S)} for run, mine in zip(runs, ones, strict=True)]


def swept(
    plant: dict[str, Any], config: dict[str, Any], sent: list[traces.Request], out: Path
) -> dict[int, dict[str, Any]]:
    """The figures of each cap of the grid."""
    return {
        cap: judged(simulated(plant, config, sent, f"follower:cap={cap}", out), SLO, WARM_S, WINDOW_S) for cap in CAPS
    }


def chosen(grid: dict[int, dict[str, Any]]) -> tuple[int, int, int]:
    """The cap with the most goodput, and the next but one on either side, as far as the grid goes."""
    caps = sorted(grid)
    best = max(range(len(caps)), key=lambda place: grid[caps[place]]["goodput_rps"])
    best = min(max(best, 2), len(caps) - 3)
    return caps[best - 2], caps[best], caps[best + 2]


def drawn(
    line: float, factor: float, seed: int, warm_s: float = WARM_S, window_s: float = WINDOW_S
) -> list[traces.Request]:
    """A run's requests: a warm-up, then the window, each with as many arrivals as its rate says."""
    rate = factor * line
    later = [replace(one, at_s=one.at_s + warm_s) for one in traces.poisson(rate, window_s, seed + 1)]
    return traces.poisson(rate, warm_s, seed) + later


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.gate.predict", description=__doc__)
    parser.add_argument("model", choices=sorted(shapes.CONFIGS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    predict.gpus(parser)
    parser.add_argument("--profile", metavar="FILE", help="measured before; chooses the caps")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    model, plant = predict.of_prior(given.model, given.gpu)
    sources = {"data sheet": plant}
    if given.profile is not None:
        sources[Path(given.profile).stem] = predict.of_profile(given.profile)[1]
    line, config = line_rps(model, int(plant["kv_tokens"]), SLO), dict(shapes.CONFIGS[given.model])
    for number, factor in enumerate(FACTORS):
        path = out / Run(NONE, factor, None, 0).trace
        traces.write(path, drawn(line, factor, given.seed * 1000 + 2 * number))
    overload = traces.read(out / Run(NONE, OVERLOAD, None, 0).trace)
    grids = {source: swept(each, config, overload, out) for source, each in sources.items()}
    plays = calls(chosen(list(grids.values())[-1]))
    document = {
        "model": given.model,
        "slo": slo_to(SLO),
        "limits": {"max_num_seqs": predict.SEQUENCES, "budget": predict.BUDGET, "block_size": predict.BLOCK},
        "line_rps": line,
        "law": asdict(model),
        "warm_s": WARM_S,
        "window_s": WINDOW_S,
        "traces": {path.name: traces.digest(path) for path in sorted(out.glob("run*.csv"))},
        "calls": plays,
        "caps": {source: {str(cap): found for cap, found in grid.items()} for source, grid in grids.items()},
        "from": {
            source: {name: said(each, config, play, out) for name, play in plays.items()}
            for source, each in sources.items()
        },
    }
    (out / "prediction.json").write_text(json.dumps(rounded(document), indent=1) + "\n")
    tidy(out)
    return 0


def tidy(out: Path) -> None:
    """Without what was written for the simulator."""
    for file in ("plant.json", "config.json", "service.yaml", "sent.csv", "requests.jsonl"):
        (out / file).unlink(missing_ok=True)


def rounded(value: Any) -> Any:
    """Figures to five digits; hashes and counts stay."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
