"""Builds the objects of a service from its spec, except the pod template. Pure.

Values that do not follow from the spec (replicas, the stored pod template) are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService, RoleName
from plimsoll.core import codec
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.resources import engine_pod, engine_server, engine_tuning, leader_worker_set, lora, object_meta
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

DNS_PORTS = (53, 5353)  # the second is that of OpenShift's pods; policies see the port of the pod
# Addresses that are not public: private, carrier-grade NAT, loopback and link-local with the clouds' metadata services.
PRIVATE_RANGES = {
    "0.0.0.0/0": ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
    "::/0": ("::1/128", "64:ff9b::/96", "fc00::/7", "fe80::/10"),
}
PROGRESS_DEADLINE_SECONDS = 3600  # downloading a model of hundreds of gigabytes can take most of an hour


@dataclass(frozen=True)
class StoredTemplate:
    """The pod template that was first rendered for the current state of the user's spec."""

    name: str  # of the ControllerRevision
    template: Object
    generation: int = 0  # of the platform's settings, see EngineRolloutSettings
    chunk: int = 0  # set by measurement, see engine_tuning.MeasuredChunk


def revision_name(service: InferenceService, role: RoleName, generation: int = 0, chunk: int = 0) -> str:
    """Name of the ControllerRevision for the user's current spec of a tier, at a generation of the platform's settings.

    chunk: set by measurement, 0 for none.

    It depends on nothing else, so that a new operator, chart or default image restarts no engine. The model's name is
    excluded, because engines serve under another name.
    """
    return _revision_name(service, role, without={"name"}, generation=generation, chunk=chunk)


def earlier_revision_name(service: InferenceService, role: RoleName) -> str:
    """The revision name of earlier releases, which included the model's name; its stored template is still used."""
    return _revision_name(service, role, without=set())


def template_generation(obj: Object | None) -> int:
    """The generation of the platform's settings that a ControllerRevision's or Deployment's template has."""
    text = "0" if obj is None else obj["metadata"].get("labels", {}).get(labels.TEMPLATE_GENERATION, "0")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _revision_name(
    service: InferenceService, role: RoleName, without: set[str], generation: int = 0, chunk: int = 0
) -> str:
    tier = dict(service.spec.tiers.items())[role]
    written = {
        "model": service.spec.model.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=without),
        "engine": service.spec.engine.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "tier": tier.model_dump(
            mode="json", by_alias=True, exclude_defaults=True, include={"gpus", "nodes", "gpu_resource", "pod"}
        ),
        **lora.revision_part(service),
        **({"kvOffload": offload.memory} if (offload := service.spec.kv_offload) is not None else {}),
        **({"generation": generation} if generation else {}),
        **({"chunk": chunk} if chunk else {}),
    }
    return f"{object_meta.tier_name(service.metadata.name, role)}-{object_meta.short_hash(written)}"


def template_revision(
    service: InferenceService,
    parent: Object,
    role: RoleName,
    platform: PlatformConfig,
    template: Object | None = None,
    chunk_of: Object | None = None,
) -> Object:
    """The ControllerRevision with a tier's pod template, at the platform's present generation.

    Of a tier with several nodes it has both templates, those of leaders and workers. template: an existing one to
    store; None renders a new one. chunk_of: a ControllerRevision whose measured chunk the new one gets, too, unless an
    argument of the chart rules it out.
    """
    chunk = engine_tuning.measured_chunk(chunk_of)
    data = _rendered(service, role, platform) if template is None else template
    if chunk and not engine_tuning.may_be_measured(service, data):
        chunk = 0
    if chunk_of is not None and chunk:
        data = engine_tuning.with_chunk(data, chunk, engine_tuning.chunk_reason(chunk_of["data"]))
    return _revision(service, parent, role, data, platform.engine.rollout.generation, chunk)


