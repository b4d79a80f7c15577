"""Fleet plan: the cheapest arrangement for a request, the reasons for it, and its expected latency.

Problem: replicas, GPUs per replica, roles, chunk budget and slots depend on each other. Idea: the request has the
available machines (for each number of GPUs, one per chunk budget). For each number of GPUs the aggregated budget is
chosen by its rule. Every number of GPUs is sized, aggregated and disaggregated. The fewest GPUs win, then the smaller
replicas. All figures of the plan come from the tiers that were sized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import MAX_RATE_PER_S, Constraint, TierSpec, build_profile
from plimsoll.core.engine_model.kv_transfer import RDMA_REMEDY
from plimsoll.core.planning import engine_settings
from plimsoll.core.planning.arrangement import (
    MAX_DISAGGREGATED_GPU_RATIO,
    RDMA_BYTES_PER_S,
    Arrangement,
    InfeasibleArrangement,
    aggregated_tier,
    assess_transfer,
    choose_arrangement,
    disaggregated_tiers,
    nearest_slo,
    size_arrangement,
)
from plimsoll.core.planning.engine_settings import (
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    CudaGraphs,
    Speculation,
    advise_speculation,
    choose_cuda_graphs,
    max_itl_s,
    max_sequences,
)
from plimsoll.core.planning.expected_latency import (
    ExpectedLatency,
    mean_batch,
    predict_latency,
    profile_attainment,
    tier_work,
)
from plimsoll.core.planning.machine_model import Machine
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.units import format_number, format_seconds
from plimsoll.core.workload import Workload, from_samples

CURVE_POINTS = 61
CURVE_END_LOAD = 1.6  # multiple of the SLO capacity


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Inputs of a plan. Raises a ValueError that names the argument.

    machines: for each number of GPUs of a replica, the machine at each chunk budget, ascending. rate_per_s: of the
    whole service, above 0. arrival_cv2: as in `TierSpec`. headroom: share of the SLO capacity kept free. itl_limit_s:
    limit of the usual ITL. bytes_per_s: of the fabric between engines. accepted_tokens: tokens per step with drafts.
    max_model_len: tokens of prompt and output together. The engine rejects longer requests, and the plan serves the
    others at the whole rate.
    """

    workload: Workload
    slo: Slo
    rate_per_s: float
    machines: Sequence[Sequence[Machine]]
    arrival_cv2: float = 1.0
    headroom: float = 0.0
    itl_limit_s: float | None = None
    bytes_per_s: float = RDMA_BYTES_PER_S
    accepted_tokens: float = ACCEPTED_TOKENS
    max_model_len: float = math.inf

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and above 0, not {getattr(self, name)}")
        if self.rate_per_s > MAX_RATE_PER_S:
            raise ValueError(f"rate_per_s must be at most {format_number(MAX_RATE_PER_S)}, not {self.rate_per_s}")
        if not 0 <= self.arrival_cv2 < float("inf"):
            raise ValueError(f"arrival_cv2 must be finite and at least 0, not {self.arrival_cv2}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom must be at least 0 and below 1, not {self.headroom}")
        if not 1 <= self.accepted_tokens <= DRAFT_TOKENS + 1:
            raise ValueError(f"accepted_tokens must lie between 1 and {DRAFT_TOKENS + 1}, not {self.accepted_tokens}")
        if self.itl_limit_s is not None and not 0 < self.itl_limit_s < float("inf"):
            raise ValueError(f"itl_limit_s must be finite and above 0, not {self.itl_limit_s}")
        if not self.machines or not all(self.machines):
            raise ValueError("machines are needed: no replica has room for the weights")

    @cached_property
    def too_long_share(self) -> float:
        """Share of the requests that the engine rejects for their length."""
        w = self.workload
        return w.mean((w.prompt_tokens + w.output_tokens > self.max_model_len).astype(float))

    @cached_property
    def served_workload(self) -> Workload:
        """Workload of the other requests; undefined where all are too long."""
        w = self.workload
        fits = w.prompt_tokens + w.output_tokens <= self.max_model_len
        if fits.all():
            return w
        return from_samples(w.uncached_tokens[fits], w.cached_tokens[fits], w.output_tokens[fits], w.weights[fits])


