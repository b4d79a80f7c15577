"""The pod of an engine: the bundled image under the restricted pod security standard, as the contract says.

The user's spec, the role's needs and the installation's defaults meet here, in this order of strength: the contract
(the launcher adds its flags last), the user, the installation, the role. Everything an engine writes goes to
emptyDirs, since its root file system is read-only.
"""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import contract
from plimsoll.api.v1alpha1 import InferenceService, ModelSource, Role, Tier
from plimsoll.resources import meta
from plimsoll.resources.platform import EngineDefaults, Platform

Object = dict[str, Any]

UID = 1000
ROLE_ARGS: dict[Role, tuple[str, ...]] = {
    "prefill": ("--block-size", "128"),
    "decode": ("--block-size", "128"),
    "serve": (),
}
SHM_SIZE = "8Gi"
SIMULATED = EngineDefaults(
    resources={"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}}  # 60 MB measured at work
)
SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": UID,
    "runAsGroup": UID,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def template(service: InferenceService, tier_kind: Role, platform: Platform) -> Object:
    """The rendered pod template of one tier: what a ControllerRevision keeps."""
    tier = dict(service.spec.tiers.items())[tier_kind]
    pod = tier.pod
    spec: Object = {
        "serviceAccountName": pod.service_account_name or meta.engine_name(service.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": contract().grace_seconds(service.spec.engine.drain_seconds),
        "securityContext": {"fsGroup": UID, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [_container(service, tier_kind, tier, platform)],
        "volumes": [*_volumes(service), *(volume.manifest() for volume in pod.volumes)],
    }
    spec |= _placement(service, tier, platform)
    revision = meta.digest(_identity(service, platform))
    return {
        "metadata": {
            "labels": {**pod.labels, **meta.tier_labels(service.metadata.name, tier_kind), labels.REVISION: revision},
            **({"annotations": dict(pod.annotations)} if pod.annotations else {}),
        },
        "spec": spec,
    }


def _identity(service: InferenceService, platform: Platform) -> Object:
    """What two engines must share to read each other's KV blocks."""
    return {
        "image": image(service, platform),
        "model": service.spec.model.uri,
        "revision": service.spec.model.revision,
        "args": [*defaults(service, platform).args, *service.spec.engine.args],
    }


def image(service: InferenceService, platform: Platform) -> str:
    """The engine image: the user's, or the runtime's bundled one at the user's version."""
    engine = service.spec.engine
    if engine.image:
        return engine.image
    bundled = platform.engine.simulated_image if engine.simulated else platform.engine.image
    return f"{repository(bundled)}:{engine.version}" if engine.version else bundled


def repository(reference: str) -> str:
    """An image reference without its tag and digest."""
    name = reference.split("@", 1)[0]
    head, _, tail = name.rpartition(":")
    return name if not head or "/" in tail else head


def _container(service: InferenceService, kind: Role, tier: Tier, platform: Platform) -> Object:
    c = contract()
    launcher = c.ports["launcher"]
    return {
        "name": "engine",
        "image": image(service, platform),
        "imagePullPolicy": platform.engine.image_pull_policy,
        "env": _environment(service, kind, tier, platform),
        "ports": [
            {"name": "api", "containerPort": c.ports["api"]},
            {"name": "launcher", "containerPort": launcher},
            {"name": "nixl", "containerPort": c.ports["nixl"]},
        ],
        "readinessProbe": {
            "httpGet": {"path": c.paths["ready"], "port": "launcher"},
            # One late answer of a busy node must not take an engine away: the gateway sees a deletion by itself, and
            # a draining engine sends what still comes elsewhere.
            "periodSeconds": 1,
            "failureThreshold": 3,
            "timeoutSeconds": 5,
        },
        "livenessProbe": {
            "httpGet": {"path": c.paths["live"], "port": "launcher"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
            "terminationGracePeriodSeconds": 30,  # a launcher that hangs does not hear SIGTERM: no drain for it
        },
        "resources": _resources(service, tier, platform),
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*_mounts(service), *(mount.manifest() for mount in tier.pod.volume_mounts)],
    }


def _environment(service: InferenceService, kind: Role, tier: Tier, platform: Platform) -> list[Object]:
    c, model = contract(), service.spec.model
    scratch, home = c.paths["scratch"], c.paths["home"]
    ours: list[Object] = [
        _value(c.env["runtime"], service.spec.engine.runtime),
        _value(c.env["role"], kind),
        _value(c.env["model"], model_path(service)),
        _value(c.env["model_revision"], model.revision or ""),
        _value(c.env["served_names"], json.dumps(served_names(service))),
        _value(c.env["default_args"], json.dumps(default_args(service, kind, tier, platform))),
        _value(c.env["args"], json.dumps(list(service.spec.engine.args))),
        _value(c.env["shutdown_timeout"], str(service.spec.engine.drain_seconds)),
        _value(c.env["leg_deadline"], str(c.leg_deadline_seconds)),
        {"name": c.env["pod_ip"], "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        _value("HOME", home),
        _value("USER", "plimsoll"),
        _value("HF_HOME", f"{home}/hf"),
        _value("VLLM_CACHE_ROOT", f"{home}/.cache/vllm"),
        _value("TORCHINDUCTOR_CACHE_DIR", f"{home}/.cache/torchinductor"),
        _value("TRITON_CACHE_DIR", f"{home}/.cache/triton"),
        _value("TMPDIR", scratch),
    ]
    if model.secret_ref and not service.spec.engine.simulated:
        key = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        ours.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    theirs = [entry.manifest() for entry in service.spec.engine.env]
    taken = {entry["name"] for entry in theirs}
    given = [dict(e) for e in defaults(service, platform).env if e["name"] not in taken]
    return _last_wins([*ours, *given, *theirs])


def served_names(service: InferenceService) -> list[str]:
    """What an engine answers to: first the name that the gateway uses, which never changes.

    The other is the public name when the template is rendered. Only what asks past this release's gateway needs it.
    """
    return list(dict.fromkeys((service.key, service.model_name)))


def _value(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _last_wins(entries: list[Object]) -> list[Object]:
    """One entry a name, the last one's value at the first one's place: a list map takes no duplicates."""
    return list({entry["name"]: entry for entry in entries}.values())


def defaults(service: InferenceService, platform: Platform) -> EngineDefaults:
    """The installation's defaults for real engines; a simulated one is small and has no use for theirs."""
    return SIMULATED if service.spec.engine.simulated else platform.engine.defaults


def default_args(service: InferenceService, kind: Role, tier: Tier, platform: Platform) -> list[str]:
    """Engine arguments that the user's own override: the role's, the shape's, the installation's."""
    parallel = ["--tensor-parallel-size", str(tier.gpus)] if tier.gpus > 1 else []
    return [*ROLE_ARGS[kind], *parallel, *defaults(service, platform).args]


def model_path(service: InferenceService) -> str:
    """What `vllm serve` is told: a repository name or a path in the pod."""
    model = service.spec.model
    return f"{contract().paths['models']}/claim/{model.claim[1]}" if model.claim else model.location


def _gpus(service: InferenceService, tier: Tier, platform: Platform) -> dict[str, str]:
    """The extended resource that an engine asks for, with its amount; none for one that only stands in for another."""
    if not tier.gpus or service.spec.engine.simulated:
        return {}
    return {tier.gpu_resource or platform.engine.gpu_resource: str(tier.gpus)}


def _resources(service: InferenceService, tier: Tier, platform: Platform) -> Object:
    """The user's CPU and memory over the installation's; GPUs as requests and limits, as extended resources must."""
    given, own = defaults(service, platform).resources, tier.pod.resources
    merged = {
        part: {**given.get(part, {}), **getattr(own, part)}
        for part in ("requests", "limits")
        if given.get(part) or getattr(own, part)
    }
    if gpus := _gpus(service, tier, platform):
        for part in ("requests", "limits"):
            merged.setdefault(part, {}).update(gpus)
    return merged


def _placement(service: InferenceService, tier: Tier, platform: Platform) -> Object:
    pod = tier.pod
    tolerations: list[Object] = [toleration.manifest() for toleration in pod.tolerations]
    for resource in _gpus(service, tier, platform):
        tolerations.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    runtime_class = None if service.spec.engine.simulated else platform.engine.runtime_class_name
    choices: Object = {
        "nodeSelector": dict(pod.node_selector),
        "tolerations": tolerations,
        "affinity": pod.affinity,
        "runtimeClassName": pod.runtime_class_name or runtime_class,
        "priorityClassName": pod.priority_class_name,
        "schedulerName": pod.scheduler_name,
        "imagePullSecrets": [*platform.engine.image_pull_secrets, *(ref.manifest() for ref in pod.image_pull_secrets)],
    }
    return {name: value for name, value in choices.items() if value}


def _volumes(service: InferenceService) -> list[Object]:
    volumes: list[Object] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}},
    ]
    if service.spec.engine.simulated:
        return volumes
    model = service.spec.model
    if model.claim:
        claim = {"claimName": model.claim[0], "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    if model.scheme == "hf":
        volumes.append({"name": "model-cache", **_cache(model)})
    return volumes


def _cache(model: ModelSource) -> Object:
    if model.cache.claim_name:
        return {"persistentVolumeClaim": {"claimName": model.cache.claim_name}}
    return {"emptyDir": {"sizeLimit": model.cache_size}}


def _mounts(service: InferenceService) -> list[Object]:
    paths = contract().paths
    mounts: list[Object] = [
        {"name": "scratch", "mountPath": paths["scratch"]},
        {"name": "home", "mountPath": paths["home"]},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if service.spec.engine.simulated:
        return mounts
    model = service.spec.model
    if model.claim:
        mounts.append({"name": "model", "mountPath": f"{paths['models']}/claim", "readOnly": True})
    if model.scheme == "hf":
        mounts.append({"name": "model-cache", "mountPath": f"{paths['home']}/hf"})
    return mounts
