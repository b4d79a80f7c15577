"""Condition ModelMismatch: what is measured, what was predicted, and what to check."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.mismatch.cases import CASES, MismatchCase
from bench.mismatch.plants import MismatchedPlant
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.autoscale import scaling_conditions
from plimsoll.core.autoscaling import fleet_decisions
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.model_mismatch import limits_mismatches, speed_mismatches
from plimsoll.core.autoscaling.observations import Mismatch, SizingResult
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.engine_model.calibration.posterior_model import initial_posterior
from plimsoll.core.engine_model.measured_limits import NO_MEASURED_LIMITS, MeasuredLimits
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.types import Role
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from tests.controllers.single_service import ABOUT, SingleService

SIZED = SizingResult(2, 2, 24.0, 0.05, 1.0, Constraint.SLOTS, 0.97, 0.6)
ANNOUNCED = EngineLimits(max_sequences=256, kv_tokens=400_000, token_budget=8192)


PLAYED_S = 200.0


def played(case: MismatchCase, seconds: float) -> ServiceState:
    """What the operator knows after so many seconds of a case, with two replicas at first."""
    service, requests = parse(case.manifest()), [one for one in case.requests(0) if one.at_s < seconds]
    plant = MismatchedPlant(gpus={Role.SERVE: 1}, **case.plant_fields())
    config = RunConfig({Role.SERVE: 2}, seconds, gateways=1, tail_s=0.0)
    simulator = Simulator(service, plant, PlimsollPolicy(), config, lambda _: None)
    simulator.run(requests)
    assert simulator.operator is not None
    return simulator.operator.service_state


def message_of(**tiers: SizingResult) -> str | None:
    state = ServiceState.for_roles(list(tiers))
    state.sizings = {**tiers}
    condition = scaling_conditions.model_mismatch(state)
    if condition is None:
        return None
    assert (condition.type, condition.reason) == (ConditionType.MODEL_MISMATCH, ConditionReason.MEASURED_OTHERWISE)
    return condition.message


def test_no_condition_while_nothing_contradicts_the_model() -> None:
    assert message_of(serve=SIZED) is None
    assert limits_mismatches(NO_MEASURED_LIMITS, ANNOUNCED) == limits_mismatches(NO_MEASURED_LIMITS, None) == ()


def test_fewer_slots_and_less_kv_than_announced() -> None:
    limits = MeasuredLimits(32.0, full=8.0, full_at_most=8.0, kv_share=0.5)
    measured = limits_mismatches(limits, ANNOUNCED)
    assert message_of(prefill=SIZED, decode=replace(SIZED, engine_mismatches=measured)) == (
        "decode: an engine runs 32 sequences at once while others wait, announced 256 sequences. Check "
        "--max-num-seqs of the engine; decode: the KV cache of an engine holds 200,000 tokens by its use, announced "
        "400,000 tokens. Check what else uses the memory of its GPUs"
    )


def test_slow_steps_count_from_a_quarter_and_ten_windows_on() -> None:
    prior = StepModel(0.01, 0.0, 1e-5, 0.0, 1e-5, 0.0)

    def found(ratio: float, windows: float) -> tuple[Mismatch, ...]:
        moment = (ratio * windows, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return speed_mismatches(replace(initial_posterior(prior, prior), weight=windows, moment=moment))

    assert speed_mismatches(None) == found(1.24, 20.0) == found(1.4, 9.0) == ()
    [mismatch] = found(1.4, 10.0)
    assert "1.4 times as long" in mismatch.evidence


def test_longer_itl_than_its_target() -> None:
    limit = ItlLimit(0.7, itl_s=0.072, target_s=0.05)
    message = message_of(serve=replace(SIZED, capacity_correction=1.44, itl_limit=limit))
    assert message == (
        "serve: capacity correction 1.44, because p99 itl was 72 ms, target 50 ms (1 predicted). Check "
        "--max-num-batched-tokens and the load of the engine's host"
    )


@pytest.mark.parametrize(
    ("case", "evidence"),
    [
        ("slow", "steps of the engines take 1.[3-5] times as long as predicted before they were measured"),
        ("few-slots", "an engine runs 32 sequences at once while others wait, announced 256 sequences"),
        ("host-quiet", "first tokens take [0-9]+ ms longer than the model predicts"),
        ("none", None),
    ],
    ids=lambda value: value if value in CASES else "",
)
def test_played_mismatch_is_in_explain_and_in_condition(case: str, evidence: str | None) -> None:
    state = played(CASES[case], PLAYED_S)
    condition = scaling_conditions.model_mismatch(state)
    assert state.last_decision is not None
    [tier] = state.last_decision.decision.tiers.values()
    reasons = "; ".join(step.reason for step in tier.steps)
    if evidence is None:
        assert condition is None
    else:
        assert condition is not None
        assert re.search(evidence, condition.message)
        assert re.search(evidence, reasons)


def test_late_first_tokens_and_rejections() -> None:
    message = message_of(serve=replace(SIZED, capacity_correction=1.97, ttft_offset_s=0.107))
    assert message is not None
    assert "capacity correction 1.97, because requests were rejected with all replicas ready (1 predicted)" in message
    assert "first tokens take 107 ms longer than the model predicts" in message
    assert message.endswith("Check CPU and network of the engine's host")


@pytest.mark.parametrize("differing", [{"max_sequences": 7}, {"kv_tokens": 7_000}], ids=["sequences", "KV cache"])
async def test_engines_of_a_rollout_are_not_uniform(monkeypatch: pytest.MonkeyPatch, differing: dict[str, Any]) -> None:
    """Engines of a former revision would otherwise limit the new ones."""
    snapshots: list[ServiceSnapshot] = []
    ingest = fleet_decisions.ingest

    def record(
        state: ServiceState, snapshot: ServiceSnapshot, spec: ScalingSpec, now_s: float
    ) -> fleet_decisions.IngestedService:
        snapshots.append(snapshot)
        return ingest(state, snapshot, spec, now_s)

    monkeypatch.setattr(fleet_decisions, "ingest", record)
    tiers = {"serve": {"minReplicas": 2, "maxReplicas": 2}}
    service = SingleService(1.0, slo={"ttft": "2s", "tpot": "50ms"}, tiers=tiers)
    await service.run(3)
    assert (snapshots[-1].tiers["serve"].ready, snapshots[-1].tiers["serve"].is_uniform) == (2, True)
    service.engine_infos["serve-1"] = replace(ABOUT, **differing)
    await service.run(1)
    assert not snapshots[-1].tiers["serve"].is_uniform
    await service.delete()
