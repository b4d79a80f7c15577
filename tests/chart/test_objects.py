"""The rendering as a whole, the settings file, the ways in, and who may reach whom."""

from __future__ import annotations

import tomllib

import pytest
import yaml

from plimsoll.api import labels
from plimsoll.resources.platform_config import PlatformConfig
from tests.chart.rendering import (
    CHART,
    EVERYTHING,
    NAMESPACE,
    ROOT,
    SNAPSHOT,
    Object,
    RenderError,
    find,
    merged,
    notes,
    of_kind,
    render,
    snapshot,
)

NAME, INSTANCE, COMPONENT = (f"app.kubernetes.io/{key}" for key in ("name", "instance", "component"))


def settings(values: Object | None = None, *options: str) -> PlatformConfig:
    """The operator's own reading of its settings file."""
    data = [one.get("data", {}) for one in of_kind(render(values, *options), "ConfigMap")]
    [text] = [one["operator.yaml"] for one in data if "operator.yaml" in one]
    return PlatformConfig.model_validate(yaml.safe_load(text))


def test_rollout_of_engines_without_values_of_an_earlier_chart() -> None:
    """As `helm upgrade --reuse-values` renders it."""
    defaults = settings().engine.rollout
    assert settings({"engine": {"rollout": None}}).engine.rollout == defaults
    assert (defaults.generation, defaults.max_unavailable_services, defaults.min_ready_seconds) == (0, 1, 120)


def selector(part: str) -> Object:
    return {"podSelector": {"matchLabels": {NAME: "plimsoll", INSTANCE: "plimsoll", COMPONENT: part}}}


def test_default_rendering_equals_snapshot() -> None:
    assert snapshot() == SNAPSHOT.read_text(), f"if intended: see {SNAPSHOT.parent / 'rendering.py'}"


def test_chart_version_equals_package_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_unsupported_kubernetes_version_is_rejected() -> None:
    assert render({}, "--kube-version", "1.31.0")
    assert render({}, "--kube-version", "v1.31.4-gke.100")
    with pytest.raises(RenderError, match="kubeVersion"):
        render({}, "--kube-version", "1.30.9")


