"""Whether a decision would leave a service as it is: what `decide` would conclude, in figures alone and no words.

Problem: of a thousand services hardly one moves at a tick, and a decision that explains itself is dear to make.

Idea: the conditions under which all eight steps come to the present count and leave the same marks. Whatever is not
plain (a start, a rate limit, a schedule, a count that is on its way down) is no quiet service, and gets its decision.
Only the integrator of the tail goes on, and that is the state that a quiet tick leaves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.core.forecast import Odds, Unknown, is_worth, spare_replicas
from plimsoll.core.forecast.outlook import Outlook
from plimsoll.core.scaling.policy import Policy, TierPolicy
from plimsoll.core.scaling.sized import Line, margin_of
from plimsoll.core.scaling.state import NO_BACKOFF, TierState
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


def allows(policy: Policy) -> bool:
    """Whether a service with this policy can be quiet at all."""
    least, most = policy.prefill_per_decode
    plain = all(tier.up is None and tier.down is None and not tier.schedule for tier in policy.tiers.values())
    return plain and least == 0.0 and math.isinf(most)


def stays(tiers: Sequence[Quiet], policy: Policy, headroom: float) -> bool:
    """Whether all tiers of a service stay at their counts, with the same marks. policy: one that `allows` it."""
    counts = []
    for tier in tiers:
        found = _counts(tier, policy.miss_cost, headroom)
        if found is None:
            return False
        counts.append(found)
    aims = [max(up, min(tier.replicas, release)) for (up, release), tier in zip(counts, tiers, strict=True)]
    for place, tier in enumerate(tiers):
        up, release = counts[place]
        if up == 0 and any(
            aims[other] or tiers[other].policy.min_replicas for other in range(len(tiers)) if other != place
        ):
            up, release = 1, max(1, release)
            aims[place] = max(up, min(tier.replicas, release))
        if not _rests(tier, up, release):
            return False
    return True


def _counts(tier: Quiet, miss_cost: float, headroom: float) -> tuple[int, int] | None:
    """The count below which the tier grows and that above which it shrinks; None where it grows or that is not known.

    Where the present count lies between the two, they are not worked out any further.
    """
    seen, line, before, warm = tier.outlook, tier.line, tier.replicas, tier.policy.warm_replicas
    if not (math.isfinite(seen.work) and seen.age_s <= STALE_S and line.replica_work > 0.0):
        return None
    fewest = release = line.fewest(seen.work, headroom)
    if fewest is None or fewest + warm > before:
        return None
    if before > fewest and seen.work > 0.0:
        release = line.fewest(seen.work * margin_of(seen.work, seen.doubt), headroom)
    if release is None:
        return None
    most = max(tier.policy.max_replicas, fewest)
    asked = (tier.odds, seen.ordinary, line.replica_work)
    sure = seen.doubt <= UNSURE * seen.level
    if sure and before < most and is_worth(*asked, before, miss_cost):
        return None
    if fewest + warm == before or release + warm >= before:
        return fewest, before
    if before <= most and is_worth(*asked, before - 1, miss_cost * RESERVE_MARGIN):
        return fewest, before
    up = fewest + max(warm, spare_replicas(*asked, fewest, most, miss_cost) if sure else 0)
    kept = spare_replicas(*asked, release, most, miss_cost * RESERVE_MARGIN)
    return up, max(up, release + max(warm, kept))


def _rests(tier: Quiet, up: int, release: int) -> bool:
    """Whether the count and its marks stay: it is enough, and not too many, or too many but the least allowed."""
    before, marks = tier.replicas, tier.state.lower
    if up > before or not tier.policy.min_replicas <= before <= tier.policy.max_replicas:
        return False
    if release >= before:
        return not marks
    if before != tier.policy.min_replicas or not marks or marks[-1].replicas != release:
        return False
    return marks[0].replicas < before


def state_after(tier: Quiet, passed_s: float) -> TierState:
    """What a quiet tick leaves of a tier: its tail's scale has moved towards what is measured."""
    measured = tier.tpot_s
    if isinstance(measured, Unknown) or not 0.0 < measured < math.inf:
        return tier.state
    law_s = tier.line.tpot_s(tier.outlook.level, tier.replicas)
    if law_s is None:
        return tier.state
    moved = scaled(tier.state.tail_scale, measured, law_s, passed_s)
    return tier.state if moved == tier.state.tail_scale else tier.state._replace(tail_scale=moved)


def settled(state: TierState, replicas: int) -> bool:
    """Whether the last decision left nothing that is still to run out."""
    return state.replicas == replicas and state.backoff == NO_BACKOFF and not state.ordered
