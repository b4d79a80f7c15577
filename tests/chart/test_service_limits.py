"""`serviceLimits`: what an InferenceService may ask for, refused and allowed by a real API server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import builders
from tests.apiserver import ApiServer
from tests.chart.rendering import Object, RenderError, find, of_kind, render

POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
STRICT: Object = {
    "serviceAccounts": ["engines", "team-*"],
    "priorityClasses": [],
    "runtimeClasses": ["nvidia"],
    "images": ["registry.example.com/team/*", "registry.example.com/base:1"],
}
MOUNTED: Object = {"name": "data", "hostPath": {"path": "/data"}}
Apply = Callable[..., str]


def kubectl(server: ApiServer, *argv: str, stdin: Any = None) -> str:
    """What kubectl printed, errors included."""
    command = [str(server.kubectl), f"--kubeconfig={server.kubeconfig}", *argv]
    text = None if stdin is None else json.dumps(stdin)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def service(namespace: str, name: str = "chat", engine: Object | None = None, **pod: Any) -> Object:
    more = {"engine": engine} if engine else {}
    made = builders.service(name, namespace, tiers={"serve": {"pod": pod}}, **more)
    return made | {"metadata": {"name": name, "namespace": namespace}}


def limited(server: ApiServer, namespace: str, limits: Object) -> Iterator[Apply]:
    """Applies services in a namespace with these limits, which hold there only."""
    kubectl(server, "create", "namespace", namespace)
    values = {"watchNamespaces": [namespace], "serviceLimits": limits}
    objects = render(values, "--name-template", namespace)
    made = [o for o in objects if o["kind"] in (POLICY, BINDING)]
    for one in made:
        answer = kubectl(server, "apply", "-f", "-", stdin=one)
        assert "created" in answer, answer

    def apply(manifest: Object, *options: str) -> str:
        return kubectl(server, "apply", *options, "-f", "-", stdin=manifest)

    refused = service(namespace, "probe", volumes=[MOUNTED])
    deadline = time.monotonic() + 60
    while "denied" not in (answer := apply(refused, "--dry-run=server")):  # a policy takes a moment to be in force
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    yield apply
    for one in made:
        kubectl(server, "delete", one["kind"].lower(), one["metadata"]["name"])
    kubectl(server, "delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def by_default(cluster: ApiServer) -> Iterator[Apply]:
    yield from limited(cluster, "limits-default", {})


@pytest.fixture(scope="module")
def strict(cluster: ApiServer) -> Iterator[Apply]:
    yield from limited(cluster, "limits-strict", STRICT)


@pytest.mark.api
@pytest.mark.parametrize("kind", ["hostPath", "nfs"])
def test_default_limits_refuse_host_volumes(by_default: Apply, kind: str) -> None:
    source = {"path": "/data", **({"server": "10.0.0.1"} if kind == "nfs" else {})}
    answer = by_default(service("limits-default", volumes=[{"name": "data", kind: source}]))
    assert "denied request: spec.tiers.serve.pod.volumes" in answer
    assert f"volume data ({kind}) is not of an allowed kind" in answer
    assert "serviceLimits.volumeTypes" in answer


@pytest.mark.api
def test_default_limits_refuse_ipc_lock(by_default: Apply) -> None:
    assert "spec.tiers.serve.pod.ipcLock: the capability IPC_LOCK is not allowed" in by_default(
        service("limits-default", ipcLock=True)
    )


@pytest.mark.api
def test_default_limits_allow_everything_else(by_default: Apply) -> None:
    pod = {
        "serviceAccountName": "any",
        "priorityClassName": "any",
        "runtimeClassName": "any",
        "volumes": [
            {"name": "a", "emptyDir": {}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "c"}},
            {"name": "c", "secret": {"secretName": "s"}},
            {"name": "d", "projected": {"sources": []}},
        ],
    }
    made = service("limits-default", "free", engine={"image": "anything:1"}, **pod)
    assert "created" in by_default(made)
    assert "created" in by_default(service("limits-default", "plain") | {"kind": "InferenceService"})


@pytest.mark.api
@pytest.mark.parametrize(
    ("pod", "says"),
    [
        ({"serviceAccountName": "admin"}, "serviceAccountName: admin is not allowed; allowed: engines, team-*"),
        ({"priorityClassName": "high"}, "priorityClassName: high is not allowed; allowed: none"),
        ({"runtimeClassName": "kata"}, "runtimeClassName: kata is not allowed; allowed: nvidia"),
    ],
)
def test_strict_limits_refuse_names_with_their_field(strict: Apply, pod: Object, says: str) -> None:
    assert f"denied request: spec.tiers.serve.pod.{says}" in strict(service("limits-strict", **pod))


@pytest.mark.api
def test_limits_allow_targets_in_place_of_tiers(by_default: Apply, strict: Apply) -> None:
    """Targets have no pods that the operator makes, and a service with targets has no tiers."""
    for apply, namespace in ((by_default, "limits-default"), (strict, "limits-strict")):
        made = service(namespace, "adopted")
        del made["spec"]["tiers"]
        reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"}
        made["spec"]["targets"] = {"serve": {"scaleTargetRef": reference, "metricsPort": 8000, "maxReplicas": 2}}
        assert "created" in apply(made)
        made["spec"]["targets"]["serve"]["maxReplicas"] = 4
        assert "configured" in apply(made), "an update of it"


@pytest.mark.api
@pytest.mark.parametrize("image", ["other/engine:1", "registry.example.com/teams/x:1", "registry.example.com/base:12"])
def test_strict_limits_refuse_other_images(strict: Apply, image: str) -> None:
    answer = strict(service("limits-strict", engine={"image": image}))
    assert f"denied request: spec.engine.image: {image} is not an allowed image" in answer


@pytest.mark.api
@pytest.mark.parametrize("image", ["registry.example.com/team/x/engine:1", "registry.example.com/base:1"])
def test_strict_limits_allow_listed_values(strict: Apply, image: str) -> None:
    pod = {"serviceAccountName": "team-a", "runtimeClassName": "nvidia"}
    answer = strict(service("limits-strict", engine={"image": image}, **pod), "--dry-run=server")
    assert "created" in answer


@pytest.mark.api
def test_limits_apply_to_each_tier(strict: Apply) -> None:
    tiers = {"prefill": {}, "decode": {"pod": {"volumes": [MOUNTED]}}}
    made = builders.service("pd", "limits-strict", tiers=tiers) | {
        "metadata": {"name": "pd", "namespace": "limits-strict"}
    }
    assert "denied request: spec.tiers.decode.pod.volumes: volume data (hostPath)" in strict(made)


@pytest.mark.api
def test_value_that_service_has_stays_allowed(cluster: ApiServer) -> None:
    """A limit that came later breaks no change of another field, and allows no other value of the same kind."""
    namespace = "limits-later"
    kubectl(cluster, "create", "namespace", namespace)
    old = {"volumes": [MOUNTED], "serviceAccountName": "admin", "ipcLock": True}
    image = {"image": "other/engine:1"}
    assert "created" in kubectl(cluster, "apply", "-f", "-", stdin=service(namespace, engine=image, **old))
    applying = limited(cluster, namespace, STRICT)
    apply = next(applying)
    changed = service(namespace, engine={**image, "args": ["--seed", "1"]}, **old)
    assert "configured" in apply(changed)
    elsewhere = {**old, "volumes": [{"name": "data", "hostPath": {"path": "/etc"}}]}
    assert "volume data (hostPath) is not of an allowed kind" in apply(service(namespace, engine=image, **elsewhere))
    assert "root is not allowed" in apply(service(namespace, engine=image, **{**old, "serviceAccountName": "root"}))
    assert list(applying) == []


def test_limits_cover_managed_namespaces_only() -> None:
    assert "matchResources" not in find(render(), BINDING)["spec"]
    selector = {"matchLabels": {"team": "x"}}
    values = {"watchNamespaces": ["a", "b"], "serviceLimits": {"namespaceSelector": selector}}
    managed = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    assert find(render(values), BINDING)["spec"]["matchResources"] == {
        "namespaceSelector": {**selector, "matchExpressions": [managed]}
    }


def test_limits_can_be_off() -> None:
    everything = {
        key: ["*"] for key in ("volumeTypes", "serviceAccounts", "priorityClasses", "runtimeClasses", "images")
    }
    for limits in ({"enabled": False}, {**everything, "ipcLock": True}):
        assert [o for o in render({"serviceLimits": limits}) if o["kind"] in (POLICY, BINDING)] == []


def test_limits_of_an_earlier_chart_are_absent() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    assert of_kind(render({"serviceLimits": None}), POLICY) == []


@pytest.mark.parametrize(
    ("key", "name"), [("images", "registry.example.com*"), ("images", "a'b"), ("serviceAccounts", "A"), ("images", "")]
)
def test_limits_reject_unsafe_patterns(key: str, name: str) -> None:
    with pytest.raises(RenderError, match=key):
        render({"serviceLimits": {key: [name]}})
