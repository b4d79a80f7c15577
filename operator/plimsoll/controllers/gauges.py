"""The autoscaler's figures as metrics, so that a dashboard can draw them and another scaler can act on them.

What is not known has no series: a gauge that stays at its last value would be a lie that looks like a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from prometheus_client import Gauge

from plimsoll.api.conditions import Condition
from plimsoll.controllers.promise import measured
from plimsoll.controllers.store import Key
from plimsoll.core.autoscaler import Seen, Service, TierSeen, Wish
from plimsoll.core.autoscaler.attained import attained
from plimsoll.core.forecast import Unknown
from plimsoll.core.scaling import Need
from plimsoll.core.slo import Slo
from plimsoll.telemetry import metrics

STARTUP_QUANTILES = (0.5, 0.9)


class Gauges:
    """Shows services; remembers what of each has series: tiers that are sized, and `slo` of a promise."""

    def __init__(self) -> None:
        self._shown: dict[Key, set[str]] = {}

    def show(self, key: Key, service: Service, seen: Seen, wish: Wish) -> None:
        """Bring a service's series in line with what is known of it now."""
        name = "/".join(key)
        known = set() if wish.slo is None else {"slo"}
        known |= {tier for tier, need in service.needs.items() if known and isinstance(need, Need)}
        if self._shown.get(key, set()) - known:
            self.forget(key)
        if service.last is None:
            return
        self._shown[key] = known
        for tier, there in seen.tiers.items():
            _show_replicas(name, tier, service, there)
        if wish.slo is None:
            return
        for tier, need in service.needs.items():
            decided = service.last.decision.tiers[tier]
            count = decided.replicas if decided.recommended is None else decided.recommended
            metrics.SCALING_DESIRED.labels(name, tier).set(count)
            if isinstance(need, Need) and tier in seen.tiers:
                _show_need(name, tier, need, service, seen.tiers[tier].ready)
        _show_promise(name, seen, wish.slo, wish.promised)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        if self._shown.pop(key, None) is not None:
            metrics.forget_scaled_service("/".join(key))


class Conditions:
    """Shows the conditions of services, so that an alert can ask for a reason; one series a condition."""

    def __init__(self) -> None:
        self._shown: dict[Key, set[tuple[str, str]]] = {}

    def show(self, key: Key, stated: Iterable[Condition]) -> None:
        """The conditions as they are now; none of a service that is gone."""
        name = "/".join(key)
        now = {(condition.type.value, condition.reason.value): condition.holds for condition in stated}
        for kind, reason in self._shown.pop(key, set()) - now.keys():
            metrics.SERVICE_CONDITION.remove(name, kind, reason)
        for (kind, reason), holds in now.items():
            metrics.SERVICE_CONDITION.labels(name, kind, reason).set(-1 if holds is None else holds)
        if now:
            self._shown[key] = set(now)

    def add(self, key: Key, condition: Condition) -> None:
        """One more condition beside those that are shown."""
        kind, reason = condition.type.value, condition.reason.value
        holds = -1 if condition.holds is None else condition.holds
        metrics.SERVICE_CONDITION.labels("/".join(key), kind, reason).set(holds)
        self._shown.setdefault(key, set()).add((kind, reason))


def _show_replicas(name: str, tier: str, service: Service, there: TierSeen) -> None:
    assert service.last is not None
    decided = service.last.decision.tiers.get(tier)
    whole = service.tiers[tier].ledger.whole
    metrics.SCALING_READY.labels(name, tier).set(there.ready)
    metrics.SCALING_OVERDUE.labels(name, tier).set(0 if decided is None else len(decided.overdue))
    if whole.starts:
        for quantile in STARTUP_QUANTILES:
            metrics.SCALING_STARTUP.labels(name, tier, str(quantile)).set(whole.quantile_s(quantile))


def _show_need(name: str, tier: str, need: Need, service: Service, ready: int) -> None:
    level = service.tiers[tier].demand.now.level
    used = need.used(level, ready)
    metrics.SCALING_NEEDED.labels(name, tier).set(need.replicas)
    metrics.SCALING_KNEE.labels(name, tier).set(need.replica_work / need.request_gpu_s)
    metrics.SCALING_LOAD.labels(name, tier).set(level / need.request_gpu_s)
    metrics.SCALING_FORECAST.labels(name, tier).set(need.rate_per_s)
    _show(metrics.SCALING_UTILISATION, used if ready and math.isfinite(used) else None, name, tier)


def _show_promise(name: str, seen: Seen, slo: Slo, promised: Sequence[Slo]) -> None:
    heard = seen.heard
    shares = attained(heard, *promised)
    shed = None if isinstance(heard.shed_share, Unknown) else heard.shed_share
    tokens = 0.0 if isinstance(heard.prompt_tokens, Unknown) else heard.prompt_tokens
    metrics.SLO_PROMISED.labels(name).set(slo.share)
    _show(metrics.SLO_TTFT, None if slo.ttft_s is None else slo.deadlines(tokens).first_s, name)
    _show(metrics.SLO_TPOT, slo.tpot_s, name)
    _show(metrics.SLO_E2E, slo.e2e_s, name)
    e2e_s, itl_s = measured(seen)[2:]
    _show(metrics.SLO_E2E_MEASURED, None if slo.e2e_s is None else e2e_s, name)
    _show(metrics.SLO_ITL, slo.itl_s, name)
    _show(metrics.SLO_ITL_MEASURED, None if slo.itl_s is None else itl_s, name)
    for target, _ in slo.targets[:-1]:  # gaps are no target of a request
        _show(metrics.SLO_MET, _known(shares.met.get(target)), name, target.lower())
    _show(metrics.SLO_ATTAINMENT, _known(shares.least), name)
    _show(metrics.SLO_MISSED, shares.missed, name)
    _show(metrics.SCALING_SHED, shed, name)


def _known(share: float | Unknown | None) -> float | None:
    return None if isinstance(share, Unknown) else share


def _show(gauge: Gauge, value: float | None, *labels: str) -> None:
    """No series for what is not known."""
    if value is None:
        gauge.remove(*labels)
    else:
        gauge.labels(*labels).set(value)
