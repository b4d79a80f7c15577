"""The document of a service: as it was decided, from what is remembered, and never more than JSON can hold."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plimsoll.controllers.autoscale.decision_document import build_document
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingDecision, ScalingLimit, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from tests.core.signal_readings import NOW_S
from tests.core.test_autoscaler import START_S, Fleet, scaling_spec, service_metrics
from tests.core.test_signals import serving

KEY = ("team", "chat")


def written_document(fleet: Fleet, horizon_s: float | None = None) -> dict[str, Any]:
    """The document after it was written and read."""
    found = build_document(fleet.service, KEY, fleet.now_s, horizon_s)
    read: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    assert read == found
    return read


def scaled_up_fleet() -> Fleet:
    """A fleet that has met a step in its load."""
    fleet = Fleet(scaling_spec())
    fleet.run(service_metrics(2.0, Role.SERVE), 60)
    fleet.service.record_startup("serve", [("pull", 9.0), ("load", 20.0)])
    fleet.run(service_metrics(60.0, Role.SERVE), 15)
    return fleet


def test_document_lists_last_tick_first_then_changes() -> None:
    fleet = scaled_up_fleet()
    found = written_document(fleet)
    assert found["version"] == 2
    assert found["service"] == "team/chat"
    first, *before = found["decisions"]
    assert first["at"] == found["at"]
    assert first["binding"] == "serve"
    assert first["tiers"]["serve"]["before"] == first["tiers"]["serve"]["recommended"] == fleet.replicas["serve"]
    assert len(before) == len(fleet.service.decisions) >= 1
    assert all(one["tiers"]["serve"]["before"] != one["tiers"]["serve"]["replicas"] for one in before)
    assert [one["at"] for one in before] == sorted((one["at"] for one in before), reverse=True)


def test_document_lists_changing_last_decision_once() -> None:
    fleet = Fleet(scaling_spec(), arrives=False)
    while not fleet.service.decisions:
        fleet.tick(service_metrics(60.0, Role.SERVE))
    assert fleet.service.last_decision is fleet.service.decisions[-1]
    assert len(written_document(fleet)["decisions"]) == 1


def test_document_tier_equals_decision() -> None:
    fleet = scaled_up_fleet()
    document = written_document(fleet)["decisions"][-1]["tiers"]["serve"]
    decided = fleet.service.decisions[0].decision.tiers["serve"]
    assert document["counterfactual"] == decided.counterfactual
    assert document["reason"] == decided.summary
    assert document["steps"] == [{"name": s.name, "replicas": s.replicas, "reason": s.reason} for s in decided.steps]
    assert [step["name"] for step in document["steps"]][:2] == ["demand", "sizing"]
    assert (document["limits"], document["frozen"], document["overdue"], document["etas_s"]) == ([], False, [], [])


def test_document_figures_are_of_last_tick() -> None:
    fleet = scaled_up_fleet()
    tier, document = fleet.service.tiers["serve"], written_document(fleet)["tiers"]["serve"]
    assert tier.engines.model is not None
    assert document["model"]["base_s"] == pytest.approx(tier.engines.model.base_s, rel=1e-5)
    assert document["model"]["calibrated"] is False
    assert document["model"]["summary"].startswith("not known")
    assert set(document["model"]) - {"calibrated", "summary", "quantile"} == {
        "base_s", "any_prefill_s", "prefill_token_s", "prefill_pair_s", "sequence_s", "cached_token_s",
    }  # fmt: skip
    assert document["engine"] == {
        "model": "model unknown",
        "accelerator": "some GPU",
        "parallelism": "1 GPU",
        "engine_version": "vllm 0.32.0",
    }
    words = written_document(fleet)["decisions"][0]["tiers"]["serve"]["steps"]
    assert f"SLO capacity {document['capacity']['capacity_per_s']:.3g} req/s" in words[1]["reason"]
    assert f"forecast {document['forecast']['work']:.3g} GPU-s/s" in words[0]["reason"]
    assert sum(document["forecast"]["parts"].values()) == pytest.approx(document["forecast"]["work"], rel=1e-4)
    assert document["capacity"]["infeasible"] is None
    assert document["startup"]["startups"] == 1.0
    assert document["startup"]["restart"] is None
    assert document["startup"]["variant"] == {"model": "", "image": "", "gpus": ""}
    assert [phase["name"] for phase in document["startup"]["phases"]] == ["pull", "load", "total"]
    assert all(phase["p50_s"] < phase["p90_s"] < phase["p99_s"] for phase in document["startup"]["phases"])


def test_document_service_metrics_have_age() -> None:
    _, said = serving()
    found = build_document(ServiceState.for_roles(["serve"]), KEY, NOW_S + 61.0, metrics=(NOW_S + 60.25, said))[
        "metrics"
    ]
    gateways, tier = found["gateways"], found["tiers"]["serve"]
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["at"].endswith(".250Z")
    assert (gateways["count"], gateways["coverage"], gateways["age_s"]) == (1, 1.0, 0.0)
    assert gateways["rate_per_s"] == pytest.approx(4.0)
    assert gateways["ttft_s"] == pytest.approx(0.2, rel=0.05)
    assert (gateways["rejected_share"], gateways["queued"], gateways["in_flight"]) == (0.0, 0.0, 0.0)
    assert tier == {"coverage": 1.0, "silent": "", "age_s": 0.0, "running": 12.0, "kv_used": 0.3}
    assert found["requests"]["mean_prompt_tokens"] == pytest.approx(300.0, rel=0.01)
    assert found["requests"]["cached_tokens"] == pytest.approx(75.0, rel=0.01)
    assert found["requests"]["output_tokens"] == pytest.approx(150.0, rel=0.01)


def test_document_missing_metrics_have_reason() -> None:
    found = build_document(ServiceState.for_roles(["serve"]), KEY, START_S, metrics=(START_S, ServiceMetrics()))[
        "metrics"
    ]
    assert found["gateways"]["age_s"] is None
    assert (
        found["gateways"]["rate_per_s"]
        == found["requests"]
        == {"unknown": "neither gateways nor engines have reported it yet"}
    )
    assert build_document(ServiceState.for_roles(["serve"]), KEY, START_S)["metrics"] is None


def test_document_forecast_uses_requested_horizon() -> None:
    assert written_document(scaled_up_fleet(), horizon_s=600.0)["tiers"]["serve"]["forecast"]["horizon_s"] == 600.0


def test_document_unknown_engine_has_reasons_without_figures() -> None:
    fleet = Fleet(scaling_spec(), about=None)
    fleet.run(service_metrics(40.0, Role.SERVE), 15)
    document = written_document(fleet)["tiers"]["serve"]
    why = {"unknown": "no engine of the tier has reported its configuration yet"}
    assert (document["engine"], document["model"], document["capacity"], document["forecast"]) == (None, why, why, why)
    assert document["startup"]["startups"] == 0.0


def test_document_known_engine_waits_for_request_lengths() -> None:
    fleet = Fleet(scaling_spec())
    fleet.run(replace(service_metrics(40.0, Role.SERVE), workload=Unavailable("none yet")), 5)
    document = written_document(fleet)["tiers"]["serve"]
    assert document["engine"] is not None
    assert document["capacity"] == {"unknown": "no completed request has shown the lengths of prompts and outputs yet"}


def test_document_exists_before_first_tick_and_without_slo() -> None:
    assert build_document(ServiceState.for_roles(["prefill", "decode"]), KEY, START_S)["decisions"] == []
    fleet = Fleet(scaling_spec(slo=None))
    fleet.run(service_metrics(40.0, Role.SERVE), 15)
    document = written_document(fleet)
    assert document["decisions"][0]["tiers"]["serve"]["replicas"] == 1
    assert "unknown" in document["tiers"]["serve"]["forecast"]


def test_document_after_restart_keeps_learned_model() -> None:
    fleet = scaled_up_fleet()
    again = Fleet(scaling_spec(), about=None)
    restore_service_state(again.service, dump_service_state(fleet.service))
    again.tick(service_metrics(60.0, Role.SERVE))
    document = written_document(again)["tiers"]["serve"]
    assert document["model"]["base_s"] == written_document(fleet)["tiers"]["serve"]["model"]["base_s"]
    assert "unknown" in document["capacity"]


def test_document_infeasible_tpot_shows_feasible_target() -> None:
    fleet = Fleet(scaling_spec(slo=Slo(0.95, tpot_s=0.001)))
    fleet.run(service_metrics(5.0, Role.SERVE), 15)
    document = written_document(fleet)["tiers"]["serve"]["capacity"]["infeasible"]
    assert document["constraint"] == "TPOT"
    assert document["feasible"]["tpot_s"] > 0.001
    assert document["feasible"]["ttft_s"] is None
    assert document["summary"].startswith("no replica count meets the SLO (TPOT violates it), sized for TPOT ")
    assert "e2e_s" not in document["feasible"]
    assert "itl_s" not in document["feasible"]


def test_document_infeasible_e2e_shows_feasible_target() -> None:
    fleet = Fleet(scaling_spec(slo=Slo(0.95, 0.5, e2e_s=0.6)))
    fleet.run(service_metrics(5.0, Role.SERVE), 15)
    document = written_document(fleet)["tiers"]["serve"]["capacity"]["infeasible"]
    assert document["constraint"] == "e2e"
    assert document["feasible"]["e2e_s"] > 0.6
    assert document["summary"].startswith("no replica count meets the SLO (e2e violates it), sized for TTFT 500 ms and")


def test_document_infeasible_itl_shows_feasible_target() -> None:
    fleet = Fleet(scaling_spec(slo=Slo(0.95, 2.0, itl_s=0.001)))
    fleet.run(service_metrics(5.0, Role.SERVE), 15)
    document = written_document(fleet)["tiers"]["serve"]["capacity"]["infeasible"]
    assert document["constraint"] == "itl"
    assert document["feasible"]["itl_s"] > 0.001
    assert "sized for TTFT 2 s and itl " in document["summary"]


def test_document_recommendation_differs_from_set_replicas() -> None:
    fleet = Fleet(scaling_spec(mode=ScalingMode.RECOMMEND))
    fleet.run(service_metrics(60.0, Role.SERVE), 15)
    document = written_document(fleet)["decisions"][0]["tiers"]["serve"]
    assert document["replicas"] == 1 < document["recommended"]


def test_document_lists_both_tiers_of_pair() -> None:
    fleet = Fleet(scaling_spec(tiers={"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}))
    fleet.run(service_metrics(5.0, Role.PREFILL, Role.DECODE), 15)
    document = written_document(fleet)
    assert list(document["tiers"]) == list(document["decisions"][0]["tiers"]) == ["prefill", "decode"]


HOSTILE = [
    TierDecision(1, (DecisionStep("s", 1, "{}", ("{0} {evil} \x1b[2J \ud800 \U0001f600",)),)),
    TierDecision(1, (DecisionStep("s", 1, "{:.3g} and {:.0f}", (math.nan, math.inf)),)),
    TierDecision(1, (DecisionStep("s", 1, "said"),), etas_s=(math.inf, -math.inf, math.nan, 1e308)),
    TierDecision(1, (DecisionStep("s", 1, "said"),), etas_s=(float(np.float64(1.5)), np.float64(2.5))),
    TierDecision(
        1, (DecisionStep("s", 1, "said"),), limits=tuple(ScalingLimit), overdue=("a" * 5000,), counterfactual=""
    ),
    TierDecision(2**70, (DecisionStep("", 0, ""),), previous_replicas=0, recommended=None),
]


@pytest.mark.parametrize("tier", HOSTILE)
def test_document_of_hostile_decision_is_valid_json(tier: TierDecision) -> None:
    fleet = scaled_up_fleet()
    fleet.service.last_decision = TimedDecision(
        START_S, ScalingDecision({"serve": tier, "gone": tier}, None, DecisionState())
    )
    fleet.service.decisions = deque(
        [fleet.service.last_decision, TimedDecision(0.0, fleet.service.last_decision.decision)]
    )
    document = written_document(fleet)["decisions"]
    assert len(document) == 2
    assert document[1]["at"] == "1970-01-01T00:00:00Z"
    assert all(eta is None or math.isfinite(eta) for eta in document[0]["tiers"]["gone"]["etas_s"])
