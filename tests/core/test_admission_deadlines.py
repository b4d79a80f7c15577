"""A client's own deadline at the gate: refused at once, queued no longer than it, or without any effect."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.slo import Slo
from tests.core.admission_fixtures import ONE_CLASS, SERVE, fill, gate, make_request, outcomes

TPOT_ONLY = Slo(0.95, None, 0.0, 0.05)


def idle_response_s(controller: AdmissionController) -> float:
    """How long a short response takes on an idle engine, by the gate's own cost model: one in ten is shorter."""
    tokens = SERVE.workload.quantile(SERVE.workload.output_tokens, [0.11])[0]
    return float(
        controller.pool.estimate_cost(make_request("probe")).idle_ttft_s
        + (tokens - 1) * controller.pool.cost_model.base_s
    )


@pytest.mark.parametrize("field", ["deadline_s", "complete_by_s"])
def test_deadline_too_short_for_idle_engine_is_no_demand(field: str) -> None:
    controller = gate()
    decision = controller.submit(make_request("a", **{field: 0.001}), 0.0)
    assert decision.outcome is AdmissionOutcome.SHED_DEADLINE
    assert not decision.is_demand
    assert decision.retry is not None
    assert not decision.retry.retryable
    assert controller.offered_work_s == 0.0
    assert len(controller.pool) == controller.queued == 0


def test_whole_response_deadline_counts_expected_output() -> None:
    controller = gate()
    enough_s = idle_response_s(controller)
    assert (
        controller.submit(make_request("late", complete_by_s=0.95 * enough_s), 0.0).outcome
        is AdmissionOutcome.SHED_DEADLINE
    )
    assert (
        controller.submit(make_request("timely", complete_by_s=1.05 * enough_s), 0.0).outcome
        is AdmissionOutcome.ADMITTED
    )
    short = make_request("short", complete_by_s=0.5 * enough_s, max_tokens=10)
    assert controller.submit(short, 0.0).outcome is AdmissionOutcome.ADMITTED
    mean_only = AdmissionController(ONE_CLASS, replace(controller.pool.cost_model, output_quantiles=()), {})
    mean_only.set_replicas({"0": 10}, 0.0)
    assert mean_only.submit(make_request("a", complete_by_s=enough_s), 0.0).outcome is AdmissionOutcome.SHED_DEADLINE


def test_deadline_that_only_load_misses_is_saturated() -> None:
    controller = gate()
    _, now = fill(controller)
    decision = controller.submit(make_request("a", now, complete_by_s=now + 1.2 * idle_response_s(controller)), now)
    assert decision.outcome is AdmissionOutcome.SHED_SATURATED
    assert decision.is_demand
    assert decision.retry is not None


def test_queued_request_leaves_before_its_deadline_as_504() -> None:
    controller = gate()
    _, now = fill(controller)
    deadline_s = now + 0.3  # the SLO allows 0.5 s
    assert controller.submit(make_request("a", now, deadline_s=deadline_s), now).outcome is AdmissionOutcome.QUEUED
    assert controller.wake_at_s < deadline_s
    assert outcomes(controller.release(controller.wake_at_s)) == [AdmissionOutcome.SHED_DEADLINE]
    assert controller.queued == 0


def test_deadline_beyond_the_slo_changes_no_decision() -> None:
    plain, bounded = gate(), gate()
    for number in range(400):
        now = number * 0.02
        of_plain = plain.submit(make_request(f"r{number}", now), now)
        of_bounded = bounded.submit(
            make_request(f"r{number}", now, deadline_s=now + 600.0, complete_by_s=now + 600.0), now
        )
        assert of_bounded == of_plain
        assert bounded.release(now) == plain.release(now)
    assert bounded.queued == plain.queued


def test_long_deadline_does_not_extend_the_queue_time() -> None:
    classes = (ClassPolicy("chat", 0, TPOT_ONLY, max_queue_time_s=30.0),)
    controller = gate(replace(SERVE, slo=TPOT_ONLY), classes)
    _, now = fill(controller)
    assert controller.submit(make_request("a", now, deadline_s=now + 600.0), now).outcome is AdmissionOutcome.QUEUED
    assert controller.wake_at_s <= now + 30.0
    assert outcomes(controller.release(now + 30.0)) == [AdmissionOutcome.SHED_SATURATED]


def test_short_deadline_shortens_the_wait_without_ttft_target() -> None:
    classes = (ClassPolicy("chat", 0, TPOT_ONLY, max_queue_time_s=30.0),)
    controller = gate(replace(SERVE, slo=TPOT_ONLY), classes)
    _, now = fill(controller)
    assert controller.submit(make_request("a", now, deadline_s=now + 5.0), now).outcome is AdmissionOutcome.QUEUED
    assert now + 4.0 < controller.wake_at_s < now + 5.0


@pytest.mark.parametrize(
    ("deadline_s", "outcome"), [(20.0, AdmissionOutcome.SHED_STARTING), (25.0, AdmissionOutcome.QUEUED)]
)
def test_deadline_before_first_engine_is_rejected_at_once(deadline_s: float, outcome: AdmissionOutcome) -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(ready_at_s=22.0, spare_rate=1.0))
    decision = controller.submit(make_request("a", deadline_s=deadline_s), 0.0)
    assert decision.outcome is outcome
    if outcome is AdmissionOutcome.SHED_STARTING:
        assert decision.retry is not None
        assert decision.retry.retry_after_s == pytest.approx(23, abs=2)
    else:
        assert outcomes(controller.release(deadline_s)) == [AdmissionOutcome.SHED_DEADLINE]


def test_impossible_prompt_with_deadline_is_no_capacity() -> None:
    controller = gate()
    decision = controller.submit(make_request("a", prompt_tokens=90_000_000, deadline_s=1.0), 0.0)
    assert decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY


def test_complete_by_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="complete_by_s must be numbers"):
        make_request("a", complete_by_s=math.nan)
