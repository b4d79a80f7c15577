"""Another chunk of prompt tokens for running engines, from what they measure. Pure.

Problem: the chunk that data sheets and typical lengths suggest (`core.planning.engine_tuning`) can be wrong for the
real engines and requests, and a new `slo.itl` changes what is right. But another chunk restarts every engine.

Idea: predict the SLO capacity of one replica with each chunk, from the measured step model and lengths. That is the
goodput at the SLO. Once an hour, the present chunk and the best other one compete.
- The gain must be MIN_GAIN with steps as measured, and with every step STEP_ERROR faster or slower. The way back needs
  the same gain, so the ratio of the two must move by the square of it before a change is reversed.
- CONFIRMING_HOURS in a row with enough load must prefer the same chunk. The last change is at least a day ago.
- After a change, hours are compared with hours before it at a comparable load of a replica, of the same SLO and
  platform generation. If the share of minutes within the SLO fell by MIN_LOSS and by LOSS_DEVIATIONS standard errors,
  or no further engine starts, the change is undone. That chunk is not tried again for REFUSED_S. An undo does not wait
  for the day to end, and the next day begins with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from plimsoll.core.autoscaling.retuning_state import (
    CONFIRMING_HOURS,
    MAX_REFUSED,
    Hour,
    RefusedChunk,
    RetuningState,
)
from plimsoll.core.autoscaling.slo_attainment import slo_attainment
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import TierSpec, build_profile, stack_profiles
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.planning.engine_settings import MAX_BUDGET_FILL, budget_fill
from plimsoll.core.planning.machine_model import TOKEN_BUDGETS
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.units import MINUTE_S, format_number

HOUR_S: Final = 3600.0
DAY_S: Final = 86400.0
MIN_GAIN: Final = 1.15  # predicted goodput over the present one
STEP_ERROR: Final = 0.1  # three times the 3 % within which the step model was fitted to vLLM
MIN_LOAD: Final = 0.25  # of the present SLO capacity: at less load, a replica has room with any chunk
MIN_MINUTES: Final = 30  # of an hour that counts
COMPARABLE_LOAD: Final = 1.25  # largest ratio of the loads of two hours that are compared
MIN_COMPARED_HOURS: Final = 6  # before and after a change
MIN_LOSS: Final = 0.05  # share of minutes within the SLO
LOSS_DEVIATIONS: Final = 4.0
START_S: Final = 2 * HOUR_S  # for the next engine with the new chunk, in a day
JUDGED_S: Final = 7 * DAY_S  # without comparable hours, a change stays
REFUSED_S: Final = 30 * DAY_S
_BISECTIONS: Final = 20


@dataclass(frozen=True, slots=True)
class Minute:
    """What a minute showed of the engines of a serve tier.

    revision: name of the template for the user's spec. deployed: the chunk that was set by measurement, 0 for none.
    is_settled: all engines are ready and have it. load_per_s: arrivals per replica. is_met: whether the minute was
    within the SLO, None if that is not measured. tier: inputs of the SLO capacity, None before they are measured.
    smallest: the engine's sequences, because vLLM does not start with a smaller chunk. largest: the largest chunk that
    the GPU is known to hold, 0 if unknown. basis: identifies the SLO and the platform's generation; only hours with the
    same are compared. is_rolled_out: whether Kubernetes has replaced all engines. progressed_s: when that last made
    progress, seconds since the epoch; 0 if it makes none. has_turn: whether few other services change now.
    """

    revision: str
    deployed: int
    is_settled: bool
    load_per_s: float
    is_met: bool | None
    tier: TierSpec | None
    smallest: int = 1
    largest: int = 0
    basis: str = ""
    is_rolled_out: bool = True
    progressed_s: float = 0.0
    has_turn: bool = True


def is_slo_met(metrics: ServiceMetrics, slo: Slo, class_slos: Sequence[Slo]) -> bool | None:
    """Whether the last minute was within the SLO, with rejected requests as misses; None if that is not measured."""
    share = slo_attainment(metrics, *class_slos).including_rejected
    tier = metrics.tiers.get(Role.SERVE)
    itl_s = Unavailable("no engine reports metrics") if tier is None else tier.lagging.itl_s
    if isinstance(share, Unavailable) or (slo.itl_s is not None and isinstance(itl_s, Unavailable)):
        return None
    return share >= slo.share and (slo.itl_s is None or isinstance(itl_s, Unavailable) or itl_s <= slo.itl_s)


def is_due(state: RetuningState, now_s: float, phase_s: float = 0.0) -> bool:
    """Whether the next minute is due; also after the clock was set back. phase_s: as for `update`."""
    return _is_over(state.minute_s, now_s, MINUTE_S, phase_s)


def _is_over(since_s: float, now_s: float, period_s: float, phase_s: float) -> bool:
    """Whether the minute or hour of `since_s` is over. They begin at fixed times of the clock."""
    return (now_s - phase_s) // period_s != (since_s - phase_s) // period_s


def update(state: RetuningState, minute: Minute, now_s: float, phase_s: float = 0.0) -> RetuningState:
    """The state after a minute.

    phase_s: when minutes and hours of this service begin, after those of the clock. So services take turns, also after
    a pause of the operator: a prediction takes a few tenths of a second.
    """
    if state.revision != minute.revision:
        state = RetuningState(minute.revision, changed_s=now_s, hour_s=now_s)
    state = replace(state, minute_s=now_s, changed_s=min(state.changed_s, now_s))
    if state.basis != minute.basis:
        state = replace(state, basis=minute.basis, before=(), hours=(), hour=Hour(), votes=0)
    if state.wanted is not None:
        if minute.deployed != state.wanted or not minute.is_rolled_out:
            progressed_s = min(max(state.changed_s, minute.progressed_s), state.changed_s + DAY_S)
            is_late = now_s - progressed_s > START_S and not state.is_undo
            return _undone(state, "no further engine was ready within 2 h", now_s) if is_late else state
        state = replace(state, wanted=None, hour_s=now_s, hour=Hour())
    if minute.is_settled:
        if minute.deployed == 0 and minute.tier is not None:
            state = replace(state, own=minute.tier.limits.token_budget)
        if minute.is_met is not None:
            state = replace(state, hour=_with_minute(state.hour, minute.load_per_s, minute.is_met))
    return _end_hour(state, minute, now_s) if _is_over(state.hour_s, now_s, HOUR_S, phase_s) else state


def _with_minute(hour: Hour, load_per_s: float, is_met: bool) -> Hour:
    minutes = hour.minutes + 1
    mean = hour.load_per_s + (load_per_s - hour.load_per_s) / minutes
    return Hour(mean, hour.met + is_met, minutes)


def _end_hour(state: RetuningState, minute: Minute, now_s: float) -> RetuningState:
    hour, state = state.hour, replace(state, hour=Hour(), hour_s=now_s)
    if hour.minutes < MIN_MINUTES:
        return state
    state = replace(state, hours=(*state.hours, hour)[-CONFIRMING_HOURS:])
    if state.before:
        return _judge(state, now_s)
    tier = minute.tier
    if tier is None or tier.slo.itl_s is None or not minute.is_settled:
        return state
    (present,) = predict_goodputs(tier, (tier.limits.token_budget,))
    if hour.load_per_s < MIN_LOAD * present.goodput_per_s:
        return state
    best = _preferred(state, tier, minute, now_s)
    if best is None:
        return replace(state, preferred=0, votes=0)
    votes = min(CONFIRMING_HOURS, state.votes + 1) if best.chunk == state.preferred else 1
    state = replace(state, preferred=best.chunk, votes=votes)
    if votes < CONFIRMING_HOURS or now_s - state.changed_s < DAY_S or not minute.has_turn:
        return state
    return _changed(state, minute.deployed, best, present)


def _changed(state: RetuningState, deployed: int, best: Prediction, present: Prediction) -> RetuningState:
    reason = (
        f"measured steps and lengths give {format_number(round(best.goodput_per_s, 2))} requests/s within the SLO per "
        f"replica, {format_number(round(present.goodput_per_s, 2))} with chunks of {present.chunk}, in each of "
        f"{CONFIRMING_HOURS} h"
    )
    return replace(
        state,
        changed_s=state.minute_s,
        wanted=0 if best.chunk == state.own else best.chunk,
        is_undo=False,
        reason=reason,
        former=deployed,
        before=state.hours,
        hours=(),
        preferred=best.chunk,
        votes=0,
    )


def _judge(state: RetuningState, now_s: float) -> RetuningState:
    """Undo a change after which the SLO was missed more, or end its judgement."""
    after = [hour for hour in state.hours if any(_is_comparable(hour, other) for other in state.before)]
    before = [hour for hour in state.before if any(_is_comparable(hour, other) for other in after)]
    if min(len(before), len(after)) >= MIN_COMPARED_HOURS:
        (old, old_error), (new, new_error) = _mean_and_error(before), _mean_and_error(after)
        if old - new > max(MIN_LOSS, LOSS_DEVIATIONS * math.hypot(old_error, new_error)):
            share = f"{100.0 * new:.0f} % of minutes were within the SLO, {100.0 * old:.0f} % before at the same load"
            return _undone(state, share, now_s)
    is_over = len(after) >= CONFIRMING_HOURS or now_s - state.changed_s > JUDGED_S
    return replace(state, before=()) if is_over else state


def _is_comparable(one: Hour, other: Hour) -> bool:
    return one.load_per_s <= COMPARABLE_LOAD * other.load_per_s <= COMPARABLE_LOAD**2 * one.load_per_s


def _mean_and_error(hours: Sequence[Hour]) -> tuple[float, float]:
    """Mean of the hours' shares and its standard error, at least that of single minutes."""
    shares = np.array([hour.met_share for hour in hours])
    mean, minutes = float(shares.mean()), sum(hour.minutes for hour in hours)
    of_minutes = math.sqrt(max(mean * (1.0 - mean), 1.0 / minutes) / minutes)
    return mean, max(float(shares.std(ddof=1)) / math.sqrt(shares.size), of_minutes)


