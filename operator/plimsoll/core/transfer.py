"""Does remote prefill pay? What moving a prompt token costs, against computing it where it is decoded.

Problem: the fabric between two pods cannot be told from their topology. A PID namespace of its own, which every pod
has, takes NVLink away without a word, and moving a prompt then takes ten times as long as computing it.

Idea: judge the fabric by what it did. Decode engines count the seconds of their transfers and the tokens that came;
their own model says what computing these would have taken. Both are seconds a token of one request that waits, so
that they compare as they stand. NIXL's transfer time begins with the posting of the reads and ends with the step that
notices its end (measured with vLLM and NIXL between two H200s: 245 ms for 32,000 tokens, of which 213 were posting):
the posting is in it, and a step's base is in either figure. An 8B on an H200 breaks even at 5 to 6 GB/s.

People are told the verdict (`judge`). What gates weigh for each request, where it queues and whom it would hold up, is
`travel_s` alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.forecast import Unknown
from plimsoll.core.latency import StepModel
from plimsoll.core.workload import Workload

MEMORY_S: Final = 600.0  # over which what engines moved is summed
LEAST_TOKENS: Final = 10_000.0  # eight chats' prompts; first contacts and single stalls weigh less from then on
BAND: Final = 1.25  # a verdict turns where the other side is better by so much: transfers queue behind each other
RDMA: Final = "give both tiers an RDMA device"
BLOCKS: Final = "give both tiers larger blocks (--block-size): their number is what posting takes its time for"


class Moved(NamedTuple):
    """What decode engines counted over some time: prompt tokens that came, seconds of transfers and of posting."""

    tokens: float
    transfer_s: float
    post_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether remote prefill pays; both figures are seconds a prompt token. words: for people, with a remedy if not."""

    pays: bool
    moving_s: float
    computing_s: float
    words: str


@dataclass(slots=True)
class _Counted:
    """What one engine had counted since its start `born` when it was last heard."""

    born: str
    moved: Moved


class Meter:
    """What the engines of one tier moved of late, each told by its own counters."""

    def __init__(self) -> None:
        self._engines: dict[str, _Counted] = {}
        self._sums = [0.0, 0.0, 0.0]
        self._at_s: float | None = None

    def hear(self, engine: str, born: str, at_s: float, counted: Moved) -> None:
        """Counts since the engine's start; an engine's first word, or one after a restart, is where counting begins."""
        known, new = self._engines.get(engine), _Counted(born, counted)
        self._engines[engine] = new
        if self._at_s is not None and at_s > self._at_s:
            keep = math.exp(-(at_s - self._at_s) / MEMORY_S)
            self._sums = [keep * value for value in self._sums]
        self._at_s = max(at_s, self._at_s or at_s)
        if known is None or known.born != born or any(a < b for a, b in zip(counted, known.moved, strict=True)):
            return
        self._sums = [s + a - b for s, a, b in zip(self._sums, counted, known.moved, strict=True)]

    def keep(self, engines: Collection[str]) -> None:
        """Forget the counters of engines that are gone; what they moved stays."""
        self._engines = {name: counted for name, counted in self._engines.items() if name in engines}

    @property
    def moved(self) -> Moved:
        """Over about the last `MEMORY_S`."""
        return Moved(*self._sums)


def travel_s(moved: Moved) -> float | Unknown:
    """Seconds a prompt token that KV is on its way once its reads are posted; what posting takes is reckoned apart.

    Unknown where fewer than `LEAST_TOKENS` were moved.
    """
    if moved.tokens < LEAST_TOKENS:
        return Unknown(f"{moved.tokens:.0f} prompt tokens were moved, {LEAST_TOKENS:.0f} are needed")
    return max(0.0, moved.transfer_s - moved.post_s) / moved.tokens


def judge(moved: Moved, computing_s: float, before: bool = True) -> Verdict | Unknown:
    """The verdict on what was moved, if computing a prompt token at the decode tier takes `computing_s`.

    before: the last verdict, which holds while the two are within `BAND` of each other; True where there was none.
    Unknown where fewer than `LEAST_TOKENS` were moved. Raises ValueError for a figure that is no time or no count.
    """
    if not (all(0.0 <= figure < float("inf") for figure in moved) and 0.0 < computing_s < float("inf")):
        raise ValueError(f"tokens and times are finite and 0 or more, and computing takes time: {moved}, {computing_s}")
    travelling_s = travel_s(moved)
    if isinstance(travelling_s, Unknown):
        return travelling_s
    posting_s = moved.post_s / moved.tokens
    moving_s = posting_s + travelling_s
    pays = moving_s <= computing_s * (BAND if before else 1.0 / BAND)
    figures = f"moving a prompt token takes {_micros(moving_s)} ({_micros(posting_s)} of it posting)"
    words = f"{figures}, computing it at the decode tier {_micros(computing_s)}"
    remedy = "" if pays else f": {BLOCKS if posting_s > computing_s else RDMA}"
    return Verdict(pays, moving_s, computing_s, words + remedy)


def computing_s(model: StepModel, workload: Workload, token_budget: int) -> float | Unknown:
    """Seconds a prompt token that an engine of this model would take for a workload's prompts, one at a time.

    token_budget: tokens that a step may compute. Unknown where the workload computes no prompt token.
    """
    tokens = workload.mean(workload.uncached_tokens)
    if not tokens:
        return Unknown("no prompt token is computed")
    seconds = model.prefill_s(workload.uncached_tokens, workload.cached_tokens, token_budget)
    return workload.mean(seconds) / tokens


def _micros(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
