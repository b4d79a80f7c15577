"""Traces of requests: validated, clipped, and scaled in rate.

Problem: a trace with one row out of order or a length of NaN gives a run that looks right. Idea: every row is checked
before anything runs. The error names the first invalid row (the first one after a header is 1) and its column. Only a
few numbers are kept per request: a million of them take about 100 MB. `trace_files` reads rows from a file.

The rate changes by superposition, never by compressing time. `scale_rate` superposes whole copies, each shifted by its
own offset and wrapped round, and thins the last one. Gaps and bursts therefore stay those of the trace.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

from plimsoll.sim import trace_files
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.trace_files import TraceRow, join_names, printable

TIME_COLUMNS: Final = {"arrival_s": 1.0, "arrival_ms": 1e-3, "timestamp": 1e-3}
PROMPT_COLUMNS: Final = ("prompt_tokens", "input_length")
OUTPUT_COLUMNS: Final = ("output_tokens", "output_length")
_NAME_COLUMNS: Final = ("priority", "tenant", "client", "adapter")
_COLUMNS: Final = (*TIME_COLUMNS, *PROMPT_COLUMNS, *OUTPUT_COLUMNS, *_NAME_COLUMNS, "hash_ids")
_MAX_TOKENS: Final = 10_000_000
_BLOCK_HASHES: Final = 2**60
_MAX_LENGTH_S: Final = 366 * 86_400.0


def read(path: Path) -> list[TraceRequest]:
    """The requests of a .csv, .jsonl (or .gz of one) or .parquet file, times from its first row's on. Raises BadInput.

    Columns: `arrival_s`, `arrival_ms` or `timestamp` (ms, or dates); `prompt_tokens` or `input_length`;
    `output_tokens` or `output_length`; and, where they are, `hash_ids`, `priority`, the name of a class, `tenant`, and
    `client`, who is a tenant where nobody else is named, and `adapter`, a LoRA adapter.
    """
    requests = list(_parse_rows(trace_files.read(path, _COLUMNS), path))
    if not requests:
        raise BadInput(f"{path}: holds no request")
    return requests


def clip(requests: Iterable[TraceRequest], from_s: float, to_s: float) -> list[TraceRequest]:
    """Requests in [from_s, to_s), with times from from_s on."""
    return [replace(one, at_s=one.at_s - from_s) for one in requests if from_s <= one.at_s < to_s]


def scale_rate(requests: Sequence[TraceRequest], factor: float, random: Random) -> list[TraceRequest]:
    """`factor` times as many requests in the same time."""
    if factor == 1.0 or not requests:
        return list(requests)
    period_s = requests[-1].at_s * (1.0 + 1.0 / len(requests))
    copies: list[TraceRequest] = []
    for copy_index in range(math.ceil(factor)):
        shift_s = random.uniform(0.0, period_s) if copy_index else 0.0
        share = min(1.0, factor - copy_index)
        sampled = requests if share >= 1.0 else [one for one in requests if random.random() < share]
        copies += [replace(one, at_s=(one.at_s + shift_s) % period_s) if shift_s else one for one in sampled]
    return sorted(copies, key=lambda one: one.at_s)


def _parse_rows(rows: Iterable[tuple[int, TraceRow]], path: Path) -> Iterator[TraceRequest]:
    columns: tuple[str, str, str] | None = None
    origin_s: float | None = None
    last_s = -math.inf
    for number, row in rows:
        if columns is None:
            columns = (
                _find_column(row, tuple(TIME_COLUMNS), path),
                _find_column(row, PROMPT_COLUMNS, path),
                _find_column(row, OUTPUT_COLUMNS, path),
            )
        time_column, prompt_column, output_column = columns
        is_timestamp = time_column == "timestamp"
        at_s = (
            _timestamp_s(row, time_column, number, path)
            if is_timestamp
            else _number(row, time_column, number, path) * TIME_COLUMNS[time_column]
        )
        origin_s = at_s if origin_s is None else origin_s
        if at_s < last_s:
            raise BadInput(
                f"{path}, row {number}, {time_column}: {printable(row[time_column])} "
                "is before the row before it: sort the trace"
            )
        if at_s - origin_s > _MAX_LENGTH_S:
            raise BadInput(f"{path}, row {number}, {time_column}: more than a year after the first row")
        last_s = at_s
        client = _name(row, "client", number, path) if row.get("client") is not None else ""
        tenant = _name(row, "tenant", number, path) if row.get("tenant") is not None else ""
        adapter = _name(row, "adapter", number, path) if row.get("adapter") is not None else ""
        yield TraceRequest(
            at_s - origin_s,
            _tokens(row, prompt_column, number, path),
            _tokens(row, output_column, number, path),
            _name(row, "priority", number, path) if row.get("priority") is not None else "",
            tenant or client,
            _block_ids(row, number, path) if row.get("hash_ids") is not None else (),
            client,
            adapter,
        )


def _find_column(row: TraceRow, names: Sequence[str], path: Path) -> str:
    for name in names:
        if name in row:
            return name
    raise BadInput(f"{path}: no column {' or '.join(names)} among {join_names(row) or 'none'}")


def _timestamp_s(row: TraceRow, column: str, number: int, path: Path) -> float:
    """Return the seconds of a `timestamp`, in milliseconds or a date."""
    value = row.get(column)
    if isinstance(value, str | datetime) and not _is_number(value):
        try:
            date = datetime.fromisoformat(value) if isinstance(value, str) else value
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadInput(
                f"{path}, row {number}, {column}: {printable(value)} is neither milliseconds nor a date"
            ) from None
    return _number(row, column, number, path) * TIME_COLUMNS[column]


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _number(row: TraceRow, column: str, number: int, path: Path) -> float:
    value = row.get(column)
    invalid = (
        isinstance(value, bool) or value is None or (isinstance(value, str) and "_" in value)
    )  # Python's own 1_000
    try:
        number_value = math.nan if invalid else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number_value = math.nan
    if not 0.0 <= number_value < math.inf:
        raise BadInput(f"{path}, row {number}, {column}: {printable(value)} is no number of 0 or more")
    return number_value


def _tokens(row: TraceRow, column: str, number: int, path: Path) -> int:
    tokens = _number(row, column, number, path)
    if not (1 <= tokens <= _MAX_TOKENS and tokens == int(tokens)):
        raise BadInput(
            f"{path}, row {number}, {column}: {printable(row[column])} is no whole number from 1 to {_MAX_TOKENS}"
        )
    return int(tokens)


def _name(row: TraceRow, column: str, number: int, path: Path) -> str:
    """Return a name, as one shared string for all rows."""
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadInput(f"{path}, row {number}, {column}: {printable(value)} is no name")
    return sys.intern(str(value))


def _block_ids(row: TraceRow, number: int, path: Path) -> tuple[int, ...]:
    """Return the hashes of the prompt's blocks; in CSV a JSON list, or nothing."""
    value: Any = row["hash_ids"]
    if value == "":
        return ()
    try:
        hash_ids = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        hash_ids = None
    if not isinstance(hash_ids, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) for one in hash_ids
    ):
        raise BadInput(f"{path}, row {number}, hash_ids: {printable(value)} is no list of whole numbers")
    return tuple(_chained_hashes(hash_ids))


def _chained_hashes(ids: Iterable[int]) -> Iterator[int]:
    """Yield block hashes that include all blocks before them, as caches and gateways use; equal in every run."""
    block_hash = 0
    for one in ids:
        block_hash = hash((block_hash, 2 * one if one >= 0 else -2 * one - 1)) % _BLOCK_HASHES  # hash(-1) is hash(-2)
        yield block_hash
