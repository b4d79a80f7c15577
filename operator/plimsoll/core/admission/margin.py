"""How much later than predicted first tokens come.

Problem: a request let in at the last moment misses its target by the smallest error of the prediction, and in overload
every request is let in late.

Idea: follow a high quantile of the error by stochastic approximation (Robbins and Monro 1951): a first token later than
the margin widens it a little, one in time narrows it by much less, so that it rests where the wanted share is in time.
The gate counts it in only while others want the place: where nobody does, a late one costs no more than a refused one.
"""

from __future__ import annotations

from typing import Final

QUANTILE: Final = 0.98  # of first tokens that come within prediction plus margin
_STEP: Final = 0.02  # of the target: how far one late first token moves the margin
_FIRST: Final = 0.3  # of the target: before anything has been measured; ends come many seconds after admissions
_WIDEST: Final = 0.4  # of the target


class Margin:
    """The margin of one class, s; 0 where it has no target for the first token. widest_s: no place is kept free for
    longer, for whatever reason."""

    def __init__(self, target_s: float | None) -> None:
        self._target_s = 0.0 if target_s is None else target_s
        self.widest_s = _WIDEST * self._target_s
        self.margin_s = _FIRST * self._target_s

    def observe(self, error_s: float) -> None:
        """A first token came so much later than predicted, negative for earlier. NaN is taken as in time."""
        moved = QUANTILE if error_s > self.margin_s else QUANTILE - 1
        self.margin_s = min(max(self.margin_s + moved * _STEP * self._target_s, 0.0), self.widest_s)
