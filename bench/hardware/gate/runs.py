"""What is played, and how a run is judged: the same for what is predicted and for what is measured.

Problem: whether a gate sheds what an engine cannot serve, no more and no less, shows only beside the same requests
without a gate and under the best constant cap.
Idea: a run is a word, ARM@FACTOR: `gate@1.3` is the gateway's gate at 1.3 times the load line, `none@2` the engine
alone, `cap96@2` at most 96 requests in flight. All arms of a factor get one trace. Runs of a *call* follow each other
on one engine; those with the gate stand together, since one operator learns through all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware.summary import Seen, kept, summary
from plimsoll.core.slo import Slo

GATE, NONE, CAP = "gate", "none", "cap"
_WORD: Final = re.compile(r"(gate|none|cap(?P<cap>[1-9]\d*))@(?P<factor>\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Run:
    """arm: GATE, NONE or CAP. factor: of the load line. cap: requests in flight, of CAP alone. number: in its call."""

    arm: str
    factor: float
    cap: int | None
    number: int

    @classmethod
    def parse(cls, word: str, number: int) -> Run:
        """Raises ValueError for what is no such word."""
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} is none of gate@FACTOR, none@FACTOR and capN@FACTOR")
        cap = None if found["cap"] is None else int(found["cap"])
        arm = CAP if cap is not None else word.partition("@")[0]
        return cls(arm, float(found["factor"]), cap, number)

    @property
    def word(self) -> str:
        return f"{self.arm}{self.cap or ''}@{self.factor:g}"

    @property
    def trace(self) -> str:
        """The name of its requests' file."""
        return f"run{round(100 * self.factor)}.csv"

    def told(self, call: str) -> str:
        """The name of what its clients saw, without the ending."""
        return f"{call}{self.number:02d}.{self.arm}{self.cap or ''}.{round(100 * self.factor)}"


def call(words: Sequence[str]) -> list[Run]:
    """The runs of one engine, in their order. Raises ValueError where those with the gate do not come first."""
    found = [Run.parse(word, number) for number, word in enumerate(words)]
    gated = [one.arm == GATE for one in found]
    if gated != sorted(gated, reverse=True):
        raise ValueError("runs with the gate come first: one operator learns through all of them")
    return found


@dataclass(frozen=True)
class One:
    """A request and what came of it. refused: it was turned away, by the gate or by the cap."""

    seen: Seen
    refused: bool


def judged(ones: Iterable[One], slo: Slo, warm_s: float, window_s: float) -> dict[str, Any]:
    """The figures of a run's counted requests, those of [warm_s, warm_s + window_s).

    offered_rps, goodput_rps: sent, and in promise. in_promise: of those sent; admitted_in_promise: of those let in,
    None where there are none; shed: share turned away. Times are those of requests that were let in.
    """
    counted = [one for one in ones if warm_s <= one.seen.sent_s < warm_s + window_s]
    let_in = [one.seen for one in counted if not one.refused]
    met = sum(kept(one, slo) for one in let_in)
    own = summary(let_in, slo, window_s)
    return {
        "sent": len(counted),
        "offered_rps": len(counted) / window_s,
        "goodput_rps": met / window_s,
        "in_promise": met / len(counted) if counted else None,
        "admitted_in_promise": met / len(let_in) if let_in else None,
        "shed": 1.0 - len(let_in) / len(counted) if counted else None,
        "unfinished": len(let_in) - own["ok"],
        "ttft_s": own["ttft_s"],
        "tpot_s": own["tpot_s"],
    }


def cap_seconds(slo: Slo, alone_s: float) -> float:
    """How long a request may wait at a cap, s: half of what an idle engine would leave it (`sim.policies.follower`)."""
    return max(0.0, 0.5 * ((slo.ttft_s or np.inf) - alone_s))


def slo_of(told: Mapping[str, Any]) -> Slo:
    return Slo(**told["slo"])


def slo_to(slo: Slo) -> dict[str, Any]:
    return asdict(slo)


def seen_path(folder: Path, run: Run, name: str) -> Path | None:
    """What the clients of a run saw, compressed or not; None where it was not played."""
    stem = run.told(name)
    for ending in (".requests.json.gz", ".requests.json"):
        if (folder / f"{stem}{ending}").exists():
            return folder / f"{stem}{ending}"
    return None
