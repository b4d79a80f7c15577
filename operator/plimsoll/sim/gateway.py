"""One gateway of the simulated fleet: the real admission controller (`core.admission`), driven as the gateway drives
it.

Problem: the core decides, but the gateway determines what it knows, when, and what it learns from a completed response.
Half of admission control's errors are there.

Idea: make the calls of `plimsoll.gateway` in the same order: submit, queue, release when a request has ended or a limit
has changed and at wake-ups, and one tick per second. Response tokens are estimated from bytes, here one per token.
Without admission control, the request goes to the engine with the fewest requests in flight, as in the picker. Retries
are marked as such: a request that was rejected here before, or has a retry reservation, is not new demand.

With several gateways, one owns the service and decides for all of them, with all slots of each engine. It counts
arrivals and rejections. The gateway that carries a request counts its end. The owner can always be reached here, so no
gateway decides with a share. A question takes 0.25 ms (design record 23), which is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from plimsoll.core import histogram
from plimsoll.core.admission import first_token_reports
from plimsoll.core.admission.arrival_estimator import ArrivalEstimator
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import DEFAULT_CLASS, ClassPolicy
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.admission.retry_detection import RecentRejections
from plimsoll.core.admission.token_estimator import TokenEstimator
from plimsoll.core.ports import BucketCounts, ServiceReading
from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad, Prompt
from plimsoll.core.routing.picker import EndpointIndex
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.sim.attempt import Attempt

MAX_QUEUE_S: Final = 120.0
_HASH_SPACE: Final = 2**64
_REASONS: Final = {
    AdmissionOutcome.DOWNGRADED: "downgraded",
    AdmissionOutcome.SHED_SATURATED: "overloaded",
    AdmissionOutcome.SHED_ADAPTERS: "adapters_busy",
    AdmissionOutcome.SHED_STARTING: "model_starting",
    AdmissionOutcome.SHED_QUOTA: "quota_exceeded",
    AdmissionOutcome.SHED_DEADLINE: "deadline_exceeded",
    AdmissionOutcome.SHED_NO_CAPACITY: "no_endpoint",
}


class SimulatedGateway:
    """Gateway of one service. Times are of the simulation's clock.

    epoch_s: its zero, seconds since the epoch. fallback: whether another service takes requests that this one cannot.
    max_adapters: LoRA adapters that one engine runs at once, 0 without LoRA.
    """

    def __init__(
        self,
        name: str,
        classes: tuple[ClassPolicy, ...],
        tenants: Mapping[str, TenantPolicy],
        max_queued: int,
        epoch_s: float,
        fallback: bool = False,
        max_adapters: int = 0,
    ) -> None:
        self.name = name
        self.admission: AdmissionController | None = None
        self.queued: dict[str, Attempt] = {}
        self.running: dict[str, Attempt] = {}
        self.published: AdmissionLimits | None = None
        self._classes, self._tenants, self._max_queued, self._epoch_s = classes, tenants, max_queued, epoch_s
        self._fallback, self._max_adapters = fallback, max_adapters
        self._class_names = {one.name for one in classes}
        self._default = default_class(classes)
        self._endpoints: list[Endpoint] = []
        self._loads: dict[str, EndpointLoad] = {}
        self._carried: Counter[str] = Counter()  # requests in flight through this gateway, by address
        self._endpoint_index = EndpointIndex((), self._loads)
        self._pick_count = 0
        self._caps: dict[str, int] = {}
        self._prefills: frozenset[str] = frozenset()
        self._arrival_estimator = ArrivalEstimator(0.0)
        self._queue_timeouts: list[str] = []
        self._token_estimator = TokenEstimator()
        self._arrived = self._arrived_tokens = self._retried = self._succeeded = self._failed = 0
        self._recent_rejections = RecentRejections()
        self._rejections: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._ttft = [0.0] * len(histogram.LATENCY_EDGES_S)
        self._ttft_s = 0.0
        self._e2e = [0.0] * len(histogram.LATENCY_EDGES_S)
        self._e2e_s = 0.0

    @property
    def wake_s(self) -> float:
        """When `release` must be called even without an event."""
        return math.inf if self.admission is None or not self.queued else self.admission.wake_at_s

    # ---------------------------------------------------------------- configuration

    def publish(self, published: AdmissionLimits | None, now_s: float) -> list[Attempt]:
        """Apply the operator's published limits. Returns the queued requests if admission control was disabled."""
        before, self.published = self.published, self._with_all_slots(published)
        if published is None or published.cost_model is None:
            stranded, self.queued, self.admission = list(self.queued.values()), {}, None
            return stranded
        if self.admission is None:
            self.admission = AdmissionController(self._classes, published.cost_model, self._tenants)
            self.admission.pool.adapters.configure(self._max_adapters, {})
            self._caps, self._arrival_estimator = {}, ArrivalEstimator(now_s)
            self.tick(now_s)
        else:
            limits_changed = before is None or before.cost_model != published.cost_model
            self.admission.tick(
                now_s, self._capacity_announcement(now_s), published.cost_model if limits_changed else None
            )
            if limits_changed:
                self._caps = {}
        self._update_replicas(now_s)
        return []

    def set_endpoints(self, endpoints: list[Endpoint], now_s: float) -> None:
        """Set the available engines."""
        self._endpoints = endpoints
        for address in self._loads.keys() - {one.address for one in endpoints}:
            del self._loads[address]
        self._carried = +self._carried  # drops the engines without requests
        for one in endpoints:
            self._loads.setdefault(one.address, EndpointLoad())
        self._endpoint_index = EndpointIndex(endpoints, self._loads)
        self._update_replicas(now_s)

    def tick(self, now_s: float) -> None:
        """Update once per second; call `release` next."""
        if self.admission is None:
            return
        self._arrival_estimator.update(self.admission.offered_work_s, now_s)
        self.admission.tick(now_s, self._capacity_announcement(now_s))
        self._queue_timeouts = [
            key for key, one in self.queued.items() if now_s - one.trace_request.at_s >= MAX_QUEUE_S
        ]

    # ---------------------------------------------------------------- requests

    def submit(self, attempt: Attempt, now_s: float, *, is_new: bool = True) -> AdmissionDecision | None:
        """Decide on a request; None without admission control. is_new: it has just arrived."""
        is_retry = is_new and self._is_retry(attempt, now_s)
        decision = self._decide(attempt, is_retry, now_s)
        if is_new and (decision is None or decision.is_demand):
            if is_retry:
                self._retried += 1
            else:
                self._arrived += 1
                self._arrived_tokens += attempt.trace_request.prompt_tokens
        return decision

    def _decide(self, attempt: Attempt, is_retry: bool, now_s: float) -> AdmissionDecision | None:
        if self.admission is None:
            return None
        request = self._admission_request(attempt)
        if is_retry:
            request = attempt.request = replace(request, is_retry=True)
        decision = self.admission.submit(request, now_s)
        if decision.outcome is AdmissionOutcome.QUEUED:
            if len(self.queued) >= self._max_queued:
                self.admission.cancel(request.id, now_s)
                return self.admission.reject(request, now_s)
            self.queued[request.id] = attempt
            attempt.was_queued = True
            self._outcomes[AdmissionOutcome.QUEUED] += 1
        return decision

    def release(self, now_s: float) -> list[tuple[Attempt, AdmissionDecision | None]]:
        """Return queued requests with their decisions."""
        if self.admission is None or not self.queued:
            return []
        decisions = self.admission.release(now_s)
        overdue, self._queue_timeouts = self._queue_timeouts, []
        for key in overdue:
            if key in self.queued:
                self.admission.cancel(key, now_s)
                decisions.append(self.admission.reject(self._admission_request(self.queued[key]), now_s))
        return [(self.queued.pop(one.request_id), one) for one in decisions]

    def choose_endpoints(self, attempt: Attempt, decision: AdmissionDecision | None) -> tuple[str, str]:
        """Return the addresses of the request's engine and of its prefill engine; "" for none."""
        tokens = attempt.trace_request.prompt_tokens
        if decision is not None and decision.address is not None:
            uses_prefill = tokens >= KV_BLOCK_TOKENS and decision.prefill is not None
            return decision.address, decision.prefill or "" if uses_prefill else ""
        placement = self._endpoint_index.pick(Prompt(tokens))
        if placement is None:
            return "", ""
        return placement.endpoint.address, placement.prefill.address if placement.prefill else ""

    def on_dispatch(self, attempt: Attempt, gated: bool) -> None:
        """Record that a request of this gateway's decision goes to an engine."""
        self._pick_count += 1
        self.running[str(attempt.id)] = attempt
        if gated:
            self._outcomes[AdmissionOutcome.ADMITTED] += 1
        for address in filter(None, (attempt.address, attempt.prefill_address)):
            engine_load = self._loads.setdefault(address, EndpointLoad())
            engine_load.update(engine_load.inflight + 1, self._pick_count)

    def carry(self, attempt: Attempt) -> None:
        """Record that the request goes to an engine through this gateway, whichever gateway decided."""
        self._carried.update(filter(None, (attempt.address, attempt.prefill_address)))

    def record_shed(self, attempt: Attempt, decision: AdmissionDecision, now_s: float) -> str:
        """Record that the request was rejected, or goes to the fallback. Returns the reason in the
        gateway's response.
        """
        reason = _REASONS[decision.outcome]
        if (
            decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY
            and self.admission is not None
            and self.admission.pool.replicas
        ):
            reason = "request_too_large"
        self._outcomes[decision.outcome] += 1
        if decision.outcome is not AdmissionOutcome.DOWNGRADED:
            self.record_rejection(attempt, reason, now_s, is_demand=decision.is_demand)
        return reason

    def record_rejection(self, attempt: Attempt, reason: str, now_s: float, *, is_demand: bool = True) -> None:
        """Record a rejection, with or without admission control."""
        self._rejections[reason] += 1
        if is_demand:
            self._recent_rejections.record(attempt.id, now_s)

    def first_token_report_s(self, attempt: Attempt) -> float | None:
        """Return when Envoy reports the first token of a running response, None if never."""
        arrived_s = attempt.trace_request.at_s
        if self.admission is None or attempt.first_token_s is None:
            return None
        age_s = first_token_reports.report_age_s(attempt.first_token_s - arrived_s)
        return None if age_s is None else arrived_s + age_s

    def record_first_token(self, attempt: Attempt, now_s: float) -> None:
        """Record the first token of a running response that this gateway decided about."""
        ttft_s = _ttft_s(attempt)
        if self.admission is not None and ttft_s is not None:
            self.admission.record_first_token(str(attempt.id), now_s, ttft_s)

    def on_end(self, attempt: Attempt, succeeded: bool, now_s: float) -> None:
        """Record the end of a request that this gateway decided about. Call `release` next."""
        key = str(attempt.id)
        self.running.pop(key, None)
        for address in filter(None, (attempt.address, attempt.prefill_address)):
            if address in self._loads:
                self._loads[address].inflight -= 1
        ttft_s = output = None
        if succeeded and attempt.first_token_s is not None and attempt.admitted_s is not None:
            limits = None if self.published is None else self.published.cost_model
            mean = None if limits is None else limits.output_mean
            output = self._token_estimator.estimate(attempt.trace_request.output_tokens, 1, mean)
            ttft_s = _ttft_s(attempt)
        if self.admission is not None:
            self.admission.complete(key, now_s, output, ttft_s)

    def record_end(self, attempt: Attempt, succeeded: bool, now_s: float) -> None:
        """Count the end of a request that this gateway carried."""
        self._carried.subtract(filter(None, (attempt.address, attempt.prefill_address)))
        if not succeeded or attempt.first_token_s is None or attempt.admitted_s is None:
            self._failed += 1
            return
        self._succeeded += 1
        ttft_e2e_s = attempt.first_token_s - attempt.trace_request.at_s
        self._ttft[histogram.bucket_index(histogram.LATENCY_EDGES_S, ttft_e2e_s)] += 1
        self._ttft_s += ttft_e2e_s
        e2e_s = now_s - attempt.trace_request.at_s
        self._e2e[histogram.bucket_index(histogram.LATENCY_EDGES_S, e2e_s)] += 1
        self._e2e_s += e2e_s

    def reading(self) -> ServiceReading:
        """The reading that the operator polls."""
        admission, published = self.admission, self.published
        replicas = () if admission is None else admission.pool.replicas.values()
        return ServiceReading(
            arrived=self._arrived,
            arrived_tokens=self._arrived_tokens,
            retried=self._retried,
            succeeded=self._succeeded,
            failed=self._failed,
            cancelled=0,
            rejected=dict(self._rejections),
            ttft_s=BucketCounts(histogram.LATENCY_EDGES_S, tuple(self._ttft), self._ttft_s),
            queued=len(self.queued),
            queued_work_s=0.0 if admission is None else admission.queued_work_s,
            reserved_work_s=0.0 if admission is None else admission.reservations.pending_work_s,
            slot_limit=0 if admission is None or published is None else published.slot_limit(self.name),
            slots_in_use=max((one.sequences for one in replicas), default=0),
            outcomes={str(outcome): float(count) for outcome, count in self._outcomes.items()},
            inflight={address: self._carried[address] for address in self._loads},
            e2e_s=BucketCounts(histogram.LATENCY_EDGES_S, tuple(self._e2e), self._e2e_s),
        )

    # ---------------------------------------------------------------- inside

    def _with_all_slots(self, published: AdmissionLimits | None) -> AdmissionLimits | None:
        """Return the limits of the owner, which has all slots whatever share is published for it."""
        if published is None or published.cost_model is None:
            return published
        return replace(published, shares={self.name: published.cost_model.batch})

    def _update_replicas(self, now_s: float) -> None:
        """Update the admission controller's replicas, each with all its slots."""
        if self.admission is None or self.published is None:
            return
        units = self.published.slot_limit(self.name)
        caps = {one.address: units for one in self._endpoints if one.role is not Role.PREFILL}
        prefills = frozenset(one.address for one in self._endpoints if one.role is Role.PREFILL)
        if caps == self._caps and prefills == self._prefills:
            return
        added = caps.keys() - self._caps.keys()
        self._caps, self._prefills = caps, prefills
        self.admission.set_replicas(caps, now_s, prefills)
        for attempt in self.running.values() if added else ():
            if attempt.address in added and self.admission.register_running(
                self._admission_request(attempt), attempt.address, now_s
            ):
                attempt.is_registered_running = True

    def _admission_request(self, attempt: Attempt) -> AdmissionRequest:
        if attempt.request is None:
            trace_request = attempt.trace_request
            attempt.request = AdmissionRequest(
                id=str(attempt.id),
                request_class=trace_request.request_class
                if trace_request.request_class in self._class_names
                else self._default,
                tenant=trace_request.tenant,
                arrived_s=trace_request.at_s,
                prompt_tokens=trace_request.prompt_tokens,
                max_tokens=attempt.max_tokens,
                body_hash=attempt.id,
                has_fallback=self._fallback,
                block_hashes=_prompt_blocks(trace_request.block_ids, trace_request.prompt_tokens),
                adapter=trace_request.adapter if self._max_adapters else "",
                is_stream=True,
            )
        return attempt.request

    def _capacity_announcement(self, now_s: float) -> CapacityAnnouncement:
        assert self.published is not None
        return self.published.announcement(self.name, self._arrival_estimator.work_rate, -self._epoch_s)

    def _is_retry(self, attempt: Attempt, now_s: float) -> bool:
        """Whether this gateway has counted the demand before."""
        if attempt.attempt == 1:
            return False
        if self._recent_rejections.is_retry(True, attempt.id, now_s):
            return True
        return (
            self.admission is not None
            and self.admission.reservations.find(self._admission_request(attempt), now_s) is not None
        )


def default_class(classes: Iterable[ClassPolicy]) -> str:
    """Return the class of requests without one: `default` if it exists, else the lowest."""
    known = list(classes)
    names = [one.name for one in known]
    if DEFAULT_CLASS in names or not known:
        return DEFAULT_CLASS
    return min(known, key=lambda one: one.priority).name


def _ttft_s(attempt: Attempt) -> float | None:
    """Return the TTFT from its admission, None if it is unknown or was not predicted."""
    if attempt.first_token_s is None or attempt.admitted_s is None or attempt.is_registered_running:
        return None
    return attempt.first_token_s - attempt.admitted_s


def _prompt_blocks(ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return hashes of the prompt's blocks of 128 tokens, from those of the trace's larger blocks."""
    if not ids:
        return ()
    blocks_per_id = max(1, round(tokens / len(ids) / KV_BLOCK_TOKENS))
    block_names = ((name * blocks_per_id + part) % _HASH_SPACE for name in ids for part in range(blocks_per_id))
    return tuple(islice(block_names, tokens // KV_BLOCK_TOKENS))
