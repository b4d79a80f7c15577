"""A plan is simulated before it is printed, and gets the replicas that the simulated fleet needs."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from plimsoll.cli import plan_output
from plimsoll.cli.main import main
from plimsoll.cli.output import Screen
from plimsoll.cli.plan import profile_machines
from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.core.planning import known_models, workloads
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanRequest, make_plan
from plimsoll.core.planning.machine_model import machine_from_roofline
from plimsoll.core.slo import Slo
from plimsoll.sim import plan_simulation, profile
from plimsoll.sim.plan_simulation import simulate_plan

CHAT = ["--rate", "30", "--prompt-tokens", "1200", "--output-tokens", "220"]
MIXTURE = ["plan", "--hardware", "h200-30b-a3b", "--ttft", "500ms", "--tpot", "30ms", *CHAT]


def plan_of(hardware: str, slo: Slo, rate_per_s: float, **differing: float) -> FleetPlan:
    machines = profile_machines(profile.load(hardware), 1)
    request = PlanRequest(workloads.lognormal_workload(1200, 220), slo, rate_per_s, [machines])
    plan = make_plan(replace(request, **differing))  # type: ignore[arg-type]
    assert isinstance(plan, FleetPlan)
    return plan


def test_replicas_are_added_where_the_model_is_too_optimistic(capsys: pytest.CaptureFixture[str]) -> None:
    """On this mixture, prompts slow the sequences of their step, which the model leaves out."""
    assert main([*MIXTURE, "--no-simulation"]) == 0
    alone = capsys.readouterr().out
    assert "3 x 1 GPU serve" in alone
    assert "not simulated: --no-simulation" in alone
    assert main([*MIXTURE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    simulated = document["simulated"]
    assert simulated["model_replicas"] == {"serve": 3}
    assert simulated["model_within_slo"] < 0.95 <= simulated["within_slo"]
    assert document["gpus"] == document["tiers"]["serve"]["replicas"] == 4
    # By the model a pair would take 3 GPUs now, and so it is simulated too: the reasons are those of what was seen.
    assert document["other"]["gpus"] > 4
    assert document["reasons"][0].endswith("this takes 4 GPUs (4 x 1)")


def test_plan_that_meets_its_slo_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "h200-8b", "--ttft", "500ms", "--tpot", "50ms", *CHAT]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("aggregated: 2 x 1 GPU serve, 2 GPUs")
    assert "of 2,925 requests within the SLO (target 95%), with admission control" in shown
    assert "the model alone" not in shown


def test_pair_and_roofline_are_simulated() -> None:
    """Both tiers of a pair keep their own chunk budgets."""
    pair = plan_of("h200-8b", Slo(0.95, 0.5, 0.0, 0.01), 24.0)
    assert pair.chosen.disaggregated
    assert simulate_plan(pair, profile.load("h200-8b"))[1].within_slo >= 0.95
    machine = machine_from_roofline(known_models.find_shape("Llama-3.1-8B", None, 2.0), ACCELERATORS["H200"], 1, 8192)
    assert machine is not None
    request = PlanRequest(workloads.lognormal_workload(1200, 220), Slo(0.95, 0.5, 0.0, 0.05), 10.0, [[machine]])
    by_name = make_plan(request)
    assert isinstance(by_name, FleetPlan)
    assert simulate_plan(by_name, None)[1].within_slo >= 0.95


def test_simulated_fleet_below_its_slo_is_reported() -> None:
    plan = plan_of("h200-30b-a3b", Slo(0.95, 0.5, 0.0, 0.03), 30.0)
    lines: list[str] = []
    same, seen = simulate_plan(plan, profile.load("h200-30b-a3b"), max_steps=0, report=lines.append)
    assert lines == ["simulating 3,000 requests at 3 serve replicas"]
    assert same.chosen.counts == seen.model_replicas
    assert seen.within_slo == seen.model_within_slo < 0.95
    lines = plan_output.plan_lines(same, seen, None, Screen.for_stream(StringIO()))
    assert "  do not trust this plan: measure a hardware profile, or relax the SLO" in lines


def test_cached_prompts_are_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--hardware", "h200-8b", "--tpot", "50ms", *CHAT, "--cached-share", "0.5", "--json"]
    assert main(words) == 0
    assert "--cached-share" in json.loads(capsys.readouterr().out)["simulated"]["unavailable"]


@pytest.mark.parametrize("cv2", [0.0, 1.0, 4.0])
def test_drawn_requests_have_planned_rate_lengths_and_variation(cv2: float) -> None:
    plan = plan_of("h200-8b", Slo(0.95, 0.5, 0.0, 0.05), 30.0, arrival_cv2=cv2)
    drawn = plan_simulation._draw_requests(plan, 20_000, 30.0)
    gaps = np.diff([one.at_s for one in drawn])
    assert 1 / gaps.mean() == pytest.approx(30.0, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(cv2, rel=0.15, abs=1e-6)
    assert np.mean([one.prompt_tokens for one in drawn]) == pytest.approx(1200, rel=0.05)
    assert np.mean([one.output_tokens for one in drawn]) == pytest.approx(220, rel=0.05)


def test_rare_requests_are_simulated_without_the_idle_time() -> None:
    """At one request in hours, a year of an idle fleet would be simulated, in minutes."""
    raised = plan_simulation._without_idle_time(0.0001, 3000, 20.0)
    assert 3000 / raised <= 20_000
    assert plan_simulation._without_idle_time(0.0001, 3000, 0.02) == pytest.approx(0.002), "no more than few meet"
    assert plan_simulation._without_idle_time(5.0, 3000, 20.0) == 5.0


def test_part_of_a_large_fleet_is_simulated_at_the_same_load() -> None:
    """A part has less room for bursts, so its share is not too high."""
    plan = plan_of("h200-8b", Slo(0.9, 0.5, 0.0, 0.05), 400.0)
    assert max(plan.chosen.replicas) > 16
    same, seen = simulate_plan(plan, profile.load("h200-8b"))
    assert same.chosen.counts == seen.model_replicas
    assert seen.within_slo >= 0.9
