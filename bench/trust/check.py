"""One comparison with its bound, and how comparisons are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

Detail = dict[str, Any]


@dataclass(frozen=True)
class SimulatorCheck:
    """figure: how far the simulator is off, in `unit`. bound: how far it may be; None where nothing was promised."""

    group: str
    name: str
    figure: float
    bound: float | None
    unit: str = ""
    detail: Detail = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.bound is None or abs(self.figure) <= self.bound

    def document(self) -> Detail:
        return {**asdict(self), "holds": self.holds}


def shown(checks: Iterable[SimulatorCheck]) -> list[str]:
    """A table, one line a check."""
    lines = [f"{'check':<58}{'figure':>12}{'bound':>12}  holds"]
    group = ""
    for one in checks:
        if one.group != group:
            group = one.group
            lines += ["", group]
        bound = "none" if one.bound is None else f"{one.bound:g} {one.unit}"
        verdict = "-" if one.bound is None else "yes" if one.holds else "NO"
        lines.append(f"  {one.name:<56}{one.figure:>+8.2f} {one.unit:<3}{bound:>12}  {verdict}")
    return lines
