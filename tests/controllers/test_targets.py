"""Targets: what is read of a fleet that exists, what is decided, and what is written or left alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.explain import render_document
from plimsoll.cli.output import Screen
from plimsoll.controllers.autoscale.signal_health import UNSELECTED_SECONDS
from plimsoll.controllers.targets.target_state import WriterCause, applying_manager, autoscaler_of, later_writer
from tests.api.manifests import adopted
from tests.controllers.adopted_fleet import KEY, AdoptedFleet, service_object

AUTO = {"spec.scaling.mode": "Auto"}
REF = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"}


def autoscaler(name: str = "web", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, **meta}, "spec": {"scaleTargetRef": REF}}


async def test_recommend_is_the_default_and_writes_nothing() -> None:
    fleet = AdoptedFleet(rate=40.0)
    await fleet.run(90)
    assert fleet.writes == []
    assert fleet.spec == fleet.original
    assert fleet.needed() > 1
    assert fleet.status["tiers"]["serve"]["summary"].startswith("1/")
    assert fleet.condition("ScalingInactive")[:2] == ("True", "RecommendOnly")
    status, reason, message = fleet.condition("Ready")
    assert (status, reason) == ("True", "EnginesReady")
    assert message.startswith("1 of 1 engines of Deployment llm ready; demand is read from the engines' counters")
    assert "retries count as demand" in message


async def test_auto_scales_the_target_and_changes_nothing_else() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(90)
    assert fleet.writes[0][0] == "plimsoll-scaler"
    assert fleet.replicas == fleet.writes[-1][1] > 1
    assert fleet.spec == fleet.original | {"replicas": fleet.replicas}
    assert fleet.condition("ScalingInactive")[0] == ""
    assert next(event["reason"] for event in fleet.events if "Scaled" in event["reason"]) == "ScaledUp"


async def test_slo_of_targets_is_assessed_at_the_engines() -> None:
    fleet = AdoptedFleet(rate=10.0)
    await fleet.run(130)
    status, _, message = fleet.condition("SLOMet")
    assert status in ("True", "False"), message
    assert "TTFT" in message
    assert "TPOT" in message
    assert "attainment" in fleet.status["slo"]
    assert "unavailableReason" not in fleet.status["slo"]


async def test_surplus_engines_of_a_target_are_no_fraction() -> None:
    """Pods that are removed, or of a selector that matches more than the replicas, are no `3 of 2`."""
    fleet = AdoptedFleet(replicas=3)
    await fleet.targets.poll()
    state = fleet.targets.states(KEY)["serve"]
    assert state.scaled is not None
    fleet.targets._states[KEY, "serve"] = replace(state, scaled=replace(state.scaled, replicas=2))
    await fleet.reconciler.reconcile(KEY)
    assert fleet.condition("Ready")[2].startswith("3 engines of Deployment llm ready, 2 desired; demand is read")


async def test_auto_keeps_the_bounds_of_the_target() -> None:
    fleet = AdoptedFleet(rate=0.0, replicas=1, **AUTO, **{"spec.targets.serve.minReplicas": 3})
    await fleet.run(30)
    assert fleet.replicas == 3


async def test_autoscaler_of_the_target_is_named_and_yielded_to() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(90)
    fleet.autoscalers = [autoscaler()]
    fleet.write("kube-controller-manager", 2)
    fleet.writes.clear()
    await fleet.run(30)
    assert (fleet.writes, fleet.replicas) == ([], 2)
    status, reason, message = fleet.condition("ScalingInactive")
    assert (status, reason) == ("True", "ReplicasOwned")
    assert message.startswith("Deployment llm is scaled by HorizontalPodAutoscaler web: Plimsoll yields")
    tier = fleet.status["tiers"]["serve"]
    assert (tier["yieldedTo"], tier["yieldedCause"]) == ("HorizontalPodAutoscaler web", "Autoscaler")
    assert [e["message"] for e in fleet.events if e["reason"] == "ReplicasOwned"]
    fleet.autoscalers = []
    await fleet.run(60)
    assert fleet.writes, "without the autoscaler the count is Plimsoll's again"
    assert fleet.condition("ScalingInactive")[0] == ""


async def test_autoscaler_of_kubeai_is_named_while_it_is_on() -> None:
    """KubeAI's controller sets a Model's count, and no other object says so."""
    model = {"apiVersion": "kubeai.org/v1", "kind": "Model", "name": "llm"}
    edits = {"spec.targets.serve.scaleTargetRef": model, "spec.targets.serve.podSelector": "app=llm"}
    fleet = AdoptedFleet(rate=40.0, **AUTO, **edits)
    fleet.selector = None
    await fleet.run(60)
    assert fleet.writes == []
    status, reason, message = fleet.condition("ScalingInactive")
    assert (status, reason) == ("True", "ReplicasOwned")
    assert message.startswith("Model llm is scaled by KubeAI's autoscaler (spec.autoscalingDisabled of the Model is")
    fleet.spec["autoscalingDisabled"] = True
    await fleet.run(60)
    assert fleet.writes
    assert fleet.condition("ScalingInactive")[0] == ""


async def test_later_writer_is_yielded_to_until_the_spec_changes() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(90)
    fleet.write("argocd-controller", 1)
    fleet.writes.clear()
    await fleet.run(60)
    assert (fleet.writes, fleet.replicas) == ([], 1)
    assert (
        "the field manager argocd-controller, which has changed spec.replicas since"
        in (fleet.condition("ScalingInactive")[2])
    )
    tier = fleet.status["tiers"]["serve"]
    assert tier["yieldedCause"] == "LaterWrite"
    tier["yieldedTo"] = "a sentence of another version"
    fleet.start_operator()
    await fleet.run(90)
    assert (fleet.writes, fleet.replicas) == ([], 1), "a new process yields to what the status names"
    again = fleet.status["tiers"]["serve"]
    assert (again["yieldedTo"], again["yieldedCause"]) == ("a sentence of another version", "LaterWrite")
    fleet.edit(**{"spec.scaling.headroom": "10%"})
    await fleet.run(60)
    assert fleet.writes


async def test_recreated_target_has_no_later_writer() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(90)
    fleet.uid = "uid-llm-2"
    fleet.write("helm", 1)
    fleet.writes.clear()
    await fleet.run(60)
    assert fleet.writes
    assert fleet.condition("ScalingInactive")[0] == ""


async def test_former_target_is_not_written_any_more() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(2)
    assert set(fleet.targets.states(KEY)) == {"serve"}
    fleet.edit(**{"spec.targets.serve.scaleTargetRef.name": "other"})
    assert fleet.targets.states(KEY) == {}


async def test_scale_to_zero_by_hand_is_yielded_to() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    await fleet.run(90)
    fleet.write("kubectl", 0)
    fleet.writes.clear()
    await fleet.run(10)
    assert (fleet.writes, fleet.replicas) == ([], 0)
    assert "another client (such as kubectl scale)" in fleet.condition("ScalingInactive")[2]


async def test_manager_that_applies_the_count_is_never_overridden() -> None:
    fleet = AdoptedFleet(rate=40.0, **AUTO)
    fleet.managers = [{"manager": "kustomize-controller", "operation": "Apply"}]
    await fleet.run(60)
    assert fleet.writes == []
    assert (
        "the field manager kustomize-controller, which applies spec.replicas" in fleet.condition("ScalingInactive")[2]
    )


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        (
            {"spec.targets.serve.scaleTargetRef.name": "gone"},
            "TargetNotFound",
            "Deployment gone does not exist",
        ),
        ({"spec.targets.serve.scaleTargetRef.kind": "Rocket"}, "TargetNotFound", "serves no kind Rocket in apps/v1"),
        (
            {"spec.targets.serve.scaleTargetRef.kind": "ReplicationThing"},
            "TargetNotScalable",
            "apps/v1 ReplicationThing has no scale subresource",
        ),
        (
            {"spec.targets.serve.scaleTargetRef": {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "llm"}},
            "TargetNotScalable",
            "ray.io/v1 RayCluster has no scale subresource in a namespace, so its replicas cannot be set",
        ),
    ],
)
async def test_unusable_target_is_named(change: dict[str, Any], reason: str, message: str) -> None:
    fleet = AdoptedFleet(**change)
    await fleet.run(2)
    for kind, status in (("TargetUnusable", "True"), ("Ready", "False")):
        found = fleet.condition(kind)
        assert found[:2] == (status, reason)
        assert message in found[2]
    assert [e["message"] for e in fleet.events if e["reason"] == "TargetUnusable"]


async def test_forbidden_target_names_the_chart_value() -> None:
    fleet = AdoptedFleet()
    await fleet.run(2)
    fleet.forbidden = {"deployments"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetForbidden"
    assert "chart value targets.resources" in fleet.condition("TargetUnusable")[2]
    assert fleet.cache.pods(KEY) == []
    fleet.forbidden = set()
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[0] == ""
    assert fleet.condition("Ready")[1] == "EnginesReady"
    assert [e["message"] for e in fleet.events if e["reason"] == "Recovered"] == ["the target can be read and scaled"]


async def test_target_that_was_never_returned_is_reported() -> None:
    fleet = AdoptedFleet()
    fleet.unanswered = {"llm"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetUnreadable"
    assert "the API server does not return Deployment llm: llm: no answer" in fleet.condition("TargetUnusable")[2]
    fleet.unanswered = set()
    await fleet.run(2)
    assert fleet.condition("Ready")[1] == "EnginesReady"


async def test_scale_without_selector_asks_for_pod_selector() -> None:
    fleet = AdoptedFleet()
    fleet.selector = None
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1:] == (
        "TargetNotScalable",
        "the scale of Deployment llm has no status.selector: set podSelector",
    )
    fleet.edit(**{"spec.targets.serve.podSelector": "app=llm"})
    await fleet.run(2)
    assert fleet.condition("Ready")[1] == "EnginesReady"


async def test_pod_selector_that_matches_nothing_is_named() -> None:
    fleet = AdoptedFleet(replicas=2, **{"spec.targets.serve.podSelector": "app=other"})
    fleet.selected["app=other"] = 0
    await fleet.run(int(UNSELECTED_SECONDS))
    assert fleet.condition("MetricsDegraded")[1] == ""
    await fleet.run(3)
    status, reason, message = fleet.condition("MetricsDegraded")
    assert (status, reason) == ("True", "LabelsMatchNothing")
    assert "counts 2 replicas of serve" in message
    assert message.endswith("Set spec.targets.serve.podSelector to labels that its pods have")
    fleet.selected["app=other"] = 2
    await fleet.run(2)
    assert fleet.condition("MetricsDegraded")[1] != "LabelsMatchNothing"
    lost = [event["message"] for event in fleet.events if event["reason"] == "MetricsLost"]
    assert [message.partition(" ")[0] for message in lost] == ["for"]


async def test_second_service_of_a_target_is_refused() -> None:
    fleet = AdoptedFleet()
    fleet.cache.put(service_object("first", "2025-01-01T00:00:00Z"))
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetTaken"
    assert "is the target of InferenceService first already" in fleet.condition("TargetUnusable")[2]


async def test_pods_of_two_targets_stay_with_the_older_service() -> None:
    """Selectors that overlap: the younger service is refused and names both, and no pod changes hands."""
    fleet = AdoptedFleet(replicas=2)
    fleet.deployments = {"llm", "wide"}
    wide = {"spec.targets.serve.scaleTargetRef.name": "wide", "spec.targets.serve.podSelector": "team=x"}
    fleet.cache.put(service_object("older", "2025-01-01T00:00:00Z", **wide))
    fleet.selected["team=x"] = 3  # llm-0 and llm-1 are of both
    for _ in range(4):
        await fleet.run(1)
        assert fleet.cache.pods(KEY) == []
        assert len(fleet.cache.pods((KEY[0], "older"))) == 3
    assert fleet.condition("TargetUnusable") == (
        "True",
        "TargetOverlaps",
        "2 of 2 pods of Deployment llm, such as llm-0, are engines of InferenceService older (Deployment wide) already:"
        " narrow podSelector of InferenceService llm-slo or of InferenceService older",
    )
    assert fleet.condition("Ready")[0] == "False"
    assert [e["reason"] for e in fleet.events if "pods of Deployment llm" in e["message"]] == ["TargetUnusable"]
    fleet.selected["team=x"] = 0
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[0] == ""
    assert len(fleet.cache.pods(KEY)) == 2


async def test_unread_older_target_keeps_its_pods() -> None:
    """While the API server does not answer for the older service, the younger does not take its pods."""
    fleet = AdoptedFleet(replicas=2)
    fleet.deployments = {"llm", "wide"}
    wide = {"spec.targets.serve.scaleTargetRef.name": "wide", "spec.targets.serve.podSelector": "team=x"}
    fleet.cache.put(service_object("older", "2025-01-01T00:00:00Z", **wide))
    fleet.selected["team=x"] = 1
    await fleet.run(2)
    fleet.unanswered = {"wide"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetOverlaps"
    assert len(fleet.cache.pods((KEY[0], "older"))) == 1


async def test_tier_of_a_service_is_no_target() -> None:
    fleet = AdoptedFleet()
    fleet.labels = {"app.kubernetes.io/managed-by": "plimsoll", "plimsoll.dev/service": "chat"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1:] == (
        "TargetTaken",
        "Deployment llm belongs to InferenceService chat, which sizes it already",
    )


@pytest.mark.parametrize("place", [labels.ROLE, labels.WORKER_OF])
async def test_pods_of_a_tier_are_no_engines_of_a_target(place: str) -> None:
    fleet = AdoptedFleet()
    fleet.pod_labels = {labels.MANAGED_BY: "plimsoll", labels.SERVICE: "other", place: "serve"}
    await fleet.run(2)
    assert fleet.cache.pods(KEY) == []


async def test_deleted_service_leaves_no_pods() -> None:
    fleet = AdoptedFleet(replicas=2)
    await fleet.run(2)
    assert len(fleet.cache.pods(KEY)) == 2
    fleet.cache.remove(fleet.object)
    await fleet.targets.poll()
    assert fleet.cache.pods(KEY) == []


def test_autoscaler_is_matched_by_group_kind_and_name() -> None:
    ref = parse(adopted()).spec.sized_tiers["serve"].scale_target_ref
    keda = autoscaler("keda-hpa-llm", labels={"scaledobject.keda.sh/name": "llm"})
    for one, name in ((autoscaler(), "web"), (keda, "keda-hpa-llm of KEDA's ScaledObject llm")):
        found = autoscaler_of(ref, [one])
        assert found is not None
        assert (found.cause, found.name) == (WriterCause.AUTOSCALER, f"HorizontalPodAutoscaler {name}")
    other = [{"metadata": {"name": "x"}, "spec": {"scaleTargetRef": REF | change}} for change in (
        {"apiVersion": "example.com/v1"}, {"kind": "StatefulSet"}, {"name": "other"},
    )]  # fmt: skip
    assert autoscaler_of(ref, other) is None


@pytest.mark.parametrize(
    ("entries", "applied", "later"),
    [
        ([("plimsoll-scaler", "Apply")], None, None),
        ([("plimsoll-scaler", "Apply"), ("helm", "Update")], None, None),
        ([("helm", "Update")], None, "the field manager helm, which has changed spec.replicas since"),
        ([("flux", "Apply")], "the field manager flux, which applies spec.replicas", "the field manager flux, which"),
        ([], None, "another client (such as kubectl scale)"),
    ],
)
def test_writers_by_managed_fields(entries: list[tuple[str, str]], applied: str | None, later: str | None) -> None:
    fields = {"f:spec": {"f:replicas": {}}}
    managed = [{"manager": name, "operation": operation, "fieldsV1": fields} for name, operation in entries]
    obj = {"metadata": {"managedFields": managed}, "spec": {"replicas": 2}}
    applying, found = applying_manager(obj), later_writer(obj)
    assert (None if applying is None else (applying.name, applying.cause)) == (applied and (applied, WriterCause.APPLY))
    assert (found is None) == (later is None)
    if found is not None and later is not None:
        assert found.cause is WriterCause.LATER_WRITE
        assert found.name.startswith(later)


@pytest.mark.parametrize("fault", ["forbidden", "labels"])
async def test_port_is_not_blamed_while_no_engine_is_known(fault: str) -> None:
    fleet = AdoptedFleet(rate=10.0)
    if fault == "forbidden":
        fleet.forbidden = {"deployments"}
    else:
        fleet.edit(**{"spec.targets.serve.podSelector": "app=wrong"})
        fleet.selected["app=wrong"] = 0
    await fleet.run(25)
    assert fleet.condition("Ready")[0] == "False"
    assert "metricsPort" not in fleet.condition("MetricsDegraded")[2]
    demand = "\n".join(render_document(fleet.scaler.explain(KEY), Screen()))
    assert re.search("demand +unknown", demand)
    assert "gateways" not in demand