def revision_with_chunk(
    service: InferenceService, parent: Object, role: RoleName, in_use: Object, chunk: engine_tuning.MeasuredChunk
) -> Object:
    """The ControllerRevision with the template of another one, and another chunk.

    It keeps the mark of the platform's rollout, which watches what fails after it.
    """
    data = engine_tuning.with_chunk(in_use["data"], chunk.tokens, chunk.reason)
    made = _revision(service, parent, role, data, template_generation(in_use), chunk.tokens)
    if labels.ROLLED_OUT in in_use["metadata"]["labels"]:
        made["metadata"]["labels"][labels.ROLLED_OUT] = "true"
    return made


def _revision(
    service: InferenceService, parent: Object, role: RoleName, template: Object, generation: int, chunk: int
) -> Object:
    name = revision_name(service, role, generation, chunk)
    revision_labels = {**object_meta.tier_labels(service.metadata.name, role), **_template_labels(generation, chunk)}
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": object_meta.child_metadata(parent, name, revision_labels),
        "data": template,
        "revision": service.metadata.generation,
    }


def _rendered(service: InferenceService, role: RoleName, platform: PlatformConfig) -> Object:
    template = engine_pod.pod_template(service, role, platform)
    is_set = dict(service.spec.tiers.items())[role].nodes > 1
    return leader_worker_set.templates(role, template) if is_set else template


def _template_labels(generation: int, chunk: int) -> dict[str, str]:
    values = {labels.TEMPLATE_GENERATION: generation, labels.MEASURED_CHUNK: chunk}
    return {label: str(value) for label, value in values.items() if value}


def admission(parent: Object, limits: Object | None, engines: PublishedEngines) -> Object:
    """The InferenceServiceAdmission, from which gateways read the admission limits and engines of a service.

    limits: as stored, None without an SLO.
    """
    name = parent["metadata"]["name"]
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.ADMISSION_KIND,
        "metadata": object_meta.child_metadata(parent, name, object_meta.service_labels(name)),
        **({"limits": limits} if limits else {}),
        "engines": codec.encode(engines),
    }


def targets_service(service: InferenceService, parent: Object, selector: Mapping[str, str], port: int) -> Object:
    """The Service whose EndpointSlices say which pods of a target take requests. It changes nothing of theirs."""
    name = service.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_meta.child_metadata(
            parent, object_meta.targets_name(name), object_meta.tier_labels(name, "serve")
        ),
        "spec": {
            "clusterIP": "None",
            "selector": dict(selector),
            "ports": [{"name": "api", "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }


def shared_objects(service: InferenceService, parent: Object, platform: PlatformConfig) -> list[Object]:
    """The objects that all tiers share; none for a service with targets, whose engines exist."""
    if service.spec.targets is not None:
        return []
    objects: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": object_meta.child_metadata(
                parent,
                object_meta.shared_name(service.metadata.name),
                object_meta.service_labels(service.metadata.name),
            ),
            "automountServiceAccountToken": False,
        }
    ]
    if service.lora is not None:
        objects.append(lora.config_map(service, parent))
    if platform.network_policy.enabled:
        objects.append(_network_policy(service, parent, platform))
    return objects


def tier_objects(
    service: InferenceService, parent: Object, role: RoleName, stored_template: StoredTemplate, replicas: int | None
) -> list[Object]:
    """The objects of one tier. replicas: None if another field manager owns that field."""
    return [
        _service(service, parent, role),
        _disruption_budget(service, parent, role),
        _workload(service, parent, role, stored_template, replicas),
    ]


def _workload(
    service: InferenceService, parent: Object, role: RoleName, stored_template: StoredTemplate, replicas: int | None
) -> Object:
    tier = dict(service.spec.tiers.items())[role]
    workload_labels = {
        **object_meta.tier_labels(service.metadata.name, role),
        **_template_labels(stored_template.generation, stored_template.chunk),
    }
    meta = object_meta.child_metadata(parent, object_meta.tier_name(service.metadata.name, role), workload_labels)
    if tier.nodes > 1:
        return leader_worker_set.leader_worker_set(tier, meta, stored_template.template, replicas)
    rollout = tier.rollout
    spec: Object = {
        "selector": {"matchLabels": object_meta.tier_selector(service.metadata.name, role)},
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        "revisionHistoryLimit": 2,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "template": stored_template.template,
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": spec,
    }


