"""What a plan decides, and that it decides as recorded engines did."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bench.planning import cases
from plimsoll.cli.plan import profile_machines
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import Constraint, build_profile
from plimsoll.core.engine_model.roofline import ACCELERATORS, model_shape
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.planning import engine_settings, known_models, workloads
from plimsoll.core.planning.arrangement import (
    aggregated_tier,
    assess_transfer,
    disaggregated_tiers,
    handover_s,
    size_arrangement,
)
from plimsoll.core.planning.expected_latency import plan_attainment, predict_latency, ttft_quantile_s
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, PlanRequest, goodput_curve, make_plan
from plimsoll.core.planning.machine_model import TOKEN_BUDGETS, Machine, machine_from_roofline
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.engines import vllm
from plimsoll.sim import profile as profiles

CHAT = workloads.lognormal_workload(1200, 220)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
H200 = profile_machines(profiles.load("h200-8b"), 1)


def plan_request(slo: Slo = SLO, rate: float = 24.0, **more: object) -> PlanRequest:
    return replace(PlanRequest(CHAT, slo, rate, [H200]), **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the mix


def test_lognormal_workload_keeps_means_and_spread() -> None:
    w = workloads.lognormal_workload(4000, 100, 0.4, 0.5, cached_share=0.25)
    assert w.mean(w.prompt_tokens) == pytest.approx(4000)
    assert w.mean(w.cached_tokens) == pytest.approx(1000)
    assert w.mean(w.output_tokens) == pytest.approx(100)
    assert w.scv(w.prompt_tokens) == pytest.approx(math.exp(0.4**2) - 1, rel=0.03)
    both = w.mean(w.prompt_tokens * w.output_tokens)
    assert both == pytest.approx(4000 * 100, rel=0.02)  # independent


def test_busiest_window_returns_window_of_highest_rate() -> None:
    quiet, busy = np.arange(0, 600, 10.0), np.arange(600, 900, 0.5)
    found = workloads.busiest_window(np.concatenate((quiet, busy, np.arange(900, 1500, 10.0))))
    assert (found.first, found.end, found.rate_per_s) == (60, 660, 2.0)
    assert found.arrival_cv2 == 1.0
    assert workloads.busiest_window(np.arange(0, 10, 0.5)).rate_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("arrivals", [[], [1.0], [3.0, 3.0], [2.0, 1.0]])
def test_busiest_window_without_rate_raises(arrivals: list[float]) -> None:
    with pytest.raises(ValueError, match="arrivals_s"):
        workloads.busiest_window(arrivals)


# ---------------------------------------------------------------- aggregated or apart


@pytest.mark.parametrize("mixed", ["chat", "prefill"])
def test_plan_recorded_good_aggregated_run_is_aggregated(mixed: str) -> None:
    """On two H200s. Every recorded run of that mix, at each pair of targets that both kinds were judged at."""
    for row in cases.load("h200_pairs.json")["rows"]:
        if row["engines"] != "agg" or row["mix"] != mixed:
            continue
        for name in ("500/50", "500/15"):
            if row["kept"][name] < 0.95:
                continue
            ttft, tpot = (float(part) / 1e3 for part in name.split("/"))
            found = cases.plan_recorded(row, Slo(0.95, ttft, 0.0, tpot))
            assert isinstance(found, FleetPlan)
            assert not found.chosen.disaggregated, (row["rate_per_s"], name)


def test_plan_recorded_winning_pair_is_disaggregated() -> None:
    """Chat at 24 requests a second, 500 ms and 10 ms: 82 % of requests against 100 % of the pair's."""
    [row] = [
        one for one in cases.load("h200_pairs.json")["rows"] if one["engines"] == "pd128" and one["rate_per_s"] == 24
    ]
    assert row["kept"]["500/10"] > 0.99
    found = cases.plan_recorded(row, Slo(0.95, 0.5, 0.0, 0.01))
    assert isinstance(found, FleetPlan)
    assert found.chosen.replicas == (1, 1)
    assert "3 GPUs" in found.reasons[0]


