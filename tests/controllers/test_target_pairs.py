"""Targets of a prefill/decode pair: both tiers are read and sized, and who else writes one count stops both."""

from __future__ import annotations

import re

import pytest

from plimsoll.cli.doctor import Patient, diagnose
from plimsoll.cli.explain import render_document, skipped_prefill
from plimsoll.cli.findings import NOTE
from plimsoll.cli.output import Screen
from tests.controllers.adopted_fleet import KEY
from tests.controllers.adopted_pair import ROLES, AdoptedPair

AUTO = {"spec.scaling.mode": "Auto"}


async def test_pair_is_recommended_for_both_roles_and_left_alone() -> None:
    fleet = AdoptedPair(rate=60.0)
    await fleet.run(90)
    assert (fleet.role_writes, fleet.counts) == ([], {"prefill": 1, "decode": 1})
    assert {role: fleet.recommended(role) > 1 for role in ROLES} == {"prefill": True, "decode": True}
    assert {role: fleet.status["tiers"][role]["summary"] for role in ROLES} == {"prefill": "1/1", "decode": "1/1"}
    assert fleet.condition("ScalingInactive")[:2] == ("True", "RecommendOnly")
    status, reason, message = fleet.condition("Ready")
    assert (status, reason) == ("True", "EnginesReady")
    assert message.startswith(
        "2 of 2 engines of Deployment llm-prefill, Deployment llm-decode ready (prefill 1, decode 1)"
    )
    assert "demand is read from the prefill engines' counters" in message
    assert "lacks the KV transfer and the first decode step" in message


async def test_pair_is_scaled_in_auto_each_role_by_its_own_need() -> None:
    fleet = AdoptedPair(rate=60.0, **AUTO)
    await fleet.run(90)
    assert {role for role, _ in fleet.role_writes} == {"prefill", "decode"}
    assert min(fleet.counts.values()) > 1
    assert fleet.condition("ScalingInactive")[0] == ""


@pytest.mark.parametrize("role", ROLES)
async def test_writer_of_one_role_is_named_and_both_are_left(role: str) -> None:
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"llm-{role}"}
    fleet = AdoptedPair(rate=60.0, **AUTO)
    fleet.autoscalers = [{"metadata": {"name": "theirs"}, "spec": {"scaleTargetRef": ref}}]
    await fleet.run(60)
    assert fleet.role_writes == []
    status, reason, message = fleet.condition("ScalingInactive")
    assert (status, reason) == ("True", "ReplicasOwned")
    assert message.startswith(f"Deployment llm-{role} is scaled by HorizontalPodAutoscaler theirs: Plimsoll yields")
    assert [one for one in ROLES if "yieldedTo" in fleet.status["tiers"][one]] == [role]
    fleet.autoscalers = []
    await fleet.run(60)
    assert fleet.role_writes


@pytest.mark.parametrize("role", ROLES)
async def test_later_write_of_one_role_is_yielded_to(role: str) -> None:
    fleet = AdoptedPair(rate=60.0, **AUTO)
    await fleet.run(90)
    fleet.set_count(role, 1, "somebody")
    fleet.role_writes.clear()
    await fleet.run(30)
    assert (fleet.role_writes, fleet.counts[role]) == ([], 1)
    assert f"Deployment llm-{role} is scaled by the field manager somebody" in fleet.condition("ScalingInactive")[2]


async def test_pods_that_both_selectors_match_are_of_prefill() -> None:
    fleet = AdoptedPair(**{"spec.targets.decode.podSelector": "app=llm,role=prefill"})
    await fleet.run(2)
    status, reason, message = fleet.condition("TargetUnusable")
    assert (status, reason) == ("True", "TargetOverlaps")
    assert message == (
        "1 of 1 pods of Deployment llm-decode, such as llm-prefill-0, are engines of InferenceService llm-slo"
        " (Deployment llm-prefill) already: narrow podSelector of InferenceService llm-slo"
    )


async def test_missing_decode_target_makes_the_pair_unready() -> None:
    fleet = AdoptedPair(**{"spec.targets.decode.scaleTargetRef.name": "llm-gone"})
    await fleet.run(2)
    assert fleet.condition("Ready")[:2] == ("False", "TargetNotFound")
    pods = [pod["metadata"]["name"] for pod in fleet.cache.pods(KEY)]
    assert pods == ["llm-prefill-0"]


async def test_pair_without_a_decode_engine_is_not_ready() -> None:
    fleet = AdoptedPair()
    fleet.set_count("decode", 0, "kubectl")
    await fleet.run(2)
    status, reason, message = fleet.condition("Ready")
    assert (status, reason) == ("False", "EnginesNotReady")
    assert "(prefill 1, decode 0)" in message


async def test_silent_decode_engines_are_named_with_the_ports() -> None:
    fleet = AdoptedPair(rate=10.0, **{"spec.targets.decode.metricsPort": 8200})
    await fleet.run(60)
    fleet.reporting = ("prefill",)
    await fleet.run(60)
    message = fleet.condition("MetricsDegraded")[2]
    assert message.startswith("no ready decode engine has reported at port 8000 (prefill) and 8200 (decode) for 15 s")


async def test_explanation_says_what_the_ttft_of_a_pair_lacks() -> None:
    fleet = AdoptedPair(rate=10.0)
    await fleet.run(60)
    lines = "\n".join(render_document(fleet.scaler.explain(KEY), Screen()))
    assert re.search("demand +.*counted at prefill engines, whose TTFT lacks the", lines)
    assert "gateways" not in lines


async def test_requests_that_skip_prefill_size_decode() -> None:
    fleet = AdoptedPair(rate=30.0)
    await fleet.run(90)
    without = {role: fleet.recommended(role) for role in ROLES}
    fleet.skipping = 90.0
    await fleet.run(240)
    assert fleet.recommended("decode") >= 3 * without["decode"]
    document = fleet.scaler.explain(KEY)
    lines = " ".join("\n".join(render_document(document, Screen())).split())
    figures = skipped_prefill(document["metrics"]["gateways"])
    assert re.match("9[0-4] req/s more, 75% of the decode engines' requests, skip prefill", figures)
    assert figures in lines
    [finding] = [
        one for one in diagnose(Patient(fleet.object, document=document), "ns", 0.0) if one.subject == "traffic"
    ]
    assert finding.level == NOTE
    assert finding.message.startswith(f"{figures}: they size decode")
    fleet.skipping = 0.0
    await fleet.run(90)
    assert "skip prefill" not in "\n".join(render_document(fleet.scaler.explain(KEY), Screen()))


async def test_decode_is_sized_if_all_requests_skip_prefill() -> None:
    fleet = AdoptedPair(rate=0.0)
    fleet.skipping = 60.0
    await fleet.run(120)
    assert (fleet.recommended("prefill"), fleet.recommended("decode") > 1) == (1, True)
