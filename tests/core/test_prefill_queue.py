"""The queue at a prefill replica: what was foreseen, and what the ends of requests tell about it."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from random import Random

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.prefill_queue import PrefillQueue, RemotePrefill
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
MIX = from_samples([2000.0, 4000.0], [0.0, 0.0], [100.0, 300.0])
SLO = Slo(0.95, 2.0, 0.0, 0.05)
CLASSES = (ClassPolicy("chat", 0, SLO),)
NUMBERS = engine_cost_model(
    TierSpec(Role.DECODE, HOT, MIX, EngineLimits(1024, 919_824, 8192), SLO, KvTransfer(32, 128)), CLASSES
)
STEP_S = NUMBERS.remote_step_s


def gate(prefills: str = "p", share: float = 1.0) -> AdmissionController:
    made = AdmissionController(CLASSES, NUMBERS, {})
    made.set_replicas({"d": int(share * NUMBERS.batch)}, 0.0, frozenset(prefills))
    return made


def submit_request(controller: AdmissionController, id: str, now: float) -> AdmissionDecision:
    return controller.submit(AdmissionRequest(id, "chat", "t", now, 4000), now)


def wait_s(controller: AdmissionController, now: float) -> float:
    """How long a request that came now would wait for its prefill to begin."""
    found = submit_request(deepcopy(controller), "probe", now)
    assert found.outcome is AdmissionOutcome.ADMITTED
    return max(0.0, controller.pool.prefill_queues["p"].free_s - now)


def queued(controller: AdmissionController, requests: int = 3) -> list[AdmissionDecision]:
    return [submit_request(controller, str(k), 0.01 * k) for k in range(requests)]


def test_prefill_queue_late_first_token_raises_next_wait() -> None:
    controller = gate()
    first, second = submit_request(controller, "a", 0.0), submit_request(controller, "b", 0.5)
    before = submit_request(deepcopy(controller), "c", 1.0)
    assert wait_s(controller, 1.0) == 0.0
    controller.complete(
        "a", 1.0, 10, first.first_token_s + 0.9
    )  # what was before it took so much longer; "b" is behind it
    assert wait_s(controller, 1.0) == pytest.approx(0.9 - (1.0 - second.first_token_s), abs=0.5)
    after = submit_request(controller, "c", 1.0)
    assert after.first_token_s - before.first_token_s == pytest.approx(wait_s(controller, 1.0) - 0.0, abs=0.3)


def test_prefill_queue_after_idle_forgets_wait() -> None:
    controller = gate()
    first = submit_request(controller, "a", 0.0)
    controller.complete("a", 5.0, 10, first.first_token_s + 1.0)
    assert wait_s(controller, 5.0) == pytest.approx(0.0, abs=0.01)


def test_prefill_queue_early_completion_reduces_wait() -> None:
    controller, other = gate(), gate()
    made = queued(controller, 10), queued(other, 10)
    assert made[0] == made[1]
    last = made[0][-1]
    controller.complete("9", 0.7, 10, last.first_token_s - 0.5)
    assert controller.pool.prefill_queues["p"].free_s == pytest.approx(
        other.pool.prefill_queues["p"].free_s - 0.5, abs=1e-6
    )
    assert wait_s(controller, 0.7) == 0.0
    assert wait_s(other, 0.7) > 0.2


def test_prefill_queue_shared_delay_is_counted_once() -> None:
    """Three who waited in one queue came late by it; the second and the third tell nothing new."""
    once, thrice = gate(), gate()
    made = queued(once, 20), queued(thrice, 20)
    once.complete("2", 2.0, 10, made[0][2].first_token_s + 0.7)
    for k in (0, 1, 2):
        thrice.complete(str(k), 2.0, 10, made[1][k].first_token_s + 0.7)
    assert thrice.pool.prefill_queues["p"].free_s == pytest.approx(once.pool.prefill_queues["p"].free_s, abs=1e-9)
    for k in (1, 0):
        once.complete(str(k), 2.0, 10, made[0][k].first_token_s + 5.0)  # sent before the one that is known
    assert once.pool.prefill_queues["p"].free_s == pytest.approx(thrice.pool.prefill_queues["p"].free_s, abs=1e-9)


def test_prefill_queue_delay_within_one_step_is_ignored() -> None:
    """Prompts that are computed in one step have their first tokens together, at its end."""
    controller, other = gate(), gate()
    made = queued(controller), queued(other)
    controller.complete("0", 1.0, 10, made[0][1].first_token_s + 0.02)
    assert controller.pool.prefill_queues["p"].free_s == other.pool.prefill_queues["p"].free_s


def test_prefill_queue_recreated_replica_starts_empty() -> None:
    controller = gate()
    made = queued(controller)
    controller.set_replicas({"d": NUMBERS.batch}, 1.0, frozenset())
    controller.set_replicas({"d": NUMBERS.batch}, 2.0, frozenset("p"))
    controller.complete("2", 2.0, 10, made[2].first_token_s + 1.5)  # was computed at the one that is gone
    assert wait_s(controller, 2.0) == pytest.approx(0.0, abs=0.01)


def test_prefill_queue_late_replica_diverts_requests() -> None:
    controller = gate("pq")
    first, second = submit_request(controller, "a", 0.0), submit_request(controller, "b", 0.0)
    assert [submit_request(controller, str(k), 0.1).prefill for k in range(6)] == ["p", "q"] * 3
    assert (first.prefill, second.prefill) == ("p", "q")
    assert submit_request(deepcopy(controller), "next", 1.35).prefill == "p"
    controller.complete("a", 1.35, 10, first.first_token_s + 1.2)
    assert submit_request(controller, "next", 1.35).prefill == "q"


def test_prefill_queue_completion_without_ttft_is_ignored() -> None:
    controller, other = gate(), gate()
    queued(controller)
    queued(other)
    controller.complete("1", 0.5)
    assert controller.pool.prefill_queues["p"].free_s == other.pool.prefill_queues["p"].free_s


def test_prefill_queue_burst_at_one_gateway_is_not_scaled_up() -> None:
    alone, half = gate(), gate(share=0.5)
    queued(alone, 2)
    queued(half, 2)
    ahead_s = [controller.pool.prefill_queues["p"].free_s for controller in (alone, half)]
    assert ahead_s[1] == pytest.approx(ahead_s[0], rel=0.02)


@pytest.mark.parametrize(("used", "factor"), [(0.1, 1 / 0.9), (0.4, 1 / 0.6)])
def test_prefill_queue_counts_usual_load_of_other_gateways(used: float, factor: float) -> None:
    """With half of the replicas, a gateway that uses so much of a prefill replica takes it that another does too."""
    ahead_s = []
    for share in (1.0, 0.5):
        controller, now = gate(share=share), 0.0
        leg_s = controller.pool.cost_model.remote_prefill_s(AdmissionRequest("a", "chat", "t", 0.0, 4000), 0)
        for k in range(int(60.0 * used / leg_s)):
            assert submit_request(controller, str(k), now).outcome is AdmissionOutcome.ADMITTED
            controller.complete(str(k), now)
            now += leg_s / used
        assert controller.pool.prefill_queues["p"].free_s <= now
        submit_request(controller, "next", now)
        ahead_s.append(controller.pool.prefill_queues["p"].free_s - now)
    assert ahead_s[1] == pytest.approx(factor * ahead_s[0], rel=0.03)


def test_prefill_queue_other_gateways_limited_to_their_share() -> None:
    controller, seen_s = gate(share=0.5), []
    for k in range(300):
        now, line = 0.01 * k, controller.pool.prefill_queues["p"]
        before_s = max(line.free_s, now)
        if submit_request(controller, str(k), now).outcome is AdmissionOutcome.ADMITTED:
            seen_s.append(line.free_s - before_s)
            controller.complete(str(k), now, 10, 0.0)  # as if nothing had been before it
    assert len(seen_s) > 100
    share = int(0.5 * NUMBERS.batch) / NUMBERS.batch
    assert max(seen_s) <= min(seen_s) / share * 1.001


@pytest.mark.parametrize("seed", range(20))
def test_prefill_queue_matches_lindley_recursion(seed: int) -> None:
    """Against Lindley's recursion from the newest known end, with no allowance for steps."""
    random = Random(seed)
    line, now = PrefillQueue("p", 0.0), 0.0
    sent: list[tuple[float, float, RemotePrefill]] = []
    known, end_s = 0, -math.inf
    for _ in range(300):
        now += random.expovariate(3.0)
        if sent and random.random() < 0.4:
            leg = random.choice(sent[-10:])[2]
            ended_s = now - random.random()
            line.complete(leg, ended_s, 0.0)
            if leg.number > known:
                known, end_s = leg.number, ended_s
        else:
            work_s = random.expovariate(4.0)
            sent.append((now, work_s, line.submit(work_s, 0.1, now)))
        free_s = end_s
        for at_s, work_s, _ in sent[known:]:
            free_s = max(free_s, at_s) + work_s
        assert line.free_s == pytest.approx(max(free_s, 0.0) if not sent else free_s, abs=1e-9)


