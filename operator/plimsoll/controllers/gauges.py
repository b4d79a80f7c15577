"""The autoscaler's figures as metrics, so that a dashboard can draw them and another scaler can act on them.

What is not known has no series: a gauge that stays at its last value would be a lie that looks like a measurement.
"""

from __future__ import annotations

from plimsoll.controllers.store import Key
from plimsoll.core import buckets
from plimsoll.core.autoscaler import Seen, Service, Wish
from plimsoll.core.forecast import Unknown
from plimsoll.core.scaling import Need
from plimsoll.telemetry import metrics


class Gauges:
    """Shows services; remembers which of them have series."""

    def __init__(self) -> None:
        self._shown: set[Key] = set()

    def show(self, key: Key, service: Service, seen: Seen, wish: Wish) -> None:
        """Bring a service's series in line with what is known of it now."""
        name = "/".join(key)
        if key in self._shown and not all(isinstance(need, Need) for need in service.needs.values()):
            self.forget(key)
        if wish.slo is None or service.last is None:
            return
        self._shown.add(key)
        for tier, need in service.needs.items():
            decided = service.last.decision.tiers[tier]
            count = decided.replicas if decided.recommended is None else decided.recommended
            metrics.SCALING_DESIRED.labels(name, tier).set(count)
            if isinstance(need, Need) and tier in seen.tiers:
                _show_need(name, tier, need, service, seen.tiers[tier].ready)
        _show_promise(name, seen, wish)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        if key in self._shown:
            self._shown.discard(key)
            metrics.forget_scaled_service("/".join(key))


def _show_need(name: str, tier: str, need: Need, service: Service, ready: int) -> None:
    load = service.tiers[tier].demand.now.level / need.request_gpu_s
    knee = need.replica_work / need.request_gpu_s
    metrics.SCALING_NEEDED.labels(name, tier).set(need.replicas)
    metrics.SCALING_KNEE.labels(name, tier).set(knee)
    metrics.SCALING_LOAD.labels(name, tier).set(load)
    metrics.SCALING_FORECAST.labels(name, tier).set(need.rate_per_s)
    if ready:
        metrics.SCALING_UTILISATION.labels(name, tier).set(load / (ready * knee))


def _show_promise(name: str, seen: Seen, wish: Wish) -> None:
    assert wish.slo is not None
    if seen.heard.ttft is not None and wish.slo.ttft_s is not None:
        met = buckets.share_below(seen.heard.ttft, wish.slo.ttft_s)
        if met is not None:
            metrics.SCALING_ATTAINMENT.labels(name).set(met)
    if not isinstance(seen.heard.shed_share, Unknown):
        metrics.SCALING_SHED.labels(name).set(seen.heard.shed_share)
