"""The cases of others, and what the plan's law says of each.

DistServe: real runs of OPT-13B on A100, with its own fitted coefficients. AIConfigurator: its packaged answers.
Recorded: prefill and decode engines beside aggregated ones on two H200s. Where figures come from stands in their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.trust.distserve_replay import KV_TOKENS, PREFILL_TOKENS
from plimsoll.cli.plan import profile_machines
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import TierSpec, build_profile
from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.planning import known_models, workloads
from plimsoll.core.planning.arrangement import NVLINK_BYTES_PER_S, aggregated_tier, disaggregated_tiers
from plimsoll.core.planning.expected_latency import ExpectedLatency, plan_attainment, predict_latency
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, PlanRequest, make_plan
from plimsoll.core.planning.machine_model import Machine, machine_from_roofline
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim import profile as profiles

DATA = Path(__file__).parent / "data"
SYSTEMS = {"h200_sxm": "H200", "h100_sxm": "H100-SXM"}
DETERMINISTIC_SIGMA = 0.03  # shares nearer than this are called even
LENGTH_SIGMAS = {"chat": (0.6, 0.5), "prefill": (0.4, 0.45)}  # of the recorded runs' lengths


def load(name: str) -> Any:
    """A file of `data`."""
    return json.loads((DATA / name).read_text())


# ---------------------------------------------------------------- DistServe


@dataclass(frozen=True)
class DistServeRun:
    """A measured run, and the model's prediction. kept_real, kept_law: share of requests within both targets, measured
    and predicted.
    """

    engine: str
    rate_per_s: float
    gpus: int
    kept_real: float
    kept_law: float
    real_ms: tuple[float, float]  # p50 TTFT and TPOT
    law: ExpectedLatency


def opt_tiers(data: Any, engine: str, slo: Slo) -> tuple[TierSpec, ...]:
    """Return the tiers of OPT-13B with DistServe's profile, adjusted for engines of 2023.

    vLLM of 2023 ran a prefill in a step of its own and started it at once. The model describes today's engine, whose
    prefill starts in the step after next, 2.5 decode steps later, so vLLM's TTFT target is that much longer here.
    DistServe's first token comes from the prefill engine, and the wait for the decode engine counts in TPOT, so that
    wait may take what the steps leave of the target. Its batch is bounded as by admission control (`_opt_attainment`).
    """
    workload = lengths(data)
    limits = EngineLimits(256, KV_TOKENS, PREFILL_TOKENS[engine])
    assert slo.ttft_s is not None
    assert slo.tpot_s is not None
    if engine == "vllm":
        coefficients = _steps(data["coefficients"]["vllm 1"], data["coefficients"]["vllm 1"])
        return (
            TierSpec(
                Role.SERVE, coefficients, workload, limits, replace(slo, ttft_s=slo.ttft_s + 2.5 * coefficients.base_s)
            ),
        )
    first, last = data["coefficients"]["distserve 2"], data["coefficients"]["distserve 1"]
    prefill_coefficients = first["prefill"][0] * 1e-3
    prefill = replace(_steps(first, first), base_s=prefill_coefficients, any_prefill_s=0.0)
    decode = _steps(last, last)
    kv_free_tokens = KvTransfer(40, 16, post_fixed_s=0.0, post_block_layer_s=0.0, step_factor=1.0)
    tokens = workload.mean(workload.output_tokens)
    max_batch = KV_TOKENS * decode.cached_token_s + decode.base_s  # a step with the cache full
    queueing = replace(slo, ttft_s=max(0.0, slo.tpot_s - max_batch) * tokens)
    return (
        TierSpec(Role.PREFILL, prefill, workload, limits, slo),
        TierSpec(Role.DECODE, decode, workload, limits, queueing, transfer=kv_free_tokens),
    )


def _opt_attainment(tiers: tuple[TierSpec, ...], rate: float) -> float:
    """The cache bounds the decode engine's batch, and so its steps, as a gate would; nobody else is refused."""
    share = plan_attainment(tiers[:1], rate, (1,))
    return share * plan_attainment(tiers[1:], rate, (1,), admission=True) if tiers[1:] else share


def lengths(data: Any) -> Workload:
    """The prompts and outputs of the published runs."""
    prompts, outputs = zip(*data["lengths"], strict=True)
    return from_samples(prompts, [0.0] * len(prompts), outputs)


