"""What the models of the API are made of: a strict base, and rules that hold in two places.

Problem: the API server must refuse a bad manifest at once and in plain words (CEL in the CRD), and the operator must
refuse the same manifest when the cluster still has an older CRD. Two hand-written copies drift.

Idea: one `Rule` carries both: the CEL text that the generator prints, and the Python predicate that `parse` runs.
Tables of good and bad objects run through both and must agree. Rules of one value are attached with
`Annotated[..., Rules(...)]`, rules that span the fields of a model with its class variable `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")
JsonSchema = dict[str, Any]

VALIDATIONS = "x-kubernetes-validations"
BROKEN = "broken_rules"  # pydantic error type of a broken Rule; its context has `problems`: [(field, message), ...]


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One constraint, for the API server and for the operator.

    cel: true if it holds; `self` is the value. message: what is wrong and what to write instead. holds: the same as
    cel in Python, None where only the API server can know (a transition needs the old object). field: path below the
    value to the one at fault, such as `.maxReplicas`. reason: FieldValue{Invalid,Forbidden,Required,Duplicate}.
    message_cel, say: the message computed from the value.
    """

    cel: str
    message: str
    holds: Callable[[T], bool] | None
    field: str = ""
    reason: str = "FieldValueInvalid"
    message_cel: str = ""
    say: Callable[[T], str] | None = None

    def schema(self) -> JsonSchema:
        """The entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message, "messageExpression": self.message_cel}
        entry |= {"reason": self.reason, "fieldPath": self.field}
        return {key: text for key, text in entry.items() if text and text != "FieldValueInvalid"}  # the default reason

    def below(self, path: str) -> Rule[Any]:
        """The same rule stated one level up, where `path` (such as `.metadata.name`) leads to the value."""
        cel, message_cel = (re.sub(r"\bself\b", f"self{path}", text) for text in (self.cel, self.message_cel))
        return replace(self, cel=cel, message_cel=message_cel, field=path + self.field)


def check(value: T, rules: tuple[Rule[T], ...]) -> T:
    """The value itself if every rule holds; otherwise a pydantic error that lists all that do not."""
    broken = [
        (rule.field, rule.say(value) if rule.say else rule.message)
        for rule in rules
        if rule.holds is not None and not rule.holds(value)
    ]
    if broken:
        raise PydanticCustomError(BROKEN, "breaks a rule", {"problems": broken})
    return value


class Rules(Generic[T]):
    """Annotation that gives rules to a plain value, list or mapping."""

    def __init__(self, *rules: Rule[T]) -> None:
        self.rules = rules

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(lambda value: check(value, self.rules), handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        made = handler(schema)
        return {**made, VALIDATIONS: [*made.get(VALIDATIONS, []), *(rule.schema() for rule in self.rules)]}


@dataclass(frozen=True)
class Keyed:
    """Annotation of a list that is a map by some fields of its items: server-side apply merges it by them."""

    keys: tuple[str, ...] = ("name",)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._distinct, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        listed = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(self.keys)}
        return {**handler(schema), **listed}

    def _distinct(self, items: tuple[Model, ...]) -> tuple[Model, ...]:
        seen: dict[tuple[Any, ...], int] = {}
        twice = []
        for index, item in enumerate(items):
            manifest = item.manifest()
            key = tuple(manifest.get(name) for name in self.keys)
            if seen.setdefault(key, index) != index:
                twice.append((f"[{index}]", f"{' '.join(map(str, key))} is there twice"))
        if twice:
            raise PydanticCustomError(BROKEN, "has duplicates", {"problems": twice})
        return items


@dataclass(frozen=True)
class Distinct:
    """Annotation of a list of plain values that holds each once, in no order: server-side apply merges it as a set."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._distinct, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return {**handler(schema), "x-kubernetes-list-type": "set"}

    def _distinct(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = [(f"[{at}]", f"{item} is there twice") for at, item in enumerate(items) if item in items[:at]]
        if twice:
            raise PydanticCustomError(BROKEN, "has duplicates", {"problems": twice})
        return items


@dataclass(frozen=True)
class IntOrString:
    """Annotation of a value that is a whole number or text; `example` shows one in the message."""

    max_length: int
    example: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return {"x-kubernetes-int-or-string": True, "maxLength": self.max_length}

    def _read(self, value: Any) -> int | str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise PydanticCustomError(
                BROKEN, "", {"problems": [("", f"must be a whole number or text, such as {self.example}")]}
            )
        if isinstance(value, str) and len(value) > self.max_length:
            raise PydanticCustomError(
                BROKEN, "", {"problems": [("", f"must have at most {self.max_length} characters, not {len(value)}")]}
            )
        return value


class Model(BaseModel):
    """Base of every object of the API: frozen, camelCase in manifests, no unknown fields, no coercion."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    rules: ClassVar[tuple[Rule[Any], ...]] = ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        check(self, type(self).rules)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        made = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            made[VALIDATIONS] = [rule.schema() for rule in cls.rules]
        return made

    def manifest(self) -> dict[str, Any]:
        """The object as it stands in a manifest: camelCase, absent fields left out."""
        return self.model_dump(mode="json", exclude_none=True)


def matching(pattern: str, message: str) -> Rule[str]:
    """A rule on text: `pattern` is found in it. Write anchors; keep to what RE2 and Python read alike."""
    found = compiled(pattern)
    return Rule(f"self.matches({quote(pattern)})", message, lambda text: found.search(text) is not None)


def refusing(pattern: str, message: str) -> Rule[str]:
    """A rule on text: `pattern` is not found in it."""
    found = compiled(pattern)
    return Rule(f"!self.matches({quote(pattern)})", message, lambda text: found.search(text) is None)


def none_of(values: Sequence[str], message: str) -> Rule[str]:
    """A rule on text: it is none of these."""
    return Rule(f"!(self in [{', '.join(map(quote, values))}])", message, lambda text: text not in values)


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern as RE2 reads it: `$` is the very end; Python's own would also allow a line break after it."""
    return re.compile(pattern.replace("$", r"\Z"), re.ASCII)


def quote(text: str) -> str:
    """A CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
