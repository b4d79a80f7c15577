"""What the admission webhook says of a new or changed InferenceService. Pure.

Problem: the schema's rules see one object. A held model name, a circle of fallbacks or an SLO beyond what the GPUs can
do would show only later, in a condition.
Idea: the functions behind the conditions validate the object before it is stored. Only what a change touches is
refused or warned of, so that no other edit of a service is held up. An error is what the operator is certain of; what
may still become right, such as a fallback that is applied later, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from plimsoll.adapters.normalize import value_at
from plimsoll.api.v1alpha1 import DEFAULT_GPU_RESOURCE, InferenceService, parse
from plimsoll.controllers.hardware_limits import hardware_limits
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.model_names import model_names
from plimsoll.controllers.reconcile.name_condition import adapter_name_rejected, describe_conflict, name_rejected
from plimsoll.controllers.reconcile.observe import (
    FALLBACK_MISSING,
    fallback_key,
    name_state,
    related_claims,
    resolve_fallback,
)
from plimsoll.controllers.reconcile.service_status import fallback_unusable
from plimsoll.controllers.webhook.gpu_warnings import gpu_warnings
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import NameRules, adapter_names, claimed_name, read_claim, read_claims

Object = dict[str, Any]


@dataclass(frozen=True)
class ValidationResult:
    """The answer to one change. It is refused if there is an error."""

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cluster:
    """The other services, and the rules about names."""

    cache: ObjectCache
    rules: NameRules


def validate_change(
    new: Object,
    old: Object | None,
    cluster: Cluster | None,
    default_args: Sequence[str] = (),
    gpu_resource: str = DEFAULT_GPU_RESOURCE,
) -> ValidationResult:
    """Returns what is wrong with a change of an InferenceService.

    new, old: normalised objects; `old` is None for a new service. cluster: None while the other services are not known;
    the rules about them are then left out. default_args: arguments that the chart adds to those of an engine.
    gpu_resource: what an absent gpuResource is.
    """
    if new["metadata"].get("deletionTimestamp") or (old is not None and old.get("spec") == new.get("spec")):
        return ValidationResult()
    service, former = _parse(new, gpu_resource), None if old is None else _parse(old, gpu_resource)
    if isinstance(service, InvalidSpec):
        before = former.problems if isinstance(former, InvalidSpec) else ()
        added = tuple(problem for problem in service.problems if problem not in before)
        return ValidationResult(added, tuple(problem for problem in service.problems if problem in before))
    errors: list[str] = []
    warnings: list[str] = []
    if cluster is not None:
        for is_error, message in (
            *_name_problems(new, old, cluster),
            *_adapter_name_problems(new, old, cluster),
            *_fallback_problems(new, old, cluster),
        ):
            (errors if is_error else warnings).append(message)
    present = hardware_limits(former, default_args) if isinstance(former, InferenceService) else ()
    warnings += [limit for limit in hardware_limits(service, default_args) if limit not in present]
    unused = gpu_warnings(former, default_args, gpu_resource) if isinstance(former, InferenceService) else ()
    warnings += [text for text in gpu_warnings(service, default_args, gpu_resource) if text not in unused]
    return ValidationResult(tuple(errors), tuple(warnings))


def _parse(obj: Object, gpu_resource: str) -> InferenceService | InvalidSpec:
    try:
        return parse(obj, gpu_resource)
    except InvalidSpec as error:
        return error


def _name_problems(new: Object, old: Object | None, cluster: Cluster) -> Iterator[tuple[bool, str]]:
    """Whether it is an error, and the message, if a new claim of a model name would not be granted.

    It is an error only for a name that the spec has, and whose holder still claims it: the name of the object is no
    choice of a model name, and a name that its holder gives up is granted within seconds.
    """
    claim = read_claim(new)
    if claim is None or (old is not None and claimed_name(old) == claim.model):
        return
    others = [one for one in related_claims(cluster.cache, claim) if one.qualified_name != claim.qualified_name]
    state = name_state(claim, [*others, claim], cluster.rules)
    holder = state.holder if state.rejection is None and value_at(new, "spec", "model", "name") is not None else None
    if holder is not None and claim.model in (holder.model, holder.qualified_name):
        yield True, f"spec.model.name {claim.model}: {describe_conflict(claim.model, holder)}; change spec.model.name"
        return
    names = model_names(new, claim.model, state.owned, None, gateways_complete=False, now=datetime.now(UTC))
    condition = name_rejected(state, names)
    if condition is not None:
        yield False, condition.message


def _adapter_name_problems(new: Object, old: Object | None, cluster: Cluster) -> Iterator[tuple[bool, str]]:
    """The same for the names of new adapters."""
    before = () if old is None else adapter_names(old)
    claims = read_claims(new)
    for claim in claims[1:]:
        if claim.model in before:
            continue
        own = {one.qualified_name for one in claims}
        others = [one for one in related_claims(cluster.cache, claim) if one.qualified_name not in own]
        state = name_state(claim, [claim, *others], cluster.rules)
        condition = adapter_name_rejected([state])
        if condition is not None:
            holder = state.holder if state.rejection is None else None
            yield holder is not None and claim.model in (holder.model, holder.qualified_name), condition.message


def _fallback_problems(new: Object, old: Object | None, cluster: Cluster) -> Iterator[tuple[bool, str]]:
    """Whether it is an error, and the message, if a new fallback cannot be used."""
    fallback = resolve_fallback(cluster.cache, new)
    if fallback is None or (old is not None and fallback_key(old) == fallback_key(new)):
        return
    condition = fallback_unusable(*fallback)
    if condition is not None:
        yield fallback[1] != FALLBACK_MISSING, condition.message
