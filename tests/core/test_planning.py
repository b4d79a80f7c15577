"""What a plan decides, and that it decides as recorded engines did."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from bench.planning import cases
from plimsoll.cli.plan import measured
from plimsoll.core.forecast import Unknown
from plimsoll.core.knee import Constraint, profile
from plimsoll.core.latency import StepModel
from plimsoll.core.load_line import slo_rate
from plimsoll.core.planning import mix, settings, shapes
from plimsoll.core.planning.arrange import aggregated, arrange, handover_s, pair, pays
from plimsoll.core.planning.expect import expected, kept, ttft_s
from plimsoll.core.planning.machine import BUDGETS, Machine, of_shape
from plimsoll.core.planning.plan import NoPlan, Plan, Question, curve, plan
from plimsoll.core.roofline import ACCELERATORS, model_shape
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo
from plimsoll.sim import profile as profiles

CHAT = mix.lognormal(1200, 220)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
H200 = measured(profiles.load("h200-8b"), 1)


def asked(slo: Slo = SLO, rate: float = 24.0, **more: object) -> Question:
    return replace(Question(CHAT, slo, rate, [H200]), **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the mix


def test_lognormal_workload_keeps_means_and_spread() -> None:
    w = mix.lognormal(4000, 100, 0.4, 0.5, cached_share=0.25)
    assert w.mean(w.prompt_tokens) == pytest.approx(4000)
    assert w.mean(w.cached_tokens) == pytest.approx(1000)
    assert w.mean(w.output_tokens) == pytest.approx(100)
    assert w.scv(w.prompt_tokens) == pytest.approx(math.exp(0.4**2) - 1, rel=0.03)
    both = w.mean(w.prompt_tokens * w.output_tokens)
    assert both == pytest.approx(4000 * 100, rel=0.02)  # independent


def test_busiest_window_returns_window_of_highest_rate() -> None:
    quiet, busy = np.arange(0, 600, 10.0), np.arange(600, 900, 0.5)
    found = mix.busiest(np.concatenate((quiet, busy, np.arange(900, 1500, 10.0))))
    assert (found.first, found.until, found.rate_per_s) == (60, 660, 2.0)
    assert found.gap_cv2 == 1.0
    assert mix.busiest(np.arange(0, 10, 0.5)).rate_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("arrivals", [[], [1.0], [3.0, 3.0], [2.0, 1.0]])
def test_busiest_window_without_rate_raises(arrivals: list[float]) -> None:
    with pytest.raises(ValueError, match="arrivals_s"):
        mix.busiest(arrivals)


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
            found = cases.planned(row, Slo(0.95, ttft, 0.0, tpot))
            assert isinstance(found, Plan)
            assert not found.chosen.disaggregated, (row["rate_per_s"], name)


def test_plan_recorded_winning_pair_is_disaggregated() -> None:
    """Chat at 24 requests a second, 500 ms and 10 ms: 82 % of requests against 100 % of the pair's."""
    [row] = [
        one for one in cases.load("h200_pairs.json")["rows"] if one["engines"] == "pd128" and one["rate_per_s"] == 24
    ]
    assert row["kept"]["500/10"] > 0.99
    found = cases.planned(row, Slo(0.95, 0.5, 0.0, 0.01))
    assert isinstance(found, Plan)
    assert found.chosen.replicas == (1, 1)
    assert "3 GPUs" in found.why[0]


def test_plan_slow_kv_fabric_is_aggregated() -> None:
    """TCP at 0.47 GB/s is what pods get that have no process namespace in common."""
    found = plan(asked(Slo(0.95, 0.5, 0.0, 0.01), bytes_per_s=0.47e9))
    assert isinstance(found, Plan)
    assert not found.chosen.disaggregated
    assert "moving a prompt token takes" in found.why[0]
    verdict = pays(H200[0], CHAT, 0.47e9)
    assert not isinstance(verdict, Unknown)
    assert not verdict.pays


def test_handover_s_matches_measurements() -> None:
    """One request at a time, blocks of 128: 16 to 31 ms for 128 to 8,192 tokens."""
    w = mix.lognormal(1024, 10, 0.0, 0.0)
    for tokens, seen_ms in ((128, 16.0), (1024, 18.0), (2048, 20.0), (4096, 25.0), (8192, 31.0)):
        one = mix.lognormal(tokens, 10, 0.0, 0.0)
        assert seen_ms <= 1e3 * one.mean(handover_s(H200[0], one, 100e9)) <= seen_ms + 9.5
    assert w.mean(handover_s(H200[0], w, 1e9)) > 0.1


