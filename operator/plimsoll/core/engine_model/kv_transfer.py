"""KV transfer: whether remote prefill pays off, by the time per prompt token of transfer against local prefill.

Problem: topology does not show how fast the fabric between two pods is. A pod's own PID namespace disables NVLink
without an error. A transfer then takes ten times as long as a local prefill.

Idea: assess the fabric by its measured transfers. Decode engines count the seconds of their transfers and the received
tokens. Their own step model gives the time of a local prefill. Both are seconds per prompt token of one waiting
request, so they are directly comparable. NIXL's transfer time starts with the posting of the reads and ends with the
step that observes their completion (measured with vLLM and NIXL between two H200s: 245 ms for 32,000 tokens, of which
213 were posting). It includes the posting, and both figures include a step's base. An 8B on an H200 breaks even at 5 to
6 GB/s.

`assess` gives the result for users. Admission control uses only `transit_s`, and weighs each request by the queue and
the streams that it would stall.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_seconds
from plimsoll.core.workload import Workload

TRANSFER_MEMORY_S: Final = 600.0  # time constant of the transfer sums
MIN_TRANSFERRED_TOKENS: Final = (
    10_000.0  # prompts of eight chats; with more tokens, connection set-up and single stalls weigh less
)
HYSTERESIS_RATIO: Final = (
    1.25  # hysteresis: the assessment changes when the other option is better by this factor, as transfers queue
)
RDMA_REMEDY: Final = "give both tiers an RDMA device"
BLOCK_SIZE_REMEDY: Final = (
    "give both tiers larger blocks (--block-size): their number is what posting takes its time for"
)


class TransferStats(NamedTuple):
    """Counters of decode engines over some time: received prompt tokens, seconds of transfers and of posting."""

    tokens: float
    transfer_s: float
    post_s: float


@dataclass(frozen=True, slots=True)
class TransferAssessment:
    """Whether remote prefill pays off. Both figures are seconds per prompt token.

    message: text for users, with a remedy if it does not pay off.
    """

    pays: bool
    transfer_s: float
    recompute_s: float
    message: str


@dataclass(slots=True)
class _EngineCounters:
    """Last counters of one engine since the start of its instance."""

    instance_id: str
    stats: TransferStats


class TransferMeter:
    """Recent transfers of the engines of one tier, from the engines' counters."""

    def __init__(self) -> None:
        self._engines: dict[str, _EngineCounters] = {}
        self._sums = [0.0, 0.0, 0.0]
        self._at_s: float | None = None

    def record(self, engine: str, instance_id: str, at_s: float, counters: TransferStats) -> None:
        """Record an engine's counters since its start. The first ones, and the first after a restart, are only a
        baseline.
        """
        previous, latest = self._engines.get(engine), _EngineCounters(instance_id, counters)
        self._engines[engine] = latest
        if self._at_s is not None and at_s > self._at_s:
            decay = math.exp(-(at_s - self._at_s) / TRANSFER_MEMORY_S)
            self._sums = [decay * value for value in self._sums]
        self._at_s = max(at_s, self._at_s or at_s)
        if (
            previous is None
            or previous.instance_id != instance_id
            or any(a < b for a, b in zip(counters, previous.stats, strict=True))
        ):
            return
        self._sums = [s + a - b for s, a, b in zip(self._sums, counters, previous.stats, strict=True)]

    def retain(self, engines: Collection[str]) -> None:
        """Drop the counters of engines that no longer exist; their transfers stay in the sums."""
        self._engines = {name: counters for name, counters in self._engines.items() if name in engines}

    @property
    def stats(self) -> TransferStats:
        """Transfers over about the last TRANSFER_MEMORY_S."""
        return TransferStats(*self._sums)


def transit_s(stats: TransferStats) -> float | Unavailable:
    """Seconds per prompt token between the posting of the KV reads and their completion; posting time is excluded.

    `Unavailable` if too few tokens were transferred.
    """
    if stats.tokens < MIN_TRANSFERRED_TOKENS:
        return Unavailable(f"{stats.tokens:.0f} prompt tokens were moved, {MIN_TRANSFERRED_TOKENS:.0f} are needed")
    return max(0.0, stats.transfer_s - stats.post_s) / stats.tokens


def assess(stats: TransferStats, recompute_s: float, paid_before: bool = True) -> TransferAssessment | Unavailable:
    """Assess the measured transfers against local prefill, which takes `recompute_s` per prompt token.

    paid_before: the last result, which stays while the two times are within the hysteresis; True without one.
    `Unavailable` if too few tokens were transferred. Raises ValueError for an invalid time or count.
    """
    if not (all(0.0 <= figure < float("inf") for figure in stats) and 0.0 < recompute_s < float("inf")):
        raise ValueError(f"tokens and times are finite and 0 or more, and computing takes time: {stats}, {recompute_s}")
    transit = transit_s(stats)
    if isinstance(transit, Unavailable):
        return transit
    posting_s = stats.post_s / stats.tokens
    transfer_s = posting_s + transit
    pays = transfer_s <= recompute_s * (HYSTERESIS_RATIO if paid_before else 1.0 / HYSTERESIS_RATIO)
    figures = f"moving a prompt token takes {format_seconds(transfer_s)} ({format_seconds(posting_s)} of it posting)"
    message = f"{figures}, computing it at the decode tier {format_seconds(recompute_s)}"
    remedy = "" if pays else f": {BLOCK_SIZE_REMEDY if posting_s > recompute_s else RDMA_REMEDY}"
    return TransferAssessment(pays, transfer_s, recompute_s, message + remedy)


def recompute_s_per_token(model: StepModel, workload: Workload, token_budget: int) -> float | Unavailable:
    """Seconds per prompt token that an engine of this model takes to prefill a workload's prompts, one at a time.

    token_budget: tokens that a step may compute. `Unavailable` if the workload computes no prompt token.
    """
    tokens = workload.mean(workload.uncached_tokens)
    if not tokens:
        return Unavailable("no prompt token is computed")
    seconds = model.prefill_s(workload.uncached_tokens, workload.cached_tokens, token_budget)
    return workload.mean(seconds) / tokens
