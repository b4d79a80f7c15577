"""Steps 1 to 3: the forecast, the replicas that it needs, and feedback from measured latency.

Problem: a tier that follows the forecast's count alone flaps at each boundary between two counts. Without a forecast,
latency, queues and caches still show that a tier is short.

Idea: two targets. The tier grows below the scale-up target and may shrink above the larger scale-down target. Each
includes warm replicas or standby replicas, whichever are more. If the demand is unknown, both are the current count,
and lagging signals can only raise it. A single integrator, of the scale of the TPOT tail, closes the loop between
measured and modelled latency. It acts through the next sizing.
"""

from __future__ import annotations

import math
from typing import Final, TypeGuard

from plimsoll.core.autoscaling.decision_state import MAX_TAIL_SCALE, MIN_TAIL_SCALE
from plimsoll.core.autoscaling.model_mismatch import sizing_mismatches
from plimsoll.core.autoscaling.observations import (
    LATENCY_WINDOW_S,
    LaggingSignals,
    NoDemand,
    SizingResult,
    TierDemand,
    name_constraint,
)
from plimsoll.core.autoscaling.scale_to_zero import apply_scale_to_zero
from plimsoll.core.autoscaling.scaling_decision import ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.standby_sizing import (
    StandbyInput,
    is_level_certain,
    joint_standby_replicas,
    plan_standby,
)
from plimsoll.core.autoscaling.tier_context import TierContext
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.capacity.windowed_slo import WINDOW_CONFIDENCE
from plimsoll.core.demand.idle_periods import IdlePeriod
from plimsoll.core.demand.standby_value import CostBenefit
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_figure, format_number, format_rate, format_seconds, format_wait

DEMAND_STALE_S: Final = 30.0  # an older sample does not show the current load

STANDBY_RETENTION_MARGIN: Final = 1.25  # a standby replica is kept until its cost exceeds its value by this factor
_DEMAND_MESSAGE: Final = (
    "forecast {:figure} GPU-s/s of work within {:wait}: "
    "level {:figure}, trend {:figure}, season {:figure}, burst {:figure}, uncertainty {:figure}"
)
_SIZING_MESSAGE: Final = "forecast {:rate} in {:wait} needs {} (SLO capacity {:rate} each{}, limited by {}{}){}"
_SIZING_BRIEF: Final = "forecast {0:rate} in {1:wait} needs {2} (SLO capacity {3:rate} each){8}"

_PRESSURE_THRESHOLD: Final = 1.05  # excess over a target that exceeds measurement noise
_MAX_PRESSURE: Final = 2.0  # near saturation, latency does not show the size of the shortage
_KV_USED_LIMIT: Final = 0.8  # share of the cache above which preemptions begin
_PREEMPTION_PRESSURE: Final = 1.25

_INTEGRATION_TIME_S: Final = 600.0  # time constant of the tail scale
_MAX_STEP_S: Final = 60.0
_LOG_LATENCY_NOISE: Final = 0.05  # noise of the log of a one-minute percentile
_MAX_LOG_ERROR: Final = 0.7


def keep_minimum(context: TierContext, missing_field: str) -> None:
    """Steps 1 to 4 and 6 of a tier without a target: it is not sized, and keeps its lower bound.

    missing_field: the field of the spec that would size it.
    """
    context.scale_up_target = context.scale_down_target = context.bounds[0]
    context.set_state("downscale_candidates", ())
    context.set_state("downscale_regret", context.state.downscale_regret._replace(idle=()))
    message = "{} is not set, so the tier is not sized: minReplicas is {}"
    context.add_step("sizing", message, missing_field, context.bounds[0])


def apply_forecast(context: TierContext) -> None:
    """Step 1: the forecast, or the reason why it is unknown."""
    tier_demand, context.hold_reason = context.observation.demand, _hold_reason(context)
    context.scale_up_target = context.scale_down_target = context.observation.replicas
    if isinstance(tier_demand, NoDemand):
        message = "none: no request for {:wait}, and all gateways and engines report"
        context.add_step("demand", message, tier_demand.idle_s)
        return
    if context.hold_reason is not None or isinstance(tier_demand, Unavailable):
        context.add_step(
            "demand", "unknown: {}; replica count stays at {}", context.hold_reason, context.observation.replicas
        )
        return
    forecast = tier_demand.forecast
    parts = (forecast.level, forecast.trend, forecast.season, forecast.burst, forecast.uncertainty)
    context.add_step("demand", _DEMAND_MESSAGE, forecast.work, forecast.horizon_s, *parts)


