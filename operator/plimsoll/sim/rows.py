"""Rows out of a trace's file: CSV, JSON lines, or Parquet; numbered from 1, without a word about what they mean."""

from __future__ import annotations

import csv
import gzip
import importlib
import itertools
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from plimsoll.sim.errors import BadInput

Row = Mapping[str, Any]

INSTALL: Final = "in a checkout of Plimsoll, pip install '.[simulate]'"  # brings what reads Parquet
_SHOWN: Final = 60  # characters of a text that is refused
_NAMES: Final = 10  # columns that are named


def read(path: Path, wanted: Collection[str]) -> Iterator[tuple[int, Row]]:
    """Number and values of each row. wanted: columns that are worth the reading. Raises BadInput."""
    kind = path.name.removesuffix(".gz")
    if path.name.endswith(".parquet"):
        yield from _parquet(path, wanted)
        return
    reader = _csv if kind.endswith(".csv") else _jsonl if kind.endswith((".jsonl", ".json")) else None
    if reader is None:
        raise BadInput(f"{path}: a trace is a .csv, .jsonl or .parquet file, or the .gz of one of the first two")
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as lines
        ):
            yield from reader(lines, path)
    except (EOFError, zlib.error):
        raise BadInput(f"{path}: is cut off, or no gzip") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: is not text") from None


def _csv(lines: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    try:
        reader = csv.DictReader(lines, strict=True)
        head = reader.fieldnames or ()
        _refuse_doubled(head, path)
        for number, row in enumerate(reader, 1):
            if None in row:
                raise BadInput(f"{path}, row {number}: more values than the head has columns")
            yield number, row
    except csv.Error as error:
        raise BadInput(f"{path}: not CSV: {error}") from None


def _jsonl(lines: TextIO, path: Path) -> Iterator[tuple[int, Row]]:
    number = 0
    for line in lines:
        if not line.strip():
            continue
        number += 1
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path}, row {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadInput(f"{path}, row {number}: is no JSON object")
        yield number, row


def _parquet(path: Path, wanted: Collection[str]) -> Iterator[tuple[int, Row]]:
    """In batches, so that a day does not lie in memory twice."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput(f"{path}: Parquet needs pyarrow: {INSTALL}, or write it as CSV") from None
    try:
        with parquet.ParquetFile(path) as file:
            there = list(file.schema_arrow.names)
            _refuse_doubled(there, path)
            columns = [name for name in there if name in wanted]
            if not columns:
                raise BadInput(f"{path}: none of the columns {', '.join(wanted)} among {listed(there)}")
            batches = (_to_microseconds(batch, arrow) for batch in file.iter_batches(columns=columns))
            yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except arrow.ArrowException as error:
        raise BadInput(f"{path}: not Parquet: {error}") from None
    except (ValueError, OverflowError, LookupError) as error:  # of a date, or of the name of its zone
        raise BadInput(f"{path}: a value that Python cannot hold: {error}") from None


def _to_microseconds(batch: Any, arrow: Any) -> Any:
    """With its dates as Python has them: what is finer than a microsecond is cut off."""
    kinds = batch.schema.types
    columns = [
        column.cast(arrow.timestamp("us", kind.tz), safe=False)
        if arrow.types.is_timestamp(kind) and kind.unit == "ns"
        else column
        for column, kind in zip(batch.columns, kinds, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _refuse_doubled(head: Sequence[str], path: Path) -> None:
    if twice := sorted({name for name in head if head.count(name) > 1}):
        raise BadInput(f"{path}: the head names {listed(twice)} twice")


def listed(names: Collection[object]) -> str:
    """Names out of a file, as far as they can be shown."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(shown(name) for name in itertools.islice(names, _NAMES)) + more


def shown(value: object) -> str:
    """What stands in a file, not too long and without anything that a terminal would obey."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number too large to print"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