def test_plan_slow_kv_fabric_is_aggregated() -> None:
    """TCP at 0.47 GB/s is what pods get that have no process namespace in common."""
    found = make_plan(plan_request(Slo(0.95, 0.5, 0.0, 0.01), bytes_per_s=0.47e9))
    assert isinstance(found, FleetPlan)
    assert not found.chosen.disaggregated
    assert "moving a prompt token takes" in found.reasons[0]
    verdict = assess_transfer(H200[0], CHAT, 0.47e9)
    assert not isinstance(verdict, Unavailable)
    assert not verdict.pays


def test_handover_s_matches_measurements() -> None:
    """One request at a time, blocks of 128: 16 to 31 ms for 128 to 8,192 tokens."""
    w = workloads.lognormal_workload(1024, 10, 0.0, 0.0)
    for tokens, seen_ms in ((128, 16.0), (1024, 18.0), (2048, 20.0), (4096, 25.0), (8192, 31.0)):
        one = workloads.lognormal_workload(tokens, 10, 0.0, 0.0)
        assert seen_ms <= 1e3 * one.mean(handover_s(H200[0], one, 100e9)) <= seen_ms + 9.5
    assert w.mean(handover_s(H200[0], w, 1e9)) > 0.1


def test_plan_without_ttft_target_is_aggregated() -> None:
    found = make_plan(plan_request(Slo(0.95, tpot_s=0.05)))
    assert isinstance(found, FleetPlan)
    assert "TTFT target" in found.reasons[0]


def test_expected_latency_meets_slo() -> None:
    for slo in (SLO, Slo(0.95, 0.5, 0.0, 0.01)):
        found = make_plan(plan_request(slo))
        assert isinstance(found, FleetPlan)
        times = found.expected_latency
        assert times.p95_ttft_s is not None
        assert times.p95_tpot_s is not None
        assert times.p95_ttft_s <= 0.5 * 1.01
        assert times.p95_tpot_s <= (slo.tpot_s or 0) * 1.01
        assert plan_attainment(found.chosen.tiers, 24.0, found.chosen.replicas) >= 0.95


def test_size_arrangement_pair_meets_share_jointly() -> None:
    tiers = disaggregated_tiers(H200[-1], H200[0], CHAT, Slo(0.95, 0.2, 0.0, 0.015), 100e9)
    found = size_arrangement(tiers, (H200[-1], H200[0]), 60.0)
    assert not isinstance(found, Infeasible)
    assert plan_attainment(tiers, 60.0, found.replicas) >= 0.95
    assert found.slo_capacity_per_s >= 60.0
    assert plan_attainment(tiers, found.slo_capacity_per_s * 1.02, found.replicas) < 0.95


# ---------------------------------------------------------------- nonsense and edges


def test_plan_infeasible_tpot_names_constraint() -> None:
    found = make_plan(plan_request(Slo(0.95, 0.5, 0.0, 0.003)))
    assert isinstance(found, PlanFailure)
    assert found.infeasibility is not None
    assert found.infeasibility.constraint is Constraint.TPOT
    assert found.infeasibility.nearest_slo is not None
    assert (found.infeasibility.nearest_slo.tpot_s or 0) > 0.003


@pytest.mark.parametrize("prompt", [500, 6000, 6500, 20000])
@pytest.mark.parametrize("slo", [SLO, Slo(0.9, 0.3, 0.05, 0.02), Slo(0.95, 0.01)])
def test_plan_meets_slo_or_names_feasible_targets(prompt: int, slo: Slo) -> None:
    """Who misses alone counts as missed, and no fleet is the answer where too many do."""
    asked_for = plan_request(slo, workload=workloads.lognormal_workload(prompt, 220))
    found = make_plan(asked_for)
    if isinstance(found, PlanFailure):
        assert found.infeasibility is not None
        assert found.infeasibility.nearest_slo is not None
        assert found.infeasibility.nearest_slo != slo
        found = make_plan(replace(asked_for, slo=found.infeasibility.nearest_slo))
    assert isinstance(found, FleetPlan)
    chosen = found.chosen
    assert plan_attainment(chosen.tiers, 24.0, chosen.replicas) >= slo.share
    assert math.prod(sizing.attainment for sizing in chosen.sizings) >= slo.share
    assert all(sizing.attainment <= 1 - sizing.infeasible_share + 1e-12 for sizing in chosen.sizings)
    assert chosen.slo_capacity_per_s >= 24.0 * (1 - 1e-9)