@dataclass(frozen=True)
class TierEngineSettings:
    """Settings of one tier's engine.

    max_itl_s: the longest usual ITL, None for a prefill tier. cuda_graphs: None where the engine's own are enough.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_itl_s: float | None
    speculation: Speculation | None
    mean_batch: float | None
    cuda_graphs: CudaGraphs | None


@dataclass(frozen=True)
class GoodputPoint:
    """Goodput at a rate, in requests per second within the SLO, without and with admission control.

    with_admission_per_s: the running maximum of both up to this rate, which admission control reaches by rejecting the
    excess over the best rate.
    """

    rate_per_s: float
    without_admission_per_s: float
    with_admission_per_s: float


@dataclass(frozen=True, eq=False)
class FleetPlan:
    """chosen: the arrangement. alternative: the other one, or why it is infeasible. reasons: sentences for users."""

    request: PlanRequest
    chosen: Arrangement
    alternative: Arrangement | InfeasibleArrangement | None
    reasons: tuple[str, ...]

    @cached_property
    def settings(self) -> tuple[TierEngineSettings, ...]:
        """Engine settings of each tier."""
        tiers = zip(self.chosen.tiers, self.chosen.machines, self.chosen.replicas, strict=True)
        return tuple(_engine_settings(self.request, *each) for each in tiers)

    @cached_property
    def expected_latency(self) -> ExpectedLatency:
        """Expected latency at the requested rate."""
        return predict_latency(self.chosen.tiers, self.request.rate_per_s, self.chosen.replicas)

    @cached_property
    def expected_latency_at_capacity(self) -> ExpectedLatency:
        """Expected latency at the SLO capacity."""
        return predict_latency(self.chosen.tiers, self.chosen.slo_capacity_per_s, self.chosen.replicas)

    @cached_property
    def goodput_curve(self) -> tuple[GoodputPoint, ...]:
        """Goodput as a function of load."""
        return goodput_curve(self.chosen)

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean prompt and output tokens of a served request."""
        w = self.request.served_workload
        return w.mean(w.prompt_tokens), w.mean(w.output_tokens)

    def cost_per_million(self, gpu_hour: float, rate_per_s: float, output_only: bool) -> float:
        """Cost of a million tokens at a rate, in the unit of gpu_hour, with all GPUs of the plan running."""
        prompt, output = self.mean_tokens
        tokens = rate_per_s * 3600 * (output if output_only else prompt + output)
        return gpu_hour * self.chosen.gpus / tokens * 1e6


@dataclass(frozen=True)
class PlanFailure:
    """No number of replicas meets the SLO.

    infeasibility: the sizing result of the aggregated engines, with the nearest SLO; None where no chunk budget meets
    the ITL limit, or where no looser target helps.
    """

    infeasibility: Infeasible | None
    reasons: tuple[str, ...]


def make_plan(request: PlanRequest) -> FleetPlan | PlanFailure:
    """Make a plan; it takes about a second."""
    if request.too_long_share > 1 - request.slo.share:
        return PlanFailure(None, (_too_long_reason(request),))
    aggregated_best, aggregated_failure = _best_aggregated(request)
    disaggregated_best, disaggregated_failure = _best_disaggregated(request)
    best = (
        choose_arrangement(aggregated_best, disaggregated_best)
        if aggregated_best is not None and disaggregated_best is not None
        else None
    )
    if best is None:
        feasible = [one for one in (aggregated_best, disaggregated_best) if isinstance(one, Arrangement)]
        best = feasible[0] if feasible else None
    if best is None:
        reasons = (
            aggregated_failure or _infeasible_reason(request, aggregated_best),
            disaggregated_failure or _infeasible_reason(request, disaggregated_best),
        )
        failure_reasons = tuple(
            f"{_arrangement_name(number == 1)} is not possible: {reason}" for number, reason in enumerate(reasons)
        )
        return PlanFailure(
            replace(aggregated_best, nearest_slo=_nearest_slo(request))
            if isinstance(aggregated_best, InfeasibleArrangement)
            else None,
            failure_reasons,
        )
    other = disaggregated_best if not best.disaggregated else aggregated_best
    return FleetPlan(
        request, best, other, _choice_reasons(request, best, other, aggregated_failure, disaggregated_failure)
    )


def _best_aggregated(request: PlanRequest) -> tuple[Arrangement | InfeasibleArrangement | None, str]:
    """The best aggregated arrangement, or why no chunk budget is feasible."""
    arrangements: list[Arrangement | InfeasibleArrangement] = []
    for machines in request.machines:
        chosen = _choose_token_budget(request, machines)
        if chosen is not None:
            tier, machine = chosen
            arrangements.append(
                size_arrangement((tier,), (machine,), request.rate_per_s, request.headroom, request.too_long_share)
            )
    if arrangements:
        return _cheapest(arrangements), ""
    assert request.itl_limit_s is not None  # without a limit, each budget has an arrangement
    return None, (
        f"a step of {request.machines[0][0].limits.token_budget} prompt tokens, the smallest budget considered, "
        f"takes longer than the ITL limit of {format_seconds(request.itl_limit_s)}"
    )


