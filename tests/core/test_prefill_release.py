"""What the gate books for a prompt ends with it: a prompt that was overestimated closes no engine after its answer."""

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


def replica_of(door: AdmissionController) -> ReplicaState:
    return door.pool.replicas["d"]


def submit(door: AdmissionController, id: str, now: float, prompt: int = 1000) -> AdmissionOutcome:
    return door.submit(AdmissionRequest(id, "chat", "t", now, prompt, max_tokens=100), now).outcome


def test_overestimated_prompt_is_given_back_at_its_end() -> None:
    door, bare = gate(), gate()
    submit(door, "image", 0.0, OVERESTIMATED)
    assert replica_of(door).prefill_free_s > 3.0
    door.complete("image", 1.0, 100, 0.05)
    submit(bare, "image", 0.0)
    bare.complete("image", 1.0, 100, 0.05)
    for one in (door, bare):
        assert replica_of(one).prefill_free_s <= 1.0
        assert max(replica_of(one).prefill_tat_s, 1.0) == pytest.approx(1.0, abs=0.1)
    outcomes = [[submit(one, f"text{n}", 1.0 + 0.1 * n) for n in range(50)] for one in (door, bare)]
    assert outcomes[0] == outcomes[1] == [AdmissionOutcome.ADMITTED] * 50


def test_first_token_shows_that_prompts_ahead_are_computed() -> None:
    """The image still streams its answer; a text behind it had its first token."""
    door = gate()
    submit(door, "image", 0.0, OVERESTIMATED)
    replica = replica_of(door)
    door.pool.add(
        AdmissionRequest("text", "chat", "t", 0.0, 1000, max_tokens=100),
        0,
        door.pool.place(
            request := AdmissionRequest("text", "chat", "t", 0.0, 1000, max_tokens=100),
            door.pool.estimate_cost(request), 0, 1.0, 1e9, 100.0,
        )._replace(replica=replica),
        0.0,
    )  # fmt: skip
    assert replica.prefill_free_s > 3.0
    door.complete("text", 0.5, 100, 0.1)
    assert replica.prefill_free_s == pytest.approx(0.5)
    assert replica.running["image"].prefilled_at_s == pytest.approx(0.5)
    free_s, total_s = replica.prefill_free_s, replica.stall_total_s
    door.complete("image", 2.0, 100, 0.1)
    assert replica.prefill_free_s == free_s
    assert 0.0 <= replica.stall_total_s <= total_s


def test_released_prompt_distorts_no_step_time() -> None:
    """The step-time ratio of a request that ran meanwhile is that beside a prompt of the true length."""
    doors = gate(), gate()
    for door, prompt in zip(doors, (OVERESTIMATED, 1000), strict=True):
        submit(door, "chat", 0.0)
        submit(door, "image", 0.1, prompt) if prompt == 1000 else door.pool.add(
            request := AdmissionRequest("image", "chat", "t", 0.1, prompt, max_tokens=100),
            0,
            door.pool.place(request, door.pool.estimate_cost(request), 0, 1.0, 1e9, 100.0)._replace(
                replica=replica_of(door), first_token_s=0.1
            ),
            0.1,
        )
        door.complete("image", 1.0, 100, 0.05)
        door.complete("chat", 3.0, 100, 0.05)
    first, second = (replica_of(door).step_time_ratio for door in doors)
    assert first == pytest.approx(second, abs=0.02)


def test_accurate_prompts_release_nothing() -> None:
    door = gate()
    for n in range(10):
        submit(door, f"{n}", 0.0)
    replica = replica_of(door)
    booked = replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s
    door.complete("0", 2.0, 100, 0.1)
    assert (replica.prefill_free_s, replica.prefill_tat_s, replica.stall_total_s) == booked
