"""The examples for Argo CD and Flux: health as they compute it, from the conditions that the operator writes.

Argo CD runs its health checks in Lua 5.1, and so do the tests. kstatus, by which Flux waits, is written down here as
its documentation has it. `tests/crds/test_delivery.py` applies the examples.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from lupa.lua51 import LuaRuntime

from plimsoll.api import conditions, labels
from plimsoll.api.conditions import ConditionType
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.service_status import StatusInputs
from tests import builders
from tests.chart.rendering import ROOT, render, render_text
from tests.controllers.status_inputs import status_inputs, tier
from tests.controllers.test_service_status import waiting

GITOPS = ROOT / "examples" / "gitops"
Object = dict[str, Any]


def documents(path: str) -> list[Object]:
    return list(yaml.safe_load_all((GITOPS / path).read_text()))


CUSTOMIZATIONS = documents("argocd/argocd-cm.yaml")[0]["data"]
APPLICATIONS = [documents(f"argocd/applications/{name}.yaml")[0] for name in ("plimsoll", "services")]
RELEASE, SERVICES = documents("flux/kustomizations.yaml")


def argo_health(kind: str, obj: Object) -> tuple[str, str]:
    """Status and message, as Argo CD's Lua sandbox computes them: with `obj` as the only input."""
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    lua.globals().obj = lua.table_from(json.loads(json.dumps(obj)), recursive=True)
    found = lua.execute(CUSTOMIZATIONS[f"resource.customizations.health.{kind}"])
    return found["status"], found["message"]