def _choose_token_budget(request: PlanRequest, machines: Sequence[Machine]) -> tuple[TierSpec, Machine] | None:
    """Aggregated tier and machine at the chosen chunk budget; None if none meets the ITL limit."""
    tiers = [aggregated_tier(m, request.served_workload, request.slo, request.arrival_cv2) for m in machines]
    chosen = engine_settings.choose_token_budget(tiers, request.itl_limit_s)
    return None if chosen is None else (chosen, machines[tiers.index(chosen)])


def _nearest_slo(request: PlanRequest) -> Slo | None:
    """The nearest SLO that aggregated engines meet, on the largest replicas that meet the ITL limit."""
    budgeted = [one for machines in request.machines if (one := _choose_token_budget(request, machines)) is not None]
    machine = budgeted[-1][1]
    return nearest_slo(
        lambda slo: aggregated_tier(machine, request.served_workload, slo), request.slo, request.too_long_share
    )


def _best_disaggregated(request: PlanRequest) -> tuple[Arrangement | InfeasibleArrangement | None, str]:
    """The best disaggregated arrangement, or why there is none.

    Prefill engines keep the largest budget, because nothing decodes on them. A decode engine has at least its prefill
    engine's GPUs, because KV is read from fewer ranks by more.
    """
    if request.slo.ttft_s is None:
        return None, "a prefill tier is sized for a TTFT target, and there is none"
    assessment = assess_transfer(request.machines[0][-1], request.served_workload, request.bytes_per_s)
    if isinstance(assessment, Unavailable):
        return None, assessment.reason
    if not assessment.pays:
        has_rdma = request.bytes_per_s >= RDMA_BYTES_PER_S
        return None, assessment.message.removesuffix(f": {RDMA_REMEDY}") if has_rdma else assessment.message
    arrangements: list[Arrangement | InfeasibleArrangement] = []
    for prefill_machines in request.machines:
        for decode_machines in request.machines:
            prefill, decode = prefill_machines[-1], decode_machines[0]
            if prefill.gpus > decode.gpus:
                continue
            tiers = disaggregated_tiers(
                prefill, decode, request.served_workload, request.slo, request.bytes_per_s, request.arrival_cv2
            )
            if request.itl_limit_s is not None and max_itl_s(tiers[1]) > request.itl_limit_s:
                continue
            arrangements.append(
                size_arrangement(tiers, (prefill, decode), request.rate_per_s, request.headroom, request.too_long_share)
            )
    if not arrangements:
        assert request.itl_limit_s is not None  # without a limit, each pair has an arrangement
        return (
            None,
            "a decode engine's step at its full batch takes longer than the ITL limit of "
            f"{format_seconds(request.itl_limit_s)}",
        )
    return _cheapest(arrangements), ""


def _cheapest(arrangements: Sequence[Arrangement | InfeasibleArrangement]) -> Arrangement | InfeasibleArrangement:
    feasible = [one for one in arrangements if isinstance(one, Arrangement)]
    if not feasible:
        return arrangements[-1]  # of the largest replicas, which come nearest
    return min(feasible, key=lambda one: (one.gpus, sum(m.gpus for m in one.machines)))


def _engine_settings(request: PlanRequest, tier: TierSpec, machine: Machine, replicas: int) -> TierEngineSettings:
    budget = tier.limits.token_budget
    if tier.role is Role.PREFILL:
        return TierEngineSettings(
            max_sequences(tier), budget, None, None, None, choose_cuda_graphs(budget, machine.mixture_of_experts)
        )
    batch = mean_batch(tier, request.rate_per_s, replicas)
    speculation_advice = advise_speculation(tier.model, batch, request.accepted_tokens, machine.mixture_of_experts)
    slots = max_sequences(tier)
    max_step_tokens = (
        slots if tier.role is Role.DECODE else budget
    )  # tokens of a step; a decode engine computes no prompts
    return TierEngineSettings(
        slots,
        budget,
        max_itl_s(tier),
        speculation_advice,
        batch,
        choose_cuda_graphs(max_step_tokens, machine.mixture_of_experts),
    )


