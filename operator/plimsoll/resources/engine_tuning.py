"""Arguments that the operator sets on a tier's engines, from the spec of the service. Pure.

They become part of the pod template when it is rendered, and the template is stored. So neither an upgrade nor a
measurement changes them: the next rollout does, which a change of the model, the engine or the platform's generation
starts. The template's annotation has each argument and its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import EngineTier, InferenceService, RoleName
from plimsoll.core.planning.engine_tuning import EngineHardware, TunedArgument, tune_engine
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines.engine import Feature
from plimsoll.engines.parallelism import WHOLE_GPUS
from plimsoll.resources import hardware

Object = dict[str, Any]


@dataclass(frozen=True)
class StoredArgument:
    """An argument as a pod template's annotation has it. value: the number, or the largest of several."""

    flag: str
    value: int
    text: str
    reason: str


def tuned_arguments(
    service: InferenceService, role: RoleName, tier: EngineTier, chart_args: Sequence[str], gpu_resource: str
) -> tuple[TunedArgument, ...] | Unavailable:
    """The arguments that a new pod template of a tier gets; why there are none.

    chart_args: arguments that the chart adds to the user's. gpu_resource: resource that the engines request by default.
    """
    engine = service.spec.engine
    if engine.tuning == "Off":
        return Unavailable("spec.engine.tuning is Off")
    if Feature.TUNING not in engine.contract.features:
        return Unavailable(f"engine {engine.runtime} has no {Feature.TUNING}")
    if service.spec.model.task != "generate":
        return Unavailable(f"task {service.spec.model.task} generates no tokens")
    if tier.nodes > 1:
        return Unavailable(f"spec.tiers.{role}.nodes: engines of several nodes are not modelled")
    shape = hardware.known_shape(service, chart_args)
    if shape is None:
        return Unavailable(f"the cost per token of model {service.spec.model.uri} is unknown")
    gpu = hardware.named_accelerator(tier.pod.node_selector)
    if not tier.gpus:
        return Unavailable(f"spec.tiers.{role}.gpus is 0")
    if (resource := tier.gpu_resource or gpu_resource) not in WHOLE_GPUS:
        return Unavailable(f"what {resource} provides is not known")
    if gpu is None:
        return Unavailable(f"spec.tiers.{role}.pod.nodeSelector names no known GPU type")
    return tune_engine(
        Role(role),
        EngineHardware(shape, gpu, tier.gpus),
        None if service.spec.slo is None else service.spec.slo.to_core(),
        (*chart_args, *engine.args),
        graphs=engine.image is None and engine.version is None,
    )


def annotation_of(arguments: tuple[TunedArgument, ...] | Unavailable) -> dict[str, str]:
    """The annotation of a pod template with these arguments; none without any."""
    if isinstance(arguments, Unavailable):
        return {}
    rows = [
        {"flag": one.flag, "value": one.value, "text": f"{one.short} ({one.cause})", "reason": one.reason}
        for one in arguments
    ]
    return {labels.TUNING: orjson.dumps(rows).decode()}


def stored_arguments(template: Mapping[str, Any]) -> tuple[StoredArgument, ...]:
    """The arguments that a pod template says were chosen; none if the annotation is not the operator's."""
    try:
        text = (template["metadata"].get("annotations") or {}).get(labels.TUNING, "[]")
        return tuple(
            StoredArgument(str(row["flag"]), int(row["value"]), str(row["text"]), str(row["reason"]))
            for row in orjson.loads(text)
        )
    except (AttributeError, ValueError, TypeError, KeyError):
        return ()
