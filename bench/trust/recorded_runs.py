"""The recorded requests that the simulator is held against; what they are and whose stands in data/README.md."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.trust.engine_driver import RecordedRequest

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One recorded request as its client saw it; NaN: it did not come to that."""

    request: RecordedRequest
    ttft_s: float
    tpot_s: float
    ok: bool
    engine: int = 0

    def within(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it kept a promise."""
        return self.ok and self.ttft_s <= ttft_s and (self.request.output < 2 or self.tpot_s <= tpot_s)


@dataclass(frozen=True)
class SweepRun:
    """One run at one rate on one engine.

    measured_requests: number of requests, the last ones, that count; earlier ones warm the engine up. patience_s: time
    after the last arrival at which the clients gave up. rho: recorded utilisation of the engine.
    """

    name: str
    model: str
    budget: int
    seen_per_s: float
    measured_requests: int
    patience_s: float
    rho: float
    requests: tuple[RequestRecord, ...]


def load_sweeps() -> list[SweepRun]:
    """All runs against one engine."""
    requests: dict[str, list[RequestRecord]] = {}
    for row in lines(DATA / "sweeps.csv.gz"):
        requests.setdefault(row["run"], []).append(parse_record(row))
    with (DATA / "sweeps.csv").open() as stream:
        return [
            SweepRun(
                row["run"],
                row["model"],
                int(row["budget"]),
                float(row["seen_per_s"]),
                int(row["judged"]),
                float(row["patience_s"]),
                float(row["rho"]),
                tuple(requests[row["run"]]),
            )
            for row in csv.DictReader(stream)
        ]


def load_pairs() -> dict[tuple[str, str, str], list[RequestRecord]]:
    """Runs on two machines, by engines (agg, pd, pd128), mix and rate asked for."""
    records: dict[tuple[str, str, str], list[RequestRecord]] = {}
    for row in lines(DATA / "pairs.csv.gz"):
        records.setdefault((row["engines"], row["mix"], row["asked_per_s"]), []).append(parse_record(row))
    return records


def load_distserve() -> dict[tuple[str, str], list[RequestRecord]]:
    """DistServe's own records, by system and rate for each GPU."""
    records: dict[tuple[str, str], list[RequestRecord]] = {}
    for row in lines(DATA / "distserve.csv.gz"):
        recorded_request = RecordedRequest(float(row["at_s"]), int(row["prompt"]), int(row["output"]))
        record = RequestRecord(recorded_request, float(row["ttft_ms"]) / 1e3, float(row["tpot_ms"]) / 1e3, True)
        records.setdefault((row["system"], row["per_gpu_per_s"]), []).append(record)
    return records


def parse_record(row: Mapping[str, str]) -> RequestRecord:
    """A line of a file of requests."""
    recorded_request = RecordedRequest(float(row["at_s"]), int(row["prompt"]), int(row["output"]))
    ttft_s, tpot_s = float(row["ttft_s"] or "nan"), float(row["tpot_s"] or "nan")
    return RequestRecord(recorded_request, ttft_s, tpot_s, row["ok"] == "1", int(row.get("engine") or 0))


def lines(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a compressed file."""
    with gzip.open(path, "rt", newline="") as stream:
        yield from csv.DictReader(stream)