def test_plan_pair_for_long_prompts_is_found() -> None:
    """A prefill tier that hardly keeps its share when idle leaves the decode tier next to nothing to miss."""
    found = make_plan(plan_request(Slo(0.95, 12.342263485964853), workload=workloads.lognormal_workload(50_000, 220)))
    assert isinstance(found, FleetPlan)
    assert found.chosen.disaggregated
    assert found.chosen.gpus < 100
    assert math.prod(sizing.attainment for sizing in found.chosen.sizings) >= 0.95


def test_plan_prompts_above_max_model_len_count_as_missed() -> None:
    w = plan_request().workload
    longest = float(w.quantile(w.prompt_tokens + w.output_tokens, 0.97))
    found = make_plan(plan_request(max_model_len=longest))
    assert isinstance(found, FleetPlan)
    [tier], [sizing] = found.chosen.tiers, found.chosen.sizings
    assert float((tier.workload.prompt_tokens + tier.workload.output_tokens).max()) <= longest
    assert found.request.too_long_share == pytest.approx(7 / 256)
    assert sizing.infeasible_share == pytest.approx(7 / 256)
    assert 0.95 <= sizing.attainment <= 1 - 7 / 256 + 1e-12
    refused = make_plan(plan_request(Slo(0.98, 0.5, 0.0, 0.05), max_model_len=longest))
    assert isinstance(refused, PlanFailure)
    assert "max_model_len" in refused.reasons[0]


def test_plan_advises_rdma_only_if_it_helps() -> None:
    small = [replace(machine, kv_bytes_per_token=1e7) for machine in H200]
    for bytes_per_s, advised in ((50e9, False), (25e9, True)):
        found = make_plan(plan_request(machines=[small], bytes_per_s=bytes_per_s))
        assert isinstance(found, FleetPlan)
        assert "moving a prompt token takes" in found.reasons[0]
        assert ("RDMA" in found.reasons[0]) is advised


def test_plan_model_extrapolates_heat_shares() -> None:
    """A base that heat brings to nothing takes with it what a prefill takes off it."""
    machine = H200[2]
    odd = replace(machine, cool=replace(machine.hot, base_s=1.0), hot_share=0.1, cool_share=0.05)
    assert make_plan(plan_request(machines=[[odd]]))


def test_size_arrangement_more_load_never_needs_fewer_gpus() -> None:
    tier = aggregated_tier(H200[2], CHAT, SLO)
    counts = []
    for rate in (0.01, 1.0, 10.0, 20.0, 21.0, 40.0, 400.0):
        found = size_arrangement((tier,), (H200[2],), rate)
        assert not isinstance(found, Infeasible)
        counts.append(found.gpus)
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_size_arrangement_headroom_lowers_capacity() -> None:
    tier = aggregated_tier(H200[2], CHAT, SLO)
    line = float(slo_capacity_per_s(build_profile(tier), 1, admission=False)[0])
    for headroom, replicas in ((0.0, 1), (0.1, 2)):
        found = size_arrangement((tier,), (H200[2],), 0.95 * line, headroom)
        assert not isinstance(found, Infeasible)
        assert found.replicas == (replicas,)


def test_expected_latency_at_overload_is_infinite() -> None:
    tier = aggregated_tier(H200[2], CHAT, SLO)
    assert ttft_quantile_s(tier, 100.0, 1, 0.5) == math.inf
    assert predict_latency((tier,), 100.0, (1,)).p95_tpot_s == math.inf
    assert plan_attainment((tier,), 100.0, (1,)) == 0.0