def _hold_reason(context: TierContext) -> str | None:
    """Return why the demand or its sizing is unknown; None if both are known."""
    demand, sizing = context.observation.demand, context.observation.sizing
    if isinstance(demand, NoDemand):
        return None
    if isinstance(demand, Unavailable):
        return demand.reason
    if isinstance(sizing, Unavailable):
        return sizing.reason
    if demand.forecast.age_s > DEMAND_STALE_S:
        return f"the last sample is {format_wait(demand.forecast.age_s)} old"
    if not (math.isfinite(demand.forecast.work) and sizing.replica_work > 0.0):
        return "the forecast or the capacity is not a valid number"
    return None


def apply_standby(contexts: list[TierContext], policy: ScalingPolicy) -> None:
    """Before step 2: set the standby replicas of all tiers with known demand and sizing, jointly.

    They cover a level shift from the baseline load, so a shift that has already happened does not add more.
    """
    known_tiers = [
        (tier, tier.observation.demand, tier.observation.sizing) for tier in contexts if tier.hold_reason is None
    ]
    is_certain = True
    inputs: list[tuple[TierContext, StandbyInput]] = []
    for context, demand, sizing in known_tiers:
        if not isinstance(demand, TierDemand) or isinstance(sizing, Unavailable):
            continue
        forecast = demand.forecast
        is_certain &= is_level_certain(forecast.level, forecast.level_error)
        base = context.standby_base = _standby_base(context.state.standby_base, sizing)
        context.set_state("standby_base", base)
        largest_own_work = forecast.baseline * demand.growth.own_growth
        standby_input = StandbyInput(
            demand.growth,
            forecast.baseline,
            sizing.replica_work,
            base,
            max(context.policy.max_replicas, base),
            context.policy.gpus_per_replica,
            max(0, math.ceil(largest_own_work / sizing.replica_work - 1e-9) - base),
        )
        inputs.append((context, standby_input))
    if not inputs:
        return
    standby_inputs = [standby_input for _, standby_input in inputs]
    if is_certain:
        plan = plan_standby(standby_inputs, policy.miss_cost)
        for (context, _), standby in zip(inputs, plan.replicas, strict=True):
            context.standby, context.standby_value = standby, plan.value
    if any(tier.observation.replicas > standby_input.replicas for tier, standby_input in inputs):
        retained_counts = joint_standby_replicas(standby_inputs, policy.miss_cost * STANDBY_RETENTION_MARGIN)
        for (context, _), retained in zip(inputs, retained_counts, strict=True):
            context.retained_standby = retained


def apply_sizing(
    context: TierContext,
    policy: ScalingPolicy,
    idle_period: IdlePeriod | Unavailable,
) -> None:
    """Step 2: replicas for the forecast, warm and standby replicas, and scale to zero."""
    observation, demand, sizing = context.observation, context.observation.demand, context.observation.sizing
    if isinstance(demand, NoDemand):
        context.scale_up_target = context.scale_down_target = context.policy.warm_replicas
        note = apply_scale_to_zero(context, idle_period, policy.miss_cost)
        required = max(context.scale_up_target, context.bounds[0])
        context.scale_up_target = context.scale_down_target = required
        message = "no request for {:wait}: " + ("minReplicas is {}" if required == context.bounds[0] else "{} kept")
        context.add_step("sizing", message + ("; {}" if note else ""), demand.idle_s, required, note)
        return
    if context.hold_reason or isinstance(demand, Unavailable) or isinstance(sizing, Unavailable):
        note = apply_scale_to_zero(context, idle_period, policy.miss_cost)
        if context.scale_up_target == observation.replicas:
            note = f"demand unknown, replica count stays at {observation.replicas}" + (f"; {note}" if note else "")
        context.add_step("sizing", "{}", note)
        return
    warm, standby = context.policy.warm_replicas, context.standby
    base = context.standby_base
    context.scale_up_target = max(sizing.replicas + warm, base + standby)
    context.scale_down_target = max(
        context.scale_up_target, sizing.scale_down_replicas + warm, base + context.retained_standby
    )
    if observation.coverage < 1.0:
        context.scale_down_target = max(context.scale_down_target, observation.replicas)
    late_note = _keep_while_late(context, sizing)
    if sizing.infeasible is not None:
        context.add_limit(ScalingLimit.INFEASIBLE)
    extra, reserve_notes = _reserve_notes(context, sizing)
    notes = _exception_notes(context, sizing) + late_note + reserve_notes
    idle_note = apply_scale_to_zero(context, idle_period, policy.miss_cost)
    if idle_note:
        notes += f"; {idle_note}"
    capacity_per_s = sizing.replica_work / sizing.request_gpu_s
    headroom_note = f" less {sizing.headroom:.0%} headroom" if sizing.headroom else ""
    note = _measured_note(context, sizing.constraint, policy.slo)
    values = (
        sizing.rate_per_s,
        demand.forecast.horizon_s,
        sizing.replicas,
        capacity_per_s,
        headroom_note,
        sizing.limited_by,
        note,
        notes,
        idle_note or extra + _correction_note(sizing),
    )
    context.add_step("sizing", _SIZING_MESSAGE, *values, brief="{8}" if idle_note else _SIZING_BRIEF)


