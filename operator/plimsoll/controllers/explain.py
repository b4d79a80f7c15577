"""A service's decisions as one document: what was decided, step by step, and the figures that it rests on. Pure.

Problem: nobody believes a count alone, and what led to it is spread over a memory that moves every second.

Idea: the last tick's decision and the ones before it that changed something, as they were made, beside what the last
tick heard and how old that was, and the model, load line, forecast and start-up times of now. What is not known is an
object with `unknown`, why; a number that is not finite is null. `version` changes when a field changes its meaning: a
reader that meets another one must not guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.core.autoscaler import Service, Tier
from plimsoll.core.autoscaler.service import TICK_S, Told
from plimsoll.core.autoscaler.tier import PESSIMISM
from plimsoll.core.calibration.answer import knowledge
from plimsoll.core.forecast import Unknown
from plimsoll.core.forecast.predict import forecast as forecast_demand
from plimsoll.core.scaling import Line, TierDecision
from plimsoll.core.signals import Heard
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload

Object = dict[str, Any]

VERSION: Final = 1


def document(
    service: Service,
    key: tuple[str, str],
    now_s: float,
    horizon_s: float | None = None,
    heard: tuple[float, Heard] | None = None,
) -> Object:
    """The document of one service, which JSON can hold.

    key: namespace and name. now_s: seconds since the epoch. horizon_s: how far the user wants to look ahead, None for
    the learned start-up time. heard: by the last tick, and when. Every time that ends in `_s` is in seconds;
    `decisions` has the last tick's first.
    """
    return {
        "version": VERSION,
        "service": "/".join(key),
        "at": _time(now_s),
        "decisions": [_decision(told) for told in _told(service)],
        "heard": None if heard is None else _plain(_heard(*heard)),
        "tiers": {name: _plain(_rests_on(service, name, tier, horizon_s)) for name, tier in service.tiers.items()},
    }


def _told(service: Service) -> Iterable[Told]:
    if service.last is not None:
        yield service.last
    yield from (told for told in reversed(service.decisions) if told is not service.last)


def _decision(told: Told) -> Object:
    tiers = {name: _plain(_tier(tier)) for name, tier in told.decision.tiers.items()}
    return {"at": _time(told.at_s), "binding": told.decision.binding, "tiers": tiers}


def _tier(tier: TierDecision) -> Object:
    return {
        "before": tier.before,
        "replicas": tier.replicas,
        "recommended": tier.recommended,
        "limits": list(tier.limits),
        "held": tier.held,
        "overdue": tier.overdue,
        "etas_s": tier.etas_s,
        "counterfactual": tier.counterfactual,
        "why": tier.why,
        "steps": [{"name": step.name, "replicas": step.replicas, "why": step.why} for step in tier.steps],
    }


# ---------------------------------------------------------------- what was heard

_OF_GATEWAYS: Final = (
    *("rate_per_s", "answered_per_s", "failed_per_s", "arrived", "prompt_tokens", "ttft_s", "e2e_s", "shed_share"),
    *("held", "in_flight"),
)


def _heard(at_s: float, heard: Heard) -> Object:
    """Ages are those at the tick, so that its time is told to the millisecond."""
    figures = {name: _figure(getattr(heard, name)) for name in _OF_GATEWAYS}
    return {
        "at": _time(at_s, "milliseconds"),
        "gateways": {"count": heard.gateways, "coverage": heard.coverage, "age_s": heard.age_s, **figures},
        "requests": _requests(heard.workload),
        "tiers": {
            role.value: {"coverage": told.coverage, "age_s": told.age_s, "running": _figure(told.running)}
            for role, told in heard.tiers.items()
        },
    }


def _requests(workload: Workload | Unknown) -> Object:
    """Mean lengths, tokens."""
    if isinstance(workload, Unknown):
        return _unknown(workload)
    cached = workload.mean(workload.cached_tokens)
    prompt, output = workload.mean(workload.uncached_tokens) + cached, workload.mean(workload.output_tokens)
    return {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}


def _figure(value: float | Unknown) -> Any:
    return _unknown(value) if isinstance(value, Unknown) else value


# ---------------------------------------------------------------- what it rests on


def _rests_on(service: Service, name: str, tier: Tier, horizon_s: float | None) -> Object:
    return {
        "engine": None if tier.key is None else asdict(tier.key),
        "model": _model(tier),
        "line": _line(tier.line),
        "forecast": _forecast(service, name, tier, horizon_s),
        "starts": _starts(tier),
    }


def _model(tier: Tier) -> Object:
    """The coefficients that the tier is sized on: slower than the mean of what is believed, by the quantile told."""
    model = tier.model
    if model is None or tier.posterior is None:
        return _unknown(tier.line if isinstance(tier.line, Unknown) else Unknown("no engine has told what it is"))
    told = knowledge(tier.posterior)
    return {"known": told.known, "words": told.words, "quantile": PESSIMISM, **asdict(model)}


def _line(line: Line | Unknown) -> Object:
    if isinstance(line, Unknown):
        return _unknown(line)
    return {
        "knee_per_s": line.replica_work / line.request_gpu_s if line.request_gpu_s > 0.0 else None,
        "replica_work": line.replica_work,
        "request_gpu_s": line.request_gpu_s,
        "constraint": line.constraint,
        "infeasible": None if line.infeasible is None else _infeasible(line.infeasible),
    }


def _infeasible(found: Infeasible) -> Object:
    nearest = found.feasible
    targets = () if nearest is None else nearest.targets
    sized_for = " and ".join(f"{name} {at_s * 1e3:.0f} ms" for name, at_s in targets if at_s is not None)
    broken = f"{found.constraint} breaks it{found.hint}"
    words = f"no number of replicas keeps the promise ({broken}), sized for {sized_for or 'none'}"
    feasible = None if nearest is None else {"ttft_s": nearest.ttft_s, "tpot_s": nearest.tpot_s, **_others(nearest)}
    return {"constraint": found.constraint, "feasible": feasible, "words": words}


def _others(nearest: Slo) -> Object:
    """Targets that few have, where there are such."""
    return {name: value for name in ("e2e_s", "itl_s") if (value := getattr(nearest, name)) is not None}


def _forecast(service: Service, name: str, tier: Tier, horizon_s: float | None) -> Object:
    """The forecast made again as the last tick made it: what it was made from has not moved since."""
    if isinstance(tier.line, Unknown):
        return _unknown(tier.line)
    policy = service.watch.policy
    if service.risk is None or service.last is None or policy is None:
        return _unknown(Unknown("nothing is promised, so nothing is foretold"))
    reach_s = tier.ledger.horizon_s + TICK_S if horizon_s is None else horizon_s
    risk, cost = service.risk, service.miss_cost(name, policy)
    found = forecast_demand(tier.demand, service.last.at_s, reach_s, risk.quantile, risk.promised, cost)
    if isinstance(found, Unknown):
        return _unknown(found)
    return {
        "work": found.work,
        "parts": dict(found.parts),
        "rate_per_s": found.rate_per_s,
        "horizon_s": found.horizon_s,
        "quantile": found.quantile,
        "age_s": found.age_s,
        "history": found.history,
    }


def _starts(tier: Tier) -> Object:
    """variant: what they are of. seen: starts that count, old ones less; 0 where all of it is a guess. The last phase
    is the whole."""
    phases = [{"name": name, **quantiles._asdict()} for name, quantiles in tier.ledger.quantiles]
    return {"variant": tier.starts.present._asdict(), "seen": tier.ledger.whole.starts, "phases": phases}


def _unknown(value: Unknown) -> Object:
    return {"unknown": value.why}


def _time(at_s: float, to: str = "seconds") -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec=to).replace("+00:00", "Z")


def _plain(value: Any) -> Any:
    """The same in types of JSON, numbers to six digits."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return str(value) if isinstance(value, str) else value
