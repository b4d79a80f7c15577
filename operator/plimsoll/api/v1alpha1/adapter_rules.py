"""Rules about LoRA adapters that span fields of the spec."""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.adapters import DEFAULT_MAX_CPU_LORAS, MAX_ADAPTERS_CHARS, LoraSpec
from plimsoll.api.v1alpha1.api_model import ValidationRule, compile_re2, quote, with_values
from plimsoll.api.v1alpha1.prefill_rules import SERVE_ALONE, serves_alone

# Plimsoll sets the first five from spec.engine.lora. With the others an engine has several API servers, of which an
# adapter reaches only one.
_LORA_FLAGS_PATTERN = (
    "^(--(enable[-_]lora|max[-_]loras|max[-_]lora[-_]rank|max[-_]cpu[-_]loras|lora[-_]modules|api[-_]server[-_]count|"
    "data[-_]parallel[-_]size)|-asc|-dp)([=. ]|$)"
)
_LORA_FLAGS = compile_re2(_LORA_FLAGS_PATTERN)
_CPU_LORAS: Final = (
    "(has(self.engine) && has(self.engine.lora) && has(self.engine.lora.maxCpuLoras) ?"
    f" self.engine.lora.maxCpuLoras : {DEFAULT_MAX_CPU_LORAS})"
)
HAS_LORA: Final = "((has(self.adapters) && size(self.adapters) > 0) || (has(self.engine) && has(self.engine.lora)))"


def uses_lora(spec: Any) -> bool:
    return bool(spec.adapters) or spec.engine.lora is not None


ADAPTER_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    ValidationRule(
        f"!has(self.adapters) || size(self.adapters) <= {_CPU_LORAS}",
        "has more entries than an engine holds: raise engine.lora.maxCpuLoras, or remove some",
        lambda own: len(own.adapters) <= (own.engine.lora or LoraSpec()).cpu_loras,
        field=".adapters",
        **with_values(
            "has ",
            ("size(self.adapters)", lambda own: len(own.adapters)),
            " entries and an engine holds ",
            (_CPU_LORAS, lambda own: (own.engine.lora or LoraSpec()).cpu_loras),
            ": raise engine.lora.maxCpuLoras, or remove some",
        ),
    ),
    ValidationRule(
        "!has(self.adapters) || self.adapters.map(one, size(one.name) + size(one.uri) + (has(one.revision) ?"
        f" size(one.revision) : 0)).sum() <= {MAX_ADAPTERS_CHARS}",
        f"names, URIs and revisions must together have at most {MAX_ADAPTERS_CHARS} characters: shorten them, or "
        "move some adapters to another service",
        lambda own: sum(adapter.chars for adapter in own.adapters) <= MAX_ADAPTERS_CHARS,
        field=".adapters",
    ),
    ValidationRule(
        f"!{HAS_LORA} || !has(self.model.task) || self.model.task == 'generate'",
        "adapters and engine.lora need the model task generate",
        lambda own: not uses_lora(own) or own.model.task == "generate",
        field=".adapters",
        reason="FieldValueForbidden",
    ),
    ValidationRule(
        f"!{HAS_LORA} || {SERVE_ALONE}",
        "adapters and engine.lora need the tier serve: remote prefill does not support them",
        lambda own: not uses_lora(own) or serves_alone(own),
        field=".adapters",
        reason="FieldValueForbidden",
    ),
    ValidationRule(
        f"!{HAS_LORA} || !has(self.engine) || !has(self.engine.args) ||"
        f" !self.engine.args.exists(arg, arg.matches({quote(_LORA_FLAGS_PATTERN)}))",
        "args may not set LoRA flags, --api-server-count or --data-parallel-size with adapters or engine.lora: use "
        "engine.lora",
        lambda own: not uses_lora(own) or not any(_LORA_FLAGS.search(arg) for arg in own.engine.args),
        field=".engine.args",
        reason="FieldValueForbidden",
    ),
)
