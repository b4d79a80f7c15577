"""What the gate books for a prompt ends with its first token: an overestimated prompt closes no engine after it."""

from __future__ import annotations

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.replica import ReplicaState
from plimsoll.core.admission.request import AdmissionOutcome, AdmissionRequest
from tests.core.test_admission_engine_rejection import CLASSES, SERVE

OVERESTIMATED = 60_000  # tokens; the engine finds 1,000


def gate() -> AdmissionController:
    made = AdmissionController(CLASSES, SERVE, {})
    made.set_replicas({"d": SERVE.batch}, 0.0)
    return made


def replica_of(controller: AdmissionController) -> ReplicaState:
    return controller.pool.replicas["d"]


def submit(controller: AdmissionController, id: str, now: float, prompt: int = 1000) -> AdmissionOutcome:
    return controller.submit(AdmissionRequest(id, "chat", "t", now, prompt, max_tokens=100), now).outcome


def test_overestimated_prompt_is_given_back_at_its_end() -> None:
    controller, bare = gate(), gate()
    submit(controller, "image", 0.0, OVERESTIMATED)
    assert replica_of(controller).prefill_free_s > 3.0
    controller.complete("image", 1.0, 100, 0.05)
    submit(bare, "image", 0.0)
    bare.complete("image", 1.0, 100, 0.05)
    for one in (controller, bare):
        assert replica_of(one).prefill_free_s <= 1.0
        assert max(replica_of(one).prefill_tat_s, 1.0) == pytest.approx(1.0, abs=0.1)
    outcomes = [[submit(one, f"text{n}", 1.0 + 0.1 * n) for n in range(50)] for one in (controller, bare)]
    assert outcomes[0] == outcomes[1] == [AdmissionOutcome.ADMITTED] * 50


def test_first_token_gives_back_the_rest_of_its_prefill() -> None:
    controller = gate()
    submit(controller, "image", 0.0, OVERESTIMATED)
    replica = replica_of(controller)
    booked_s, turn_s = replica.prefill_free_s, replica.prefill_tat_s
    assert booked_s > 3.0
    controller.record_first_token("image", 1.0, 0.05)  # its response still runs
    assert replica.prefill_free_s == pytest.approx(1.0)
    assert replica.prefill_tat_s == pytest.approx(turn_s / booked_s)  # what a second of its prefill took of its share
    assert submit(controller, "text", 1.0) is AdmissionOutcome.ADMITTED


def test_first_token_gives_back_only_its_own_prefill() -> None:
    controller, bare = gate(), gate()
    for one in (controller, bare):
        submit(one, "before", 0.0)
    submit(controller, "image", 0.0, 4000)
    for one in (controller, bare):
        submit(one, "behind", 0.0)
    controller.record_first_token("image", 0.0, 0.0)
    replica, expected = replica_of(controller), replica_of(bare)
    for id in ("before", "behind"):
        assert replica.running[id].prefilled_at_s == pytest.approx(expected.running[id].prefilled_at_s)
        assert replica.running[id].stall_total_s == pytest.approx(expected.running[id].stall_total_s)
    assert replica.prefill_free_s == pytest.approx(expected.prefill_free_s)
    assert replica.stall_total_s == pytest.approx(expected.stall_total_s)


@pytest.mark.parametrize("first_token_s", [0.0, 1.0])
def test_end_after_its_first_token_gives_back_nothing_more(first_token_s: float) -> None:
    controller = gate()
    submit(controller, "image", 0.0, OVERESTIMATED)
    controller.record_first_token("image", first_token_s, first_token_s)
    for n in range(3):
        submit(controller, f"text{n}", first_token_s)
    replica = replica_of(controller)
    booked = replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s
    controller.complete("image", first_token_s, 100, first_token_s)
    assert (replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s) == pytest.approx(booked)


def test_accurate_prompts_release_nothing() -> None:
    controller = gate()
    for n in range(10):
        submit(controller, f"{n}", 0.0)
    replica = replica_of(controller)
    booked = replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s
    controller.complete("0", 2.0, 100, 0.1)
    assert (replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s) == booked
