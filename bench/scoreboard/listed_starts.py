"""Start-up times of a row, also those that change while it is played."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from plimsoll.sim import startup
from plimsoll.sim.startup import StartupDistribution, StartupPhases

_LISTED: Final = "listed:"


@dataclass(frozen=True)
class ListedStarts(StartupDistribution):
    """The n-th engine takes the n-th of `samples_s`, and each one after those the last. Each run needs its own."""

    started: Iterator[int] = field(default_factory=itertools.count)

    def sample(self, random: Random) -> StartupPhases:
        total_s = self.samples_s[min(next(self.started), len(self.samples_s) - 1)]
        return StartupDistribution(total_s, total_s).sample(random)


def parse(text: str) -> StartupDistribution:
    """`listed:240,30` for `ListedStarts`, those that are ready at first included; else as `plimsoll simulate` takes
    it."""
    if text.startswith(_LISTED):
        return ListedStarts(samples_s=tuple(map(float, text.removeprefix(_LISTED).split(","))))
    return startup.parse(text)
