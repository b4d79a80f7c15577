"""Whether a decision would leave a service as it is: what `decide` would conclude, in figures alone and no words.

Problem: of a thousand services hardly one moves at a tick, and a decision that explains itself is dear to make.

Idea: the conditions under which all eight steps come to the present count. Whatever is not plain (a start, a rate
limit, a schedule, a count that goes down) is no quiet service, and gets its decision. What goes on is the integrator of
the tail, and the trial of smaller counts that have not been enough for long enough: the state that a quiet tick leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.core.forecast import Odds, Unknown, is_worth, spare_replicas
from plimsoll.core.forecast.outlook import Outlook
from plimsoll.core.scaling.direction import chance, lasted_s, lower_marks
from plimsoll.core.scaling.policy import Policy, TierPolicy
from plimsoll.core.scaling.reserve import Stock, reserves
from plimsoll.core.scaling.sized import Line, margin_of
from plimsoll.core.scaling.state import NO_BACKOFF, Mark, TierState
from plimsoll.core.scaling.wanted import RESERVE_MARGIN, STALE_S, UNSURE, scaled


@dataclass(slots=True)
class Quiet:
    """One tier of a service that may be quiet.

    replicas: ordered, and all of them ready. tpot_s: the measured percentile.
    """

    policy: TierPolicy
    line: Line
    state: TierState
    replicas: int
    outlook: Outlook
    odds: Odds
    tpot_s: float | Unknown


class Counts:
    """What the last tick found of one service, which holds while it is asked the same: mostly from minute to minute."""

    __slots__ = ("asked", "found")

    def __init__(self) -> None:
        self.asked: tuple[object, ...] | None = None
        self.found: list[tuple[int, int]] | None = None


def allows(policy: Policy) -> bool:
    """Whether a service with this policy can be quiet at all."""
    least, most = policy.prefill_per_decode
    plain = all(tier.up is None and tier.down is None and not tier.schedule for tier in policy.tiers.values())
    return plain and least == 0.0 and math.isinf(most)


def stays(
    tiers: Sequence[Quiet], policy: Policy, headroom: float, now_s: float, before: Counts
) -> list[tuple[Mark, ...]] | None:
    """The smaller counts on trial of each tier, where all tiers of a service stay at their counts; else None.

    policy: one that `allows` it. before: one of this service for ever.
    """
    counts = _counts(tiers, policy.miss_cost, headroom, before)
    if counts is None:
        return None
    left = []
    aims = [max(up, min(tier.replicas, release)) for (up, release), tier in zip(counts, tiers, strict=True)]
    for place, tier in enumerate(tiers):
        up, release = counts[place]
        if up == 0 and any(
            aims[other] or tiers[other].policy.min_replicas for other in range(len(tiers)) if other != place
        ):
            up, release = 1, max(1, release)
            aims[place] = max(up, min(tier.replicas, release))
        marks = _rests(tier, up, release, now_s)
        if marks is None:
            return None
        left.append(marks)
    return left


def _counts(tiers: Sequence[Quiet], miss_cost: float, headroom: float, before: Counts) -> list[tuple[int, int]] | None:
    """The counts below which tiers grow, and those above which they shrink; None where one grows or is not known."""
    needs: list[tuple[int, int]] = []
    for tier in tiers:
        need = _need(tier, headroom)
        if need is None:
            return None
        needs.append(need)
    asked = (
        miss_cost,
        *[
            (of.odds, of.line, of.policy, of.replicas, need, of.outlook.ordinary, of.outlook.standing, _sure(of))
            for of, need in zip(tiers, needs, strict=True)
        ],
    )
    if asked != before.asked:
        before.asked, before.found = asked, _with_reserves(tiers, needs, miss_cost)
    return before.found


def _with_reserves(
    tiers: Sequence[Quiet], needs: Sequence[tuple[int, int]], miss_cost: float
) -> list[tuple[int, int]] | None:
    """`_counts`, from what the forecasts need."""
    if len(tiers) == 1:
        alone = _alone(tiers[0], *needs[0], miss_cost)
        return None if alone is None else [alone]
    needed = [_stock(tier, fewest) for tier, (fewest, _) in zip(tiers, needs, strict=True)]
    sure = all([_sure(tier) for tier in tiers])
    spare = reserves(needed, miss_cost) if sure else [0] * len(tiers)
    enough = all([n + t.policy.warm_replicas >= t.replicas for (_, n), t in zip(needs, tiers, strict=True)])
    kept = [0] * len(tiers)  # none goes without it either
    if not enough:
        released = [
            Stock(stock.odds, tier.outlook.standing, stock.replica_work, release, stock.most, stock.gpus)
            for stock, tier, (_, release) in zip(needed, tiers, needs, strict=True)
        ]
        kept = reserves(released, miss_cost * RESERVE_MARGIN)
    counts = []
    for (fewest, release), tier, more, stay in zip(needs, tiers, spare, kept, strict=True):
        warm = tier.policy.warm_replicas
        up = fewest + max(warm, more)
        if up > tier.replicas:
            return None
        counts.append((up, max(up, release + max(warm, stay))))
    return counts


def _stock(tier: Quiet, replicas: int) -> Stock:
    most = max(tier.policy.max_replicas, replicas)
    return Stock(tier.odds, tier.outlook.ordinary, tier.line.replica_work, replicas, most, tier.policy.gpus)


def _sure(tier: Quiet) -> bool:
    return tier.outlook.doubt <= UNSURE * tier.outlook.level


def _need(tier: Quiet, headroom: float) -> tuple[int, int] | None:
    """Fewest that carry the forecast, and fewest that may be left; None where it is more than there is, or unknown."""
    seen, line, before = tier.outlook, tier.line, tier.replicas
    if not (math.isfinite(seen.work) and seen.age_s <= STALE_S and line.replica_work > 0.0):
        return None
    fewest = release = line.fewest(seen.work, headroom)
    if fewest is None or fewest + tier.policy.warm_replicas > before:
        return None
    if before > fewest and seen.work > 0.0:
        release = line.fewest(seen.work * margin_of(seen.work, seen.doubt), headroom)
    return None if release is None else (fewest, release)


def _alone(tier: Quiet, fewest: int, release: int, miss_cost: float) -> tuple[int, int] | None:
    """`_counts` of a service of one tier. Where its count lies between the two, they are not worked out any further."""
    seen, before, warm = tier.outlook, tier.replicas, tier.policy.warm_replicas
    most = max(tier.policy.max_replicas, fewest)
    asked, sure = (tier.odds, seen.ordinary, tier.line.replica_work), _sure(tier)
    there = (tier.odds, tier.outlook.standing, tier.line.replica_work)
    if sure and before < most and is_worth(*asked, before, miss_cost):
        return None
    if fewest + warm == before or release + warm >= before:
        return fewest, before
    if before <= most and is_worth(*there, before - 1, miss_cost * RESERVE_MARGIN):
        return fewest, before
    up = fewest + max(warm, spare_replicas(*asked, fewest, most, miss_cost) if sure else 0)
    kept = spare_replicas(*there, release, most, miss_cost * RESERVE_MARGIN)
    return up, max(up, release + max(warm, kept))


def _rests(tier: Quiet, up: int, release: int, now_s: float) -> tuple[Mark, ...] | None:
    """The marks that are left, where the count stays: it is enough, and not too many, or for too short a time, or the
    least that is allowed."""
    before, least = tier.replicas, tier.policy.min_replicas
    if up > before or not least <= before <= tier.policy.max_replicas:
        return None
    if release >= before or up == before:
        return ()
    if before == least:
        marks = tier.state.lower
        same = marks and marks[-1].replicas == release and marks[0].replicas < before
        return marks if same else None
    level = tier.outlook.level
    if release == 0 or not level > 0.0:
        return None
    marks = lower_marks(tier.state.lower, before, release, now_s)
    # A larger count has lasted longer and is held for less: where the largest must wait, so must all.
    hold_s = tier.odds.horizon_s * chance(tier.odds, (before - 1) * tier.line.replica_work / level)
    return marks if lasted_s(marks, before - 1, now_s) < hold_s else None


def state_after(tier: Quiet, lower: tuple[Mark, ...], passed_s: float) -> TierState:
    """What a quiet tick leaves of a tier: its tail's scale has moved towards what is measured. lower: from `stays`."""
    state = tier.state if lower == tier.state.lower else tier.state._replace(lower=lower)
    measured = tier.tpot_s
    if isinstance(measured, Unknown) or not 0.0 < measured < math.inf:
        return state
    law_s = tier.line.tpot_s(tier.outlook.level, tier.replicas)
    if law_s is None:
        return state
    moved = scaled(state.tail_scale, measured, law_s, passed_s)
    return state if moved == state.tail_scale else state._replace(tail_scale=moved)


def settled(state: TierState, replicas: int) -> bool:
    """Whether the last decision left nothing that is still to run out."""
    return state.replicas == replicas and state.backoff == NO_BACKOFF and not state.ordered