def test_prefill_queue_long_run_keeps_bounded_state() -> None:
    line = PrefillQueue("p", 0.0)
    for k in range(10_000):
        leg = line.submit(0.9, 0.0, float(k))  # never heard of, but done each time
    assert len(line._busy_starts) == 1
    for k in range(10_000):
        leg = line.submit(1.1, 0.0, 1e4 + k)
        line.complete(leg, line.free_s, STEP_S)
    assert len(line._busy_starts) == 0


@pytest.mark.parametrize("ttft_s", [math.inf, math.nan, 1e300])
def test_prefill_queue_invalid_ttft_keeps_admitting(ttft_s: float) -> None:
    controller = gate()
    queued(controller)
    controller.complete("1", 2.0, 10, ttft_s)
    assert math.isfinite(controller.pool.prefill_queues["p"].free_s)
    assert controller.pool.prefill_queues["p"].free_s < 2.5
    assert submit_request(controller, "next", 3.0).outcome is AdmissionOutcome.ADMITTED


@pytest.mark.parametrize(("tokens", "sequences"), [(127, 1), (4000, 2)])
def test_local_prefill_leaves_prefill_queue_unchanged(tokens: int, sequences: int) -> None:
    """The gateway sends it to no prefill replica: its first token tells nothing of that queue."""
    controller = gate()
    queued(controller, 10)
    free_s = controller.pool.prefill_queues["p"].free_s
    found = controller.submit(AdmissionRequest("small", "chat", "t", 0.1, tokens, sequences=sequences), 0.1)
    assert (found.outcome, found.prefill) == (AdmissionOutcome.ADMITTED, None)
    assert found.first_token_s < free_s
    controller.complete("small", 0.4, 10, found.first_token_s)
    assert controller.pool.prefill_queues["p"].free_s == free_s


