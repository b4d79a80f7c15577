"""Admission control of one service at one gateway: admit, queue or shed each request.

Problem: above the goodput knee each further request lowers goodput. The first target to break is not the TTFT of the
new request but the TPOT of all running requests.

Idea: a replica admits a request only if its first token is predicted in time, the mean step of all running requests
stays within the step budget, and the KV cache holds all of them. Otherwise the request is queued while that can still
come true, and is shed at once with a retry reservation when it cannot. Each call passes in the time. `release` returns
the requests that leave the queue. Call it after a request ends, after replicas change, and at `wake_at_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from plimsoll.core.admission.adapter_retry import advise_adapter_retry
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.cost_model import (
    ClassPolicy,
    EngineCostModel,
    RequestCost,
    client_deadline_s,
    target_ttft_s,
)
from plimsoll.core.admission.fairness import Lane, QueuedRequest, queued_request
from plimsoll.core.admission.placement import Placement, ReplicaPool
from plimsoll.core.admission.queue import AdmissionQueue, late_limits
from plimsoll.core.admission.quota import TenantPolicy, TenantQuotas
from plimsoll.core.admission.replica import MIN_RETRY_S
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.admission.retry_advice import MAX_RETRY_AFTER_S, NO_RETRY, advise_retry
from plimsoll.core.admission.retry_reservations import RetryReservation, RetryReservations
from plimsoll.core.admission.ttft_margin import TtftMargin

_DEFAULT_TENANT: Final = TenantPolicy()
_ABSENCE_S: Final = 10.0  # without a replica, until the next one counts as a start: engines can miss a probe
NO_LIMIT: Final = 1 << 31
RENEWALS_PER_DECISION: Final = 4  # a renewal takes about a quarter of the time of a decision and its reply
_NOT_RETRYABLE: Final = frozenset({AdmissionOutcome.SHED_NO_CAPACITY, AdmissionOutcome.SHED_DEADLINE})


class AdmissionController:
    """Admission control of one service. Times are of one clock; if it goes back, time stands still."""

    def __init__(
        self, classes: tuple[ClassPolicy, ...], cost_model: EngineCostModel, tenants: Mapping[str, TenantPolicy]
    ) -> None:
        """Raises ValueError without classes, for duplicate names, and for a cost model of other classes."""
        self._class_index = {c.name: k for k, c in enumerate(classes)}
        if not classes or len(self._class_index) != len(classes):
            raise ValueError("classes must have at least one entry, each with a unique name")
        if len(cost_model.tpot_s) != len(classes):
            raise ValueError(f"cost_model has {len(cost_model.tpot_s)} classes, not {len(classes)}")
        self._classes = classes
        self._tenants = dict(tenants)
        self._now = -math.inf
        self._queue = AdmissionQueue(classes)
        self.quotas = TenantQuotas()
        self._announcement = CapacityAnnouncement()
        self._margins = [TtftMargin(c.slo.ttft_s) for c in classes]
        self._last_full_s = -math.inf  # last time a request was shed as saturated
        self._retry_at_s = math.inf
        self._served_s = -math.inf  # last time a replica was ready
        self.pool = ReplicaPool(cost_model)
        self.reservations = RetryReservations()
        self.outcomes = dict.fromkeys(AdmissionOutcome, 0)  # number of requests by outcome
        self.offered_work_s = 0.0  # GPU-seconds of first attempts that are demand, admitted or not
        self.retries = 0  # requests recognised as retries

    @property
    def queued(self) -> int:
        """The number of queued requests."""
        return len(self._queue)

    @property
    def queued_work_s(self) -> float:
        """The work of the queued requests, in GPU-seconds."""
        return self._queue.work_s

    @property
    def wake_at_s(self) -> float:
        """The time to call `release` even without an event. Infinity if never."""
        return min(self._queue.next_expiry_s(), self._retry_at_s if self._queue else math.inf)

    def tick(self, now: float, announcement: CapacityAnnouncement, cost_model: EngineCostModel | None = None) -> None:
        """Set the expected capacity and, if it changed, the cost model. Drops expired state. Raises ValueError."""
        now = self._advance(now)
        if cost_model is not None:
            if len(cost_model.tpot_s) != len(self._classes):
                raise ValueError(f"cost_model has {len(cost_model.tpot_s)} classes, not {len(self._classes)}")
            self.pool.set_cost_model(cost_model)
        self.pool.update_drain_rate()
        self.pool.adapters.update(now)
        self._announcement = announcement
        expected_s = announcement.expected_s(now) if not self.pool.replicas else announcement.ready_at_s
        self.reservations.set_capacity_steps(expected_s, announcement.spare_rate, announcement.later_steps)
        self.reservations.expire(now)
        self._queue.compact(now)
        self.quotas.keep_only(self._tenants)

    def set_tenants(self, tenants: Mapping[str, TenantPolicy]) -> None:
        """Set weights and quotas. A tenant without an entry has weight 1 and no quota."""
        self._tenants = dict(tenants)

    def set_replicas(self, caps: Mapping[str, int], now: float, prefills: frozenset[str] = frozenset()) -> None:
        """Set the ready replicas with this gateway's slots on each, and the ready prefill replicas.

        Requests on a removed replica are dropped. Call `release` next.
        """
        now = self._advance(now)
        had_replicas, had_prefills = bool(self.pool.replicas), bool(self.pool.prefill_queues)
        self._served_s = now if had_replicas else self._served_s
        self.pool.set_replicas(caps, now)
        self.pool.set_prefills(set(prefills), now)
        if self.pool.replicas and (not had_replicas or had_prefills != bool(prefills)):  # queued ones cost otherwise
            self._queue.outdate(is_first_engine=not had_replicas)

    def submit(self, request: AdmissionRequest, now: float) -> AdmissionDecision:
        """Returns the decision about a new request. Raises ValueError for an unknown class or a duplicate ID."""
        now = self._advance(now)
        class_index = self._class_index.get(request.request_class)
        if class_index is None:
            raise ValueError(
                f"request_class must be one of {', '.join(self._class_index)}, not {request.request_class!r}"
            )
        if request.id in self._queue or request.id in self.pool:
            raise ValueError(f"id {request.id!r} is already queued or running")
        cost = self.pool.estimate_cost(request)
        reservation = self.reservations.find(request, now)
        tenant = self._tenants.get(request.tenant, _DEFAULT_TENANT)
        is_retry = reservation is not None or request.is_retry
        self.retries += is_retry
        if reservation is None:
            wait_s = self.quotas.take(request.tenant, tenant, cost.kv_mean_tokens, now)
            if wait_s > 0:
                return self._reject_quota(request, wait_s)
        impossible = self._shed_impossible(request, cost, now, now)
        if impossible is not None:
            return impossible
        if not is_retry:
            self.offered_work_s += cost.work_s
        is_due = reservation is not None and self.reservations.is_due(reservation, now)
        lane = Lane.RESERVED if is_due else Lane.ON_TIME
        queued = self._make_queued(request, class_index, cost, lane, tenant.weight, min(request.arrived_s, now))
        if not self.pool.replicas:
            return self._submit_without_replicas(queued, reservation, now)
        return self._admit_or_enqueue(queued, reservation, now)

    def release(self, now: float, limit: int = NO_LIMIT) -> list[AdmissionDecision]:
        """Returns at most `limit` decisions about queued requests that are admitted or shed.

        None is admitted before all outdated ones are renewed, `RENEWALS_PER_DECISION` times `limit` in one call. While
        something is left to do, `wake_at_s` is `now`.
        """
        now = self._advance(now)
        if self.pool.replicas:
            self._queue.renew(self._renew, RENEWALS_PER_DECISION * limit, now)
        is_waking = not self.pool.replicas and now - self._served_s > _ABSENCE_S
        ready_at_s = self._announcement.ready_at_s if is_waking else None
        before_s = now if ready_at_s is None else max(now, math.nextafter(ready_at_s, -math.inf))
        expired = zip(range(limit), self._queue.pop_expired(before_s), strict=False)
        decisions = [self._expire(one, now) for _, one in expired]
        self._retry_at_s = math.inf
        left = 0
        if self.pool.replicas and not self._queue.outdated:  # each unparked request may be parked again
            left = limit - len(decisions) + self._queue.unpark(self.pool.adapters.is_open, now)
        while left > 0 and len(decisions) < limit and (queued := self._queue.peek()) is not None:
            left -= 1
            placement = self._find_placement(queued, now)
            if placement.replica is None and queued.lane is Lane.LATE and not placement.needs_place:
                if (queued := self._queue.peek(include_late=False)) is None:  # a late request does not block others
                    break
                placement = self._find_placement(queued, now)
            if placement.replica is not None:
                self._queue.remove(queued.request.id)
                decisions.append(self._admit(queued, placement, now))
                self._queue.unpark_next(queued.request.adapter, now)
            elif placement.needs_place:
                self._park(queued, now)
            elif placement.first_token_s < math.inf:  # a replica has room, but the first token would be late
                self._queue.remove(queued.request.id)
                decisions.append(self._expire(queued, now))
            else:
                break
        else:  # no request was found that has to wait
            if len(decisions) >= limit or (left <= 0 and self.pool.replicas):
                self._retry_at_s = now
        return decisions

    def reject(self, request: AdmissionRequest, now: float) -> AdmissionDecision:
        """Shed a request that is neither queued nor running, because the gateway's queue or its fallback is full."""
        now = self._advance(now)
        cost = self.pool.estimate_cost(request)
        impossible = self._shed_impossible(request, cost, min(request.arrived_s, now), now)
        if impossible is not None:
            return impossible
        return self._shed(request, cost, self._full_outcome(request), now)

    def register_running(self, request: AdmissionRequest, address: str, now: float) -> bool:
        """Register a request that runs on a replica with its prompt computed. Returns False if that is impossible."""
        now = self._advance(now)
        replica, class_index = self.pool.replicas.get(address), self._class_index.get(request.request_class)
        if replica is None or class_index is None or request.id in self._queue or request.id in self.pool:
            return False
        cost = self.pool.estimate_cost(request)._replace(stall_s=0.0, remote_prefill_s=0.0)
        running_s = max(0.0, now - request.arrived_s)
        self.pool.add(request, class_index, Placement(replica, -running_s, math.inf, cost), now)
        return True

    def record_first_token(self, id: str, now: float, ttft_s: float) -> None:
        """Record the first token of a running request, `ttft_s` after its admission. Each request counts once."""
        now = self._advance(now)
        running = self.pool.record_first_token(id, ttft_s, now)
        if running is None:
            return
        self._margins[running.class_index].observe(ttft_s - running.predicted_ttft_s)
        prefill = running.remote_prefill
        if prefill is not None:
            prefill_end_s = min(running.admitted_s + ttft_s - prefill.remaining_s, now)
            prefill.queue.complete(prefill, prefill_end_s, self.pool.cost_model.remote_step_s)

    def complete(self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None) -> bool:
        """Record the end of a running request. Returns False if it is unknown. Call `release` next.

        `output_tokens` are those of all its sequences. `ttft_s` is the time from admission to its first token. Both are
        None if unknown. Without a TTFT, the rest of its prompt counts as not computed: the engine rejected it, or its
        client disconnected.
        """
        now = self._advance(now)
        if ttft_s is not None:
            self.record_first_token(id, now, ttft_s)
        running = self.pool.remove(id, now, output_tokens, ttft_s)
        if running is None:
            return False
        if output_tokens is not None:
            cost = running.cost
            extra_output = output_tokens / cost.output_tokens - 1.0
            self._queue.accounts.correct(running.tenant, extra_output * max(0.0, cost.work_s - cost.stall_s))
        if not running.has_first_token and running.remote_prefill is not None:
            running.remote_prefill.queue.cancel(running.remote_prefill, now)
        return True

    def cancel(self, id: str, now: float) -> AdmissionDecision | None:
        """Remove a queued request whose client disconnected. Returns None if it is not queued."""
        self._advance(now)
        queued = self._queue.remove(id)
        return None if queued is None else self._count_outcome(AdmissionDecision(id, AdmissionOutcome.CLIENT_GONE))

    def _advance(self, now: float) -> float:
        if now > self._now:  # also false for NaN
            self._now = now
        if self._now == -math.inf:
            raise ValueError(f"now must be a number, not {now}")
        return self._now

    def _make_queued(
        self,
        request: AdmissionRequest,
        class_index: int,
        cost: RequestCost,
        lane: Lane,
        weight: float,
        start_s: float,
    ) -> QueuedRequest:
        """Returns the request with its deadlines. It is late if it misses its target on a replica idle at `start_s`."""
        client_s = math.inf
        if request.deadline_s is not None or request.complete_by_s is not None:
            client_s = client_deadline_s(request, cost, self.pool.cost_model, self.pool.min_step_s)
        max_queue_time_s = self._classes[class_index].max_queue_time_s
        target_s = self._target_ttft_s(request, cost, class_index)
        return queued_request(request, class_index, lane, cost, weight, start_s, max_queue_time_s, target_s, client_s)

    def _renew(self, queued: QueuedRequest, is_unserved: bool) -> QueuedRequest:
        """Returns a queued request with the cost and deadlines that it has with the replicas of now."""
        start_s = self._now if is_unserved or queued.lane is Lane.LATE else queued.request.arrived_s
        cost = self.pool.estimate_cost(queued.request)
        lane = Lane.ON_TIME if queued.lane is Lane.LATE else queued.lane
        return self._make_queued(queued.request, queued.class_index, cost, lane, queued.weight, start_s)

    def _target_ttft_s(self, request: AdmissionRequest, cost: RequestCost, class_index: int) -> float:
        slo, tpot_s = self._classes[class_index].slo, self.pool.cost_model.tpot_s[class_index]
        return target_ttft_s(slo, request, cost, tpot_s)

    def _submit_without_replicas(
        self, queued: QueuedRequest, reservation: RetryReservation | None, now: float
    ) -> AdmissionDecision:
        """Queue the request until its maximum queue time, unless no replica will be ready by then."""
        queue_until_s = min(queued.request.arrived_s, now) + self._classes[queued.class_index].max_queue_time_s
        queue_until_s = min(queue_until_s, queued.client_deadline_s - queued.cost.idle_ttft_s)
        queued.deadline_s = queued.queue_until_s = queue_until_s
        ready_at_s = self._announcement.expected_s(now)
        if not self._announcement.starting:
            return self._shed(queued.request, queued.cost, AdmissionOutcome.SHED_NO_CAPACITY, now)
        if (
            queued.request.has_fallback
            or queue_until_s <= now
            or (ready_at_s is not None and ready_at_s > queue_until_s)
        ):
            return self._shed(queued.request, queued.cost, AdmissionOutcome.SHED_STARTING, now)
        return self._enqueue(queued, reservation, now)

    def _admit_or_enqueue(
        self, queued: QueuedRequest, reservation: RetryReservation | None, now: float
    ) -> AdmissionDecision:
        queue = self._queue
        would_be_late = False
        if not queue.outdated and not queue.must_queue(queued.class_index, queued.lane):
            placement = self._find_placement(queued, now)
            if placement.replica is not None:
                if reservation is not None:
                    self.reservations.redeem(reservation)
                return self._admit(queued, placement, now)
            if placement.needs_place and queued.queue_until_s > now:
                return self._enqueue(queued, reservation, now, needs_place=True)
            would_be_late = placement.first_token_s < math.inf and queued.lane is not Lane.LATE
        work_ahead_s = queue.work_ahead_s(queued.class_index, queued.lane, queued.request.tenant, queued.weight)
        # Average with a mean request's slack: large requests have less slack, but they also go first.
        latest_s = queued.queue_until_s
        if queued.queue_until_s < queued.deadline_s:
            latest_s += (queued.cost.idle_ttft_s - self.pool.cost_model.idle_ttft_s) / 2
        if (
            would_be_late
            or queued.request.has_fallback
            or queued.queue_until_s <= now
            or (not queue.outdated and now + work_ahead_s / max(self.pool.drain_rate, 1e-9) >= latest_s)
        ):
            return self._shed(queued.request, queued.cost, AdmissionOutcome.SHED_SATURATED, now)
        return self._enqueue(queued, reservation, now)

    def _find_placement(self, queued: QueuedRequest, now: float) -> Placement:
        policy = self._classes[queued.class_index]
        max_utilization = policy.max_utilization
        if max_utilization < 1.0 and self._queue.class_below_share(queued.class_index) == queued.class_index:
            max_utilization = 1.0
        within_s = queued.client_deadline_s - now  # the maximum queue time is no target for the first token
        if queued.lane is Lane.LATE:
            target_s = self._target_ttft_s(queued.request, queued.cost, queued.class_index)
            new_share = self._announcement.arrival_rate / max(self.pool.drain_rate, 1e-9)
            wait_s, utilization = late_limits(queued.cost.idle_ttft_s, target_s, new_share)
            within_s, max_utilization = min(within_s, wait_s), min(max_utilization, utilization)
        elif queued.queue_until_s < queued.deadline_s:
            within_s = queued.deadline_s - now - self._safety_margin_s(queued, now)
        placement = self.pool.place(queued.request, queued.cost, queued.class_index, max_utilization, within_s, now)
        retry_at_s = placement.retry_at_s
        if placement.replica is None and placement.first_token_s < math.inf and queued.lane is Lane.LATE:
            retry_at_s = min(retry_at_s, now + max(placement.first_token_s - within_s, MIN_RETRY_S))
        self._retry_at_s = min(self._retry_at_s, retry_at_s)
        return placement

    def _safety_margin_s(self, queued: QueuedRequest, now: float) -> float:
        if not len(self.pool):  # nothing runs, so no later moment is better
            return 0.0
        margin, slo = self._margins[queued.class_index], self._classes[queued.class_index].slo
        has_one_target = self.pool.prefill_queues and not slo.ttft_per_1k_tokens_s
        shorter_s = self.pool.cost_model.idle_ttft_s - queued.cost.idle_ttft_s if has_one_target else 0.0
        return margin.safety_s(shorter_s, now - self._last_full_s)

    def _admit(self, queued: QueuedRequest, placement: Placement, now: float) -> AdmissionDecision:
        request = queued.request
        self.pool.add(request, queued.class_index, placement, now)
        self._queue.charge_admitted(
            request.tenant, queued.weight, queued.class_index, queued.lane, placement.cost.work_s, now
        )
        assert placement.replica is not None
        address = placement.replica.address
        return self._count_outcome(
            AdmissionDecision(
                request.id, AdmissionOutcome.ADMITTED, address, placement.prefill, placement.first_token_s
            )
        )

    def _enqueue(
        self, queued: QueuedRequest, reservation: RetryReservation | None, now: float, needs_place: bool = False
    ) -> AdmissionDecision:
        if reservation is not None:
            self.reservations.redeem(reservation)
        (self._park if needs_place else self._queue.push)(queued, now)
        return self._count_outcome(AdmissionDecision(queued.request.id, AdmissionOutcome.QUEUED))

    def _park(self, queued: QueuedRequest, now: float) -> None:
        """Queue a request whose adapter has no place at any engine."""
        self._queue.park(queued)
        self.pool.adapters.wait(queued.request.adapter, queued.queue_until_s, now)

    def _expire(self, queued: QueuedRequest, now: float) -> AdmissionDecision:
        """Shed a queued request that would be late. All outcomes but ShedDeadline have a `Retry-After`."""
        if queued.client_deadline_s - queued.cost.idle_ttft_s <= now:
            return self._shed(queued.request, queued.cost, AdmissionOutcome.SHED_DEADLINE, now)
        return self._shed(queued.request, queued.cost, self._full_outcome(queued.request), now)

    def _full_outcome(self, request: AdmissionRequest) -> AdmissionOutcome:
        if request.adapter and self.pool.replicas and not self.pool.adapters.is_open(request.adapter):
            return AdmissionOutcome.SHED_ADAPTERS
        return AdmissionOutcome.SHED_SATURATED if self.pool.replicas else AdmissionOutcome.SHED_STARTING

    def _shed_impossible(
        self, request: AdmissionRequest, cost: RequestCost, start_s: float, now: float
    ) -> AdmissionDecision | None:
        """Shed a request that even an idle replica cannot hold, or cannot serve in time from `start_s` on.

        Another model may be able to, so a fallback is tried. Returns None for a request that can be served.
        """
        model = self.pool.cost_model
        if not self.pool.can_ever_fit(cost):
            decision = self._shed(request, cost, AdmissionOutcome.SHED_NO_CAPACITY, now)
        elif start_s + cost.idle_ttft_s < client_deadline_s(request, cost, model, model.base_s):
            return None
        elif request.has_fallback and not request.is_expired(now):
            decision = self._downgrade(request, now)
        else:
            decision = self._shed(request, cost, AdmissionOutcome.SHED_DEADLINE, now)
        return decision._replace(is_demand=False)

    def _shed(
        self, request: AdmissionRequest, cost: RequestCost, outcome: AdmissionOutcome, now: float
    ) -> AdmissionDecision:
        if outcome is AdmissionOutcome.SHED_SATURATED:
            self._last_full_s = now
        if request.has_fallback and outcome is not AdmissionOutcome.SHED_DEADLINE:
            return self._downgrade(request, now)
        if outcome is AdmissionOutcome.SHED_ADAPTERS:
            retry = advise_adapter_retry(self.pool, request.adapter, now)
            return self._count_outcome(AdmissionDecision(request.id, outcome, retry=retry))
        retryable = outcome not in _NOT_RETRYABLE
        retry = self.reservations.reserve(request, cost.work_s, self._queue.work_s, now) if retryable else NO_RETRY
        ready_at_s = self._announcement.expected_s(now) if outcome is AdmissionOutcome.SHED_STARTING else None
        if retry == NO_RETRY and ready_at_s is not None and ready_at_s > now:
            retry = advise_retry(ready_at_s - now, is_time_known=True, sdk_limit_s=0.0)  # none reserved, but a time
        return self._count_outcome(AdmissionDecision(request.id, outcome, retry=retry))

    def _downgrade(self, request: AdmissionRequest, now: float) -> AdmissionDecision:
        reservation = self.reservations.find(request, now)
        if reservation is not None:
            self.reservations.redeem(reservation)
        return self._count_outcome(AdmissionDecision(request.id, AdmissionOutcome.DOWNGRADED))

    def _reject_quota(self, request: AdmissionRequest, wait_s: float) -> AdmissionDecision:
        retry = advise_retry(wait_s, is_time_known=True, sdk_limit_s=MAX_RETRY_AFTER_S)
        return self._count_outcome(
            AdmissionDecision(request.id, AdmissionOutcome.SHED_QUOTA, retry=retry, is_demand=False)
        )

    def _count_outcome(self, decision: AdmissionDecision) -> AdmissionDecision:
        self.outcomes[decision.outcome] += 1
        return decision
