"""The board as Markdown: one table per row with all policies, and the row's targets with their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bench.scoreboard.board_file import BoardEntry
from bench.scoreboard.rows import BoardRow
from bench.scoreboard.scoring import MeanWithError, Score

_NONE: Final = "-"


def render_row(row: BoardRow, entry: BoardEntry) -> str:
    """One row's part of the page."""
    lines = [f"### {entry.row_and_plant}", "", f"{row.description}; TTFT {row.ttft}, TPOT {row.tpot}.", ""]
    columns = {head: [cell(score) for score in entry.scores] for head, cell in _COLUMNS.items()}
    check_rows = {
        head: cells
        for head, cells in columns.items()
        if head in _REQUIRED_COLUMNS or set(cells) - {_NONE, "0.00%", "0"}
    }
    lines += markdown(list(check_rows), list(zip(*check_rows.values(), strict=True)))
    if entry.checks:
        lines += [
            "",
            *markdown(("plimsoll", "asked", "found", "reached"), [_check_row(*score) for score in entry.checks]),
        ]
    return "\n".join(lines) + "\n"


def _check_row(name: str, required: str, found: str, passed: bool) -> tuple[str, ...]:
    return name, required, found, "yes" if passed else "**no**"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_table_line(head), _table_line(["---"] * len(head)), *(_table_line(one) for one in rows)]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def format_share(found: MeanWithError) -> str:
    return _percent(found.value) + ("" if found.half_width is None else f" ± {100 * found.half_width:.2f}")


def format_number(found: MeanWithError) -> str:
    return f"{found.value:.3f}" + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2%}"


def _seconds(value: float | None, unit: float = 1.0) -> str:
    return _NONE if value is None else f"{value * unit:.3g}"


# A column in which nobody has anything is left out, but for these.
_REQUIRED_COLUMNS: Final = ("policy", "seeds", "offered", "admitted", "GPU-hours", "reversals")
_COLUMNS: Final[dict[str, Callable[[Score], str]]] = {
    "policy": lambda one: f"`{one.policy}`",
    "seeds": lambda one: str(one.seeds),
    "offered": lambda one: format_share(one.offered),
    "admitted": lambda one: format_share(one.admitted),
    "tokens": lambda one: format_share(one.tokens),
    "windows": lambda one: _percent(one.windows),
    "GPU-hours": lambda one: format_number(one.gpu_hours),
    "mean replicas": lambda one: format_number(one.replicas),
    "shed": lambda one: format_share(one.shed),
    "recovered": lambda one: _percent(one.recovered),
    "downgraded": lambda one: _percent(one.downgraded),
    "infeasible alone": lambda one: _percent(one.infeasible),
    "p95 TTFT, s": lambda one: _seconds(one.first_s),
    "p99 ITL, ms": lambda one: _seconds(one.itl_s, 1e3),
    "reversals": lambda one: str(one.reversals),
    "replicas after 1 h": lambda one: _NONE if one.later is None else f"{one.later:.3f}",
    "after 2 h": lambda one: _NONE if one.settled is None else f"{one.settled:.3f}",
}