def _steps(prefill: Any, decode: Any) -> StepModel:
    """ms = a + b sum L + c sum L^2 for prefill, a + b context + c batch for decoding."""
    a, b, c = (value * 1e-3 for value in prefill["prefill"])
    base, context, sequence = (value * 1e-3 for value in decode["decoding_smallbs"])
    return StepModel(base, a, b, 2 * c, sequence, context)


def distserve() -> Iterator[DistServeRun]:
    """All 14 runs, at targets of 200 ms and 100 ms."""
    data = load("distserve.json")
    slo = Slo(0.9, 0.2, 0.0, 0.1)
    for run in data["runs"]:
        tiers = opt_tiers(data, run["engine"], slo)
        replicas = (1,) * len(tiers)
        rate = run["rate_per_s"]
        yield DistServeRun(
            run["engine"],
            rate,
            run["gpus"],
            run["kept_200_100"],
            _opt_attainment(tiers, rate),
            (run["p50_ttft_ms"], run["p50_tpot_ms"]),
            predict_latency(tiers, rate, replicas),
        )


def searched_goodput() -> tuple[float, float, float]:
    """Requests a second and GPU that DistServe's simulator found for prefill on two GPUs and decode on one, what the
    law has for the same (90 % of requests in each target, those feasible alone), and for vLLM on one GPU."""
    data = load("distserve.json")
    slo = Slo(0.9, 0.2, 0.0, 0.1)
    disaggregated = min(
        float(slo_capacity_per_s(build_profile(tier), 1, admission=False)[0])
        for tier in opt_tiers(data, "distserve", slo)
    )
    aggregated = float(slo_capacity_per_s(build_profile(opt_tiers(data, "vllm", slo)[0]), 1, admission=False)[0])
    return data["searched"]["rate_per_gpu"], disaggregated / 3, aggregated


# ---------------------------------------------------------------- AIConfigurator


@dataclass(frozen=True)
class PlannerComparison:
    """Requests per second and GPU: of the other planner and of the model with the roofline, aggregated and
    disaggregated; None if it has no result.

    model_deterministic: all lengths are equal, and half of the requests are within the targets, as the other planner
    counts. model_spread: lognormal lengths and 95 %.
    """

    case: Any
    theirs: tuple[float | None, float | None]
    model_deterministic: tuple[float | None, float | None]
    model_spread: tuple[float | None, float | None]


def aiconfigurator() -> Iterator[PlannerComparison]:
    """Each case, on up to 8 GPUs."""
    for case in load("aiconfigurator.json"):
        theirs = tuple(None if case[name] is None else case[name]["seq/s/gpu"] for name in ("agg", "disagg"))
        targets = case["ttft_ms"] / 1e3, 0.0, case["tpot_ms"] / 1e3
        even = workloads.lognormal_workload(case["prompt"], case["output"], 0.0, 0.0)
        spread = workloads.lognormal_workload(case["prompt"], case["output"])
        yield PlannerComparison(
            case,
            (theirs[0], theirs[1]),
            per_gpu(case, even, Slo(0.5, *targets)),
            per_gpu(case, spread, Slo(0.95, *targets)),
        )


def machines(case: Any, token_budget: int = 8192) -> list[Machine]:
    """The roofline's replicas for a case."""
    shape, gpu = known_models.find_shape(case["model"]), ACCELERATORS[SYSTEMS[case["system"]]]
    replicas_found = (
        machine_from_roofline(shape, gpu, gpus, token_budget) for gpus in (1, 2, 4, 8) if shape.heads % gpus == 0
    )
    return [machine for machine in replicas_found if machine is not None]


def per_gpu(case: Any, workload: Workload, slo: Slo) -> tuple[float | None, float | None]:
    """The best load line for each GPU, aggregated and apart. Pairs are mixed as their load lines ask for, in up to
    8 GPUs."""
    machine = machines(case)
    best_aggregated = [
        float(slo_capacity_per_s(build_profile(aggregated_tier(machine_count, workload, slo)), 1, admission=False)[0])
        / machine_count.gpus
        for machine_count in machine
    ]
    disaggregated = [0.0]
    for prefill_machines in machine:
        for decode_machines in machine:
            if prefill_machines.gpus <= decode_machines.gpus:
                disaggregated.append(_best_pair(prefill_machines, decode_machines, workload, slo))
    return max(best_aggregated) or None, max(disaggregated) or None