def test_plan_without_ttft_target_is_aggregated() -> None:
    found = plan(asked(Slo(0.95, tpot_s=0.05)))
    assert isinstance(found, Plan)
    assert "TTFT target" in found.why[0]


def test_expected_latency_meets_slo() -> None:
    for slo in (SLO, Slo(0.95, 0.5, 0.0, 0.01)):
        found = plan(asked(slo))
        assert isinstance(found, Plan)
        times = found.expected
        assert times.p95_ttft_s is not None
        assert times.p95_tpot_s is not None
        assert times.p95_ttft_s <= 0.5 * 1.01
        assert times.p95_tpot_s <= (slo.tpot_s or 0) * 1.01
        assert kept(found.chosen.tiers, 24.0, found.chosen.replicas) >= 0.95


def test_size_arrangement_pair_meets_share_jointly() -> None:
    tiers = pair(H200[-1], H200[0], CHAT, Slo(0.95, 0.2, 0.0, 0.015), 100e9)
    found = arrange(tiers, (H200[-1], H200[0]), 60.0)
    assert not isinstance(found, Infeasible)
    assert kept(tiers, 60.0, found.replicas) >= 0.95
    assert found.load_line_per_s >= 60.0
    assert kept(tiers, found.load_line_per_s * 1.02, found.replicas) < 0.95


# ---------------------------------------------------------------- nonsense and edges


def test_plan_infeasible_tpot_names_constraint() -> None:
    found = plan(asked(Slo(0.95, 0.5, 0.0, 0.003)))
    assert isinstance(found, NoPlan)
    assert found.found is not None
    assert found.found.constraint is Constraint.TPOT
    assert found.found.feasible is not None
    assert (found.found.feasible.tpot_s or 0) > 0.003


@pytest.mark.parametrize("prompt", [500, 6000, 6500, 20000])
@pytest.mark.parametrize("slo", [SLO, Slo(0.9, 0.3, 0.05, 0.02), Slo(0.95, 0.01)])
def test_plan_meets_slo_or_names_feasible_targets(prompt: int, slo: Slo) -> None:
    """Who misses alone counts as missed, and no fleet is the answer where too many do."""
    asked_for = asked(slo, workload=mix.lognormal(prompt, 220))
    found = plan(asked_for)
    if isinstance(found, NoPlan):
        assert found.found is not None
        assert found.found.feasible is not None
        assert found.found.feasible != slo
        found = plan(replace(asked_for, slo=found.found.feasible))
    assert isinstance(found, Plan)
    chosen = found.chosen
    assert kept(chosen.tiers, 24.0, chosen.replicas) >= slo.share
    assert math.prod(sizing.attained for sizing in chosen.sizings) >= slo.share
    assert all(sizing.attained <= 1 - sizing.infeasible_alone + 1e-12 for sizing in chosen.sizings)
    assert chosen.load_line_per_s >= 24.0 * (1 - 1e-9)


def test_plan_pair_for_long_prompts_is_found() -> None:
    """A prefill tier that hardly keeps its share when idle leaves the decode tier next to nothing to miss."""
    found = plan(asked(Slo(0.95, 12.342263485964853), workload=mix.lognormal(50_000, 220)))
    assert isinstance(found, Plan)
    assert found.chosen.disaggregated
    assert found.chosen.gpus < 100
    assert math.prod(sizing.attained for sizing in found.chosen.sizings) >= 0.95


def test_plan_prompts_above_max_model_len_count_as_missed() -> None:
    w = asked().workload
    longest = float(w.quantile(w.prompt_tokens + w.output_tokens, 0.97))
    found = plan(asked(max_model_len=longest))
    assert isinstance(found, Plan)
    [tier], [sizing] = found.chosen.tiers, found.chosen.sizings
    assert float((tier.workload.prompt_tokens + tier.workload.output_tokens).max()) <= longest
    assert found.question.too_long == pytest.approx(7 / 256)
    assert sizing.infeasible_alone == pytest.approx(7 / 256)
    assert 0.95 <= sizing.attained <= 1 - 7 / 256 + 1e-12
    refused = plan(asked(Slo(0.98, 0.5, 0.0, 0.05), max_model_len=longest))
    assert isinstance(refused, NoPlan)
    assert "max_model_len" in refused.why[0]