def burst(controller: AdmissionController, now: float, requests: int = 60) -> list[AdmissionDecision]:
    return [submit_request(controller, f"{now}-{k}", now + 0.001 * k) for k in range(requests)]


def latest_s(found: list[AdmissionDecision]) -> float:
    """Of the first tokens that those who were let in are told."""
    return max(one.first_token_s for one in found if one.outcome is AdmissionOutcome.ADMITTED)


def test_prefill_queue_first_burst_is_admitted_up_to_ttft() -> None:
    found = burst(gate(), 0.0)
    assert 0.9 * SLO.ttft_s < latest_s(found) <= SLO.ttft_s
    assert found[-1].outcome is AdmissionOutcome.SHED_SATURATED


def test_ttft_margin_after_rejections_is_kept_then_released() -> None:
    """Where others want the place, whoever gets it must be in time for sure."""
    seen_s = []
    for again_s in (4.0, 90.0):
        controller = gate()
        for one in burst(controller, 0.0):
            controller.complete(one.request_id, 3.0)
        seen_s.append(latest_s(burst(controller, again_s)))
    soon_s, later_s = seen_s
    assert later_s > 0.9 * SLO.ttft_s
    assert soon_s < later_s - 0.1 * SLO.ttft_s


def test_saturated_prefill_queue_does_not_favor_short_prompts() -> None:
    """A line that is at its limit has at each moment just room enough for the shortest."""
    controller, random = gate(), Random(1)
    requested, refused, running = [], [], deque[tuple[float, AdmissionDecision]]()
    for k in range(3000):
        now, tokens = 0.03 * k, round(random.lognormvariate(math.log(3000.0), 0.3))  # twice what is read
        while running and running[0][0] <= now:
            ended_s, one = running.popleft()
            controller.complete(one.request_id, ended_s, 10, one.first_token_s)
        found = controller.submit(AdmissionRequest(str(k), "chat", "t", now, tokens, max_tokens=10), now)
        if found.outcome is AdmissionOutcome.ADMITTED:
            running.append((now + found.first_token_s + 0.1, found))
        if k > 300:
            requested.append(tokens)
            refused += [tokens] if found.outcome is AdmissionOutcome.SHED_SATURATED else []
    assert 0.5 < len(refused) / len(requested) < 0.6
    assert sum(refused) / len(refused) < 1.1 * sum(requested) / len(requested)


