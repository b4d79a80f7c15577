"""One engine with few slots at rates near its SLO capacity: which rates meet the SLO in every window.

    python -m bench.hardware.admission.windowed_slo predict 8b --out DIR --profile FILE --seed N [--gap-cv2 4] \\
        gate@1 gate@1.15
    python -m bench.hardware.admission.measure 8b --prediction DIR --call a --out MEASURED
    python -m bench.hardware.admission.windowed_slo compare DIR=MEASURED ...

Problem: tiers are sized by an SLO capacity at which 99 of 100 windows meet the SLO (`core.capacity.windowed_slo`).
Simulated queues confirm it, but an engine also has steps, chunked prefill and an admission controller that estimates.
Idea: use 24 slots, which is few. Rates are multiples of the SLO capacity. `mean_line_rps` is the rate at which the core
meets the SLO only in the mean. For bursty arrivals (`--gap-cv2`), `poisson_line_rps` is the SLO capacity under Poisson
arrivals. Each rate runs for minutes behind admission control. Every call has its own engine and its own requests. A
window is 500 requests in sending order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import dummy_models, traces
from bench.hardware import predict as hardware
from bench.hardware.admission import predict
from bench.hardware.admission.compare import outcomes
from bench.hardware.admission.runs import (
    AdmissionRun,
    RequestOutcome,
    parse_call,
    results_path,
    slo_from_document,
    slo_to_document,
)
from bench.hardware.archive import read_complete
from bench.hardware.summary import within_slo
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

MAX_SEQUENCES: Final = 24
WARM_S: Final = 10.0
REQUESTS: Final = 500  # of a window
CALL_NAME: Final = "a"
_SAMPLES: Final = 20_000


def capacities(model: StepModel, kv_tokens: int, slo: Slo, gap_cv2: float = 1.0) -> tuple[float, float]:
    """Requests/s that one engine takes: kept window by window, and with the promised share in the mean."""
    prompt, output = traces.chat_lengths(np.random.default_rng(0), _SAMPLES)
    limits = EngineLimits(MAX_SEQUENCES, kv_tokens, hardware.STEP_BUDGET_TOKENS)
    workload = from_samples(prompt, np.zeros(_SAMPLES), output)
    profile = tier_model.build_profile(
        tier_model.TierSpec(Role.SERVE, model, workload, limits, slo, arrival_cv2=gap_cv2)
    )
    low, high = 0.0, float(profile.saturation_rate_per_s(1)[0])
    for _ in range(40):
        middle = (low + high) / 2
        meets_slo = attainment(profile, middle, 1).within_slo[0] >= slo.share
        low, high = (middle, high) if meets_slo else (low, middle)
    return float(slo_capacity.slo_capacity_per_s(profile, 1)[0]), low


def window_figures(request_outcomes: Sequence[RequestOutcome], slo: Slo) -> dict[str, Any]:
    """Of a run's requests after the warm-up: share refused and in promise, and that of each window."""
    observed = sorted(
        (outcome for outcome in request_outcomes if outcome.observed.sent_s >= WARM_S),
        key=lambda outcome: outcome.observed.sent_s,
    )
    met_slo = np.array(
        [not outcome.rejected and within_slo(outcome.observed, slo) for outcome in observed], dtype=np.float64
    )
    shares = met_slo[: met_slo.size // REQUESTS * REQUESTS].reshape(-1, REQUESTS).mean(axis=1)
    rejected_share = float(np.mean([outcome.rejected for outcome in observed]))
    return {
        "sent": met_slo.size,
        "shed": rejected_share,
        "in_promise": float(met_slo.mean()),
        "windows": shares.tolist(),
    }


def draw_requests(rate: float, seed: int, gap_cv2: float, duration_s: float) -> list[traces.PlannedRequest]:
    """A run's requests: a warm-up, then the window, each with as many arrivals as its rate says."""
    if gap_cv2 == 1.0:
        return predict.draw_requests(rate, 1.0, seed, WARM_S, duration_s)
    shifted = traces.gamma_arrivals(rate, duration_s, gap_cv2, seed + 1)
    return traces.gamma_arrivals(rate, WARM_S, gap_cv2, seed) + [
        replace(one, at_s=one.at_s + WARM_S) for one in shifted
    ]


def write_prediction(given: argparse.Namespace) -> None:
    """Traces and what is said of them."""
    model, out, gap_cv2, words = given.model, given.out, given.gap_cv2, given.runs
    out.mkdir(parents=True, exist_ok=True)
    sources = {"data sheet": hardware.from_prior(model), Path(given.profile).stem: hardware.from_profile(given.profile)}
    law, plant = list(sources.values())[-1]
    kv_tokens = int(plant["kv_tokens"])
    windowed_capacity, mean_capacity = capacities(law, kv_tokens, predict.SLO, gap_cv2)
    for run in parse_call(words):
        traces.write(
            out / run.trace,
            draw_requests(run.factor * windowed_capacity, 1000 * given.seed + 2 * run.number, gap_cv2, given.seconds),
        )
    config, prediction = dict(dummy_models.CONFIGS[model]), {}
    for source, (_, request_outcomes) in sources.items():
        sent = [traces.read(out / run.trace) for run in parse_call(words)]
        figures = predict.simulate_admission(request_outcomes, config, sent, out, WARM_S + given.seconds, MAX_SEQUENCES)
        prediction[source] = dict(
            zip(words, (window_figures(run_figures, predict.SLO) for run_figures in figures), strict=True)
        )
    document = {
        "model": model,
        "slo": slo_to_document(predict.SLO),
        "limits": {
            "max_num_seqs": MAX_SEQUENCES,
            "budget": hardware.STEP_BUDGET_TOKENS,
            "block_size": hardware.KV_BLOCK_TOKENS,
        },
        "line_rps": windowed_capacity,
        "mean_line_rps": mean_capacity,
        "gap_cv2": gap_cv2,
        "poisson_line_rps": capacities(law, kv_tokens, predict.SLO)[0],
        "law": asdict(law),
        "warm_s": WARM_S,
        "window_s": given.seconds,
        "traces": {path.name: traces.digest(path) for path in sorted(out.glob("run*.csv"))},
        "calls": {CALL_NAME: list(words)},
        "from": prediction,
    }
    (out / "prediction.json").write_text(json.dumps(predict.round_figures(document), indent=1) + "\n")
    predict.remove_inputs(out)


def measured(prediction: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of each run of an engine that was played.

    Raises ValueError for another trace, and where a request of it has no row or a client ended badly.
    """
    predicted = json.loads((prediction / "prediction.json").read_text())
    slo = slo_from_document(predicted)
    for run in parse_call(predicted["calls"][CALL_NAME]):
        path = results_path(folder, run, CALL_NAME)
        if path is not None:  # else cut short
            sent = traces.find_trace(prediction / run.trace, predicted["traces"][run.trace])
            yield {"run": run.word, **window_figures(outcomes(read_complete(path, len(sent))), slo)}


def windows_of_all_engines(figures: Iterable[dict[str, Any]], slo: Slo) -> list[str]:
    """A line for each rate: how many windows of all engines met the SLO, and the worst one."""
    shares_by_run: dict[str, list[float]] = {}
    for one in figures:
        shares_by_run.setdefault(one["run"], []).extend(one["windows"])
    return [
        f"{run}: {_windows_met(shares, slo)} windows kept, the worst {min(shares):.1%}"
        for run, shares in sorted(shares_by_run.items())
    ]


def table(pairs: Sequence[tuple[Path, Path]]) -> list[str]:
    """Markdown: a line for each run, seen and said, then each rate over all engines."""
    lines_by_run = ["| engine | rate | by | refused | in promise | windows kept |", "|" + "---|" * 6]
    found: list[dict[str, Any]] = []
    for number, (prediction, folder) in enumerate(pairs, start=1):
        predicted = json.loads((prediction / "prediction.json").read_text())
        slo = slo_from_document(predicted)
        for figures in measured(prediction, folder):
            found.append(figures)
            rate = f"{AdmissionRun.parse(figures['run'], 0).factor * predicted['line_rps']:.2f}"
            lines_by_run.append(f"| {number} | {rate} | seen | {_cells(figures, slo)} |")
            for source, source_figures in predicted["from"].items():
                lines_by_run.append(f"| | | {source} | {_cells(source_figures[figures['run']], slo)} |")
    return lines_by_run + windows_of_all_engines(found, slo)


def _cells(found: dict[str, Any], slo: Slo) -> str:
    return f"{found['shed']:.1%} | {found['in_promise']:.1%} | {_windows_met(found['windows'], slo)}"


def _windows_met(shares: Sequence[float], slo: Slo) -> str:
    return f"{sum(share >= slo.share for share in shares)} of {len(shares)}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.windowed_slo", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    predict_parser = verbs.add_parser("predict")
    predict_parser.add_argument("model", choices=sorted(dummy_models.CONFIGS))
    predict_parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    predict_parser.add_argument("--profile", required=True, metavar="FILE")
    predict_parser.add_argument("--seed", type=int, default=1)
    predict_parser.add_argument("--seconds", type=float, default=200.0, help="of each run, beside the warm-up")
    predict_parser.add_argument(
        "--gap-cv2", type=float, default=1.0, help="squared coefficient of variation of the gaps"
    )
    predict_parser.add_argument("runs", nargs="+", metavar="gate@FACTOR")
    compare_parser = verbs.add_parser("compare")
    compare_parser.add_argument("pairs", nargs="+", metavar="PREDICTION=MEASURED")
    given = parser.parse_args(words)
    if given.verb == "predict":
        write_prediction(given)
    else:
        pairs = [
            (Path(prediction_dir), Path(measured_dir))
            for prediction_dir, _, measured_dir in (pair.partition("=") for pair in given.pairs)
        ]
        print("\n".join(table(pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
