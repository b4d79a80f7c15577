"""The path of a request through the simulated fleet: gateway, prefill engine, decode engine, end, retry.

Problem: each hop takes time, and each hop can end the request: a gateway rejects it, an engine is killed, a client has
to wait. All of them change what the others see.

Idea: a hop is an event. What an engine has done is collected right after each of its steps, and it schedules the next
hop. The first gateway owns a service with an SLO: it decides for all of them. Without an SLO, each gateway decides
about its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from plimsoll.core.admission.retry_advice import RetryAdvice
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.sim.attempt import Attempt, AttemptOutcome
from plimsoll.sim.clients import IDLE_CONNECTION_S, RetryingClients
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.event_queue import (
    RANK_ARRIVAL,
    RANK_ENGINE,
    RANK_FIRST_TOKEN,
    RANK_KV,
    RANK_SUBMIT,
    RANK_WAKE,
    EventQueue,
)
from plimsoll.sim.fleet import SimulatedReplica
from plimsoll.sim.gateway import SimulatedGateway
from plimsoll.sim.plant import Plant

_OUTCOME_BY_REASON: Final = {
    "request_too_large": AttemptOutcome.REFUSED,
    "downgraded": AttemptOutcome.DOWNGRADED,
}  # outcome by reason; other reasons are shed
_ADVICE_WHILE_STARTING: Final = RetryAdvice(
    None, None, True
)  # while no engine is ready and there is no admission control


class RequestPath:
    """The requests of one run.

    deciders: gateways that decide, the first one about all requests if there is only one. replicas: of all tiers, by
    name. on_attempt_end: called with every attempt that has ended. on_replica_request_end: called with a replica that
    may have lost its last request.
    """

    def __init__(
        self,
        plant: Plant,
        *,
        gateways: Sequence[SimulatedGateway],
        deciders: Sequence[SimulatedGateway],
        clients: RetryingClients,
        random: Random,
        replicas: Mapping[str, SimulatedReplica],
        events: EventQueue,
        on_attempt_end: Callable[[Attempt], None],
        on_replica_request_end: Callable[[float, SimulatedReplica], None],
    ) -> None:
        self.in_flight = self.retrying = 0
        self._plant, self._gateways, self._deciders, self._clients = plant, gateways, deciders, clients
        self._gateway_random, self._replicas, self._schedule = random, replicas, events.schedule
        self._on_attempt_end, self._on_replica_request_end = on_attempt_end, on_replica_request_end
        self._wake_times_s = [math.inf] * len(deciders)

    def any_gateway(self) -> int:
        return self._gateway_random.randrange(len(self._gateways)) if len(self._gateways) > 1 else 0

    def submit(self, attempt: Attempt, now_s: float) -> None:
        self.in_flight += 1
        self._apply(attempt, self._decider(attempt).submit(attempt, now_s), now_s)
        self._schedule_wakeup(self._decider_index(attempt), now_s)

    def _decider_index(self, attempt: Attempt) -> int:
        """Return the index in `_deciders` of the gateway that decides about a request."""
        return attempt.gateway if len(self._deciders) > 1 else 0

    def _decider(self, attempt: Attempt) -> SimulatedGateway:
        return self._deciders[self._decider_index(attempt)]

    def _on_rejection(self, attempt: Attempt, advice: RetryAdvice | None, reason: str, now_s: float) -> None:
        """A gateway has rejected the attempt. advice: retry advice of the response, None without any."""
        attempt.reason, outcome = reason, _OUTCOME_BY_REASON.get(reason, AttemptOutcome.SHED)
        self._clients.on_rejection(attempt, advice)
        self.end_attempt(attempt, outcome, now_s)
        delay_s = self._clients.retry_delay_s(attempt, advice) if outcome is AttemptOutcome.SHED else None
        if delay_s is not None:
            self.retrying += 1
            self._schedule(now_s + delay_s, RANK_ARRIVAL, self._retry, attempt)

    def _retry(self, now_s: float, rejected_attempt: Attempt) -> None:
        """The client of a rejected request retries."""
        self.retrying -= 1
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
        attempt.gateway = rejected_attempt.gateway if reuses_connection else self.any_gateway()
        self.submit(attempt, now_s)

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
        self._gateways[attempt.gateway].carry(attempt)
        self._replicas[address].attempts[attempt.id] = attempt
        if request.prompt_tokens + request.output_tokens > self._plant.max_sequence_tokens:
            self.fail_attempt(attempt, AttemptOutcome.REFUSED, "request_too_large", now_s)
            return
        attempt.sequence = EngineSequence(
            attempt.id,
            request.prompt_tokens,
            request.output_tokens,
            request.block_ids,
            remote=bool(prefill),
            adapter=request.adapter,
        )
        frontend_s = self._plant.frontend_s(request.prompt_tokens)
        if not prefill:
            self._schedule(now_s + frontend_s, RANK_SUBMIT, self.enqueue_sequence, attempt)
            return
        self._replicas[prefill].attempts[attempt.id] = attempt
        attempt.prefill_sequence = EngineSequence(
            attempt.id, request.prompt_tokens, 1, request.block_ids, keeps_kv=True
        )
        self._schedule(
            now_s + self._plant.remote_prefill_http_s + frontend_s, RANK_SUBMIT, self._enqueue_prefill, attempt
        )

    def _enqueue_prefill(self, now_s: float, attempt: Attempt) -> None:
        replica = self._replicas.get(attempt.prefill_address)
        if replica is None or attempt.prefill_sequence is None:
            return
        if attempt.outcome is None:
            replica.engine.add(attempt.prefill_sequence, now_s)
            self.collect_engine_events(replica, now_s)
        else:
            replica.attempts.pop(attempt.id)
            self._on_replica_request_end(now_s, replica)

    def enqueue_sequence(self, now_s: float, attempt: Attempt) -> None:
        replica = self._replicas.get(attempt.address)
        if attempt.outcome is None and attempt.sequence is not None and replica is not None:
            if attempt.sequence.remote and attempt.prefill_address not in self._replicas:
                attempt.sequence.remote = False
            replica.engine.add(attempt.sequence, now_s)
            self.collect_engine_events(replica, now_s)

    def collect_engine_events(self, replica: SimulatedReplica, now_s: float) -> None:
        """Process what an engine has done, and schedule its next event."""
        engine = replica.engine
        for sequence, loaded_s in engine.kv_fetches:
            self._schedule(loaded_s, RANK_KV, self._on_kv_loaded, replica, sequence)
        engine.kv_fetches.clear()
        if engine.first_token_sequences:
            for sequence in engine.first_token_sequences:
                attempt = replica.attempts[sequence.id]
                if sequence is attempt.sequence:
                    attempt.first_token_s = sequence.first_token_s
                    report_s = self._decider(attempt).first_token_report_s(attempt)
                    if report_s is not None:
                        self._schedule(max(report_s, now_s), RANK_FIRST_TOKEN, self._report_first_token, attempt)
            engine.first_token_sequences.clear()
        if engine.finished_sequences:
            ended, engine.finished_sequences = engine.finished_sequences, []
            for sequence in ended:
                self._on_sequence_end(replica, sequence, now_s)
        if engine.next_event_s != replica.next_advance_s and engine.next_event_s < math.inf:
            self._schedule(engine.next_event_s, RANK_ENGINE, self._advance_engine, replica)
        replica.next_advance_s = engine.next_event_s

    def _report_first_token(self, now_s: float, attempt: Attempt) -> None:
        if attempt.outcome is None:
            self._decider(attempt).record_first_token(attempt, now_s)

    def _advance_engine(self, now_s: float, replica: SimulatedReplica) -> None:
        if replica.next_advance_s == now_s and replica.name in self._replicas:
            replica.engine.advance(now_s)
            self.collect_engine_events(replica, now_s)
            if replica.draining_s is not None:
                self._on_replica_request_end(now_s, replica)

    def _on_sequence_end(self, replica: SimulatedReplica, sequence: EngineSequence, now_s: float) -> None:
        attempt = replica.attempts.pop(sequence.id)
        if sequence is attempt.prefill_sequence:
            if attempt.outcome is not None or attempt.address not in self._replicas:
                replica.engine.on_kv_fetched(sequence, now_s)
                return
            delay_s = self._plant.remote_prefill_http_s + self._plant.frontend_s(attempt.trace_request.prompt_tokens)
            self._schedule(now_s + delay_s, RANK_SUBMIT, self.enqueue_sequence, attempt)
            return
        self._record_end(attempt, True, now_s)
        self.end_attempt(attempt, AttemptOutcome.OK, now_s)
        self._release_queued(self._decider_index(attempt), now_s)

    def _on_kv_loaded(self, now_s: float, replica: SimulatedReplica, sequence: EngineSequence) -> None:
        """Process the arrival of a prompt's KV at its decode engine."""
        if replica.name in self._replicas:
            attempt = replica.attempts[sequence.id]
            replica.engine.on_kv_loaded(sequence, now_s)
            self.collect_engine_events(replica, now_s)
            self._release_kv(attempt, now_s)

    def _release_kv(self, attempt: Attempt, now_s: float) -> None:
        """Free the prompt's KV at the prefill engine."""
        source = self._replicas.get(attempt.prefill_address)
        if source is not None and attempt.prefill_sequence is not None:
            source.engine.on_kv_fetched(attempt.prefill_sequence, now_s)
            self.collect_engine_events(source, now_s)
            self._on_replica_request_end(now_s, source)

    def fail_attempt(self, attempt: Attempt, outcome: AttemptOutcome, reason: str, now_s: float) -> None:
        """Fail a request that was sent to an engine."""
        replica = self._replicas.get(attempt.address)
        if replica is not None:
            replica.attempts.pop(attempt.id, None)
        attempt.reason = reason
        self._record_end(attempt, False, now_s)
        self.end_attempt(attempt, outcome, now_s)
        self._release_kv(attempt, now_s)

    def _record_end(self, attempt: Attempt, succeeded: bool, now_s: float) -> None:
        self._gateways[attempt.gateway].record_end(attempt, succeeded, now_s)
        self._decider(attempt).on_end(attempt, succeeded, now_s)

    def end_attempt(self, attempt: Attempt, outcome: AttemptOutcome, now_s: float) -> None:
        attempt.outcome, attempt.end_s = outcome, now_s
        self.in_flight -= 1
        self._on_attempt_end(attempt)

    def set_endpoints(self, endpoints: list[Endpoint], now_s: float) -> None:
        """Publish the available engines to the gateways."""
        for gateway in self._gateways:
            gateway.set_endpoints(endpoints, now_s)
        for index in range(len(self._deciders)):
            self._release_queued(index, now_s)

    def publish(self, limits: AdmissionLimits | None, now_s: float) -> None:
        """Publish admission limits to the gateways that decide."""
        for index, gateway in enumerate(self._deciders):
            for attempt in gateway.publish(limits, now_s):
                self._apply(attempt, None, now_s)
            self._release_queued(index, now_s)

    def tick(self, now_s: float) -> None:
        """Let the gateways that decide do what they do once a second."""
        for index, gateway in enumerate(self._deciders):
            gateway.tick(now_s)
            self._release_queued(index, now_s)

    def _release_queued(self, index: int, now_s: float) -> None:
        for attempt, decision in self._deciders[index].release(now_s):
            self._apply(attempt, decision, now_s)
        self._schedule_wakeup(index, now_s)

    def _schedule_wakeup(self, index: int, now_s: float) -> None:
        wake_s = self._deciders[index].wake_s
        if wake_s != self._wake_times_s[index] and wake_s < math.inf:
            self._schedule(max(wake_s, now_s), RANK_WAKE, self._on_wakeup, index, wake_s)
        self._wake_times_s[index] = wake_s

    def _on_wakeup(self, now_s: float, index: int, wake_s: float) -> None:
        if self._wake_times_s[index] == wake_s:
            self._wake_times_s[index] = math.inf
            self._release_queued(index, now_s)
