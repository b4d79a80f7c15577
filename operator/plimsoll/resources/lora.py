"""What LoRA adapters add to a service: the ConfigMap with the desired adapters, and the pod's part.

Problem: adapters must come and go without a restart, and a restarted engine must find them without the operator.

Idea: the desired adapters are in a ConfigMap, which the kubelet mounts and updates in each pod. The launcher loads what
it says. The pod template depends only on the bounds and on the claims that have to be mounted.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.engines import desired_adapters
from plimsoll.resources import object_meta

Object = dict[str, Any]

_VOLUME: Final = "plimsoll-adapters"


def config_map_name(service: str) -> str:
    """Name of the ConfigMap with the desired adapters."""
    return f"{service}-adapters"


def config_map(service: InferenceService, parent: Object) -> Object:
    """The desired adapters, as the launcher reads them."""
    name = service.metadata.name
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": object_meta.child_metadata(parent, config_map_name(name), object_meta.service_labels(name)),
        "data": {desired_adapters.FILE: desired_adapters.dump(one.desired for one in service.spec.adapters)},
    }


def claims(service: InferenceService) -> list[str]:
    """The claims of the service's pvc:// adapters, sorted; none for simulated engines."""
    if service.spec.engine.is_simulated:
        return []
    return sorted({adapter.claim for adapter in service.spec.adapters if adapter.claim is not None})


def revision_part(service: InferenceService) -> Object:
    """What of the adapters is in the pod template, for the name of its revision."""
    implied = {"lora": True} if service.spec.adapters and service.spec.engine.lora is None else {}
    mounted = claims(service)
    return {**implied, **({"adapterClaims": mounted} if mounted else {})}


def environment(service: InferenceService) -> list[Object]:
    """The variable that enables LoRA in the launcher."""
    lora = service.lora
    if lora is None:
        return []
    bounds = {"max_loras": lora.loras, "max_lora_rank": lora.lora_rank, "max_cpu_loras": lora.cpu_loras}
    return [{"name": engine_contract().env["lora"], "value": orjson.dumps(bounds).decode()}]


def volumes(service: InferenceService) -> list[Object]:
    """The ConfigMap, and a volume for each claim that the model does not use."""
    if service.lora is None:
        return []
    config = {"name": _VOLUME, "configMap": {"name": config_map_name(service.metadata.name)}}
    return [
        config,
        *(
            {"name": _claim_volume(claim), "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            for claim in claims(service)
            if claim != _model_claim(service)
        ),
    ]


def mounts(service: InferenceService) -> list[Object]:
    """Read-only mounts of `volumes`. A claim that the model uses too has one volume and two mounts."""
    if service.lora is None:
        return []
    paths = engine_contract().paths
    return [
        {"name": _VOLUME, "mountPath": paths["adapters"], "readOnly": True},
        *(
            {
                "name": "model" if claim == _model_claim(service) else _claim_volume(claim),
                "mountPath": f"{paths['adapter_claims']}/{claim}",
                "readOnly": True,
            }
            for claim in claims(service)
        ),
    ]


def _claim_volume(claim: str) -> str:
    return f"{_VOLUME}-{object_meta.short_hash(claim)}"


def _model_claim(service: InferenceService) -> str | None:
    claim = service.spec.model.claim
    return None if claim is None else claim[0]
