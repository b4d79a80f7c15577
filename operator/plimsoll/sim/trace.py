"""Traces of requests, read with suspicion, and cut, thinned or laid over themselves.

Problem: a trace with one row out of order or a length of NaN gives a run that looks right. Idea: every row is checked
before anything runs, and the first fault is named by its row (the first one after a head is 1) and its column. What is
kept of a request is a few numbers: a million of them take some 100 MB. How rows come out of a file is `rows`.

A rate is changed by superposition, never by squeezing time: `scaled` lays whole copies over each other, each shifted
by an offset of its own and wrapped round, and thins the last one. So gaps and bursts stay those of the trace.
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

from plimsoll.sim import rows
from plimsoll.sim.errors import BadInput
from plimsoll.sim.rows import Row, listed, shown
from plimsoll.sim.visit import Asked

TIMES: Final = {"arrival_s": 1.0, "arrival_ms": 1e-3, "timestamp": 1e-3}
PROMPTS: Final = ("prompt_tokens", "input_length")
OUTPUTS: Final = ("output_tokens", "output_length")
_NAMES: Final = ("priority", "tenant", "client")
_WANTED: Final = (*TIMES, *PROMPTS, *OUTPUTS, *_NAMES, "hash_ids")
_MOST_TOKENS: Final = 10_000_000
_NAMES_OF_BLOCKS: Final = 2**60
_LONGEST_S: Final = 366 * 86_400.0


def read(path: Path) -> list[Asked]:
    """The requests of a .csv, .jsonl (or .gz of one) or .parquet file, times from its first row's on. Raises BadInput.

    Columns: `arrival_s`, `arrival_ms` or `timestamp` (ms, or dates); `prompt_tokens` or `input_length`;
    `output_tokens` or `output_length`; and, where they are, `hash_ids`, `priority`, the name of a class, `tenant`, and
    `client`, who is a tenant where nobody else is named.
    """
    asked = list(_checked(rows.read(path, _WANTED), path))
    if not asked:
        raise BadInput(f"{path}: holds no request")
    return asked


def between(asked: Iterable[Asked], from_s: float, to_s: float) -> list[Asked]:
    """Those of [from, to), the begin being 0 then."""
    return [replace(one, at_s=one.at_s - from_s) for one in asked if from_s <= one.at_s < to_s]


def scaled(asked: Sequence[Asked], factor: float, random: Random) -> list[Asked]:
    """`factor` times as many requests in the same time."""
    if factor == 1.0 or not asked:
        return list(asked)
    period_s = asked[-1].at_s * (1.0 + 1.0 / len(asked))
    laid: list[Asked] = []
    for copy in range(math.ceil(factor)):
        shift_s = random.uniform(0.0, period_s) if copy else 0.0
        share = min(1.0, factor - copy)
        kept = asked if share >= 1.0 else [one for one in asked if random.random() < share]
        laid += [replace(one, at_s=(one.at_s + shift_s) % period_s) if shift_s else one for one in kept]
    return sorted(laid, key=lambda one: one.at_s)


def _checked(found: Iterable[tuple[int, Row]], path: Path) -> Iterator[Asked]:
    columns: tuple[str, str, str] | None = None
    zero_s: float | None = None
    last_s = -math.inf
    for number, row in found:
        if columns is None:
            columns = (_column(row, tuple(TIMES), path), _column(row, PROMPTS, path), _column(row, OUTPUTS, path))
        time, prompt, output = columns
        dated = time == "timestamp"
        at_s = _moment_s(row, time, number, path) if dated else _number(row, time, number, path) * TIMES[time]
        zero_s = at_s if zero_s is None else zero_s
        if at_s < last_s:
            raise BadInput(
                f"{path}, row {number}, {time}: {shown(row[time])} is before the row before it: sort the trace"
            )
        if at_s - zero_s > _LONGEST_S:
            raise BadInput(f"{path}, row {number}, {time}: more than a year after the first row")
        last_s = at_s
        client = _name(row, "client", number, path) if row.get("client") is not None else ""
        tenant = _name(row, "tenant", number, path) if row.get("tenant") is not None else ""
        yield Asked(
            at_s - zero_s,
            _tokens(row, prompt, number, path),
            _tokens(row, output, number, path),
            _name(row, "priority", number, path) if row.get("priority") is not None else "",
            tenant or client,
            _ids(row, number, path) if row.get("hash_ids") is not None else (),
            client,
        )


def _column(row: Row, names: Sequence[str], path: Path) -> str:
    for name in names:
        if name in row:
            return name
    raise BadInput(f"{path}: no column {' or '.join(names)} among {listed(row) or 'none'}")


def _moment_s(row: Row, column: str, number: int, path: Path) -> float:
    """Seconds of a `timestamp`, in milliseconds or a date."""
    value = row.get(column)
    if isinstance(value, str | datetime) and not _is_number(value):
        try:
            date = datetime.fromisoformat(value) if isinstance(value, str) else value
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise BadInput(
                f"{path}, row {number}, {column}: {shown(value)} is neither milliseconds nor a date"
            ) from None
    return _number(row, column, number, path) * TIMES[column]


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _number(row: Row, column: str, number: int, path: Path) -> float:
    value = row.get(column)
    odd = isinstance(value, bool) or value is None or (isinstance(value, str) and "_" in value)  # Python's own 1_000
    try:
        read = math.nan if odd else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        read = math.nan
    if not 0.0 <= read < math.inf:
        raise BadInput(f"{path}, row {number}, {column}: {shown(value)} is no number of 0 or more")
    return read


def _tokens(row: Row, column: str, number: int, path: Path) -> int:
    read = _number(row, column, number, path)
    if not (1 <= read <= _MOST_TOKENS and read == int(read)):
        raise BadInput(
            f"{path}, row {number}, {column}: {shown(row[column])} is no whole number from 1 to {_MOST_TOKENS}"
        )
    return int(read)


def _name(row: Row, column: str, number: int, path: Path) -> str:
    """A name, one text for it however many rows have it."""
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadInput(f"{path}, row {number}, {column}: {shown(value)} is no name")
    return sys.intern(str(value))


def _ids(row: Row, number: int, path: Path) -> tuple[int, ...]:
    """Names of the prompt's blocks; in CSV a JSON list, or nothing."""
    value: Any = row["hash_ids"]
    if value == "":
        return ()
    try:
        listed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
        raise BadInput(f"{path}, row {number}, hash_ids: {shown(value)} is no list of whole numbers")
    return tuple(_chained(listed))


def _chained(ids: Iterable[int]) -> Iterator[int]:
    """Names of blocks that stand for all before them too, as caches and gateways take them; the same in every run."""
    name = 0
    for one in ids:
        name = hash((name, 2 * one if one >= 0 else -2 * one - 1)) % _NAMES_OF_BLOCKS  # hash(-1) is hash(-2)
        yield name
