"""Admission under what should not happen: broken numbers, hostile clients, replicas that vanish."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionOutcome
from tests.core.admission_invariants import CLASSES, NUMBERS, SLO, TIER, check, full, gate, make_request

HUGE = 10**18


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_tokens": -1},
        {"prompt_tokens": math.nan},
        {"prompt_tokens": HUGE},
        {"cached_tokens": 1001},
        {"cached_tokens": -1},
        {"cached_tokens": math.nan},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": math.nan},
        {"sequences": 0},
        {"sequences": HUGE},
        {"sequences": math.nan},
        {"arrived_s": math.nan},
        {"deadline_s": math.nan},
    ],
)
def test_request_invalid_field_raises_error_naming_field(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(broken))):
        make_request("a", **broken)


@pytest.mark.parametrize(
    "extreme",
    [
        {"prompt_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": HUGE},
        {"cached_tokens": 1000},
        {"deadline_s": math.inf},
        {"deadline_s": -math.inf},
        {"arrived_s": -math.inf},
        {"arrived_s": math.inf},
        {"prompt_tokens": 100_000_000},
        {"sequences": 1_000_000},
        {"idempotency_key": ""},
        {"tenant": ""},
    ],
)
def test_submit_extreme_request_returns_outcome(extreme: dict[str, object]) -> None:
    controller = gate()
    decision = controller.submit(make_request("a", **extreme), 0.0)
    check(controller)
    assert decision.outcome in AdmissionOutcome
    controller.complete("a", 1.0, HUGE, math.nan)
    check(controller)


def test_submit_request_larger_than_kv_is_shed_without_retry() -> None:
    controller = gate()
    decision = controller.submit(make_request("a", prompt_tokens=300_000), 0.0)
    assert decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY
    assert decision.retry is not None
    assert not decision.retry.retryable
    assert (
        controller.submit(make_request("b", prompt_tokens=300_000, has_fallback=True), 0.0).outcome
        is AdmissionOutcome.DOWNGRADED
    )
    assert controller.submit(make_request("c", prompt_tokens=190_000), 0.0).outcome is AdmissionOutcome.ADMITTED
    assert (
        controller.submit(make_request("d", prompt_tokens=190_000), 0.0).outcome is AdmissionOutcome.QUEUED
    )  # it fits, but not beside the other
    assert (
        controller.submit(make_request("e", 40.0), 40.0).outcome is AdmissionOutcome.ADMITTED
    )  # the long prompt has been computed


def test_submit_with_fallback_downgrades_instead_of_queueing() -> None:
    """Held until the last moment, a request would come to the fallback too late for its target."""
    controller = gate()
    for n in range(10_000):
        decision = controller.submit(make_request(f"n{n}", 0.0, has_fallback=True), 0.0)
        if decision.outcome is not AdmissionOutcome.ADMITTED:
            break
    assert decision.outcome is AdmissionOutcome.DOWNGRADED
    assert controller.queued == 0
    controller.set_replicas({}, 1.0)
    assert (
        controller.submit(make_request("from zero", 1.0, has_fallback=True), 1.0).outcome is AdmissionOutcome.DOWNGRADED
    )


def test_submit_sequences_above_batch_need_empty_replica() -> None:
    controller = gate()
    assert (
        controller.submit(make_request("a", sequences=NUMBERS.batch + 10, prompt_tokens=10), 0.0).outcome
        is AdmissionOutcome.ADMITTED
    )
    assert (
        controller.submit(make_request("b", sequences=1100, prompt_tokens=10), 0.0).outcome is AdmissionOutcome.QUEUED
    )
    check(controller)
    controller.complete("a", 0.1)
    assert [decision.outcome for decision in controller.release(0.1)] == [AdmissionOutcome.ADMITTED]
    check(controller)


@pytest.mark.parametrize(("prompt_tokens", "sequences"), [(199_990, 1), (30_000, 17)])
def test_prompts_that_fit_one_by_one_are_admitted(prompt_tokens: int, sequences: int) -> None:
    """Sequences take turns in the cache of 200,000 tokens, and the context ends an answer."""
    controller = gate()
    large = make_request("a", prompt_tokens=prompt_tokens, sequences=sequences)
    assert controller.submit(large, 0.0).outcome is AdmissionOutcome.ADMITTED
    assert controller.submit(make_request("b"), 0.0).outcome is not AdmissionOutcome.SHED_NO_CAPACITY
    check(controller)
    controller.complete("a", 5.0)
    controller.release(5.0)
    assert controller.submit(make_request("c", 40.0), 40.0).outcome is AdmissionOutcome.ADMITTED
    check(controller)


def test_submit_past_deadline_is_shed() -> None:
    controller = gate()
    for fallback in (False, True):
        decision = controller.submit(make_request(f"a{fallback}", 5.0, deadline_s=4.0, has_fallback=fallback), 5.0)
        assert decision.outcome is AdmissionOutcome.SHED_DEADLINE
    assert controller.submit(make_request("late", 5.0), 50.0).outcome is AdmissionOutcome.SHED_SATURATED
    assert len(controller.pool) == 0


def test_controller_clock_going_backwards_keeps_invariants() -> None:
    controller = gate()
    now = full(controller)
    controller.submit(make_request("h", now), now)
    for back in (now - 100.0, -math.inf, math.nan):
        assert controller.release(back) == []
        controller.tick(back, CapacityAnnouncement(30.0, 1.0))
        check(controller)
    controller.complete("f0", now - 50.0)
    assert [d.outcome for d in controller.release(now - 50.0)] == [AdmissionOutcome.ADMITTED]
    assert controller.submit(make_request("i", now - 50.0), now - 50.0).outcome in AdmissionOutcome
    controller.tick(1e12, CapacityAnnouncement(30.0, 1.0))
    check(controller)
    with pytest.raises(ValueError, match="now"):
        AdmissionController(CLASSES, NUMBERS, {}).submit(make_request("a"), math.nan)


def test_submit_duplicate_id_raises_and_changes_nothing() -> None:
    controller = gate()
    controller.submit(make_request("a"), 0.0)
    with pytest.raises(ValueError, match="'a'"):
        controller.submit(make_request("a"), 0.0)
    now = full(controller, 1.0)
    assert controller.submit(make_request("h", now), now).outcome is AdmissionOutcome.QUEUED
    with pytest.raises(ValueError, match="'h'"):
        controller.submit(make_request("h", now), now)
    assert controller.queued == 1
    assert controller.complete("a", now)
    assert not controller.complete("a", now)
    assert not controller.complete("never seen", now)
    check(controller)


def test_controller_unknown_class_or_bad_limits_raises() -> None:
    with pytest.raises(ValueError, match="request_class"):
        gate().submit(make_request("a", request_class="none"), 0.0)
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        AdmissionController(CLASSES[:1], NUMBERS, {})
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        gate().tick(1.0, CapacityAnnouncement(), engine_cost_model(TIER, CLASSES[:1]))
    with pytest.raises(ValueError, match="classes"):
        AdmissionController((), NUMBERS, {})
    with pytest.raises(ValueError, match="classes"):
        AdmissionController((CLASSES[0], CLASSES[0]), NUMBERS, {})
    for broken in ({"max_queue_time_s": math.nan}, {"guaranteed_share": 2.0}, {"max_utilization": 0.0}):
        with pytest.raises(ValueError, match=next(iter(broken))):
            ClassPolicy("a", 0, SLO, **broken)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            TenantPolicy(weight=weight)


def test_replica_loss_keeps_queue_until_replicas_return() -> None:
    controller = gate(2)
    now = full(controller)
    for k in range(5):
        assert controller.submit(make_request(f"h{k}", now), now).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({}, now)
    assert (len(controller.pool), controller.queued, controller.release(now)) == (0, 5, [])
    assert not controller.complete("f0", now)
    controller.set_replicas({"new": NUMBERS.batch}, now + 0.1)
    assert {d.outcome for d in controller.release(now + 0.1)} == {AdmissionOutcome.ADMITTED}
    controller.set_replicas({}, now + 0.2)
    assert controller.submit(make_request("z", now + 0.2), now + 0.2).outcome is AdmissionOutcome.QUEUED
    assert [d.outcome for d in controller.release(now + 100)] == [AdmissionOutcome.SHED_STARTING]
    check(controller)


def test_replica_with_zero_share_admits_nothing() -> None:
    controller = gate(0)
    controller.set_replicas({"a": 0, "b": -3}, 0.0)
    assert controller.submit(make_request("a"), 0.0).outcome is not AdmissionOutcome.ADMITTED
    controller.set_replicas({"a": 0, "b": 5}, 0.0)
    check(controller)


@pytest.mark.parametrize(
    "announcement",
    [
        CapacityAnnouncement(math.nan, math.nan),
        CapacityAnnouncement(math.inf, math.inf),
        CapacityAnnouncement(-math.inf, -1.0),
        CapacityAnnouncement(-5.0, 0.0),
        CapacityAnnouncement(1e300, 1e-300),
        CapacityAnnouncement(None, math.inf),
    ],
)
def test_invalid_capacity_announcement_gives_valid_retry_advice(announcement: CapacityAnnouncement) -> None:
    controller = gate(1, announcement)
    now = full(controller)
    for k in range(200):
        advice = controller.submit(make_request(f"h{k}", now, body_hash=k), now).retry
        if advice is not None:
            assert advice.retry_after_s is None or (advice.retryable and 1 <= advice.retry_after_s <= 60)
            assert advice.eta_s is None or 0 <= advice.eta_s < math.inf
    check(controller)
