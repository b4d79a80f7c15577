"""Short rows whose requests change at once, because every other row keeps its lengths for minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bench.scoreboard.loads import LengthDistribution, PhasedLoad, RatePhase
from bench.scoreboard.rows import SHORT_ROWS, BoardRow

_CHANGES: Final = {
    "outputs-grow": ((1024, 64), (1024, 640)),
    "outputs-shrink": ((1024, 640), (1024, 64)),
    "prompts-grow": ((512, 128), (6000, 128)),
    "prompts-shrink": ((6000, 128), (512, 128)),
}


def _row(name: str, before: tuple[int, int], after: tuple[int, int]) -> BoardRow:
    tokens = f"{before[0]}/{before[1]} tokens for 120 s, {after[0]}/{after[1]} for 240 s"
    phases = zip((120.0, 240.0), (before, after), strict=True)
    load = PhasedLoad(tuple(RatePhase(for_s, 10.0, LengthDistribution(*map(float, mean))) for for_s, mean in phases))
    says = f"10 requests/s, {tokens}; engines start in 30 s"
    return replace(SHORT_ROWS["short"], name=name, description=says, load=load)


LENGTH_ROWS: Final = {name: _row(name, before, after) for name, (before, after) in _CHANGES.items()}
