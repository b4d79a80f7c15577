"""The operator's tick for one service, without a cluster: the real core, given what the operator would observe.

It feeds the core as `plimsoll.controllers.autoscale.autoscaler` does. Gateway and engine readings go to
`MetricsAggregator`, and completed start-ups to `ServiceState`. `decide_all` runs once a second, and then
`AdmissionPublisher` publishes the admission limits. When a tier scales down, candidates are ranked by the last reading
of each gateway and each engine, whatever its age.

Of the engines of targets it knows the metrics only, no launcher. If these take no requests of gateways either, the
metrics are the demand, and it publishes no limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling.admission_publisher import AdmissionPublisher
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scale_down_candidates import CacheHits, ReplicaLoad, replica_load
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.adopted_engines import AdoptedEngines, known_phases

TICK_S: Final = 1.0
GATEWAY_POLL_S: Final = 1.0  # interval of gateway polls
BUSY_SCRAPE_S: Final = 5.0  # interval of scrapes of an engine with requests
IDLE_SCRAPE_S: Final = 10.0
ADOPTED_SCRAPE_S: Final = 2.0  # of a target's engine: its counters are the demand
DEFAULT_SHARE: Final = 0.95  # percentile of the metrics of a service without an SLO
_SERVICE_KEY: Final = "service"


class SimulatedOperator:
    """All times are seconds since the epoch."""

    def __init__(self, service: InferenceService) -> None:
        roles, takes_requests = list(service.spec.sized_tiers), service.spec.takes_requests
        self._service = service
        self._adopted = None if service.spec.targets is None else AdoptedEngines()
        self._aggregator = MetricsAggregator([Role(name) for name in roles], demand_from_engines=not takes_requests)
        self._publisher = AdmissionPublisher()
        self._gateways: dict[str, ServiceReading] = {}
        self._requests_by_pod: dict[str, float] = {}
        self._cache_hits_by_pod: defaultdict[str, CacheHits] = defaultdict(CacheHits)
        self.service_state = ServiceState.for_roles(roles)

    @property
    def published(self) -> AdmissionLimits | None:
        """The limits last published to gateways."""
        return self._publisher.published

    def scrape_interval_s(self, is_busy: bool) -> float:
        """Seconds until the next scrape of an engine."""
        if self._adopted is not None:
            return ADOPTED_SCRAPE_S
        return BUSY_SCRAPE_S if is_busy else IDLE_SCRAPE_S

    def observe_engine(self, role: Role, reading: EngineReading) -> None:
        if self._adopted is not None:
            self._adopted.observe(role, reading)
        self._aggregator.observe_engine(role, reading)
        if reading.running is not None:
            self._requests_by_pod[reading.pod] = reading.running + (reading.waiting or 0.0)
        self._cache_hits_by_pod[reading.pod].observe(reading)

    def observe_gateway(self, gateway: str, at_s: float, reading: ServiceReading) -> None:
        self._aggregator.observe_gateway(gateway, gateway, at_s, reading)
        self._publisher.sharing.observe(gateway, gateway, at_s, reading)
        self._gateways[gateway] = reading

    def replica_load(self, pod: str) -> ReplicaLoad:
        """Known load of an engine."""
        cached_tokens = self._cache_hits_by_pod[pod].tokens
        return replica_load(self._gateways.values(), pod, self._requests_by_pod.get(pod), cached_tokens)

    def record_startup(self, tier: str, phases: Sequence[tuple[str, float]]) -> None:
        """Record a completed start-up: its phases in order, in seconds."""
        self.service_state.record_startup(tier, phases if self._adopted is None else known_phases(tuple(phases)))

    def tick(
        self,
        now_s: float,
        tiers: Mapping[str, TierSnapshot],
        ready: Mapping[Role, Collection[str]],
        gateways: Sequence[str],
    ) -> ScalingDecision:
        """One tick. ready: names of the ready engines, by tier."""
        spec = self._service.spec
        slo = None if spec.slo is None else spec.slo.to_core()
        scaling_spec = ScalingSpec(
            self._service.policy(now_s), slo, spec.scaling.headroom_share, spec.scaling.horizon_s, self._service.classes
        )
        share = DEFAULT_SHARE if slo is None else slo.share
        if self._adopted is not None:
            tiers = {name: self._adopted.known(tier, [*ready[Role(name)]]) for name, tier in tiers.items()}
        snapshot = ServiceSnapshot(self._aggregator.collect(now_s, ready, gateways, share), tiers)
        decision = decide_all({_SERVICE_KEY: (self.service_state, snapshot, scaling_spec)}, now_s)[_SERVICE_KEY]
        if spec.takes_requests:
            self._publisher.publish(self.service_state, snapshot, scaling_spec, gateways, now_s)
        return decision