def test_goodput_curve_peaks_and_stays_below_arrivals() -> None:
    found = make_plan(plan_request())
    assert isinstance(found, FleetPlan)
    points = goodput_curve(found.chosen)
    alone = [p.without_admission_per_s for p in points]
    assert max(alone) > alone[-1]
    assert all(p.with_admission_per_s <= p.rate_per_s * (1 + 1e-9) for p in points)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"rate_per_s": math.nan}, "rate_per_s"),
        ({"bytes_per_s": -1.0}, "bytes_per_s"),
        ({"itl_limit_s": 0.0}, "itl_limit_s"),
        ({"machines": []}, "machines"),
    ],
)
def test_plan_request_invalid_value_raises(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(plan_request(), **changed)  # type: ignore[arg-type]


# ---------------------------------------------------------------- settings


def test_plan_itl_target_reduces_chunk_size_first() -> None:
    """Recorded with one prompt in ten of 8,000 tokens: steps of 105 ms at a budget of 4,096, of 31 ms at 1,024."""
    found = make_plan(plan_request(itl_limit_s=0.05))
    assert isinstance(found, FleetPlan)
    assert not found.chosen.disaggregated
    assert found.settings[0].max_num_batched_tokens == 1024
    gap_s = found.settings[0].max_itl_s
    assert gap_s is not None
    assert gap_s <= 0.05


def test_plan_tight_itl_target_is_disaggregated() -> None:
    found = make_plan(plan_request(Slo(0.95, 0.5, 0.0, 0.015), itl_limit_s=0.02))
    assert isinstance(found, FleetPlan)
    assert found.chosen.disaggregated
    assert "the ITL limit of 20 ms" in found.reasons[0]


def test_settings_budget_excludes_saturated_chunks() -> None:
    heavy = workloads.lognormal_workload(4000, 100)
    tiers = [aggregated_tier(m, heavy, SLO) for m in H200]
    chosen = engine_settings.choose_token_budget(tiers)
    assert chosen is not None
    assert chosen.limits.token_budget > 1024
    rate = float(slo_capacity_per_s(build_profile(chosen), 1)[0])
    assert engine_settings.budget_fill(chosen, rate) <= engine_settings.MAX_BUDGET_FILL
    assert engine_settings.choose_token_budget(tiers, itl_limit_s=1e-4) is None


def test_max_sequences_follows_tpot_target_and_kv() -> None:
    even, tight = (aggregated_tier(H200[2], CHAT, Slo(0.95, 0.5, 0.0, t)) for t in (0.05, 0.01))
    assert engine_settings.max_sequences(tight) < engine_settings.max_sequences(even) <= 256
    small = replace(H200[2], limits=replace(H200[2].limits, kv_tokens=20_000))
    assert engine_settings.max_sequences(aggregated_tier(small, CHAT, SLO)) == 16
    assert engine_settings.max_sequences(even) % engine_settings.GRAPH_SIZE_STEP == 0


def test_speculation_gain_matches_measurements() -> None:
    """Gains of EAGLE-3 on an H200: 1.86 times the tokens at a batch of 1, 1.50 at 64, 1.22 at 128."""
    model = StepModel(4.889e-3, -1.39e-3, 2.111e-5, 1.373e-9, 1.529e-5, 3.165e-8)
    for batch, gain in ((1, 1.86), (8, 1.89), (32, 1.81), (64, 1.50), (128, 1.22)):
        assert engine_settings.advise_speculation(model, batch).gain == pytest.approx(gain, rel=0.03)
    assert engine_settings.advise_speculation(model, 20).max_batch == 128
    assert engine_settings.advise_speculation(model, 20).enabled
    assert not engine_settings.advise_speculation(model, 129).enabled
    assert engine_settings.advise_speculation(model, 4, accepted_tokens=1.2).max_batch == 0
    assert not engine_settings.advise_speculation(model, 4, mixture=True).enabled
    gains = [engine_settings.advise_speculation(model, batch).gain for batch in range(1, 1000, 7)]
    assert gains == sorted(gains, reverse=True)
    with pytest.raises(ValueError, match="accepted_tokens"):
        engine_settings.advise_speculation(model, 4, accepted_tokens=5)


def test_cuda_graphs_are_given_for_mixture_models_only() -> None:
    for tokens in (1024, 3000, 8192):
        found = engine_settings.choose_cuda_graphs(tokens, mixture=True)
        assert found is not None
        assert found.sizes[-1] == tokens
        assert list(found.sizes) == sorted(set(found.sizes))
        assert max(b / a for a, b in pairwise(found.sizes) if b > engine_settings.DEFAULT_GRAPH_TOKENS) < 1.13
        assert found.args == (vllm.CUDA_GRAPH_SIZES, *map(str, found.sizes))
        assert engine_settings.choose_cuda_graphs(tokens, mixture=False) is None
    assert engine_settings.choose_cuda_graphs(16384, mixture=True) == engine_settings.choose_cuda_graphs(
        engine_settings.MAX_GRAPH_TOKENS, mixture=True
    )
    assert engine_settings.choose_cuda_graphs(engine_settings.DEFAULT_GRAPH_TOKENS, mixture=True) is None, (
        "the engine's own do"
    )


def test_plan_mixture_decode_engine_needs_no_extra_graphs() -> None:
    mixed = [replace(machine, mixture_of_experts=True) for machine in H200]
    found = make_plan(plan_request(Slo(0.95, 0.5, 0.0, 0.015), itl_limit_s=0.02, machines=[mixed]))
    assert isinstance(found, FleetPlan)
    prefill, decode = found.settings
    assert prefill.cuda_graphs is not None
    assert prefill.cuda_graphs.sizes[-1] == engine_settings.MAX_GRAPH_TOKENS < prefill.max_num_batched_tokens
    assert decode.max_num_seqs <= engine_settings.DEFAULT_GRAPH_TOKENS
    assert decode.cuda_graphs is None


# ---------------------------------------------------------------- machines


@pytest.mark.parametrize("name", sorted(known_models.KNOWN_CONFIGS))
def test_known_models_can_all_be_planned(name: str) -> None:
    shape = known_models.find_shape(f"Somebody/{name}-Instruct")
    machine = machine_from_roofline(shape, ACCELERATORS["B200"], 4, 8192)
    assert machine is not None
    assert machine.gpus == 4
    assert known_models.find_shape(name, "fp8").memory_bytes < shape.memory_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Llama-3.1-8B", 8.03e9), ("Llama-3.3-70B", 70.6e9), ("Qwen3-32B", 32.8e9), ("Qwen3-30B-A3B", 30.5e9)],
)
def test_known_models_have_published_parameter_count(name: str, parameters: float) -> None:
    shape = model_shape(known_models.KNOWN_CONFIGS[name])
    assert shape.layer_parameters + 2 * shape.output_parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "why"), [("deepseek-ai/DeepSeek-R1", "MLA"), ("gpt-oss-120b", "window"), ("x", "known")]
)
def test_known_models_invalid_name_raises(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        known_models.find_shape(name)


def test_machine_from_roofline_weights_exceeding_memory_is_none() -> None:
    assert machine_from_roofline(known_models.find_shape("Llama-3.3-70B"), ACCELERATORS["L4"], 4, 8192) is None


def test_machine_model_heat_follows_planned_batch() -> None:
    """A looser target means a larger batch, more heat and a steeper line; cool and even ones stay as measured."""
    machine: Machine = replace(H200[2], cool_share=0.25, hot_share=0.5)
    tight, loose = (machine.serve_model(CHAT, target) for target in (0.006, 0.05))
    assert tight.prefill_token_s == pytest.approx(machine.cool.prefill_token_s)
    assert tight.sequence_s == pytest.approx(machine.cool.sequence_s)
    assert loose.prefill_token_s > machine.hot.prefill_token_s * 0.99
    assert loose.sequence_s > machine.hot.sequence_s
    assert machine.decode_model(CHAT, 0.05).prefill_token_s == machine.cool.prefill_token_s
    assert [one.limits.token_budget for one in H200] == list(TOKEN_BUDGETS)