def _best_pair(
    prefill_machine: Machine, decode_machine: Machine, workload: Workload, slo: Slo, max_gpus: int = 8
) -> float:
    tiers = disaggregated_tiers(prefill_machine, decode_machine, workload, slo, NVLINK_BYTES_PER_S)
    best_rate = 0.0
    profiles = [build_profile(tier) for tier in tiers]
    for p in range(1, max_gpus // prefill_machine.gpus + 1):
        for d in range(1, (max_gpus - p * prefill_machine.gpus) // decode_machine.gpus + 1):
            capacity = min(
                float(slo_capacity_per_s(profiles[0], p, admission=False)[0]),
                float(slo_capacity_per_s(profiles[1], d, admission=False)[0]),
            )
            best_rate = max(best_rate, capacity / (p * prefill_machine.gpus + d * decode_machine.gpus))
    return best_rate


# ---------------------------------------------------------------- recorded


@dataclass(frozen=True)
class RecordedComparison:
    """One mix and rate on two H200s with one pair of targets (ms): shares kept, measured and by the law."""

    mix: str
    rate_per_s: float
    block_tokens: int
    targets_ms: tuple[float, float]
    real: tuple[float, float]  # two aggregated engines, one and one
    law: tuple[float, float]

    @property
    def winners(self) -> tuple[str, str]:
        """Measured and by the law."""
        return _winner(*self.real), _winner(*self.law)


def _winner(aggregated: float, disaggregated: float) -> str:
    if abs(aggregated - disaggregated) < DETERMINISTIC_SIGMA:
        return "even"
    return "aggregated" if aggregated > disaggregated else "apart"


def h200_machine() -> Machine:
    """One of the two cards, at the chunk budget of the runs."""
    return next(one for one in profile_machines(profiles.load("h200-8b"), 1) if one.limits.token_budget == 8192)


def recorded() -> Iterator[RecordedComparison]:
    """Every pair of runs at one rate, at each pair of targets that the runs tell apart."""
    rows = load("h200_pairs.json")["rows"]
    for row in rows:
        if row["engines"] == "agg":
            continue
        [paired_row] = [run_row for run_row in rows if run_row["engines"] == "agg" and _is_same_load(run_row, row)]
        block = 128 if row["engines"] == "pd128" else 16
        for name, share in row["kept"].items():
            if "/" not in name:
                continue
            ttft, tpot = (float(part) for part in name.split("/"))
            tiers = recorded_tiers(row, Slo(0.95, ttft / 1e3, 0.0, tpot / 1e3), block)
            model_shares = tuple(
                plan_attainment(run_row, row["seen_per_s"], n) for run_row, n in zip(tiers, ((2,), (1, 1)), strict=True)
            )
            yield RecordedComparison(
                row["mix"],
                row["rate_per_s"],
                block,
                (ttft, tpot),
                (paired_row["kept"][name], share),
                (model_shares[0], model_shares[1]),
            )


def _is_same_load(one: Any, other: Any) -> bool:
    return (one["mix"], one["rate_per_s"]) == (other["mix"], other["rate_per_s"])


def recorded_tiers(row: Any, slo: Slo, block: int) -> tuple[tuple[TierSpec, ...], tuple[TierSpec, ...]]:
    """Two aggregated engines, and a pair, for a run's lengths."""
    workload = workloads.lognormal_workload(row["prompt_tokens"], row["output_tokens"], *LENGTH_SIGMAS[row["mix"]])
    machine = h200_machine()
    machine = replace(machine, transfer=replace(machine.transfer, block_tokens=block))
    return (aggregated_tier(machine, workload, slo),), disaggregated_tiers(
        machine, machine, workload, slo, NVLINK_BYTES_PER_S
    )


def plan_recorded(row: Any, slo: Slo) -> FleetPlan | PlanFailure:
    """What `plimsoll plan --hardware h200-8b` answers for a recorded run."""
    workload = workloads.lognormal_workload(row["prompt_tokens"], row["output_tokens"], *LENGTH_SIGMAS[row["mix"]])
    return make_plan(PlanRequest(workload, slo, row["seen_per_s"], [profile_machines(profiles.load("h200-8b"), 1)]))
