"""Arguments that the operator sets on a tier's engines, from the spec of the service. Pure.

They become part of the pod template when it is rendered, and the template is stored. So an upgrade does not change
them: the next rollout does, which a change of the model, the engine or the platform's generation starts. The
template's annotation has each argument and its reason. A measured chunk (`core.planning.retuning`) replaces that
one argument in the stored template and leaves the rest, so that what follows is its effect alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import EngineTier, InferenceService, RoleName
from plimsoll.core.planning.engine_tuning import EngineHardware, TunedArgument, chunk_excluded_by, tune_engine
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines import vllm
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
        service.tightest_slo,
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


@dataclass(frozen=True)
class MeasuredChunk:
    """A chunk of prompt tokens from measurements. revision: name of the template for the user's spec. tokens: 0 for the
    template's own chunk. at_s: when it was decided, seconds since the epoch.
    """

    revision: str
    tokens: int
    reason: str
    at_s: float = 0.0


def measured_chunk(obj: Object | None) -> int:
    """The measured chunk of a ControllerRevision's or Deployment's template; 0 for none."""
    text = "0" if obj is None else obj["metadata"].get("labels", {}).get(labels.MEASURED_CHUNK, "0")
    return int(text) if text.isascii() and text.isdecimal() else 0


def chunk_reason(template: Object) -> str:
    """Why the engines have their chunk; empty if vLLM chose it."""
    flag = vllm.MAX_NUM_BATCHED_TOKENS
    return next((one.reason for one in stored_arguments(template) if one.flag == flag), "")


def may_be_measured(service: InferenceService, template: Object) -> bool:
    """Whether another chunk may be set on the engines of a serve tier. template: of its pods."""
    engine, tier = service.spec.engine, service.spec.tiers.serve
    if engine.tuning != "Auto" or Feature.TUNING not in engine.contract.features or tier is None or tier.nodes > 1:
        return False
    own = [vllm.MAX_NUM_BATCHED_TOKENS for one in stored_arguments(template) if one.flag == vllm.MAX_NUM_BATCHED_TOKENS]
    words = _default_words(template)
    if words is None or words.count(vllm.MAX_NUM_BATCHED_TOKENS) > len(own):
        return False
    given = [word for word in words if word not in own]
    return service.spec.model.task == "generate" and chunk_excluded_by((*given, *engine.args), tier.gpus) is None


def with_chunk(template: Object, tokens: int, reason: str) -> Object:
    """The pod template with another chunk, or with its own for 0 tokens. The rest is left as it is."""
    annotations = dict(template["metadata"].get("annotations", {}))
    own = annotations.pop(labels.OWN_TUNING, annotations.get(labels.TUNING, "[]"))
    rows = orjson.loads(own)
    if tokens:
        rows = [row for row in rows if row["flag"] != vllm.MAX_NUM_BATCHED_TOKENS]
        text = f"{vllm.MAX_NUM_BATCHED_TOKENS}={tokens} (measured)"
        rows.append({"flag": vllm.MAX_NUM_BATCHED_TOKENS, "value": tokens, "text": text, "reason": reason})
        annotations |= {labels.TUNING: orjson.dumps(rows).decode(), labels.OWN_TUNING: own}
    elif rows:
        annotations[labels.TUNING] = own
    else:
        annotations.pop(labels.TUNING, None)
    chunk = next((row["value"] for row in rows if row["flag"] == vllm.MAX_NUM_BATCHED_TOKENS), None)
    metadata = {name: value for name, value in template["metadata"].items() if name != "annotations"}
    engine, *others = template["spec"]["containers"]
    words = _with_value(_default_words(template) or [], vllm.MAX_NUM_BATCHED_TOKENS, chunk)
    environment = [
        {**entry, "value": json.dumps(words)} if entry["name"] == engine_contract().env["default_args"] else entry
        for entry in engine["env"]
    ]
    return {
        "metadata": {**metadata, **({"annotations": annotations} if annotations else {})},
        "spec": {**template["spec"], "containers": [{**engine, "env": environment}, *others]},
    }


def _default_words(template: Object) -> list[str] | None:
    """The arguments that the launcher gets before the user's; None if the template has none."""
    environment = template["spec"]["containers"][0].get("env", ())
    name = engine_contract().env["default_args"]
    text = next((entry.get("value") for entry in environment if entry["name"] == name), None)
    return None if text is None else [str(word) for word in json.loads(text)]


def _with_value(words: Sequence[str], flag: str, value: int | None) -> list[str]:
    """Arguments with another value of a flag, in its place or first; None removes it."""
    at = words.index(flag) if flag in words else 0
    rest = [*words[:at], *words[at + 2 :]] if flag in words else list(words)
    return rest if value is None else [*rest[:at], flag, str(value), *rest[at:]]
