"""Prediction of admission control on a real engine by the project's own simulator, written before the engine runs.

    python -m bench.hardware.admission.predict 8b --out DIR [--gpu H100-SXM] [--profile FILE]

Problem: "goodput stays at the SLO capacity" is easily found in a measurement that is known.

Idea: DIR gets the traces, at factors of the SLO capacity that the core computes from the data sheet, and
`prediction.json`: for every run the result of `plimsoll simulate`, from the data sheet alone and from an earlier
measured profile. Admission control is the operator's core with a gateway's. One operator learns through all
admission-controlled runs of a call, from the self-benchmark on, as in the measurement. Constant caps are searched on a
grid, each with the patience of a reactive baseline; three are run.
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

from bench.hardware import dummy_models, predict, traces
from bench.hardware.admission.runs import (
    CAP_ARM,
    GATE_ARM,
    NO_LIMIT_ARM,
    AdmissionRun,
    RequestOutcome,
    assess_run,
    parse_call,
    slo_to_document,
)
from bench.hardware.summary import ObservedRequest
from plimsoll.cli.main import main as plimsoll
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

SLO: Final = Slo(0.95, ttft_s=1.0, tpot_s=0.05)
WARM_S, WINDOW_S = 6.0, 40.0
REST_S: Final = 20.0  # between two runs of a call, in the simulation
CAP_GRID: Final = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240)
OVERLOAD_FACTOR: Final = 2.0  # at which caps are compared
CAPACITY_FACTORS: Final = (1.0, 1.3, 2.0, 2.6)
SERVICE_NAME: Final = "m"  # of the service and its model
_SAMPLES: Final = 20_000


def call_plans(caps: Sequence[int]) -> dict[str, list[str]]:
    """The words of each call, those that matter least last, since a call may be cut short; `c` is a repetition, and `d`
    has the gate and two caps twice on one engine."""
    below, best, above = (f"cap{cap}@{OVERLOAD_FACTOR:g}" for cap in caps)
    return {
        "a": [*(f"gate@{factor:g}" for factor in CAPACITY_FACTORS), best, f"none@{OVERLOAD_FACTOR:g}"],
        "b": [below, above, "none@1.3", "none@1", "none@2.6"],
        "c": ["gate@1", f"gate@{OVERLOAD_FACTOR:g}", best],
        "d": ["gate@1", *[f"gate@{OVERLOAD_FACTOR:g}"] * 2, below, best, below, best],
    }


def capacity_rps(model: StepModel, kv_tokens: int, slo: Slo) -> float:
    """The highest rate that the core says keeps the promise without admission."""
    prompt, output = traces.chat_lengths(np.random.default_rng(0), _SAMPLES)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    limits = EngineLimits(predict.MAX_SEQUENCES, kv_tokens, predict.STEP_BUDGET_TOKENS)
    return float(
        slo_capacity.slo_capacity_per_s(
            tier_model.build_profile(tier_model.TierSpec(Role.SERVE, model, workload, limits, slo)), 1, admission=False
        )[0]
    )


def unloaded_ttft_s(model: StepModel, prompt: int) -> float:
    """From a request's arrival at an idle engine to its first token."""
    chunks = -(-prompt // predict.STEP_BUDGET_TOKENS)
    steps_s = chunks * (model.base_s + model.any_prefill_s)
    prefill_s = prompt * (model.prefill_token_s + model.prefill_pair_s * prompt / 2)
    return tier_model.HTTP_OVERHEAD_S + tier_model.HTTP_OVERHEAD_PER_TOKEN_S * prompt + steps_s + prefill_s


def service_manifest(slo: Slo) -> dict[str, Any]:
    """The manifest of one engine that is always there and promises this."""
    ttft, tpot = (f"{round(1000 * (value or 0.0))}ms" for value in (slo.ttft_s, slo.tpot_s))
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": SERVICE_NAME},
        "spec": {
            "model": {"uri": "hf://org/model", "name": SERVICE_NAME},
            "slo": {"percentile": round(100 * slo.share), "ttft": ttft, "tpot": tpot},
            "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 1}},
        },
    }


def simulated(
    plant: dict[str, Any],
    config: dict[str, Any],
    requests: list[traces.PlannedRequest],
    policy: str,
    work: Path,
    sequences: int = predict.MAX_SEQUENCES,
) -> list[RequestOutcome]:
    """What `plimsoll simulate` says of each request: one replica, one gateway, no spread, no noise, no retries."""
    limits = {"max_num_seqs": sequences, "budget": predict.STEP_BUDGET_TOKENS, "block_size": predict.KV_BLOCK_TOKENS}
    (work / "plant.json").write_text(json.dumps(plant | limits))
    (work / "config.json").write_text(json.dumps(config))
    (work / "service.yaml").write_text(yaml.safe_dump(service_manifest(SLO)))
    traces.write(work / "sent.csv", requests)
    document = work / "requests.jsonl"
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
        if plimsoll([*command, "--requests-out", str(document)]):
            raise SystemExit("plimsoll simulate failed")
    first_s = requests[0].at_s  # the simulator counts from its first request on
    return [_outcome(json.loads(fields), first_s) for fields in document.read_text().splitlines()]


def _outcome(row: dict[str, Any], first_s: float) -> RequestOutcome:
    is_ok = row["outcome"] == "ok"
    observed = ObservedRequest(
        row["sent_s"] + first_s, row["output_tokens_asked"], row["ttft_s"], row["tpot_s"], None, is_ok
    )
    return RequestOutcome(observed, row["outcome"] == "shed")