@pytest.mark.parametrize("remote", [True, False])
def test_cost_model_mean_request_cost_matches_mean_length(remote: bool) -> None:
    role, transfer = (Role.DECODE, KvTransfer(32, 128)) if remote else (Role.SERVE, None)
    mix = from_samples([3000.0], [0.0], [200.0])
    slow = StepModel(4.742e-3, -1.3e-3, 4e-5, 1.035e-9, 1.816e-5, 3.048e-8) if remote else None
    made = engine_cost_model(TierSpec(role, HOT, mix, EngineLimits(1024, 919_824, 8192), SLO, transfer), CLASSES, slow)
    need = made.request_cost(AdmissionRequest("a", "chat", "t", 0.0, 3000), remote=remote)
    assert made.idle_ttft_s == pytest.approx(need.idle_ttft_s, rel=0.02)


def test_request_waiting_for_prefill_takes_no_decode_slot() -> None:
    """Places go by Little's law: to as many as decode at a time, not to all that were let in."""
    cramped = TierSpec(Role.DECODE, HOT, MIX, EngineLimits(8, 919_824, 8192), SLO, KvTransfer(32, 128))
    controller = AdmissionController(CLASSES, engine_cost_model(cramped, CLASSES), {})
    controller.set_replicas({"d": 8}, 0.0, frozenset("p"))
    decisions = [
        controller.submit(AdmissionRequest(str(n), "chat", "t", 0.0, 4000, max_tokens=32), 0.0) for n in range(40)
    ]
    admitted = [d for d in decisions if d.outcome is AdmissionOutcome.ADMITTED]
    replica = controller.pool.replicas["d"]
    assert replica.sequences == len(admitted) > 8, "each is there when its prompt is done, and by then others have gone"
    assert replica.decoding_sequences <= 8
    for decision in admitted:
        controller.complete(decision.request_id, 5.0, 32, decision.first_token_s)
    assert (replica.sequences, replica.decoding_sequences, replica.sequence_tokens) == (0, 0.0, 0.0)
    alone = AdmissionController(CLASSES, engine_cost_model(cramped, CLASSES), {})
    alone.set_replicas({"d": 8}, 0.0)
    outcomes = [
        alone.submit(AdmissionRequest(str(n), "chat", "t", 0.0, 400, max_tokens=32), 0.0).outcome for n in range(40)
    ]
    assert outcomes.count(AdmissionOutcome.ADMITTED) <= 8, "a prompt that is computed in place takes its place at once"


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_queued_request_uses_remote_prefill_once_ready(before: float) -> None:
    """Both tiers start at once, or decode a second sooner: what a request costs is not what it did when it came."""
    controller = AdmissionController(CLASSES, NUMBERS, {})
    assert [submit_request(controller, id, 0.0).outcome for id in "ab"] == [AdmissionOutcome.QUEUED] * 2
    work_s = controller.queued_work_s
    if before:
        controller.set_replicas({"d": 0}, 10.0 - before)  # the operator has not said yet how many it may take
    controller.set_replicas({"d": NUMBERS.batch}, 10.0, frozenset("p"))
    found = controller.release(10.0, 1)
    assert controller.queued_work_s < 0.6 * work_s / 2
    assert [(one.request_id, one.outcome, one.prefill) for one in (*found, *controller.release(10.0))] == [
        ("a", AdmissionOutcome.ADMITTED, "p"),
        ("b", AdmissionOutcome.ADMITTED, "p"),
    ]
    assert controller.queued_work_s == 0.0


def test_queued_request_prefills_locally_after_prefill_loss() -> None:
    controller = AdmissionController(CLASSES, NUMBERS, {})
    controller.set_replicas({"d": 0}, 0.0, frozenset("p"))
    assert submit_request(controller, "a", 0.0).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({"d": NUMBERS.batch}, 0.1)
    (found,) = controller.release(0.1)
    assert (found.outcome, found.prefill) == (AdmissionOutcome.ADMITTED, None)
    assert controller.pool.replicas["d"].stall_total_s > 0.05


def test_request_queued_without_replicas_keeps_its_queue_time() -> None:
    controller = AdmissionController(CLASSES, NUMBERS, {})
    assert submit_request(controller, "a", 0.0).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({}, 1.0, frozenset("p"))
    assert controller.release(20.0) == []
    controller.set_replicas({"d": NUMBERS.batch}, 20.0, frozenset("p"))
    assert [one.outcome for one in controller.release(20.0)] == [AdmissionOutcome.ADMITTED]
