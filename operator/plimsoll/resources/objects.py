"""Everything but the pod: the objects that a service is made of, built from its spec alone.

Builders are pure. What differs between two calls (replicas, the kept pod template) comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import contract
from plimsoll.api.v1alpha1 import InferenceService, Role
from plimsoll.resources import meta, pod
from plimsoll.resources.platform import Platform

Object = dict[str, Any]

PROGRESS_DEADLINE_SECONDS = 3600  # a model of hundreds of gigabytes may take most of an hour to arrive


@dataclass(frozen=True)
class KeptTemplate:
    """A pod template as it was first rendered for this state of the user's spec."""

    name: str  # of the ControllerRevision
    template: Object


def revision_name(service: InferenceService, kind: Role) -> str:
    """Name of the ControllerRevision for the user's present spec of a tier.

    Only what the user wrote counts: another operator, chart or default image must not restart an engine. The model's
    name does not count: engines serve under another one.
    """
    return _revision_name(service, kind, without={"name"})


def earlier_revision_name(service: InferenceService, kind: Role) -> str:
    """The name in releases where the model's name restarted engines; what is kept under it is still of use."""
    return _revision_name(service, kind, without=set())


def _revision_name(service: InferenceService, kind: Role, without: set[str]) -> str:
    tier = dict(service.spec.tiers.items())[kind]
    written = {
        "model": service.spec.model.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=without),
        "engine": service.spec.engine.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        "tier": tier.model_dump(
            mode="json", by_alias=True, exclude_defaults=True, include={"gpus", "gpu_resource", "pod"}
        ),
    }
    return f"{meta.tier_name(service.metadata.name, kind)}-{meta.digest(written)}"


def revision(
    service: InferenceService, parent: Object, kind: Role, platform: Platform, template: Object | None = None
) -> Object:
    """The ControllerRevision that keeps a tier's pod template. template: one to keep on; None: one is rendered."""
    name = revision_name(service, kind)
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": meta.metadata(parent, name, meta.tier_labels(service.metadata.name, kind)),
        "data": pod.template(service, kind, platform) if template is None else template,
        "revision": service.metadata.generation,
    }


def shared(service: InferenceService, parent: Object, platform: Platform) -> list[Object]:
    """What the tiers have in common."""
    objects: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": meta.metadata(
                parent, meta.engine_name(service.metadata.name), meta.service_labels(service.metadata.name)
            ),
            "automountServiceAccountToken": False,
        }
    ]
    if platform.network_policy.enabled:
        objects.append(_network_policy(service, parent, platform))
    return objects


def tier(
    service: InferenceService, parent: Object, kind: Role, kept: KeptTemplate, replicas: int | None
) -> list[Object]:
    """The objects of one tier. replicas: None where somebody else owns that field."""
    return [
        _service(service, parent, kind),
        _budget(service, parent, kind),
        _deployment(service, parent, kind, kept, replicas),
    ]


def _deployment(
    service: InferenceService, parent: Object, kind: Role, kept: KeptTemplate, replicas: int | None
) -> Object:
    rollout = dict(service.spec.tiers.items())[kind].rollout
    spec: Object = {
        "selector": {"matchLabels": meta.selector(service.metadata.name, kind)},
        "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
        "revisionHistoryLimit": 2,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        },
        "template": kept.template,
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta.metadata(
            parent, meta.tier_name(service.metadata.name, kind), meta.tier_labels(service.metadata.name, kind)
        ),
        "spec": spec,
    }


def _service(service: InferenceService, parent: Object, kind: Role) -> Object:
    ports = contract().ports
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta.metadata(
            parent, meta.tier_name(service.metadata.name, kind), meta.tier_labels(service.metadata.name, kind)
        ),
        "spec": {
            "clusterIP": "None",
            "selector": meta.selector(service.metadata.name, kind),
            "ports": [
                {"name": name, "port": ports[name], "targetPort": name, "protocol": "TCP"}
                for name in ("api", "launcher")
            ],
        },
    }


def _budget(service: InferenceService, parent: Object, kind: Role) -> Object:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta.metadata(
            parent, meta.tier_name(service.metadata.name, kind), meta.tier_labels(service.metadata.name, kind)
        ),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": meta.selector(service.metadata.name, kind)}},
    }


def _network_policy(service: InferenceService, parent: Object, platform: Platform) -> Object:
    """API port: the gateway. Launcher port: the operator and who may scrape. Among the engines: everything."""
    gateway = platform.gateway
    ports = contract().ports
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": gateway.namespace}}}
    operator = {**here, "podSelector": {"matchLabels": {labels.NAME: "plimsoll", labels.COMPONENT: "operator"}}}
    own = {"matchLabels": {labels.SERVICE: service.metadata.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta.metadata(
            parent, meta.engine_name(service.metadata.name), meta.service_labels(service.metadata.name)
        ),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{**here, "podSelector": {"matchLabels": gateway.pod_selector}}],
                    "ports": [_port(ports["api"])],
                },
                {"from": [operator, *platform.metrics.peers], "ports": [_port(ports["launcher"])]},
                {"from": [{"podSelector": own}]},
            ],
        },
    }


def _port(number: int) -> Object:
    return {"protocol": "TCP", "port": number}
