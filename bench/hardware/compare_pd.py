"""Prefill and decode engines beside two aggregated ones: the runs of `bench.hardware.measure_pd` as a table.

    python -m bench.hardware.compare_pd DIR

For each run with remote prefill it also gives the core's assessment of the fabric, from the decode engine's counters in
that run and its own model of computing the same prompts.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import client, itl_histogram
from bench.hardware.archive import read_complete, read_run, runs
from bench.hardware.predict import STEP_BUDGET_TOKENS
from bench.hardware.summary import ObservedRequest, within_slo
from plimsoll.core.engine_model import kv_transfer
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import from_samples
from plimsoll.sim import profile

WARM_S, WINDOW_S = 4.0, 40.0
SLO_PAIRS: Final = ((0.5, 0.05), (0.3, 0.025), (0.2, 0.015), (0.5, 0.01))
ITL_SLO: Final = (0.5, 0.05)  # TTFT, and no gap between two tokens longer than this
_COUNTERS: Final = {
    "transfer_s": r"vllm:nixl_xfer_time_seconds_sum",
    "post_s": r"vllm:nixl_post_time_seconds_sum",
    "bytes": r"vllm:nixl_bytes_transferred_sum",
    "tokens": r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"',
    "preempted": r"vllm:num_preemptions_total",
}


def transfer_counters(metrics: str) -> dict[str, float]:
    """What a decode engine counted since its start."""
    counters = dict.fromkeys(_COUNTERS, 0.0)
    for name, pattern in _COUNTERS.items():
        for line in re.findall(rf"^{pattern}.*$", metrics, re.MULTILINE):
            counters[name] += float(line.rsplit(" ", 1)[1])
    return counters


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures after its warm-up: milliseconds, and shares of what was sent."""
    return request_figures(client.to_observed(rows))


def request_figures(requests: Sequence[ObservedRequest]) -> dict[str, Any]:
    """The same of requests that clients or a simulator saw."""
    in_window = [request for request in requests if WARM_S <= request.sent_s < WARM_S + WINDOW_S]
    first = [request.ttft_s * 1e3 for request in in_window if request.ttft_s is not None]
    figures_of_slo = [request.tpot_s * 1e3 for request in in_window if request.tpot_s is not None]
    shares = {f"{a:g}/{b:g}": _within_slo(in_window, Slo(0.95, a, 0.0, b)) for a, b in SLO_PAIRS}
    tpots = [
        request.ok and (request.ttft_s or 9e9) <= ITL_SLO[0] and (request.max_itl_s or 0) <= ITL_SLO[1]
        for request in in_window
    ]
    return {
        "rate_rps": len(in_window) / WINDOW_S,
        "ok": sum(request.ok for request in in_window) / len(in_window),
        "ttft_ms": np.percentile(first, (50, 95)).tolist(),
        "tpot_ms": np.percentile(figures_of_slo, (50, 95)).tolist(),
        **shares,
        "gap": float(np.mean(tpots)),
    }


def _within_slo(in_window: Sequence[ObservedRequest], slo: Slo) -> float:
    return sum(within_slo(slo_pair, slo) for slo_pair in in_window) / len(in_window)


def transfer_verdict(
    transfer_stats: kv_transfer.TransferStats, rows: Sequence[dict[str, Any]], hardware_profile: profile.HardwareProfile
) -> str:
    """The core's words on whether moving these prompts paid, against computing them by the profile's law."""
    coefficients = hardware_profile.coefficients
    model = StepModel(
        coefficients.base,
        coefficients.anypre,
        coefficients.pretok,
        coefficients.preattn,
        coefficients.dec,
        coefficients.ctx,
    )
    prompts = np.array([row["prompt"] for row in rows], dtype=np.float64)
    workload = from_samples(prompts, np.zeros(prompts.size), np.ones(prompts.size))
    compute_s = kv_transfer.recompute_s_per_token(model, workload, STEP_BUDGET_TOKENS)
    if isinstance(compute_s, Unavailable):
        return compute_s.reason
    assessment = kv_transfer.assess(transfer_stats, compute_s)
    return (
        assessment.reason
        if isinstance(assessment, Unavailable)
        else f"{'pays' if assessment.pays else 'does not pay'}: {assessment.message}"
    )


def verdict_of_run(
    name: str, change: dict[str, float], rows: Sequence[dict[str, Any]], hardware_profile: profile.HardwareProfile
) -> str | None:
    """The verdict on a run's transfers with its preemptions; None of a run without remote prefill.

    change: what the decode engine counted in the run (`transfer_counters`).
    """
    if ".pd." not in name:
        return None
    stats = kv_transfer.TransferStats(change["tokens"], change["transfer_s"], change["post_s"])
    return f"{transfer_verdict(stats, rows, hardware_profile)}; {change['preempted']:.0f} preemptions"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.compare_pd", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="h200-8b-cool", help="of the decode engine, for the verdict")
    given = parser.parse_args(words)
    hardware_profile, before = profile.load(given.profile), dict.fromkeys(_COUNTERS, 0.0)
    for number, path in enumerate(runs(given.folder)):
        rows = read_complete(path)
        run_figures = figures(rows)
        if number == 0:
            heads = [
                "run",
                "req/s",
                "TTFT p50 / p95 ms",
                "TPOT p50 / p95 ms",
                "ITL p99 ms",
                *(f"{measured_share:g}/{predicted_share:g}" for measured_share, predicted_share in SLO_PAIRS),
                "gap",
            ]
            print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        pairs = [" / ".join(f"{value:.1f}" for value in run_figures[key]) for key in ("ttft_ms", "tpot_ms")]
        shares = [
            f"{run_figures[f'{measured_share:g}/{predicted_share:g}']:.1%}"
            for measured_share, predicted_share in SLO_PAIRS
        ]
        name = path.name.split(".requests.json")[0]
        late = itl_histogram.quantile_s(read_run(path).get("gaps", {}), 0.99, WARM_S, WARM_S + WINDOW_S)
        pairs.append("-" if late is None else f"{late * 1e3:.1f}")
        print(
            "| "
            + " | ".join([name, f"{run_figures['rate_rps']:.1f}", *pairs, *shares, f"{run_figures['gap']:.1%}"])
            + " |"
        )
        metrics = given.folder / f"{name}.requests.d.metrics.txt"
        after = transfer_counters(metrics.read_text()) if metrics.exists() else before
        change, before = {key: after[key] - before[key] for key in after}, after
        if (verdict := verdict_of_run(path.name, change, rows, hardware_profile)) is not None:
            print(f"  {name}: {verdict}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
