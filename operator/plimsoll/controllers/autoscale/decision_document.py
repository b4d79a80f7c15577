"""A service's scaling decisions as one JSON document: each step of a decision, and its inputs. Pure.

Problem: a replica count alone convinces no one, and the state that led to it changes every second.

Idea: the document has the last tick's decision, earlier decisions that changed something, and the metrics of the last
tick with their age. It adds the current engine model, SLO capacity, forecast and start-up times, and the published
admission limits. An unknown value is an object whose `unknown` field has the reason; a number that is not finite is
null. `version` changes when a field changes its meaning, and a reader must reject a version it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.api.message_text import name_some
from plimsoll.core import codec, units
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, name_constraint
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.service_state import TICK_S, ServiceState, TimedDecision
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_time import StartupModel
from plimsoll.core.autoscaling.tier_engines import PESSIMISM
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.demand.forecasting import forecast as forecast_demand
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.calibration.estimates import assess_quality
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload
from plimsoll.resources.engine_tuning import StoredArgument

Object = dict[str, Any]

DOCUMENT_VERSION: Final = 2


def build_document(
    service: ServiceState,
    key: tuple[str, str],
    now_s: float,
    horizon_s: float | None = None,
    metrics: tuple[float, ServiceMetrics] | None = None,
    limits: AdmissionLimits | None = None,
    slo: Object | None = None,
    tuning: Mapping[str, Sequence[StoredArgument]] | None = None,
) -> Object:
    """The document of one service, as JSON-compatible values.

    key: namespace and name. now_s: seconds since the epoch. horizon_s: forecast horizon from the spec, None for the
    learned start-up time. metrics: time and metrics of the last tick. limits: the published admission limits. slo:
    `status.slo`, the figures that people see. tuning: arguments that the operator has set on the engines of each tier.
    Fields that end in `_s` are in seconds. The most recent decision comes first.
    """
    return {
        "version": DOCUMENT_VERSION,
        "service": "/".join(key),
        "at": _rfc3339(now_s),
        "decisions": [_decision(timed_decision) for timed_decision in _timed_decisions(service)],
        "metrics": None if metrics is None else _json_value(_metrics(*metrics)),
        "slo": None if not slo else {"window_s": LATENCY_WINDOW_S, **slo},
        "tiers": {
            name: {
                **_json_value(_evidence(service, name, tier, horizon_s)),
                "tuning": [{"argument": one.text, "reason": one.reason} for one in (tuning or {}).get(name, ())],
                "retuning": service.retuning.summary if name == Role.SERVE else "",
            }
            for name, tier in service.tiers.items()
        },
        "admission": None if limits is None else codec.encode(limits),
    }


def _timed_decisions(service: ServiceState) -> Iterable[TimedDecision]:
    if service.last_decision is not None:
        yield service.last_decision
    yield from (
        timed_decision for timed_decision in reversed(service.decisions) if timed_decision is not service.last_decision
    )


def _decision(timed_decision: TimedDecision) -> Object:
    tiers = {name: _json_value(_tier(tier)) for name, tier in timed_decision.decision.tiers.items()}
    return {"at": _rfc3339(timed_decision.at_s), "binding": timed_decision.decision.binding_tier, "tiers": tiers}


def _tier(tier: TierDecision) -> Object:
    return {
        "before": tier.previous_replicas,
        "replicas": tier.replicas,
        "recommended": tier.recommended,
        "limits": list(tier.limits),
        "frozen": tier.is_held,
        "overdue": tier.overdue,
        "etas_s": tier.etas_s,
        "counterfactual": tier.counterfactual,
        "reason": tier.summary,
        "steps": [{"name": step.name, "replicas": step.replicas, "reason": step.reason} for step in tier.steps],
    }


# ---------------------------------------------------------------- metrics

_GATEWAY_METRICS: Final = (
    *(
        "rate_per_s",
        "succeeded_per_s",
        "failed_per_s",
        "arrivals",
        "mean_prompt_tokens",
        "ttft_s",
        "e2e_s",
        "rejected_share",
    ),
    *("queued", "in_flight"),
)


def _metrics(at_s: float, metrics: ServiceMetrics) -> Object:
    """The metrics of a tick. Ages refer to `at`, which therefore has milliseconds."""
    gateway_figures = {name: _value_or_reason(getattr(metrics, name)) for name in _GATEWAY_METRICS}
    return {
        "at": _rfc3339(at_s, "milliseconds"),
        "gateways": {
            "count": metrics.gateway_count,
            "coverage": metrics.coverage,
            "silent": name_some(metrics.silent),
            "age_s": metrics.age_s,
            "source": _demand_source(metrics),
            "skipped_prefill": None if metrics.skipped_prefill is None else metrics.skipped_prefill._asdict(),
            **gateway_figures,
        },
        "requests": _requests(metrics.workload),
        "tiers": {
            role.value: {
                "coverage": tier_metrics.coverage,
                "silent": name_some(tier_metrics.silent),
                "age_s": tier_metrics.age_s,
                "running": _value_or_reason(tier_metrics.in_flight),
                "kv_used": _value_or_reason(tier_metrics.lagging.kv_used),
            }
            for role, tier_metrics in metrics.tiers.items()
        },
    }


def _demand_source(metrics: ServiceMetrics) -> str:
    """Which engines report the demand and TTFT in place of gateways; "" if gateways do."""
    if not metrics.is_measured_at_engines:
        return ""
    if Role.PREFILL not in metrics.tiers:
        return "counted at the engines, with their TTFT"
    return "counted at prefill engines, whose TTFT lacks the KV transfer and the first decode step"


def _requests(workload: Workload | Unavailable) -> Object:
    """Mean lengths, tokens."""
    if isinstance(workload, Unavailable):
        return _unavailable(workload)
    cached = workload.mean(workload.cached_tokens)
    prompt, output = workload.mean(workload.uncached_tokens) + cached, workload.mean(workload.output_tokens)
    return {"mean_prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}


def _value_or_reason(value: float | Unavailable) -> Any:
    return _unavailable(value) if isinstance(value, Unavailable) else value


# ---------------------------------------------------------------- inputs of the decision


def _evidence(service: ServiceState, name: str, tier: TierState, horizon_s: float | None) -> Object:
    return {
        "engine": None if tier.engines.engine_key is None else asdict(tier.engines.engine_key),
        "model": _model(tier),
        "capacity": _capacity(tier.capacity, service.class_targets.by_target),
        "forecast": _forecast(service, name, tier, horizon_s),
        "startup": _startup(tier),
    }


def _model(tier: TierState) -> Object:
    """The step-time coefficients used for sizing: a pessimistic quantile of the posterior (`quantile`)."""
    model = tier.engines.model
    if model is None or tier.engines.posterior is None:
        return _unavailable(
            tier.capacity
            if isinstance(tier.capacity, Unavailable)
            else Unavailable("no engine has reported its properties yet")
        )
    assessment = assess_quality(tier.engines.posterior)
    return {"calibrated": assessment.sufficient, "summary": assessment.message, "quantile": PESSIMISM, **asdict(model)}


def _capacity(capacity: TierCapacity | Unavailable, target_classes: Mapping[str, str]) -> Object:
    """The SLO capacity. `class` is the request class whose target is the constraint, null if it is the service's."""
    if isinstance(capacity, Unavailable):
        return _unavailable(capacity)
    return {
        "capacity_per_s": capacity.replica_work / capacity.request_gpu_s if capacity.request_gpu_s > 0.0 else None,
        "replica_work": capacity.replica_work,
        "request_gpu_s": capacity.request_gpu_s,
        "constraint": capacity.constraint,
        "class": target_classes.get(capacity.constraint),
        "infeasible": None if capacity.infeasible is None else _infeasible(capacity.infeasible, target_classes),
    }


