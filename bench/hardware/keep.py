"""What a run left, made small enough to lie beside the code: every table can be computed from it again.

    python -m bench.hardware.keep MEASURED DEST [--prediction DIR]

Requests keep what the tables need, to 10 us, compressed; step logs are compressed; of the engines' metrics only the
counters that are read, of nvidia-smi's record time, card, clock and power.
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

_TIMES: Final = ("at_s", "late_s", "first_s", "last_s", "gap_s")
_COUNTS: Final = ("row", "prompt", "output", "ok")
_METRICS: Final = re.compile(
    r"vllm:(nixl_|prompt_tokens_by_source_total|num_preemptions_total|cache_config_info)|plimsoll_"
)
_CLOCK_COLUMNS: Final = 4


def requests(path: Path) -> dict[str, Any]:
    """A run's document as the clients wrote it, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        found: dict[str, Any] = json.load(file)
    return found


def runs(folder: Path) -> list[Path]:
    """The requests of each run in a folder, by name."""
    return sorted([*folder.glob("*.requests.json"), *folder.glob("*.requests.json.gz")])


def _packed(path: Path, text: str) -> None:
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:  # no name and no time: same bytes
        file.write(text.encode())


def _small(row: dict[str, Any]) -> dict[str, Any]:
    times = {key: None if row[key] is None else round(row[key], 5) for key in _TIMES}
    return {**{key: row[key] for key in _COUNTS}, **times}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.keep", description=__doc__)
    parser.add_argument("measured", type=Path)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--prediction", type=Path, help="what was said before, with its traces")
    given = parser.parse_args(words)
    given.dest.mkdir(parents=True, exist_ok=True)
    for path in runs(given.measured):
        document = requests(path)
        document["requests"] = [_small(row) for row in document["requests"]]
        _packed(given.dest / f"{path.name.removesuffix('.gz')}.gz", json.dumps(document))
    for path in given.measured.glob("*.steps.csv*"):
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        _packed(given.dest / f"{path.name.removesuffix('.gz')}.gz", text)
    for path in given.measured.glob("*.metrics.txt"):
        kept = [line for line in path.read_text().splitlines() if _METRICS.match(line) and "_bucket" not in line]
        (given.dest / path.name).write_text("\n".join(kept) + "\n")
    rows = [line.split(", ")[:_CLOCK_COLUMNS] for line in (given.measured / "gpu.csv").read_text().splitlines()]
    (given.dest / "gpu.csv").write_text("".join(", ".join(row) + "\n" for row in rows))
    for name in ("clock.json", "result.json"):
        shutil.copy(given.measured / name, given.dest / name)
    if given.prediction is not None:
        for path in (given.prediction / "prediction.json", *sorted(given.prediction.glob("run*.csv"))):
            shutil.copy(path, given.dest / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
