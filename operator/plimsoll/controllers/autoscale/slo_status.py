"""SLO attainment in the status: the figures and the SLOMet condition. Pure.

Problem: an SLO can have several targets. Each can be met often enough while all of them together are not. A target that
is not measured must not count as met.

Idea: one assessment (`core.autoscaling.slo_attainment`) yields both, and the condition quotes the texts of the figures,
so that they cannot contradict each other. SLOMet is false if the upper bound of the attainment is below the SLO, and
true if the lower bound is above it. It is unknown in between, and where a target is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.core import units
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from plimsoll.core.autoscaling.slo_attainment import SloAttainment, slo_attainment
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable

Object = dict[str, Any]

RECOVERY_MARGIN: Final = 0.2  # hysteresis: share of the error budget that must be left before SLOMet recovers
ITL_RECOVERY_MARGIN: Final = 0.1  # hysteresis as a share of the inter-token latency target
REPORT_TOLERANCE: Final = 0.1  # a figure that has moved by a smaller share keeps its old text
STATUS_DIGITS: Final = 2  # significant digits of a figure in the status; more would change at each report
_ALWAYS_REPORTED: Final = ("TTFT", "TPOT")  # with a target or without one
_SHARE_TOLERANCE: Final = 1e-9  # rounding error of a share


def slo_condition(
    snapshot: ServiceSnapshot, slo: Slo, class_slos: Sequence[Slo], figures: Object, previous: Condition | None
) -> Condition:
    """SLOMet from the last minute's responses.

    slo: the SLO of the service. class_slos: the SLO of each request class, against which its requests are assessed.
    figures: `slo_figures` of the same snapshot, which the message quotes. previous: the last condition, for hysteresis.
    """
    attainment = slo_attainment(snapshot.metrics, *class_slos)
    holds, reason = _slo_outcome(snapshot, slo, attainment, None if previous is None else previous.reason)
    message = (
        _unavailable_message(snapshot, attainment)
        if reason is ConditionReason.NOT_MEASURED
        else _message(figures, slo, class_slos, attainment)
    )
    if reason is ConditionReason.SLO_VIOLATED:
        message += _recovery(snapshot, slo, attainment)
    return Condition(ConditionType.SLO_MET, holds, reason, message)


def _slo_outcome(
    snapshot: ServiceSnapshot, slo: Slo, attainment: SloAttainment, previous_reason: ConditionReason | None
) -> tuple[bool | None, ConditionReason]:
    itl_s, was_violated = measured_percentiles(snapshot)[-1], previous_reason is ConditionReason.SLO_VIOLATED
    if attainment.upper_bound is not None and not _meets_share(
        attainment.upper_bound, slo, RECOVERY_MARGIN if was_violated else 0.0
    ):
        return False, ConditionReason.SLO_VIOLATED
    if (
        slo.itl_s is not None
        and itl_s is not None
        and itl_s > slo.itl_s * (1.0 - (ITL_RECOVERY_MARGIN if was_violated else 0.0))
    ):
        return False, ConditionReason.SLO_VIOLATED
    if isinstance(attainment.lower_bound, Unavailable) or (slo.itl_s is not None and itl_s is None):
        return None, ConditionReason.NOT_MEASURED
    margin = (
        RECOVERY_MARGIN if previous_reason in (ConditionReason.SLO_VIOLATED, ConditionReason.SLO_UNDETERMINED) else 0.0
    )
    if not _meets_share(attainment.lower_bound, slo, margin):
        return None, ConditionReason.SLO_UNDETERMINED
    return True, ConditionReason.SLO_MET


def _recovery(snapshot: ServiceSnapshot, slo: Slo, attainment: SloAttainment) -> str:
    """From which figure the condition recovers, where only the hysteresis keeps it False; else empty."""
    itl_s = measured_percentiles(snapshot)[-1]
    if slo.itl_s is not None and itl_s is not None and itl_s > slo.itl_s * (1.0 - ITL_RECOVERY_MARGIN):
        is_met = itl_s <= slo.itl_s
        return f"; met again from itl {units.format_seconds(slo.itl_s * (1.0 - ITL_RECOVERY_MARGIN))}" if is_met else ""
    if attainment.upper_bound is None or not _meets_share(attainment.upper_bound, slo, 0.0):
        return ""
    return f"; met again from {_percent(1.0 - (1.0 - slo.share) * (1.0 - RECOVERY_MARGIN))}"


def _meets_share(share: float, slo: Slo, margin: float) -> bool:
    return share >= 1.0 - (1.0 - slo.share) * (1.0 - margin) - _SHARE_TOLERANCE


def _message(figures: Object, slo: Slo, class_slos: Sequence[Slo], attainment: SloAttainment) -> str:
    """The measured attainment of each target, and of all targets of a request together, as in `figures`."""
    parts = []
    for name, target_s in slo.targets:
        share, measured = attainment.by_target.get(name), figures.get(name.lower())
        figure = "" if measured is None else f" ({slo.percentile(name)} {_sentence_duration(measured)})"
        if share is not None and not isinstance(share, Unavailable):
            prefix = "at least " if name == "TPOT" and len({one.tpot_s for one in class_slos}) > 1 else ""
            parts.append(f"{name} {prefix}{_percent(share)} within {_target_text(class_slos, name)}{figure}")
        elif name == "itl" and target_s is not None and figure:
            parts.append(f"{name} target {units.format_seconds(target_s)}{figure}")
    message = f"{', '.join(parts)}; SLO {_percent(slo.share)}"
    if len(attainment.by_target) < 2 or isinstance(attainment.lower_bound, Unavailable):
        return message
    is_exact = attainment.upper_bound is not None and attainment.upper_bound - attainment.lower_bound < _SHARE_TOLERANCE
    return f"{message}, {'' if is_exact else 'at least '}{figures['attainment']} within all targets"


def _sentence_duration(figure: str) -> str:
    """A duration of `status.slo`, such as 550ms, as sentences write it."""
    return units.format_seconds(units.parse_duration(figure), STATUS_DIGITS)


def _target_text(class_slos: Sequence[Slo], name: str) -> str:
    """The target; where request classes differ, the range from the tightest to the loosest."""
    targets = {(dict(one.targets)[name], one.ttft_per_1k_tokens_s if name == "TTFT" else 0.0) for one in class_slos}
    texts = [
        units.format_seconds(target_s) + (f" + {units.format_seconds(per_1k_s)} per 1k tokens" if per_1k_s else "")
        for target_s, per_1k_s in sorted((target_s, per_1k_s) for target_s, per_1k_s in targets if target_s is not None)
    ]
    return " to ".join(dict.fromkeys((texts[0], texts[-1]))) + (" by class" if len(targets) > 1 else "")


def _unavailable_message(snapshot: ServiceSnapshot, attainment: SloAttainment) -> str:
    unavailable = attainment.unmeasured_target
    return (
        _target_unavailable("itl", _unavailable_itl(snapshot))
        if unavailable is None
        else _target_unavailable(*unavailable)
    )


def _target_unavailable(name: str, unavailable: Unavailable) -> str:
    return f"{name} is not known: {unavailable.reason}"


def slo_state(
    snapshot: ServiceSnapshot, slo: Slo, class_slos: Sequence[Slo], previous: Condition | None
) -> tuple[object, ...]:
    """What the status shows at once: SLOMet without its figures, and which latencies the last minute has.

    Each figure leaves the status as soon as the last minute has no request for it. Parameters: as for `slo_condition`.
    """
    attainment = slo_attainment(snapshot.metrics, *class_slos)
    outcome = _slo_outcome(snapshot, slo, attainment, None if previous is None else previous.reason)
    measured = [latency_s is not None for latency_s in measured_percentiles(snapshot)]
    return (*outcome, attainment.unmeasured_target is None, *measured)


def slo_figures(snapshot: ServiceSnapshot, slo: Slo, class_slos: Sequence[Slo], previous: Object) -> Object:
    """`status.slo`. Figures of `previous` are kept where they moved little.

    slo, class_slos: as for `slo_condition`.
    """
    attainment = slo_attainment(snapshot.metrics, *class_slos)
    result: Object = {}
    for (name, target_s), latency_s in zip(slo.targets, measured_percentiles(snapshot), strict=True):
        if latency_s is not None and (target_s is not None or name in _ALWAYS_REPORTED):
            limits_s = (
                _limits_s(target_s, latency_s <= target_s)
                if name == "itl" and target_s is not None
                else _percentile_limits_s(name, slo, class_slos, attainment)
            )
            result[name.lower()] = _stable_duration(previous.get(name.lower()), latency_s, *limits_s)
    result |= _attainment_figures(attainment)
    if not result:
        return {}
    if attainment.unmeasured_target is not None:
        result["unavailableReason"] = _target_unavailable(*attainment.unmeasured_target)
    if not isinstance(snapshot.metrics.rate_per_s, Unavailable):
        result["offered"] = units.format_rate(snapshot.metrics.arrivals / LATENCY_WINDOW_S, STATUS_DIGITS)
    return result


def _attainment_figures(attainment: SloAttainment) -> Object:
    """The attainment, and that including rejected requests if it differs; unknown figures are left out."""
    totals = {"attainment": attainment.lower_bound, "attainmentIncludingRejected": attainment.including_rejected}
    figures = {name: _percent(share) for name, share in totals.items() if not isinstance(share, Unavailable)}
    if len(set(figures.values())) < len(figures):
        del figures["attainmentIncludingRejected"]
    return figures


def _percent(share: float) -> str:
    """Whole percent, rounded down, so that 94.9% never reads as 95%."""
    return f"{math.floor(100.0 * share + _SHARE_TOLERANCE)}%"


def measured_percentiles(snapshot: ServiceSnapshot) -> tuple[float | None, ...]:
    """Measured latencies at the SLO's percentile, seconds, in the order of `Slo.targets`; None if not measured.

    TPOT and inter-token latency come from the tier that decodes, TTFT and e2e from the gateways.
    """
    decode_latencies = [
        tier_metrics.lagging for role, tier_metrics in snapshot.metrics.tiers.items() if role != "prefill"
    ]
    tpot, itl = ([getattr(latencies, name) for latencies in decode_latencies] for name in ("tpot_s", "itl_s"))
    tier_metrics = ([snapshot.metrics.ttft_s], tpot, [snapshot.metrics.e2e_s], itl)
    return tuple(
        next((value for value in values if not isinstance(value, Unavailable)), None) for values in tier_metrics
    )


def _unavailable_itl(snapshot: ServiceSnapshot) -> Unavailable:
    for role, tier_metrics in snapshot.metrics.tiers.items():
        if role != "prefill" and isinstance(tier_metrics.lagging.itl_s, Unavailable):
            return tier_metrics.lagging.itl_s
    return Unavailable("no engine reports metrics")


def _percentile_limits_s(
    name: str, slo: Slo, class_slos: Sequence[Slo], attainment: SloAttainment
) -> tuple[float, float]:
    """Between which seconds the percentile of a latency must lie, by the share of requests that met its target.

    The percentile is interpolated within a histogram's bucket and rounded, the share is counted. Where classes or
    prompts have targets of their own, the share says nothing about one percentile of all requests.
    """
    targets_s, share = {dict(one.targets)[name] for one in class_slos}, attainment.by_target.get(name)
    (target_s,) = targets_s if len(targets_s) == 1 else (None,)
    depends_on_prompt = name == "TTFT" and any(one.ttft_per_1k_tokens_s for one in class_slos)
    if target_s is None or depends_on_prompt or share is None or isinstance(share, Unavailable):
        return 0.0, math.inf
    is_met = _meets_share(share, slo, 0.0)
    if name == "TPOT" and not is_met:
        return 0.0, math.inf  # the share can be a lower bound
    return _limits_s(target_s, is_met)


def _limits_s(target_s: float, is_met: bool) -> tuple[float, float]:
    return (0.0, target_s) if is_met else (target_s, math.inf)


def _stable_duration(previous: Any, seconds: float, min_s: float, max_s: float) -> str:
    """A duration above min_s and up to max_s, with two digits if they suffice; the previous text if it moved little."""
    seconds = min(max(seconds, min_s), max_s)
    if isinstance(previous, str):
        previous_s = units.parse_duration(previous)
        if abs(previous_s - seconds) <= REPORT_TOLERANCE * seconds and min_s < previous_s <= max_s:
            return previous
    rounded = units.format_rounded_duration(seconds)
    return rounded if min_s < units.parse_duration(rounded) <= max_s else units.format_duration(seconds)