def kstatus(obj: Object) -> str:
    """The status of an object of a kind that kstatus does not know. https://github.com/kubernetes-sigs/cli-utils"""
    if obj["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = obj.get("status") or {}
    if status.get("observedGeneration", obj["metadata"]["generation"]) != obj["metadata"]["generation"]:
        return "InProgress"
    for condition in status.get("conditions", ()):
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return "InProgress" if condition["type"] == "Reconciling" else "Failed"
    ready = [condition["status"] for condition in status.get("conditions", ()) if condition["type"] == "Ready"]
    return "InProgress" if ready and ready[0] != "True" else "Current"


def with_written_status(inputs: StatusInputs) -> Object:
    """The object with the status that the operator writes."""
    generation = inputs.service_object["metadata"]["generation"]
    stored = conditions.merge([], service_status.build_conditions(inputs), "2026-01-01T00:00:00Z")
    return {**inputs.service_object, "status": {"observedGeneration": generation, "conditions": stored}}


def failing(reason: str, message: str) -> StatusInputs:
    """A service whose only engine cannot start."""
    pod = builders.pod(builders.service(), "serve", "serve-0", **waiting(reason, message))
    return status_inputs(tier("serve", ready=0, pods=(pod,)), routable_endpoints=0)


def unschedulable() -> StatusInputs:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
    pod = builders.pod(builders.service(), "serve", "serve-0", conditions=[condition])
    return status_inputs(tier("serve", ready=0, pods=(pod,)), routable_endpoints=0)


# Name: inputs, health in Argo CD, status in kstatus.
CASES: dict[str, tuple[StatusInputs, str, str]] = {
    "serves": (status_inputs(), "Healthy", "Current"),
    "starts": (status_inputs(tier("serve", ready=0), routable_endpoints=0), "Progressing", "InProgress"),
    "waits for a node": (unschedulable(), "Progressing", "InProgress"),
    "image is missing": (failing("ImagePullBackOff", "no such image"), "Degraded", "InProgress"),
    "spec is invalid": (status_inputs(spec_problems=("spec.tiers: no",)), "Degraded", "Failed"),
    "object is rejected": (status_inputs(rejection="quota exceeded"), "Degraded", "Failed"),
    "rejected while it starts": (
        status_inputs(tier("serve", ready=0), routable_endpoints=0, rejection="quota exceeded"),
        "Degraded",
        "Failed",
    ),
    "no gateway": (status_inputs(routable_endpoints=None, gateway_replicas=0), "Degraded", "InProgress"),
    "gateway is silent": (status_inputs(routable_endpoints=None), "Progressing", "InProgress"),
    "not routed yet": (status_inputs(routable_endpoints=0), "Progressing", "InProgress"),
    "scaled to zero": (
        status_inputs(
            tier("serve", ready=0, desired=0), routable_endpoints=0, scales_to_zero=True, has_stored_cost_model=True
        ),
        "Healthy",
        "Current",
    ),
    "scaled to zero by hand": (
        status_inputs(tier("serve", ready=0, desired=0), routable_endpoints=0),
        "Suspended",
        "InProgress",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_health_in_argo_cd_and_kstatus(name: str) -> None:
    inputs, health, status = CASES[name]
    obj = with_written_status(inputs)
    found, message = argo_health("plimsoll.dev_InferenceService", obj)
    assert (found, kstatus(obj)) == (health, status)
    assert message in [condition["message"] for condition in obj["status"]["conditions"]]


def test_health_of_old_status_is_progressing() -> None:
    """What was true of the last spec is not true of the new one."""
    settled = with_written_status(status_inputs())
    newer = {**settled, "metadata": {**settled["metadata"], "generation": settled["metadata"]["generation"] + 1}}
    deleted = {**settled, "metadata": {**settled["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    fresh = {key: value for key, value in settled.items() if key != "status"}
    partial = {**settled, "status": {"observedGeneration": settled["metadata"]["generation"]}}
    for obj in (newer, deleted, fresh, {**settled, "status": {}}, partial):
        assert argo_health("plimsoll.dev_InferenceService", obj)[0] == "Progressing"
    assert [kstatus(obj) for obj in (newer, deleted)] == ["InProgress", "Terminating"]


def test_health_reads_existing_conditions_only() -> None:
    """A condition that is renamed must be renamed in both examples."""
    text = CUSTOMIZATIONS["resource.customizations.health.plimsoll.dev_InferenceService"]
    kinds = {kind.value for kind in ConditionType}
    for named in ("Stalled", "Reconciling", "Ready", "PrefillDegraded", "DecodeDegraded", "ServeDegraded"):
        assert f'"{named}"' in text
        assert named in kinds
    for reason in ("Unschedulable", "TransferSlow", "ScaledToZero", "NoGateway"):
        assert reason in text
        assert reason in {one.value for one in conditions.ConditionReason}


def test_health_of_application_is_its_own() -> None:
    """By it the second wave waits for the first one."""
    kind = "argoproj.io_Application"
    assert argo_health(kind, {"status": {"health": {"status": "Degraded", "message": "m"}}}) == ("Degraded", "m")
    assert argo_health(kind, {"status": {"health": {"status": "Healthy"}}}) == ("Healthy", "")
    for fresh in ({}, {"status": {}}, {"status": {"health": {}}}):
        assert argo_health(kind, fresh)[0] == "Progressing"


def test_services_follow_operator_and_crds() -> None:
    waves = [int(one["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]) for one in APPLICATIONS]
    assert waves == sorted(set(waves))
    assert APPLICATIONS[1]["spec"]["syncPolicy"]["syncOptions"] == ["SkipDryRunOnMissingResource=true"]
    assert SERVICES["spec"]["dependsOn"] == [{"name": RELEASE["metadata"]["name"]}]
    assert RELEASE["spec"]["wait"] is SERVICES["spec"]["wait"] is True


def test_no_example_ignores_a_difference() -> None:
    for path in GITOPS.rglob("*.yaml"):
        assert "ignoreDifferences" not in path.read_text()


def test_paths_of_examples_exist() -> None:
    sources = [one["spec"]["source"] for one in (*documents("argocd/root.yaml"), *APPLICATIONS)]
    paths = [source["path"] for source in sources] + [one["spec"]["path"] for one in (RELEASE, SERVICES)]
    paths.append(documents("flux/release/plimsoll.yaml")[0]["spec"]["chart"]["spec"]["chart"])
    for path in paths:
        assert list((ROOT / path).glob("*.yaml")), path


def test_chart_values_of_examples_render() -> None:
    values = [APPLICATIONS[0]["spec"]["source"]["helm"]["valuesObject"]]
    values.append(documents("flux/release/plimsoll.yaml")[0]["spec"]["values"])
    for one in values:
        assert any(o["kind"] == "CustomResourceDefinition" for o in render(one))


def test_argo_cd_renders_the_same_chart_each_time() -> None:
    """It renders without a cluster, and `selfHeal` applies every difference, such as a new secret."""
    values = APPLICATIONS[0]["spec"]["source"]["helm"]["valuesObject"]
    first, second = (render_text(values) for _ in range(2))
    assert first == second
    assert values["gateway"]["peers"]["secretName"] in (ROOT / "docs/tasks/gitops.md").read_text()


def test_flux_health_names_kind_and_conditions() -> None:
    [expressions] = SERVICES["spec"]["healthCheckExprs"]
    assert (expressions["apiVersion"], expressions["kind"]) == (labels.API_VERSION, labels.KIND)
    assert expressions["inProgress"] == "status.observedGeneration != metadata.generation"
    for condition, expression in (("Stalled", "failed"), ("Ready", "current"), ("Reconciling", "current")):
        assert f"e.type == '{condition}'" in expressions[expression]
        assert condition in {kind.value for kind in ConditionType}


def test_kustomization_lists_every_service() -> None:
    folder = GITOPS / "services"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in folder.glob("*.yaml")} == {*listed, "kustomization.yaml"}
    assert parse(yaml.safe_load((folder / "chat.yaml").read_text())).metadata.name == "chat"
