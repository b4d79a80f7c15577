"""Recommendations are those of the last decision, within the published schema, and never old ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from plimsoll.api.recommendation import json_schema
from plimsoll.controllers.autoscale.recommendations import (
    LIST_SECONDS,
    STALE_SECONDS,
    Recommendations,
    build_recommendation,
    to_json,
)
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.types import Role, Unavailable
from tests.chart.rendering import ROOT
from tests.core.test_autoscaler import Fleet, need, scaling_spec, service_metrics

KEY = ("team", "chat")
SCHEMA = json_schema()


def document(fleet: Fleet, age_s: float = 0.0) -> dict[str, Any]:
    """The recommendation as a client reads it, after a check against the schema."""
    read: dict[str, Any] = json.loads(to_json(build_recommendation(KEY, fleet.service, fleet.now_s + age_s)))
    jsonschema.validate(read, {**SCHEMA, **SCHEMA["$defs"]["Recommendation"]})
    return read


def recommending_fleet(mode: ScalingMode = ScalingMode.RECOMMEND) -> Fleet:
    """A fleet of one replica under the load of several."""
    fleet = Fleet(scaling_spec(mode=mode), arrives=mode is ScalingMode.AUTO)
    fleet.run(service_metrics(60.0, Role.SERVE), 120)
    return fleet


def test_schema_file_is_valid_and_closed() -> None:
    schema = json.loads((ROOT / "docs" / "reference" / "recommendations.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema == SCHEMA
    for part in (schema, *schema["$defs"].values()):
        assert part.get("type") == "string" or part["additionalProperties"] is False
    assert set(schema["$defs"]["Recommendation"]["required"]) == set(schema["$defs"]["Recommendation"]["properties"])


def test_recommend_mode_has_count_that_auto_would_set() -> None:
    fleet = recommending_fleet()
    found = document(fleet)
    tier = found["tiers"]["serve"]
    assert (found["namespace"], found["name"], found["mode"], found["stale"]) == ("team", "chat", "Recommend", False)
    assert tier["currentReplicas"] == tier["readyReplicas"] == 1
    assert tier["recommendedReplicas"] > 1
    assert tier["neededReplicas"] == need(fleet).replicas
    assert (tier["minReplicas"], tier["maxReplicas"], tier["frozen"]) == (1, 50, False)
    last = fleet.service.last_decision
    assert last is not None
    assert tier["reasons"] == list(last.decision.tiers["serve"].brief_reasons)
    demand = tier["demand"]
    assert demand["requestsPerSecond"] == pytest.approx(60.0, rel=0.05)
    assert demand["forecastRequestsPerSecond"] >= demand["requestsPerSecond"]
    assert demand["utilization"] == pytest.approx(demand["requestsPerSecond"] / demand["capacityPerReplica"], rel=1e-4)


def test_auto_mode_recommends_what_it_orders() -> None:
    fleet = recommending_fleet(ScalingMode.AUTO)
    tier = document(fleet)["tiers"]["serve"]
    assert tier["recommendedReplicas"] == tier["currentReplicas"] == fleet.replicas["serve"] > 1


def test_limit_is_named() -> None:
    fleet = Fleet(scaling_spec(tiers={"serve": TierPolicy(1, 2)}))
    fleet.run(service_metrics(60.0, Role.SERVE), 60)
    tier = document(fleet)["tiers"]["serve"]
    assert (tier["recommendedReplicas"], tier["maxReplicas"]) == (2, 2)
    assert tier["neededReplicas"] > 2
    assert tier["limits"] == ["maxReplicas"]


@pytest.mark.parametrize("spec", [scaling_spec(slo=None), scaling_spec(mode=ScalingMode.OFF)])
def test_unsized_service_has_no_recommendation(spec: Any) -> None:
    fleet = Fleet(spec)
    fleet.run(service_metrics(60.0, Role.SERVE), 10)
    tier = document(fleet)["tiers"]["serve"]
    assert (tier["recommendedReplicas"], tier["neededReplicas"], tier["currentReplicas"]) == (None, None, 1)


def test_unknown_demand_freezes_recommendation() -> None:
    fleet = Fleet(scaling_spec())
    fleet.run(service_metrics(Unavailable("no gateway reports")), 3)
    tier = document(fleet)["tiers"]["serve"]
    assert (tier["frozen"], tier["recommendedReplicas"], tier["demand"]) == (True, 1, None)


@pytest.mark.parametrize(("age_s", "is_stale"), [(0.0, False), (STALE_SECONDS, False), (STALE_SECONDS + 1.0, True)])
def test_recommendation_is_stale_beyond_limit(age_s: float, is_stale: bool) -> None:
    found = document(recommending_fleet(), age_s)
    assert (found["stale"], found["ageSeconds"]) == (is_stale, age_s)
    assert (found["staleReason"] == "the last decision is 61 s old, which is more than 60 s") is is_stale


def test_clock_set_back_is_no_negative_age() -> None:
    assert document(recommending_fleet(), -3600.0)["ageSeconds"] == 0.0


def test_decision_of_earlier_process_does_not_count() -> None:
    service = ServiceState.for_roles(["serve"])
    decision = ScalingDecision({"serve": TierDecision(5, (), 1, 5)}, None, DecisionState())
    service.last_decision = TimedDecision(100.0, decision)
    found = build_recommendation(KEY, service, 101.0)
    assert (found.stale, found.tiers, found.decided_at) == (True, {}, None)


def test_number_that_is_not_finite_is_no_demand() -> None:
    fleet = recommending_fleet()
    for change in ({"rate_per_s": math.inf}, {"request_gpu_s": 0.0}):
        fleet.service.sizings["serve"] = replace(need(recommending_fleet()), **change)
        assert document(fleet)["tiers"]["serve"]["demand"] is None


def test_list_is_built_once_a_second() -> None:
    calls, now_s = list[float](), [1000.0]

    def keys() -> list[tuple[str, str]]:
        calls.append(now_s[0])
        return [KEY, ("team", "deleted meanwhile")]

    states = {KEY: ServiceState.for_roles(["serve"])}
    recommendations = Recommendations(keys, states.get, lambda: now_s[0])
    for step_s in (0.0, LIST_SECONDS / 2, LIST_SECONDS / 2, -500.0):
        now_s[0] += step_s
        jsonschema.validate(json.loads(recommendations.list_json()), SCHEMA)
    assert calls == [1000.0, 1001.0, 501.0]


def test_request_without_replicas_recommends_one() -> None:
    """From zero: nothing but the arrival is known, since no engine has run yet."""
    fleet = Fleet(
        scaling_spec(mode=ScalingMode.RECOMMEND, tiers={"serve": TierPolicy(0, 9)}), about=None, arrives=False
    )
    counts = []
    for rate in (0.0, 1.0):
        fleet.run(service_metrics(rate, Role.SERVE), 20)
        counts.append(document(fleet)["tiers"]["serve"]["recommendedReplicas"])
    assert counts == [0, 1]