def test_objects_have_labels_and_release_namespace() -> None:
    cluster_wide = (
        "CustomResourceDefinition",
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingWebhookConfiguration",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    )
    for o in render(EVERYTHING | {"commonLabels": {"team": "ml", COMPONENT: "mine"}}):
        labels = o["metadata"]["labels"]
        assert (labels["team"], labels[NAME], labels[INSTANCE]) == ("ml", "plimsoll", "plimsoll")
        assert labels[COMPONENT] != "mine"
        assert o["metadata"].get("namespace") == (None if o["kind"] in cluster_wide else NAMESPACE)


def test_selectors_match_only_their_own_pods() -> None:
    objects = render(EVERYTHING | {"commonLabels": {"team": "ml"}, "nameOverride": "x"})
    pods = {o["metadata"]["name"]: o["spec"]["template"]["metadata"]["labels"] for o in of_kind(objects, "Deployment")}
    for deployment in of_kind(objects, "Deployment"):
        expected = deployment["spec"]["selector"]["matchLabels"].items()
        assert [n for n, labels in pods.items() if expected <= labels.items()] == [deployment["metadata"]["name"]]
        assert pods[deployment["metadata"]["name"]]["team"] == "ml"


@pytest.mark.parametrize(
    ("values", "options", "name"),
    [
        ({}, (), "plimsoll-gateway"),
        ({}, ("--name-template", "llm"), "llm-plimsoll-gateway"),
        ({"nameOverride": "fleet"}, ("--name-template", "llm"), "llm-fleet-gateway"),
        ({"fullnameOverride": "fleet"}, (), "fleet-gateway"),
    ],
)
def test_gateway_service_name_follows_release(values: Object, options: tuple[str, ...], name: str) -> None:
    assert find(render(values, *options), "Service")["metadata"]["name"] == name
    assert settings(values, *options).gateway.service == name


def test_operator_config_reads_rendered_settings() -> None:
    values = {
        "watchNamespaces": ["a"],
        "engine": {
            "image": "r/engine:1",
            "simulatedImage": "r/simulated:1",
            "imagePullSecrets": [{"name": "pull"}],
            "runtimeClassName": "nvidia",
            "defaults": {
                "args": ["--max-model-len", "4096"],
                "env": [{"name": "A", "value": "b"}],
                "resources": {"requests": {"cpu": 4, "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
            },
            "rollout": {"generation": 1_000_000, "maxUnavailableServices": 3, "minReadySeconds": 0, "paused": True},
            "tls": {"secretName": "engine-tls"},
            "nodeCache": {"path": "/var/cache/plimsoll", "size": "500Gi"},
        },
        "metrics": {"from": [{"podSelector": {}}]},
        "networkPolicy": {"enabled": False},
        "gateway": {
            "service": {"port": 8000},
            "shortModelNames": {"namespaces": ["a", "b"]},
        },
        "internalTls": {"secretName": "client-tls"},
    }
    got = settings(values)
    assert got.gateway.short_model_names.namespaces == ("a", "b")
    assert got.internal_tls is not None
    assert got.internal_tls.certificate_directory == "/etc/plimsoll-internal-tls"
    assert got.watch_namespaces == ("a",)
    assert got.engine.model_dump(by_alias=True, mode="json") == {
        "imagePullPolicy": "IfNotPresent",
        "gpuResource": "nvidia.com/gpu",
        "runAsUser": 1000,
        **values["engine"],  # type: ignore[dict-item]
    }
    assert got.metrics.peers == ({"podSelector": {}},)
    assert not got.network_policy.enabled
    assert (got.gateway.namespace, got.gateway.port, got.gateway.picker_port) == (NAMESPACE, 8000, 8081)
    gateway = find(render(values), "Deployment", "plimsoll-gateway")["spec"]["selector"]["matchLabels"]
    assert got.gateway.pod_selector == gateway


def test_operator_config_defaults_are_rendered() -> None:
    got = settings()
    assert got.engine.image.startswith("plimsoll/engine-cuda:")
    assert got.engine.simulated_image == got.engine.image.replace("engine-cuda", "engine-simulated")
    assert got.engine.runtime_class_name is None
    assert (got.watch_namespaces, got.metrics.peers) == ((), ())
    assert got.gateway.short_model_names.namespaces == ()


def test_operator_config_without_values_of_newer_chart() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    assert settings({"gateway": {"shortModelNames": None}}).gateway.short_model_names.namespaces == ()


@pytest.mark.parametrize("namespaces", ["bank", ["Bank"], ["a/b"], ["a", "a"], ["a" * 64], [""]])
def test_short_model_names_invalid_namespaces_are_refused(namespaces: object) -> None:
    with pytest.raises(RenderError, match="shortModelNames"):
        render({"gateway": {"shortModelNames": {"namespaces": namespaces}}})


@pytest.mark.parametrize(
    ("image", "simulated"),
    [
        ("localhost:5001/plimsoll/engine-cpu:dev", "localhost:5001/plimsoll/engine-simulated:dev"),
        ("engine:1", "engine-simulated:1"),
        ("registry:5000/engine", "registry:5000/engine-simulated:0.1.0"),
        ("registry/team/engine@sha256:" + "0" * 64, "registry/team/engine-simulated:0.1.0"),
        ("registry/team/engine:1@sha256:" + "0" * 64, "registry/team/engine-simulated:0.1.0"),
    ],
)
def test_simulated_image_is_derived_from_engine_image(image: str, simulated: str) -> None:
    assert settings({"engine": {"image": image}}).engine.simulated_image == simulated


def test_engine_user_can_be_left_to_the_platform() -> None:
    assert settings().engine.run_as_user == 1000
    assert settings({"engine": {"runAsUser": 4321}}).engine.run_as_user == 4321
    assert settings({"engine": {"runAsUser": None}}).engine.run_as_user is None


def test_crd_judges_an_absent_gpu_resource_by_the_charts() -> None:
    default, neuron = (
        str(of_kind(render(values), "CustomResourceDefinition"))
        for values in ({}, {"engine": {"gpuResource": "aws.amazon.com/neuron"}})
    )
    absent = ": 'nvidia.com/gpu')"
    assert default.count(absent) == 9  # in pod.resources twice and in parallel sizes, for each role
    assert default.replace(absent, ": 'aws.amazon.com/neuron')") == neuron


def test_crds_can_be_kept_dropped_or_left_out() -> None:
    kept = of_kind(render(), "CustomResourceDefinition")
    assert [one["metadata"]["annotations"] for one in kept] == [{"helm.sh/resource-policy": "keep"}] * 3
    dropped = of_kind(render({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert ["annotations" in one["metadata"] for one in dropped] == [False] * 3
    assert of_kind(render({"crds": {"install": False}}), "CustomResourceDefinition") == []


def test_gateway_is_not_exposed_by_default() -> None:
    objects = render()
    spec = find(objects, "Service")["spec"]
    assert spec["type"] == "ClusterIP"
    assert spec["ports"] == [{"name": "http", "port": 80, "targetPort": 8080}]
    assert {o["kind"] for o in objects} & {"Ingress", "HTTPRoute"} == set()


def test_https_reaches_all_that_names_the_port() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "front"}]}
    gateway: Object = {"tls": {"secretName": "door"}, "ingress": {"enabled": True}, "httpRoute": route}
    objects = render({"gateway": gateway})
    (port,) = find(objects, "Service", "plimsoll-gateway")["spec"]["ports"]
    assert port == {"name": "https", "port": 443, "targetPort": 8080, "appProtocol": "https"}
    (path,) = find(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["port"] == {"name": "https"}
    (backend,) = find(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend["port"] == 443
    (test,) = [o for o in objects if o["kind"] == "Pod"]
    assert "https://plimsoll-gateway:443/v1/models" in test["spec"]["containers"][0]["command"][2]
    assert settings({"gateway": gateway}).gateway.url == f"https://plimsoll-gateway.{NAMESPACE}.svc/v1"
    custom = settings({"gateway": gateway | {"service": {"port": 8443}}}).gateway.url
    assert custom == f"https://plimsoll-gateway.{NAMESPACE}.svc:8443/v1"
    text = notes({"gateway": gateway})
    assert "service/plimsoll-gateway 8088:443" in text
    assert "curl -N --insecure $URL" in text
    assert "http://" not in text


def test_notes_warn_of_keys_in_clear_text() -> None:
    keys = {"authentication": {"apiKeys": "Required"}}
    assert "travel in clear text" in notes({"gateway": keys})
    assert "travel in clear text" not in notes({"gateway": keys | {"tls": {"secretName": "door"}}})


@pytest.mark.parametrize(
    ("mode", "warning"), [("Disabled", ""), ("Optional", "API keys are OPTIONAL"), ("Required", "")]
)
def test_notes_know_that_issuers_require_tokens(mode: str, warning: str) -> None:
    issuer = {"issuer": "https://a.example", "audiences": ["llm"], "jwksUri": "https://a.example/keys"}
    text = notes({"gateway": {"authentication": {"apiKeys": mode, "jwt": {"issuers": [issuer]}}}})
    assert ("any client that reaches it" in text) == bool(warning)
    assert warning in text
    assert ("Bearer $TOKEN" in text) == (mode == "Disabled")
    assert "tokens travel in clear text" in text


def test_load_balancer_service_settings_are_rendered() -> None:
    expected = {
        "externalTrafficPolicy": "Local",
        "loadBalancerClass": "example.com/nlb",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
    }
    service = {"type": "LoadBalancer", "annotations": {"a": "b"}, "nodePort": 30001, **expected}
    got = find(render({"gateway": {"service": service}}), "Service")
    assert {key: got["spec"][key] for key in expected} == expected
    assert got["spec"]["ports"][0]["nodePort"] == 30001
    assert got["metadata"]["annotations"] == {"a": "b"}


def test_settings_of_other_service_types_are_omitted() -> None:
    service = {"loadBalancerClass": "x", "externalTrafficPolicy": "Local", "nodePort": 30001}
    spec = find(render({"gateway": {"service": service}}), "Service")["spec"]
    assert set(spec) == {"type", "selector", "ports"}
    assert "nodePort" not in spec["ports"][0]


def test_ingress_renders_hosts_and_tls() -> None:
    ingress = {"enabled": True, "className": "nginx", "hosts": ["a.example", "b.example"], "tls": [{"secretName": "t"}]}
    spec = find(render({"gateway": {"ingress": ingress}}), "Ingress")["spec"]
    assert (spec["ingressClassName"], spec["tls"]) == ("nginx", [{"secretName": "t"}])
    assert [rule["host"] for rule in spec["rules"]] == ["a.example", "b.example"]
    for rule in spec["rules"]:
        assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "plimsoll-gateway", "port": {"name": "http"}}


def test_ingress_without_hosts_matches_any_host() -> None:
    (rule,) = find(render({"gateway": {"ingress": {"enabled": True}}}), "Ingress")["spec"]["rules"]
    assert "host" not in rule


def test_http_route_has_no_request_timeout() -> None:
    route = {"enabled": True, "parentRefs": [{"name": "front"}], "hostnames": ["a.example"]}
    spec = find(render({"gateway": {"httpRoute": route}}), "HTTPRoute")["spec"]
    assert (spec["parentRefs"], spec["hostnames"]) == ([{"name": "front"}], ["a.example"])
    backend = [{"name": "plimsoll-gateway", "port": 80}]
    assert spec["rules"] == [{"backendRefs": backend, "timeouts": {"request": "0s"}}]


def test_network_policies_admit_clients_and_operator() -> None:
    objects = render()
    operator, gateway = (find(objects, "NetworkPolicy", f"plimsoll-{p}")["spec"] for p in ("operator", "gateway"))
    assert operator["ingress"] == []
    assert gateway["ingress"] == [
        {"ports": [{"port": 8080, "protocol": "TCP"}]},
        {"ports": [{"port": 8081, "protocol": "TCP"}], "from": [selector("operator")]},
        {"ports": [{"port": 8082, "protocol": "TCP"}], "from": [selector("gateway")]},
    ]
    for spec, part in ((operator, "operator"), (gateway, "gateway")):
        assert spec["policyTypes"] == ["Ingress"]
        assert spec["podSelector"] == selector(part)["podSelector"]


def test_network_policies_admit_named_peers() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}
    front = {"podSelector": {"matchLabels": {"app": "front"}}}
    objects = render({"metrics": {"from": [prometheus]}, "networkPolicy": {"clients": [front]}})
    (scrape,) = find(objects, "NetworkPolicy", "plimsoll-operator")["spec"]["ingress"]
    assert scrape == {"ports": [{"port": 8081, "protocol": "TCP"}], "from": [prometheus]}
    requests, picker, _ = find(objects, "NetworkPolicy", "plimsoll-gateway")["spec"]["ingress"]
    assert requests["from"] == [front, selector("test")]
    assert picker["from"] == [selector("operator"), prometheus]


EGRESS: Object = {"networkPolicy": {"egress": {"enabled": True}}}
DNS_PORTS = [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")]


def tcp(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def engines(namespaces: Object) -> list[Object]:
    role = {"key": labels.ROLE, "operator": "Exists"}
    return [{"namespaceSelector": namespaces, "podSelector": {"matchExpressions": [role]}}]


def test_egress_of_operator_and_gateway_is_what_they_call() -> None:
    objects = render(EGRESS)
    base = [{"ports": DNS_PORTS}, {"ports": tcp(443, 6443)}]
    operator, gateway = (find(objects, "NetworkPolicy", f"plimsoll-{p}")["spec"] for p in ("operator", "gateway"))
    assert operator["policyTypes"] == gateway["policyTypes"] == ["Ingress", "Egress"]
    assert operator["egress"] == [
        *base,
        {"to": [selector("gateway")], "ports": tcp(8081)},
        {"to": engines({})},  # services choose the ports of their engines
    ]
    assert gateway["egress"] == [
        *base,
        {"to": [selector("gateway")], "ports": tcp(8082)},
        {"to": engines({})},
    ]


def test_egress_follows_watched_namespaces_and_peers() -> None:
    peer = {"ipBlock": {"cidr": "10.0.0.10/32"}}
    rule = {"to": [peer], "ports": tcp(9)}
    more = {"dns": [peer], "apiServer": [peer], "apiServerPorts": [16443], "gateway": [rule], "operator": [rule]}
    values = merged(merged(EGRESS, {"networkPolicy": {"egress": more}}), {"watchNamespaces": ["a"]})
    objects = render(values)
    managed = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a"]}]}
    for part in ("operator", "gateway"):
        dns, server, *others = find(objects, "NetworkPolicy", f"plimsoll-{part}")["spec"]["egress"]
        assert dns == {"ports": DNS_PORTS, "to": [peer]}
        assert server == {"ports": tcp(16443), "to": [peer]}
        assert others[-1] == rule
        assert others[-2]["to"] == engines(managed)


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("http://prometheus.monitoring:9090", 9090),
        ("http://prometheus.monitoring", 80),
        ("https://metrics.example/path", 443),
        ("http://user:pass@host:9091/x", 9091),
    ],
)
def test_egress_of_operator_has_port_of_prometheus(url: str, port: int) -> None:
    objects = render(merged(EGRESS, {"monitoring": {"prometheus": {"url": url}}}))
    assert find(objects, "NetworkPolicy", "plimsoll-operator")["spec"]["egress"][-1] == {"ports": tcp(port)}


def test_egress_without_values_of_newer_chart_has_defaults() -> None:
    """As `helm upgrade --reuse-values --set networkPolicy.egress.enabled=true` renders it from an earlier chart."""
    parts = ("dns", "apiServer", "apiServerPorts", "modelHub", "engines", "gateway", "operator")
    values = {"networkPolicy": {"egress": {"enabled": True, **dict.fromkeys(parts)}}}
    assert of_kind(render(values), "NetworkPolicy") == of_kind(render(EGRESS), "NetworkPolicy")
    assert settings(values).network_policy.egress == settings(EGRESS).network_policy.egress


def test_egress_settings_reach_the_operator() -> None:
    rule = {"to": [{"ipBlock": {"cidr": "10.0.0.10/32"}}]}
    assert settings().network_policy.egress is None
    egress = {"modelHub": False, "engines": [rule], "dns": [{"podSelector": {}}]}
    got = settings(merged(EGRESS, {"networkPolicy": {"egress": egress}})).network_policy.egress
    assert got is not None
    assert (got.model_hub, got.rules, got.dns) == (False, (rule,), ({"podSelector": {}},))


def test_network_policies_can_be_disabled() -> None:
    assert of_kind(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


def test_pod_monitors_are_rendered_on_request() -> None:
    assert of_kind(render(), "PodMonitor") == []
    values: Object = {"metrics": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}}
    objects = render(values)
    monitors = {o["metadata"]["name"]: o for o in of_kind(objects, "PodMonitor")}
    ports = {n: m["spec"]["podMetricsEndpoints"][0]["port"] for n, m in monitors.items()}
    assert ports == {"plimsoll-operator": "metrics", "plimsoll-gateway": "picker", "plimsoll-engines": "launcher"}
    assert {m["metadata"]["labels"]["release"] for m in monitors.values()} == {"prometheus"}
    assert monitors["plimsoll-engines"]["spec"]["namespaceSelector"] == {"any": True}
    some = find(render(values | {"watchNamespaces": ["a"]}), "PodMonitor", "plimsoll-engines")
    assert some["spec"]["namespaceSelector"] == {"matchNames": ["a"]}


def test_notes_name_next_commands_and_limits() -> None:
    text = notes()
    for words in (
        f"kubectl -n {NAMESPACE} rollout status deployment/plimsoll-gateway",
        "kind: InferenceService",
        "port-forward service/plimsoll-gateway 8088:80",
        "NO AUTHENTICATION",
        "AWS ALB idle timeout (60 s)",
        "keeps InferenceServices",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("mode", "warning", "has_key"),
    [("Disabled", "NO AUTHENTICATION", False), ("Optional", "keys are OPTIONAL", True), ("Required", "", True)],
)
def test_notes_warn_while_clients_may_be_anonymous(mode: str, warning: str, has_key: bool) -> None:
    text = notes({"gateway": {"authentication": {"apiKeys": mode}}})
    assert warning in text
    assert ("any client that reaches it may use every model" in text) == bool(warning)
    assert ("key create -n plimsoll-system" in text) == ("Bearer $KEY" in text) == has_key
    assert "only a proxy" not in text
    assert "only a proxy" in notes({"gateway": {"trustIdentityHeaders": True}})


def test_notes_follow_values() -> None:
    values: Object = {
        "watchNamespaces": ["team-a"],
        "crds": {"keep": False},
        "gateway": {"service": {"type": "NodePort"}},
    }
    text = notes(values)
    for words in ("only in: team-a", "kubectl -n team-a apply", "nodePort", "uninstall deletes every InferenceService"):
        assert words in text
    assert "port-forward" not in text