def goodput_curve(arrangement: Arrangement, points: int = CURVE_POINTS) -> tuple[GoodputPoint, ...]:
    """Goodput from no load to well past the SLO capacity.

    In a disaggregated arrangement, both tiers must meet their targets; their attainments are taken as independent.
    """
    profiles = [build_profile(tier) for tier in arrangement.tiers]
    points_found, best_goodput = [GoodputPoint(0.0, 0.0, 0.0)], 0.0
    for number in range(1, points):
        rate = arrangement.slo_capacity_per_s * CURVE_END_LOAD * number / (points - 1)
        served = rate * (1 - arrangement.too_long_share)
        with_admission, without_admission = (
            served * profile_attainment(profiles, rate, arrangement.replicas, admission=admission)
            for admission in (True, False)
        )
        best_goodput = max(best_goodput, with_admission, without_admission)
        points_found.append(GoodputPoint(rate, without_admission, best_goodput))
    return tuple(points_found)


def choose_again(request: PlanRequest, one: Arrangement, other: Arrangement) -> FleetPlan:
    """The plan of two arrangements, one of each kind, whose replicas are no longer those of the model."""
    disaggregated, aggregated = (one, other) if one.disaggregated else (other, one)
    best = choose_arrangement(aggregated, disaggregated)
    assert best is not None  # both are feasible
    second = aggregated if best is disaggregated else disaggregated
    return FleetPlan(request, best, second, _choice_reasons(request, best, second, "", ""))


def _choice_reasons(
    request: PlanRequest,
    best: Arrangement,
    other: Arrangement | InfeasibleArrangement | None,
    aggregated_failure: str,
    disaggregated_failure: str,
) -> tuple[str, ...]:
    """Reasons for this arrangement and against the other one."""
    if other is None:
        missing = aggregated_failure if best.disaggregated else disaggregated_failure
        return (f"{_arrangement_name(not best.disaggregated)} is not possible: {missing}",)
    if isinstance(other, InfeasibleArrangement):
        return (f"{_arrangement_name(not best.disaggregated)} is not possible: {_infeasible_reason(request, other)}",)
    reasons = [
        f"{_arrangement_name(other.disaggregated)} would take {_gpu_text(other)} for the same rate, "
        f"this takes {_gpu_text(best)}"
    ]
    if not best.disaggregated and other.gpus < best.gpus:
        reasons.append(
            f"disaggregation pays off below {MAX_DISAGGREGATED_GPU_RATIO:.0%} of the GPUs, because it has more parts"
        )
    constraint = other.binding_constraint
    target_s = {name: target for name, target in request.slo.targets if name != Constraint.TTFT}.get(constraint)
    if best.disaggregated and target_s is not None:
        work = tier_work(other.tiers[0])
        stall_s = work.workload.mean(work.stall_s)
        reasons.append(
            f"an aggregated engine stops decoding for {stall_s * 1e3:.1f} ms at each prompt, "
            f"much of its {constraint} of {format_seconds(target_s)}; a decode engine only posts reads"
        )
    return tuple(reasons)


def _arrangement_name(disaggregated: bool) -> str:
    return "a prefill and a decode tier" if disaggregated else "one aggregated tier"


def _gpu_text(arrangement: Arrangement) -> str:
    parts = [f"{n} x {m.gpus}" for n, m in zip(arrangement.replicas, arrangement.machines, strict=True)]
    return f"{arrangement.gpus} GPUs ({' + '.join(parts)})"


def _infeasible_reason(request: PlanRequest, arrangement: Arrangement | InfeasibleArrangement | None) -> str:
    if not isinstance(arrangement, InfeasibleArrangement):
        return ""
    message = f"no number of replicas meets the SLO, because of {arrangement.constraint}"
    budget = 1 - request.slo.share
    if arrangement.infeasible_share > budget:
        missing = f"{arrangement.infeasible_share:.1%} of the requests miss it even on an idle replica"
        message += f": {missing}, and {budget:.0%} may"
    return f"{message}{arrangement.hint}"


def _too_long_reason(request: PlanRequest) -> str:
    max_percentile = math.floor(100 * (1 - request.too_long_share))
    percentile_hint = f", --percentile {max_percentile} or less may" if max_percentile else ""
    return (
        f"{request.too_long_share:.1%} of the requests, prompt and answer together, are longer than the engine's "
        f"max_model_len of {format_number(request.max_model_len)} tokens, and {1 - request.slo.share:.0%} may miss: no "
        f"looser target helps, an engine with a longer one does{percentile_hint}"
    )
