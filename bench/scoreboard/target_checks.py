"""Checks whether Plimsoll reaches a row's targets: offered and admitted attainment and GPU-hours together, by the means
of all seeds.

Other policies are compared with Plimsoll's runs of the same seeds: a reactive baseline that ran once has had one draw
of the load and of the machines, and Plimsoll's mean over ten others says nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from bench.scoreboard.rows import BoardRow, RowTargets
from bench.scoreboard.scoring import RetryAfterCounts, Score
from plimsoll.sim.frontier import FrontierPoint

MIN_WINDOWS_MET: Final = 0.99  # of windows: what has to pass for a promise to be kept
ORACLES: Final = frozenset({"clairvoyant"})  # who knows the future
OTHER_PLANT_ALLOWANCE: Final = (0.02, 1 / 1.05)  # on other plants: how far behind followers at which share of our cost
_MIN_FOLLOWERS: Final = 20  # followers on a frontier
_MIN_HONOURED: Final = 0.9
_MAX_REJECTION_WAVES: Final = 1  # of refusals, where clients come back
_BOUNDARY_EXTRA_REPLICAS: Final = 1.0  # replicas more, where the rate is just below what the least fleet carries


class TargetCheck(NamedTuple):
    """One figure of a row's reach."""

    name: str
    target: str
    found: str
    passed: bool


class PairedComparison(NamedTuple):
    """Another policy, and Plimsoll over the same seeds."""

    own: FrontierPoint
    other: FrontierPoint

    @property
    def attainment_gain(self) -> float:
        return self.other.attainment - self.own.attainment


def check_targets(
    row: BoardRow, own: Score, other_scores: Sequence[Score], nominal: bool, boundary: bool = False
) -> list[TargetCheck]:
    """Each figure that the row asks for. nominal: whether absolute figures bind on this plant; on others followers
    are what attainment and cost are judged by. boundary: whether the least fleet would not carry 5 % more."""
    reach, results = row.targets, []
    if nominal:
        results += _at_least("offered", reach.offered, own.offered.value)
        results += _at_least("admitted", reach.admitted, own.admitted.value)
        results += _at_most("GPU-hours", reach.gpu_hours, own.gpu_hours.value)
        results += _at_most("mean replicas", reach.mean_replicas, own.replicas.value)
    follower_count = follower_allowance(row, nominal)
    if follower_count is not None:
        results += _attainment_gap_check(*follower_count, own, other_scores)
    if nominal and reach.max_cost_ratio is not None:
        results += _cost_ratio_check(reach.max_cost_ratio, row, own, other_scores)
    if nominal and reach.windows is not None and own.windows is not None:
        results += _at_least("windows", reach.windows, own.windows)
    results += _fleet_checks(reach, own, other_scores, boundary)
    if row.clients != "none":
        results.append(
            TargetCheck(
                "waves of refusals", f"<= {_MAX_REJECTION_WAVES}", str(own.waves), own.waves <= _MAX_REJECTION_WAVES
            )
        )
    if own.shed_work is not None:
        results += _at_most("work of what was shed", 1.1, own.shed_work)
    return results


def follower_allowance(row: BoardRow, nominal: bool) -> tuple[float, float] | None:
    """By how much the best follower may be better, at which share of our cost; None where that is not asked."""
    reach = row.targets
    if nominal:
        return None if reach.max_attainment_gap is None else (reach.max_attainment_gap, reach.comparison_cost_share)
    return None if reach.max_attainment_gap is None and reach.max_cost_ratio is None else OTHER_PLANT_ALLOWANCE


def paired_comparisons(own: Score, others: Sequence[Score]) -> Iterator[PairedComparison]:
    """All but Plimsoll that were played with a seed that it was played with."""
    for score in others:
        seeds = own.each.keys() & score.each.keys()
        if score.family != own.family and seeds:
            yield PairedComparison(own.for_seeds(seeds), score.for_seeds(seeds))


def follower_comparisons(own: Score, others: Sequence[Score]) -> list[PairedComparison]:
    return list(paired_comparisons(own, [comparison for comparison in others if comparison.family == "follower"]))


def best_follower(own: Score, others: Sequence[Score], at_cost: float) -> PairedComparison | None:
    """The follower that is better by most at no more than a share of our GPU-hours."""
    affordable = [
        comparison
        for comparison in follower_comparisons(own, others)
        if comparison.other.gpu_hours <= comparison.own.gpu_hours * at_cost
    ]
    return max(
        affordable, key=lambda comparison: (comparison.attainment_gain, -comparison.other.gpu_hours), default=None
    )


def cheapest_equivalent(row: BoardRow, own: Score, others: Sequence[Score]) -> PairedComparison | None:
    """The cheapest, relative to ours, of those that attain as much, whoever they are but for those that know the
    future."""
    equivalent = [
        comparison
        for comparison in paired_comparisons(own, [each for each in others if each.family not in ORACLES])
        if is_equivalent(row, comparison.own, comparison.other)
    ]
    return min(equivalent, key=lambda comparison: comparison.other.gpu_hours / comparison.own.gpu_hours, default=None)