def test_plan_advises_rdma_only_if_it_helps() -> None:
    small = [replace(machine, kv_bytes_per_token=1e7) for machine in H200]
    for bytes_per_s, advised in ((50e9, False), (25e9, True)):
        found = plan(asked(machines=[small], bytes_per_s=bytes_per_s))
        assert isinstance(found, Plan)
        assert "moving a prompt token takes" in found.why[0]
        assert ("RDMA" in found.why[0]) is advised


def test_plan_model_extrapolates_heat_shares() -> None:
    """A base that heat brings to nothing takes with it what a prefill takes off it."""
    machine = H200[2]
    odd = replace(machine, cool=replace(machine.hot, base_s=1.0), hot_share=0.1, cool_share=0.05)
    assert plan(asked(machines=[[odd]]))


def test_size_arrangement_more_load_never_needs_fewer_gpus() -> None:
    tier = aggregated(H200[2], CHAT, SLO)
    counts = []
    for rate in (0.01, 1.0, 10.0, 20.0, 21.0, 40.0, 400.0):
        found = arrange((tier,), (H200[2],), rate)
        assert not isinstance(found, Infeasible)
        counts.append(found.gpus)
    assert counts == sorted(counts)
    assert counts[0] == 1


def test_size_arrangement_headroom_lowers_capacity() -> None:
    tier = aggregated(H200[2], CHAT, SLO)
    line = float(slo_rate(profile(tier), 1, admission=False)[0])
    for headroom, replicas in ((0.0, 1), (0.1, 2)):
        found = arrange((tier,), (H200[2],), 0.95 * line, headroom)
        assert not isinstance(found, Infeasible)
        assert found.replicas == (replicas,)


def test_expected_latency_at_overload_is_infinite() -> None:
    tier = aggregated(H200[2], CHAT, SLO)
    assert ttft_s(tier, 100.0, 1, 0.5) == math.inf
    assert expected((tier,), 100.0, (1,)).p95_tpot_s == math.inf
    assert kept((tier,), 100.0, (1,)) == 0.0