def policy(run: AdmissionRun) -> str:
    """The simulator's word for an arm."""
    return {GATE_ARM: "static:1,gated=1", NO_LIMIT_ARM: "static:1", CAP_ARM: f"follower:cap={run.cap}"}[run.arm]


def simulate_admission(
    plant: dict[str, Any],
    config: dict[str, Any],
    runs: Sequence[list[traces.PlannedRequest]],
    work: Path,
    duration_s: float = WARM_S + WINDOW_S,
    sequences: int = predict.MAX_SEQUENCES,
) -> list[list[RequestOutcome]]:
    """Runs with the gate one after another, under one operator."""
    slot_s = duration_s + REST_S
    sent = [replace(outcome, at_s=outcome.at_s + number * slot_s) for number, run in enumerate(runs) for outcome in run]
    outcomes: list[list[RequestOutcome]] = [[] for _ in runs]
    for outcome in simulated(plant, config, sent, "static:1,gated=1", work, sequences):
        number = int(outcome.observed.sent_s // slot_s)
        outcomes[number].append(
            replace(outcome, observed=replace(outcome.observed, sent_s=outcome.observed.sent_s - number * slot_s))
        )
    return outcomes


def predicted_figures(
    plant: dict[str, Any], config: dict[str, Any], words: Sequence[str], out: Path
) -> list[dict[str, Any]]:
    """The figures of a call's runs."""
    runs = parse_call(words)
    requests = [traces.read(out / run.trace) for run in runs]
    first = sum(run.arm == GATE_ARM for run in runs)
    outcomes = simulate_admission(plant, config, requests[:first], out) if first else []
    outcomes += [
        simulated(plant, config, run_outcomes, policy(run), out)
        for run, run_outcomes in zip(runs[first:], requests[first:], strict=True)
    ]
    return [
        {"run": run.word, **assess_run(run_outcomes, SLO, WARM_S, WINDOW_S)}
        for run, run_outcomes in zip(runs, outcomes, strict=True)
    ]


def sweep_caps(
    plant: dict[str, Any], config: dict[str, Any], sent: list[traces.PlannedRequest], out: Path
) -> dict[int, dict[str, Any]]:
    """The figures of each cap of the grid."""
    return {
        cap: assess_run(simulated(plant, config, sent, f"follower:cap={cap}", out), SLO, WARM_S, WINDOW_S)
        for cap in CAP_GRID
    }


def select_caps(grid: dict[int, dict[str, Any]]) -> tuple[int, int, int]:
    """The cap with the most goodput, and the next but one on either side, as far as the grid goes."""
    caps = sorted(grid)
    best = max(range(len(caps)), key=lambda place: grid[caps[place]]["goodput_rps"])
    best = min(max(best, 2), len(caps) - 3)
    return caps[best - 2], caps[best], caps[best + 2]


def draw_requests(
    capacity_rps: float, factor: float, seed: int, warm_s: float = WARM_S, window_s: float = WINDOW_S
) -> list[traces.PlannedRequest]:
    """A run's requests: a warm-up, then the window, each with as many arrivals as its rate says."""
    rate = factor * capacity_rps
    shifted = [replace(one, at_s=one.at_s + warm_s) for one in traces.poisson(rate, window_s, seed + 1)]
    return traces.poisson(rate, warm_s, seed) + shifted


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.predict", description=__doc__)
    parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    predict.add_gpu_argument(parser)
    parser.add_argument("--profile", metavar="FILE", help="measured before; chooses the caps")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(words)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    model, plant = predict.from_prior(arguments.model, arguments.gpu)
    sources = {"data sheet": plant}
    if arguments.profile is not None:
        sources[Path(arguments.profile).stem] = predict.from_profile(arguments.profile)[1]
    capacity, config = capacity_rps(model, int(plant["kv_tokens"]), SLO), dict(dummy_models.CONFIGS[arguments.model])
    for number, factor in enumerate(CAPACITY_FACTORS):
        path = out / AdmissionRun(NO_LIMIT_ARM, factor, None, 0).trace
        traces.write(path, draw_requests(capacity, factor, arguments.seed * 1000 + 2 * number))
    overload = traces.read(out / AdmissionRun(NO_LIMIT_ARM, OVERLOAD_FACTOR, None, 0).trace)
    grids = {source: sweep_caps(each, config, overload, out) for source, each in sources.items()}
    plans = call_plans(select_caps(list(grids.values())[-1]))
    document = {
        "model": arguments.model,
        "slo": slo_to_document(SLO),
        "limits": {
            "max_num_seqs": predict.MAX_SEQUENCES,
            "budget": predict.STEP_BUDGET_TOKENS,
            "block_size": predict.KV_BLOCK_TOKENS,
        },
        "line_rps": capacity,
        "law": asdict(model),
        "warm_s": WARM_S,
        "window_s": WINDOW_S,
        "traces": {path.name: traces.digest(path) for path in sorted(out.glob("run*.csv"))},
        "calls": plans,
        "caps": {source: {str(cap): caps for cap, caps in grid.items()} for source, grid in grids.items()},
        "from": {
            source: {name: predicted_figures(each, config, play, out) for name, play in plans.items()}
            for source, each in sources.items()
        },
    }
    (out / "prediction.json").write_text(json.dumps(round_figures(document), indent=1) + "\n")
    remove_inputs(out)
    return 0


def remove_inputs(out: Path) -> None:
    """Without what was written for the simulator."""
    for file in ("plant.json", "config.json", "service.yaml", "sent.csv", "requests.jsonl"):
        (out / file).unlink(missing_ok=True)


def round_figures(value: Any) -> Any:
    """Figures to five digits; hashes and counts stay."""
    if isinstance(value, dict):
        return {key: round_figures(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [round_figures(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
