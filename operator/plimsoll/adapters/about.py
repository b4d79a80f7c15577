"""What an engine's launcher says of itself at /about, read with suspicion.

Problem: the document comes from a pod whose image, arguments and model are a user's, and decides how a fleet is sized.

Idea: it is one of ours or it is refused, with the reason; inside it each part stands for itself. A value of the wrong
type or beyond any sense is None, as if it were not there; lists and texts are cut, and so is the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from plimsoll.core.ports import About, Ladder

VERSION: Final = 1
MAX_BYTES: Final = 262_144
UNKNOWN: Final = "unknown"  # for a name that the launcher could not find out

_MOST: Final = 10**12  # tokens, sequences, seconds
_TEXT: Final = 200
_PHASES: Final = 32
_RUNGS: Final = 64
_KEYS: Final = 128  # of a mapping in the configuration; and how deep it may nest
_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class Start:
    """How far an engine's start has come. None: not told.

    phase: what it is doing, None once the start is over; phase_s: for how long. phases: those that are over, in order,
    with the seconds that they took.
    """

    phase: str | None
    phase_s: float | None
    phases: tuple[tuple[str, float], ...]
    ready: bool | None
    draining: bool | None


def parse(raw: bytes) -> tuple[About, Start]:
    """Reads the document. Raises ValueError for what is no such document, or one of another version."""
    document = _document(raw)
    accelerator, limits = _mapping(document.get("accelerator")), _mapping(document.get("limits"))
    about = About(
        engine=_text(document.get("engine")) or UNKNOWN,
        engine_version=_text(document.get("engine_version")) or UNKNOWN,
        accelerator=_text(accelerator.get("name")) or UNKNOWN,
        gpus=_whole(accelerator.get("count")) or 0,
        max_sequences=_whole(limits.get("max_sequences")),
        kv_tokens=_whole(limits.get("kv_tokens")),
        token_budget=_whole(limits.get("token_budget")),
        block_tokens=_whole(limits.get("block_tokens")),
        max_model_len=_whole(limits.get("max_model_len")),
        config=_config(document.get("config")),
        ladder=_ladder(document.get("ladder")),
    )
    start = Start(
        phase=_text(document.get("phase")),
        phase_s=_seconds(document.get("phase_seconds")),
        phases=_phases(document.get("phases")),
        ready=_flag(document.get("ready")),
        draining=_flag(document.get("draining")),
    )
    return about, start


def _document(raw: bytes) -> Mapping[str, Any]:
    if len(raw) > MAX_BYTES:
        raise ValueError(f"the engine's answer has {len(raw)} bytes, more than {MAX_BYTES}")
    try:
        document = orjson.loads(raw)
    except ValueError as error:
        raise ValueError(f"the engine's answer is not JSON: {str(error)[:_TEXT]}") from None
    if not isinstance(document, dict):
        raise ValueError(f"the engine's answer is a JSON {type(document).__name__}, not an object")
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"the engine's answer is of version {str(version)[:_TEXT]!r}, {VERSION} is known")
    return document


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value[:_TEXT] if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    """A count of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= _MOST else None


def _seconds(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= _MOST else None


def _phases(value: object) -> tuple[tuple[str, float], ...]:
    rows = [row for row in _list(value, _PHASES) if isinstance(row, list) and len(row) == 2]
    read = [(_text(name), _seconds(took)) for name, took in rows]
    return tuple((name, took) for name, took in read if name is not None and took is not None)


def _list(value: object, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _ladder(value: object) -> Ladder | None:
    """The rungs that are whole numbers and a time above 0; None where none is."""
    told = _mapping(value)
    prefill = [row for row in _list(told.get("prefill"), _RUNGS) if _rung(row, 2)]
    decode = [row for row in _list(told.get("decode"), _RUNGS) if _rung(row, 3)]
    if not prefill and not decode:
        return None
    return Ladder(
        tuple((tokens, float(seconds)) for tokens, seconds in prefill),
        tuple((size, context, float(seconds)) for size, context, seconds in decode),
    )


def _rung(row: object, width: int) -> bool:
    if not isinstance(row, list) or len(row) != width:
        return False
    *counts, seconds = row
    return all(_whole(count) for count in counts) and bool(_seconds(seconds))


def _config(value: object) -> Mapping[str, object] | None:
    return _cut(value, _DEPTH) if isinstance(value, dict) else None


def _cut(value: Mapping[str, Any], depth: int) -> dict[str, object]:
    """A mapping of bounded size: what nests deeper, or is a number beyond sense, is None."""
    return {key[:_TEXT]: _value(item, depth) for key, item in list(value.items())[:_KEYS]}


def _value(item: object, depth: int) -> object:
    if isinstance(item, dict):
        return _cut(item, depth - 1) if depth > 1 else None
    if isinstance(item, list):
        return [_value(part, depth - 1) for part in item[:_KEYS]] if depth > 1 else None
    if isinstance(item, str):
        return item[:_TEXT]
    if isinstance(item, int | float) and not isinstance(item, bool):
        return item if abs(item) <= _MOST else None
    return item
