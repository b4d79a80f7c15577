"""A run over time: arrivals, rejections and latencies in equal intervals of the load's length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.sim.attempt import Attempt, AttemptOutcome
from plimsoll.sim.engine.quantile_sketch import QuantileSketch

INTERVALS: Final = 240


class TimelinePoint(NamedTuple):
    """One interval. at_s: its middle. Rates are per second, shares are of the first attempts that arrived in it.

    Latencies are the 95th percentile of its successful requests, None without any.
    """

    at_s: float
    offered: float
    prompt_tokens: float
    output_tokens: float
    shed_share: float
    missed_share: float
    ttft_s: float | None
    tpot_s: float | None


@dataclass(slots=True)
class _Interval:
    offered: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    shed: int = 0
    missed: int = 0
    ttft: QuantileSketch = field(default_factory=QuantileSketch)
    tpot: QuantileSketch = field(default_factory=QuantileSketch)


class Timeline:
    """Timeline of one run, by the arrival of first attempts."""

    def __init__(self, length_s: float) -> None:
        self._interval_s = max(length_s, 1e-9) / INTERVALS
        self._intervals = [_Interval() for _ in range(INTERVALS)]

    def add(self, attempt: Attempt, within_slo: bool) -> None:
        """Add an attempt that has ended."""
        if attempt.attempt > 1:
            return
        interval = self._intervals[min(INTERVALS - 1, int(attempt.trace_request.at_s / self._interval_s))]
        interval.offered += 1
        interval.prompt_tokens += attempt.trace_request.prompt_tokens
        interval.output_tokens += attempt.trace_request.output_tokens
        interval.shed += attempt.outcome is AttemptOutcome.SHED
        interval.missed += not within_slo
        if attempt.ttft_s is not None:
            interval.ttft.observe(attempt.ttft_s)
        if attempt.tpot_s is not None:
            interval.tpot.observe(attempt.tpot_s)

    def points(self) -> Iterator[TimelinePoint]:
        """All intervals in order."""
        interval_s = self._interval_s
        for index, interval in enumerate(self._intervals):
            count = max(1, interval.offered)
            yield TimelinePoint(
                (index + 0.5) * interval_s, interval.offered / interval_s, interval.prompt_tokens / interval_s,
                interval.output_tokens / interval_s, interval.shed / count, interval.missed / count,
                interval.ttft.quantile_s(0.95), interval.tpot.quantile_s(0.95),
            )  # fmt: skip
