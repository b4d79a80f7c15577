"""Which gateways and engines of a service report metrics, and which gateways use outdated admission limits. Pure.

Problem: a gateway of another release, or one that lost its watch permission, cannot read the service's status. It keeps
serving without admission control, or with old limits. Nothing fails, and only its own log shows it.

Idea: gateways report the version of the object they have, whether they enforce admission, and what they cannot parse.
A difference that lasts longer than any write takes to arrive is reported with its remedy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.ports import GatewayConfigState
from plimsoll.core.types import Role

GATEWAY_SILENCE_SECONDS: Final = 15.0  # tolerates a gateway that is late now and then
# Short, because a new engine is polled at once, and an old reading has already expired before this time starts.
ENGINE_SILENCE_SECONDS: Final = 5.0
# A write reaches the gateways within a second; a restart of the API server takes some more.
STALE_CONFIG_SECONDS: Final = 30.0

_GATEWAY_LOG_COMMAND: Final = "kubectl logs -n plimsoll-system -l app.kubernetes.io/component=gateway -c picker"
_STALE_OBJECT: Final = (
    "their version of this service is outdated. Check that they can watch inferenceservices and reach the API server:"
    f" {_GATEWAY_LOG_COMMAND}"
)
_NOT_ENFORCED: Final = (
    "status.admission is set but not enforced, and they admit all requests. The picker's log has the cause:"
    f" {_GATEWAY_LOG_COMMAND}"
)
_UNREADABLE: Final = (
    "they cannot read {}, and admit all requests. Run gateways and operator at the same release (helm upgrade)"
)


class HealthReport(NamedTuple):
    """Missing signals of one service.

    gateways_silent: no gateway reports. silent_tiers: tiers without a ready engine that reports, in order.
    stale_gateways: message about gateways with outdated admission limits, with the remedy; None if there are none.
    prometheus_only_tiers: tiers with an engine whose metrics are known from Prometheus only.
    """

    gateways_silent: bool = False
    silent_tiers: tuple[str, ...] = ()
    stale_gateways: str | None = None
    prometheus_only_tiers: tuple[str, ...] = ()


class _GatewayLag(NamedTuple):
    """A gateway's configuration state.

    older_since_s: when its present version became older than the operator's. unenforced_since_s: when it stopped
    enforcing admission. Both are infinite where that is not the case.
    """

    config_state: GatewayConfigState
    older_since_s: float
    unenforced_since_s: float


@dataclass
class SignalHealth:
    """Tracks the signals of one service. Times are seconds since the epoch."""

    _last_gateway_s: float = math.inf  # when a gateway last reported; initially the first check
    _last_engine_s: dict[str, float] = field(
        default_factory=dict
    )  # by tier: when an engine last reported, or none was ready
    _lagging: dict[str, _GatewayLag] = field(default_factory=dict)  # gateways whose configuration is not current
    _published_since_s: float = math.inf  # since when admission limits are published

    def record(self, gateway: str, config_state: GatewayConfigState | None, version: int, now_s: float) -> None:
        """Record a gateway's configuration state.

        config_state: None if the gateway's release does not report it. version: that of the operator's own copy.
        """
        previous = self._lagging.pop(gateway, None)
        if config_state is None or (config_state.admission_enabled and not _is_older(config_state, version)):
            return
        is_same_version = previous is not None and previous.config_state.version == config_state.version
        self._lagging[gateway] = _GatewayLag(
            config_state,
            min(now_s, previous.older_since_s if previous and is_same_version else math.inf)
            if _is_older(config_state, version)
            else math.inf,
            math.inf
            if config_state.admission_enabled
            else min(now_s, previous.unenforced_since_s if previous else math.inf),
        )

    def report(
        self, snapshot: ServiceSnapshot, is_published: bool, gateways: Collection[str], now_s: float
    ) -> HealthReport:
        """The signals that have been missing or outdated for longer than their limits.

        is_published: whether admission limits are published. gateways: names of the gateways that exist.
        """
        if snapshot.metrics.coverage or self._last_gateway_s > now_s:
            self._last_gateway_s = now_s
        for name, tier_snapshot in snapshot.tiers.items():
            tier_metrics = snapshot.metrics.tiers.get(Role(name))
            if (
                not tier_snapshot.ready
                or (tier_metrics is not None and tier_metrics.coverage)
                or self._last_engine_s.get(name, math.inf) > now_s
            ):
                self._last_engine_s[name] = now_s
        silent_tiers = tuple(
            name for name in snapshot.tiers if now_s - self._last_engine_s[name] > ENGINE_SILENCE_SECONDS
        )
        self._published_since_s = min(self._published_since_s, now_s) if is_published else math.inf
        stale_gateways = self._stale_gateways(gateways, now_s) if self._lagging else None
        return HealthReport(now_s - self._last_gateway_s > GATEWAY_SILENCE_SECONDS, silent_tiers, stale_gateways)

    def _stale_gateways(self, gateways: Collection[str], now_s: float) -> str | None:
        for gateway in self._lagging.keys() - set(gateways):
            del self._lagging[gateway]
        problem_counts = Counter(problem for lag in self._lagging.values() if (problem := self._problem(lag, now_s)))
        messages = (
            f"{count} of {len(gateways)} gateways: {problem}" for problem, count in sorted(problem_counts.items())
        )
        return "; ".join(messages) or None

    def _problem(self, lag: _GatewayLag, now_s: float) -> str | None:
        if now_s - max(lag.unenforced_since_s, self._published_since_s) > STALE_CONFIG_SECONDS:
            return _UNREADABLE.format(lag.config_state.parse_error) if lag.config_state.parse_error else _NOT_ENFORCED
        return _STALE_OBJECT if now_s - lag.older_since_s > STALE_CONFIG_SECONDS else None


def _is_older(config_state: GatewayConfigState, version: int) -> bool:
    return config_state.version.isdecimal() and int(config_state.version) < version
