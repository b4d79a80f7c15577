"""The API server takes what is right, stores it as it is, and shows the columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.api.v1alpha1 import ConditionStatus, InferenceServiceStatus, SloStatus, TiersStatus, TierStatus, parse
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.routing.published_engines import EngineTemplate, PublishedEngines
from plimsoll.resources import objects
from tests.api.manifests import (
    EXAMPLES,
    Manifest,
    adopted,
    adopted_pair,
    aggregated,
    edited,
    engine_examples,
    examples,
    service,
)
from tests.api.statuses import STATUS
from tests.api.valid_manifests import VALID_ADOPTED, VALID_AGGREGATED, VALID_EDITS, VALID_PAIRS
from tests.crds.conftest import APPLY_MODES, Kubectl

pytestmark = pytest.mark.api

Shape = Callable[..., Manifest]

LINE = 120  # characters of a terminal
COLUMNS = ["NAME", "MODEL", "READY", "PREFILL", "DECODE", "SERVE", "TTFT", "TPOT", "LIMITED-BY", "REASON"]


@pytest.mark.parametrize("way", APPLY_MODES)
def test_boundary_values_are_accepted(kubectl: Kubectl, way: str) -> None:
    tables = [(service, VALID_EDITS), (aggregated, VALID_AGGREGATED), (adopted, VALID_ADOPTED)]
    tables.append((adopted_pair, VALID_PAIRS))
    edited = [(edits, base(**edits)) for base, table in tables for edits in table]
    errors = kubectl.validate([manifest for _, manifest in edited], *APPLY_MODES[way])
    assert {str(edits): said for (edits, _), said in zip(edited, errors, strict=True) if said} == {}


@pytest.mark.parametrize("way", APPLY_MODES)
def test_examples_are_accepted_and_parsed(kubectl: Kubectl, way: str) -> None:
    kubectl.run_ok("create", "namespace", way)
    kubectl.run_ok("apply", "-n", way, *APPLY_MODES[way], "-f", str(EXAMPLES))
    stored = kubectl.get("plim", "-n", way)["items"]
    read = {parse(item).metadata.name for item in stored}
    assert read == {manifest["metadata"]["name"] for manifest in examples().values()}


@pytest.mark.parametrize("way", APPLY_MODES)
def test_engine_examples_are_accepted(kubectl: Kubectl, way: str) -> None:
    manifests = list(engine_examples().values())
    assert kubectl.validate(manifests, *APPLY_MODES[way]) == [""] * len(manifests)


@pytest.mark.parametrize("way", APPLY_MODES)
def test_second_apply_changes_nothing(kubectl: Kubectl, way: str) -> None:
    manifest = edited(examples()["scheduling"], {"metadata.name": f"again-{way}"})
    first = kubectl.apply(manifest, *APPLY_MODES[way])
    second = kubectl.apply(manifest, *APPLY_MODES[way])
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


@pytest.mark.parametrize("way", APPLY_MODES)
def test_stored_object_differs_in_nothing_that_was_applied(kubectl: Kubectl, way: str) -> None:
    """As delivery tools compare: the manifest laid over the stored object, with each list as one value."""
    lists = {
        "spec.slo": {"tpot": "50ms"},
        "spec.admission": {"classes": [{"name": "people"}, {"name": "jobs"}], "tenants": [{"name": "a"}]},
        "spec.scaling": {"schedule": [{"from": "08:00", "until": "20:00", "minReplicas": 2}]},
        "spec.engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
        "spec.tiers.decode.pod": {
            "tolerations": [{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}, {"key": "a"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "volumeMounts": [{"name": "v", "mountPath": "/v"}],
        },
    }
    for name, manifest in {**examples(), "lists": service(**lists)}.items():
        given = edited(manifest, {"metadata.name": f"same-{way}-{name}"})
        stored = kubectl.apply(given, *APPLY_MODES[way])["spec"]
        assert _laid_over(stored, given["spec"]) == stored, name


def _laid_over(stored: Any, given: Any) -> Any:
    if not isinstance(stored, dict) or not isinstance(given, dict):
        return given
    return {**stored, **{key: _laid_over(stored.get(key), value) for key, value in given.items()}}


def test_spec_is_stored_as_it_was_written(kubectl: Kubectl) -> None:
    given = service(
        **{
            "metadata.name": "defaults",
            "spec.engine": {},
            "spec.slo": {"tpot": "50ms"},
            "spec.tiers.decode.rollout": {},
            "spec.scaling": {"schedule": [{"from": "08:00", "until": "20:00", "minReplicas": 2}]},
            "spec.admission": {"classes": [{"name": "a", "slo": {"tpot": "1s"}}], "tenants": [{"name": "b"}]},
            "spec.cost": {"gpuHour": 2},
        }
    )
    assert kubectl.apply(given)["spec"] == given["spec"]


@pytest.mark.parametrize("way", APPLY_MODES)
@pytest.mark.parametrize(("before", "after"), [(service, aggregated), (aggregated, service)])
def test_tier_shape_change_is_rejected(kubectl: Kubectl, before: Shape, after: Shape, way: str) -> None:
    name = {"metadata.name": f"{before.__name__}-{way}"}
    kubectl.apply(before(**name), *APPLY_MODES[way])
    answer = kubectl.run("apply", *APPLY_MODES[way], "-f", "-", stdin=json.dumps(after(**name)))
    assert "spec.tiers: Forbidden: the shape of tiers cannot change: delete the service" in answer.stderr


@pytest.mark.parametrize("way", APPLY_MODES)
def test_other_fields_can_change(kubectl: Kubectl, way: str) -> None:
    name = {"metadata.name": f"change-{way}"}
    kubectl.apply(service(**name), *APPLY_MODES[way])
    edits = {"spec.model.uri": "pvc://claim/chat", "spec.engine.args": ["--seed", "1"], "spec.tiers.decode.gpus": 4}
    assert kubectl.apply(service(**name, **edits), *APPLY_MODES[way])["metadata"]["generation"] == 2
    edits |= {"spec.engine.runtime": "simulated", "spec.scaling.paused": True, "spec.cost": {"gpuHour": 2}}
    assert kubectl.apply(service(**name, **edits), *APPLY_MODES[way])["metadata"]["generation"] == 3
    edits |= {"spec.slo": {"tpot": "50ms"}, "spec.admission": {"whenFull": "Shed"}, "spec.tiers.decode.minReplicas": 0}
    edits |= {"spec.tiers.prefill.minReplicas": 0}
    assert kubectl.apply(service(**name, **edits), *APPLY_MODES[way])["metadata"]["generation"] == 4


def test_server_side_apply_merges_classes_and_tenants(kubectl: Kubectl) -> None:
    def manifest(name: str) -> Manifest:
        admission = {"classes": [{"name": name}], "tenants": [{"name": name}]}
        return service(**{"metadata.name": "teams", "spec.slo": {"tpot": "50ms"}, "spec.admission": admission})

    kubectl.apply(manifest("a"), "--server-side", "--field-manager=one")
    stored = kubectl.apply(manifest("b"), "--server-side", "--field-manager=two")
    for listed in ("classes", "tenants"):
        assert [entry["name"] for entry in stored["spec"]["admission"][listed]] == ["a", "b"]


def test_server_side_apply_merges_environment(kubectl: Kubectl) -> None:
    def manifest(variable: str) -> Manifest:
        return service(**{"metadata.name": "shared", "spec.engine.env": [{"name": variable, "value": "x"}]})

    kubectl.apply(manifest("A"), "--server-side", "--field-manager=one")
    stored = kubectl.apply(manifest("B"), "--server-side", "--field-manager=two")
    assert [entry["name"] for entry in stored["spec"]["engine"]["env"]] == ["A", "B"]


def test_printer_columns_show_status(kubectl: Kubectl) -> None:
    kubectl.apply(service(**{"metadata.name": "columns", "spec.model.name": "acme/chat"}))
    tier = TierStatus(replicas=2, ready=1, desired=2, summary="1/2", revision="abc", selector="a=b")
    ready = ConditionStatus(
        type="Ready", status="True", reason="Serving", message="m", last_transition_time=_now(), observed_generation=1
    )
    status = InferenceServiceStatus(
        observed_generation=1,
        url="http://gateway/v1",
        model_names=("acme/chat", "default/columns"),
        conditions=(ready,),
        tiers=TiersStatus(prefill=tier, decode=tier),
        slo=SloStatus(ttft="412ms", tpot="38ms"),
        limited_by="decode TPOT",
    )
    patch = json.dumps({"status": status.manifest()})
    kubectl.run_ok("patch", "plim", "columns", "--subresource=status", "--type=merge", "-p", patch)
    head, row = kubectl.run_ok("get", "plim", "columns").splitlines()
    assert head.split() == [*COLUMNS, "AGE"]
    shown = ["columns", "acme/chat", "True", "1/2", "1/2", "412ms", "38ms", "decode", "TPOT", "Serving"]
    assert row.split()[: len(shown)] == shown
    assert len(head) < LINE
    wide, _ = kubectl.run_ok("get", "plim", "columns", "-o", "wide").splitlines()
    assert wide.split() == [*COLUMNS, "AGE", "OFFERED", "ATTAINMENT", "PER-MTOK", "URL"]
    assert parse(kubectl.get("plim", "columns")).status == status


def test_full_status_is_stored_unchanged(kubectl: Kubectl) -> None:
    kubectl.apply(service(**{"metadata.name": "told"}))
    patch = json.dumps({"status": STATUS.manifest()})
    kubectl.run_ok("patch", "plim", "told", "--subresource=status", "--type=merge", "-p", patch)
    stored = kubectl.get("plim", "told")
    assert stored["status"] == STATUS.manifest()
    assert parse(stored).status == STATUS


def test_admission_publication_round_trips(kubectl: Kubectl) -> None:
    parent = kubectl.apply(service(**{"metadata.name": "admitting"}))
    limits = AdmissionLimits(("default",), ready_capacity=0.5, starting=False, shares={"gateway-0": 7})
    engines = PublishedEngines({"serve": EngineTemplate("r1", max_queued=64)}, unplaced=("serve",))
    made = objects.admission(parent, codec.encode(limits), engines)
    stored = kubectl.apply(made, "--server-side", "--field-manager=operator")
    assert stored["limits"] == codec.encode(limits)
    assert codec.decode(AdmissionLimits, stored["limits"]) == limits
    assert codec.decode(PublishedEngines, stored["engines"]) == engines
    without = kubectl.apply(objects.admission(parent, None, engines), "--server-side", "--field-manager=operator")
    assert "limits" not in without


def test_admission_limits_of_earlier_releases_leave_the_status(kubectl: Kubectl) -> None:
    kubectl.apply(service(**{"metadata.name": "upgraded"}))
    patch = json.dumps({"status": {"url": "http://x", "admission": {"version": 4}}})
    kubectl.run_ok("patch", "plim", "upgraded", "--subresource=status", "--type=merge", "-p", patch)
    assert kubectl.get("plim", "upgraded")["status"] == {"url": "http://x"}


def test_status_in_manifest_is_ignored(kubectl: Kubectl) -> None:
    stored = kubectl.apply(service(**{"metadata.name": "no-status", "status": {"url": "http://x"}}))
    assert "status" not in stored


def test_resource_names_resolve(kubectl: Kubectl) -> None:
    kubectl.apply(service(**{"metadata.name": "named"}))
    for name in ("inferenceservices", "inferenceservice", "plim", "plimsoll"):
        assert "named" in kubectl.run_ok("get", name)


def test_kubectl_explain_describes_field(kubectl: Kubectl) -> None:
    reported = kubectl.run_ok("explain", "plim.spec.tiers.decode.gpus")
    assert "GPUs of each pod" in reported


def test_crd_is_structural_and_names_are_accepted(kubectl: Kubectl) -> None:
    found = kubectl.get("crd", "inferenceservices.plimsoll.dev")
    conditions = {entry["type"]: entry["status"] for entry in found["status"]["conditions"]}
    assert conditions["NamesAccepted"] == "True"
    assert conditions["Established"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
