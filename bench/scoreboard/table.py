"""The board as Markdown: a table a row, all policies beside each other, and what of the reach was reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.scoreboard.judge import Check, Mean, Score
from bench.scoreboard.rows import Row

_HEAD: Final = (
    "policy", "seeds", "offered", "admitted", "tokens", "windows", "GPU-hours", "mean replicas", "shed", "p95 TTFT",
    "reversals",
)  # fmt: skip


def rendered(row: Row, place: str, scores: Sequence[Score], checks: Sequence[Check]) -> str:
    """One row's part of the page. place: its name and plant."""
    lines = [f"### {place}", "", f"{row.says}; TTFT {row.ttft}, TPOT {row.tpot}.", ""]
    lines += _table(_HEAD, [_cells(one) for one in scores])
    if checks:
        cells = [(one.name, one.asked, one.found, "yes" if one.passed else "**no**") for one in checks]
        lines += ["", *_table(("plimsoll", "asked", "found", "reached"), cells)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *(_line(one) for one in rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(one: Score) -> tuple[str, ...]:
    return (
        f"`{one.policy}`",
        str(one.seeds),
        _share(one.offered),
        _share(one.admitted),
        _share(one.tokens),
        "-" if one.windows is None else f"{one.windows:.2%}",
        _number(one.gpu_hours),
        _number(one.replicas),
        _share(one.shed),
        "-" if one.first_s is None else f"{one.first_s:.2f} s",
        str(one.reversals),
    )


def _share(found: Mean) -> str:
    return f"{found.value:.2%}" + ("" if found.half is None else f" ± {100 * found.half:.2f}")


def _number(found: Mean) -> str:
    return f"{found.value:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")
