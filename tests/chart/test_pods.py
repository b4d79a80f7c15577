"""The pods of operator, gateway and `helm test`: who they are, how they start, stay and end."""

from __future__ import annotations

import pytest

from plimsoll.gateway.settings import Settings
from tests.chart.rendering import EVERYTHING, ROOT, Object, containers, find, of_kind, pod_specs, render

LOCAL = ("--values", str(ROOT / "charts/plimsoll/ci/local-values.yaml"))


def offences(spec: Object) -> list[str]:
    """What the `restricted` pod security standard, and a read-only root, would object to."""
    pod = spec["securityContext"]
    found = []
    if pod.get("runAsNonRoot") is not True or pod.get("runAsUser") == 0:
        found.append("may run as root")
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("no seccomp profile")
    found += [f"{key} is shared" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [f"volume {v['name']}" for v in spec.get("volumes", []) if not {"emptyDir", "configMap"} & set(v)]
    for container in containers(spec):
        own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        if container.get("securityContext") != own:
            found.append(f"{container['name']}: {container.get('securityContext')}")
        found += [f"host port {p}" for p in container.get("ports", []) if "hostPort" in p]
    return found


@pytest.mark.parametrize("name", ["plimsoll-operator", "plimsoll-gateway", "plimsoll-test"])
def test_pods_are_restricted(name: str) -> None:
    for objects in (render(), render(EVERYTHING), render({}, *LOCAL)):
        assert offences(pod_specs(objects)[name]) == []


def test_every_container_has_requests_and_a_memory_limit() -> None:
    for spec in pod_specs(render()).values():
        for container in containers(spec):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert set(container["resources"]["limits"]) == {"memory"}


def test_service_links_do_not_overwrite_settings() -> None:
    assert [spec["enableServiceLinks"] for spec in pod_specs(render()).values()] == [False, False, False]


def test_a_change_of_the_settings_file_restarts_the_operator_only() -> None:
    before, after = render(), render({"engine": {"image": "other:1"}})

    def template(objects: list[Object], part: str) -> Object:
        return find(objects, "Deployment", f"plimsoll-{part}")["spec"]["template"]  # type: ignore[no-any-return]

    assert template(before, "operator") != template(after, "operator")
    assert template(before, "gateway") == template(after, "gateway")


def test_no_downtime_in_a_rollout() -> None:
    for deployment in of_kind(render(), "Deployment"):
        assert deployment["spec"]["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_operator() -> None:
    (container,) = pod_specs(render())["plimsoll-operator"]["containers"]
    assert container["command"] == ["plimsoll", "operator"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probes"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "probes"}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"probes": 8080, "metrics": 8081}


def test_gateway_containers() -> None:
    spec = pod_specs(render())["plimsoll-gateway"]
    init, envoy = spec["initContainers"]
    (picker,) = spec["containers"]
    assert init["command"] == ["plimsoll", "gateway", "init"]
    assert picker["command"] == ["plimsoll", "gateway", "run"]
    assert envoy["restartPolicy"] == "Always"
    assert "restartPolicy" not in init
    assert envoy["command"][:3] == ["envoy", "-c", "/run/plimsoll/envoy.json"]
    assert {m["mountPath"] for c in (init, envoy, picker) for m in c["volumeMounts"] if m["name"] == "run"} == {
        "/run/plimsoll"
    }


def test_envoy_waits_for_the_picker_and_must_not_be_waited_for() -> None:
    envoy = pod_specs(render())["plimsoll-gateway"]["initContainers"][1]
    assert "startupProbe" not in envoy
    assert "readinessProbe" not in envoy
    assert envoy["livenessProbe"]["tcpSocket"] == {"port": "http"}


def test_the_picker_decides_readiness() -> None:
    (picker,) = pod_specs(render())["plimsoll-gateway"]["containers"]
    assert picker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "picker"}
    assert picker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "picker"}


def test_a_hung_picker_is_killed_before_the_pod_turns_unready() -> None:
    (picker,) = pod_specs(render())["plimsoll-gateway"]["containers"]

    def seconds(probe: Object) -> int:
        return probe["periodSeconds"] * probe.get("failureThreshold", 3)  # type: ignore[no-any-return]

    assert seconds(picker["livenessProbe"]) < seconds(picker["readinessProbe"])


@pytest.mark.parametrize("seconds", [30, 600, 7200])
def test_the_grace_of_a_gateway_pod_is_longer_than_its_drain(seconds: int) -> None:
    spec = pod_specs(render({"gateway": {"drainSeconds": seconds}}))["plimsoll-gateway"]
    assert spec["terminationGracePeriodSeconds"] == seconds + 30


def test_the_gateway_understands_its_environment() -> None:
    headers = {"classHeader": "X-Class", "tenantHeader": "X-Tenant", "corsAllowedOrigins": ["https://a.b:8", "*"]}
    values = {"watchNamespaces": ["a", "b"], "gateway": {"drainSeconds": 7, "maxBodyBytes": 104857600, **headers}}
    (picker,) = pod_specs(render(values))["plimsoll-gateway"]["containers"]
    environment = {e["name"]: e["value"] for e in picker["env"] if "value" in e}
    settings = Settings.from_environment(environment)
    assert (settings.namespaces, settings.max_body_bytes, settings.drain_seconds) == (("a", "b"), 104857600, 7)
    assert (settings.port, settings.picker_port, str(settings.directory)) == (8080, 8081, "/run/plimsoll")
    assert (settings.class_header, settings.tenant_header) == ("x-class", "x-tenant")
    assert settings.cors_origins == ("https://a.b:8", "*")


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_one_replica_or_two(part: str) -> None:
    one, two = render({part: {"replicas": 1}}), render({part: {"replicas": 2}})
    name = f"plimsoll-{part}"
    assert "affinity" not in pod_specs(one)[name]
    assert of_kind(one, "PodDisruptionBudget", name) == []

    selector = find(two, "Deployment", name)["spec"]["selector"]
    (term,) = pod_specs(two)[name]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == selector
    assert find(two, "PodDisruptionBudget", name)["spec"] == {"maxUnavailable": 1, "selector": selector}
    off = render({part: {"replicas": 2, "podDisruptionBudget": {"enabled": False}}})
    assert of_kind(off, "PodDisruptionBudget", name) == []


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_placement_is_the_users(part: str) -> None:
    placement = {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "system-cluster-critical",
    }
    spec = pod_specs(render({part: {"replicas": 2, **placement}}))[f"plimsoll-{part}"]
    assert {key: spec[key] for key in placement} == placement


def test_images() -> None:
    digest = "sha256:" + "a" * 64
    values = {
        "image": {"repository": "r/operator", "digest": digest},
        "gateway": {"envoy": {"image": {"repository": "r/envoy", "tag": "v9"}}},
        "imagePullSecrets": [{"name": "pull"}],
    }
    specs = pod_specs(render(values))
    assert {c["image"] for s in specs.values() for c in containers(s)} == {f"r/operator@{digest}", "r/envoy:v9"}
    assert all(spec["imagePullSecrets"] == [{"name": "pull"}] for spec in specs.values())


def test_the_local_cluster_pulls_only_from_its_own_registry() -> None:
    for spec in pod_specs(render({}, *LOCAL)).values():
        for container in containers(spec):
            assert container["image"].startswith("localhost:5001/plimsoll/")
            assert container["imagePullPolicy"] == "Always"