def _tier_metadata(service: InferenceService, parent: Object, role: RoleName) -> Object:
    """Metadata of an object of a tier that has no other of its kind."""
    name = service.metadata.name
    return object_meta.child_metadata(parent, object_meta.tier_name(name, role), object_meta.tier_labels(name, role))


def _service(service: InferenceService, parent: Object, role: RoleName) -> Object:
    engine, ports = service.spec.engine, engine_contract().ports
    numbers = {"api": engine.api_port, **({"launcher": ports["launcher"]} if engine.contract.launched else {})}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _tier_metadata(service, parent, role),
        "spec": {
            "clusterIP": "None",
            "selector": object_meta.tier_selector(service.metadata.name, role),
            "ports": [
                {"name": name, "port": number, "targetPort": name, "protocol": "TCP"}
                for name, number in numbers.items()
            ],
        },
    }


def _disruption_budget(service: InferenceService, parent: Object, role: RoleName) -> Object:
    name = object_meta.tier_name(service.metadata.name, role)
    is_set = dict(service.spec.tiers.items())[role].nodes > 1  # any pod of an engine takes the whole engine with it
    selector = {labels.SET_NAME: name} if is_set else object_meta.tier_selector(service.metadata.name, role)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _tier_metadata(service, parent, role),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",  # failing engines must not block the drain of a node
            "selector": {"matchLabels": selector},
        },
    }


def _network_policy(service: InferenceService, parent: Object, platform: PlatformConfig) -> Object:
    """Allow gateways to the API port, operator and scrapers to the metrics port, and all traffic among engines."""
    gateway, metrics_port = platform.gateway, engine_server.metrics_port(service)
    gateway_namespace = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gateway.namespace}}}
    operator = {
        **gateway_namespace,
        "podSelector": {"matchLabels": {labels.NAME: "plimsoll", labels.COMPONENT: "operator"}},
    }
    engine_selector = {"matchLabels": {labels.SERVICE: service.metadata.name}}
    egress = _egress(service, platform, engine_selector)
    readers = [operator, *platform.metrics.peers]
    clients: list[Object] = [{**gateway_namespace, "podSelector": {"matchLabels": gateway.pod_selector}}]
    if platform.inference_pools is not None and parent["metadata"]["namespace"] == gateway.namespace:
        clients += platform.inference_pools.peers
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_meta.child_metadata(
            parent, object_meta.shared_name(service.metadata.name), object_meta.service_labels(service.metadata.name)
        ),
        "spec": {
            "podSelector": engine_selector,
            "policyTypes": ["Ingress"] if egress is None else ["Ingress", "Egress"],
            **({} if egress is None else {"egress": egress}),
            "ingress": [
                {"from": clients, "ports": [_port(service.spec.engine.api_port)]},
                *([] if metrics_port is None else [{"from": readers, "ports": [_port(metrics_port)]}]),
                {"from": [{"podSelector": engine_selector}]},
            ],
        },
    }


def _egress(service: InferenceService, platform: PlatformConfig, engines: Object) -> list[Object] | None:
    """DNS, the service's engines, public sources of its model, and the administrator's rules. None for no limit."""
    settings = platform.network_policy.egress
    if settings is None:
        return None
    dns_ports = [_port(number, protocol) for number in DNS_PORTS for protocol in ("UDP", "TCP")]
    rules: list[Object] = [
        {"ports": dns_ports, **({"to": list(settings.dns)} if settings.dns else {})},
        {"to": [{"podSelector": engines}]},
    ]
    model = service.spec.model
    if settings.model_hub and (model.scheme == "hf" or model.is_fetched) and not service.spec.engine.is_simulated:
        public = [{"ipBlock": {"cidr": cidr, "except": list(private)}} for cidr, private in PRIVATE_RANGES.items()]
        rules.append({"to": public, "ports": [_port(443)]})
    return [*rules, *settings.rules]


def _port(number: int, protocol: str = "TCP") -> Object:
    return {"protocol": protocol, "port": number}
