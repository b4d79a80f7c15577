"""Rules of a service with `spec.targets`: what excludes the targets, and what means nothing for them.

Problem: most of the spec is about engines that Plimsoll runs and requests that pass its gateway. A field that has no
effect misleads.

Idea: such a field is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule
from plimsoll.api.v1alpha1.engine_features import runtime_in
from plimsoll.api.v1alpha1.tiers import NO_TIERS
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.engines.engine import Feature
from plimsoll.engines.registry import engines_without

_NOT_RUN = "Plimsoll does not run their engines"
_NO_GATEWAY = "their requests do not pass the gateway"
_NO_MIDDLEWARE = "only engines that Plimsoll runs add it to requests"
_NO_FORM = "tiers or targets is required"
_BOTH_FORMS = "tiers and targets exclude each other"
_FORMS_HINT = "use tiers for engines that Plimsoll runs, or targets for engines that exist"

# Engines that no target may have. Some need an image, so the one problem of such a service is its engine.
_UNSIZED = engines_without(Feature.TARGETS)


def _not_with_targets(field: str, is_set: Callable[[Any], bool], reason: str) -> ValidationRule[Any]:
    """Return a rule against a field that means nothing for engines that Plimsoll does not run. field: `.a.b`."""
    parents = field.split(".")[1:]
    present = " && ".join(f"has(self.{'.'.join(parents[: n + 1])})" for n in range(len(parents)))
    return ValidationRule(
        f"!has(self.targets) || !({present})",
        f"is not allowed with targets: {reason}",
        lambda own: own.targets is None or not is_set(own),
        field=field,
        reason="FieldValueForbidden",
    )


def _not_in_engine(name: str, attribute: str) -> ValidationRule[Any]:
    return _not_with_targets(f".engine.{name}", lambda own: attribute in own.engine.model_fields_set, _NOT_RUN)


def _needs_port(field: str, is_set: Callable[[Any], bool]) -> ValidationRule[Any]:
    """Return a rule against a field of the spec that only gateways apply."""
    return ValidationRule(
        f"!has(self.targets) || (has(self.targets.serve) && has(self.targets.serve.port)) || !has(self.{field})",
        f"is not allowed with targets without targets.serve.port: {_NO_GATEWAY}",
        lambda own: own.targets is None or own.targets.take_requests or not is_set(own),
        field=f".{field}",
        reason="FieldValueForbidden",
    )


def _class_limits_output(spec: Any) -> bool:
    classes = () if spec.admission is None else spec.admission.classes or ()
    return any(one.request_limits is not None and one.request_limits.max_output_tokens is not None for one in classes)


TARGET_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    ValidationRule(
        "has(self.tiers) != has(self.targets)",
        f"exactly one of tiers and targets is required: {_FORMS_HINT}",
        lambda own: (own.targets is None) != (own.tiers is NO_TIERS),
        field=".tiers",
        reason="FieldValueRequired",
        message_cel=f"(has(self.tiers) ? '{_BOTH_FORMS}' : '{_NO_FORM}') + ': {_FORMS_HINT}'",
        format_message=lambda own: f"{_NO_FORM if own.targets is None else _BOTH_FORMS}: {_FORMS_HINT}",
    ),
    ValidationRule(
        "has(self.tiers) == has(oldSelf.tiers)",
        "tiers and targets cannot replace each other: delete the service and create it again",
        None,
        reason="FieldValueForbidden",
    ),
    _not_with_targets(".adapters", lambda own: "adapters" in own.model_fields_set, _NOT_RUN),
    _not_with_targets(".model.cache", lambda own: "cache" in own.model.model_fields_set, _NOT_RUN),
    _not_with_targets(".model.secretRef", lambda own: own.model.secret_ref is not None, _NOT_RUN),
    ValidationRule(
        f"!has(self.targets) || !has(self.engine) || !has(self.engine.image) || {runtime_in('self.engine', _UNSIZED)}",
        f"is not allowed with targets: {_NOT_RUN}",
        lambda own: own.targets is None or own.engine.image is None or own.engine.runtime in _UNSIZED,
        field=".engine.image",
        reason="FieldValueForbidden",
    ),
    _not_in_engine("version", "version"),
    _not_in_engine("args", "args"),
    _not_in_engine("env", "env"),
    _not_in_engine("drainTimeout", "drain_timeout"),
    _not_in_engine("lora", "lora"),
    _not_in_engine("tuning", "tuning"),
    _not_in_engine("speculative", "speculative"),
    _not_with_targets(".kvOffload", lambda own: own.kv_offload is not None, _NOT_RUN),
    _not_in_engine("prefixCache", "prefix_cache"),
    _needs_port("admission", lambda own: own.admission is not None),
    _needs_port("requestLimits", lambda own: own.request_limits is not None),
    _not_with_targets(
        ".requestLimits.maxOutputTokens",
        lambda own: own.request_limits is not None and own.request_limits.max_output_tokens is not None,
        _NO_MIDDLEWARE,
    ),
    ValidationRule(
        "!has(self.targets) || !has(self.admission) || !has(self.admission.classes) ||"
        " !self.admission.classes.exists(one, has(one.requestLimits) && has(one.requestLimits.maxOutputTokens))",
        f"requestLimits.maxOutputTokens of a class is not allowed with targets: {_NO_MIDDLEWARE}",
        lambda own: own.targets is None or not _class_limits_output(own),
        field=".admission.classes",
        reason="FieldValueForbidden",
    ),
    ValidationRule(
        "!has(self.targets) || !has(self.scaling) || !has(self.scaling.schedule) ||"
        " self.scaling.schedule.all(entry, !has(entry.minReplicas) || entry.minReplicas > 0)",
        "minReplicas 0 is not allowed with targets: they do not scale to zero",
        lambda own: own.targets is None or all(entry.min_replicas != 0 for entry in own.scaling.schedule),
        field=".scaling.schedule",
        reason="FieldValueForbidden",
    ),
    ValidationRule(
        "!has(self.targets) || has(self.slo) || !has(self.scaling) || !has(self.scaling.mode) ||"
        " self.scaling.mode != 'Auto'",
        "is required with targets in mode Auto: without it nothing is sized, and the targets would go to minReplicas",
        lambda own: own.targets is None or own.slo is not None or own.mode is not ScalingMode.AUTO,
        field=".slo",
        reason="FieldValueRequired",
    ),
    ValidationRule(
        "!has(self.targets) || !has(self.targets.prefill) || !has(self.slo) || has(self.slo.ttft)",
        "is required with targets.prefill: no other target sizes prefill engines, and minReplicas would be recommended",
        lambda own: own.targets is None or own.targets.prefill is None or own.slo is None or own.slo.ttft is not None,
        field=".slo.ttft",
        reason="FieldValueRequired",
    ),
)
