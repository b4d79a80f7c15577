"""Rows of a trace file: CSV, JSON lines, or Parquet; numbered from 1, without interpretation."""

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

TraceRow = Mapping[str, Any]

INSTALL_HINT: Final = "in a checkout of Plimsoll, pip install '.[simulate]'"  # extra with the Parquet reader
_MAX_VALUE_CHARS: Final = 60  # characters shown of a rejected text
_MAX_NAMES_LISTED: Final = 10  # columns named in an error


def read(path: Path, wanted_columns: Collection[str]) -> Iterator[tuple[int, TraceRow]]:
    """Yield number and values of each row. wanted_columns: columns to read. Raises BadInput."""
    if not path.exists():
        raise BadInput(f"{path}: No such file or directory")
    name = path.name.removesuffix(".gz")
    if path.name.endswith(".parquet"):
        yield from _parquet(path, wanted_columns)
        return
    reader = _csv if name.endswith(".csv") else _jsonl if name.endswith((".jsonl", ".json")) else None
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


def _csv(lines: TextIO, path: Path) -> Iterator[tuple[int, TraceRow]]:
    try:
        reader = csv.DictReader(lines, strict=True)
        header = reader.fieldnames or ()
        _reject_duplicates(header, path)
        for number, row in enumerate(reader, 1):
            if None in row:
                raise BadInput(f"{path}, row {number}: more values than the head has columns")
            yield number, row
    except csv.Error as error:
        raise BadInput(f"{path}: not CSV: {error}") from None


def _jsonl(lines: TextIO, path: Path) -> Iterator[tuple[int, TraceRow]]:
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


def _parquet(path: Path, wanted_columns: Collection[str]) -> Iterator[tuple[int, TraceRow]]:
    """Yield rows in batches, so that a day is not in memory twice."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadInput(f"{path}: Parquet needs pyarrow: {INSTALL_HINT}, or write it as CSV") from None
    try:
        with parquet.ParquetFile(path) as file:
            available = list(file.schema_arrow.names)
            _reject_duplicates(available, path)
            columns = [name for name in available if name in wanted_columns]
            if not columns:
                raise BadInput(f"{path}: none of the columns {', '.join(wanted_columns)} among {join_names(available)}")
            batches = (_to_microseconds(batch, arrow) for batch in file.iter_batches(columns=columns))
            yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    except arrow.ArrowException as error:
        raise BadInput(f"{path}: not Parquet: {error}") from None
    except (ValueError, OverflowError, LookupError) as error:  # of a date, or of the name of its zone
        raise BadInput(f"{path}: a value that Python cannot hold: {error}") from None


def _to_microseconds(batch: Any, arrow: Any) -> Any:
    """Return the batch with Python's dates; digits below a microsecond are cut off."""
    kinds = batch.schema.types
    columns = [
        column.cast(arrow.timestamp("us", kind.tz), safe=False)
        if arrow.types.is_timestamp(kind) and kind.unit == "ns"
        else column
        for column, kind in zip(batch.columns, kinds, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _reject_duplicates(header: Sequence[str], path: Path) -> None:
    if duplicates := sorted({name for name in header if header.count(name) > 1}):
        raise BadInput(f"{path}: the head names {join_names(duplicates)} twice")


def join_names(names: Collection[object]) -> str:
    """Return names from a file, those that can be shown."""
    suffix = f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    return ", ".join(printable(name) for name in itertools.islice(names, _MAX_NAMES_LISTED)) + suffix


def printable(value: object) -> str:
    """Return a value from a file, shortened and without control characters."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number too large to print"
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."