def is_equivalent(row: BoardRow, own: FrontierPoint, other: FrontierPoint) -> bool:
    """Whether it attains as much: by windows as many as Plimsoll, or as have to pass."""
    if row.compares_windows:
        return (other.windows_passed or 0.0) >= min(MIN_WINDOWS_MET, own.windows_passed or 0.0)
    return other.attainment >= own.attainment


def meets_windows(score: Score) -> bool:
    """Whether it keeps the promise in 99 % of windows."""
    return (score.windows or 0.0) >= MIN_WINDOWS_MET


def min_constant_fleet(others: Sequence[Score]) -> int | None:
    """Replicas of the smallest constant fleet that keeps the promise; None where the one below it was not played, and
    so where nobody knows."""
    fleets = {
        int(k): meets_windows(score) for score in others if (k := score.policy.removeprefix("static:")).isdecimal()
    }
    least = min((count for count, carries in fleets.items() if carries), default=None)
    return least if least == 1 or (least is not None and least - 1 in fleets) else None


def _fleet_checks(reach: RowTargets, own: Score, others: Sequence[Score], boundary: bool) -> list[TargetCheck]:
    """Of how the fleet went: what binds on every plant."""
    results: list[TargetCheck] = []
    if reach.reversals is not None:
        results.append(
            TargetCheck("reversals", f"<= {reach.reversals}", str(own.reversals), own.reversals <= reach.reversals)
        )
    if reach.max_extra_replicas is not None:
        results += _extra_replicas(_BOUNDARY_EXTRA_REPLICAS if boundary else reach.max_extra_replicas, own, others)
    if reach.honoured_retry_after is not None:
        results += _retry_after_check(reach.honoured_retry_after, own.retry_reservations)
    return results


def _retry_after_check(minimum: float, counts: RetryAfterCounts) -> list[TargetCheck]:
    """Admission of retries at the time that their reservation named."""
    if not counts.refused:
        return [
            TargetCheck("rejections with a retry reservation", f">= {_MIN_HONOURED:.0%}", "nothing was rejected", False)
        ]
    admitted = _at_least("rejections with a retry reservation", _MIN_HONOURED, counts.given / counts.refused)
    admitted += (
        _at_least("in at the first retry, to 60 s", minimum, counts.within_60_s_admitted / counts.within_60_s)
        if counts.within_60_s
        else []
    )
    return admitted + (
        _at_least("in by the second, 60 to 120 s", minimum, counts.within_120_s_admitted / counts.within_120_s)
        if counts.within_120_s
        else []
    )


def _extra_replicas(maximum: float, own: Score, others: Sequence[Score]) -> list[TargetCheck]:
    """Mean replicas over the smallest constant fleet that keeps the promise in 99 % of windows: after the first hour
    with all that was in reserve, and after the second, when no reserve of the prior may be left."""
    min_fleet = min_constant_fleet(others)
    if min_fleet is None or own.later is None or own.settled is None:
        return [
            TargetCheck("mean replicas over the least fleet", f"<= {maximum:.2f}", "no constant fleet keeps it", False)
        ]
    return [
        *_at_most(f"mean replicas over {min_fleet} after an hour", maximum, own.later - min_fleet),
        *_at_most(f"mean replicas over {min_fleet} after two", maximum, own.settled - min_fleet),
    ]


def _too_few_followers(name: str, required: str, played: int) -> list[TargetCheck]:
    """A frontier of a few settings proves nothing."""
    return (
        [TargetCheck(name, required, f"{played} were played, {_MIN_FOLLOWERS} are wanted", False)]
        if played < _MIN_FOLLOWERS
        else []
    )


def _at_least(name: str, required: float | None, found: float) -> list[TargetCheck]:
    return [] if required is None else [TargetCheck(name, f">= {required:.1%}", f"{found:.2%}", found >= required)]


def _at_most(name: str, required: float | None, found: float) -> list[TargetCheck]:
    return [] if required is None else [TargetCheck(name, f"<= {required:.2f}", f"{found:.3f}", found <= required)]


def _attainment_gap_check(maximum: float, at_cost: float, own: Score, others: Sequence[Score]) -> list[TargetCheck]:
    """How much better the best follower is that costs no more."""
    target = f"<= {maximum:.0%} behind followers" + ("" if at_cost == 1.0 else " at 5 % less")
    if too_few := _too_few_followers("followers", target, len(follower_comparisons(own, others))):
        return too_few
    best = best_follower(own, others, at_cost)
    if best is None:
        return [TargetCheck("followers", target, "none costs so little", True)]
    return [
        TargetCheck(
            "followers", target, f"{best.attainment_gain:+.2%} ({best.other.policy})", best.attainment_gain <= maximum
        )
    ]


def _cost_ratio_check(maximum: float, row: BoardRow, own: Score, others: Sequence[Score]) -> list[TargetCheck]:
    """GPU-hours over those of the cheapest that attains as much."""
    target = f"<= {maximum:.2f} times the cheapest as good"
    if too_few := _too_few_followers("cost", target, len(follower_comparisons(own, others))):
        return too_few
    best = cheapest_equivalent(row, own, others)
    if best is None:
        return [TargetCheck("cost", target, "none is as good", True)]
    times = best.own.gpu_hours / best.other.gpu_hours
    return [TargetCheck("cost", target, f"{times:.3f} ({best.other.policy})", times <= maximum)]