def _keep_while_late(context: TierContext, sizing: SizingResult) -> str:
    """Keep as many replicas that none carries a load at which first tokens were late. Return why, as a suffix.

    They contradict a model by which fewer replicas would do. If no number of replicas meets the SLO, it is not known
    that another one helps.
    """
    carried_per_s = context.observation.carried_per_s
    kept = min(math.ceil(sizing.rate_per_s / carried_per_s - 1e-9), context.observation.replicas)
    if sizing.infeasible is not None or kept <= context.scale_down_target:
        return ""
    context.scale_down_target = kept
    return f"; {kept} kept, because first tokens were late at more than {format_rate(carried_per_s)} per replica"


def _standby_base(previous: int, sizing: SizingResult) -> int:
    """Return the needed replicas to which standby replicas are added.

    A need that has grown by less than half a replica uses a standby replica, and orders no other: the mean work of a
    request moves by as much while the load is constant.
    """
    carried = sizing.rate_per_s * sizing.request_gpu_s * sizing.capacity_correction
    is_small = carried <= (previous + 0.5) * sizing.replica_work * (1.0 - sizing.headroom)
    return previous if previous == sizing.replicas - 1 and previous > 0 and is_small else sizing.replicas


def _reserve_notes(context: TierContext, sizing: SizingResult) -> tuple[str, str]:
    """Return the warm or standby replicas as a suffix of the brief and of the full sizing message."""
    warm, standby, extra, notes = context.policy.warm_replicas, context.standby, "", ""
    if standby > warm and context.standby_value is not None:
        extra = f", plus {standby} standby"
        notes = f"{extra} ({_standby_note(context.standby_value)})"
    elif warm:
        extra = notes = f", plus {warm} warm"
    kept = min(context.observation.replicas, context.scale_down_target)
    if (retained := kept - max(context.scale_up_target, sizing.scale_down_replicas + warm)) > 0:
        notes += f"; {retained} more kept as standby"
    return extra, notes


def _correction_note(sizing: SizingResult) -> str:
    correction, offset_s = sizing.capacity_correction, sizing.ttft_offset_s
    note = f", TTFT {format_seconds(offset_s)} above the model" if offset_s else ""
    cause = "after rejections" if sizing.itl_limit is None else "by itl"
    return f"{note}, capacity correction {correction:.2f} {cause}" if correction > 1.0 else note


def _measured_note(context: TierContext, constraint: Constraint, slo: Slo | None) -> str:
    """Return the measured value and the target of the constraint as a suffix; empty for slots and KV cache."""
    value = _latency_signals(context.observation.lagging).get(constraint)
    target_s = None if slo is None else dict(slo.targets).get(constraint)
    if slo is None or target_s is None or value is None or not _is_known(value):
        return ""
    return f": {slo.percentile(constraint)} {format_seconds(value)} now, target {format_seconds(target_s)}"


def _latency_signals(measured: LaggingSignals) -> dict[str, float | Unavailable]:
    """Return the measured latencies by target name."""
    return {"TPOT": measured.tpot_s, "TTFT": measured.ttft_s, "e2e": measured.e2e_s, "itl": measured.itl_s}


def _exception_notes(context: TierContext, sizing: SizingResult) -> str:
    """Return infeasibility, capacity correction and missing metrics as a suffix of the sizing message."""
    notes = ""
    if sizing.infeasible is not None:
        notes = f"; {_infeasible_note(sizing)}"
    notes += "".join(f"; {mismatch.evidence}" for mismatch in sizing_mismatches(sizing))
    if context.observation.coverage < 1.0:
        notes += f"; no scale-down, because only {context.observation.coverage:.0%} report metrics"
    elif sizing.replicas < context.observation.replicas <= sizing.scale_down_replicas:
        notes += f"; {sizing.scale_down_replicas} kept, within the scale-down margin"
    return notes


