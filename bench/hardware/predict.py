"""What the project's own model says of an engine before it has run, written to a file that the run is held against.

    python -m bench.hardware.predict 8b --out DIR [--gpu H100-SXM]

Problem: a prediction that is made when the measurement is known is none.
Idea: DIR gets the traces that will be sent, at 60 to 110 % of the knee that the core computes from the data sheet and
the model's config.json alone, and `prediction.json`: for each rate what the core's closed forms say (share in promise,
p95 of TPOT) and what the simulator says of the very requests, with the same coefficients as its plant. Where a profile
was measured before, the same from it. The hash of each trace stands beside its prediction.
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

from bench.hardware import shapes, traces
from bench.hardware.summary import Seen, summary
from plimsoll.cli.main import main as plimsoll
from plimsoll.core import knee, load_line, roofline
from plimsoll.core.goodput import knee_rate
from plimsoll.core.latency import EngineLimits, StepModel, serve_tier, tail_factor
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile

SHARES: Final = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the knee
SLO: Final = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
SEQUENCES, BUDGET, BLOCK = 256, 8192, 16
WARM_S, WINDOW_S = 6.0, 30.0
_SAMPLES: Final = 20_000
NAMES: Final = ("base", "anypre", "pretok", "preattn", "dec", "ctx")


def of_prior(name: str, card: str = "H200") -> tuple[StepModel, dict[str, Any]]:
    """The data sheet's step model of a shape on one GPU, and the same as a simulator's profile.

    Raises KeyError for a name that is in no table, ValueError where the model does not fit.
    """
    shape, gpu = roofline.model_shape(shapes.CONFIGS[name]), roofline.ACCELERATORS[card]
    model = roofline.prior(shape, gpu)
    kv = roofline.kv_tokens(shape, gpu, token_budget=BUDGET)
    if kv is None:
        raise ValueError(f"{name} does not fit on one {card}")
    limits = {
        "accelerator": card,
        "kv_tokens": kv,
        "layers": shape.layers,
        "kv_bytes_per_token": round(shape.kv_bytes_per_token),
    }
    # The way to the engine core and back, as the core has it for each request.
    outside = {"frontend": knee.HTTP_S, "frontend_token": knee.HTTP_TOKEN_S}
    return model, dict(zip(NAMES, asdict(model).values(), strict=True)) | limits | outside | {"accelerator": card}


def of_profile(path: str) -> tuple[StepModel, dict[str, Any]]:
    """A measured profile: its law for the core (of a hot card, where it has one), all of it for the simulator."""
    own = profile.load(path)
    law = own.hot or own.coefficients
    document = json.loads(Path(path).read_text())
    return StepModel(*asdict(law).values()), document


def predicted(
    model: StepModel, plant: dict[str, Any], runs: Sequence[tuple[float, Path]], work: Path
) -> dict[str, Any]:
    """The core's knee and line, and for each rate its figures and the simulator's."""
    prompt, output = traces.lengths(np.random.default_rng(0), _SAMPLES)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    limits = EngineLimits(SEQUENCES, int(plant["kv_tokens"]), BUDGET)
    tier = knee.profile(knee.Tier(Role.SERVE, model, workload, limits, SLO))
    law = serve_tier(model, workload)
    line = float(load_line.slo_rate(tier, 1, admission=False)[0])
    rates = []
    for rate, trace in runs:
        found = knee.attainment(tier, rate, 1, admission=False)
        rho = float(law.rho(rate))
        tail = float(tail_factor(law, np.array([min(rho, 0.999)]), SLO.share)[0])
        mean = float(law.tpot_s(rate)) if rho < 1 else None
        core = {"rho": rho, "in_promise": float(found.attained[0]), "tpot_s": mean}
        core["p95_tpot_s"] = None if mean is None else mean * tail
        rates.append({"rate": rate, "core": core, "simulator": simulated(plant, trace, work)})
    peak = float(knee_rate(tier, 1)[0])
    binds = str(load_line.constraint(tier, line, 1)[0])
    return {"law": asdict(model), "line_rps": line, "knee_rps": peak, "binds": binds, "rates": rates}


def simulated(plant: dict[str, Any], trace: Path, work: Path) -> dict[str, Any]:
    """What `plimsoll simulate` says of the requests after the warm-up: one replica, no spread, no noise."""
    limits = {"max_num_seqs": SEQUENCES, "budget": BUDGET, "block_size": BLOCK}
    (work / "plant.json").write_text(json.dumps(plant | limits))
    (work / "service.yaml").write_text(yaml.safe_dump(_service()))
    told = work / "requests.jsonl"
    command = ["simulate", "--output", "json", "--trace", str(trace)]
    command += ["--service", str(work / "service.yaml"), "--hardware", str(work / "plant.json"), "--policy", "static:1"]
    command += ["--initial", "1", "--spread", "0", "--noise", "0", "--gateways", "1", "--requests-out", str(told)]
    with contextlib.redirect_stdout(io.StringIO()):
        if plimsoll(command):
            raise SystemExit("plimsoll simulate failed")
    seen = [_seen(json.loads(line)) for line in told.read_text().splitlines()]
    return summary([one for one in seen if one.sent_s >= WARM_S], SLO, WINDOW_S)


def _seen(row: dict[str, Any]) -> Seen:
    ok = row["outcome"] == "ok"
    return Seen(row["sent_s"], row["output_tokens_asked"], row["ttft_s"], row["tpot_s"], None, ok)


def _service() -> dict[str, Any]:
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


def gpus(parser: argparse.ArgumentParser) -> None:
    """Asks for the card whose data sheet is meant."""
    parser.add_argument("--gpu", choices=sorted(roofline.ACCELERATORS), default="H200", help="whose data sheet")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.predict", description=__doc__)
    parser.add_argument("model", choices=sorted(shapes.CONFIGS))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    gpus(parser)
    parser.add_argument("--profile", action="append", default=[], metavar="FILE", help="measured before; may repeat")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    model, plant = of_prior(given.model, given.gpu)
    line = predicted(model, plant, (), given.out)["line_rps"]
    runs = []
    for number, share in enumerate(SHARES):
        rate, path = round(share * line, 2), given.out / f"run{number}.csv"
        seed = given.seed * 1000 + 2 * number
        later = [replace(one, at_s=one.at_s + WARM_S) for one in traces.poisson(rate, WINDOW_S, seed + 1)]
        traces.write(path, traces.poisson(rate, WARM_S, seed) + later)
        runs.append((rate, path))
    document = {
        "model": given.model,
        "gpu": given.gpu,
        "slo": asdict(SLO),
        "limits": {"max_num_seqs": SEQUENCES, "budget": BUDGET, "block_size": BLOCK},
        "warm_s": WARM_S,
        "window_s": WINDOW_S,
        "shares_of_line": SHARES,
        "traces": {path.name: traces.digest(path) for _, path in runs},
        "from": {"data sheet": predicted(model, plant, runs, given.out)},
    }
    for path in given.profile:
        document["from"][Path(path).stem] = predicted(*of_profile(path), runs, given.out)
    (given.out / "prediction.json").write_text(json.dumps(document, indent=1) + "\n")
    for file in ("plant.json", "service.yaml", "requests.jsonl"):
        (given.out / file).unlink(missing_ok=True)
    for source, one in document["from"].items():
        print(
            f"{given.model} from {source}: line {one['line_rps']:.2f}/s,"
            f" most goodput at {one['knee_rps']:.2f}/s, {one['binds']} binds"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
