"""Step 6: up at once and all the way, down only when it is worth it.

Problem: a replica given back too early is paid for twice, in misses and in a new start; one kept too long is paid for
in GPU-hours; and a count that follows every wiggle flaps.

Idea: ski rental: a replica is kept for as long as its going is worth (Karlin et al. 1988 for the bound; probabilities,
from the odds of leaps and from needs that did come back, make it an expectation). Who returns pays a start, L seconds
of a replica, and for L seconds what it would have served is missed: missCost times its work. With P the probability
that the need returns, S the part of it that was seen, and u what a replica serves a second, the hold is
L (P + S missCost u). A leap that was never seen adds no misses, since the reserve is bought for these. Beyond the time
within which returns are counted nothing is known of them: that is the most.

For each count that would have been enough it is remembered since when, without a break; the fleet goes at once to the
smallest count for which that has lasted for its hold time. That is the whole delay. Whether the last one goes is the
`last` module's question.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from plimsoll.core.forecast import Odds, Unknown
from plimsoll.core.scaling import returns
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.decision import DIRECTION
from plimsoll.core.scaling.observation import Demand, Need
from plimsoll.core.scaling.state import MOST_KEPT, Mark, Returns


def direction(courses: list[Course], miss_cost: float, now_s: float) -> None:
    """Step 6 for all tiers, which reach zero together. miss_cost: as of the policy."""
    counts = [_count(course, miss_cost, now_s) for course in courses]
    some = any(count for count, _ in counts)
    for course, (count, words) in zip(courses, counts, strict=True):
        if some and count == 0:
            count, words = 1, "the last one goes when the other tier's may go too"
        course.say(DIRECTION, "{}", words, count=count)


def _count(course: Course, miss_cost: float, now_s: float) -> tuple[int, str]:
    before = course.seen.replicas
    _watch(course, now_s)
    if course.up >= before or (course.held is not None and not course.asleep):
        course.keep("lower", ())
        return course.up, "up at once" if course.up > before else "stays"
    marks = lower_marks(course.state.lower, before, course.release, now_s)
    course.keep("lower", marks)
    if not marks:
        return before, "stays"
    # The marks stay even where they are acted on: what follows may forbid it for now. A larger count has lasted longer
    # and is held for less.
    counts = range(marks[-1].replicas, before)
    left = bisect_left(counts, 0.0, key=lambda count: lasted_s(marks, count, now_s) - _hold_s(course, miss_cost, count))
    if left == len(counts):
        hold_s = _hold_s(course, miss_cost, before - 1)
        left_s = hold_s - lasted_s(marks, before - 1, now_s)
        words = f"{before - 1} would be enough; down in {left_s:.0f} s of {hold_s:.0f} s unless the need returns"
        return before, words + _why_so_long(course, miss_cost, before - 1)
    reached = counts[left]
    if reached == 0 and course.asleep:
        return 0, "at once, since the pause was waited for"
    enough_s, hold_s = lasted_s(marks, reached, now_s), _hold_s(course, miss_cost, reached)
    words = f"at most {reached} needed for {enough_s:.0f} s, the rest kept for {hold_s:.0f} s"
    return reached, words + _why_so_long(course, miss_cost, reached)


def _watch(course: Course, now_s: float) -> None:
    """Count needs that return; what happens while they are not known is no trial."""
    known, seen, need = course.state.returns, course.seen, course.seen.need
    if course.held is not None or isinstance(need, Unknown):
        course.keep("returns", known._replace(idle=()))
        return
    counts = seen.replicas, seen.ready, need.filled, course.release
    course.keep("returns", returns.tried(known, *counts, course.bounds[0], seen.horizon_s, now_s))


def _why_so_long(course: Course, miss_cost: float, replicas: int) -> str:
    """What the hold time is made of, in words."""
    demand, need, known = course.seen.demand, course.seen.need, course.state.returns
    if not isinstance(demand, Demand) or isinstance(need, Unknown):
        return ": as long as a start takes, since what comes is not known"
    start_s, prior = demand.forecast.horizon_s, _leaps(demand, need, replicas)
    returning, missed = returns.chance(known, prior), miss_cost * need.replica_work * returns.seen(known)
    words = f": a start takes {start_s:.0f} s, and more are needed within it with a chance of {returning:.0%}"
    if missed:
        words += f", and what is missed then is worth {start_s * missed:.0f} s more"
    if returning + missed > returns.STARTS:
        words += f"; {returns.STARTS:.0f} starts at most"
    if replicas and returning > prior:
        within_s = returns.STARTS * course.seen.horizon_s
        words += f" (of {known.trials:.0f} that were idle {known.again:.0f} were needed again within {within_s:.0f} s)"
    return words


def lasted_s(marks: tuple[Mark, ...], replicas: int, now_s: float) -> float:
    """For how long so many replicas would have been enough."""
    return now_s - next(mark.since_s for mark in marks if mark.replicas <= replicas)


def lower_marks(lower: tuple[Mark, ...], before: int, release: int, now_s: float) -> tuple[Mark, ...]:
    """Counts that would have been enough, largest first, each since when: a stack that a higher need cuts off.

    lower: as they were. before: replicas ordered. release: what would be enough now.
    """
    kept = [
        Mark(mark.replicas, min(mark.since_s, now_s))  # a clock that was set back
        for mark in lower
        if release <= mark.replicas < before
    ]
    if release < before and (not kept or kept[-1].replicas > release):
        kept.append(Mark(release, now_s))
    return tuple(kept[-MOST_KEPT:])


def _hold_s(course: Course, miss_cost: float, replicas: int) -> float:
    """How long `replicas` must have been enough before the rest is given back, seconds."""
    demand, need = course.seen.demand, course.seen.need
    if replicas == 0 and course.asleep:
        return 0.0  # a pause that ends it has been waited for
    if not isinstance(demand, Demand) or isinstance(need, Unknown):
        return course.seen.horizon_s
    missed = miss_cost * need.replica_work
    return held_s(course.state.returns, demand.forecast.horizon_s, _leaps(demand, need, replicas), missed)


def held_s(known: Returns, horizon_s: float, leaps: float, missed: float) -> float:
    """The hold time of a count that load outgrows within the horizon with probability `leaps`, seconds.

    missed: what a replica's being away costs, GPU-seconds a second, where it is needed.
    """
    return horizon_s * min(returns.STARTS, returns.chance(known, leaps) + missed * returns.seen(known))


def _leaps(demand: Demand, need: Need, replicas: int) -> float:
    """Probability that load outgrows so many replicas within the horizon; 1 for none, since any request does.

    From nothing no growth can be reckoned: what has been away for a time t comes back within L with L / (t + L), if
    nothing is known of its pauses (Gott 1993). So a fleet whose arrivals stop is held for 0.62 of a start-up.
    """
    found = demand.forecast
    if replicas == 0:
        return 1.0
    if found.level > 0.0:
        return chance(demand.odds, replicas * need.replica_work / found.level)
    away_s = found.changed_s_ago if found.changed_s_ago is not None else found.horizon_s
    return found.horizon_s / (found.horizon_s + away_s) if found.horizon_s > 0.0 else 0.0


def chance(odds: Odds, factor: float) -> float:
    """Probability of growth past a factor: 1 up to 1, linear between those of the odds, falling as 1/x^2 beyond."""
    if factor <= 1.0:
        return 1.0
    farthest = odds.factors[-1]
    if factor <= farthest:
        return odds.past(factor)[0]
    return odds.exceedance[-1] * (farthest / factor) ** 2 if math.isfinite(factor) else 0.0