def _infeasible_note(sizing: SizingResult) -> str:
    assert sizing.infeasible is not None
    feasible = sizing.infeasible.nearest_slo
    targets = [] if feasible is None else feasible.targets
    looser_targets = " and ".join(f"{name} {format_seconds(target)}" for name, target in targets if target is not None)
    violated = name_constraint(sizing.infeasible.constraint, sizing.target_classes)
    cause = f"limited by {violated}{sizing.infeasible.hint}"
    return f"no number of replicas meets the SLO ({cause}), sized for {looser_targets or 'none'}"


def _standby_note(value: CostBenefit) -> str:
    return f"saves {format_figure(value.saving_gpu_s)} GPU-s, costs {format_figure(value.cost_gpu_s)} GPU-s"


def counterfactual(context: TierContext, slo: Slo | None) -> str | None:
    """Return the expected latency or attainment of the current count, or of one fewer than needed, as a sentence.

    None if it is unknown. A violated ITL target has no attainment, so the sentence names the violation.
    """
    current, sizing = context.observation.replicas, context.observation.sizing
    if context.hold_reason is not None or isinstance(sizing, Unavailable):
        return None
    fewer, attainment = (
        (current, sizing.attainment)
        if sizing.replicas > current
        else (sizing.replicas - 1, sizing.attainment_one_fewer)
    )
    if sizing.constraint is Constraint.ITL and slo is not None and attainment >= slo.share and fewer > 0:
        return None if sizing.replicas == current else f"{fewer} would exceed the inter-token latency target"
    if sizing.replicas > current > 0:
        target_s = slo.tpot_s if slo is not None else None
        if sizing.tpot_s is None or target_s is None or sizing.tpot_s <= target_s:
            return _attainment_note(current, sizing.attainment, sizing, slo)
        if math.isinf(sizing.tpot_s):
            return f"{current} could not carry the load"
        share = f"p{format_number(100 * slo.share)} " if slo is not None else ""
        return f"{current} would give {share}TPOT {format_seconds(sizing.tpot_s)}, target {format_seconds(target_s)}"
    if 1 < sizing.replicas < current:
        return _attainment_note(sizing.replicas - 1, sizing.attainment_one_fewer, sizing, slo)
    return None


def _attainment_note(replicas: int, attainment: float, sizing: SizingResult, slo: Slo | None) -> str:
    """Return the attainment with `replicas` as a sentence.

    If the mean attainment is sufficient, it adds that single windows would miss the SLO.
    """
    note = f"{replicas} would meet the SLO for {attainment:.1%} of the requests" + (
        "" if slo is None else f", target {format_number(100 * slo.share)}%"
    )
    if slo is None or attainment < slo.share or sizing.headroom:
        return note
    if sizing.capacity_correction > 1.0:
        evidence = "the rejections contradict" if sizing.itl_limit is None else "itl contradicts"
        return f"{note}, by the model, which {evidence}"
    return f"{note}, but not {format_number(100 * slo.share)}% in {WINDOW_CONFIDENCE:.0%} of all windows"


def track_readiness(context: TierContext, now_s: float) -> None:
    """Record when the number of ready replicas last increased; the first observation does not count as an increase."""
    previous, ready = context.state.ready, context.observation.ready
    if previous is not None and ready > previous:
        context.set_state("ready_increased_s", now_s)
    context.set_state("ready", ready)


def apply_feedback(
    context: TierContext, contexts: list[TierContext], slo: Slo | None, elapsed_s: float, now_s: float
) -> None:
    """Step 3. contexts: all tiers; elapsed_s: time since the last decision.

    With known demand, measured TPOT adjusts only the scale of the TPOT tail. With unknown demand, a tier whose lagging
    signals show a shortage grows relative to its ready replicas, so a repeated signal adds nothing. Request latency
    counts only after a full window with the current number of ready replicas.
    """
    if context.hold_reason is None:
        context.add_step("feedback", *_integrate_tail(context, elapsed_s))
        return
    other_pressure = max(
        (_pressure(other, slo, math.inf, now_s)[0] for other in contexts if other is not context), default=0.0
    )
    pressure, reason = _pressure(context, slo, other_pressure, now_s)
    required = math.ceil(max(context.observation.ready, 1) * min(pressure, _MAX_PRESSURE) - 1e-9)
    if pressure > _PRESSURE_THRESHOLD and required > context.scale_up_target:
        context.scale_up_target = context.scale_down_target = required
        context.add_step("feedback", "{}: scale up to {}, {} ready", reason, required, context.observation.ready)
        return
    context.add_step("feedback", "{}", reason)


