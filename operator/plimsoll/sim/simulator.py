"""Simulator: one event loop for gateways, engines, start-ups and the operator, in virtual time.

Problem: a day of a million requests must run in minutes and reproducibly. It must use the code that decides in a
cluster, and that code must see no more than it would there.

Idea: events have one order (`event_queue`), and all random numbers come from one seed. An engine is advanced only when
one of its events is due; in between it is a formula. The operator and the admission controllers see only what engines
and gateways export: scraped counters, readiness, and the end of requests. The first gateway owns a service with an SLO:
it decides for all of them. Without an SLO, each gateway decides about its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Final, TypeVar

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from plimsoll.core.admission.retry_advice import RetryAdvice
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.types import Role
from plimsoll.sim import engine_reading
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import IDLE_CONNECTION_S, RetryingClients
from plimsoll.sim.concurrency_cap import CappedGateway, ConcurrencyCapped
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.event_queue import EventQueue
from plimsoll.sim.fleet import FleetTier, GpuPool, SimulatedReplica
from plimsoll.sim.gateway import SimulatedGateway
from plimsoll.sim.operator import BUSY_SCRAPE_S, GATEWAY_POLL_S, IDLE_SCRAPE_S, TICK_S, SimulatedOperator
from plimsoll.sim.plant import Plant, min_drain_s
from plimsoll.sim.policies.base import EngineReadings, Observation, PlimsollPolicy, SimulatedPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.run_log import RunLog

T = TypeVar("T")

_OUTCOME_BY_REASON: Final = {
    "request_too_large": AttemptOutcome.REFUSED,
    "downgraded": AttemptOutcome.DOWNGRADED,
}  # outcome by reason; other reasons are shed
_ADVICE_WHILE_STARTING: Final = RetryAdvice(
    None, None, True
)  # while no engine is ready and there is no admission control

(
    _EVENT_ENGINE,
    _EVENT_KV,
    _EVENT_SUBMIT,
    _EVENT_READY,
    _EVENT_ARRIVAL,
    _EVENT_WAKE,
    _EVENT_DRAIN,
    _EVENT_SCRAPE,
    _EVENT_POLL,
    _EVENT_KILL,
    _EVENT_TICK,
    _EVENT_FIRST_TOKEN,
) = range(12)


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
        self.in_flight = self._retrying = 0
        self._plant, self._policy, self._config, self._on_attempt_end = plant, policy, config, on_attempt_end
        random = Random(config.seed)
        self._random = Random(random.getrandbits(64))
        roles = [Role(name) for name, _ in service.spec.tiers.items()]
        gpu_pool = GpuPool(config.max_gpus)
        self.tiers = {role: FleetTier(role, plant, Random(random.getrandbits(64)), gpu_pool) for role in roles}
        self._clients = RetryingClients(config.retry_behavior, Random(random.getrandbits(64)))
        self._replicas: dict[str, SimulatedReplica] = {}
        max_queued = 0 if service.when_full == "Shed" else service.max_queued
        names = [f"gateway-{n + 1}" for n in range(config.gateways)]
        concurrency_cap = policy.cap if isinstance(policy, ConcurrencyCapped) else None
        make_gateway = (
            SimulatedGateway if concurrency_cap is None else partial(CappedGateway, concurrency_cap=concurrency_cap)
        )
        arguments = service.classes, service.tenants, max_queued, config.epoch_s, service.fallback is not None
        self.gateways = [make_gateway(name, *arguments) for name in names]
        has_owner = service.spec.slo is not None or concurrency_cap is not None
        self._deciders = self.gateways[:1] if has_owner else self.gateways
        self.operator = SimulatedOperator(service) if policy.runs_operator else None
        self._gateway_random = Random(random.getrandbits(64))
        is_plimsoll = isinstance(policy, PlimsollPolicy)  # other policies mark no scale-down candidates
        self._replica_load = self.operator.replica_load if self.operator is not None and is_plimsoll else None
        self._events = EventQueue()
        self._schedule = self._events.schedule
        self._wake_times_s = [math.inf] * len(self._deciders)
        self._arrivals: Iterator[TraceRequest] = iter(())
        self._request_count = 0
        self._finished = False

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Run all requests, in order of time, until all have ended or the tail is over."""
        self._arrivals = iter(requests)
        for role, tier in self.tiers.items():
            for replica in tier.start_initial(self._config.initial[role]):
                self._replicas[replica.name] = replica
                if self.operator is not None and self._config.observes_initial_startups:
                    self.operator.record_startup(role, replica.planned_phases)
                self._start_scraping(replica, 0.0)
        self._update_endpoints(0.0)
        self.log.record(self.tiers, 0.0)
        self._next_arrival()
        self._schedule(0.0, _EVENT_TICK, self._tick)
        self._schedule(GATEWAY_POLL_S / 2, _EVENT_POLL, self._poll_gateways)
        for role, at_s in self._config.kills:
            self._schedule(at_s, _EVENT_KILL, self._kill_replica, role)
        limit_s = self._config.end_s + self._config.tail_s
        while self._events.next_s <= limit_s and not self._finished:
            self._events.step()
        self._end_unfinished(limit_s)

    # ---------------------------------------------------------------- events

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._schedule(request.at_s, _EVENT_ARRIVAL, self._on_arrival, request)

    def _on_arrival(self, now_s: float, request: TraceRequest) -> None:
        self._next_arrival()
        self._request_count += 1
        attempt = Attempt(
            self._request_count, request, request.output_tokens if self._config.sends_max_tokens else None
        )
        attempt.gateway = self._any_gateway()
        self._policy.on_arrival(request, now_s)
        self._submit_to_gateway(attempt, now_s)

    def _any_gateway(self) -> int:
        return self._gateway_random.randrange(len(self.gateways)) if len(self.gateways) > 1 else 0

    def _decider_index(self, attempt: Attempt) -> int:
        """Return the index in `_deciders` of the gateway that decides about a request."""
        return attempt.gateway if len(self._deciders) > 1 else 0

    def _decider(self, attempt: Attempt) -> SimulatedGateway:
        return self._deciders[self._decider_index(attempt)]

    def _submit_to_gateway(self, attempt: Attempt, now_s: float) -> None:
        self.in_flight += 1
        self._apply(attempt, self._decider(attempt).submit(attempt, now_s), now_s)
        self._schedule_wakeup(self._decider_index(attempt), now_s)

    def _on_rejection(self, attempt: Attempt, advice: RetryAdvice | None, reason: str, now_s: float) -> None:
        """A gateway has rejected the attempt. advice: retry advice of the response, None without any."""
        attempt.reason, outcome = reason, _OUTCOME_BY_REASON.get(reason, AttemptOutcome.SHED)
        self._clients.on_rejection(attempt, advice)
        self._end_attempt(attempt, outcome, now_s)
        delay_s = self._clients.retry_delay_s(attempt, advice) if outcome is AttemptOutcome.SHED else None
        if delay_s is not None:
            self._retrying += 1
            self._schedule(now_s + delay_s, _EVENT_ARRIVAL, self._retry, attempt)

    def _retry(self, now_s: float, rejected_attempt: Attempt) -> None:
        """The client of a rejected request retries."""
        self._retrying -= 1
        attempt = Attempt(
            rejected_attempt.id,
            replace(rejected_attempt.trace_request, at_s=now_s),
            rejected_attempt.max_tokens,
            attempt=rejected_attempt.attempt + 1,
        )
        attempt.reservation_s, attempt.honours_retry_after = (
            rejected_attempt.reservation_s,
            rejected_attempt.honours_retry_after,
        )
        reuses_connection = rejected_attempt.end_s is not None and now_s - rejected_attempt.end_s < IDLE_CONNECTION_S
        attempt.gateway = rejected_attempt.gateway if reuses_connection else self._any_gateway()
        self._submit_to_gateway(attempt, now_s)

    def _apply(self, attempt: Attempt, decision: AdmissionDecision | None, now_s: float) -> None:
        """Apply an admission decision."""
        if decision is None or decision.outcome is AdmissionOutcome.ADMITTED:
            self._dispatch(attempt, decision, now_s)
        elif decision.outcome is not AdmissionOutcome.QUEUED:
            reason = self._decider(attempt).record_shed(attempt, decision, now_s)
            self._on_rejection(attempt, decision.retry, reason, now_s)

    def _dispatch(self, attempt: Attempt, decision: AdmissionDecision | None, now_s: float) -> None:
        """Send the request to its engine, through a prefill engine if there is one."""
        gateway, request = self._decider(attempt), attempt.trace_request
        address, prefill = gateway.choose_endpoints(attempt, decision)
        if not address:
            gateway.record_rejection(attempt, "model_starting", now_s)
            self._on_rejection(attempt, _ADVICE_WHILE_STARTING, "model_starting", now_s)
            return
        attempt.admitted_s, attempt.address, attempt.prefill_address = now_s, address, prefill
        gateway.on_dispatch(attempt, decision is not None)
        self.gateways[attempt.gateway].carry(attempt)
        self._replicas[address].attempts[attempt.id] = attempt
        if request.prompt_tokens + request.output_tokens > self._plant.max_sequence_tokens:
            self._fail_attempt(attempt, AttemptOutcome.REFUSED, "request_too_large", now_s)
            return
        attempt.sequence = EngineSequence(
            attempt.id, request.prompt_tokens, request.output_tokens, request.block_ids, remote=bool(prefill)
        )
        frontend_s = self._plant.frontend_s(request.prompt_tokens)
        if not prefill:
            self._schedule(now_s + frontend_s, _EVENT_SUBMIT, self._enqueue_sequence, attempt)
            return
        self._replicas[prefill].attempts[attempt.id] = attempt
        attempt.prefill_sequence = EngineSequence(
            attempt.id, request.prompt_tokens, 1, request.block_ids, keeps_kv=True
        )
        self._schedule(
            now_s + self._plant.remote_prefill_http_s + frontend_s, _EVENT_SUBMIT, self._enqueue_prefill, attempt
        )

    def _enqueue_prefill(self, now_s: float, attempt: Attempt) -> None:
        replica = self._replicas.get(attempt.prefill_address)
        if replica is None or attempt.prefill_sequence is None:
            return
        if attempt.outcome is None:
            replica.engine.add(attempt.prefill_sequence, now_s)
            self._collect_engine_events(replica, now_s)
        else:
            replica.attempts.pop(attempt.id)
            self._end_if_drained(now_s, replica)

    def _enqueue_sequence(self, now_s: float, attempt: Attempt) -> None:
        replica = self._replicas.get(attempt.address)
        if attempt.outcome is None and attempt.sequence is not None and replica is not None:
            if attempt.sequence.remote and attempt.prefill_address not in self._replicas:
                attempt.sequence.remote = False
            replica.engine.add(attempt.sequence, now_s)
            self._collect_engine_events(replica, now_s)

    def _collect_engine_events(self, replica: SimulatedReplica, now_s: float) -> None:
        """Process what an engine has done, and schedule its next event."""
        engine = replica.engine
        for sequence, loaded_s in engine.kv_fetches:
            self._schedule(loaded_s, _EVENT_KV, self._on_kv_loaded, replica, sequence)
        engine.kv_fetches.clear()
        if engine.first_token_sequences:
            for sequence in engine.first_token_sequences:
                attempt = replica.attempts[sequence.id]
                if sequence is attempt.sequence:
                    attempt.first_token_s = sequence.first_token_s
                    report_s = self._decider(attempt).first_token_report_s(attempt)
                    if report_s is not None:
                        self._schedule(max(report_s, now_s), _EVENT_FIRST_TOKEN, self._report_first_token, attempt)
            engine.first_token_sequences.clear()
        if engine.finished_sequences:
            ended, engine.finished_sequences = engine.finished_sequences, []
            for sequence in ended:
                self._on_sequence_end(replica, sequence, now_s)
        if engine.next_event_s != replica.next_advance_s and engine.next_event_s < math.inf:
            self._schedule(engine.next_event_s, _EVENT_ENGINE, self._advance_engine, replica)
        replica.next_advance_s = engine.next_event_s

    def _report_first_token(self, now_s: float, attempt: Attempt) -> None:
        if attempt.outcome is None:
            self._decider(attempt).record_first_token(attempt, now_s)

    def _advance_engine(self, now_s: float, replica: SimulatedReplica) -> None:
        if replica.next_advance_s == now_s and replica.name in self._replicas:
            replica.engine.advance(now_s)
            self._collect_engine_events(replica, now_s)
            if replica.draining_s is not None:
                self._end_if_drained(now_s, replica)

    def _on_sequence_end(self, replica: SimulatedReplica, sequence: EngineSequence, now_s: float) -> None:
        attempt = replica.attempts.pop(sequence.id)
        if sequence is attempt.prefill_sequence:
            if attempt.outcome is not None or attempt.address not in self._replicas:
                replica.engine.on_kv_fetched(sequence, now_s)
                return
            delay_s = self._plant.remote_prefill_http_s + self._plant.frontend_s(attempt.trace_request.prompt_tokens)
            self._schedule(now_s + delay_s, _EVENT_SUBMIT, self._enqueue_sequence, attempt)
            return
        self._record_end(attempt, True, now_s)
        self._end_attempt(attempt, AttemptOutcome.OK, now_s)
        self._release_queued(self._decider_index(attempt), now_s)

    def _record_end(self, attempt: Attempt, succeeded: bool, now_s: float) -> None:
        self.gateways[attempt.gateway].record_end(attempt, succeeded, now_s)
        self._decider(attempt).on_end(attempt, succeeded, now_s)

    def _on_kv_loaded(self, now_s: float, replica: SimulatedReplica, sequence: EngineSequence) -> None:
        """Process the arrival of a prompt's KV at its decode engine."""
        if replica.name in self._replicas:
            attempt = replica.attempts[sequence.id]
            replica.engine.on_kv_loaded(sequence, now_s)
            self._collect_engine_events(replica, now_s)
            self._release_kv(attempt, now_s)

    def _release_kv(self, attempt: Attempt, now_s: float) -> None:
        """Free the prompt's KV at the prefill engine."""
        source = self._replicas.get(attempt.prefill_address)
        if source is not None and attempt.prefill_sequence is not None:
            source.engine.on_kv_fetched(attempt.prefill_sequence, now_s)
            self._collect_engine_events(source, now_s)
            self._end_if_drained(now_s, source)

    # ---------------------------------------------------------------- gateways

    def _release_queued(self, index: int, now_s: float) -> None:
        for attempt, decision in self._deciders[index].release(now_s):
            self._apply(attempt, decision, now_s)
        self._schedule_wakeup(index, now_s)

    def _schedule_wakeup(self, index: int, now_s: float) -> None:
        wake_s = self._deciders[index].wake_s
        if wake_s != self._wake_times_s[index] and wake_s < math.inf:
            self._schedule(max(wake_s, now_s), _EVENT_WAKE, self._on_wakeup, index, wake_s)
        self._wake_times_s[index] = wake_s

    def _on_wakeup(self, now_s: float, index: int, wake_s: float) -> None:
        if self._wake_times_s[index] == wake_s:
            self._wake_times_s[index] = math.inf
            self._release_queued(index, now_s)

    def _update_endpoints(self, now_s: float) -> None:
        """Publish the available engines to the gateways."""
        endpoints = [one for tier in self.tiers.values() for one in tier.endpoints()]
        for gateway in self.gateways:
            gateway.set_endpoints(endpoints, now_s)
        for index in range(len(self._deciders)):
            self._release_queued(index, now_s)

    def _poll_gateways(self, now_s: float) -> None:
        """The operator polls the gateways."""
        if self.operator is not None:
            for gateway in self.gateways:
                self.operator.observe_gateway(gateway.name, self._config.epoch_s + now_s, gateway.reading())
            self._schedule(now_s + GATEWAY_POLL_S, _EVENT_POLL, self._poll_gateways)

    # ---------------------------------------------------------------- replicas

    def _start_scraping(self, replica: SimulatedReplica, now_s: float) -> None:
        """Scrape the metrics of a ready replica from now on."""
        if self.operator is not None:
            self._schedule(now_s + self._random.uniform(0.0, GATEWAY_POLL_S), _EVENT_SCRAPE, self._scrape, replica, -1)

    def _scrape(self, now_s: float, replica: SimulatedReplica, steps: int) -> None:
        if not replica.is_serving or self.operator is None:
            return
        reading = engine_reading.scrape(replica.engine, replica.name, now_s, self._config.epoch_s + now_s)
        self._collect_engine_events(replica, now_s)
        self.operator.observe_engine(replica.role, reading)
        busy = replica.engine.metrics.steps != steps or replica.engine.running or replica.engine.waiting
        every_s = BUSY_SCRAPE_S if busy else IDLE_SCRAPE_S
        self._schedule(now_s + every_s, _EVENT_SCRAPE, self._scrape, replica, replica.engine.metrics.steps)

    def _on_ready(self, now_s: float, replica: SimulatedReplica) -> None:
        if replica.ended_s is not None:
            return
        replica.ready = True
        if self.operator is not None:
            self.operator.record_startup(replica.role, replica.startup_phases)
        self._start_scraping(replica, now_s)
        self._update_endpoints(now_s)
        self.log.record(self.tiers, now_s)

    def _end_if_drained(self, now_s: float, replica: SimulatedReplica) -> None:
        """End a draining replica that has no request left."""
        tier = self.tiers[replica.role]
        if tier.is_drained(replica, now_s):
            tier.end(replica, now_s)
            self._remove_replica(replica)
            self._place_pending(now_s)
            self.log.record(self.tiers, now_s)

    def _remove_replica(self, replica: SimulatedReplica) -> None:
        del self._replicas[replica.name]
        self.itl.merge(replica.engine.metrics.itl)

    def _kill_replica(self, now_s: float, role: Role) -> None:
        """Kill the busiest replica of a tier with its streams; the Deployment replaces it."""
        tier = self.tiers[role]
        live = [one for one in tier.replicas.values() if one.is_serving]
        if not live:
            return
        replica = max(live, key=lambda one: len(one.attempts))
        tier.end(replica, now_s)
        self._remove_replica(replica)
        lost_attempts, replica.attempts = list(replica.attempts.values()), {}
        for attempt in lost_attempts:
            if attempt.address == replica.name:
                self._fail_attempt(attempt, AttemptOutcome.FAILED, "", now_s)
            elif attempt.sequence is not None:  # the decode engine prefills the prompt itself
                attempt.sequence.remote = False
                self._enqueue_sequence(now_s, attempt)
        self._set_replicas(role, tier.desired, now_s)
        self._update_endpoints(now_s)

    def _fail_attempt(self, attempt: Attempt, outcome: AttemptOutcome, reason: str, now_s: float) -> None:
        """Fail a request that was sent to an engine."""
        replica = self._replicas.get(attempt.address)
        if replica is not None:
            replica.attempts.pop(attempt.id, None)
        attempt.reason = reason
        self._record_end(attempt, False, now_s)
        self._end_attempt(attempt, outcome, now_s)
        self._release_kv(attempt, now_s)

    def _set_replicas(self, role: Role, desired: int, now_s: float) -> None:
        created, drained = self.tiers[role].scale(desired, now_s, self._replica_load)
        for replica in created:
            self._replicas[replica.name] = replica
        self._place_pending(now_s)
        for replica in drained:
            self._schedule(now_s + min_drain_s(), _EVENT_DRAIN, self._end_if_drained, replica)
        for name in [name for name, one in self._replicas.items() if one.ended_s is not None]:
            del self._replicas[name]
        if drained:
            self._update_endpoints(now_s)
        self.log.record(self.tiers, now_s)

    def _place_pending(self, now_s: float) -> None:
        """Place pending pods on nodes, oldest first, while there are GPUs."""
        waiting = [replica for tier in self.tiers.values() for replica in tier.pending.values()]
        for replica in sorted(waiting, key=lambda one: one.ordered_s):
            if self.tiers[replica.role].schedule(replica, now_s):
                self._schedule(replica.ready_s, _EVENT_READY, self._on_ready, replica)

    # ---------------------------------------------------------------- the tick

    def _tick(self, now_s: float) -> None:
        decisions = None if self.operator is None else self._decide(self.operator, now_s)
        desired_before = {role: tier.desired for role, tier in self.tiers.items()}
        counts = None if decisions is None else {role: one.replicas for role, one in decisions.items()}
        for role, desired in self._policy.desired_replicas(self._observation(now_s, desired_before, counts)).items():
            if desired != desired_before[role]:
                reason = desired if decisions is None or decisions[role].replicas != desired else decisions[role]
                self.log.changes.append((now_s, role, desired_before[role], reason))
                self._set_replicas(role, desired, now_s)
        for index, gateway in enumerate(self._deciders):
            gateway.tick(now_s)
            self._release_queued(index, now_s)
        if now_s < self._config.end_s or self.in_flight or self._retrying:
            self._schedule(now_s + TICK_S, _EVENT_TICK, self._tick)
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
                self._collect_engine_events(replica, now_s)
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
            for index, gateway in enumerate(self._deciders):
                for attempt in gateway.publish(operator.published, now_s):
                    self._apply(attempt, None, now_s)
                self._release_queued(index, now_s)
        return {Role(name): tier for name, tier in decision.tiers.items()}

    def _end_attempt(self, attempt: Attempt, outcome: AttemptOutcome, now_s: float) -> None:
        attempt.outcome, attempt.end_s = outcome, now_s
        self.in_flight -= 1
        self._on_attempt_end(attempt)

    def _end_unfinished(self, limit_s: float) -> None:
        """End the attempts that have not ended in time."""
        unfinished: dict[int, Attempt] = {}
        for replica in [*self._replicas.values()]:
            unfinished |= replica.attempts
            self._remove_replica(replica)
        for gateway in self.gateways:
            unfinished |= {one.id: one for one in (*gateway.queued.values(), *gateway.running.values())}
        for attempt in unfinished.values():
            if attempt.outcome is None:
                self._end_attempt(attempt, AttemptOutcome.UNFINISHED, limit_s)
