"""Conversion between state and JSON documents, driven by the types of the fields.

Problem: checkpoints and published limits come back damaged, edited by hand, or written by another release. A check that
each state writes for itself is forgotten in one of them.

Idea: the types say what is valid. A record (NamedTuple or frozen dataclass) is a list of its fields, or an object if
`stored_as` names its keys. Fields are float, int, str, bool, records, tuples, mappings with string keys, and `| None`.
`Annotated` adds bounds and rounding. A document is decoded as a whole or rejected with ValueError, which names the
place. Conditions on several fields are the record's own: `__post_init__`, or a method `validate` that raises.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from inspect import signature
from reprlib import repr as shorten
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from plimsoll.core import units

T = TypeVar("T")
INFINITE: Final = "infinite"  # in place of a number, which JSON cannot have; a null would count as absent
_MAX_FLOAT: Final = sys.float_info.max
_LAYOUT: Final = "_stored_layout"


@dataclass(frozen=True, slots=True)
class Number:
    """Bounds of a number, both inclusive, and how it is stored.

    digits: significant digits; decimals: digits after the point. infinite: infinity is valid, stored as INFINITE. gaps:
    NaN is valid, stored as null.
    """

    low: float = -_MAX_FLOAT
    high: float = _MAX_FLOAT
    digits: int | None = None
    decimals: int | None = None
    infinite: bool = False
    gaps: bool = False

    def encode(self, value: float) -> Any:
        if not math.isfinite(value):
            return INFINITE if self.infinite and value > 0.0 else None
        if self.digits is not None and isinstance(value, float):
            return units.round_significant(value, self.digits)
        return value if self.decimals is None else round(value, self.decimals)

    def decode(self, integer: bool, stored: Any) -> float:
        if (self.infinite and stored == INFINITE) or (self.gaps and stored is None):
            return math.nan if stored is None else math.inf
        valid = isinstance(stored, int) or (isinstance(stored, float) and not integer)
        if isinstance(stored, bool) or not valid or not self.low <= stored <= self.high:
            bounds = [f"at least {units.format_number(self.low)}"] * (self.low > -_MAX_FLOAT)
            bounds += [f"at most {units.format_number(self.high)}"] * (self.high < _MAX_FLOAT)
            expected = " of ".join(filter(None, ["an integer" if integer else "a number", " and ".join(bounds)]))
            raise ValueError(f"{shorten(stored)} is not {expected}")
        return stored if integer else float(stored)


@dataclass(frozen=True, slots=True)
class Length:
    """Bounds of the length of a string or tuple, both inclusive."""

    low: int
    high: int


FLAT: Final = "flat"  # marks tuple[X, Record]: X and the record's fields are one list
Amount: TypeAlias = Annotated[float, Number(0.0)]
Count: TypeAlias = Annotated[int, Number(0)]
Rounded: TypeAlias = Annotated[float, Number(digits=6)]


class _Layout(NamedTuple):
    title: str
    version: int | None
    optional: tuple[str, ...]
    omit: tuple[str, ...]
    keys: Mapping[str, str]


def stored_as(
    title: str,
    /,
    *,
    version: int | None = None,
    optional: tuple[str, ...] = (),
    omit: tuple[str, ...] = (),
    **keys: str,
) -> Callable[[type[T]], type[T]]:
    """Class decorator: the record is stored as an object.

    title: what an error calls it, with its article. keys: key of a field, if it is not the field's name. omit: fields
    that are not stored. An `optional` field is absent at its default, and null counts as absent.
    """

    def mark(kind: type[T]) -> type[T]:
        setattr(kind, _LAYOUT, _Layout(title, version, optional, omit, keys))
        return kind

    return mark


def encode(value: object, kind: Any = None) -> Any:
    """Return a value as JSON values. kind: its type, if it is no record."""
    return _conversion(kind or cast(Any, type(value))).encode(value)


def decode(kind: type[T], stored: object, **supplied: Any) -> T:
    """Return the value that `encode` wrote. supplied: fields that are not stored. Raises ValueError."""
    conversion: _Conversion = _conversion(cast(Any, kind))
    return cast(T, conversion.decode(stored, **supplied))


class _Conversion(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[..., Any]


@cache
def _conversion(kind: Any, mark: Any = None) -> _Conversion:
    """Conversion of a type. mark: what `Annotated` says about it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _conversion(*arguments)
    if kind in (float, int):
        number = mark or Number()
        return _Conversion(number.encode, partial(number.decode, kind is int))
    if kind in (str, bool):
        return _Conversion(kind, partial(_check, kind, mark))
    if origin in (Union, UnionType):
        (part,) = (_conversion(one) for one in arguments if one is not NoneType)
        return _Conversion(
            *(lambda value, convert=convert: None if value is None else convert(value) for convert in part)
        )
    if origin is Mapping:
        return _mapping(_conversion(arguments[1]))
    if origin is not tuple:
        return _record(kind)
    part = _conversion(arguments[0])
    if arguments[-1] is Ellipsis:
        return _Conversion(
            lambda values: [*map(part.encode, values)],
            lambda stored: tuple(map(part.decode, _check(list, mark, stored))),
        )
    row = _row(tuple(map(_conversion, arguments)), lambda *values: values)
    return _flat(row) if mark == FLAT else row