def _pressure(context: TierContext, slo: Slo | None, other_pressure: float, now_s: float) -> tuple[float, str]:
    """Return the highest ratio of a lagging signal to its limit (1: at the limit), and its description.

    TTFT and e2e include the wait for the other tier, so they count only if `other_pressure` is low.
    """
    lagging, ready = context.observation.lagging, max(context.observation.ready, 1)
    measurable_s = (
        math.inf
        if context.state.ready_increased_s is None
        else now_s - context.state.ready_increased_s - LATENCY_WINDOW_S
    )
    pressures = [(0.0, "no latency, queue or cache metric is available")]
    if measurable_s < 0.0:
        pressures = [
            (
                0.0,
                f"{context.observation.ready} ready for {format_wait(measurable_s + LATENCY_WINDOW_S)}, "
                "too short to measure latency",
            )
        ]
    if slo is not None:
        targets = dict(slo.targets)
        for name, value in _latency_signals(lagging).items():
            is_tier_local, target_s = name in ("TPOT", "itl"), targets[name]
            if target_s is None or not _is_known(value) or (not is_tier_local and other_pressure > _PRESSURE_THRESHOLD):
                continue
            if measurable_s < (0.0 if is_tier_local else value):
                continue
            reason = f"{slo.percentile(name)} {name} {format_seconds(value)}, target {format_seconds(target_s)}"
            pressures.append((value / target_s, reason))
    if _is_known(lagging.waiting):
        pressures.append((lagging.waiting / ready, f"{lagging.waiting:.0f} waiting requests for {ready} ready"))
    if _is_known(lagging.kv_used):
        pressures.append((lagging.kv_used / _KV_USED_LIMIT, f"KV cache {lagging.kv_used:.0%} full"))
    if _is_known(lagging.preemptions_per_s) and lagging.preemptions_per_s > 0.0 and measurable_s >= 0.0:
        pressures.append((_PREEMPTION_PRESSURE, f"{format_figure(lagging.preemptions_per_s)} preemptions/s"))
    return max(pressures)


def _is_known(value: float | Unavailable) -> TypeGuard[float]:
    return not isinstance(value, Unavailable) and 0.0 <= value < math.inf


def _integrate_tail(context: TierContext, elapsed_s: float) -> tuple[str, *tuple[object, ...]]:
    """Move the tail scale towards the measured TPOT if no replica starts or stops and all engines report metrics.

    Returns the message and its values.
    """
    sizing, measured_s = context.observation.sizing, context.observation.lagging.tpot_s
    model_s = None if isinstance(sizing, Unavailable) else sizing.model_tpot_s
    settled = (
        context.observation.ready == context.observation.replicas
        and not context.observation.starting
        and context.observation.coverage == 1.0
    )
    if model_s is None or isinstance(measured_s, Unavailable) or not 0.0 < measured_s < math.inf:
        return ("no measured TPOT to compare with the model",)
    message = "TPOT {:seconds} measured, {:seconds} by the model"
    if not settled:
        return f"{message}: ignored while replicas start or stop", measured_s, model_s
    context.set_state(
        "tpot_tail_scale", updated_tail_scale(context.state.tpot_tail_scale, measured_s, model_s, elapsed_s)
    )
    return f"{message}: tail scale {{:figure}}", measured_s, model_s, context.state.tpot_tail_scale


def updated_tail_scale(tpot_tail_scale: float, measured_s: float, model_s: float, elapsed_s: float) -> float:
    """Return the tail scale after `elapsed_s` of a settled tier with this measured and modelled TPOT percentile."""
    error = math.log(measured_s / model_s)
    if abs(error) <= _LOG_LATENCY_NOISE:
        return tpot_tail_scale
    error = min(max(error, -_MAX_LOG_ERROR), _MAX_LOG_ERROR)
    updated = tpot_tail_scale * math.exp(error * min(elapsed_s, _MAX_STEP_S) / _INTEGRATION_TIME_S)
    return min(max(updated, MIN_TAIL_SCALE), MAX_TAIL_SCALE)
