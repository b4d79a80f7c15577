"""Builds the pod template of an engine, under the restricted pod security standard and the engine contract.

Settings have this precedence: the contract (the launcher adds its flags last), the user's spec, the defaults of the
installation, the defaults of the role. An engine writes only to emptyDirs, because its root file system is read-only.
"""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import EngineTier, InferenceService, RoleName
from plimsoll.api.v1alpha1.pod_overrides import DEFAULT_SHARED_MEMORY
from plimsoll.core import units
from plimsoll.core.planning.engine_tuning import TunedArgument
from plimsoll.core.types import Unavailable
from plimsoll.engines import vllm
from plimsoll.resources import engine_memory, engine_server, engine_tls, engine_tuning, lora, model_files, object_meta
from plimsoll.resources.platform_config import EngineDefaults, PlatformConfig

Object = dict[str, Any]

# Far above what an engine writes: a pod beyond its limit is evicted.
SCRATCH_SIZE = "16Gi"  # temporary files
HOME_SIZE = "32Gi"  # compiled kernels
_HOST, _ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
SPREAD_KEYS: dict[RoleName, tuple[str, ...]] = {"prefill": (_HOST,), "decode": (_HOST,), "serve": (_ZONE, _HOST)}
SIMULATED_DEFAULTS = EngineDefaults(
    resources={"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}}  # 60 MB measured under load
)
SECURITY_CONTEXT = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod_template(service: InferenceService, tier_kind: RoleName, platform: PlatformConfig) -> Object:
    """The rendered pod template of one tier, which a ControllerRevision stores."""
    tier = dict(service.spec.tiers.items())[tier_kind]
    overrides = tier.pod
    spec: Object = {
        "serviceAccountName": overrides.service_account_name or object_meta.shared_name(service.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": engine_contract().termination_grace_seconds(service.spec.engine.drain_seconds),
        "securityContext": _pod_security_context(platform),
        "containers": [_container(service, tier_kind, tier, platform)],
        "volumes": [
            *_volumes(service, tier, platform),
            *lora.volumes(service),
            *engine_tls.volumes(service, platform),
            *(volume.manifest() for volume in overrides.volumes),
        ],
    }
    spec |= _scheduling(service, tier_kind, tier, platform)
    revision = object_meta.short_hash(_kv_identity(service, platform))
    engine_labels, engine_annotations = engine_server.metadata(service)
    tuning = engine_tuning.annotation_of(tuned_arguments(service, tier_kind, tier, platform))
    annotations = {**overrides.annotations, **engine_annotations, **tuning}
    return {
        "metadata": {
            "labels": {
                **overrides.labels,
                **object_meta.tier_labels(service.metadata.name, tier_kind),
                labels.REVISION: revision,
                **engine_labels,
                **engine_tls.pod_labels(service, platform),
            },
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": spec,
    }


def _kv_identity(service: InferenceService, platform: PlatformConfig) -> Object:
    """The settings that two engines must share to read each other's KV blocks."""
    return {
        "image": engine_image(service, platform),
        "model": service.spec.model.uri,
        "revision": service.spec.model.revision,
        **({"digest": digest} if (digest := service.spec.model.digest) else {}),
        "args": [*engine_defaults(service, platform).args, *service.spec.engine.args],
        **engine_tls.pod_labels(service, platform),  # a decode engine calls prefill engines in its own way
    }


def engine_image(service: InferenceService, platform: PlatformConfig) -> str:
    """The engine image: the user's, or the runtime's bundled one at the user's version."""
    engine = service.spec.engine
    if engine.image:
        return engine.image
    default_image = platform.engine.simulated_image if engine.is_simulated else platform.engine.image
    return f"{image_repository(default_image)}:{engine.version}" if engine.version else default_image


def image_repository(reference: str) -> str:
    """An image reference without its tag and digest."""
    name = reference.split("@", 1)[0]
    head, _, tail = name.rpartition(":")
    return name if not head or "/" in tail else head


def _container(service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig) -> Object:
    launched = service.spec.engine.contract.launched
    return {
        "name": "engine",
        "image": engine_image(service, platform),
        "imagePullPolicy": platform.engine.image_pull_policy,
        **({} if launched else engine_server.command(service, model_files.argument(service), tier.gpus)),
        "env": _environment(service, kind, tier, platform),
        **(
            _launcher_ports_and_probes(engine_tls.probe_scheme(service, platform))
            if launched
            else engine_server.ports_and_probes(service)
        ),
        "resources": _resources(service, tier, platform),
        "securityContext": _security_context(tier, platform),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *_mounts(service),
            *lora.mounts(service),
            *engine_tls.mounts(service, platform),
            *(mount.manifest() for mount in tier.pod.volume_mounts),
        ],
    }


def _launcher_ports_and_probes(scheme: Object) -> Object:
    engine = engine_contract()
    return {
        "ports": [
            {"name": "api", "containerPort": engine.ports["api"]},
            {"name": "launcher", "containerPort": engine.ports["launcher"]},
            {"name": "nixl", "containerPort": engine.ports["nixl"]},
        ],
        "readinessProbe": {
            "httpGet": {"path": engine.paths["ready"], "port": "launcher", **scheme},
            # One late answer of a busy node must not make an engine unready. Fast detection is not needed: the gateway
            # watches deletions itself, and a leaving engine takes late requests.
            "periodSeconds": 1,
            "failureThreshold": 3,
            "timeoutSeconds": 5,
        },
        "livenessProbe": {
            "httpGet": {"path": engine.paths["live"], "port": "launcher", **scheme},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
            "terminationGracePeriodSeconds": 30,  # a launcher that hangs does not handle SIGTERM, so it cannot drain
        },
    }


def _pod_security_context(platform: PlatformConfig) -> Object:
    user = platform.engine.run_as_user
    return {**({} if user is None else {"fsGroup": user}), "fsGroupChangePolicy": "OnRootMismatch"}


def _security_context(tier: EngineTier, platform: PlatformConfig) -> Object:
    user = platform.engine.run_as_user
    own_user = {} if user is None else {"runAsUser": user, "runAsGroup": user}
    added = {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}} if tier.pod.ipc_lock else {}
    return {**SECURITY_CONTEXT, **own_user, **added}


def _environment(service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig) -> list[Object]:
    paths = engine_contract().paths
    scratch, home = paths["scratch"], paths["home"]
    launched, compiled = service.spec.engine.contract.launched, model_files.compiler_cache(service)
    vllm_env = ((vllm.CACHE_ROOT_VARIABLE, f"{compiled}/vllm"), (vllm.STARTUP_PLAN_VARIABLE, "1"))
    plimsoll_env: list[Object] = [
        *(
            _launcher_environment(service, kind, tier, platform)
            if launched
            else engine_server.environment(service, model_files.argument(service))
        ),
        _env_entry("HOME", home),
        _env_entry("USER", "plimsoll"),
        _env_entry("HF_HOME", f"{home}/hf"),
        *(_env_entry(name, value) for name, value in vllm_env if launched),
        _env_entry("TORCHINDUCTOR_CACHE_DIR", f"{compiled}/torchinductor"),
        _env_entry("TRITON_CACHE_DIR", f"{compiled}/triton"),
        _env_entry("FLASHINFER_WORKSPACE_BASE", f"{compiled}/flashinfer"),
        _env_entry("TMPDIR", scratch),
    ]
    plimsoll_env += model_files.secret_environment(service)
    user_env = [entry.manifest() for entry in service.spec.engine.env]
    user_names = {entry["name"] for entry in user_env}
    default_env = [dict(e) for e in engine_defaults(service, platform).env if e["name"] not in user_names]
    return _last_wins([*plimsoll_env, *default_env, *user_env])


def _launcher_environment(
    service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig
) -> list[Object]:
    names, model = engine_contract(), service.spec.model
    return [
        _env_entry(names.env["runtime"], service.spec.engine.runtime),
        _env_entry(names.env["role"], kind),
        _env_entry(names.env["model"], model_files.argument(service)),
        *([_env_entry(names.env["task"], model.task)] if model.task != "generate" else []),
        _env_entry(names.env["model_revision"], model.revision or ""),
        *model_files.source_environment(service, platform),
        _env_entry(names.env["served_names"], json.dumps(served_names(service))),
        _env_entry(names.env["default_args"], json.dumps(default_engine_args(service, kind, tier, platform))),
        _env_entry(names.env["args"], json.dumps(list(service.spec.engine.args))),
        *lora.environment(service),
        *engine_tls.environment(service, platform),
        _env_entry(names.env["shutdown_timeout"], str(service.spec.engine.drain_seconds)),
        _env_entry(names.env["remote_prefill_deadline"], str(names.remote_prefill_deadline_seconds)),
        {"name": names.env["pod_ip"], "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]


def served_names(service: InferenceService) -> list[str]:
    """The model names that an engine serves: first the one that the gateway uses, which never changes.

    The second is the public name at the time of rendering. Only clients that bypass this release's gateway need it.
    """
    return list(dict.fromkeys((service.key, service.model_name)))


def _env_entry(name: str, value: str) -> Object:
    return {"name": name, "value": value}


def _last_wins(entries: list[Object]) -> list[Object]:
    """One entry per name, with the last value at the first position, because a list map allows no duplicates."""
    return list({entry["name"]: entry for entry in entries}.values())


def engine_defaults(service: InferenceService, platform: PlatformConfig) -> EngineDefaults:
    """The installation's defaults, or SIMULATED_DEFAULTS for the much smaller simulated engine.

    Default arguments are vLLM's, so engines in images of the user get none.
    """
    if service.spec.engine.is_simulated:
        return SIMULATED_DEFAULTS
    defaults = platform.engine.defaults
    return defaults if service.spec.engine.contract.launched else defaults.model_copy(update={"args": ()})


def default_engine_args(
    service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig
) -> list[str]:
    """Engine arguments that the user's override: those of task, role, GPUs, nodes, SLO and installation, in order."""
    engine = service.spec.engine
    chart_args = engine_defaults(service, platform).args
    given = (*chart_args, *engine.args)
    own = engine.contract.default_args(kind, service.spec.model.task, tier.gpus, given)
    stages: tuple[str, ...] = ()
    if tier.nodes > 1:  # the launcher takes each size once, so that the installation's arguments do not change it
        one_gpu = (vllm.TENSOR_PARALLEL_SIZE, "1") if tier.gpus == 1 else ()
        stages = (*one_gpu, vllm.PIPELINE_PARALLEL_SIZE, str(tier.nodes))
    tuned = tuned_arguments(service, kind, tier, platform)
    words = [] if isinstance(tuned, Unavailable) else [word for argument in tuned for word in argument.args]
    return [*own, *stages, *words, *chart_args, *engine_memory.arguments(service, given)]


def tuned_arguments(
    service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig
) -> tuple[TunedArgument, ...] | Unavailable:
    """The arguments that follow from the SLO; why there are none."""
    chart_args = engine_defaults(service, platform).args
    return engine_tuning.tuned_arguments(service, kind, tier, chart_args, platform.engine.gpu_resource)


def _gpu_resources(service: InferenceService, tier: EngineTier, platform: PlatformConfig) -> dict[str, str]:
    """The extended resource that an engine requests, with its amount; empty for a simulated engine."""
    if not tier.gpus or service.spec.engine.is_simulated:
        return {}
    return {tier.gpu_resource or platform.engine.gpu_resource: str(tier.gpus)}


def _resources(service: InferenceService, tier: EngineTier, platform: PlatformConfig) -> Object:
    """The user's CPU and memory over the installation's. GPUs are requests and limits, as for extended resources."""
    default_resources, user_resources = engine_defaults(service, platform).resources, tier.pod.resources
    default_requests = {
        name: _at_most(amount, user_resources.limits.get(name))
        for name, amount in default_resources.get("requests", {}).items()
    }
    merged = {
        part: {**defaults, **getattr(user_resources, part)}
        for part, defaults in (("requests", default_requests), ("limits", default_resources.get("limits", {})))
        if defaults or getattr(user_resources, part)
    }
    if gpus := _gpu_resources(service, tier, platform):
        for part in ("requests", "limits"):
            merged.setdefault(part, {}).update(gpus)
    return engine_memory.with_offload(service, merged)


def _at_most(amount: int | str, limit: int | str | None) -> int | str:
    """A default request, or the user's limit if that is lower."""
    return amount if limit is None or units.parse_quantity(amount) <= units.parse_quantity(limit) else limit


def _spread_constraints(service: InferenceService, kind: RoleName, tier: EngineTier) -> list[Object]:
    """The user's constraints, else a spread over nodes and zones that no pod waits for.

    Prefill and decode engines are not spread over zones, because KV blocks would cross them.
    """
    selector = {"matchLabels": object_meta.tier_selector(service.metadata.name, kind)}
    if tier.pod.topology_spread_constraints is not None:
        return [{"labelSelector": selector, **given.manifest()} for given in tier.pod.topology_spread_constraints]
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": selector,
            # A rollout spreads the new pods, whatever the old ones do.
            "matchLabelKeys": ["pod-template-hash" if tier.nodes == 1 else labels.SET_REVISION],
        }
        for key in SPREAD_KEYS[kind]
    ]


def _scheduling(service: InferenceService, kind: RoleName, tier: EngineTier, platform: PlatformConfig) -> Object:
    overrides = tier.pod
    tolerations: list[Object] = [toleration.manifest() for toleration in overrides.tolerations]
    for resource in _gpu_resources(service, tier, platform):
        tolerations.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    runtime_class = None if service.spec.engine.is_simulated else platform.engine.runtime_class_name
    fields: Object = {
        "nodeSelector": dict(overrides.node_selector),
        "tolerations": tolerations,
        "affinity": overrides.affinity,
        "topologySpreadConstraints": _spread_constraints(service, kind, tier),
        "runtimeClassName": overrides.runtime_class_name or runtime_class,
        "priorityClassName": overrides.priority_class_name,
        "schedulerName": overrides.scheduler_name,
        "imagePullSecrets": [
            *platform.engine.image_pull_secrets,
            *(ref.manifest() for ref in overrides.image_pull_secrets),
        ],
    }
    return {name: value for name, value in fields.items() if value}


def _volumes(service: InferenceService, tier: EngineTier, platform: PlatformConfig) -> list[Object]:
    shared_memory = tier.pod.shared_memory or DEFAULT_SHARED_MEMORY
    volumes: list[Object] = [
        {"name": "scratch", "emptyDir": {"sizeLimit": SCRATCH_SIZE}},
        {"name": "home", "emptyDir": {"sizeLimit": HOME_SIZE}},
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": engine_memory.grown_size(service, shared_memory)},
        },
    ]
    return [*volumes, *model_files.volumes(service, platform)]


def _mounts(service: InferenceService) -> list[Object]:
    paths = engine_contract().paths
    mounts: list[Object] = [
        {"name": "scratch", "mountPath": paths["scratch"]},
        {"name": "home", "mountPath": paths["home"]},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return [*mounts, *model_files.mounts(service)]
