"""A run over time: what came, what was sent away and how long it took, in even parts of the load's length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.sim.times import Times
from plimsoll.sim.visit import End, Visit

PARTS: Final = 240


class Moment(NamedTuple):
    """One part. at_s: its middle. Rates are per second, shares of the first attempts that came in it; times are the
    95th percentile of those that were answered, None of nobody."""

    at_s: float
    offered: float
    prompt_tokens: float
    output_tokens: float
    shed_share: float
    missed_share: float
    ttft_s: float | None
    tpot_s: float | None


@dataclass(slots=True)
class _Part:
    offered: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    shed: int = 0
    missed: int = 0
    ttft: Times = field(default_factory=Times)
    tpot: Times = field(default_factory=Times)


class Timeline:
    """Of one run, by the arrival of first attempts."""

    def __init__(self, length_s: float) -> None:
        self._every_s = max(length_s, 1e-9) / PARTS
        self._parts = [_Part() for _ in range(PARTS)]

    def take(self, visit: Visit, met: bool) -> None:
        """An attempt has ended."""
        if visit.attempt > 1:
            return
        part = self._parts[min(PARTS - 1, int(visit.asked.at_s / self._every_s))]
        part.offered += 1
        part.prompt_tokens += visit.asked.prompt_tokens
        part.output_tokens += visit.asked.output_tokens
        part.shed += visit.end is End.SHED
        part.missed += not met
        if visit.ttft_s is not None:
            part.ttft.observe(visit.ttft_s)
        if visit.tpot_s is not None:
            part.tpot.observe(visit.tpot_s)

    def moments(self) -> Iterator[Moment]:
        """All parts in order."""
        every_s = self._every_s
        for number, part in enumerate(self._parts):
            count = max(1, part.offered)
            yield Moment(
                (number + 0.5) * every_s, part.offered / every_s, part.prompt_tokens / every_s,
                part.output_tokens / every_s, part.shed / count, part.missed / count,
                part.ttft.quantile_s(0.95), part.tpot.quantile_s(0.95),
            )  # fmt: skip
