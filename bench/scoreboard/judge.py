"""What several seeds of a policy on a row came to: means, with the half width of their 95 % confidence interval
(Student's t). What a row asks for is judged by these means (`reach.py`)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from plimsoll.sim.frontier import Point

# Student's t, two-sided 95 %, by degrees of freedom 1 to 30; beyond them that of the normal law.
_T: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL: Final = 1.960


class Mean(NamedTuple):
    """half: of the confidence interval; None for a single seed."""

    value: float
    half: float | None


class Tickets(NamedTuple):
    """Of those who were refused: how many, how many were told a time, and of those that honour a time of up to 60 s how
    many there were and how many got in at their first retry; of those that honour one of 60 to 120 s, how many there
    were and how many got in by their second."""

    refused: int
    given: int
    soon: int
    soon_in: int
    later: int
    later_in: int


class Seed(NamedTuple):
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
    offered: Mean
    admitted: Mean
    tokens: Mean
    gpu_hours: Mean
    replicas: Mean  # of all tiers
    shed: Mean
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
    tickets: Tickets
    waves: int  # the most in any seed: stretches of minutes in each of which somebody new was refused
    each: Mapping[int, Seed] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return self.policy.partition(":")[0]

    @property
    def point(self) -> Point:
        return Point(self.policy, self.offered.value, self.gpu_hours.value, self.windows)

    def over(self, seeds: Collection[int]) -> Point:
        """The means over some of its seeds, at least one."""
        some = [self.each[seed] for seed in seeds]
        windows = sum(one.windows for one in some)
        return Point(
            self.policy,
            statistics.fmean(one.offered for one in some),
            statistics.fmean(one.gpu_hours for one in some),
            sum(one.passed for one in some) / windows if windows else None,
        )


def mean(values: Iterable[float]) -> Mean:
    """Of at least one value."""
    known = list(values)
    if len(known) == 1:
        return Mean(known[0], None)
    t = _T[len(known) - 2] if len(known) - 2 < len(_T) else _NORMAL
    return Mean(statistics.fmean(known), t * statistics.stdev(known) / math.sqrt(len(known)))


def score(policy: str, runs: Sequence[Mapping[str, Any]]) -> Score:
    """Of all seeds of one policy on one row."""

    def of(key: str) -> Mean:
        return mean(run[key] or 0.0 for run in runs)

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
        mean(sum(run["mean_replicas"].values()) for run in runs),
        of("shed_share"),
        statistics.fmean(ratios) if ratios else None,
        max(count for run in runs for tier in run["reversals"].values() for count in tier),
        sum(run["windows"]["passed"] for run in runs) / windows if windows else None,
        statistics.fmean(firsts) if firsts else None,
        statistics.fmean(gaps) if gaps else None,
        recovered,
        infeasible,
        downgraded,
        _later(runs, "mean_replicas_later"),
        _later(runs, "mean_replicas_settled"),
        _tickets(runs),
        max(waves(run["board"]["minutes"]["shed"]) for run in runs),
        {run["seed"]: _seed(run) for run in runs},
    )


def _seed(run: Mapping[str, Any]) -> Seed:
    windows = run["windows"]
    return Seed(run["attainment_offered"] or 0.0, run["gpu_hours"] or 0.0, windows["passed"], windows["n"])


def _later(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Of all tiers; None where a run was over by then."""
    tiers = [run["board"][key].values() for run in runs]
    if any(one is None for each in tiers for one in each):
        return None
    return statistics.fmean(sum(each) for each in tiers)


def _tickets(runs: Sequence[Mapping[str, Any]]) -> Tickets:
    told = [run["tickets"] for run in runs]
    soon, later = ([one["honoured"][until] for one in told] for until in ("to_60_s", "to_120_s"))
    return Tickets(
        sum(one["refused"] for one in told),
        sum(one["given"] for one in told),
        sum(one["given"] for one in soon),
        sum(one["first_ok"] for one in soon),
        sum(one["given"] for one in later),
        sum(one["first_ok"] + one["second_ok"] for one in later),
    )


def waves(shed: Sequence[int]) -> int:
    """Stretches without a pause in which somebody was refused. shed: first attempts refused in each minute."""
    return sum(bool(now) and not before for before, now in itertools.pairwise((0, *shed)))
