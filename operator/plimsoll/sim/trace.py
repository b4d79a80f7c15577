"""Traces of requests from CSV or JSON lines, read with suspicion, and cut, thinned or laid over themselves.

Problem: a trace with one row out of order or a length of NaN gives a run that looks right. Idea: every row is checked
before anything runs, and the first fault is named by its row (the first one after a head is 1) and its column. What is
kept of a request is a few numbers: a million of them take some 100 MB.

A rate is changed by superposition, never by squeezing time: `scaled` lays whole copies over each other, each shifted
by an offset of its own and wrapped round, and thins the last one. So gaps and bursts stay those of the trace.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO

from plimsoll.sim.errors import BadInput
from plimsoll.sim.visit import Asked

_TIMES: Final = {"arrival_s": 1.0, "arrival_ms": 1e-3, "timestamp": 1e-3}
_PROMPTS: Final = ("prompt_tokens", "input_length")
_OUTPUTS: Final = ("output_tokens", "output_length")
_MOST_TOKENS: Final = 10_000_000
_LONGEST_S: Final = 366 * 86_400.0

Row = Mapping[str, Any]


def read(path: Path) -> list[Asked]:
    """The requests of a .csv or .jsonl file (or .gz of one), times from its first row's on. Raises BadInput.

    Columns: `arrival_s`, `arrival_ms` or `timestamp` (ms); `prompt_tokens` or `input_length`; `output_tokens` or
    `output_length`; and, where they are, `hash_ids`, `tenant` or `client`, and `priority`, the name of a class.
    """
    kind = "".join(path.suffixes[-2:]).removesuffix(".gz")
    if kind.endswith(".parquet"):
        raise BadInput(
            f"{path}: Parquet needs pyarrow, which this program does not bring: write it as CSV or JSON lines"
        )
    reader = _csv if kind.endswith(".csv") else _jsonl if kind.endswith((".jsonl", ".json")) else None
    if reader is None:
        raise BadInput(f"{path}: a trace is a .csv or .jsonl file, or the .gz of one")
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            asked = list(_checked(reader(lines, path), path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: is not text") from None
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


def _csv(lines: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    try:
        yield from enumerate(csv.DictReader(lines), 1)
    except csv.Error as error:
        raise BadInput(f"{path}: not CSV: {error}") from None


def _jsonl(lines: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, row {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInput(f"{path}, row {number}: is no JSON object")
        yield number, row


def _checked(rows: Iterable[tuple[int, Row]], path: Path) -> Iterator[Asked]:
    columns: tuple[str, str, str] | None = None
    zero_s: float | None = None
    last_s = 0.0
    for number, row in rows:
        if columns is None:
            columns = (_column(row, tuple(_TIMES), path), _column(row, _PROMPTS, path), _column(row, _OUTPUTS, path))
        time, prompt, output = columns
        at_s = _number(row, time, number, path) * _TIMES[time]
        zero_s = at_s if zero_s is None else zero_s
        if at_s < last_s:
            raise BadInput(f"{path}, row {number}, {time}: {row[time]} is before the row before it: sort the trace")
        if at_s - zero_s > _LONGEST_S:
            raise BadInput(f"{path}, row {number}, {time}: more than a year after the first row")
        last_s = at_s
        yield Asked(
            at_s - zero_s,
            _tokens(row, prompt, number, path),
            _tokens(row, output, number, path),
            str(row.get("priority") or ""),
            str(row.get("tenant") or row.get("client") or ""),
            _ids(row, number, path),
        )


def _column(row: Row, names: Sequence[str], path: Path) -> str:
    for name in names:
        if name in row:
            return name
    raise BadInput(f"{path}: no column {' or '.join(names)} among {', '.join(map(str, row)) or 'none'}")


def _number(row: Row, column: str, number: int, path: Path) -> float:
    value = row.get(column)
    try:
        read = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError):
        read = math.nan
    if not 0.0 <= read < math.inf:
        raise BadInput(f"{path}, row {number}, {column}: {value!r} is no number of 0 or more")
    return read


def _tokens(row: Row, column: str, number: int, path: Path) -> int:
    read = _number(row, column, number, path)
    if not (1 <= read <= _MOST_TOKENS and read == int(read)):
        raise BadInput(f"{path}, row {number}, {column}: {row[column]!r} is no whole number from 1 to {_MOST_TOKENS}")
    return int(read)


def _ids(row: Row, number: int, path: Path) -> tuple[int, ...]:
    """Names of the prompt's blocks; in CSV a JSON list."""
    value = row.get("hash_ids")
    if value in (None, ""):
        return ()
    try:
        listed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
        raise BadInput(f"{path}, row {number}, hash_ids: {str(value)[:60]!r} is no list of whole numbers")
    return tuple(listed)
