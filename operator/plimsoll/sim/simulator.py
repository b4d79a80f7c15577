"""Simulator: one event loop for gateways, engines, start-ups and the operator, in virtual time.

Problem: a day of a million requests must run in minutes and reproducibly. It must use the code that decides in a
cluster, and that code must see no more than it would there.

Idea: events have one order (`event_queue`), and all random numbers come from one seed. An engine is advanced only when
one of its events is due; in between it is a formula. This module makes the run, lets requests arrive, and has what is
periodic: scrapes, polls, and the tick in which policy and operator decide. `request_path` has what happens to requests,
`replica_lifecycle` what happens to replicas. The operator and the admission controllers see only what engines and
gateways export: scraped counters, readiness, and the end of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.types import Role
from plimsoll.sim import engine_reading
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import RetryingClients
from plimsoll.sim.concurrency_cap import CappedGateway, ConcurrencyCapped
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.event_queue import RANK_ARRIVAL, RANK_KILL, RANK_POLL, RANK_SCRAPE, RANK_TICK, EventQueue
from plimsoll.sim.fleet import FleetTier, GpuPool, SimulatedReplica
from plimsoll.sim.gateway import SimulatedGateway
from plimsoll.sim.operator import GATEWAY_POLL_S, TICK_S, SimulatedOperator
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import EngineReadings, Observation, PlimsollPolicy, SimulatedPolicy
from plimsoll.sim.replica_lifecycle import ReplicaLifecycle
from plimsoll.sim.request_path import RequestPath
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.run_log import RunLog

T = TypeVar("T")


class Simulator:
    """One run. on_attempt_end: called with every attempt that has ended."""

    def __init__(
        self,
        service: InferenceService,
        plant: Plant,
        policy: SimulatedPolicy,
        config: RunConfig,
        on_attempt_end: Callable[[Attempt], None],
    ) -> None:
        self.log = RunLog()
        self.itl = QuantileSketch()
        self._policy, self._config = policy, config
        random = Random(config.seed)
        self._random = Random(random.getrandbits(64))
        roles = [Role(name) for name in service.spec.sized_tiers]
        gpu_pool = GpuPool(config.max_gpus)
        self.tiers = {role: FleetTier(role, plant, Random(random.getrandbits(64)), gpu_pool) for role in roles}
        clients = RetryingClients(config.retry_behavior, Random(random.getrandbits(64)))
        self._replicas: dict[str, SimulatedReplica] = {}
        max_queued = 0 if service.when_full == "Shed" else service.max_queued
        names = [f"gateway-{n + 1}" for n in range(config.gateways)]
        concurrency_cap = policy.cap if isinstance(policy, ConcurrencyCapped) else None
        make_gateway = (
            SimulatedGateway if concurrency_cap is None else partial(CappedGateway, concurrency_cap=concurrency_cap)
        )
        max_adapters = 0 if service.lora is None else service.lora.loras
        has_fallback = service.fallback is not None
        arguments = service.classes, service.tenants, max_queued, config.epoch_s, has_fallback, max_adapters
        self.gateways = [make_gateway(name, *arguments) for name in names]
        has_owner = service.spec.slo is not None or concurrency_cap is not None
        deciders = self.gateways[:1] if has_owner else self.gateways
        self.operator = SimulatedOperator(service) if policy.runs_operator else None
        gateway_random = Random(random.getrandbits(64))
        # Other policies mark no scale-down candidates, and nobody does so on the pods of a target.
        marks = self.operator if isinstance(policy, PlimsollPolicy) and service.spec.targets is None else None
        self._events = EventQueue()
        self._schedule = self._events.schedule
        self._requests = RequestPath(
            plant,
            gateways=self.gateways,
            deciders=deciders,
            clients=clients,
            random=gateway_random,
            replicas=self._replicas,
            events=self._events,
            on_attempt_end=on_attempt_end,
            on_replica_request_end=lambda now_s, replica: self._lifecycle.end_if_drained(now_s, replica),
        )
        self._lifecycle = ReplicaLifecycle(
            self.tiers,
            self._replicas,
            self._requests,
            events=self._events,
            log=self.log,
            itl=self.itl,
            replica_load=None if marks is None else marks.replica_load,
            on_replica_ready=self._on_replica_ready,
        )
        self._arrivals: Iterator[TraceRequest] = iter(())
        self._request_count = 0
        self._finished = False

    @property
    def in_flight(self) -> int:
        """Attempts that have not ended."""
        return self._requests.in_flight

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Run all requests, in order of time, until all have ended or the tail is over."""
        self._arrivals = iter(requests)
        for replica in self._lifecycle.start_initial(self._config.initial):
            if self.operator is not None and self._config.observes_initial_startups:
                self.operator.record_startup(replica.role, replica.planned_phases)
            self._start_scraping(replica, 0.0)
        self._lifecycle.update_endpoints(0.0)
        self.log.record(self.tiers, 0.0)
        self._next_arrival()
        self._schedule(0.0, RANK_TICK, self._tick)
        self._schedule(GATEWAY_POLL_S / 2, RANK_POLL, self._poll_gateways)
        for role, at_s in self._config.kills:
            self._schedule(at_s, RANK_KILL, self._lifecycle.kill, role)
        limit_s = self._config.end_s + self._config.tail_s
        while self._events.next_s <= limit_s and not self._finished:
            self._events.step()
        self._end_unfinished(limit_s)

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._schedule(request.at_s, RANK_ARRIVAL, self._on_arrival, request)

    def _on_arrival(self, now_s: float, request: TraceRequest) -> None:
        self._next_arrival()
        self._request_count += 1
        attempt = Attempt(
            self._request_count, request, request.output_tokens if self._config.sends_max_tokens else None
        )
        attempt.gateway = self._requests.any_gateway()
        self._policy.on_arrival(request, now_s)
        self._requests.submit(attempt, now_s)

    def _poll_gateways(self, now_s: float) -> None:
        """The operator polls the gateways."""
        if self.operator is not None:
            for gateway in self.gateways:
                self.operator.observe_gateway(gateway.name, self._config.epoch_s + now_s, gateway.reading())
            self._schedule(now_s + GATEWAY_POLL_S, RANK_POLL, self._poll_gateways)

    def _on_replica_ready(self, replica: SimulatedReplica, now_s: float) -> None:
        if self.operator is not None:
            self.operator.record_startup(replica.role, replica.startup_phases)
        self._start_scraping(replica, now_s)

    def _start_scraping(self, replica: SimulatedReplica, now_s: float) -> None:
        """Scrape the metrics of a ready replica from now on."""
        if self.operator is not None:
            self._schedule(now_s + self._random.uniform(0.0, GATEWAY_POLL_S), RANK_SCRAPE, self._scrape, replica, -1)

    def _scrape(self, now_s: float, replica: SimulatedReplica, steps: int) -> None:
        if not replica.is_serving or self.operator is None:
            return
        reading = engine_reading.scrape(replica.engine, replica.name, now_s, self._config.epoch_s + now_s)
        self._requests.collect_engine_events(replica, now_s)
        self.operator.observe_engine(replica.role, reading)
        busy = replica.engine.metrics.steps != steps or replica.engine.running or replica.engine.waiting
        every_s = self.operator.scrape_interval_s(bool(busy))
        self._schedule(now_s + every_s, RANK_SCRAPE, self._scrape, replica, replica.engine.metrics.steps)

    def _tick(self, now_s: float) -> None:
        decisions = None if self.operator is None else self._decide(self.operator, now_s)
        desired_before = {role: tier.desired for role, tier in self.tiers.items()}
        counts = None if decisions is None else {role: one.replicas for role, one in decisions.items()}
        for role, desired in self._policy.desired_replicas(self._observation(now_s, desired_before, counts)).items():
            if desired != desired_before[role]:
                reason = desired if decisions is None or decisions[role].replicas != desired else decisions[role]
                self.log.changes.append((now_s, role, desired_before[role], reason))
                self._lifecycle.set_desired(role, desired, now_s)
        self._requests.tick(now_s)
        if now_s < self._config.end_s or self._requests.in_flight or self._requests.retrying:
            self._schedule(now_s + TICK_S, RANK_TICK, self._tick)
        else:
            self._finished = True

    def _observation(
        self, now_s: float, desired: Mapping[Role, int], decided: Mapping[Role, int] | None
    ) -> Observation:
        counts = {role: tier.counts() for role, tier in self.tiers.items()}
        at_s = self._config.epoch_s + now_s
        return Observation(
            now_s,
            desired,
            decided,
            EngineReadings(
                self.tiers,
                partial(
                    self._read_ready_engines,
                    now_s,
                    lambda one: engine_reading.scrape(one.engine, one.name, now_s, at_s),
                ),
            ),
            tuple(gateway.reading() for gateway in self.gateways),
            {role: ready for role, (_, ready, _, _) in counts.items()},
            {role: starting for role, (_, _, starting, _) in counts.items()},
            EngineReadings(
                self.tiers, partial(self._read_ready_engines, now_s, lambda one: one.engine.iteration(one.name, now_s))
            ),
        )

    def _read_ready_engines(self, now_s: float, read: Callable[[SimulatedReplica], T], role: Role) -> tuple[T, ...]:
        """Metrics of a tier's ready engines now."""
        readings = []
        for replica in list(self.tiers[role].replicas.values()):
            if replica.is_serving:
                readings.append(read(replica))
                self._requests.collect_engine_events(replica, now_s)
        return tuple(readings)

    def _decide(self, operator: SimulatedOperator, now_s: float) -> Mapping[Role, TierDecision]:
        epoch_s = self._config.epoch_s
        snapshots = {str(role): tier.snapshot(now_s, epoch_s) for role, tier in self.tiers.items()}
        ready = {
            role: [one.name for one in tier.replicas.values() if one.is_serving] for role, tier in self.tiers.items()
        }
        names: Sequence[str] = [gateway.name for gateway in self.gateways]
        published = operator.published
        decision = operator.tick(epoch_s + now_s, snapshots, ready, names)
        if operator.published is not published:
            self._requests.publish(operator.published, now_s)
        return {Role(name): tier for name, tier in decision.tiers.items()}

    def _end_unfinished(self, limit_s: float) -> None:
        """End the attempts that have not ended in time."""
        unfinished: dict[int, Attempt] = {}
        for replica in [*self._replicas.values()]:
            unfinished |= replica.attempts
            self._lifecycle.remove(replica)
        for gateway in self.gateways:
            unfinished |= {one.id: one for one in (*gateway.queued.values(), *gateway.running.values())}
        for attempt in unfinished.values():
            if attempt.outcome is None:
                self._requests.end_attempt(attempt, AttemptOutcome.UNFINISHED, limit_s)
