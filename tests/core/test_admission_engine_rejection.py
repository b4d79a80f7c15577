"""Requests that end before their first token: refused by the engine itself, or left by their client."""

from __future__ import annotations

import math
from copy import deepcopy
from random import Random

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.prefill_queue import PrefillQueue, RemotePrefill
from plimsoll.core.admission.request import AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
MIX = from_samples([500.0, 1500.0], [0.0, 0.0], [100.0, 300.0])
SLO = Slo(0.95, 0.5, 0.0, 0.05)
CLASSES = (ClassPolicy("chat", 0, SLO),)
ROOM = EngineLimits(1024, 919_824, 8192)
SERVE = engine_cost_model(TierSpec(Role.SERVE, HOT, MIX, ROOM, SLO), CLASSES)
DISAGGREGATED = engine_cost_model(TierSpec(Role.DECODE, HOT, MIX, ROOM, SLO, KvTransfer(32, 128)), CLASSES)
TOO_LONG = 60_000  # more than the model's context, less than the KV


def gate(remote: bool) -> AdmissionController:
    made = AdmissionController(CLASSES, DISAGGREGATED if remote else SERVE, {})
    made.set_replicas({"d": made.pool.cost_model.batch}, 0.0, frozenset("p") if remote else frozenset())
    return made


def outcome_of(controller: AdmissionController, id: str, now: float, prompt: int = 1000) -> AdmissionOutcome:
    return controller.submit(AdmissionRequest(id, "chat", "t", now, prompt, max_tokens=100), now).outcome


@pytest.mark.parametrize("remote", [False, True], ids=["serve", "pair"])
def test_engine_rejected_request_keeps_admission_open(remote: bool) -> None:
    controller = gate(remote)
    for k in range(20):
        now = 2.0 * k
        controller.submit(AdmissionRequest(f"large{k}", "chat", "t", now, TOO_LONG, max_tokens=100), now)
        controller.complete(f"large{k}", now + 0.01)
        assert outcome_of(controller, f"{k}", now + 0.02) is AdmissionOutcome.ADMITTED
        controller.complete(f"{k}", now + 1.0, 100, 0.1)


@pytest.mark.parametrize("remote", [False, True], ids=["serve", "pair"])
def test_engine_rejected_request_only_advances_requests_behind(remote: bool) -> None:
    """A gate that never saw the request that was refused foresees the same from then on."""
    doors = gate(remote), gate(remote)
    for controller in doors:
        assert outcome_of(controller, "before", 0.0) is AdmissionOutcome.ADMITTED
    assert outcome_of(doors[0], "refused", 0.01, 6000) is AdmissionOutcome.ADMITTED
    for controller in doors:
        assert outcome_of(controller, "behind", 0.01) is AdmissionOutcome.ADMITTED
    doors[0].complete("refused", 0.01)
    foreseen = [
        controller.submit(AdmissionRequest("next", "chat", "t", 0.02, 1000, max_tokens=100), 0.02)
        for controller in doors
    ]
    assert foreseen[0].first_token_s == pytest.approx(foreseen[1].first_token_s, abs=1e-4)
    for controller in doors:
        controller.complete("before", 2.0, 100, 0.1)
        controller.complete("behind", 2.5, 100, 0.2)
        controller.complete("next", 3.0, 100, 0.2)
    first, second = (controller.pool.replicas["d"] for controller in doors)
    assert first.step_time_ratio == pytest.approx(second.step_time_ratio, abs=1e-4)
    assert first.stall_total_s == pytest.approx(second.stall_total_s)


def test_client_disconnect_returns_only_unread_prompt_time() -> None:
    """Long after the prompt was read an end without a word changes nothing; half way the half is given back."""
    controller = gate(remote=False)
    outcome_of(controller, "a", 0.0, 6000)
    replica, whole_s = controller.pool.replicas["d"], controller.pool.replicas["d"].prefill_free_s
    half, late = deepcopy(controller), deepcopy(controller)
    late.complete("a", 2.0 * whole_s)
    assert late.pool.replicas["d"].prefill_free_s == replica.prefill_free_s
    half.complete("a", whole_s / 2)
    assert half.pool.replicas["d"].prefill_free_s == pytest.approx(whole_s / 2)
    assert half.pool.replicas["d"].stall_total_s == pytest.approx(replica.stall_total_s / 2)


# ---------------------------------------------------------------- the line at a prefill replica


@pytest.mark.parametrize("seed", range(20))
def test_prefill_queue_with_cancelled_equals_queue_without(seed: int) -> None:
    random = Random(seed)
    line, bare = PrefillQueue("p", 0.0), PrefillQueue("p", 0.0)
    now, pairs = 0.0, list[tuple[RemotePrefill, RemotePrefill]]()
    for _ in range(200):
        now += random.expovariate(5.0)
        work_s = random.expovariate(4.0)
        if random.random() < 0.3:
            gone = line.submit(work_s, 0.1, now)
            if random.random() < 0.5:
                more = random.expovariate(4.0)
                pairs.append((line.submit(more, 0.1, now), bare.submit(more, 0.1, now)))
            line.cancel(gone, now)
        else:
            pairs.append((line.submit(work_s, 0.1, now), bare.submit(work_s, 0.1, now)))
        if random.random() < 0.4 and pairs:
            leg, same = pairs.pop(random.randrange(len(pairs)))
            end_s = now + random.uniform(-0.5, 0.0)
            line.complete(leg, end_s, 0.05)
            bare.complete(same, end_s, 0.05)
        assert max(line.free_s, now) == pytest.approx(max(bare.free_s, now))


def test_prefill_queue_cancel_twice_keeps_work_done() -> None:
    line = PrefillQueue("p", 0.0)
    first, second = line.submit(1.0, 0.0, 0.0), line.submit(1.0, 0.0, 0.0)
    line.cancel(first, 0.25)
    line.cancel(first, 0.25)
    assert line.free_s == pytest.approx(1.25)
    line.cancel(second, 5.0)
    assert line.free_s == pytest.approx(1.25), "it was over"
    later = line.submit(1.0, 0.0, 10.0)
    line.complete(later, 11.5, 0.05)
    line.cancel(later, 11.5)
    assert line.free_s == pytest.approx(11.5, abs=0.06)
    assert math.isfinite(line.free_s)


def test_prefill_queue_without_completions_stays_bounded() -> None:
    """An outage: each leg is withdrawn half way, or its client leaves after its first token."""
    line = PrefillQueue("p", 0.0)
    for k in range(1000):
        leg = line.submit(0.05, 0.0, 0.1 * k)
        line.cancel(leg, 0.1 * k + (0.02 if k % 2 else 0.09))
        assert len(line._pending) <= 2
    assert line.free_s == pytest.approx(0.1 * 999 + 0.02)
