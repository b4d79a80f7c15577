"""The board as Markdown: a table a row, all policies beside each other, and what of the reach was reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bench.scoreboard.judge import Mean, Score
from bench.scoreboard.report import Judged
from bench.scoreboard.rows import Row

_NONE: Final = "-"


def rendered(row: Row, found: Judged) -> str:
    """One row's part of the page."""
    lines = [f"### {found.place}", "", f"{row.says}; TTFT {row.ttft}, TPOT {row.tpot}.", ""]
    columns = {head: [cell(one) for one in found.scores] for head, cell in _COLUMNS.items()}
    told = {head: cells for head, cells in columns.items() if head in _ALWAYS or set(cells) - {_NONE, "0.00%", "0"}}
    lines += markdown(list(told), list(zip(*told.values(), strict=True)))
    if found.checks:
        lines += ["", *markdown(("plimsoll", "asked", "found", "reached"), [_check(*one) for one in found.checks])]
    return "\n".join(lines) + "\n"


def _check(name: str, asked: str, found: str, passed: bool) -> tuple[str, ...]:
    return name, asked, found, "yes" if passed else "**no**"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(head), _line(["---"] * len(head)), *(_line(one) for one in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def share(found: Mean) -> str:
    return _percent(found.value) + ("" if found.half is None else f" ± {100 * found.half:.2f}")


def number(found: Mean) -> str:
    return f"{found.value:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2%}"


def _seconds(value: float | None, unit: float = 1.0) -> str:
    return _NONE if value is None else f"{value * unit:.3g}"


# A column in which nobody has anything is left out, but for these.
_ALWAYS: Final = ("policy", "seeds", "offered", "admitted", "GPU-hours", "reversals")
_COLUMNS: Final[dict[str, Callable[[Score], str]]] = {
    "policy": lambda one: f"`{one.policy}`",
    "seeds": lambda one: str(one.seeds),
    "offered": lambda one: share(one.offered),
    "admitted": lambda one: share(one.admitted),
    "tokens": lambda one: share(one.tokens),
    "windows": lambda one: _percent(one.windows),
    "GPU-hours": lambda one: number(one.gpu_hours),
    "mean replicas": lambda one: number(one.replicas),
    "shed": lambda one: share(one.shed),
    "recovered": lambda one: _percent(one.recovered),
    "downgraded": lambda one: _percent(one.downgraded),
    "infeasible alone": lambda one: _percent(one.infeasible),
    "p95 TTFT, s": lambda one: _seconds(one.first_s),
    "p99 ITL, ms": lambda one: _seconds(one.itl_s, 1e3),
    "reversals": lambda one: str(one.reversals),
    "replicas after 1 h": lambda one: _NONE if one.later is None else f"{one.later:.3f}",
    "after 2 h": lambda one: _NONE if one.settled is None else f"{one.settled:.3f}",
}
