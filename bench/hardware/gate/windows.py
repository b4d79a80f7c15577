"""One engine with few places about its load line: where its promise is kept window by window, and where not.

    python -m bench.hardware.gate.windows predict 8b --out DIR --profile FILE --seed N [--gap-cv2 4] gate@1 gate@1.15
    python -m bench.hardware.gate.measure 8b --prediction DIR --call a --out MEASURED
    python -m bench.hardware.gate.windows compare DIR=MEASURED ...

Problem: tiers are sized by a load line that claims 99 windows of 100 (`core.windows`). Simulated queues bear it out; an
engine has steps, chunks and a gate that reckons.
Idea: 24 places, which is few. Rates are factors of that line, among them the one at which the core says that the
promise is kept in the mean alone (`mean_line_rps`) and, where arrivals bunch (`--gap-cv2`), the line that they would
have if they did not (`poisson_line_rps`). Each runs for minutes behind the gate, every call on an engine of its own
with requests of its own; windows are 500 requests in the order in which they were sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import predict as hardware
from bench.hardware import shapes, traces
from bench.hardware.gate import predict
from bench.hardware.gate.compare import ones
from bench.hardware.gate.runs import One, call, seen_path, slo_of, slo_to
from bench.hardware.keep import complete
from bench.hardware.summary import kept
from plimsoll.core import knee, load_line
from plimsoll.core.latency import EngineLimits, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

PLACES: Final = 24
WARM_S: Final = 10.0
REQUESTS: Final = 500  # of a window
CALL: Final = "a"
_SAMPLES: Final = 20_000


def lines(model: StepModel, kv_tokens: int, slo: Slo, gap_cv2: float = 1.0) -> tuple[float, float]:
    """Requests/s that one engine takes: kept window by window, and with the promised share in the mean."""
    prompt, output = traces.lengths(np.random.default_rng(0), _SAMPLES)
    limits = EngineLimits(PLACES, kv_tokens, hardware.BUDGET)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    reduced = knee.profile(knee.Tier(Role.SERVE, model, workload, limits, slo, arrival_cv2=gap_cv2))
    low, high = 0.0, float(reduced.full_rate_per_s(1)[0])
    for _ in range(40):
        middle = (low + high) / 2
        keeps = knee.attainment(reduced, middle, 1).attained[0] >= slo.share
        low, high = (middle, high) if keeps else (low, middle)
    return float(load_line.slo_rate(reduced, 1)[0]), low


def counted(found: Sequence[One], slo: Slo) -> dict[str, Any]:
    """Of a run's requests after the warm-up: share refused and in promise, and that of each window."""
    own = sorted((one for one in found if one.seen.sent_s >= WARM_S), key=lambda one: one.seen.sent_s)
    met = np.array([not one.refused and kept(one.seen, slo) for one in own], dtype=np.float64)
    shares = met[: met.size // REQUESTS * REQUESTS].reshape(-1, REQUESTS).mean(axis=1)
    refused = float(np.mean([one.refused for one in own]))
    return {"sent": met.size, "shed": refused, "in_promise": float(met.mean()), "windows": shares.tolist()}


def drawn(rate: float, seed: int, gap_cv2: float, lasts_s: float) -> list[traces.Request]:
    """A run's requests: a warm-up, then the window, each with as many arrivals as its rate says."""
    if gap_cv2 == 1.0:
        return predict.drawn(rate, 1.0, seed, WARM_S, lasts_s)
    later = traces.bunched(rate, lasts_s, gap_cv2, seed + 1)
    return traces.bunched(rate, WARM_S, gap_cv2, seed) + [replace(one, at_s=one.at_s + WARM_S) for one in later]


def write(given: argparse.Namespace) -> None:
    """Traces and what is said of them."""
    model, out, gap_cv2, words = given.model, given.out, given.gap_cv2, given.runs
    out.mkdir(parents=True, exist_ok=True)
    sources = {"data sheet": hardware.of_prior(model), Path(given.profile).stem: hardware.of_profile(given.profile)}
    law, plant = list(sources.values())[-1]
    kv_tokens = int(plant["kv_tokens"])
    line, mean = lines(law, kv_tokens, predict.SLO, gap_cv2)
    for run in call(words):
        traces.write(
            out / run.trace, drawn(run.factor * line, 1000 * given.seed + 2 * run.number, gap_cv2, given.seconds)
        )
    config, told = dict(shapes.CONFIGS[model]), {}
    for source, (_, each) in sources.items():
        sent = [traces.read(out / run.trace) for run in call(words)]
        found = predict.gated(each, config, sent, out, WARM_S + given.seconds, PLACES)
        told[source] = dict(zip(words, (counted(one, predict.SLO) for one in found), strict=True))
    document = {
        "model": model,
        "slo": slo_to(predict.SLO),
        "limits": {"max_num_seqs": PLACES, "budget": hardware.BUDGET, "block_size": hardware.BLOCK},
        "line_rps": line,
        "mean_line_rps": mean,
        "gap_cv2": gap_cv2,
        "poisson_line_rps": lines(law, kv_tokens, predict.SLO)[0],
        "law": asdict(law),
        "warm_s": WARM_S,
        "window_s": given.seconds,
        "traces": {path.name: traces.digest(path) for path in sorted(out.glob("run*.csv"))},
        "calls": {CALL: list(words)},
        "from": told,
    }
    (out / "prediction.json").write_text(json.dumps(predict.rounded(document), indent=1) + "\n")
    predict.tidy(out)


def table(pairs: Sequence[tuple[Path, Path]]) -> list[str]:
    """Markdown: a line for each run, seen and said, then each rate over all engines."""
    rows = ["| engine | rate | by | refused | in promise | windows kept |", "|" + "---|" * 6]
    seen: dict[str, list[dict[str, Any]]] = {}
    for number, (prediction, measured) in enumerate(pairs, start=1):
        told = json.loads((prediction / "prediction.json").read_text())
        slo = slo_of(told)
        for run in call(told["calls"][CALL]):
            path = seen_path(measured, run, CALL)
            if path is None:  # cut short
                continue
            sent = traces.predicted(prediction / run.trace, told["traces"][run.trace])
            found = counted(ones(complete(path, len(sent))), slo)
            seen.setdefault(run.word, []).append(found)
            rate = f"{run.factor * told['line_rps']:.2f}"
            rows.append(f"| {number} | {rate} | seen | {_cells(found, slo)} |")
            for source, said in told["from"].items():
                rows.append(f"| | | {source} | {_cells(said[run.word], slo)} |")
    for word, runs in sorted(seen.items()):
        shares = [share for one in runs for share in one["windows"]]
        least = min(shares)
        rows.append(f"{word}: {_kept(shares, slo)} windows kept, the worst {least:.1%}")
    return rows


def _cells(found: dict[str, Any], slo: Slo) -> str:
    return f"{found['shed']:.1%} | {found['in_promise']:.1%} | {_kept(found['windows'], slo)}"


def _kept(shares: Sequence[float], slo: Slo) -> str:
    return f"{sum(share >= slo.share for share in shares)} of {len(shares)}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.gate.windows", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    said = verbs.add_parser("predict")
    said.add_argument("model", choices=sorted(shapes.CONFIGS))
    said.add_argument("--out", type=Path, required=True, metavar="DIR")
    said.add_argument("--profile", required=True, metavar="FILE")
    said.add_argument("--seed", type=int, default=1)
    said.add_argument("--seconds", type=float, default=200.0, help="of each run, beside the warm-up")
    said.add_argument("--gap-cv2", type=float, default=1.0, help="squared coefficient of variation of the gaps")
    said.add_argument("runs", nargs="+", metavar="gate@FACTOR")
    held = verbs.add_parser("compare")
    held.add_argument("pairs", nargs="+", metavar="PREDICTION=MEASURED")
    given = parser.parse_args(words)
    if given.verb == "predict":
        write(given)
    else:
        pairs = [(Path(left), Path(right)) for left, _, right in (pair.partition("=") for pair in given.pairs)]
        print("\n".join(table(pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
