"""Places of LoRA adapters: at most so many adapters at one engine, and turns where there are more."""

from __future__ import annotations

import math
from random import Random

import pytest

from plimsoll.core.admission.adapter_slots import CLAIM_GRACE_S, FIRST_LOAD_S, TURN_S, AdapterSlots
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from tests.core.admission_fixtures import fill, gate, make_request, outcomes

ADMITTED, QUEUED, SHED = AdmissionOutcome.ADMITTED, AdmissionOutcome.QUEUED, AdmissionOutcome.SHED_ADAPTERS


def lora_gate(
    replicas: int = 1, max_adapters: int = 4, missing: dict[str, set[str]] | None = None, load_s: float = 0.0
) -> AdmissionController:
    made = gate(replicas=replicas)
    made.pool.adapters.load_s = load_s
    made.pool.adapters.configure(max_adapters, missing or {})
    return made


def send(controller: AdmissionController, adapters: str, now: float = 0.0, prefix: str = "") -> list[AdmissionDecision]:
    """Submits one request of each adapter, whose ID is its name."""
    requests = [make_request(f"{prefix}{name}", now, adapter=name) for name in adapters]
    return [controller.submit(one, now) for one in requests]


def test_submit_further_adapter_waits_until_one_has_none() -> None:
    controller = lora_gate()
    assert outcomes(send(controller, "abcde")) == [ADMITTED] * 4 + [QUEUED]
    assert outcomes(send(controller, "ab", 0.1, "again-")) == [ADMITTED] * 2
    assert controller.submit(make_request("model", 0.1), 0.1).outcome is ADMITTED
    controller.complete("a", 0.2, 10, 0.1)
    assert controller.release(0.2) == []
    controller.complete("c", 0.3, 10, 0.1)
    assert [(one.request_id, one.outcome) for one in controller.release(0.3)] == [("e", ADMITTED)]


def test_submit_more_adapters_than_places_spread_over_replicas() -> None:
    controller = lora_gate(replicas=2)
    first, again = send(controller, "abcdefgh"), send(controller, "abcdefgh", 0.1, "again-")
    assert outcomes([*first, *again]) == [ADMITTED] * 16
    assert [one.address for one in first] == [one.address for one in again]
    assert controller.pool.adapters.most_active == 4
    assert outcomes(send(controller, "i", 0.2)) == [QUEUED]


def test_submit_few_adapters_use_all_replicas() -> None:
    controller = lora_gate(replicas=2)
    decisions = [one for n in range(20) for one in send(controller, "a", 0.1 * n, f"{n}-")]
    assert {one.address for one in decisions} == {"0", "1"}


def test_release_waiting_adapter_does_not_delay_others() -> None:
    controller = lora_gate()
    send(controller, "abcd")
    _, now = fill(controller, 0.1, step_s=0.02)
    requests = [make_request(name, now, adapter=adapter) for name, adapter in (("m", ""), ("e", "e"), ("n", ""))]
    assert outcomes([controller.submit(one, now) for one in requests]) == [QUEUED] * 3
    for n in range(60):
        controller.complete(f"fill{n}", now + 0.1, 10, 0.1)
    assert {one.request_id for one in controller.release(now + 0.1)} == {"m", "n"}
    assert controller.queued == 1


def test_release_sheds_waiting_adapter_with_retry_after() -> None:
    controller = lora_gate()
    send(controller, "abcde")
    assert controller.queued == 1
    assert 0.3 < controller.wake_at_s < 0.5  # the TTFT target less the prompt's own time
    [decision] = controller.release(controller.wake_at_s)
    assert (decision.request_id, decision.outcome, decision.is_demand) == ("e", SHED, True)
    assert decision.retry is not None
    assert decision.retry.retry_after_s is not None
    assert TURN_S < decision.retry.retry_after_s < TURN_S + 20  # the turn of the first, and its longest response
    assert controller.queued == 0


