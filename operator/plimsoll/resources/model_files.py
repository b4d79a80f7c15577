"""The model's part of an engine pod: volumes, mounts, environment, and the argument that names the model.

Problem: the weights come from a hub, a claim, an image, an object store or a web server, each with its own volume and
credentials. Idea: one module has what each scheme adds; the rest of the pod does not know the scheme.

The launcher downloads s3://, gs:// and https:// models into the cache, and the engine then reads them through a link.
The kubelet mounts oci:// images. The engine simulator has no weights.
"""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService, ModelSource
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

TOKEN_VARIABLE: Final = "HF_TOKEN"
_STORE_KEYS: Final = (("AWS_ACCESS_KEY_ID", False), ("AWS_SECRET_ACCESS_KEY", False), ("AWS_SESSION_TOKEN", True))


def argument(service: InferenceService) -> str:
    """The model argument of the engine: a repository name or a path in the pod."""
    model, paths = service.spec.model, engine_contract().paths
    if model.claim:
        return f"{paths['models']}/claim/{model.claim[1]}"
    if service.spec.engine.is_simulated:
        return model.location
    if model.scheme == "oci":
        return f"{paths['model_image']}/{model.path}" if model.path else paths["model_image"]
    return paths["model_link"] if model.is_fetched else model.location


def source_environment(service: InferenceService, platform: PlatformConfig) -> list[Object]:
    """The variables by which the launcher downloads the model; none if the engine finds it itself."""
    model, names = service.spec.model, engine_contract().env
    if service.spec.engine.is_simulated or not model.is_fetched:
        return []
    digest = [{"name": names["model_digest"], "value": model.digest}] if model.digest else []
    max_bytes = platform.engine.node_cache.max_bytes if _is_node_local(model, platform) else None
    bound = [] if max_bytes is None else [{"name": names["model_cache_bytes"], "value": str(max_bytes)}]
    return [{"name": names["model_source"], "value": model.uri}, *digest, *bound]


def _is_node_local(model: ModelSource, platform: PlatformConfig) -> bool:
    """Whether the cache is the platform's folder of the node."""
    return bool(model.cache.node_local and platform.engine.node_cache.path)


def secret_environment(service: InferenceService) -> list[Object]:
    """The variables with what the model's Secret has."""
    model = service.spec.model
    if model.secret_ref is None or service.spec.engine.is_simulated:
        return []
    secret = model.secret_ref.name
    if model.scheme in ("s3", "gs"):
        return [
            _from_secret(key, {"name": secret, "key": key, **({"optional": True} if is_optional else {})})
            for key, is_optional in _STORE_KEYS
        ]
    name = TOKEN_VARIABLE if model.scheme == "hf" else engine_contract().env["model_token"]
    return [_from_secret(name, {"name": secret, "key": model.secret_ref.key})]


def _from_secret(name: str, selector: Object) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": selector}}


def volumes(service: InferenceService, platform: PlatformConfig) -> list[Object]:
    """The volumes of the model."""
    model = service.spec.model
    if service.spec.engine.is_simulated:
        return []
    if model.claim:
        return [{"name": "model", "persistentVolumeClaim": {"claimName": model.claim[0], "readOnly": True}}]
    if model.scheme == "oci":
        return [{"name": "model", "image": {"reference": model.location, "pullPolicy": "IfNotPresent"}}]
    return [{"name": "model-cache", **_cache(model, platform)}] if model.is_cached else []


def _cache(model: ModelSource, platform: PlatformConfig) -> Object:
    if model.cache.claim_name:
        return {"persistentVolumeClaim": {"claimName": model.cache.claim_name}}
    folder = platform.engine.node_cache.path if _is_node_local(model, platform) else model.cache.host_path
    if folder:  # not made if it is missing: root would own it, and the engine could not write
        return {"hostPath": {"path": folder, "type": "Directory"}}
    return {"emptyDir": {"sizeLimit": model.cache_size}}


def compiler_cache(service: InferenceService) -> str:
    """The folder for what compilers make: on the service's own claim or hostPath, where it outlives the pod, if any.

    Not on the platform's folder of the node: who writes there would run code in the engines of other services.
    """
    cache = service.spec.model.cache
    on_volume = [one["mountPath"] for one in mounts(service) if one["name"] == "model-cache"]
    if on_volume and (cache.claim_name or cache.host_path):
        return f"{on_volume[0]}/.compiled"
    return f"{engine_contract().paths['home']}/.cache"


def mounts(service: InferenceService) -> list[Object]:
    """The mounts of `volumes`."""
    model, paths = service.spec.model, engine_contract().paths
    if service.spec.engine.is_simulated:
        return []
    if model.claim:
        return [{"name": "model", "mountPath": f"{paths['models']}/claim", "readOnly": True}]
    if model.scheme == "oci":
        return [{"name": "model", "mountPath": paths["model_image"], "readOnly": True}]
    folder = paths["model_cache"] if model.is_fetched else f"{paths['home']}/hf"
    return [{"name": "model-cache", "mountPath": folder}] if model.is_cached else []
