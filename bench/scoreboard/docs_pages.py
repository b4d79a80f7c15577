"""The pages that are made of the committed board: `python -m bench scoreboard --page`, which `make generate` runs.

`docs/evaluation/scoreboard.md` has a generated part between two marks: for each row the targets, the results, and the
cost of each policy. `docs/evaluation/scoreboard-tables.md` has the tables of all policies, with pictures beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.scoreboard import cost_chart, markdown, target_checks
from bench.scoreboard.board_file import OWN_POLICY, BoardEntry, ScoreBoard
from bench.scoreboard.rows import BOARD_ROWS, BoardRow
from bench.scoreboard.scoring import Score
from plimsoll.core.demand.standby_value import MISS_COST

DOCS: Final = Path(__file__).parents[2] / "docs"
BEGIN: Final = "<!-- made by `python -m bench scoreboard --page` from here -->"
END: Final = "<!-- to here -->"
_MIN_PLOTTED: Final = 8  # policies that make a picture worth having
_REFERENCE_FAMILIES: Final = frozenset({"plimsoll", "static", "follower", *target_checks.ORACLES})


def write(board: ScoreBoard, docs: Path = DOCS) -> None:
    """Writes both pages and the pictures, and removes pictures that are no longer made."""
    page_path = docs / "evaluation" / "scoreboard.md"
    before, after_mark = page_path.read_text().split(BEGIN)
    page_path.write_text(f"{before}{BEGIN}\n\n{summary(board)}\n{END}{after_mark.split(END)[1]}")
    (docs / "evaluation" / "scoreboard-tables.md").write_text(tables(board))
    folder = docs / "evaluation" / "scoreboard"
    folder.mkdir(exist_ok=True)
    charts = {f"{entry.row_and_plant}.svg": entry for entry in board.places if _is_plotted(entry)}
    for path in folder.glob("*.svg"):
        if path.name not in charts:
            path.unlink()
    for name, entry in charts.items():
        cost_chart.write(folder / name, f"{entry.row_and_plant}: {BOARD_ROWS[entry.row].description}", entry.scores)


def summary(board: ScoreBoard) -> str:
    """The part of `docs/evaluation/scoreboard.md`."""
    nominal = [entry for entry in board.places if entry.plant == 1.0 and entry.own_score is not None]
    other_plants = [entry for entry in board.places if entry.plant != 1.0 and entry.own_score is not None]
    lines = [_provenance(board), "", "### Asked and found", "", *_target_rows(nominal)]
    if other_plants:
        lines += ["", "### On other machines", "", *_target_rows(other_plants)]
    lines += ["", "### Who else", "", _COMPARISON_INTRO, "", *_comparison_rows(nominal)]
    if has_miss_costs := _miss_cost_rows(nominal):
        lines += ["", "### The price of a miss", "", _MISS_COST_INTRO, "", *has_miss_costs]
    return "\n".join([*lines, ""])


def tables(board: ScoreBoard) -> str:
    """The page of all tables."""
    lines = ["# All tables of the scoreboard", "", _TABLES, "", _provenance(board), *_not_played(board.left)]
    for entry in board.places:
        lines += ["", markdown.render_row(BOARD_ROWS[entry.row], entry).rstrip()]
        if not_shown := entry.followers - sum(score.family == "follower" for score in entry.scores):
            lines += ["", f"{not_shown} more followers were played, each beaten by one above at no more cost."]
        if _is_plotted(entry):
            lines += ["", f"![attainment over GPU-hours](scoreboard/{entry.row_and_plant}.svg)"]
    return "\n".join(lines) + "\n"


_TABLES: Final = (
    "Made from `bench/scoreboard/board.json` by `make generate`; [the scoreboard](scoreboard.md) says how it is"
    " counted. A column in which nobody has anything is left out."
)
_COMPARISON_INTRO: Final = (
    "What was played: offered within the SLO at how many GPU-hours, on traces and constant rates the windows that pass."
    " As good: what attains at least as much as Plimsoll, or passes 99 % of windows, and of that the cheapest. At no"
    " more cost than Plimsoll's: what attains most. Knows the future: the cheapest that attains or passes 99 %, else"
    " what attains most. All by means over the seeds that each was played with. Nobody below: GPU-hours"
    " that any policy needs at least to serve as large a share of the first seed's requests in time as Plimsoll does."
)

_MISS_COST_INTRO: Final = (
    "By `spec.scaling.sloMissCost`, what a missed request is worth: offered within the SLO, and GPU-hours."
)


def _provenance(board: ScoreBoard) -> str:
    sentence = f"One run: program `{board.program}`, {board.plays:,} plays, {board.cpu_s / 3600:.1f} hours of one core."
    left = f" Of its plan {len(board.left)} items were left when its time was over." if board.left else ""
    return sentence + left


def _not_played(items: Sequence[str]) -> Iterator[str]:
    """What was not played, by part of the plan."""
    parts: dict[str, list[str]] = {}
    for one in items:
        part, _, what = one.partition(": ")
        parts.setdefault(part, []).append(what)
    if parts:
        yield from ("", "Left:", "")
        yield from (f"- {part}: {'; '.join(whats)}" for part, whats in parts.items())


def _target_rows(entries: Sequence[BoardEntry]) -> list[str]:
    """A line a row: what was found, how many of its checks are reached, and which are not."""
    lines = []
    for entry in entries:
        assert entry.own_score is not None
        failed_checks = [check for check in entry.checks if not check.passed]
        passed_checks = (
            f"{len(entry.checks) - len(failed_checks)} of {len(entry.checks)}" if entry.checks else "nothing asked"
        )
        words = "; ".join(f"**{check.name}** {check.found}, asked {check.target}" for check in failed_checks)
        figures = (
            markdown.format_share(entry.own_score.offered),
            markdown.format_share(entry.own_score.admitted),
            markdown.format_number(entry.own_score.gpu_hours),
        )
        lines.append((f"`{entry.row_and_plant}`", str(entry.own_score.seeds), *figures, passed_checks, words))
    return markdown.markdown(("row", "seeds", "offered", "admitted", "GPU-hours", "reached", "missed"), lines)


def _comparison_rows(entries: Sequence[BoardEntry]) -> list[str]:
    lines = []
    for entry in entries:
        assert entry.own_score is not None
        cells = [_cell(BOARD_ROWS[entry.row], select(entry, entry.own_score)) for select in _COLUMNS.values()]
        if any(cells):
            own_score, cost_bound = _figures(BOARD_ROWS[entry.row], entry.own_score), _cost_bound(entry)
            lines.append((f"`{entry.row_and_plant}`", own_score, *(cell or "-" for cell in cells), cost_bound))
    return markdown.markdown(("row", "plimsoll", *_COLUMNS, "nobody below"), lines)


def _miss_cost_rows(entries: Sequence[BoardEntry]) -> list[str]:
    """Plimsoll with other prices beside its own, where they were played."""
    each = {
        one.row_and_plant: {_miss_cost(score): score for score in one.scores if score.family == OWN_POLICY}
        for one in entries
    }
    priced_scores = {entry: scores for entry, scores in each.items() if len(scores) > 1}
    costs = sorted({cost for scores in priced_scores.values() for cost in scores})
    lines = [
        (f"`{entry}`", *(_figures(BOARD_ROWS[entry], scores[cost]) if cost in scores else "-" for cost in costs))
        for entry, scores in priced_scores.items()
    ]
    return markdown.markdown(("row", *map(str, costs)), lines) if lines else []


def _miss_cost(score: Score) -> int:
    return int(score.policy.partition("sloMissCost=")[2] or MISS_COST)


def _cell(row: BoardRow, score: Score | None) -> str:
    """A schedule is told by its family alone: it is long, and of this trace."""
    if score is None:
        return ""
    return f"{_figures(row, score)}, `{score.family if score.family in target_checks.ORACLES else score.policy}`"


def _figures(row: BoardRow, score: Score) -> str:
    found = f"{score.windows:.1%} of windows" if row.compares_windows and score.windows is not None else None
    return f"{found or f'{score.offered.value:.1%}'} at {score.gpu_hours.value:.2f}"


def _cost_bound(entry: BoardEntry) -> str:
    """Rounded down, as it is a bound."""
    return "-" if entry.least is None else f"{math.floor(100 * entry.least) / 100:.2f}"


def _cheapest(scores: Sequence[Score]) -> Score | None:
    return min(scores, key=lambda one: (one.gpu_hours.value, -one.offered.value), default=None)


def _best(entry: BoardEntry, scores: Sequence[Score], most_hours: float = math.inf) -> Score | None:
    def attains(score: Score) -> tuple[float, float]:
        return (score.windows or 0.0 if BOARD_ROWS[entry.row].compares_windows else 0.0), score.offered.value

    return max([one for one in scores if one.gpu_hours.value <= most_hours], key=attains, default=None)


def _equivalent(entry: BoardEntry, own: Score, scores: Sequence[Score]) -> Score | None:
    row = BOARD_ROWS[entry.row]
    return _cheapest([score for score in scores if target_checks.is_equivalent(row, own.point, score.point)])


def _constant_fleet(entry: BoardEntry, own: Score) -> Score | None:
    return _equivalent(entry, own, [one for one in entry.scores if one.family == "static"])


def _peer(entry: BoardEntry, own: Score) -> Score | None:
    return _equivalent(entry, own, _peers(entry))


def _affordable(entry: BoardEntry, own: Score) -> Score | None:
    return _best(entry, _peers(entry), own.gpu_hours.value)


def _best_follower(entry: BoardEntry, own: Score) -> Score | None:
    followers = [one for one in entry.scores if one.family == "follower"]
    return _best(entry, followers, own.gpu_hours.value)


def _best_oracle(entry: BoardEntry, own: Score) -> Score | None:
    by_windows = BOARD_ROWS[entry.row].compares_windows
    schedules = [one for one in entry.scores if one.family in target_checks.ORACLES]
    equivalent = [
        one
        for one in schedules
        if (target_checks.meets_windows(one) if by_windows else one.offered.value >= target_checks.MIN_WINDOWS_MET)
    ]
    return _cheapest(equivalent) or _best(entry, schedules)


def _peers(entry: BoardEntry) -> list[Score]:
    return [one for one in entry.scores if one.family not in _REFERENCE_FAMILIES]


_COLUMNS: Final[Mapping[str, Callable[[BoardEntry, Score], Score | None]]] = {
    "constant fleet as good": _constant_fleet,
    "peer as good": _peer,
    "peer at no more cost": _affordable,
    "follower at no more cost": _best_follower,
    "knows the future": _best_oracle,
}


def _is_plotted(entry: BoardEntry) -> bool:
    return entry.plant == 1.0 and len(entry.scores) >= _MIN_PLOTTED