def _undone(state: RetuningState, cause: str, now_s: float) -> RetuningState:
    refused = [one for one in state.refused if one.until_s > now_s and one.chunk != state.preferred]
    return replace(
        state,
        changed_s=now_s,
        wanted=state.former,
        is_undo=True,
        reason=f"the change to chunks of {state.preferred} is undone: {cause}",
        refused=(*refused, RefusedChunk(state.preferred, now_s + REFUSED_S))[-MAX_REFUSED:],
        before=(),
        hours=(),
        hour=Hour(),
        hour_s=now_s,
        preferred=0,
        votes=0,
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """goodput_per_s: requests per second within the SLO of one replica."""

    chunk: int
    goodput_per_s: float


def _preferred(state: RetuningState, tier: TierSpec, minute: Minute, now_s: float) -> Prediction | None:
    """The best other chunk; None if none is clearly better than the present one."""
    present = tier.limits.token_budget
    refused = {one.chunk for one in state.refused if one.until_s > now_s}
    largest = max(minute.largest, state.own)
    others = [
        chunk
        for chunk in sorted({*TOKEN_BUDGETS, *([state.own] if state.own else [])})
        if minute.smallest <= chunk <= largest and chunk != present and chunk not in refused
    ]
    goodputs = predict_goodputs(tier, (present, *others))
    best = max(goodputs[1:], key=lambda one: one.goodput_per_s, default=None)
    if best is None or not _is_gain(goodputs[0], best):
        return None
    pair = (present, best.chunk)
    is_sure = all(_is_gain(*predict_goodputs(tier, pair, factor)) for factor in (1.0 - STEP_ERROR, 1.0 + STEP_ERROR))
    return best if is_sure else None


def _is_gain(present: Prediction, other: Prediction) -> bool:
    return other.goodput_per_s > MIN_GAIN * present.goodput_per_s


def predict_goodputs(tier: TierSpec, chunks: Sequence[int], step_factor: float = 1.0) -> list[Prediction]:
    """The goodput of one replica with each chunk, the first being the present one. step_factor: scales every step.

    The others count only up to the rate at which steps fill a share of MAX_BUDGET_FILL: beyond it, prompts queue for
    longer than the TTFT model says.
    """
    scaled = replace(
        tier,
        model=_scaled(tier.model, step_factor),
        itl_model=None if tier.itl_model is None else _scaled(tier.itl_model, step_factor),
    )
    tiers = [replace(scaled, limits=replace(tier.limits, token_budget=chunk)) for chunk in chunks]
    rates = [float(rate) for rate in slo_capacity_per_s(stack_profiles([build_profile(one) for one in tiers]), 1)]
    return [
        Prediction(chunk, rate if index == 0 else _filled_rate_per_s(one, rate))
        for index, (chunk, one, rate) in enumerate(zip(chunks, tiers, rates, strict=True))
    ]


def _filled_rate_per_s(tier: TierSpec, rate_per_s: float) -> float:
    if budget_fill(tier, rate_per_s) <= MAX_BUDGET_FILL:
        return rate_per_s
    low, high = 0.0, rate_per_s
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if budget_fill(tier, middle) <= MAX_BUDGET_FILL else (low, middle)
    return low


def _scaled(model: StepModel, factor: float) -> StepModel:
    return StepModel(*(factor * getattr(model, field.name) for field in fields(model)))
