"""Results of a policy on a row over several seeds: means, with the half width of their 95 % confidence interval
(Student's t). Targets of a row are checked against these means (`target_checks`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from plimsoll.sim.frontier import FrontierPoint

# Student's t, two-sided 95 %, by degrees of freedom 1 to 30; beyond them that of the normal law.
_T_QUANTILES: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_QUANTILE: Final = 1.960


class MeanWithError(NamedTuple):
    """A mean over seeds. half_width: of the confidence interval; None for a single seed."""

    value: float
    half_width: float | None


class RetryAfterCounts(NamedTuple):
    """Of those who were refused: how many, how many were told a time, and of those that honour a time of up to 60 s how
    many there were and how many got in at their first retry; of those that honour one of 60 to 120 s, how many there
    were and how many got in by their second."""

    refused: int
    given: int
    within_60_s: int
    within_60_s_admitted: int
    within_120_s: int
    within_120_s_admitted: int


class SeedResult(NamedTuple):
    """What one run came to, to be held against another policy's run of the same seed. windows: judged ones."""

    offered: float
    gpu_hours: float
    passed: int
    windows: int


@dataclass(frozen=True)
class Score:
    """A policy on a row. seeds: how many. each: by seed; empty where only the means are known."""

    policy: str
    seeds: int
    offered: MeanWithError
    admitted: MeanWithError
    tokens: MeanWithError
    gpu_hours: MeanWithError
    replicas: MeanWithError  # of all tiers
    shed: MeanWithError
    shed_work: float | None  # mean work of what was shed over that of what was offered
    reversals: int  # the most in a phase of any seed
    windows: float | None  # share that passed
    first_s: float | None  # TTFT p95
    itl_s: float | None  # p99 of the gaps between tokens
    recovered: float  # share of offered: refused, and in at a later try
    infeasible: float  # share of offered that not even an idle fleet could serve in time
    downgraded: float  # share of offered that went to a fallback
    later: float | None  # mean replicas after the first hour
    settled: float | None  # after the second
    retry_reservations: RetryAfterCounts
    waves: int  # the most in any seed: stretches of minutes in each of which somebody new was refused
    each: Mapping[int, SeedResult] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.policy.partition(":")[0]

    @property
    def point(self) -> FrontierPoint:
        return FrontierPoint(self.policy, self.offered.value, self.gpu_hours.value, self.windows)

    def for_seeds(self, seeds: Collection[int]) -> FrontierPoint:
        """The means over some of its seeds, at least one."""
        chosen = [self.each[seed] for seed in seeds]
        windows = sum(one.windows for one in chosen)
        return FrontierPoint(
            self.policy,
            statistics.fmean(one.offered for one in chosen),
            statistics.fmean(one.gpu_hours for one in chosen),
            sum(one.passed for one in chosen) / windows if windows else None,
        )


def mean_with_error(values: Iterable[float]) -> MeanWithError:
    """Of at least one value."""
    values_known = list(values)
    if len(values_known) == 1:
        return MeanWithError(values_known[0], None)
    quantile = _T_QUANTILES[len(values_known) - 2] if len(values_known) - 2 < len(_T_QUANTILES) else _NORMAL_QUANTILE
    return MeanWithError(
        statistics.fmean(values_known), quantile * statistics.stdev(values_known) / math.sqrt(len(values_known))
    )


def score_policy(policy: str, runs: Sequence[Mapping[str, Any]]) -> Score:
    """Of all seeds of one policy on one row."""

    def of(key: str) -> MeanWithError:
        return mean_with_error(run[key] or 0.0 for run in runs)

    windows = sum(run["windows"]["n"] for run in runs)
    ratios = [run["shed_work_ratio"] for run in runs if run["shed_work_ratio"] is not None]
    firsts, gaps = ([run[key] for run in runs if run[key] is not None] for key in ("p95_ttft_s", "itl_p99_s"))
    recovered, infeasible, downgraded = (
        statistics.fmean(run[key] / run["offered"] for run in runs)
        for key in ("recovered", "infeasible_alone", "downgraded")
    )
    return Score(
        policy,
        len(runs),
        of("attainment_offered"),
        of("attainment_admitted"),
        of("attainment_tokens"),
        of("gpu_hours"),
        mean_with_error(sum(run["mean_replicas"].values()) for run in runs),
        of("shed_share"),
        statistics.fmean(ratios) if ratios else None,
        max(count for run in runs for tier in run["reversals"].values() for count in tier),
        sum(run["windows"]["passed"] for run in runs) / windows if windows else None,
        statistics.fmean(firsts) if firsts else None,
        statistics.fmean(gaps) if gaps else None,
        recovered,
        infeasible,
        downgraded,
        _mean_later(runs, "mean_replicas_later"),
        _mean_later(runs, "mean_replicas_settled"),
        _retry_after_counts(runs),
        max(count_rejection_waves(run["board"]["minutes"]["shed"]) for run in runs),
        {run["seed"]: _seed_result(run) for run in runs},
    )


def _seed_result(run: Mapping[str, Any]) -> SeedResult:
    windows = run["windows"]
    return SeedResult(run["attainment_offered"] or 0.0, run["gpu_hours"] or 0.0, windows["passed"], windows["n"])


def _mean_later(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Of all tiers; None where a run was over by then."""
    tiers = [run["board"][key].values() for run in runs]
    if any(value is None for means in tiers for value in means):
        return None
    return statistics.fmean(sum(means) for means in tiers)


def _retry_after_counts(runs: Sequence[Mapping[str, Any]]) -> RetryAfterCounts:
    counts = [figures["retry_reservations"] for figures in runs]
    within_60_s, within_120_s = (
        [honoured_counts["honoured"][until] for honoured_counts in counts] for until in ("to_60_s", "to_120_s")
    )
    return RetryAfterCounts(
        sum(honoured_counts["refused"] for honoured_counts in counts),
        sum(honoured_counts["given"] for honoured_counts in counts),
        sum(honoured_counts["given"] for honoured_counts in within_60_s),
        sum(honoured_counts["first_ok"] for honoured_counts in within_60_s),
        sum(honoured_counts["given"] for honoured_counts in within_120_s),
        sum(honoured_counts["first_ok"] + honoured_counts["second_ok"] for honoured_counts in within_120_s),
    )


def count_rejection_waves(shed: Sequence[int]) -> int:
    """Stretches without a pause in which somebody was refused. shed: first attempts refused in each minute."""
    return sum(bool(now) and not previous for previous, now in itertools.pairwise((0, *shed)))
