"""The first three steps: what is coming, what it needs, and what measured latency says of the law.

Problem: sized on the count that the forecast needs alone, a fleet flaps at each boundary between two counts; and when
the forecast is lost, latency, queues and caches still tell that a tier is short.

Idea: two counts, one below which the fleet grows and a larger one above which it may shrink, each the larger of need
(with warm replicas) and of what is worth having in reserve against a leap. Where demand is not known the present count
is both, and the lagging signals may only raise it. One integrator alone, of the law's tail, closes the loop between
measured and expected latency; it acts through the next sizing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, TypeGuard

from plimsoll.core.forecast import Pause, SpareWorth, Unknown
from plimsoll.core.knee import Constraint
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.decision import Limit
from plimsoll.core.scaling.last import last
from plimsoll.core.scaling.observation import MEASURED_S, Measured, Need
from plimsoll.core.scaling.policy import Policy
from plimsoll.core.scaling.reserve import Stock, reserve, reserves
from plimsoll.core.scaling.state import LEAST_SCALE, MOST_SCALE
from plimsoll.core.slo import Slo
from plimsoll.core.windows import KEPT

STALE_S: Final = 30.0  # a sample older than this says nothing of the load of now

RESERVE_MARGIN: Final = 1.25  # a spare replica that is there is kept until its worth has fallen so far below its price
UNSURE: Final = 0.055  # of the level: while its error is more (the first minute or so), no reserve is bought on it
_DEMAND_WORDS: Final = (
    "up to {:.3g} GPU-s/s of work within {:.0f} s: "
    "level {:.3g}, trend {:.3g}, season {:.3g}, burst {:.3g}, doubt {:.3g}"
)
_NEED_WORDS: Final = "forecast {:.3g} req/s in {:.0f} s needs {} (knee {:.3g} req/s each{}, {} binds{}){}"

_PRESSED: Final = 1.05  # over a target by so much is beyond chance
_MOST_PRESSED: Final = 2.0  # latency near saturation says that there is too little, not how much
_KV_FULL: Final = 0.8  # share of the cache beyond which preemptions begin
_PREEMPTING: Final = 1.25

_INTEGRAL_S: Final = 600.0  # time in which the tail moves to what is measured
_LONGEST_STEP_S: Final = 60.0
_NOISE: Final = 0.05  # of log latency: a percentile over a minute is no surer
_SURPRISE: Final = 0.7


def demand(course: Course) -> None:
    """Step 1: the forecast, or why it is not known."""
    known, course.held = course.seen.demand, _unknown(course)
    course.up = course.release = course.seen.replicas
    if course.held is not None or isinstance(known, Unknown):
        course.say("demand", "not known: {}; {} held", course.held, course.seen.replicas)
        return
    found = known.forecast
    parts = (found.level, found.trend, found.season, found.burst, found.doubt)
    course.say("demand", _DEMAND_WORDS, found.work, found.horizon_s, *parts)


def _unknown(course: Course) -> str | None:
    """Why demand or its need is not known; None if both are."""
    demand, need = course.seen.demand, course.seen.need
    if isinstance(demand, Unknown):
        return demand.why
    if isinstance(need, Unknown):
        return need.why
    if demand.forecast.age_s > STALE_S:
        return f"the last sample is {demand.forecast.age_s:.0f} s old"
    if not (math.isfinite(demand.forecast.work) and need.replica_work > 0.0):
        return "the figures make no sense"
    return None


def reserved(courses: list[Course], policy: Policy) -> None:
    """Before step 2: what is worth having in reserve, of all tiers together whose demand and need are known.

    It is bought and kept against a leap from the ordinary load, so that none is there on top of a leap that has come.
    """
    known = [(one, one.seen.demand, one.seen.need) for one in courses if one.held is None]
    sure = True
    needed: list[tuple[Course, Stock]] = []
    released: list[Stock] = []
    for course, demand, sized in known:
        if isinstance(demand, Unknown) or isinstance(sized, Unknown):
            continue
        found = demand.forecast
        sure &= found.error <= UNSURE * found.level
        most = max(course.policy.max_replicas, sized.replicas)
        stock = Stock(demand.odds, found.ordinary, sized.replica_work, sized.replicas, most, course.policy.gpus)
        needed.append((course, stock))
        released.append(replace(stock, replicas=sized.release))
    if not needed:
        return
    if sure:
        bought = reserve([stock for _, stock in needed], policy.miss_cost)
        for (course, _), spare in zip(needed, bought.replicas, strict=True):
            course.spare, course.worth = spare, bought.worth
    if any(one.seen.replicas > stock.replicas for (one, _), stock in zip(needed, released, strict=True)):
        keeping = reserves(released, policy.miss_cost * RESERVE_MARGIN)
        for (course, _), kept in zip(needed, keeping, strict=True):
            course.kept = kept


def need(course: Course, policy: Policy, pause: Pause | Unknown) -> None:
    """Step 2: replicas for the forecast, warm ones, those in reserve against a leap, and whether the last one stays."""
    seen, demand, sized = course.seen, course.seen.demand, course.seen.need
    if course.held or isinstance(demand, Unknown) or isinstance(sized, Unknown):
        told = last(course, pause, policy.miss_cost)
        if course.up == seen.replicas:
            told = f"not known, so {seen.replicas} stay" + (f"; {told}" if told else "")
        course.say("need", "{}", told)
        return
    warm, spare = course.policy.warm_replicas, course.spare
    course.up = sized.replicas + max(warm, spare)
    course.release = max(course.up, sized.release + max(warm, course.kept))
    if seen.coverage < 1.0:
        course.release = max(course.release, seen.replicas)
    if sized.infeasible is not None:
        course.limited_by(Limit.INFEASIBLE)
    extra = _exceptions(course, sized)
    if spare > warm and course.worth is not None:
        extra += f", {spare} more against a leap ({_worth(course.worth)})"
    elif warm:
        extra += f", {warm} more warm"
    if (standing := min(seen.replicas, course.release) - max(course.up, sized.release + warm)) > 0:
        extra += f"; {standing} more kept against a leap"
    if told := last(course, pause, policy.miss_cost):
        extra += f"; {told}"
    line = sized.replica_work / sized.request_gpu_s
    room = f" less {sized.headroom:.0%} headroom" if sized.headroom else ""
    told = _measured(course, sized.constraint, policy.slo)
    known = (sized.rate_per_s, demand.forecast.horizon_s, sized.replicas, line, room, sized.constraint, told, extra)
    course.say("need", _NEED_WORDS, *known)


def _measured(course: Course, constraint: Constraint, slo: Slo | None) -> str:
    """How near what binds is to its target by what is measured, in words to be added; of slots and caches none."""
    value = _latencies(course.seen.measured).get(constraint)
    target_s = None if slo is None else dict(slo.targets).get(constraint)
    if slo is None or target_s is None or value is None or not _told(value):
        return ""
    return f": {slo.percentile(constraint)} {value * 1e3:.0f} ms now, target {target_s * 1e3:.0f} ms"


def _latencies(measured: Measured) -> dict[str, float | Unknown]:
    """By the names that targets have."""
    return {"TPOT": measured.tpot_s, "TTFT": measured.ttft_s, "e2e": measured.e2e_s, "itl": measured.itl_s}


def _exceptions(course: Course, need: Need) -> str:
    """What is out of the ordinary about a need, in words to be added."""
    words = ""
    if need.infeasible is not None:
        words = f"; {_infeasible_words(need)}"
    if need.short > 1.0:
        words += f"; {need.short:.2f} times the model's, since requests were refused with all ready"
    if course.seen.coverage < 1.0:
        words += f"; {course.seen.coverage:.0%} answered, so nothing goes down"
    elif need.replicas < course.seen.replicas <= need.release:
        words += f"; {need.release} are kept, too near the boundary"
    return words


def _infeasible_words(need: Need) -> str:
    assert need.infeasible is not None
    feasible = need.infeasible.feasible
    targets = [] if feasible is None else feasible.targets
    told = " and ".join(f"{name} {target * 1e3:.0f} ms" for name, target in targets if target is not None)
    broken = f"{need.infeasible.constraint} breaks it{need.infeasible.hint}"
    return f"no number of replicas keeps the promise ({broken}), sized for {told or 'none'}"


def _worth(worth: SpareWorth) -> str:
    return f"the reserve saves {worth.saving_gpu_s:.3g} GPU-s and takes {worth.cost_gpu_s:.3g}"


def counterfactual(course: Course, slo: Slo | None) -> str | None:
    """What the present count would give where more are needed; what one fewer would where some can go. Of gaps no share
    tells: they are said to be too long."""
    before, need = course.seen.replicas, course.seen.need
    if course.held is not None or isinstance(need, Unknown):
        return None
    fewer, kept = (before, need.attained) if need.replicas > before else (need.replicas - 1, need.one_fewer)
    if need.constraint is Constraint.ITL and slo is not None and kept >= slo.share and fewer > 0:
        return None if need.replicas == before else f"{fewer} would have too many long gaps between tokens"
    if need.replicas > before > 0:
        target_s = slo.tpot_s if slo is not None else None
        if need.tpot_s is None or target_s is None or need.tpot_s <= target_s:
            return _would_keep(before, need.attained, need, slo)
        if math.isinf(need.tpot_s):
            return f"{before} could not keep up with it"
        share = f"p{100 * slo.share:g} " if slo is not None else ""
        return f"{before} would give {share}TPOT {need.tpot_s * 1e3:.0f} ms, target {target_s * 1e3:.0f} ms"
    if 1 < need.replicas < before:
        return _would_keep(need.replicas - 1, need.one_fewer, need, slo)
    return None


def _would_keep(replicas: int, kept: float, need: Need, slo: Slo | None) -> str:
    """The share in promise; where it is the promised one and yet too few, how that share would come and go."""
    told = f"{replicas} would keep {kept:.1%} in promise" + ("" if slo is None else f", target {100 * slo.share:g}%")
    if slo is None or kept < slo.share or need.headroom or need.short > 1.0:
        return told
    return f"{told}, but not {100 * slo.share:g}% in {KEPT:.0%} of all windows"


def watch(course: Course, now_s: float) -> None:
    """Remember when more replicas became ready. As many as at the first look have been there for as long as matters."""
    before, ready = course.state.ready, course.seen.ready
    if before is not None and ready > before:
        course.keep("grown_s", now_s)
    course.keep("ready", ready)


def feedback(course: Course, courses: list[Course], slo: Slo | None, passed_s: float, now_s: float) -> None:
    """Step 3. courses: all tiers; passed_s: since the last decision.

    Demand known: latency moves the law's tail, by one integrator, and nothing else. Demand unknown: a tier whose own
    signals say that it is short grows, from what is ready, so that saying it twice adds nothing. What is measured of
    requests counts once all of them came when so many were ready: those that waited for a start say nothing of it.
    """
    if course.held is None:
        course.say("feedback", *_integrate(course, passed_s))
        return
    elsewhere = max((_pressed(other, slo, math.inf, now_s)[0] for other in courses if other is not course), default=0.0)
    pressure, words = _pressed(course, slo, elsewhere, now_s)
    wanted = math.ceil(max(course.seen.ready, 1) * min(pressure, _MOST_PRESSED) - 1e-9)
    if pressure > _PRESSED and wanted > course.up:
        course.up = course.release = wanted
        course.say("feedback", "{}: {}, from {} ready", words, wanted, course.seen.ready)
        return
    course.say("feedback", "{}", words)


def _pressed(course: Course, slo: Slo | None, elsewhere: float, now_s: float) -> tuple[float, str]:
    """How much more load a tier carries than it should by its lagging signals (1: just what it should), in words.

    TTFT and e2e hold the wait for the other tier too: they count only where it is not pressed itself (`elsewhere`).
    """
    measured, ready = course.seen.measured, max(course.seen.ready, 1)
    same_s = math.inf if course.state.grown_s is None else now_s - course.state.grown_s - MEASURED_S
    found = [(0.0, "no lagging signal is known")]
    if same_s < 0.0:
        found = [(0.0, f"{course.seen.ready} are ready for {same_s + MEASURED_S:.0f} s, too short to be measured")]
    if slo is not None:
        targets = dict(slo.targets)
        for name, value in _latencies(measured).items():
            here, target_s = name in ("TPOT", "itl"), targets[name]
            if target_s is None or not _told(value) or (not here and elsewhere > _PRESSED):
                continue
            if same_s < (0.0 if here else value):
                continue
            words = f"{slo.percentile(name)} {name} {value * 1e3:.0f} ms, target {target_s * 1e3:.0f} ms"
            found.append((value / target_s, words))
    if _told(measured.waiting):
        found.append((measured.waiting / ready, f"{measured.waiting:.0f} requests wait for {ready} ready"))
    if _told(measured.kv_used):
        found.append((measured.kv_used / _KV_FULL, f"KV cache {measured.kv_used:.0%} full"))
    if _told(measured.preemptions_per_s) and measured.preemptions_per_s > 0.0 and same_s >= 0.0:
        found.append((_PREEMPTING, f"{measured.preemptions_per_s:.2g} preemptions/s"))
    return max(found)


def _told(value: float | Unknown) -> TypeGuard[float]:
    return not isinstance(value, Unknown) and 0.0 <= value < math.inf


def _integrate(course: Course, passed_s: float) -> tuple[str, *tuple[object, ...]]:
    """Move the tail towards what was measured, where the fleet is settled and all of it answered."""
    need, measured = course.seen.need, course.seen.measured.tpot_s
    law_s = None if isinstance(need, Unknown) else need.law_tpot_s
    settled = course.seen.ready == course.seen.replicas and not course.seen.starting and course.seen.coverage == 1.0
    if law_s is None or isinstance(measured, Unknown) or not 0.0 < measured < math.inf:
        return ("no measured TPOT to hold the law against",)
    words = "TPOT {:.0f} ms, by the law {:.0f} ms"
    if not settled:
        return f"{words}: not counted while replicas come and go", measured * 1e3, law_s * 1e3
    course.keep("tail_scale", scaled(course.state.tail_scale, measured, law_s, passed_s))
    return f"{words}: tail {{:.3g}} times its prior", measured * 1e3, law_s * 1e3, course.state.tail_scale


def scaled(tail_scale: float, measured_s: float, law_s: float, passed_s: float) -> float:
    """The tail's scale after passed_s of a settled fleet with this percentile of TPOT, measured and by the law."""
    error = math.log(measured_s / law_s)
    if abs(error) <= _NOISE:
        return tail_scale
    error = min(max(error, -_SURPRISE), _SURPRISE)
    moved = tail_scale * math.exp(error * min(passed_s, _LONGEST_STEP_S) / _INTEGRAL_S)
    return min(max(moved, LEAST_SCALE), MOST_SCALE)
