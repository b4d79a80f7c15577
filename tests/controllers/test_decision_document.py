"""The document of a service: as it was decided, from what is remembered, and never more than JSON can hold."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest

from plimsoll.controllers.explain import document
from plimsoll.core.autoscaler import Service, restore, to_dict
from plimsoll.core.autoscaler.service import Told
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Decision, Limit, Mode, State, Step, TierDecision, TierPolicy
from plimsoll.core.signals import Heard
from plimsoll.core.slo import Slo
from tests.core.test_autoscaler import START_S, Fleet, heard, wish
from tests.core.test_signals import NOW_S, serving

KEY = ("team", "chat")


def written_document(fleet: Fleet, horizon_s: float | None = None) -> dict[str, Any]:
    """The document after it was written and read."""
    found = document(fleet.service, KEY, fleet.now_s, horizon_s)
    read: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    assert read == found
    return read


def scaled_up_fleet() -> Fleet:
    """A fleet that has met a step in its load."""
    fleet = Fleet(wish())
    fleet.run(heard(2.0, Role.SERVE), 60)
    fleet.service.started("serve", [("pull", 9.0), ("load", 20.0)])
    fleet.run(heard(60.0, Role.SERVE), 15)
    return fleet


def test_document_lists_last_tick_first_then_changes() -> None:
    fleet = scaled_up_fleet()
    found = written_document(fleet)
    assert found["version"] == 1
    assert found["service"] == "team/chat"
    first, *before = found["decisions"]
    assert first["at"] == found["at"]
    assert first["binding"] == "serve"
    assert first["tiers"]["serve"]["before"] == first["tiers"]["serve"]["recommended"] == fleet.replicas["serve"]
    assert len(before) == len(fleet.service.decisions) >= 1
    assert all(one["tiers"]["serve"]["before"] != one["tiers"]["serve"]["replicas"] for one in before)
    assert [one["at"] for one in before] == sorted((one["at"] for one in before), reverse=True)


def test_document_lists_changing_last_decision_once() -> None:
    fleet = Fleet(wish(), arrives=False)
    while not fleet.service.decisions:
        fleet.tick(heard(60.0, Role.SERVE))
    assert fleet.service.last is fleet.service.decisions[-1]
    assert len(written_document(fleet)["decisions"]) == 1


def test_document_tier_equals_decision() -> None:
    fleet = scaled_up_fleet()
    told = written_document(fleet)["decisions"][-1]["tiers"]["serve"]
    decided = fleet.service.decisions[0].decision.tiers["serve"]
    assert told["counterfactual"] == decided.counterfactual
    assert told["why"] == decided.why
    assert told["steps"] == [{"name": s.name, "replicas": s.replicas, "why": s.why} for s in decided.steps]
    assert [step["name"] for step in told["steps"]][:2] == ["demand", "need"]
    assert (told["limits"], told["held"], told["overdue"], told["etas_s"]) == ([], False, [], [])


def test_document_figures_are_of_last_tick() -> None:
    fleet = scaled_up_fleet()
    tier, told = fleet.service.tiers["serve"], written_document(fleet)["tiers"]["serve"]
    assert tier.model is not None
    assert told["model"]["base_s"] == pytest.approx(tier.model.base_s, rel=1e-5)
    assert told["model"]["known"] is False
    assert told["model"]["words"].startswith("not known")
    assert set(told["model"]) - {"known", "words", "quantile"} == {
        "base_s", "any_prefill_s", "prefill_token_s", "prefill_pair_s", "sequence_s", "cached_token_s",
    }  # fmt: skip
    assert told["engine"] == {
        "model": "model not told",
        "accelerator": "some GPU",
        "parallelism": "1 GPUs",
        "engine_version": "vllm 0.32.0",
    }
    words = written_document(fleet)["decisions"][0]["tiers"]["serve"]["steps"]
    assert f"knee {told['line']['knee_per_s']:.3g} req/s" in words[1]["why"]
    assert f"up to {told['forecast']['work']:.3g} GPU-s/s" in words[0]["why"]
    assert sum(told["forecast"]["parts"].values()) == pytest.approx(told["forecast"]["work"], rel=1e-4)
    assert told["line"]["infeasible"] is None
    assert told["starts"]["seen"] == 1.0
    assert told["starts"]["variant"] == {"model": "", "image": "", "gpus": ""}
    assert [phase["name"] for phase in told["starts"]["phases"]] == ["pull", "load", "whole"]
    assert all(phase["p50_s"] < phase["p90_s"] < phase["p99_s"] for phase in told["starts"]["phases"])


def test_document_service_metrics_have_age() -> None:
    _, said = serving()
    found = document(Service.of(["serve"]), KEY, NOW_S + 61.0, heard=(NOW_S + 60.25, said))["heard"]
    gateways, tier = found["gateways"], found["tiers"]["serve"]
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["at"].endswith(".250Z")
    assert (gateways["count"], gateways["coverage"], gateways["age_s"]) == (1, 1.0, 0.0)
    assert gateways["rate_per_s"] == pytest.approx(4.0)
    assert gateways["ttft_s"] == pytest.approx(0.2, rel=0.05)
    assert (gateways["shed_share"], gateways["held"], gateways["in_flight"]) == (0.0, 0.0, 0.0)
    assert tier == {"coverage": 1.0, "age_s": 0.0, "running": 12.0}
    assert found["requests"]["prompt_tokens"] == pytest.approx(300.0, rel=0.01)
    assert found["requests"]["cached_tokens"] == pytest.approx(75.0, rel=0.01)
    assert found["requests"]["output_tokens"] == pytest.approx(150.0, rel=0.01)


def test_document_missing_metrics_have_reason() -> None:
    found = document(Service.of(["serve"]), KEY, START_S, heard=(START_S, Heard()))["heard"]
    assert found["gateways"]["age_s"] is None
    assert found["gateways"]["rate_per_s"] == found["requests"] == {"unknown": "nothing heard yet"}
    assert document(Service.of(["serve"]), KEY, START_S)["heard"] is None


def test_document_forecast_uses_requested_horizon() -> None:
    assert written_document(scaled_up_fleet(), horizon_s=600.0)["tiers"]["serve"]["forecast"]["horizon_s"] == 600.0


def test_document_unknown_engine_has_reasons_without_figures() -> None:
    fleet = Fleet(wish(), about=None)
    fleet.run(heard(40.0, Role.SERVE), 15)
    told = written_document(fleet)["tiers"]["serve"]
    why = {"unknown": "no engine of the tier has told what it is yet"}
    assert (told["engine"], told["model"], told["line"], told["forecast"]) == (None, why, why, why)
    assert told["starts"]["seen"] == 0.0


def test_document_exists_before_first_tick_and_without_slo() -> None:
    assert document(Service.of(["prefill", "decode"]), KEY, START_S)["decisions"] == []
    fleet = Fleet(wish(slo=None))
    fleet.run(heard(40.0, Role.SERVE), 15)
    told = written_document(fleet)
    assert told["decisions"][0]["tiers"]["serve"]["replicas"] == 1
    assert "unknown" in told["tiers"]["serve"]["forecast"]


def test_document_after_restart_keeps_learned_model() -> None:
    fleet = scaled_up_fleet()
    again = Fleet(wish(), about=None)
    restore(again.service, to_dict(fleet.service))
    again.tick(heard(60.0, Role.SERVE))
    told = written_document(again)["tiers"]["serve"]
    assert told["model"]["base_s"] == written_document(fleet)["tiers"]["serve"]["model"]["base_s"]
    assert "unknown" in told["line"]


def test_document_infeasible_tpot_shows_feasible_target() -> None:
    fleet = Fleet(wish(slo=Slo(0.95, tpot_s=0.001)))
    fleet.run(heard(5.0, Role.SERVE), 15)
    told = written_document(fleet)["tiers"]["serve"]["line"]["infeasible"]
    assert told["constraint"] == "TPOT"
    assert told["feasible"]["tpot_s"] > 0.001
    assert told["feasible"]["ttft_s"] is None
    assert told["words"].startswith("no number of replicas keeps the promise (TPOT breaks it), sized for TPOT ")
    assert "e2e_s" not in told["feasible"]
    assert "itl_s" not in told["feasible"]


def test_document_infeasible_e2e_shows_feasible_target() -> None:
    fleet = Fleet(wish(slo=Slo(0.95, 0.5, e2e_s=0.6)))
    fleet.run(heard(5.0, Role.SERVE), 15)
    told = written_document(fleet)["tiers"]["serve"]["line"]["infeasible"]
    assert told["constraint"] == "e2e"
    assert told["feasible"]["e2e_s"] > 0.6
    assert told["words"].startswith(
        "no number of replicas keeps the promise (e2e breaks it), sized for TTFT 500 ms and"
    )


def test_document_infeasible_itl_shows_feasible_target() -> None:
    fleet = Fleet(wish(slo=Slo(0.95, 2.0, itl_s=0.001)))
    fleet.run(heard(5.0, Role.SERVE), 15)
    told = written_document(fleet)["tiers"]["serve"]["line"]["infeasible"]
    assert told["constraint"] == "itl"
    assert told["feasible"]["itl_s"] > 0.001
    assert "sized for TTFT 2000 ms and itl " in told["words"]


def test_document_recommendation_differs_from_set_replicas() -> None:
    fleet = Fleet(wish(mode=Mode.RECOMMEND))
    fleet.run(heard(60.0, Role.SERVE), 15)
    told = written_document(fleet)["decisions"][0]["tiers"]["serve"]
    assert told["replicas"] == 1 < told["recommended"]


def test_document_lists_both_tiers_of_pair() -> None:
    fleet = Fleet(wish(tiers={"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}))
    fleet.run(heard(5.0, Role.PREFILL, Role.DECODE), 15)
    told = written_document(fleet)
    assert list(told["tiers"]) == list(told["decisions"][0]["tiers"]) == ["prefill", "decode"]


HOSTILE = [
    TierDecision(1, (Step("s", 1, "{}", ("{0} {evil} \x1b[2J \ud800 \U0001f600",)),)),
    TierDecision(1, (Step("s", 1, "{:.3g} and {:.0f}", (math.nan, math.inf)),)),
    TierDecision(1, (Step("s", 1, "said"),), etas_s=(math.inf, -math.inf, math.nan, 1e308)),
    TierDecision(1, (Step("s", 1, "said"),), etas_s=(float(np.float64(1.5)), np.float64(2.5))),
    TierDecision(1, (Step("s", 1, "said"),), limits=tuple(Limit), overdue=("a" * 5000,), counterfactual=""),
    TierDecision(2**70, (Step("", 0, ""),), before=0, recommended=None),
]


@pytest.mark.parametrize("tier", HOSTILE)
def test_document_of_hostile_decision_is_valid_json(tier: TierDecision) -> None:
    fleet = scaled_up_fleet()
    fleet.service.last = Told(START_S, Decision({"serve": tier, "gone": tier}, None, State()))
    fleet.service.decisions = deque([fleet.service.last, Told(0.0, fleet.service.last.decision)])
    told = written_document(fleet)["decisions"]
    assert len(told) == 2
    assert told[1]["at"] == "1970-01-01T00:00:00Z"
    assert all(eta is None or math.isfinite(eta) for eta in told[0]["tiers"]["gone"]["etas_s"])
