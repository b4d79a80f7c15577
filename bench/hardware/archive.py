"""Archives the files of a run, small enough for the repository: every table can be computed from them again.

    python -m bench.hardware.archive MEASURED DEST [--prediction DIR]

Requests keep the fields that the tables need, to 10 us, compressed; step logs are compressed; the engines' metrics keep
the counters in use, nvidia-smi's record time, GPU, clock and power. In result.json the output folder of the run becomes
OUT. A row has its status only if that is not 200.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_TIME_FIELDS: Final = ("at_s", "late_s", "first_s", "last_s", "gap_s")
_COUNT_FIELDS: Final = ("row", "prompt", "output", "ok")
_METRIC_PATTERN: Final = re.compile(
    r"vllm:(nixl_|prompt_tokens_by_source_total|num_preemptions_total|cache_config_info"
    r"|(time_to_first_token|request_queue_time|request_prefill_time)_seconds_(sum|count))|plimsoll_"
)
_FOLDER_PATTERN: Final = re.compile(r'[^\s"]+(?=/models/)')  # models lie in the folder that a run writes to
_CLOCK_COLUMNS: Final = 4
_OK: Final = 200


def read_run(path: Path) -> dict[str, Any]:
    """A run's document as the clients wrote it, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        path_found: dict[str, Any] = json.load(file)
    return path_found


def read_complete(path: Path, sent: int | None = None) -> list[dict[str, Any]]:
    """A run's requests; `sent`: how many its trace has, where that is at hand. Raises ValueError as `whole`."""
    document = read_run(path)
    path_found: list[dict[str, Any]] = document["requests"]
    check_complete(path.name, path_found, document["codes"], sent)
    return path_found


def check_complete(name: str, rows: Sequence[dict[str, Any]], codes: Sequence[int], sent: int | None = None) -> None:
    """Raises ValueError where a client ended badly or a request of the trace has no row.

    A client that died takes with it what it had sent: missing rows would count neither as kept nor as missed.
    """
    numbers = sorted(row["row"] for row in rows)
    if any(codes) or numbers != list(range(len(rows) if sent is None else sent)):
        returned = "" if sent is None else f" of {sent}"
        raise ValueError(f"{name}: {len(rows)}{returned} requests, clients ended with {list(codes)}")


def runs(folder: Path) -> list[Path]:
    """The requests of each run in a folder, by name."""
    return sorted([*folder.glob("*.requests.json"), *folder.glob("*.requests.json.gz")])


def without_folder(result: str) -> str:
    """The text of a result.json, with OUT for the folder that the run wrote to."""
    return _FOLDER_PATTERN.sub("OUT", result)


def _write_compressed(path: Path, text: str) -> None:
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:  # no name and no time: same bytes
        file.write(text.encode())


def _reduce_row(row: dict[str, Any]) -> dict[str, Any]:
    times = {key: None if row[key] is None else round(row[key], 5) for key in _TIME_FIELDS}
    unexpected = {"status": row["status"]} if row.get("status", _OK) != _OK else {}
    return {**{key: row[key] for key in _COUNT_FIELDS}, **times, **unexpected}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.archive", description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--prediction", type=Path, help="what was said before, with its traces")
    given = parser.parse_args(words)
    given.dest.mkdir(parents=True, exist_ok=True)
    for path in runs(given.measured):
        document = read_run(path)
        document["requests"] = [_reduce_row(row) for row in document["requests"]]
        _write_compressed(given.dest / f"{path.name.removesuffix('.gz')}.gz", json.dumps(document))
    for path in (*given.measured.glob("*.steps.csv*"), *given.measured.glob("*.operator.jsonl*")):
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        _write_compressed(given.dest / f"{path.name.removesuffix('.gz')}.gz", text)
    for path in given.measured.glob("*.metrics.txt"):
        reduced_rows = [
            line for line in path.read_text().splitlines() if _METRIC_PATTERN.match(line) and "_bucket" not in line
        ]
        (given.dest / path.name).write_text("\n".join(reduced_rows) + "\n")
    rows = [line.split(", ")[:_CLOCK_COLUMNS] for line in (given.measured / "gpu.csv").read_text().splitlines()]
    (given.dest / "gpu.csv").write_text("".join(", ".join(row) + "\n" for row in rows))
    shutil.copy(given.measured / "clock.json", given.dest / "clock.json")
    (given.dest / "result.json").write_text(without_folder((given.measured / "result.json").read_text()))
    if given.prediction is not None:
        for path in (given.prediction / "prediction.json", *sorted(given.prediction.glob("run*.csv"))):
            shutil.copy(path, given.dest / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
