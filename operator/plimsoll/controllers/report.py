"""What the status says of a service's scaling: conditions, figures and the last decisions. Pure.

Problem: every figure moves at every tick, and a status that follows costs the API server a write a second.

Idea: a report is made when the state behind it has changed (a count, a limit, what is known), and once a minute for the
figures alone; figures that have moved little keep their old words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.api.conditions import Condition, Reason, Type
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import memory, promise
from plimsoll.controllers.hearing import Silence
from plimsoll.core.admission.published import Published
from plimsoll.core.autoscaler import Seen, Service, Tier, Wish
from plimsoll.core.autoscaler.service import Told
from plimsoll.core.calibration.answer import knowledge
from plimsoll.core.forecast import Unknown
from plimsoll.core.lifecycle import Eta, Overdue, Starting, eta
from plimsoll.core.scaling import Decision, Limit, Line, Mode, Need, TierDecision

Object = dict[str, Any]

SHED: Final = 0.01  # share of requests refused from which on it is called shedding
MOST_VARIANT: Final = 1024  # characters
LEARNED_SECONDS: Final = 900.0  # how much of what was learned a restart may lose where nothing else is written

_SECOND_HAND: Final = (
    "gateways answer; engines of {} do not answer the operator, Prometheus tells of them, later: whether the operator"
    " may reach port 8001 of their pods (NetworkPolicy, mesh)"
)
_LIMITS: Final = {
    Limit.MAX: Reason.AT_MAXIMUM,
    Limit.RATE: Reason.RATE_LIMITED,
    Limit.BUDGET: Reason.BUDGET_EXHAUSTED,
    Limit.UNSCHEDULABLE: Reason.UNSCHEDULABLE,
}


@dataclass(frozen=True)
class Report:
    """state: what makes a new one due. desired: replicas that each tier should have, by role. told: to the gateways.

    The rest are parts of the status, as Kubernetes keeps them.
    """

    state: tuple[object, ...]
    desired: Mapping[str, int]
    conditions: tuple[Condition, ...]
    tiers: Mapping[str, Object]
    slo: Object
    cold_start: Object
    limited_by: str | None
    last_decision: Object | None
    decisions: tuple[Object, ...]
    learned: Object | None
    learned_s: float  # when that was
    cost: Object
    told: Published | None
    slow_transfer: str | None  # why remote prefill does not pay, None where it does or where that is not known


def nothing(learned: Object | None, now_s: float) -> Report:
    """Before the first one: what an earlier process has kept."""
    return Report((), {}, (), {}, {}, {}, None, None, (), learned, now_s, {}, None, None)


def failed(old: Report, error: Exception) -> Report:
    """After an error: what was known stays, and the next decision makes a new one."""
    words = f"an error in the operator ({type(error).__name__}, its log has more): replicas stay, it is tried again"
    active = Condition(Type.SCALING_ACTIVE, False, Reason.DECISION_FAILED, words)
    others = [condition for condition in old.conditions if condition.type is not Type.SCALING_ACTIVE]
    return replace(old, state=(), conditions=(active, *others))


def sheds(seen: Seen, old: Report | None) -> bool:
    """Whether requests are refused: from one in a hundred on, until none has been for a minute."""
    share = seen.heard.shed_share
    was = old is not None and any(c.type is Type.ADMITTING and c.holds is False for c in old.conditions)
    return not isinstance(share, Unknown) and share > (0.0 if was else SHED)


def state(service: Service, seen: Seen, silent: Silence, shedding: bool) -> tuple[object, ...]:
    """What a reader must hear of at once."""
    if service.last is None:
        return ()
    tiers = service.last.decision.tiers
    return (
        silent,
        shedding,
        *(
            (
                (name, t.replicas, t.recommended, t.limits, t.held, bool(t.overdue)),
                (isinstance(service.tiers[name].line, Line), service.tiers[name].ledger.whole.starts),
                len(seen.tiers[name].starting) if name in seen.tiers else 0,
            )
            for name, t in tiers.items()
        ),
    )


def make(
    spec: InferenceService,
    service: Service,
    seen: Seen,
    wish: Wish,
    last: Report,
    told: Published | None,
    slow_transfer: str | None,
    silent: Silence,
    now_s: float,
) -> Report:
    """The report of this moment; figures of the last one are kept where little has changed. Needs a decision made."""
    assert service.last is not None
    decision = service.last.decision
    sized = wish.slo is not None and wish.policy.mode is not Mode.OFF
    made = [*service.decisions] if sized else []
    now_state = state(service, seen, silent, sheds(seen, last))
    keep = last.state in (now_state, ()) and last.learned is not None
    keep = keep and (not sized or now_s - last.learned_s < LEARNED_SECONDS)
    return Report(
        state=now_state,
        desired={name: tier.replicas for name, tier in decision.tiers.items()},
        conditions=tuple(_conditions(service, seen, wish, last, silent)),
        tiers={name: _tier(service, seen, name, last, now_s) for name in service.tiers} if sized else {},
        slo=promise.figures(seen, wish.slo, wish.promised, last.slo) if wish.slo is not None else {},
        cold_start={name: _starts(tier) for name, tier in service.tiers.items() if tier.ledger.whole.starts},
        limited_by=_limited_by(service, decision) if sized else None,
        last_decision=_decision(made[-1]) if made else None,
        decisions=tuple(_decision(one) for one in reversed(made[:-1])),
        learned=last.learned if keep else memory.write(service),
        learned_s=last.learned_s if keep else now_s,
        cost=_cost(spec, service, seen),
        told=told,
        slow_transfer=slow_transfer,
    )


# ---------------------------------------------------------------- conditions


def _conditions(service: Service, seen: Seen, wish: Wish, old: Report, silent: Silence) -> Iterable[Condition]:
    if wish.slo is None and all(tier.min_replicas == tier.max_replicas for tier in wish.policy.tiers.values()):
        return  # nobody asked for any scaling
    yield _active(service, wish)
    if wish.slo is None or service.last is None:
        return
    yield _metrics(seen, silent)
    yield _feasible(service)
    before = next((c for c in old.conditions if c.type is Type.SLO_MET), None)
    yield promise.condition(seen, wish.slo, wish.promised, before)
    yield _limited(service.last.decision)
    yield _admitting(service, seen, old, silent)


def _active(service: Service, wish: Wish) -> Condition:
    def no(reason: Reason, message: str) -> Condition:
        return Condition(Type.SCALING_ACTIVE, False, reason, message)

    if wish.slo is None:
        return no(Reason.NO_PROMISE, "spec.slo is not set: nothing is promised, so each tier keeps minReplicas")
    if wish.policy.paused:
        return no(Reason.PAUSED, "spec.scaling.paused is true: decisions are made and shown, nothing is set")
    if wish.policy.mode is not Mode.AUTO:
        return no(
            Reason.RECOMMEND_ONLY if wish.policy.mode is Mode.RECOMMEND else Reason.SCALING_OFF,
            f"spec.scaling.mode is {wish.policy.mode}: nothing is set",
        )
    held = {name: need.why for name, need in service.needs.items() if isinstance(need, Unknown)}
    if service.last is not None:  # a need that was made from an old sample is no need of now
        held |= {n: _step(t, "demand") for n, t in service.last.decision.tiers.items() if t.held and n not in held}
    if held:
        words = "; ".join(f"{name}: {why}" for name, why in held.items())
        return no(Reason.DEMAND_UNKNOWN, f"replicas are held: {words}")
    binding = service.last.decision.binding if service.last else None
    return Condition(Type.SCALING_ACTIVE, True, Reason.SCALING_ON_FORECAST, f"{binding or 'no tier'} binds")


def _metrics(seen: Seen, silent: Silence) -> Condition:
    if silent.gateways:
        message = "no gateway replica tells of its requests, so demand is not known and replicas are held"
        return Condition(Type.METRICS_AVAILABLE, False, Reason.METRICS_MISSING, message)
    if silent.tiers:
        message = f"no ready engine of {', '.join(silent.tiers)} answers with its metrics; no replica is given back"
        return Condition(Type.METRICS_AVAILABLE, False, Reason.METRICS_MISSING, message)
    least = min((told.coverage for told in seen.heard.tiers.values() if told.coverage), default=1.0)
    if min(least, seen.heard.coverage or 1.0) < 1.0:
        message = "some gateways or engines do not answer: what is known is scaled up, and nothing goes down"
        return Condition(Type.METRICS_AVAILABLE, True, Reason.METRICS_PARTIAL, message)
    if silent.second_hand:
        message = _SECOND_HAND.format(", ".join(silent.second_hand))
        return Condition(Type.METRICS_AVAILABLE, True, Reason.METRICS_FRESH, message)
    return Condition(Type.METRICS_AVAILABLE, True, Reason.METRICS_FRESH, "gateways and engines answer")


def _feasible(service: Service) -> Condition:
    broken = {n: s for n, s in service.needs.items() if isinstance(s, Need) and s.infeasible is not None}
    for name, need in broken.items():
        assert need.infeasible is not None
        nearest = need.infeasible.feasible
        told = () if nearest is None else nearest.targets
        words = ", ".join(f"slo.{name.lower()} {promise.duration(value)}" for name, value in told if value is not None)
        breaks = f"{need.infeasible.constraint} breaks it"
        message = f"{name}: no number of replicas keeps it, {breaks}; feasible: {words}{need.infeasible.hint}"
        return Condition(Type.SLO_FEASIBLE, False, Reason.INFEASIBLE, message)
    if service.needs and all(isinstance(need, Need) for need in service.needs.values()):
        return Condition(Type.SLO_FEASIBLE, True, Reason.FEASIBLE, "enough replicas keep the promise at this mix")
    return Condition(Type.SLO_FEASIBLE, None, Reason.NOT_MEASURED, "the tiers' load lines are not known yet")


def _admitting(service: Service, seen: Seen, old: Report, silent: Silence) -> Condition:
    """Whether all that comes is let in; the figures are those of the moment at which it turned."""
    shedding = sheds(seen, old)
    if silent.behind is not None:
        return Condition(Type.ADMITTING, None, Reason.GATEWAYS_BEHIND, silent.behind)
    before = next((c for c in old.conditions if c.type is Type.ADMITTING), None)
    if before is not None and before.holds is (not shedding):
        return before
    if not shedding:
        return Condition(Type.ADMITTING, True, Reason.LETTING_ALL_IN, "nothing is refused")
    tier, need = service.answering, service.needs.get(service.answering)
    there, rate = seen.tiers.get(tier), seen.heard.rate_per_s
    words = [f"{seen.heard.shed_share:.0%} of the last minute's requests were refused"]
    if there is not None and isinstance(need, Need) and not isinstance(rate, Unknown):
        line = there.ready * need.replica_work / need.request_gpu_s
        words.append(f"{there.ready} ready of {tier} carry {line:.2g} req/s, {rate:.2g} come")
    etas_s = service.last.decision.tiers[tier].etas_s if service.last is not None and there is not None else ()
    if etas_s:
        words.append(f"{len(etas_s)} starting, the next in {etas_s[0]:.0f} s")
    return Condition(Type.ADMITTING, False, Reason.SHEDDING, "; ".join(words))


def _limited(decision: Decision) -> Condition:
    for name, tier in decision.tiers.items():
        for limit in tier.limits:
            if limit in _LIMITS:
                step = "pending" if limit is Limit.UNSCHEDULABLE else "limits"  # there are the scheduler's words
                message = f"{name}: {_step(tier, step)}"
                return Condition(Type.SCALING_LIMITED, True, _LIMITS[limit], message)
    return Condition(Type.SCALING_LIMITED, False, Reason.NOT_LIMITED, "each tier has the replicas that it needs")


def _step(tier: TierDecision, name: str) -> str:
    return next((step.why for step in tier.steps if step.name == name), tier.why)


# ---------------------------------------------------------------- figures


def _tier(service: Service, seen: Seen, name: str, old: Report, now_s: float) -> Object:
    """The sizing part of `status.tiers`."""
    before = old.tiers.get(name, {})
    need, tier = service.needs.get(name), service.tiers[name]
    found: Object = {}
    if tier.ledger.whole.starts:
        whole = tier.ledger.whole
        found["startup"] = {
            "p50": promise.duration(whole.quantile_s(0.5)),
            "p90": promise.duration(whole.quantile_s(0.9)),
        }
    if isinstance(need, Need):
        found["needed"] = need.replicas
        found["knee"] = f"{need.replica_work / need.request_gpu_s:.2g} req/s"
        found["model"] = _model(tier, need, before.get("model", {}))
        level = _level(service, name)
        ready = seen.tiers[name].ready if name in seen.tiers else 0
        if level is not None and ready and math.isfinite(used := need.used(level, ready)):
            found["utilisation"] = f"{_tens(100.0 * used)}%"
    if name in seen.tiers and seen.tiers[name].starting:
        found["starting"] = _starting(tier, seen.tiers[name].starting, before.get("starting", {}), now_s)
    return found


def _starting(tier: Tier, pods: Sequence[Starting], before: Mapping[str, Any], now_s: float) -> Object:
    """Those on their way, and when the first of them is to be ready; the old time where it is still near enough."""
    found: Object = {"count": len(pods)}
    times = [eta(tier.ledger, pod, now_s) for pod in pods if pod.refused is None]
    if late := sum(isinstance(time, Overdue) for time in times):
        found["overdue"] = late
    if left := [time.likely_s for time in times if isinstance(time, Eta)]:
        due_s, old = now_s + min(left), before.get("nextReady")
        near = isinstance(old, str) and abs(datetime.fromisoformat(old).timestamp() - due_s) <= max(
            5.0, promise.MOVED * min(left)
        )
        found["nextReady"] = old if near else _time(due_s)
    return found


def _model(tier: Tier, need: Need, before: Mapping[str, Any]) -> Object:
    assert tier.posterior is not None  # there is no need without a model
    told, model = knowledge(tier.posterior), tier.model
    assert model is not None
    return {
        "baseSeconds": _seconds(before.get("baseSeconds"), model.base_s),
        "workSeconds": _seconds(before.get("workSeconds"), need.request_gpu_s),
        "known": told.known,
        "words": "known" if told.known else told.words.split(":")[0],
    }


def _seconds(before: Any, value: float) -> str:
    """Two digits; the old ones where they are still near enough."""
    if isinstance(before, str) and abs(float(before) - value) <= promise.MOVED * value:
        return before
    return f"{value:.2g}"


def _level(service: Service, name: str) -> float | None:
    state_ = service.tiers[name].demand
    return None if state_.at_s is None else state_.now.level


def _tens(percent: float) -> int:
    return round(percent / 10.0) * 10


def _cost(spec: InferenceService, service: Service, seen: Seen) -> Object:
    """What the ordered replicas cost, and by that a million output tokens at the rate that arrives."""
    cost = spec.spec.cost
    if cost is None:
        return {}
    gpus = sum(tier.gpus * seen.tiers[kind].replicas for kind, tier in spec.spec.tiers.items() if kind in seen.tiers)
    found: Object = {"perHour": cost.shown(cost.per_hour(gpus))}
    if not isinstance(service.workload, Unknown) and not isinstance(seen.heard.rate_per_s, Unknown):
        tokens_per_s = seen.heard.rate_per_s * service.workload.mean(service.workload.output_tokens)
        price = cost.per_million_tokens(gpus, tokens_per_s)
        if not isinstance(price, Unknown):
            found["perMillionTokens"] = cost.shown(price)
    return found


def _starts(tier: Tier) -> Object:
    words = tier.starts.present.words
    return {
        **({"variant": words[:MOST_VARIANT]} if words else {}),
        "phases": [
            {"name": name, "p50": promise.duration(q.p50_s), "p90": promise.duration(q.p90_s)}
            for name, q in tier.ledger.quantiles
        ],
    }


def _limited_by(service: Service, decision: Decision) -> str | None:
    """What keeps the binding tier from carrying more, in one word."""
    need = service.needs.get(decision.binding or "")
    return f"{decision.binding} {need.constraint}" if isinstance(need, Need) else None


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _decision(told: Told) -> Object:
    return {
        "time": _time(told.at_s),
        "tiers": {
            name: {"from": tier.before, "to": tier.recommended or 0, "why": tier.why[:1024]}
            for name, tier in told.decision.tiers.items()
            if tier.before is not None and tier.before != tier.recommended
        },
        **({"binding": told.decision.binding} if told.decision.binding else {}),
    }
