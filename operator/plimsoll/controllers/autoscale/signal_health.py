"""Which gateways and engines of a service report metrics, and which gateways use outdated admission limits. Pure.

Problem: a gateway of another release, or one that lost its watch permission, cannot read the admission limits. It keeps
serving without admission control, or with old limits. Nothing fails, and only its own log shows it.

Idea: gateways report the versions of the objects they have, whether they enforce admission, and what they cannot parse.
A difference that lasts longer than any write takes to arrive is reported with its remedy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.api.message_text import name_some
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.demand.counter_delta import MAX_READING_GAP_S
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.ports import GatewayConfigState
from plimsoll.core.types import Role, Unavailable

GATEWAY_SILENCE_SECONDS: Final = 15.0  # tolerates a gateway that is late now and then
# Short, because a new engine is polled at once, and an old reading has already expired before this time starts.
ENGINE_SILENCE_SECONDS: Final = 5.0
# A write reaches the gateways within a second; a restart of the API server takes some more.
STALE_CONFIG_SECONDS: Final = 30.0
# An operator that starts has not read an idle engine for up to its polling interval.
FIRST_READING_SECONDS: Final = MAX_READING_GAP_S
PARTIAL_SECONDS: Final = 10.0  # each new engine is ready before it has been read
UNSELECTED_SECONDS: Final = 30.0  # the count of a workload precedes its pods in a watch that is late
BYPASS_SECONDS: Final = 120.0  # engines may finish requests of gateways that have been replaced

_GATEWAY_LOG_COMMAND: Final = "kubectl logs -n plimsoll-system -l app.kubernetes.io/component=gateway -c picker"
_STALE_OBJECT: Final = (
    "their version of {} is outdated. Check that they can watch {} and reach the API server: " + _GATEWAY_LOG_COMMAND
)
_STALE_SERVICE: Final = _STALE_OBJECT.format("this service", "inferenceservices")
_STALE_LIMITS: Final = _STALE_OBJECT.format("its admission limits", "inferenceserviceadmissions")
_NOT_ENFORCED: Final = (
    "admission limits are published but not enforced, and they admit all requests. The picker's log has the cause:"
    f" {_GATEWAY_LOG_COMMAND}"
)
_SAME_RELEASE: Final = "Run gateways and operator at the same release (helm upgrade)"
_OTHER_RELEASE: Final = (
    "their release does not read InferenceServiceAdmission, and admits all requests. " + _SAME_RELEASE
)
_UNREADABLE: Final = "they cannot read {}, and admit all requests. " + _SAME_RELEASE
_UNREADABLE_UPDATE: Final = "they cannot read {}, and keep earlier limits. " + _SAME_RELEASE


class HealthReport(NamedTuple):
    """Missing signals of one service.

    gateways_silent: no gateway reports. silent_tiers: tiers without a ready engine that reports, in order.
    stale_gateways: message about gateways with outdated admission limits, with the remedy; None if there are none.
    prometheus_only_tiers: tiers with an engine whose metrics are known from Prometheus only. partial: which gateways or
    engines do not report while others do; "" if there are none. bypassing: requests in engines while no gateway sends
    one, for BYPASS_SECONDS; 0 otherwise. other_writer: who else sets the count of a target, None if no other writer
    does. contested: who else sets the counts of tiers; "" if no other client does. unselected: tiers whose
    workload counts pods while none has the labels by which engines are found, with these counts.
    demand_ports: at which the engines of targets report the demand; "" if gateways report it. is_target: whether
    something else manages the engines.
    """

    gateways_silent: bool = False
    silent_tiers: tuple[str, ...] = ()
    stale_gateways: str | None = None
    prometheus_only_tiers: tuple[str, ...] = ()
    partial: str = ""
    bypassing: float = 0.0
    other_writer: str | None = None
    contested: str = ""
    unselected: tuple[tuple[str, int], ...] = ()
    demand_ports: str = ""
    is_target: bool = False


class ConfigVersions(NamedTuple):
    """The resourceVersions of the operator's own copies; 0 without the object.

    service: of the InferenceService. limits: of the InferenceServiceAdmission.
    """

    service: int
    limits: int


class _GatewayLag(NamedTuple):
    """A gateway's configuration state, and since when (Unix s) it differs from the operator's; infinite if it does not.

    service_older_s, limits_older_s: since when its present version is older. unreadable_s: since when it cannot read
    a part. unenforced_s: since when it does not enforce admission.
    """

    config_state: GatewayConfigState
    service_older_s: float
    limits_older_s: float
    unreadable_s: float
    unenforced_s: float

    @property
    def is_current(self) -> bool:
        return math.isinf(min(self[1:]))


@dataclass
class SignalHealth:
    """Tracks the signals of one service. Times are seconds since the epoch."""

    _first_check_s: float = math.inf
    _last_gateway_s: float = math.inf  # when a gateway last reported; initially the first check
    _last_engine_s: dict[str, float] = field(
        default_factory=dict
    )  # by tier: when an engine last reported, or none was ready
    _lagging: dict[str, _GatewayLag] = field(default_factory=dict)  # gateways whose configuration is not current
    _partial_since_s: float = math.inf  # since when some of them have reported and others have not
    _published_since_s: float = math.inf  # since when admission limits are published
    _bypassed_since_s: float = math.inf  # since when engines run requests that no gateway has sent
    _unselected_since_s: dict[str, float] = field(default_factory=dict)  # by tier: since when no counted pod is found

    def record(
        self, gateway: str, config_state: GatewayConfigState | None, versions: ConfigVersions, now_s: float
    ) -> None:
        """Record a gateway's configuration state.

        config_state: None if the gateway's release does not report it. versions: those of the operator's own copies.
        """
        previous = self._lagging.pop(gateway, None)
        if config_state is None:
            return
        old = previous or _GatewayLag(config_state, math.inf, math.inf, math.inf, math.inf)
        state, limits_version = config_state, config_state.limits_version
        service_older_s = old.service_older_s if old.config_state.version == state.version else math.inf
        limits_older_s = old.limits_older_s if old.config_state.limits_version == limits_version else math.inf
        lag = _GatewayLag(
            state,
            _since(_is_older(state.version, versions.service), service_older_s, now_s),
            _since(
                limits_version is not None and _is_older(limits_version or "0", versions.limits),
                limits_older_s,
                now_s,
            ),
            _since(bool(state.parse_error), old.unreadable_s, now_s),
            _since(not state.admission_enabled, old.unenforced_s, now_s),
        )
        if not lag.is_current:
            self._lagging[gateway] = lag

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
        self._first_check_s = min(self._first_check_s, now_s)
        may_be_unread = now_s - self._first_check_s <= FIRST_READING_SECONDS
        silent_tiers = tuple(
            name
            for name in snapshot.tiers
            if not may_be_unread and now_s - self._last_engine_s[name] > ENGINE_SILENCE_SECONDS
        )
        self._published_since_s = min(self._published_since_s, now_s) if is_published else math.inf
        stale_gateways = self._stale_gateways(gateways, now_s) if self._lagging else None
        silent = _silent_sources(snapshot)
        self._partial_since_s = _since(bool(silent), self._partial_since_s, now_s)
        bypassing = _bypassing(snapshot.metrics)
        self._bypassed_since_s = _since(bypassing > 0, self._bypassed_since_s, now_s)
        unselected = {name: tier.unselected for name, tier in snapshot.tiers.items() if tier.unselected}
        self._unselected_since_s = {name: min(self._unselected_since_s.get(name, now_s), now_s) for name in unselected}
        return HealthReport(
            now_s - self._last_gateway_s > GATEWAY_SILENCE_SECONDS,
            silent_tiers,
            stale_gateways,
            partial=silent if now_s - self._partial_since_s > PARTIAL_SECONDS else "",
            bypassing=bypassing if now_s - self._bypassed_since_s > BYPASS_SECONDS else 0.0,
            unselected=tuple(
                (name, unselected[name])
                for name, since_s in self._unselected_since_s.items()
                if now_s - since_s > UNSELECTED_SECONDS
            ),
        )

    def _stale_gateways(self, gateways: Collection[str], now_s: float) -> str | None:
        for gateway in self._lagging.keys() - set(gateways):
            del self._lagging[gateway]
        problem_counts = Counter(problem for lag in self._lagging.values() if (problem := self._problem(lag, now_s)))
        messages = (
            f"{count} of {len(gateways)} gateways: {problem}" for problem, count in sorted(problem_counts.items())
        )
        return "; ".join(messages) or None

    def _problem(self, lag: _GatewayLag, now_s: float) -> str | None:
        state, limit_s = lag.config_state, now_s - STALE_CONFIG_SECONDS
        has_stale_limits = lag.limits_older_s < limit_s
        if max(lag.unenforced_s, self._published_since_s) < limit_s:
            if state.parse_error:
                return _UNREADABLE.format(state.parse_error)
            if state.limits_version is None:
                return _OTHER_RELEASE
            if not has_stale_limits:
                return _NOT_ENFORCED
        elif state.admission_enabled and lag.unreadable_s < limit_s:
            return _UNREADABLE_UPDATE.format(state.parse_error)
        if lag.service_older_s < limit_s:
            return _STALE_SERVICE
        return _STALE_LIMITS if has_stale_limits else None


def _is_older(gateway_version: str, own_version: int) -> bool:
    return gateway_version.isdecimal() and int(gateway_version) < own_version


def _since(is_different: bool, since_s: float, now_s: float) -> float:
    """Since when (Unix s) something differs; infinite if it does not. since_s: the time found before."""
    return min(now_s, since_s) if is_different else math.inf


def _silent_sources(snapshot: ServiceSnapshot) -> str:
    """The gateways, and the engines of each tier, that do not report while others do."""
    metrics = snapshot.metrics
    silent = {"gateway": metrics.silent} | {f"{role} engine": tier.silent for role, tier in metrics.tiers.items()}
    return "; ".join(
        f"{len(names)} {kind}{'' if len(names) == 1 else 's'} ({name_some(names)})"
        for kind, names in silent.items()
        if names
    )


def _bypassing(metrics: ServiceMetrics) -> float:
    """Requests in the engines while all gateways report that they send none; 0 where gateways need not send any."""
    sent = (metrics.rate_per_s, metrics.in_flight, metrics.queued)
    if metrics.is_measured_at_engines or metrics.coverage < 1 or any(one != 0 for one in sent):
        return 0.0
    return sum(one.in_flight for one in metrics.tiers.values() if not isinstance(one.in_flight, Unavailable))
