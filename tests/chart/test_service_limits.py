"""`serviceLimits`: what an InferenceService may ask for, refused and allowed by a real API server."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from plimsoll.resources.platform_config import PlatformConfig
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


def adopting(namespace: str, service_name: str, mode: str | None = "Auto", **reference: str) -> Object:
    """A service with a target. mode: of scaling; None leaves it away."""
    made = service(namespace, service_name)
    del made["spec"]["tiers"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"} | reference
    made["spec"]["targets"] = {"serve": {"scaleTargetRef": target, "metricsPort": 8000, "maxReplicas": 2}}
    if mode is not None:
        made["spec"]["scaling"] = {"mode": mode}
    if mode == "Auto":
        made["spec"]["slo"] = {"ttft": "2s", "tpot": "60ms"}
    return made


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


def cached_on_host(manifest: Object, path: str = "/var/models") -> Object:
    spec = manifest["spec"]
    return manifest | {"spec": {**spec, "model": {**spec["model"], "cache": {"hostPath": path}}}}


@pytest.mark.api
def test_default_limits_refuse_cache_of_the_node(by_default: Apply) -> None:
    answer = by_default(cached_on_host(service("limits-default")))
    assert "denied request: spec.model.cache.hostPath: hostPath is not of an allowed kind of volume" in answer
    assert "serviceLimits.volumeTypes" in answer


def test_node_cache_needs_a_folder_of_the_platform() -> None:
    without, given = ({}, {"engine": {"nodeCache": {"path": "/var/cache/plimsoll", "size": "500Gi"}}})
    rules = [str(find(render(values), POLICY)) for values in (without, given)]
    assert ["this platform has no cache on its nodes" in text for text in rules] == [True, False]
    config = yaml.safe_load(find(render(given), "ConfigMap", "plimsoll-operator")["data"]["operator.yaml"])
    assert PlatformConfig.model_validate(config).engine.node_cache.max_bytes == 500 * 2**30


@pytest.mark.api
def test_default_limits_refuse_node_cache_without_folder(by_default: Apply) -> None:
    manifest = cached_on_host(service("limits-default"))
    manifest["spec"]["model"] = {"uri": "hf://Qwen/Qwen3-8B", "cache": {"nodeLocal": True}}
    assert "denied request: spec.model.cache.nodeLocal: this platform has no cache on its nodes" in by_default(manifest)


def test_cache_of_the_node_can_be_allowed() -> None:
    rules = [str(find(render({"serviceLimits": {"volumeTypes": kinds}}), POLICY)) for kinds in (["hostPath"], ["csi"])]
    assert ["model.cache.hostPath" in text for text in rules] == [False, True]


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
        made = adopting(namespace, "adopted", mode=None)
        assert "created" in apply(made)
        made["spec"]["targets"]["serve"]["maxReplicas"] = 4
        assert "configured" in apply(made), "an update of it"


@pytest.fixture(scope="module")
def users(cluster: ApiServer, by_default: Apply) -> str:
    """A namespace in which editor and scaler may write services, and scaler may scale Deployment `theirs`."""
    namespace = "limits-default"

    def grant(name: str, rule: str, *people: str) -> None:
        kubectl(cluster, "create", "role", name, "-n", namespace, *rule.split())
        bound = [f"--user={one}" for one in people]
        answer = kubectl(cluster, "create", "rolebinding", name, "-n", namespace, f"--role={name}", *bound)
        assert "created" in answer, answer

    writes = "--verb=get,create,update,patch --resource=inferenceservices.plimsoll.dev"
    grant("services", writes, "editor", "scaler")
    grant("scale", "--verb=update --resource=deployments.apps/scale --resource-name=theirs", "scaler")
    return namespace


@pytest.mark.api
def test_auto_target_needs_the_scale_right(by_default: Apply, users: str) -> None:
    answer = by_default(adopting(users, "auto"), "--as=editor")
    assert "denied request: spec.targets.serve.scaleTargetRef: in mode Auto" in answer
    assert "user editor may not update deployments.apps/scale theirs in namespace limits-default" in answer
    assert "set spec.scaling.mode to Recommend, or grant the right" in answer
    assert "created" in by_default(adopting(users, "auto"), "--as=scaler", "--dry-run=server")
    other = by_default(adopting(users, "auto", name="other"), "--as=scaler")
    assert "user scaler may not update deployments.apps/scale other" in other
    stateful = by_default(adopting(users, "auto", kind="StatefulSet"), "--as=scaler")
    assert "user scaler may not update statefulsets.apps/scale theirs" in stateful


@pytest.mark.api
@pytest.mark.parametrize(("role", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_auto_target_of_a_pair_needs_the_scale_right(by_default: Apply, users: str, role: str, other: str) -> None:
    """Each role: scaler may scale Deployment theirs alone."""
    made = adopting(users, "pair")
    target = made["spec"]["targets"].pop("serve")
    foreign = {**target, "scaleTargetRef": {**target["scaleTargetRef"], "name": "other"}}
    made["spec"]["targets"] = {role: foreign, other: target}
    answer = by_default(made, "--as=scaler", "--dry-run=server")
    assert f"denied request: spec.targets.{role}.scaleTargetRef: in mode Auto" in answer
    assert "user scaler may not update deployments.apps/scale other" in answer
    foreign["scaleTargetRef"] |= {"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout"}
    assert "rollouts.argoproj.io is not in the chart value" in by_default(made, "--dry-run=server")
    made["spec"]["scaling"]["mode"] = "Recommend"
    assert "created" in by_default(made, "--as=editor", "--dry-run=server")


@pytest.mark.api
@pytest.mark.parametrize("mode", [None, "Recommend", "Off"])
def test_target_that_is_not_scaled_needs_no_right(by_default: Apply, users: str, mode: str | None) -> None:
    assert "created" in by_default(adopting(users, "reads", mode), "--as=editor", "--dry-run=server")


@pytest.mark.api
def test_update_that_scales_a_target_needs_right(cluster: ApiServer, by_default: Apply, users: str) -> None:
    """Bounds are of the target or of the schedule: both set the count. All else of a service others may change."""
    assert "created" in by_default(adopting(users, "kept", "Recommend"), "--as=editor")
    denied = "user editor may not update deployments.apps/scale theirs"
    auto = adopting(users, "kept")
    assert denied in by_default(auto, "--as=editor")
    assert "configured" in by_default(auto, "--as=scaler")
    bounded = adopting(users, "kept")
    bounded["spec"]["targets"]["serve"]["maxReplicas"] = 900
    assert denied in by_default(bounded, "--as=editor")
    scheduled = adopting(users, "kept")
    hours = {"from": "08:00", "until": "09:00", "minReplicas": 900, "maxReplicas": 900}
    scheduled["spec"]["scaling"]["schedule"] = [hours]
    assert denied in by_default(scheduled, "--as=editor")
    renamed = adopting(users, "kept", name="other")
    assert "may not update deployments.apps/scale other" in by_default(renamed, "--as=scaler")
    with_slo = adopting(users, "kept")
    with_slo["spec"]["slo"] = {"ttft": "3s", "tpot": "70ms"}
    assert "configured" in by_default(with_slo, "--as=editor")
    marked = kubectl(
        cluster, "patch", "inferenceservice", "kept", "-n", users, "--as=editor", "--type=merge",
        "-p", '{"metadata":{"labels":{"x":"y"},"finalizers":["example.com/x"]}}',
    )  # fmt: skip
    assert "patched" in marked
    kubectl(cluster, "patch", "inferenceservice", "kept", "-n", users, "--type=merge", "-p",
            '{"metadata":{"finalizers":null}}')  # fmt: skip
    assert "configured" in by_default(adopting(users, "kept", "Recommend"), "--as=editor"), "the way out needs no right"


@pytest.mark.api
def test_auto_target_of_unknown_kind_is_refused(by_default: Apply, users: str) -> None:
    """Also for an administrator: the right to check is unknown, as no API tells CEL the resource of a kind."""
    rollout = adopting(users, "rollout", apiVersion="argoproj.io/v1alpha1", kind="Rollout")
    answer = by_default(rollout)
    assert (
        "Plimsoll may not scale argoproj.io/v1alpha1 Rollout: rollouts.argoproj.io is not in the chart value" in answer
    )
    assert "targets.resources" in answer
    rollout["spec"]["scaling"]["mode"] = "Recommend"
    assert "created" in by_default(rollout, "--dry-run=server")


@pytest.mark.api
@pytest.mark.parametrize(
    ("kind", "resource"), [("Proxy", "proxies"), ("Batch", "batches"), ("Gateway", "gateways"), ("Class", "classes")]
)
def test_kind_of_target_has_regular_plural(by_default: Apply, users: str, kind: str, resource: str) -> None:
    made = adopting(users, "plural", apiVersion="example.com/v1", kind=kind)
    assert f"{resource}.example.com is not in the chart value" in by_default(made)


def test_scale_right_covers_kinds_of_chart() -> None:
    values = {"targets": {"resources": [{"apiGroup": "leaderworkerset.x-k8s.io", "resources": ["leaderworkersets"]}]}}
    rules = json.dumps(find(render(values), POLICY))
    assert "leaderworkersets.leaderworkerset.x-k8s.io" in rules
    assert "deployments.apps" in rules
    assert "statefulsets.apps" not in rules


def test_scale_right_can_be_waived() -> None:
    assert "authorizer" in json.dumps(find(render(), POLICY))
    assert "authorizer" not in json.dumps(find(render({"serviceLimits": {"requireScaleRight": False}}), POLICY))


def test_scale_right_of_an_earlier_chart_is_required() -> None:
    """As `helm upgrade --reuse-values` renders it from a chart that had the other limits alone."""
    assert "authorizer" in json.dumps(find(render({"serviceLimits": {"requireScaleRight": None}}), POLICY))


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
    assert "created" in kubectl(
        cluster, "apply", "-f", "-", stdin=cached_on_host(service(namespace, engine=image, **old))
    )
    applying = limited(cluster, namespace, STRICT)
    apply = next(applying)
    changed = service(namespace, engine={**image, "args": ["--seed", "1"]}, **old)
    assert "configured" in apply(cached_on_host(changed))
    assert "spec.model.cache.hostPath: hostPath is not of an allowed kind" in apply(cached_on_host(changed, "/etc"))
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
    for limits in ({"enabled": False}, {**everything, "ipcLock": True, "requireScaleRight": False}):
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