def _infeasible(infeasible: Infeasible, target_classes: Mapping[str, str]) -> Object:
    nearest = infeasible.nearest_slo
    targets = () if nearest is None else nearest.targets
    targets_text = " and ".join(f"{name} {units.format_seconds(at_s)}" for name, at_s in targets if at_s is not None)
    violated = f"{name_constraint(infeasible.constraint, target_classes)} violates it{infeasible.hint}"
    message = f"no replica count meets the SLO ({violated}), sized for {targets_text or 'none'}"
    feasible = (
        None if nearest is None else {"ttft_s": nearest.ttft_s, "tpot_s": nearest.tpot_s, **_optional_targets(nearest)}
    )
    return {"constraint": infeasible.constraint, "feasible": feasible, "summary": message}


def _optional_targets(nearest: Slo) -> Object:
    """The optional targets that are set."""
    return {name: value for name in ("e2e_s", "itl_s") if (value := getattr(nearest, name)) is not None}


def _forecast(service: ServiceState, name: str, tier: TierState, horizon_s: float | None) -> Object:
    """The forecast of the last tick, recomputed from the same state."""
    if isinstance(tier.capacity, Unavailable):
        return _unavailable(tier.capacity)
    if service.last_decision is None or service.basis is None or service.basis.spec.slo is None:
        return _unavailable(Unavailable("the service has no SLO, so no forecast is made"))
    lookahead_s = tier.startup_model.horizon_s + TICK_S if horizon_s is None else horizon_s
    share, retries_due = service.basis.spec.slo.share, service.basis.has_retry_backlog
    prediction = forecast_demand(tier.forecast_state, service.last_decision.at_s, lookahead_s, share, retries_due)
    if isinstance(prediction, Unavailable):
        return _unavailable(prediction)
    return {
        "work": prediction.work,
        "parts": dict(prediction.parts),
        "rate_per_s": prediction.rate_per_s,
        "horizon_s": prediction.horizon_s,
        "quantile": prediction.quantile,
        "age_s": prediction.age_s,
        "history": prediction.own_history_share,
    }


def _startup(tier: TierState) -> Object:
    """Start-up times of new pods, and of engines that restart in their pods once one is measured, else null."""
    model = tier.startup_model
    return {
        "variant": tier.startup_models.current._asdict(),
        **_durations(model),
        "restart": None if model.restart_total is None else _durations(model.restart),
    }


def _durations(model: StartupModel) -> Object:
    """Start-up time quantiles by phase; the last phase is the total.

    startups: weighted number of observed start-ups, older ones weigh less; 0 means that all values are priors.
    measured_s: geometric mean of their totals, in which an outlier counts less; None without one. prior_s: the estimate
    of the total before them.
    """
    total = model.total
    return {
        "startups": total.startups,
        "measured_s": math.exp(total.mean) if total.startups else None,
        "prior_s": total.prior_s,
        "phases": [{"name": name, **quantiles._asdict()} for name, quantiles in model.quantiles],
    }


def _unavailable(value: Unavailable) -> Object:
    return {"unknown": value.reason}


def _rfc3339(at_s: float, to: str = "seconds") -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec=to).replace("+00:00", "Z")


def _json_value(value: Any) -> Any:
    """The value in JSON types, with floats rounded to six significant digits."""
    if isinstance(value, Mapping):
        return {str(name): _json_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(part) for part in value]
    if isinstance(value, float):
        return units.round_significant(value, 6) if math.isfinite(value) else None
    return str(value) if isinstance(value, str) else value