def test_goodput_curve_peaks_and_stays_below_arrivals() -> None:
    found = plan(asked())
    assert isinstance(found, Plan)
    points = curve(found.chosen)
    alone = [p.open_per_s for p in points]
    assert max(alone) > alone[-1]
    assert all(p.gated_per_s <= p.rate_per_s * (1 + 1e-9) for p in points)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"rate_per_s": math.nan}, "rate_per_s"),
        ({"bytes_per_s": -1.0}, "bytes_per_s"),
        ({"gap_s": 0.0}, "gap_s"),
        ({"machines": []}, "machines"),
    ],
)
def test_plan_request_invalid_value_raises(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(asked(), **changed)  # type: ignore[arg-type]


# ---------------------------------------------------------------- settings


def test_plan_itl_target_reduces_chunk_size_first() -> None:
    """Recorded with one prompt in ten of 8,000 tokens: steps of 105 ms at a budget of 4,096, of 31 ms at 1,024."""
    found = plan(asked(gap_s=0.05))
    assert isinstance(found, Plan)
    assert not found.chosen.disaggregated
    assert found.settings[0].max_num_batched_tokens == 1024
    gap_s = found.settings[0].longest_gap_s
    assert gap_s is not None
    assert gap_s <= 0.05


def test_plan_tight_itl_target_is_disaggregated() -> None:
    found = plan(asked(Slo(0.95, 0.5, 0.0, 0.015), gap_s=0.02))
    assert isinstance(found, Plan)
    assert found.chosen.disaggregated
    assert "the gap of 0.02 s" in found.why[0]


def test_settings_budget_excludes_saturated_chunks() -> None:
    heavy = mix.lognormal(4000, 100)
    tiers = [aggregated(m, heavy, SLO) for m in H200]
    chosen = settings.budget(tiers)
    assert chosen is not None
    assert chosen.limits.token_budget > 1024
    rate = float(slo_rate(profile(chosen), 1)[0])
    assert settings.filled(chosen, rate) <= settings.SELDOM
    assert settings.budget(tiers, gap_s=1e-4) is None


def test_max_sequences_follows_tpot_target_and_kv() -> None:
    even, tight = (aggregated(H200[2], CHAT, Slo(0.95, 0.5, 0.0, t)) for t in (0.05, 0.01))
    assert settings.max_sequences(tight) < settings.max_sequences(even) <= 256
    small = replace(H200[2], limits=replace(H200[2].limits, kv_tokens=20_000))
    assert settings.max_sequences(aggregated(small, CHAT, SLO)) == 16
    assert settings.max_sequences(even) % settings.GRAPH_SIZES == 0


def test_speculation_gain_matches_measurements() -> None:
    """Gains of EAGLE-3 on an H200: 1.86 times the tokens at a batch of 1, 1.50 at 64, 1.22 at 128."""
    model = StepModel(4.889e-3, -1.39e-3, 2.111e-5, 1.373e-9, 1.529e-5, 3.165e-8)
    for batch, gain in ((1, 1.86), (8, 1.89), (32, 1.81), (64, 1.50), (128, 1.22)):
        assert settings.speculation(model, batch).gain == pytest.approx(gain, rel=0.03)
    assert settings.speculation(model, 20).up_to_batch == 128
    assert settings.speculation(model, 20).on
    assert not settings.speculation(model, 129).on
    assert settings.speculation(model, 4, accepted=1.2).up_to_batch == 0
    assert not settings.speculation(model, 4, mixture=True).on
    gains = [settings.speculation(model, batch).gain for batch in range(1, 1000, 7)]
    assert gains == sorted(gains, reverse=True)
    with pytest.raises(ValueError, match="accepted"):
        settings.speculation(model, 4, accepted=5)


def test_cuda_graphs_are_given_for_mixture_models_only() -> None:
    for tokens in (1024, 3000, 8192):
        found = settings.graphs(tokens, mixture=True)
        assert found is not None
        assert found.sizes[-1] == tokens
        assert list(found.sizes) == sorted(set(found.sizes))
        assert max(b / a for a, b in pairwise(found.sizes) if b > settings.GRAPHS_ALONE) < 1.13
        assert found.args == (settings.GRAPHS_FLAG, *map(str, found.sizes))
        assert settings.graphs(tokens, mixture=False) is None
    assert settings.graphs(16384, mixture=True) == settings.graphs(settings.GRAPHS_MOST, mixture=True)
    assert settings.graphs(settings.GRAPHS_ALONE, mixture=True) is None, "the engine's own do"


def test_plan_mixture_decode_engine_needs_no_extra_graphs() -> None:
    mixed = [replace(machine, mixture=True) for machine in H200]
    found = plan(asked(Slo(0.95, 0.5, 0.0, 0.015), gap_s=0.02, machines=[mixed]))
    assert isinstance(found, Plan)
    prefill, decode = found.settings
    assert prefill.graphs is not None
    assert prefill.graphs.sizes[-1] == settings.GRAPHS_MOST < prefill.max_num_batched_tokens
    assert decode.max_num_seqs <= settings.GRAPHS_ALONE
    assert decode.graphs is None


# ---------------------------------------------------------------- machines


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_known_models_can_all_be_planned(name: str) -> None:
    shape = shapes.find(f"Somebody/{name}-Instruct")
    machine = of_shape(shape, ACCELERATORS["B200"], 4, 8192)
    assert machine is not None
    assert machine.gpus == 4
    assert shapes.find(name, "fp8").memory_bytes < shape.memory_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Llama-3.1-8B", 8.03e9), ("Llama-3.3-70B", 70.6e9), ("Qwen3-32B", 32.8e9), ("Qwen3-30B-A3B", 30.5e9)],
)
def test_known_models_have_published_parameter_count(name: str, parameters: float) -> None:
    shape = model_shape(shapes.SHAPES[name])
    assert shape.layer_parameters + 2 * shape.output_parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("name", "why"), [("deepseek-ai/DeepSeek-R1", "MLA"), ("gpt-oss-120b", "window"), ("x", "known")]
)
def test_known_models_invalid_name_raises(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        shapes.find(name)


def test_machine_from_roofline_weights_exceeding_memory_is_none() -> None:
    assert of_shape(shapes.find("Llama-3.3-70B"), ACCELERATORS["L4"], 4, 8192) is None


def test_machine_model_heat_follows_planned_batch() -> None:
    """A looser target means a larger batch, more heat and a steeper line; cool and even ones stay as measured."""
    machine: Machine = replace(H200[2], cool_share=0.25, hot_share=0.5)
    tight, loose = (machine.serving(CHAT, target) for target in (0.006, 0.05))
    assert tight.prefill_token_s == pytest.approx(machine.cool.prefill_token_s)
    assert tight.sequence_s == pytest.approx(machine.cool.sequence_s)
    assert loose.prefill_token_s > machine.hot.prefill_token_s * 0.99
    assert loose.sequence_s > machine.hot.sequence_s
    assert machine.decoding(CHAT, 0.05).prefill_token_s == machine.cool.prefill_token_s
    assert [one.limits.token_budget for one in H200] == list(BUDGETS)
