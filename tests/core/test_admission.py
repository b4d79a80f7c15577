"""Which requests the controller admits, queues and rejects: each bound of an engine, and the order of the queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.admission_fixtures import (
    CHAT,
    GUIDE,
    HOT,
    ONE_CLASS,
    ROOMY,
    SERVE,
    SLO,
    fill,
    gate,
    make_request,
    outcomes,
)


def test_admission_binds_on_step_time_ttft_kv_and_sequences() -> None:
    batch, _ = fill(gate())
    assert 170 <= batch <= 230  # step time
    assert fill(gate(replace(SERVE, slo=Slo(0.95, 0.5)), (ClassPolicy("chat", 0, Slo(0.95, 0.5)),)))[0] > 500
    assert fill(gate(), step_s=0.0)[0] < 25  # first tokens of half a second
    small = replace(SERVE, limits=EngineLimits(1024, 40_000, 8192))
    assert 20 <= fill(gate(small))[0] <= 33  # KV
    assert fill(gate(replace(SERVE, limits=EngineLimits(16, 919_824, 8192))))[0] == 16


def test_request_cost_caps_output_and_scales_with_sequences() -> None:
    small = replace(SERVE, limits=EngineLimits(1024, 40_000, 8192))
    assert fill(gate(small), max_tokens=1)[0] > fill(gate(small))[0]
    assert fill(gate(), 0.0, 0.5, sequences=10)[0] == pytest.approx(fill(gate())[0] / 10, rel=0.2)


def test_admission_kv_bound_fills_to_sum_quantile() -> None:
    controller = gate(GUIDE, (ClassPolicy("chat", 0, GUIDE.slo),))
    assert fill(controller, step_s=0.3, prompt_tokens=4000)[0] == 66 + 1  # that one at the pace at which they will end


def test_admission_class_without_tpot_keeps_tpot_of_residents() -> None:
    classes = (*ONE_CLASS, ClassPolicy("batch", -1, Slo(0.95, 60.0), max_queue_time_s=600.0))
    controller = gate(classes=classes)
    controller.submit(make_request("one"), 0.0)
    count, _ = fill(controller, request_class="batch")
    assert 150 <= count <= 250


# Holding, order, outcomes.


def test_queued_request_on_free_slot_is_admitted() -> None:
    controller = gate()
    _, now = fill(controller)
    assert controller.submit(make_request("late", now), now).outcome is AdmissionOutcome.QUEUED
    assert controller.release(now) == []
    controller.complete("fill0", now + 0.1)
    assert outcomes(controller.release(now + 0.1)) == [AdmissionOutcome.ADMITTED]


def test_queued_request_past_deadline_is_shed_or_downgraded() -> None:
    controller = gate(announcement=CapacityAnnouncement(None, 0.0))
    _, now = fill(controller)
    while (
        decision := controller.submit(make_request(f"h{controller.queued}", now), now)
    ).outcome is AdmissionOutcome.QUEUED:
        pass
    assert decision.outcome is AdmissionOutcome.SHED_SATURATED
    assert decision.retry is not None
    assert decision.retry.retryable
    assert 5 <= controller.queued <= 20  # half a second of what leaves
    assert controller.submit(make_request("other", now, has_fallback=True), now).outcome is AdmissionOutcome.DOWNGRADED
    assert controller.wake_at_s < now + 0.5
    assert set(outcomes(controller.release(now + 0.5))) == {AdmissionOutcome.SHED_SATURATED}
    assert controller.queued == 0


def test_admission_queue_release_orders_by_least_slack() -> None:
    controller = gate()
    _, now = fill(controller)
    for id, prompt in (("short", 100), ("long", 6000), ("middle", 3000)):
        assert controller.submit(make_request(id, now, prompt_tokens=prompt), now).outcome is AdmissionOutcome.QUEUED
    for k in range(60):
        controller.complete(f"fill{k}", now + 0.01)
    assert [d.request_id for d in controller.release(now + 0.01)][:2] == ["long", "middle"]


def test_infeasible_request_is_admitted_after_feasible_ones() -> None:
    controller = gate()
    assert controller.submit(make_request("alone", prompt_tokens=30_000), 0.0).outcome is AdmissionOutcome.ADMITTED
    controller.complete("alone", 5.0)
    _, now = fill(controller, 5.0)
    assert controller.submit(make_request("huge", now, prompt_tokens=30_000), now).outcome is AdmissionOutcome.QUEUED
    assert controller.submit(make_request("small", now), now).outcome is AdmissionOutcome.QUEUED
    for k in range(60):
        controller.complete(f"fill{k}", now + 0.01)
    assert [d.request_id for d in controller.release(now + 0.01)] == ["small", "huge"]


def test_infeasible_request_in_overload_is_eventually_admitted() -> None:
    controller = gate()
    _, now = fill(controller)
    controller.submit(make_request("huge", now, prompt_tokens=30_000), now)
    ends = [f"fill{k}" for k in range(150)]
    let_in: list[str] = []
    for k in range(600):
        now += 0.05
        controller.submit(make_request(f"n{k}", now), now)
        if k % 2 and ends:
            controller.complete(ends.pop(0), now)
        for decision in controller.release(now):
            if decision.outcome is AdmissionOutcome.ADMITTED:
                let_in.append(decision.request_id)
                ends.append(decision.request_id)
    assert "huge" in let_in


def test_remote_prefill_queues_at_prefill_and_frees_decode() -> None:
    tier = TierSpec(Role.DECODE, HOT, CHAT, ROOMY, SLO, KvTransfer(32, 128))
    pair = gate(tier)
    pair.set_replicas({"d": pair.pool.cost_model.batch}, 0.0, frozenset({"p", "q"}))
    first, second = (pair.submit(make_request(str(k)), 0.0) for k in range(2))
    assert {first.prefill, second.prefill} == {"p", "q"}
    assert pair.submit(make_request("3"), 0.0).first_token_s > first.first_token_s + 0.02
    alone = gate(tier)
    assert fill(pair, 1.0)[0] > 1.5 * fill(alone, 1.0)[0]
    assert alone.submit(make_request("x", 100.0), 100.0).prefill is None