def _check(kind: Any, length: Length | None, stored: Any) -> Any:
    if not isinstance(stored, kind):
        raise ValueError(f"{shorten(stored)} is not a {kind.__name__}")
    if length is not None and not length.low <= len(stored) <= length.high:
        expected = f"{length.low} to {length.high}" if length.low < length.high else f"{length.low}"
        raise ValueError(f"{shorten(stored)} has {len(stored)} parts, not {expected}")
    return stored


def _at(name: str, part: _Conversion, stored: Any) -> Any:
    try:
        return part.decode(stored)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _mapping(part: _Conversion) -> _Conversion:
    return _Conversion(
        lambda values: {str(name): part.encode(values[name]) for name in sorted(values)},  # a StrEnum's text
        lambda stored: {name: _at(name, part, value) for name, value in _check(dict, None, stored).items()},
    )


def _row(parts: tuple[_Conversion, ...], build: Callable[..., Any]) -> _Conversion:
    length = Length(len(parts), len(parts))
    return _Conversion(
        lambda values: [part.encode(value) for part, value in zip(parts, values, strict=True)],
        lambda stored: build(
            *(part.decode(value) for part, value in zip(parts, _check(list, length, stored), strict=True))
        ),
    )


def _flat(row: _Conversion) -> _Conversion:
    def encode_flat(values: Any) -> list[Any]:
        first, rest = row.encode(values)
        return [first, *rest]

    return _Conversion(
        encode_flat, lambda stored: row.decode([*_check(list, None, stored)[:1], _check(list, None, stored)[1:]])
    )


def _record(kind: Any) -> _Conversion:
    """Conversion of a NamedTuple or frozen dataclass."""
    layout: _Layout | None = getattr(kind, _LAYOUT, None)
    hints = get_type_hints(kind, include_extras=True)
    parameters = signature(kind).parameters
    omit = layout.omit if layout else ()
    parts = {name: _conversion(hints[name]) for name in parameters if name not in omit}

    def build(*values: Any, **named: Any) -> Any:
        record = kind(*values, **named)
        if hasattr(record, "validate"):
            record.validate()
        return record

    if layout is None:
        row = _row(tuple(parts.values()), build)
        return _Conversion(lambda record: row.encode([getattr(record, name) for name in parts]), row.decode)
    return _object(layout, parts, kind, build)


def _object(layout: _Layout, parts: Mapping[str, _Conversion], kind: Any, build: Callable[..., Any]) -> _Conversion:
    title, version, optional, _, keys = layout
    places = [(name, keys.get(name, name), part) for name, part in parts.items()]
    defaults = {name: _default(kind, name) for name in optional}

    def encode_object(record: Any) -> dict[str, Any]:
        stored = {} if version is None else {"version": version}
        for name, key, part in places:
            value = getattr(record, name)
            if name not in defaults or value != defaults[name]:
                stored[key] = part.encode(value)
        return stored

    def decode_object(stored: Any, **supplied: Any) -> Any:
        try:
            found = _check(Mapping, None, stored)
            if version != found.get("version"):
                raise ValueError(f"version {shorten(found.get('version'))} is not supported; expected {version}")
            for name, key, part in places:
                if name in defaults and found.get(key) is None:
                    supplied[name] = defaults[name]
                elif key not in found:
                    raise ValueError(f"{key} is missing")
                else:
                    supplied[name] = _at(key, part, found[key])
            return build(**supplied)
        except ValueError as error:
            raise ValueError(f"not {title}: {error}") from error

    return _Conversion(encode_object, decode_object)


def _default(kind: Any, name: str) -> Any:
    if issubclass(kind, tuple):
        return kind._field_defaults[name]
    (field,) = (field for field in fields(kind) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()
