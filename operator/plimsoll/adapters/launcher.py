"""Parses the launcher's /about: the engine's properties and its start-up progress.

Problem: the document decides how a fleet is sized, but image, arguments and model of the pod belong to the user.

Idea: a document that is not a launcher's is rejected with the reason. Within a valid document each field is checked on
its own: a value of a wrong type or range becomes None. Lists, texts and the model's configuration are truncated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.routing.model_names import MAX_ADAPTERS

ENGINE_INFO_VERSION: Final = 1
MAX_ENGINE_INFO_BYTES: Final = 262_144
UNKNOWN_NAME: Final = "unknown"  # for a name that the launcher could not determine

_MAX_NUMBER: Final = 10**12  # tokens, sequences, seconds
_MAX_TEXT_CHARS: Final = 200
_MAX_ERROR_CHARS: Final = 512
_MAX_PHASES: Final = 32
_MAX_POINTS: Final = 64
_MAX_KEYS: Final = 128  # per mapping in the model's configuration
_MAX_DEPTH: Final = 6


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What one engine reports of a LoRA adapter. error: the engine's words, "" without an error."""

    loaded: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """Start-up progress of an engine; None for a field that is not reported.

    phase: the current phase, None after the start-up. phase_s: its seconds so far. phases: completed phases in order,
    with their seconds. adapters: its LoRA adapters by name, None for an engine without LoRA. model_revision: commit or
    digest of the model that it serves.
    """

    phase: str | None
    phase_s: float | None
    phases: tuple[tuple[str, float], ...]
    ready: bool | None
    draining: bool | None
    adapters: Mapping[str, AdapterReport] | None = None
    model_revision: str | None = None


def parse_engine_info(raw: bytes) -> tuple[EngineInfo, StartupProgress]:
    """Parse the document. Raises ValueError if it is malformed or of another version."""
    document = _document(raw)
    accelerator, limits = _mapping(document.get("accelerator")), _mapping(document.get("limits"))
    engine_info = EngineInfo(
        engine=_text(document.get("engine")) or UNKNOWN_NAME,
        engine_version=_text(document.get("engine_version")) or UNKNOWN_NAME,
        accelerator=_text(accelerator.get("name")) or UNKNOWN_NAME,
        gpus=_positive_int(accelerator.get("count")) or 0,
        max_sequences=_positive_int(limits.get("max_sequences")),
        kv_tokens=_positive_int(limits.get("kv_tokens")),
        token_budget=_positive_int(limits.get("token_budget")),
        block_tokens=_positive_int(limits.get("block_tokens")),
        max_model_len=_positive_int(limits.get("max_model_len")),
        config=_config(document.get("config")),
        self_benchmark=_self_benchmark(document.get("self_benchmark")),
    )
    progress = StartupProgress(
        phase=_text(document.get("phase")),
        phase_s=_seconds(document.get("phase_seconds")),
        phases=_phases(document.get("phases")),
        ready=_flag(document.get("ready")),
        draining=_flag(document.get("draining")),
        adapters=_adapters(document.get("adapters")),
        model_revision=_text(document.get("model_revision")),
    )
    return engine_info, progress


def _adapters(value: object) -> Mapping[str, AdapterReport] | None:
    """The reports by name, at most MAX_ADAPTERS; entries without a name are left out."""
    if not isinstance(value, list):
        return None
    found = {}
    for entry in map(_mapping, value[:MAX_ADAPTERS]):
        error = entry.get("error")
        if (name := _text(entry.get("name"))) is not None:
            words = error[:_MAX_ERROR_CHARS] if isinstance(error, str) else ""
            found[name] = AdapterReport(_flag(entry.get("loaded")) or False, words)
    return found


def _document(raw: bytes) -> Mapping[str, Any]:
    if len(raw) > MAX_ENGINE_INFO_BYTES:
        raise ValueError(f"the engine's answer has {len(raw)} bytes, the limit is {MAX_ENGINE_INFO_BYTES}")
    try:
        document = orjson.loads(raw)
    except ValueError as error:
        raise ValueError(f"the engine's answer is not JSON: {str(error)[:_MAX_TEXT_CHARS]}") from None
    if not isinstance(document, dict):
        raise ValueError(f"the engine's answer is a JSON {type(document).__name__}, not an object")
    version = document.get("version")
    if version != ENGINE_INFO_VERSION or isinstance(version, bool):
        raise ValueError(
            f"the engine's answer has version {str(version)[:_MAX_TEXT_CHARS]!r}, supported is {ENGINE_INFO_VERSION}"
        )
    return document


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value[:_MAX_TEXT_CHARS] if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _positive_int(value: object) -> int | None:
    """A count of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 1 <= value <= _MAX_NUMBER else None


def _seconds(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value <= _MAX_NUMBER else None


def _phases(value: object) -> tuple[tuple[str, float], ...]:
    rows = [row for row in _list(value, _MAX_PHASES) if isinstance(row, list) and len(row) == 2]
    pairs = [(_text(name), _seconds(seconds)) for name, seconds in rows]
    return tuple((name, seconds) for name, seconds in pairs if name is not None and seconds is not None)


def _list(value: object, limit: int) -> list[Any]:
    return value[:limit] if isinstance(value, list) else []


def _self_benchmark(value: object) -> SelfBenchmark | None:
    """The points with positive integer counts and a positive time; None if there are none."""
    document = _mapping(value)
    prefill = [row for row in _list(document.get("prefill"), _MAX_POINTS) if _is_point(row, 2)]
    decode = [row for row in _list(document.get("decode"), _MAX_POINTS) if _is_point(row, 3)]
    if not prefill and not decode:
        return None
    return SelfBenchmark(
        tuple((tokens, float(seconds)) for tokens, seconds in prefill),
        tuple((size, context, float(seconds)) for size, context, seconds in decode),
    )


def _is_point(row: object, width: int) -> bool:
    if not isinstance(row, list) or len(row) != width:
        return False
    *counts, seconds = row
    return all(_positive_int(count) for count in counts) and bool(_seconds(seconds))


def _config(value: object) -> Mapping[str, object] | None:
    return _truncate(value, _MAX_DEPTH) if isinstance(value, dict) else None


def _truncate(value: Mapping[str, Any], depth: int) -> dict[str, object]:
    """The mapping with bounded size; values that nest too deeply or are out of range become None."""
    return {key[:_MAX_TEXT_CHARS]: _truncate_value(item, depth) for key, item in list(value.items())[:_MAX_KEYS]}


def _truncate_value(item: object, depth: int) -> object:
    if isinstance(item, dict):
        return _truncate(item, depth - 1) if depth > 1 else None
    if isinstance(item, list):
        return [_truncate_value(element, depth - 1) for element in item[:_MAX_KEYS]] if depth > 1 else None
    if isinstance(item, str):
        return item[:_MAX_TEXT_CHARS]
    if isinstance(item, int | float) and not isinstance(item, bool):
        return item if abs(item) <= _MAX_NUMBER else None
    return item
