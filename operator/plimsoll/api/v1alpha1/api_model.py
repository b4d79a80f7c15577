"""Building blocks of the API models: a strict base class, and validation rules that hold in two places.

Problem: the API server must reject an invalid manifest with a clear message (CEL in the CRD). The operator must reject
the same manifest when the cluster still has an older CRD. Two hand-written copies drift apart.

Idea: one `ValidationRule` carries the CEL text for the CRD and the Python predicate that `parse` runs. Tests run tables
of valid and invalid objects through both. `Annotated[..., ValidationRules(...)]` attaches rules to one value; the class
variable `rules` of a model holds rules that span its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")
JsonSchema = dict[str, Any]

VALIDATIONS_KEY = "x-kubernetes-validations"
# Type of the pydantic error that a broken rule raises; its context has `problems`: [(field, message), ...].
RULE_ERROR_TYPE = "broken_rules"


@dataclass(frozen=True)
class ValidationRule(Generic[T]):
    """One constraint, for the API server and for the operator.

    cel: expression that is true for a valid value `self`. message: what is wrong and what to write instead. holds: the
    same predicate in Python; None if only the API server can evaluate it (a transition rule needs the old object).
    field: path from the value to the invalid field, such as `.maxReplicas`.
    reason: FieldValue{Invalid,Forbidden,Required,Duplicate}. message_cel, format_message: compute the message from the
    value, in CEL and in Python.
    """

    cel: str
    message: str
    holds: Callable[[T], bool] | None
    field: str = ""
    reason: str = "FieldValueInvalid"
    message_cel: str = ""
    format_message: Callable[[T], str] | None = None

    def schema(self) -> JsonSchema:
        """Return the entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message, "messageExpression": self.message_cel}
        entry |= {"reason": self.reason, "fieldPath": self.field}
        return {key: text for key, text in entry.items() if text and text != "FieldValueInvalid"}  # the default reason

    def at_path(self, path: str) -> ValidationRule[Any]:
        """Return the rule for a parent object, in which `path` (such as `.metadata.name`) leads to the value."""
        cel, message_cel = (re.sub(r"\bself\b", f"self{path}", text) for text in (self.cel, self.message_cel))
        return replace(self, cel=cel, message_cel=message_cel, field=path + self.field)


def check_rules(value: T, rules: tuple[ValidationRule[T], ...]) -> T:
    """Return the value if every rule holds. Raises a PydanticCustomError that lists all broken rules."""
    problems = [
        (rule.field, rule.format_message(value) if rule.format_message else rule.message)
        for rule in rules
        if rule.holds is not None and not rule.holds(value)
    ]
    if problems:
        raise PydanticCustomError(RULE_ERROR_TYPE, "breaks a rule", {"problems": problems})
    return value


def _is_text(schema: CoreSchema) -> bool:
    return bool(schema["type"] == "str")


