"""Everything around the pod, and that each call the code makes is allowed by the policies it renders."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.render import render_manifest
from plimsoll.resources import objects
from plimsoll.resources.platform_config import EngineEgressSettings, NetworkPolicySettings, ScrapeSettings
from tests import builders

Object = dict[str, Any]

PARENT = builders.service()
PARENT["metadata"] |= {
    "labels": {"argocd.argoproj.io/instance": "gitops"},
    "annotations": {"argocd.argoproj.io/tracking-id": "x"},
}


def everything() -> list[Object]:
    return render_manifest(PARENT, builders.PLATFORM)


def policy(parent: Object = PARENT, **settings: Any) -> Object:
    platform = builders.PLATFORM.model_copy(update=settings)
    (found,) = [o for o in render_manifest(parent, platform) if o["kind"] == "NetworkPolicy"]
    return found


def allowed(found: Object, peer: Object, port: int) -> bool:
    for rule in found["spec"]["ingress"]:
        if "ports" in rule and port not in [p["port"] for p in rule["ports"]]:
            continue
        if peer in rule["from"]:
            return True
    return False


def test_objects_are_owned_and_copy_no_gitops_labels() -> None:
    for obj in everything():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert owner["uid"] == PARENT["metadata"]["uid"]
        assert obj["metadata"]["labels"][labels.SERVICE] == "chat"
        assert "argocd" not in str(obj)


def test_object_names_are_unique_and_at_most_63_chars() -> None:
    longest = builders.service("a" * 40)
    made = render_manifest(longest, builders.PLATFORM)
    names = [(o["kind"], o["metadata"]["name"]) for o in made]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)


def test_network_policy_gateway_reaches_only_api_port() -> None:
    ports = engine_contract().ports
    gateway = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "plimsoll-system"}},
        "podSelector": {"matchLabels": {labels.COMPONENT: "gateway"}},
    }
    assert allowed(policy(), gateway, ports["api"])
    assert not allowed(policy(), gateway, ports["launcher"])


def test_network_policy_engines_reach_each_other_on_all_ports() -> None:
    own = {"podSelector": {"matchLabels": {labels.SERVICE: "chat"}}}
    assert all(allowed(policy(), own, port) for port in (*engine_contract().ports.values(), 45678))


def test_network_policy_scrapers_reach_only_launcher_port() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    found = policy(metrics=ScrapeSettings.model_validate({"from": [peer]}))
    assert allowed(found, peer, engine_contract().ports["launcher"])
    assert not allowed(found, peer, engine_contract().ports["api"])


def reaches(found: Object, address: str, port: int, protocol: str = "TCP") -> bool:
    """Whether a policy's egress rules let a pod connect to an address that is no pod's."""
    ip = ipaddress.ip_address(address)

    def contains(block: Object) -> bool:
        inside = ip in ipaddress.ip_network(block["cidr"])
        return inside and not any(ip in ipaddress.ip_network(out) for out in block.get("except", ()))

    return any(
        ("ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"])
        and ("to" not in rule or any(contains(peer["ipBlock"]) for peer in rule["to"] if "ipBlock" in peer))
        for rule in found["spec"]["egress"]
    )


def egress_policy(uri: str = "hf://a/b", **settings: Any) -> Object:
    network = NetworkPolicySettings(egress=EngineEgressSettings.model_validate(settings))
    return policy(builders.service(model={"uri": uri}), network_policy=network)


def test_network_policy_leaves_egress_open_by_default() -> None:
    assert policy()["spec"]["policyTypes"] == ["Ingress"]
    assert "egress" not in policy()["spec"]


@pytest.mark.parametrize("address", ["104.18.0.1", "2606:4700::1"])
def test_egress_of_hub_model_reaches_public_https_only(address: str) -> None:
    found = egress_policy()
    assert found["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert reaches(found, address, 443)
    assert not reaches(found, address, 80)
    assert not reaches(egress_policy(modelHub=False), address, 443)
    assert not reaches(egress_policy("pvc://claim/model"), address, 443)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "10.0.0.1", "172.20.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "fd00:ec2::254", "fe80::1"],
)
@pytest.mark.parametrize("port", [80, 443, 6443])
def test_egress_reaches_no_private_address(address: str, port: int) -> None:
    assert not reaches(egress_policy(), address, port)


@pytest.mark.parametrize("protocol", ["UDP", "TCP"])
def test_egress_reaches_dns(protocol: str) -> None:
    assert reaches(egress_policy(), "10.96.0.10", 53, protocol)
    narrow = egress_policy(dns=[{"ipBlock": {"cidr": "10.96.0.10/32"}}])
    assert reaches(narrow, "10.96.0.10", 53, protocol)
    assert not reaches(narrow, "10.96.0.11", 53, protocol)


def test_egress_reaches_own_engines_and_added_rules() -> None:
    mirror = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"protocol": "TCP", "port": 8443}]}
    found = egress_policy(rules=[mirror])
    assert reaches(found, "10.1.2.3", 8443)
    assert {"to": [{"podSelector": {"matchLabels": {labels.SERVICE: "chat"}}}]} in found["spec"]["egress"]


def test_deployment_omits_replicas_owned_elsewhere() -> None:
    service = parse(PARENT)
    kept = objects.StoredTemplate("x", {})
    with_them = objects.tier_objects(service, PARENT, "decode", kept, 3)[-1]
    without = objects.tier_objects(service, PARENT, "decode", kept, None)[-1]
    assert with_them["spec"]["replicas"] == 3
    assert "replicas" not in without["spec"]


def test_revision_name_changes_only_with_user_pod_spec() -> None:
    def name(**spec: Any) -> str:
        return objects.revision_name(parse(builders.service(**spec)), "decode")

    more = {"prefill": {}, "decode": {"minReplicas": 3, "maxReplicas": 5, "rollout": {"maxSurge": 2}}}
    spelled = {"prefill": {}, "decode": {"gpus": 1, "pod": {}}}
    gpus = {"prefill": {}, "decode": {"gpus": 2}}
    assert name() == name(tiers=more) == name(tiers=spelled)
    assert name() != name(tiers=gpus)
    assert name() == name(engine={"runtime": "vllm"}) == name(scaling={"headroom": "10%"}, cost={"gpuHour": 2})
    assert name() != name(engine={"args": ["--x"]})
    assert name() == name(model={"uri": "file:///models/tiny", "name": "public"})
    assert name() != name(model={"uri": "file:///models/other"})
    assert name() != name(engine={"runtime": "simulated"})


def test_revision_name_survives_new_fields_of_the_api() -> None:
    """Another name would restart every engine of such a service at the upgrade of the operator."""
    pod = {
        "nodeSelector": {"a": "b"},
        "affinity": {"nodeAffinity": {}},
        "volumes": [{"name": "x", "emptyDir": {}}],
    }
    model = {"uri": "hf://a/b", "cache": {"sizeLimit": "1Gi"}}
    service = parse(builders.service("chat", "a", tiers={"serve": {"gpus": 2, "pod": pod}}, model=model))
    assert objects.revision_name(service, "serve") == "chat-serve-c688e7526d"


def test_service_with_targets_has_no_objects() -> None:
    """The operator creates nothing for engines that exist, and `render` prints the same."""
    manifest = builders.service("adopted")
    del manifest["spec"]["tiers"]
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"}
    manifest["spec"]["targets"] = {"serve": {"scaleTargetRef": reference, "metricsPort": 8000, "maxReplicas": 2}}
    assert render_manifest(manifest, builders.PLATFORM) == []
