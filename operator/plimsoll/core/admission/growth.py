"""What the residents of a replica hold of its KV cache, now and until they have ended.

Problem: an answer holds all of its tokens only at its end, and those that run are at all stages. Room for the end of
each is room that is hardly ever used: with answers six times as long as their prompts, for two fifths of what fits.
Room for what they hold now is too little: they grow, and those that came together are at their largest together.

Idea: while nobody else is let in, what is held grows by a token a step for each that runs and falls where one ends, so
that it is most just before an end. Ends are expected after so many steps, and time is counted in steps: how fast they
are does not matter then. A sequence that will hold f at step e holds f - (e - s) at step s, which is a sum of numbers
over all that are there: those sums are kept for each part of an answer's length in which ends lie. Who outlives the
expected end is taken to be at it and a standard deviation beyond until it does end.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.admission.limits import Need

PARTS: Final = 64  # of a mean answer, within which ends are taken to be together


class _Part:
    """Sums over those that end there: sequences, tokens held at their ends less the ends' steps, and if late."""

    __slots__ = ("late", "level", "sequences")

    def __init__(self) -> None:
        self.sequences, self.level, self.late = 0, 0.0, 0.0


_EMPTY: Final = _Part()


class Growth:
    """Of one replica. output_mean: tokens of an answer. Steps are whatever its clock counts, from 0 on."""

    __slots__ = ("_late", "_late_until", "_parts", "_width")

    def __init__(self, output_mean: float) -> None:
        self._width = max(output_mean / PARTS, 1.0)
        self._parts: dict[int, _Part] = {}
        self._late = _Part()
        self._late_until = -1  # the last part whose end is over

    def add(self, need: Need, end: float) -> None:
        """One more, which is expected to end at that step."""
        number = int(end / self._width)
        part = self._late
        if number > self._late_until:
            part = self._parts.get(number) or self._parts.setdefault(number, _Part())
        _sum(part, need, end, 1)

    def remove(self, need: Need, end: float) -> None:
        """It has ended; both as they were given."""
        number = int(end / self._width)
        if number > self._late_until:
            part = self._parts[number]
            _sum(part, need, end, -1)
            if not part.sequences:
                del self._parts[number]
            return
        _sum(self._late, need, end, -1)
        if not self._late.sequences:  # so that rounding never adds up
            self._late = _Part()

    def most(self, need: Need, step: float) -> float:
        """The most tokens that are held at once from this step on if one more comes now, up to its own end."""
        self._pass(step)
        parts, width = self._parts, self._width
        end = step + need.output_tokens / need.sequences
        last = int(end / width)
        sequences = need.sequences
        level = need.kv_mean_tokens - need.sequences * end + self._late.late
        most = 0.0
        for number in sorted({*parts, last}, reverse=True):
            part = parts.get(number, _EMPTY)
            sequences += part.sequences
            level += part.level
            if number <= last:
                held = level + sequences * max(step, (number + 0.5) * width)
                if held > most:
                    most = held
        return most

    def _pass(self, step: float) -> None:
        over = int(step / self._width) - 1
        if over <= self._late_until:
            return
        self._late_until = over
        for number in [number for number in self._parts if number <= over]:
            part, late = self._parts.pop(number), self._late
            late.sequences += part.sequences
            late.late += part.late


def _sum(part: _Part, need: Need, end: float, sign: int) -> None:
    part.sequences += sign * need.sequences
    part.level += sign * (need.kv_mean_tokens - need.sequences * end)
    part.late += sign * (need.kv_mean_tokens + math.sqrt(need.sequences * need.kv_variance))
