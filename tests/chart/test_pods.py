"""The pods of operator, gateway and `helm test`: who they are, how they start, stay and end."""

from __future__ import annotations

import pytest
import yaml

from plimsoll.api import labels
from plimsoll.api.contract import internal_tls_name
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings, Plaintext, TlsVersion
from plimsoll.resources.platform_config import PlatformConfig
from tests.chart.rendering import (
    EVERYTHING,
    ROOT,
    Object,
    RenderError,
    containers,
    find,
    notes,
    of_kind,
    pod_specs,
    render,
)

LOCAL = ("--values", str(ROOT / "charts/plimsoll/ci/local-values.yaml"))


def restricted_violations(spec: Object) -> list[str]:
    """What the `restricted` pod security standard, and a read-only root, would object to."""
    pod = spec["securityContext"]
    found = []
    if pod.get("runAsNonRoot") is not True or pod.get("runAsUser") == 0:
        found.append("may run as root")
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("no seccomp profile")
    found += [f"{key} is shared" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [
        f"volume {v['name']}"
        for v in spec.get("volumes", [])
        if not {"emptyDir", "configMap", "projected", "secret"} & set(v)
    ]
    for container in containers(spec):
        own = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        if container.get("securityContext") != own:
            found.append(f"{container['name']}: {container.get('securityContext')}")
        found += [f"host port {p}" for p in container.get("ports", []) if "hostPort" in p]
    return found


@pytest.mark.parametrize("name", ["plimsoll-operator", "plimsoll-gateway", "plimsoll-test"])
def test_pods_meet_restricted_standard(name: str) -> None:
    for objects in (render(), render(EVERYTHING), render({}, *LOCAL)):
        assert restricted_violations(pod_specs(objects)[name]) == []


def test_containers_have_requests_and_memory_limit() -> None:
    for spec in pod_specs(render()).values():
        for container in containers(spec):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert set(container["resources"]["limits"]) == {"memory"}


def test_only_programs_that_call_the_api_server_have_a_token() -> None:
    specs = pod_specs(render())
    mounts = {
        (pod, container["name"]): [
            m["name"] for m in container.get("volumeMounts", []) if "serviceaccount" in m["mountPath"]
        ]
        for pod, spec in specs.items()
        for container in containers(spec)
        if not spec["automountServiceAccountToken"]
    }
    assert mounts == {
        ("plimsoll-gateway", "init"): [],
        ("plimsoll-gateway", "envoy"): [],
        ("plimsoll-gateway", "picker"): ["api"],
        ("plimsoll-test", "models"): [],
    }
    (volume,) = [one for one in specs["plimsoll-gateway"]["volumes"] if one["name"] == "api"]
    paths = [next(iter(source.values())) for source in volume["projected"]["sources"]]
    assert [p.get("path") or p["items"][0]["path"] for p in paths] == ["token", "ca.crt", "namespace"]


def test_service_links_are_disabled() -> None:
    assert [spec["enableServiceLinks"] for spec in pod_specs(render()).values()] == [False, False, False]


def test_settings_change_restarts_only_operator() -> None:
    before, after = render(), render({"engine": {"image": "other:1"}})

    def template(objects: list[Object], part: str) -> Object:
        return find(objects, "Deployment", f"plimsoll-{part}")["spec"]["template"]  # type: ignore[no-any-return]

    assert template(before, "operator") != template(after, "operator")
    assert template(before, "gateway") == template(after, "gateway")


def test_rollout_has_no_unavailable_replica() -> None:
    for deployment in of_kind(render(), "Deployment"):
        assert deployment["spec"]["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_operator_container_has_command_probes_and_ports() -> None:
    (container,) = pod_specs(render())["plimsoll-operator"]["containers"]
    assert container["command"] == ["plimsoll", "operator"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "probes"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "probes"}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"probes": 8080, "metrics": 8081}


def test_gateway_containers_are_init_envoy_and_picker() -> None:
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


def test_limits_follow_memory_limit_of_envoy() -> None:
    spec = pod_specs(render())["plimsoll-gateway"]
    source = {"resourceFieldRef": {"containerName": "envoy", "resource": "limits.memory"}}
    for container in (spec["initContainers"][0], spec["containers"][0]):
        assert {"name": "PLIMSOLL_ENVOY_MEMORY_BYTES", "valueFrom": source} in container["env"]


def test_envoy_sidecar_has_no_startup_or_readiness_probe() -> None:
    envoy = pod_specs(render())["plimsoll-gateway"]["initContainers"][1]
    assert "startupProbe" not in envoy
    assert "readinessProbe" not in envoy
    assert envoy["livenessProbe"]["tcpSocket"] == {"port": "http"}


def test_picker_probe_decides_readiness() -> None:
    (picker,) = pod_specs(render())["plimsoll-gateway"]["containers"]
    assert picker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "picker"}
    assert picker["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "picker"}


def test_picker_liveness_fails_before_readiness() -> None:
    (picker,) = pod_specs(render())["plimsoll-gateway"]["containers"]

    def seconds(probe: Object) -> int:
        return probe["periodSeconds"] * probe.get("failureThreshold", 3)  # type: ignore[no-any-return]

    assert seconds(picker["livenessProbe"]) < seconds(picker["readinessProbe"])


def test_gateway_pod_selector_matches_only_own_pods() -> None:
    objects = render({"gateway": {"podLabels": {"team": "x"}}}, "--name-template", "llm")
    (picker,) = pod_specs(objects)["llm-plimsoll-gateway"]["containers"]
    selector = PickerSettings.from_environment(
        {e["name"]: e["value"] for e in picker["env"] if "value" in e}
    ).pod_selector
    deployment = find(objects, "Deployment", "llm-plimsoll-gateway")["spec"]
    assert dict(part.split("=") for part in selector.split(",")) == deployment["selector"]["matchLabels"]
    assert deployment["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize("seconds", [30, 600, 7200])
def test_gateway_grace_period_exceeds_drain(seconds: int) -> None:
    spec = pod_specs(render({"gateway": {"drainSeconds": seconds}}))["plimsoll-gateway"]
    assert spec["terminationGracePeriodSeconds"] == seconds + 30


def test_gateway_settings_read_rendered_environment() -> None:
    headers = {"classHeader": "X-Class", "tenantHeader": "X-Tenant", "corsAllowedOrigins": ["https://a.b:8", "*"]}
    headers |= {"accessLog": {"enabled": True}, "trustIdentityHeaders": True, "authentication": {"apiKeys": "Required"}}
    traces = {"endpoint": "http://collector:4318", "samplingRate": 0.5}
    values = {"telemetry": {"traces": traces}, "watchNamespaces": ["a", "b"]}
    values |= {"gateway": {"drainSeconds": 7, "maxBodyBytes": 104857600, "connectionsPerSource": 9000, **headers}}
    (picker,) = pod_specs(render(values))["plimsoll-gateway"]["containers"]
    environment = {e["name"]: e["value"] for e in picker["env"] if "value" in e}
    of_pod = {"metadata.namespace": "plimsoll-system"}
    sources = {e["name"]: e["valueFrom"] for e in picker["env"] if "valueFrom" in e}
    references = {name: source["fieldRef"]["fieldPath"] for name, source in sources.items() if "fieldRef" in source}
    environment |= {name: of_pod[path] for name, path in references.items() if path in of_pod}
    settings = PickerSettings.from_environment(environment)
    assert (settings.namespaces, settings.max_body_bytes, settings.drain_seconds) == (("a", "b"), 104857600, 7)
    assert settings.max_connections_per_source == 9000
    assert (settings.port, settings.picker_port, str(settings.directory)) == (8080, 8081, "/run/plimsoll")
    assert (settings.class_header, settings.tenant_header) == ("x-class", "x-tenant")
    assert settings.trusted_headers == (b"x-class", b"x-tenant")
    assert settings.api_keys is ApiKeyMode.REQUIRED
    assert settings.access_log
    assert (settings.traces_endpoint, settings.traces_sampling) == ("http://collector:4318", 0.5)
    assert settings.cors_origins == ("https://a.b:8", "*")


@pytest.mark.parametrize("rate", [0, 1])
def test_sampling_rate_of_values_is_kept(rate: int) -> None:
    traces = {"endpoint": "http://collector:4318", "samplingRate": rate}
    (picker,) = pod_specs(render({"telemetry": {"traces": traces}}))["plimsoll-gateway"]["containers"]
    assert float(next(e["value"] for e in picker["env"] if e["name"] == "PLIMSOLL_TRACES_SAMPLING")) == rate


def test_gateway_settings_read_rendered_issuers() -> None:
    fields = {"issuer": "https://a.example", "audiences": ["llm", "b"], "claims": {"tenant": "org", "class": "c"}}
    by_uri = fields | {"jwksUri": "https://a.example:8443/keys", "caBundle": "-----BEGIN CERTIFICATE-----\nx"}
    inline = {"issuer": "b", "audiences": ["llm"], "jwks": '{"keys": [{"kty": "RSA"}]}'}
    spec = pod_specs(render({"gateway": {"authentication": {"jwt": {"issuers": [by_uri, inline]}}}}))
    for container in (spec["plimsoll-gateway"]["initContainers"][0], *spec["plimsoll-gateway"]["containers"]):
        settings = PickerSettings.from_environment({e["name"]: e["value"] for e in container["env"] if "value" in e})
        first, second = settings.jwt_issuers
        assert (first.issuer, first.audiences, first.jwks_uri) == ("https://a.example", ("llm", "b"), by_uri["jwksUri"])
        assert (first.claims.tenant, first.claims.request_class, first.claims.models) == ("org", "c", "")
        assert (first.ca_bundle, second.jwks) == (by_uri["caBundle"], inline["jwks"])
        assert settings.requires_credentials


def test_gateway_mounts_certificate_into_picker_alone() -> None:
    spec = pod_specs(
        render({"gateway": {"tls": {"secretName": "door", "minVersion": "TLSv1.3", "plaintext": "Allow"}}})
    )["plimsoll-gateway"]
    (picker,) = spec["containers"]
    settings = PickerSettings.from_environment({e["name"]: e["value"] for e in picker["env"] if "value" in e})
    mounts = {c["name"]: [m for m in c["volumeMounts"] if m["name"] == "tls"] for c in spec["initContainers"]}
    assert mounts == {"init": [], "envoy": []}
    (mount,) = [m for m in picker["volumeMounts"] if m["name"] == "tls"]
    assert (mount["mountPath"], mount["readOnly"]) == (str(settings.tls_directory), True)
    assert (settings.tls_min_version, settings.plaintext) == (TlsVersion.TLS_1_3, Plaintext.ALLOW)
    (volume,) = [v["secret"] for v in spec["volumes"] if v["name"] == "tls"]
    assert (volume["secretName"], volume.get("optional", False)) == ("door", False)
    envoy = next(c for c in spec["initContainers"] if c["name"] == "envoy")
    assert envoy["ports"] == [{"name": "https", "containerPort": 8080}]
    assert envoy["livenessProbe"]["tcpSocket"] == {"port": "https"}


@pytest.mark.parametrize("name", ["", "theirs"])
def test_pickers_alone_know_the_secret_of_gateways(name: str) -> None:
    objects = render({"gateway": {"peers": {"secretName": name}}})
    spec = pod_specs(objects)["plimsoll-gateway"]
    (picker,) = spec["containers"]
    settings = PickerSettings.from_environment({e["name"]: e["value"] for e in picker["env"] if "value" in e})
    (volume,) = [v["secret"] for v in spec["volumes"] if v["name"] == "peers"]
    assert volume["secretName"] == (name or "plimsoll-gateway-peers")
    made = of_kind(objects, "Secret")
    assert [secret["data"] for secret in made] == ([] if name else [{"secret": "48 bytes"}])
    mounted = {c["name"]: [m for m in c["volumeMounts"] if m["name"] == "peers"] for c in containers(spec)}
    (mount,) = mounted.pop("picker")
    assert not any(mounted.values())
    assert str(settings.peer_secret) == f"{mount['mountPath']}/{volume['items'][0]['path']}"
    assert {"name": "peers", "containerPort": settings.peer_port} in picker["ports"]


def test_releases_share_no_gateways_and_no_secret() -> None:
    """Two releases of one namespace; those of two namespaces have the namespace between them as well."""
    releases = [render({}, "--name-template", name) for name in ("plimsoll", "second")]
    selectors, secrets, admitted = [], [], []
    for objects in releases:
        (deployment,) = [d for d in of_kind(objects, "Deployment") if d["metadata"]["name"].endswith("-gateway")]
        template = deployment["spec"]["template"]
        (picker,) = template["spec"]["containers"]
        settings = PickerSettings.from_environment({e["name"]: e["value"] for e in picker["env"] if "value" in e})
        selector = dict(part.split("=") for part in settings.pod_selector.split(","))
        assert selector.items() <= template["metadata"]["labels"].items()
        own = {"fieldRef": {"fieldPath": "metadata.namespace"}}
        assert {"name": "POD_NAMESPACE", "valueFrom": own} in picker["env"]
        selectors.append(selector)
        secrets += [v["secret"]["secretName"] for v in template["spec"]["volumes"] if v["name"] == "peers"]
        policies = of_kind(objects, "NetworkPolicy", deployment["metadata"]["name"])
        rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
        (peers,) = [rule["from"] for rule in rules if rule["ports"] == [{"port": 8082, "protocol": "TCP"}]]
        assert peers == [{"podSelector": {"matchLabels": selector}}], "no namespaceSelector: of this namespace alone"
        admitted.append(selector["app.kubernetes.io/instance"])
    assert selectors[0] != selectors[1]
    assert len(set(secrets)) == 2
    assert admitted == ["plimsoll", "second"]


def test_gateway_without_values_of_newer_chart_is_as_by_default() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    gateway = {"authentication": None, "trustIdentityHeaders": None, "tls": None, "accessLog": None, "peers": None}
    missing = {"telemetry": None, "gateway": gateway}
    assert render(missing) == render()
    assert "NO AUTHENTICATION" in notes(missing)


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_replica_count_controls_affinity_and_pdb(part: str) -> None:
    one, two = render({part: {"replicas": 1}}), render({part: {"replicas": 2}})
    name = f"plimsoll-{part}"
    assert "affinity" not in pod_specs(one)[name]
    assert of_kind(one, "PodDisruptionBudget", name) == []

    selector = find(two, "Deployment", name)["spec"]["selector"]
    (term,) = pod_specs(two)[name]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == selector
    assert find(two, "PodDisruptionBudget", name)["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": selector,
    }
    off = render({part: {"replicas": 2, "podDisruptionBudget": {"enabled": False}}})
    assert of_kind(off, "PodDisruptionBudget", name) == []


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_production_values_survive_the_loss_of_a_node(part: str) -> None:
    objects = render({}, "--values", str(ROOT / "charts/plimsoll/values-production.yaml"))
    name, deployment = f"plimsoll-{part}", find(objects, "Deployment", f"plimsoll-{part}")
    assert deployment["spec"]["replicas"] == 2
    assert find(objects, "PodDisruptionBudget", name)["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    spec = pod_specs(objects)[name]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"] == deployment["spec"]["selector"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["matchLabelKeys"] == ["pod-template-hash"]  # else a rollout of two pods needs a third node
    (zones,) = spec["topologySpreadConstraints"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert zones["labelSelector"]["matchLabels"].items() <= labels.items()
    assert zones["whenUnsatisfiable"] == "ScheduleAnyway"


@pytest.mark.parametrize("part", ["operator", "gateway"])
def test_placement_values_are_passed_through(part: str) -> None:
    placement = {
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "system-cluster-critical",
    }
    spec = pod_specs(render({part: {"replicas": 2, **placement}}))[f"plimsoll-{part}"]
    assert {key: spec[key] for key in placement} == placement


def test_image_values_set_digest_tag_and_pull_secrets() -> None:
    digest = "sha256:" + "a" * 64
    values = {
        "image": {"repository": "r/operator", "digest": digest},
        "gateway": {"envoy": {"image": {"repository": "r/envoy", "tag": "v9"}}},
        "imagePullSecrets": [{"name": "pull"}],
    }
    specs = pod_specs(render(values))
    assert {c["image"] for s in specs.values() for c in containers(s)} == {f"r/operator@{digest}", "r/envoy:v9"}
    assert all(spec["imagePullSecrets"] == [{"name": "pull"}] for spec in specs.values())


def test_local_values_pull_only_from_local_registry() -> None:
    for spec in pod_specs(render({}, *LOCAL)).values():
        for container in containers(spec):
            assert container["image"].startswith("localhost:5001/plimsoll/")
            assert container["imagePullPolicy"] == "Always"


def test_traces_reach_engines_and_their_collector() -> None:
    traces = {"telemetry": {"traces": {"endpoint": "http://collector:4318"}}}
    own = {"args": ["--own"], "env": [{"name": "OTEL_SERVICE_NAME", "value": "own"}]}
    values = traces | {"engine": {"defaults": own}, "networkPolicy": {"egress": {"enabled": True}}}
    config = yaml.safe_load(find(render(values), "ConfigMap", "plimsoll-operator")["data"]["operator.yaml"])
    defaults = config["engine"]["defaults"]
    assert defaults["args"] == ["--otlp-traces-endpoint", "http://collector:4318/v1/traces", "--own"]
    assert {e["name"]: e["value"] for e in defaults["env"]} == {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "own",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }
    open_port = {"ports": [{"port": 4318, "protocol": "TCP"}]}
    assert open_port in config["networkPolicy"]["egress"]["rules"]
    assert open_port in find(render(values), "NetworkPolicy", "plimsoll-gateway")["spec"]["egress"]
    plain = yaml.safe_load(find(render(), "ConfigMap", "plimsoll-operator")["data"]["operator.yaml"])
    assert (plain["engine"]["defaults"]["args"], plain["engine"]["defaults"]["env"]) == ([], [])


def test_internal_certificate_is_mounted_into_picker_alone() -> None:
    objects = render({"internalTls": {"secretName": "client"}, "engine": {"tls": {"secretName": "engine"}}})
    spec = pod_specs(objects)["plimsoll-gateway"]
    (picker,) = spec["containers"]
    settings = PickerSettings.from_environment({e["name"]: e["value"] for e in picker["env"] if "value" in e})
    mounted = {c["name"]: [m for m in c["volumeMounts"] if m["name"] == "internal-tls"] for c in containers(spec)}
    (mount,) = mounted.pop("picker")
    assert not any(mounted.values())
    assert (mount["mountPath"], mount["readOnly"]) == (str(settings.internal_tls), True)
    (volume,) = [v["secret"] for v in spec["volumes"] if v["name"] == "internal-tls"]
    assert (volume["secretName"], [item["key"] for item in volume["items"]]) == (
        "client",
        ["tls.crt", "tls.key", "ca.crt"],
    )
    config = next(o for o in of_kind(objects, "ConfigMap") if "operator.yaml" in (o.get("data") or {}))
    found = PlatformConfig.model_validate(yaml.safe_load(config["data"]["operator.yaml"]))
    assert found.engine.tls.secret_name == "engine"


def test_internal_tls_covers_operator_gateways_and_scrapes() -> None:
    values = {"internalTls": {"secretName": "mine"}, "engine": {"tls": {"secretName": "engine"}}}
    objects = render({**values, "metrics": {"podMonitor": {"enabled": True}}})
    (gateway,) = [o["spec"]["template"] for o in of_kind(objects, "Deployment") if "gateway" in o["metadata"]["name"]]
    (picker,) = gateway["spec"]["containers"]
    assert gateway["metadata"]["labels"][labels.TLS] == labels.MUTUAL_TLS
    assert {picker[f"{kind}Probe"]["httpGet"]["port"] for kind in ("readiness", "startup", "liveness")} == {"probes"}
    settings = PickerSettings.from_environment({e["name"]: e["value"] for e in picker["env"] if "value" in e})
    assert settings.probe_port in {port["containerPort"] for port in picker["ports"] if port["name"] == "probes"}
    operator = pod_specs(objects)["plimsoll-operator"]
    (volume,) = [one["secret"] for one in operator["volumes"] if one["name"] == "internal-tls"]
    (mount,) = [one for one in operator["containers"][0]["volumeMounts"] if one["name"] == "internal-tls"]
    config = next(o for o in of_kind(objects, "ConfigMap") if "operator.yaml" in (o.get("data") or {}))
    found = PlatformConfig.model_validate(yaml.safe_load(config["data"]["operator.yaml"]))
    assert found.internal_tls is not None
    assert (volume["secretName"], mount["mountPath"]) == ("mine", found.internal_tls.certificate_directory)
    pages = {o["metadata"]["name"]: o["spec"]["podMetricsEndpoints"][0] for o in of_kind(objects, "PodMonitor")}
    assert "scheme" not in pages["plimsoll-operator"]
    assert pages["plimsoll-gateway"]["tlsConfig"] == {
        "ca": {"secret": {"name": "mine", "key": "ca.crt"}},
        "serverName": internal_tls_name("plimsoll-system"),
    }
    assert (pages["plimsoll-engines"]["scheme"], pages["plimsoll-engines"]["tlsConfig"]) == (
        "https",
        {"insecureSkipVerify": True},
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "engine.tls.secretName needs internalTls.secretName"),
        (
            {"internalTls": {"secretName": "client"}, "gateway": {"endpointPicker": {"enabled": True}}},
            "engine.tls.secretName excludes gateway.endpointPicker.enabled",
        ),
    ],
)
def test_engines_that_nobody_could_reach_are_refused(values: Object, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render({"engine": {"tls": {"secretName": "engine"}}, **values})
