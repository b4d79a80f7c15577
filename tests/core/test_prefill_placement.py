"""Where a prompt is computed: over a slow fabric in place, as far as everybody's promise allows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.placement import TRANSFER_PROBE_INTERVAL
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
MIX = from_samples([1000.0, 4000.0], [0.0, 0.0], [100.0, 300.0])
SLO = Slo(0.95, 1.0, 0.0, 0.05)
CLASSES = (ClassPolicy("chat", 0, SLO),)
NUMBERS = engine_cost_model(
    TierSpec(Role.DECODE, HOT, MIX, EngineLimits(1024, 919_824, 8192), SLO, KvTransfer(32, 128)), CLASSES
)
NVLINK, BORDER, TCP = 2e-6, 13e-6, 270e-6  # seconds a token: two H200s of one host, 100 Gbit/s, without NVLink


def gate(move_token_s: float | None, prefills: str = "p") -> AdmissionController:
    made = AdmissionController(CLASSES, replace(NUMBERS, kv_transfer_token_s=move_token_s), {})
    made.set_replicas({"d": NUMBERS.batch}, 0.0, frozenset(prefills))
    return made


def submit_request(
    controller: AdmissionController, id: str, now: float, tokens: int = 4000, blocks: tuple[int, ...] = ()
) -> AdmissionDecision:
    return controller.submit(AdmissionRequest(id, "chat", "t", now, tokens, block_hashes=blocks), now)


def run_placement(
    controller: AdmissionController, step_s: float, requests: int = 200, tokens: int = 4000
) -> list[AdmissionDecision]:
    """Requests one after the other, each of which ends after ten seconds, and what became of them."""
    found, ends = [], []
    for k in range(requests):
        now = k * step_s
        while ends and ends[0][0] <= now:
            controller.complete(ends.pop(0)[1], now, 200)
        for one in (*controller.release(now), submit_request(controller, str(k), now, tokens)):
            if one.outcome is not AdmissionOutcome.QUEUED:
                found.append(one)
            if one.outcome is AdmissionOutcome.ADMITTED:
                ends.append((now + 10.0, one.request_id))
    return found


@pytest.mark.parametrize("step_s", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("move_token_s", [None, NVLINK, BORDER])
def test_fast_kv_transfer_always_uses_remote_prefill(step_s: float, move_token_s: float | None) -> None:
    for tokens in (128, 1000, 4000):
        found = run_placement(gate(move_token_s), step_s, tokens=tokens)
        let_in = [one for one in found if one.outcome is AdmissionOutcome.ADMITTED]
        assert let_in
        assert all(one.prefill == "p" for one in let_in)


def test_unmeasured_kv_transfer_costs_nothing() -> None:
    assert run_placement(gate(None), 0.02) == run_placement(gate(0.0), 0.02)
    moving = submit_request(gate(NVLINK), "a", 0.0).first_token_s - submit_request(gate(None), "a", 0.0).first_token_s
    assert moving == pytest.approx(4000 * NVLINK)


def test_slow_kv_transfer_missing_ttft_prefills_locally() -> None:
    controller = gate(TCP)  # 4,000 tokens are more than a second on their way
    found = submit_request(controller, "a", 0.0)
    assert (found.outcome, found.address, found.prefill) == (AdmissionOutcome.ADMITTED, "d", None)
    assert found.first_token_s is not None
    assert found.first_token_s < SLO.ttft_s / 2  # type: ignore[operator]
    assert controller.pool.replicas["d"].prefill_free_s > 0.05  # its own residents wait for it
    assert controller.pool.prefill_queues["p"].free_s == 0.0


def test_slow_kv_transfer_busy_engine_uses_remote_prefill() -> None:
    """A prompt in place keeps everybody waiting who is there; one on its way only itself."""
    alone = submit_request(gate(TCP), "a", 0.0, tokens=1000)
    controller = gate(TCP)
    for k in range(NUMBERS.batch // 3):
        assert submit_request(controller, f"before{k}", 0.3 * k, tokens=200).outcome is AdmissionOutcome.ADMITTED
    among = submit_request(controller, "a", 0.3 * NUMBERS.batch, tokens=1000)
    assert (alone.prefill, among.prefill) == (None, "p")


def test_prompt_cached_on_decode_engine_prefills_locally() -> None:
    controller, blocks = gate(TCP), tuple(range(31))
    assert submit_request(controller, "a", 0.0, blocks=blocks).prefill is None
    controller.complete("a", 5.0, 200)
    again = submit_request(controller, "b", 10.0, blocks=blocks)
    assert again.first_token_s is not None
    assert again.first_token_s < submit_request(gate(TCP), "b", 10.0).first_token_s / 3  # type: ignore[operator]


def test_local_prefill_overload_rejects_and_keeps_tpot() -> None:
    """More prompts than the engine can compute beside its streams: the rest waits and is refused."""
    controller = gate(TCP)
    outcomes: Counter[AdmissionOutcome] = Counter()
    for one in run_placement(controller, 0.02, requests=600):
        outcomes[one.outcome] += 1
        assert one.prefill is None
    assert outcomes[AdmissionOutcome.ADMITTED] > 50
    assert outcomes[AdmissionOutcome.SHED_SATURATED] > 50
    full = controller.pool.replicas["d"]
    assert NUMBERS.step_budget_s[0] / 2 < full.step_s <= NUMBERS.step_budget_s[0]


def test_slow_kv_transfer_probes_remote_prefill_within_slo() -> None:
    found = run_placement(gate(TCP), 5.0, requests=3 * TRANSFER_PROBE_INTERVAL, tokens=1000)
    moved = [k for k, one in enumerate(found) if one.prefill == "p"]
    assert moved == [TRANSFER_PROBE_INTERVAL, 2 * TRANSFER_PROBE_INTERVAL + 1]
    late = run_placement(gate(TCP), 5.0, requests=3 * TRANSFER_PROBE_INTERVAL)
    assert all(one.prefill is None for one in late), "nobody's promise is broken for a measurement"


def test_placement_without_room_queues_then_prefills_locally() -> None:
    controller = gate(TCP)
    waiting = next(k for k in range(100) if submit_request(controller, str(k), 0.0).outcome is AdmissionOutcome.QUEUED)
    assert waiting > 0
    assert 0.0 < controller.wake_at_s < SLO.ttft_s  # type: ignore[operator]
    [freed] = controller.release(controller.wake_at_s)
    assert (freed.outcome, freed.prefill) == (AdmissionOutcome.ADMITTED, None)
