"""Shrinkage: the part of a value that exceeds random variation."""

from __future__ import annotations

from typing import Final

_FULL_ABOVE_RATIO: Final = 1.5  # times chance is believed whole


def shrink(amount: float, threshold: float) -> float:
    """Nothing of an amount up to `chance`, all of it from half as much again.

    Firm shrinkage (Gao and Bruce 1997): it has no jump where chance ends, so that a figure which wavers there moves
    nothing by much, and takes nothing off what can hardly be chance. Both 0 or more.
    """
    return min(max((amount - threshold) * _FULL_ABOVE_RATIO / (_FULL_ABOVE_RATIO - 1.0), 0.0), amount)
