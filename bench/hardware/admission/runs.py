"""Runs of admission control and their assessment, the same for predictions and measurements.

Problem: whether admission control sheds exactly what an engine cannot serve shows only beside the same requests without
it and under the best constant cap.

Idea: a run is ARM@FACTOR: `gate@1.3` is the gateway's admission control at 1.3 times the SLO capacity, `none@2` the
engine alone, `cap96@2` at most 96 requests in flight. All arms of a factor get one trace. Runs of a *call* follow each
other on one engine; those with admission control are consecutive, because one operator learns through all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware.summary import ObservedRequest, summary, within_slo
from plimsoll.core.slo import Slo

GATE_ARM, NO_LIMIT_ARM, CAP_ARM = "gate", "none", "cap"
_WORD: Final = re.compile(r"(gate|none|cap(?P<cap>[1-9]\d*))@(?P<factor>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class AdmissionRun:
    """arm: GATE, NONE or CAP. factor: of the load line. cap: requests in flight, of CAP alone. number: in its call."""

    arm: str
    factor: float
    cap: int | None
    number: int

    @classmethod
    def parse(cls, word: str, number: int) -> AdmissionRun:
        """Raises ValueError for what is no such word."""
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is none of gate@FACTOR, none@FACTOR and capN@FACTOR")
        cap = None if found["cap"] is None else int(found["cap"])
        arm = CAP_ARM if cap is not None else word.partition("@")[0]
        return cls(arm, float(found["factor"]), cap, number)

    @property
    def word(self) -> str:
        return f"{self.arm}{self.cap or ''}@{self.factor:g}"

    @property
    def trace(self) -> str:
        """The name of its requests' file."""
        return f"run{round(100 * self.factor)}.csv"

    def result_name(self, call: str) -> str:
        """The name of what its clients saw, without the ending."""
        return f"{call}{self.number:02d}.{self.arm}{self.cap or ''}.{round(100 * self.factor)}"


def parse_call(words: Sequence[str]) -> list[AdmissionRun]:
    """The runs of one engine, in their order. Raises ValueError where those with the gate do not come first."""
    parsed = [AdmissionRun.parse(word, number) for number, word in enumerate(words)]
    gated = [run.arm == GATE_ARM for run in parsed]
    if gated != sorted(gated, reverse=True):
        raise ValueError("runs with the gate come first: one operator learns through all of them")
    return parsed


@dataclass(frozen=True)
class RequestOutcome:
    """A request and its outcome. rejected: rejected by admission control or by the concurrency cap."""

    observed: ObservedRequest
    rejected: bool


def assess_run(outcomes: Iterable[RequestOutcome], slo: Slo, warm_s: float, window_s: float) -> dict[str, Any]:
    """Return the summary of a run's counted requests, those of [warm_s, warm_s + window_s).

    It has the rates `offered_rps` and `goodput_rps` of all and of those within the SLO, the shares within the SLO
    `in_promise` of all and `admitted_in_promise` of the admitted ones (None without any), and the rejected share
    `shed`. Latencies are those of admitted requests.
    """
    counted = [outcome for outcome in outcomes if warm_s <= outcome.observed.sent_s < warm_s + window_s]
    admitted = [outcome.observed for outcome in counted if not outcome.rejected]
    met_slo = sum(within_slo(outcome, slo) for outcome in admitted)
    observed = summary(admitted, slo, window_s)
    return {
        "sent": len(counted),
        "offered_rps": len(counted) / window_s,
        "goodput_rps": met_slo / window_s,
        "in_promise": met_slo / len(counted) if counted else None,
        "admitted_in_promise": met_slo / len(admitted) if admitted else None,
        "shed": 1.0 - len(admitted) / len(counted) if counted else None,
        "unfinished": len(admitted) - observed["ok"],
        "ttft_s": observed["ttft_s"],
        "tpot_s": observed["tpot_s"],
    }


def cap_seconds(slo: Slo, unloaded_s: float) -> float:
    """Return how long a request may wait at a concurrency cap, s: half of the slack on an idle engine
    (`sim.concurrency_cap`).
    """
    return max(0.0, 0.5 * ((slo.ttft_s or np.inf) - unloaded_s))


def slo_from_document(document: Mapping[str, Any]) -> Slo:
    return Slo(**document["slo"])


def slo_to_document(slo: Slo) -> dict[str, Any]:
    return asdict(slo)


def results_path(folder: Path, run: AdmissionRun, name: str) -> Path | None:
    """What the clients of a run saw, compressed or not; None where it was not played."""
    stem = run.result_name(name)
    for ending in (".requests.json.gz", ".requests.json"):
        if (folder / f"{stem}{ending}").exists():
            return folder / f"{stem}{ending}"
    return None
