"""Prediction for an engine by the project's own model, written to a file before the engine runs.

    python -m bench.hardware.predict 8b --out DIR [--gpu H100-SXM]

Problem: a prediction made after the measurement proves nothing.

Idea: DIR gets the traces to be sent, at 60 to 110 % of the SLO capacity that the core computes from the data sheet and
the model's config.json alone, and `prediction.json`: for each rate the core's closed forms (share within SLO, p95 of
TPOT) and the simulator's result for the same requests, with the same coefficients as its plant. With an earlier
measured profile, the same from it. The hash of each trace is stored with its prediction.
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

from bench.hardware import dummy_models, traces
from bench.hardware.summary import ObservedRequest, summary
from plimsoll.cli.main import main as plimsoll
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.goodput import goodput_knee_per_s
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel, serve_tier, tail_factor
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile

CAPACITY_SHARES: Final = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the SLO capacity without admission control
SLO: Final = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
MAX_SEQUENCES, STEP_BUDGET_TOKENS, KV_BLOCK_TOKENS = 256, 8192, 16
WARM_S, WINDOW_S = 6.0, 30.0
_SAMPLES: Final = 20_000
COEFFICIENTS: Final = ("base", "anypre", "pretok", "preattn", "dec", "ctx")


def from_prior(name: str, card: str = "H200") -> tuple[StepModel, dict[str, Any]]:
    """The data sheet's step model of a shape on one GPU, and the same as a simulator's profile.

    Raises KeyError for a name that is in no table, ValueError where the model does not fit.
    """
    shape, gpu = roofline.model_shape(dummy_models.CONFIGS[name]), roofline.ACCELERATORS[card]
    model = roofline.prior(shape, gpu)
    kv_tokens = roofline.kv_tokens(shape, gpu, token_budget=STEP_BUDGET_TOKENS)
    if kv_tokens is None:
        raise ValueError(f"{name} does not fit on one {card}")
    limits = {
        "accelerator": card,
        "kv_tokens": kv_tokens,
        "layers": shape.layers,
        "kv_bytes_per_token": round(shape.kv_bytes_per_token),
    }
    # The way to the engine core and back, as the core has it for each request.
    overheads = {"frontend": tier_model.HTTP_OVERHEAD_S, "frontend_token": tier_model.HTTP_OVERHEAD_PER_TOKEN_S}
    return model, dict(zip(COEFFICIENTS, asdict(model).values(), strict=True)) | limits | overheads | {
        "accelerator": card
    }


def from_profile(path: str) -> tuple[StepModel, dict[str, Any]]:
    """A measured profile: its law for the core (of a hot card, where it has one), all of it for the simulator."""
    hardware_profile = profile.load(path)
    coefficients = hardware_profile.hot or hardware_profile.coefficients
    document = json.loads(Path(path).read_text())
    return StepModel(*asdict(coefficients).values()), document


def predict(model: StepModel, plant: dict[str, Any], runs: Sequence[tuple[float, Path]], work: Path) -> dict[str, Any]:
    """Return the core's SLO capacity and goodput knee, and for each rate its results and the simulator's."""
    prompt, output = traces.chat_lengths(np.random.default_rng(0), _SAMPLES)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    limits = EngineLimits(MAX_SEQUENCES, int(plant["kv_tokens"]), STEP_BUDGET_TOKENS)
    tier = tier_model.build_profile(tier_model.TierSpec(Role.SERVE, model, workload, limits, SLO))
    step_model = serve_tier(model, workload)
    capacity_rps = float(slo_capacity.slo_capacity_per_s(tier, 1, admission=False)[0])
    rates = []
    for rate, trace in runs:
        figures = attainment(tier, rate, 1, admission=False)
        rho = float(step_model.rho(rate))
        tail = float(tail_factor(step_model, np.array([min(rho, 0.999)]), SLO.share)[0])
        mean = float(step_model.tpot_s(rate)) if rho < 1 else None
        core = {"rho": rho, "in_promise": float(figures.within_slo[0]), "tpot_s": mean}
        core["p95_tpot_s"] = None if mean is None else mean * tail
        rates.append({"rate": rate, "core": core, "simulator": simulated(plant, trace, work)})
    knee_rps = float(goodput_knee_per_s(tier, 1)[0])
    binding = str(slo_capacity.binding_constraint(tier, capacity_rps, 1)[0])
    return {"law": asdict(model), "line_rps": capacity_rps, "knee_rps": knee_rps, "binds": binding, "rates": rates}


def simulated(plant: dict[str, Any], trace: Path, work: Path) -> dict[str, Any]:
    """What `plimsoll simulate` says of the requests after the warm-up: one replica, no spread, no noise."""
    limits = {"max_num_seqs": MAX_SEQUENCES, "budget": STEP_BUDGET_TOKENS, "block_size": KV_BLOCK_TOKENS}
    (work / "plant.json").write_text(json.dumps(plant | limits))
    (work / "service.yaml").write_text(yaml.safe_dump(_service_manifest()))
    document = work / "requests.jsonl"
    command = ["simulate", "--output", "json", "--trace", str(trace)]
    command += ["--service", str(work / "service.yaml"), "--hardware", str(work / "plant.json"), "--policy", "static:1"]
    command += ["--initial", "1", "--spread", "0", "--noise", "0", "--gateways", "1", "--requests-out", str(document)]
    with contextlib.redirect_stdout(io.StringIO()):
        if plimsoll(command):
            raise SystemExit("plimsoll simulate failed")
    observed = [_observed(json.loads(fields)) for fields in document.read_text().splitlines()]
    return summary([request for request in observed if request.sent_s >= WARM_S], SLO, WINDOW_S)


def _observed(row: dict[str, Any]) -> ObservedRequest:
    is_ok = row["outcome"] == "ok"
    return ObservedRequest(row["sent_s"], row["output_tokens_asked"], row["ttft_s"], row["tpot_s"], None, is_ok)


def _service_manifest() -> dict[str, Any]:
    return {
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "measured"},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "slo": {"percentile": 95, "ttft": "500ms", "tpot": "50ms"},
            "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 1}},
        },
    }


def add_gpu_argument(parser: argparse.ArgumentParser) -> None:
    """Asks for the card whose data sheet is meant."""
    parser.add_argument("--gpu", choices=sorted(roofline.ACCELERATORS), default="H200", help="whose data sheet")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.predict", description=__doc__)
    parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    add_gpu_argument(parser)
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="measured before; may repeat")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    model, plant = from_prior(given.model, given.gpu)
    capacity_rps = predict(model, plant, (), given.out)["line_rps"]
    runs = []
    for number, share in enumerate(CAPACITY_SHARES):
        rate, path = round(share * capacity_rps, 2), given.out / f"run{number}.csv"
        seed = given.seed * 1000 + 2 * number
        shifted = [replace(request, at_s=request.at_s + WARM_S) for request in traces.poisson(rate, WINDOW_S, seed + 1)]
        traces.write(path, traces.poisson(rate, WARM_S, seed) + shifted)
        runs.append((rate, path))
    document = {
        "model": given.model,
        "gpu": given.gpu,
        "slo": asdict(SLO),
        "limits": {"max_num_seqs": MAX_SEQUENCES, "budget": STEP_BUDGET_TOKENS, "block_size": KV_BLOCK_TOKENS},
        "warm_s": WARM_S,
        "window_s": WINDOW_S,
        "shares_of_line": CAPACITY_SHARES,
        "traces": {path.name: traces.digest(path) for _, path in runs},
        "from": {"data sheet": predict(model, plant, runs, given.out)},
    }
    for path in given.profile:
        document["from"][Path(path).stem] = predict(*from_profile(path), runs, given.out)
    (given.out / "prediction.json").write_text(json.dumps(document, indent=1) + "\n")
    for file in ("plant.json", "service.yaml", "requests.jsonl"):
        (given.out / file).unlink(missing_ok=True)
    for source, request in document["from"].items():
        print(
            f"{given.model} from {source}: line {request['line_rps']:.2f}/s,"
            f" most goodput at {request['knee_rps']:.2f}/s, {request['binds']} binds"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