class ValidationRules(Generic[T]):
    """Annotation that attaches rules to a scalar, list or mapping."""

    def __init__(self, *rules: ValidationRule[T]) -> None:
        self.rules = rules

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        checked = core_schema.no_info_after_validator_function(lambda value: check_rules(value, self.rules), schema)
        return (
            core_schema.no_info_before_validator_function(self._check_number, checked) if _is_text(schema) else checked
        )

    def _check_number(self, value: Any) -> Any:
        """Refuse a number in place of a string by the rules of the string: quotes alone would not mend it."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_rules(cast(T, str(value)), self.rules)
        return value

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        json_schema = handler(schema)
        return {
            **json_schema,
            VALIDATIONS_KEY: [*json_schema.get(VALIDATIONS_KEY, []), *(rule.schema() for rule in self.rules)],
        }


@dataclass(frozen=True)
class MapList:
    """Annotation of a list with unique keys (`x-kubernetes-list-type: map`): server-side apply merges it by key."""

    keys: tuple[str, ...] = ("name",)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._require_unique_keys, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        list_schema = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)}
        return {**handler(schema), **list_schema}

    def _require_unique_keys(self, items: tuple[ApiModel, ...]) -> tuple[ApiModel, ...]:
        first_index: dict[tuple[Any, ...], int] = {}
        duplicates = []
        for index, item in enumerate(items):
            manifest = item.manifest()
            key = tuple(manifest.get(name) for name in self.keys)
            if first_index.setdefault(key, index) != index:
                duplicates.append((f"[{index}]", f"{' '.join(map(str, key))} is listed twice"))
        if duplicates:
            raise PydanticCustomError(RULE_ERROR_TYPE, "has duplicates", {"problems": duplicates})
        return items


@dataclass(frozen=True)
class SetList:
    """Annotation of a list of unique scalars (`x-kubernetes-list-type: set`): server-side apply merges it as a set."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._require_unique, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return {**handler(schema), "x-kubernetes-list-type": "set"}

    def _require_unique(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        duplicates = [(f"[{at}]", f"{item} is listed twice") for at, item in enumerate(items) if item in items[:at]]
        if duplicates:
            raise PydanticCustomError(RULE_ERROR_TYPE, "has duplicates", {"problems": duplicates})
        return items


@dataclass(frozen=True)
class IntOrString:
    """Annotation of an integer or a string; the error message shows `example`."""

    max_length: int
    example: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return {"x-kubernetes-int-or-string": True, "maxLength": self.max_length}

    def _validate(self, value: Any) -> int | str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise PydanticCustomError(
                RULE_ERROR_TYPE,
                "",
                {"problems": [("", f"must be an integer or a string in quotes, such as {self.example}")]},
            )
        if isinstance(value, str) and len(value) > self.max_length:
            raise PydanticCustomError(
                RULE_ERROR_TYPE,
                "",
                {"problems": [("", f"must have at most {self.max_length} characters, not {len(value)}")]},
            )
        return value


class ApiModel(BaseModel):
    """Base of every API object: frozen, camelCase in manifests, no unknown fields, no coercion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    rules: ClassVar[tuple[ValidationRule[Any], ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check_rules(self, type(self).rules)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        json_schema = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            json_schema[VALIDATIONS_KEY] = [rule.schema() for rule in cls.rules]
        return json_schema

    def manifest(self) -> dict[str, Any]:
        """Return the object as a manifest has it: camelCase, without absent fields."""
        return self.model_dump(mode="json", exclude_none=True)


def with_values(*parts: str | tuple[str, Callable[[Any], object]]) -> dict[str, Any]:
    """Return the fields of a rule that compute its message.

    parts: texts, and values as a CEL expression with the same value in Python.
    """
    template = quote("".join(part.replace("%", "%%") if isinstance(part, str) else "%s" for part in parts))
    values = ", ".join(f"dyn({part[0]})" for part in parts if not isinstance(part, str))
    return {
        "message_cel": f"{template}.format([{values}])",  # a concatenation would cost more than the API server allows
        "format_message": lambda own: "".join(part if isinstance(part, str) else str(part[1](own)) for part in parts),
    }


def matching(pattern: str, message: str) -> ValidationRule[str]:
    """Return a rule that a string contains a match of `pattern`.

    Anchor the pattern, and use only syntax that RE2 and Python share.
    """
    regex = compile_re2(pattern)
    return ValidationRule(f"self.matches({quote(pattern)})", message, lambda text: regex.search(text) is not None)


def not_matching(pattern: str, message: str) -> ValidationRule[str]:
    """Return a rule that a string contains no match of `pattern`."""
    regex = compile_re2(pattern)
    return ValidationRule(f"!self.matches({quote(pattern)})", message, lambda text: regex.search(text) is None)


def none_of(values: Sequence[str], message: str) -> ValidationRule[str]:
    """Return a rule that a string is none of `values`."""
    return ValidationRule(f"!(self in [{', '.join(map(quote, values))}])", message, lambda text: text not in values)


def compile_re2(pattern: str) -> re.Pattern[str]:
    """Compile a pattern with RE2's meaning of `$`: the end of the text. Python also allows a newline after it."""
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)


def quote(text: str) -> str:
    """Return `text` as a CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
