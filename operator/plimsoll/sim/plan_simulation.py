"""Simulates the fleet of a plan, and adds replicas until the simulated fleet meets the SLO.

Problem: the plan's model is a formula, and on some hardware it is too optimistic: it leaves out that prompts slow the
sequences of their step, and that pairs wait for each other. Idea: the plan is tried before it is printed. The simulator
steps each engine, and admits requests as the fleet's gateways will. What it rejects counts as missed. The tier that
misses most gets one more replica, until the share is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.planning.arrangement import Arrangement, with_replicas
from plimsoll.core.planning.fleet_plan import FleetPlan, choose_again
from plimsoll.core.planning.machine_model import Machine
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import format_duration
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import StaticPolicy
from plimsoll.sim.profile import HardwareProfile, StepCoefficients
from plimsoll.sim.result import RunResult
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from plimsoll.sim.startup import StartupDistribution

MAX_STEPS: Final = 4
_MIN_REQUESTS, _MAX_REQUESTS = 3000, 10_000
_MISSES: Final = 100.0  # that the allowed share of misses should amount to, so that it is known to a tenth
_RESPONSE_TIMES: Final = 6.0  # of load, so that most of it is past the first ones
_MAX_REPLICAS: Final = 16  # of a tier; of a larger one a part is simulated, at the same load per replica
_MAX_SECONDS: Final = 20_000.0  # of simulated time where requests are rare
_IDLE_LOAD: Final = 0.1  # of the SLO capacity, to which rare requests are raised at most
_SEED: Final = 1
_FRONTEND_S: Final = 0.003  # of a request on its way to the engine core, as the measured profiles have it


@dataclass(frozen=True)
class PlanSimulation:
    """within_slo: share of all requests within the SLO. requests: number simulated. model_replicas: by tier, those of
    the plan before any was added. model_within_slo: share that these kept.
    """

    within_slo: float
    requests: int
    model_replicas: Mapping[Role, int]
    model_within_slo: float


@dataclass(frozen=True)
class _Trial:
    """requests: number simulated. within_slo: share of all. missed: number by tier that more replicas of would help."""

    requests: int
    within_slo: float
    missed: tuple[int, ...]


def simulate_plan(
    plan: FleetPlan,
    measured: HardwareProfile | None,
    max_steps: int = MAX_STEPS,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[FleetPlan, PlanSimulation]:
    """Return the plan with the replicas that the simulated fleet needs, and what was seen.

    measured: the profile of the machines, None where they are rooflines. The plan must have no cached prompt tokens.
    max_steps: most times that replicas are added; the share may still be too low then. report: takes a line of progress
    before each run. If the other arrangement is then the better one by the model, it is simulated too, and the plan
    chooses again.
    """
    request, share = plan.request, plan.request.slo.share
    grown, first, last = _grow(plan, measured, max_steps, report)
    seen = PlanSimulation(last.within_slo, last.requests, plan.chosen.counts, first.within_slo)
    if grown is plan or not isinstance(plan.alternative, Arrangement):
        return grown, seen
    again = choose_again(request, grown.chosen, plan.alternative)
    if again.chosen is grown.chosen:
        return again, seen
    other, _, other_last = _grow(again, measured, max_steps, report)
    if other_last.within_slo < share <= last.within_slo:
        reason = f"the other arrangement keeps only {other_last.within_slo:.1%} of the requests within the SLO"
        return replace(grown, alternative=None, reasons=(reason,)), seen
    again = choose_again(request, grown.chosen, other.chosen)
    if again.chosen is other.chosen:
        seen = replace(seen, within_slo=other_last.within_slo, requests=other_last.requests)
    return again, seen


def _grow(
    plan: FleetPlan, measured: HardwareProfile | None, max_steps: int, report: Callable[[str], None]
) -> tuple[FleetPlan, _Trial, _Trial]:
    """Return the plan with replicas added until its share is met, its first trial, and its last."""
    profiles = _engine_profiles(plan.chosen, measured)
    first = last = _run(plan, profiles, report)
    for _ in range(max_steps):
        if last.within_slo >= plan.request.slo.share:
            break
        counts = list(plan.chosen.replicas)
        tier = last.missed.index(max(last.missed))
        counts[tier] += max(1, counts[tier] // _MAX_REPLICAS)  # of a part, one more
        plan = replace(plan, chosen=with_replicas(plan.chosen, plan.request.rate_per_s, counts))
        last = _run(plan, profiles, report)
    return plan, first, last


def _run(plan: FleetPlan, profiles: Mapping[Role, HardwareProfile], report: Callable[[str], None]) -> _Trial:
    """Simulate the chosen arrangement, or a part of it, at the rate that it is sized for."""
    chosen, request = plan.chosen, plan.request
    part = min(1.0, _MAX_REPLICAS / max(chosen.replicas))
    counts = {t.role: max(1, math.floor(n * part)) for t, n in zip(chosen.tiers, chosen.replicas, strict=True)}
    part = min(count / n for count, n in zip(counts.values(), chosen.replicas, strict=True))
    rate_per_s = part * request.rate_per_s / (1 - request.headroom)
    output_tokens = plan.mean_tokens[1]
    response_s = (plan.expected_latency.p50_tpot_s or 0.0) * output_tokens
    number = max(_MIN_REQUESTS, _MISSES / (1 - request.slo.share), (_RESPONSE_TIMES + 1) * response_s * rate_per_s)
    rate_per_s = _without_idle_time(rate_per_s, number, part * chosen.slo_capacity_per_s)
    requests = _draw_requests(plan, min(math.ceil(number), _MAX_REQUESTS), rate_per_s)
    report(
        f"simulating {len(requests):,} requests at {' + '.join(f'{n} {role}' for role, n in counts.items())} replicas"
    )
    service = _service(counts, request.slo)
    plant = Plant(
        profiles[chosen.tiers[0].role],
        StartupDistribution(),
        spread=0.0,
        bytes_per_s=request.bytes_per_s,
        tier_profiles=profiles,
    )
    attempts: list[Attempt] = []
    config = RunConfig(counts, requests[-1].at_s, seed=_SEED)
    Simulator(service, plant, StaticPolicy(counts, True), config, attempts.append).run(requests)
    result = RunResult(plant, counts, service.spec.slo.to_core() if service.spec.slo else None)
    counted = [one for one in attempts if one.trace_request.at_s >= response_s]  # the first find an idle fleet
    missed = [0] * len(counts)
    met = 0
    binding = min(range(len(counts)), key=lambda tier: chosen.sizings[tier].slo_capacity_per_s)
    for attempt in counted:
        if result.is_within_slo(attempt):
            met += 1
        else:
            missed[_missed_tier(attempt, request.slo, binding, len(counts))] += 1
    return _Trial(len(counted), met / max(1, len(counted)) * (1 - chosen.too_long_share), tuple(missed))


def _without_idle_time(rate_per_s: float, number: float, capacity_per_s: float) -> float:
    """Return the rate at which a number of requests comes: a higher one where they are so rare that few meet."""
    return max(rate_per_s, min(number / _MAX_SECONDS, _IDLE_LOAD * capacity_per_s))


def _missed_tier(attempt: Attempt, slo: Slo, binding: int, tiers: int) -> int:
    """Return the index of the tier that more replicas of help the request: the one that binds where it was rejected."""
    if attempt.outcome is not AttemptOutcome.OK or attempt.ttft_s is None:
        return binding
    return 0 if attempt.ttft_s > slo.ttft_target_s(attempt.trace_request.prompt_tokens) else tiers - 1


def _draw_requests(plan: FleetPlan, number: int, rate_per_s: float) -> list[TraceRequest]:
    """Draw requests of the planned lengths; the gaps are gamma distributed with the planned variation."""
    workload, cv2 = plan.request.served_workload, plan.request.arrival_cv2
    random = np.random.default_rng(_SEED)
    rows = random.choice(workload.weights.size, number, p=workload.weights)
    gaps = random.gamma(1 / cv2, cv2, number) if cv2 > 0 else np.ones(number)
    times = np.cumsum(gaps) / rate_per_s
    lengths = np.maximum(1, np.rint(np.column_stack((workload.prompt_tokens, workload.output_tokens))[rows]))
    return [
        TraceRequest(float(at_s), int(prompt), int(output))
        for at_s, (prompt, output) in zip(times, lengths, strict=True)
    ]


def _service(counts: Mapping[Role, int], slo: Slo) -> InferenceService:
    targets = {
        "ttft": slo.ttft_s,
        "ttftPerKToken": slo.ttft_per_1k_tokens_s or None,
        "tpot": slo.tpot_s,
        "e2e": slo.e2e_s,
    }
    spec: dict[str, Any] = {
        "model": {"uri": "hf://plan/model"},
        "tiers": {str(role): {"minReplicas": count, "maxReplicas": count} for role, count in counts.items()},
        "slo": {
            "percentile": round(slo.share * 100),
            **{name: format_duration(seconds) for name, seconds in targets.items() if seconds is not None},
        },
    }
    metadata = {"namespace": "default", "name": "plan"}
    return parse({"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": metadata, "spec": spec})


def _engine_profiles(chosen: Arrangement, measured: HardwareProfile | None) -> dict[Role, HardwareProfile]:
    """Return the hardware profile of each tier's engines."""
    return {
        tier.role: _roofline_profile(machine)
        if measured is None
        else replace(
            measured,
            budget=machine.limits.token_budget,
            block_size=measured.block_size if tier.role is Role.SERVE else machine.transfer.block_tokens,
        )
        for tier, machine in zip(chosen.tiers, chosen.machines, strict=True)
    }


def _roofline_profile(machine: Machine) -> HardwareProfile:
    return HardwareProfile(
        _coefficients(machine.cool),
        machine.limits.kv_tokens,
        machine.limits.max_sequences,
        machine.limits.token_budget,
        machine.transfer.block_tokens,
        machine.transfer.layers,
        machine.limits.kv_tokens,
        math.ceil(machine.kv_bytes_per_token),
        frontend=_FRONTEND_S,
        frontend_token=HTTP_OVERHEAD_PER_TOKEN_S,
        mixture=machine.mixture_of_experts,
    )


def _coefficients(m: StepModel) -> StepCoefficients:
    return StepCoefficients(
        m.base_s, m.any_prefill_s, m.prefill_token_s, m.prefill_pair_s, m.sequence_s, m.cached_token_s
    )