def test_cancel_of_waiting_adapter_leaves_nothing() -> None:
    controller = lora_gate()
    send(controller, "abcde")
    decision = controller.cancel("e", 0.1)
    assert decision is not None
    assert decision.outcome is AdmissionOutcome.CLIENT_GONE
    assert (controller.queued, controller.queued_work_s, controller.wake_at_s) == (0, 0.0, math.inf)
    controller.complete("a", 0.2)
    assert controller.release(0.2) == []


def test_hot_adapters_yield_a_place_after_their_turn() -> None:
    controller, now = lora_gate(), 0.0
    for n in range(1000):  # each of the four always has requests
        now = 0.1 * n
        controller.tick(now, controller._announcement)
        send(controller, "abcd", now, f"{n}-")
        for name in "abcd":
            controller.complete(f"{n - 15}-{name}", now, 100, 0.1)
        [decision] = send(controller, "e", now, f"{n}-")
        if decision.outcome is ADMITTED or any(
            one.request_id.endswith("-e") and one.outcome is ADMITTED for one in controller.release(now)
        ):
            break
    assert TURN_S < now < TURN_S + 5.0


def test_claim_closes_one_holder_and_keeps_the_place() -> None:
    slots = AdapterSlots()
    slots.configure(2, {})
    slots.set_engines({"0"})
    for name in "ab":
        slots.add("0", name, 0.0)
    slots.wait("c", 1.0, 0.5)
    assert slots.is_open("a")  # its turn is not over
    slots.wait("c", TURN_S + 9.0, TURN_S)
    assert (slots.claim_of("c"), slots.is_open("a"), slots.is_open("b")) == (("0", "a"), False, True)
    slots.remove("0", "a")
    assert [slots.is_open(name) for name in "abcd"] == [False, True, True, False]
    slots.add("0", "c", TURN_S + 5.0)
    assert [slots.is_open(name) for name in "abcd"] == [False, True, True, False]
    assert (slots.claim_of("c"), slots.waiting) == (None, 0)


def test_first_claim_has_the_first_place_that_becomes_free() -> None:
    slots = AdapterSlots()
    slots.configure(2, {})
    slots.set_engines({"e"})
    slots.add("e", "a", 0.0)
    slots.add("e", "b", 0.1)
    for adapter in "cd":
        slots.wait(adapter, 60.0, TURN_S + 0.2)
    assert [slots.claim_of(adapter) is not None for adapter in "cd"] == [True, True]
    slots.remove("e", "b")  # the second claim's holder
    assert [slots.is_open(adapter) for adapter in "cda"] == [True, False, False]
    slots.add("e", "c", TURN_S + 1.0)
    assert not slots.is_open("d")
    slots.remove("e", "a")
    assert slots.is_open("d")


def test_claim_takes_the_second_place_of_an_adapter_first() -> None:
    slots = AdapterSlots()
    slots.configure(2, {})
    slots.set_engines({"0", "1"})
    for address, name, at_s in (("0", "a", 0.0), ("0", "b", 1.0), ("1", "b", 2.0), ("1", "c", 3.0)):
        slots.add(address, name, at_s)
    slots.wait("d", 99.0, 50.0)
    assert slots.claim_of("d") == ("0", "b")


def test_claim_ends_if_the_waiting_adapter_does_not_return() -> None:
    slots = AdapterSlots()
    slots.configure(1, {})
    slots.set_engines({"0"})
    slots.add("0", "a", 0.0)
    slots.wait("b", 31.0, 30.0)
    assert not slots.is_open("a")
    slots.update(31.0 + CLAIM_GRACE_S)
    assert (slots.is_open("a"), slots.waiting, slots.claim_of("b")) == (True, 0, None)


def test_engine_with_too_many_adapters_is_closed_to_all() -> None:
    controller = lora_gate(max_adapters=2)
    for name in "abc":  # sent without admission, as before the first limits
        assert controller.register_running(make_request(name, adapter=name), "0", 0.0)
    assert outcomes(send(controller, "abcd", 0.1, "again-")) == [QUEUED] * 4
    assert controller.submit(make_request("model", 0.1), 0.1).outcome is ADMITTED
    controller.complete("b", 0.2)
    assert {one.request_id for one in controller.release(0.2)} == {"again-a", "again-c"}


