"""Rules about what an engine cannot do: a field that needs a feature is refused for an engine that lacks it.

The message names the field, the engine, the feature, and the engines that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll.api.v1alpha1.api_model import ValidationRule, compile_re2, quote
from plimsoll.engines.engine import Engine, Feature
from plimsoll.engines.registry import DEFAULT_ENGINE, ENGINES, engines_with, engines_without

FORBIDDEN = "FieldValueForbidden"


def _runtime_cel(engine: str) -> str:
    return f"(has({engine}.runtime) ? {engine}.runtime : {quote(DEFAULT_ENGINE.name)})"


def runtime_in(engine: str, names: tuple[str, ...]) -> str:
    """Return the CEL of whether the engine at this path is one of these; an absent runtime is the default one."""
    is_default = DEFAULT_ENGINE.name in names
    return (
        f"{'!' * is_default}has({engine}.runtime) {'||' if is_default else '&&'} {engine}.runtime in {_cel_list(names)}"
    )


def needs(
    feature: Feature,
    used_cel: str,
    used: Callable[[Any], bool],
    *,
    field: str,
    engine: str = "self.engine",
    remedy: str = "",
) -> ValidationRule[Any]:
    """Return a rule that an engine has a feature where a field of the spec needs it.

    used_cel, used: whether the spec uses the feature. field: path of the field. engine: path of the engine in CEL; with
    "self" the rule is one of EngineSpec. remedy: what to change; by default the field is to be removed.
    """
    lacking = engines_without(feature)
    assert lacking, f"every engine has {feature}"
    present = "" if engine == "self" else f"!has({engine}) || "
    change = remedy or f"remove {field.removeprefix('.')}"
    says = f" has no {feature}: {change}, or use engine {' or '.join(engines_with(feature))}"

    def runtime(spec: Any) -> str:
        return str(spec.runtime if engine == "self" else spec.engine.runtime)

    return ValidationRule(
        f"{present}!({runtime_in(engine, lacking)}) || !({used_cel})",
        f"the engine{says}",
        lambda spec: runtime(spec) not in lacking or not used(spec),
        field=field,
        reason=FORBIDDEN,
        message_cel=f"'engine ' + {_runtime_cel(engine)} + {quote(says)}",
        format_message=lambda spec: f"engine {runtime(spec)}{says}",
    )


def needs_image() -> ValidationRule[Any]:
    """Return a rule that an engine without bundled image has one."""
    lacking, says = engines_without(Feature.BUNDLED_IMAGE), f" has no {Feature.BUNDLED_IMAGE}: image is required"
    return ValidationRule(
        f"!({runtime_in('self', lacking)}) || has(self.image)",
        f"the engine{says}",
        lambda spec: spec.runtime not in lacking or spec.image is not None,
        field=".image",
        reason="FieldValueRequired",
        message_cel=f"'engine ' + {_runtime_cel('self')} + {quote(says)}",
        format_message=lambda spec: f"engine {spec.runtime}{says}",
    )


def reserved_args() -> tuple[ValidationRule[Any], ...]:
    """Return rules that no argument is a flag that Plimsoll sets, one for each set of such flags."""
    flag_sets = dict.fromkeys(engine.reserved_flags for engine in ENGINES.values() if engine.reserved_flags)
    return tuple(_reserved(flags) for flags in flag_sets)


def _reserved(flags: tuple[str, ...]) -> ValidationRule[Any]:
    engines = tuple(name for name, engine in ENGINES.items() if engine.reserved_flags == flags)
    pattern = _flag_pattern(flags)
    regex = compile_re2(pattern)
    says = f"may not have a flag that Plimsoll sets (reserved: {', '.join(flags)})"

    def found(spec: Any) -> list[str]:
        return [arg.split("=")[0] for arg in spec.args if regex.search(arg)]

    return ValidationRule(
        f"!({runtime_in('self', engines)}) || !has(self.args) || !self.args.exists(arg, arg.matches({quote(pattern)}))",
        says,
        lambda spec: spec.runtime not in engines or not found(spec),
        field=".args",
        format_message=lambda spec: f"{says}: it has {', '.join(found(spec))}",
    )


def variable_rules() -> tuple[ValidationRule[Any], ...]:
    """Return rules about environment variables that set arguments, for each engine that has some.

    None sets what a reserved flag sets. Those that are read have a literal value, because nothing reads references.
    """
    reserved = dict.fromkeys(engine.reserved_variables for engine in ENGINES.values() if engine.reserved_variables)
    read = [engine for engine in ENGINES.values() if engine.argument_variables]
    return (*map(_reserved_variables, reserved), *map(_literal_variables, read))


def _reserved_variables(names: tuple[str, ...]) -> ValidationRule[Any]:
    engines = tuple(name for name, engine in ENGINES.items() if engine.reserved_variables == names)
    says = (
        f"may not set {', '.join(names)}, on which Plimsoll relies: remove it; spec.model and the tier's gpus say what "
        "runs, and the gateway checks API keys"
    )

    def found(spec: Any) -> bool:
        return any(variable.name in names for variable in spec.env)

    return ValidationRule(
        f"!({runtime_in('self', engines)}) || !has(self.env) || !self.env.exists(v, v.name in {_cel_list(names)})",
        says,
        lambda spec: spec.runtime not in engines or not found(spec),
        field=".env",
        reason=FORBIDDEN,
    )


def _literal_variables(engine: Engine) -> ValidationRule[Any]:
    names = tuple(name for name, _ in engine.argument_variables)
    says = f"{' or '.join(names)} needs value, not valueFrom: the gateway reads the limit from the manifest"
    return ValidationRule(
        f"!({runtime_in('self', (engine.name,))}) || !has(self.env) || "
        f"!self.env.exists(v, has(v.valueFrom) && v.name in {_cel_list(names)})",
        says,
        lambda spec: (
            spec.runtime != engine.name or all(one.value_from is None for one in spec.env if one.name in names)
        ),
        field=".env",
        reason=FORBIDDEN,
    )


def _flag_pattern(flags: tuple[str, ...]) -> str:
    """Return a pattern for flags: any character between words, `=value`, `.key` of a JSON value.

    It is short, because the API server limits the cost of a rule by the length of its pattern.
    """
    names = "|".join(flag[1:].replace("-", ".").replace("_", ".") for flag in flags)
    return f"^-({names})([=. ]|$)"


def _cel_list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(map(quote, names))}]"
