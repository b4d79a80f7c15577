"""Runs and scores that were never played, for tests of how they are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.scoreboard import scoring, target_checks


def retry_after_counts(
    given: int, within_60_s: tuple[int, int, int], within_120_s: tuple[int, int, int]
) -> dict[str, Any]:
    """Counts of ten rejections.

    within_60_s, within_120_s: retry reservations of up to so many seconds, admitted at the first and second retry.
    """
    names = ("given", "first_ok", "second_ok")
    honoured_counts = {
        name: dict(zip(names, counts, strict=True))
        for name, counts in (("to_60_s", within_60_s), ("to_120_s", within_120_s))
    }
    return {"refused": 10, "given": given, "honoured": honoured_counts}


def make_board_figures(
    later: float | None = None, shed: Sequence[int] = (), settled: float | None = None
) -> dict[str, Any]:
    """What a run holds for the board. later, settled: mean replicas after the first and the second hour; shed: refused
    in each minute."""
    return {
        "mean_replicas_later": {"serve": later},
        "mean_replicas_settled": {"serve": later if settled is None else settled},
        "minutes": {"shed": list(shed)},
    }


def make_run(offered: float, gpu_hours: float, **more: Any) -> dict[str, Any]:
    """Figures of one run."""
    return {
        "policy": "plimsoll",
        "seed": 1,
        "offered": 1000,
        "recovered": 0,
        "infeasible_alone": 0,
        "downgraded": 0,
        "attainment_offered": offered,
        "attainment_admitted": 1.0,
        "attainment_tokens": offered,
        "gpu_hours": gpu_hours,
        "mean_replicas": {"serve": 2.0},
        "shed_share": 0.0,
        "shed_work_ratio": None,
        "p95_ttft_s": 0.5,
        "itl_p99_s": None,
        "reversals": {"serve": [0, 1]},
        "windows": {"n": 10, "passed": 9},
        "retry_reservations": retry_after_counts(given=9, within_60_s=(8, 7, 1), within_120_s=(4, 2, 1)),
        "wall_s": 10.0,
        "board": make_board_figures(),
        **more,
    }


def make_score(policy: str, offered: float, gpu_hours: float, **more: Any) -> scoring.Score:
    return scoring.score_policy(policy, [make_run(offered, gpu_hours, **more)])


def seeds_of(policy: str, *runs: tuple[float, float]) -> scoring.Score:
    """runs: attainment and GPU-hours of seed 1, 2 and so on."""
    return scoring.score_policy(policy, [make_run(*run, seed=seed) for seed, run in enumerate(runs, 1)])


def failed_checks(checks: Sequence[target_checks.TargetCheck]) -> dict[str, bool]:
    return {one.name: one.passed for one in checks}


MANY_FOLLOWERS = [make_score(f"follower:spare={n}", 0.1, 0.5) for n in range(20)]  # a frontier far below
NO_RETRY_AFTER = retry_after_counts(given=0, within_60_s=(0, 0, 0), within_120_s=(0, 0, 0))