def test_adapter_with_a_place_claims_no_other() -> None:
    slots = AdapterSlots()
    slots.configure(1, {})
    slots.set_engines({"0", "1"})
    slots.add("0", "a", 0.0)
    slots.add("1", "b", 0.0)
    slots.wait("a", 99.0, 50.0)
    assert (slots.waiting, slots.claim_of("a")) == (0, None)


def test_first_token_includes_the_load_of_a_missing_adapter() -> None:
    controller = lora_gate(load_s=FIRST_LOAD_S)
    model = controller.submit(make_request("model"), 0.0)
    controller.complete("model", 1.0, 10, 0.1)
    [load] = send(controller, "a", 10.0)
    controller.complete("a", 11.0)
    [held] = send(controller, "a", 20.0, "again-")
    assert load.first_token_s - held.first_token_s == pytest.approx(FIRST_LOAD_S, abs=0.01)
    assert held.first_token_s == pytest.approx(model.first_token_s, abs=0.02)


def test_load_time_is_learned_from_first_tokens() -> None:
    controller, now = lora_gate(max_adapters=1), 0.0
    residual_s = controller.pool.replicas["0"].ttft_residual_s
    for n in range(60):
        now = 10.0 * n
        [decision] = send(controller, "ab"[n % 2], now, f"{n}-")
        base_s = decision.first_token_s - controller.pool.adapters.load_s
        controller.complete(decision.request_id, now + 5.0, 100, base_s + 0.3)
    assert controller.pool.adapters.load_s == pytest.approx(0.3, abs=0.01)
    assert controller.pool.replicas["0"].ttft_residual_s == residual_s  # the load is not taken for slow prefill


def test_load_beyond_the_target_is_late_and_still_served() -> None:
    controller = lora_gate(load_s=5.0)
    assert outcomes(send(controller, "a")) == [ADMITTED]


def test_place_avoids_engines_that_have_not_loaded_the_file() -> None:
    controller = lora_gate(replicas=2, missing={"a": {"0"}})
    decisions = [one for n in range(6) for one in send(controller, "a", 0.1 * n, f"{n}-")]
    assert {one.address for one in decisions} == {"1"}
    nowhere = lora_gate(replicas=2, missing={"a": {"0", "1"}})
    assert outcomes(send(nowhere, "a")) == [ADMITTED]  # the engine answers that it is loading


def test_removed_replica_frees_its_places() -> None:
    controller = lora_gate(replicas=2, max_adapters=1)
    send(controller, "abc")
    batch = controller.pool.cost_model.batch
    controller.set_replicas({"0": batch, "2": batch}, 0.1)
    assert [one.request_id for one in controller.release(0.1)] == ["c"]


@pytest.mark.parametrize("seed", range(5))
def test_random_requests_never_exceed_the_places(seed: int) -> None:
    random, controller, now = Random(seed), lora_gate(replicas=3, max_adapters=2), 0.0
    running: set[str] = set()
    for n in range(1500):
        now += random.expovariate(20.0)
        adapter = random.choice(["", *"abcdefghij"])
        request = make_request(str(n), now, adapter=adapter, max_tokens=50)
        decisions = [controller.submit(request, now), *controller.release(now)]
        if running and random.random() < 0.5:
            ended = random.choice(sorted(running))
            running.discard(ended)
            controller.complete(ended, now, 50, 0.1)
            decisions += controller.release(now)
        if n % 20 == 0:
            controller.tick(now, controller._announcement)
        running |= {one.request_id for one in decisions if one.outcome is ADMITTED}
        for replica in controller.pool.replicas.values():
            assert len({one.adapter for one in replica.running.values()} - {""}) <= 2
        for engine in controller.pool.adapters._engines.values():
            assert len(engine.places) <= 2
            assert len(engine.claims) <= 2
    assert controller.outcomes[SHED] > 0
    for ended in running:
        controller.complete(ended, now)
    controller.release(now + 99.0)
    controller.tick(now + 999.0, controller._announcement)
    assert (controller.queued, controller.queued_work_s, controller.pool.adapters.waiting) == (0, 0.0, 0)
    assert not controller.pool.adapters._active
