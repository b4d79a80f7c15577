"""The pages that are made of the committed board: `python -m bench scoreboard --page`, which `make generate` runs.

`docs/scoreboard.md` has a part between two marks that says row by row what was asked, found and missed, and who else
got how far at which cost; `docs/reference/scoreboard.md` has the tables of all policies, with pictures beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.scoreboard import picture, reach, table
from bench.scoreboard.judge import Score
from bench.scoreboard.report import OWN, Board, Judged
from bench.scoreboard.rows import ROWS, Row
from plimsoll.core.forecast.spare import MISS_COST

DOCS: Final = Path(__file__).parents[2] / "docs"
BEGIN: Final = "<!-- made by `python -m bench scoreboard --page` from here -->"
END: Final = "<!-- to here -->"
_DRAWN: Final = 8  # policies that make a picture worth having
_YARDSTICKS: Final = frozenset({"plimsoll", "static", "follower", *reach.KNOWING})


def write(board: Board, docs: Path = DOCS) -> None:
    """Writes both pages and the pictures, and removes pictures that are no longer made."""
    own = docs / "scoreboard.md"
    before, rest = own.read_text().split(BEGIN)
    own.write_text(f"{before}{BEGIN}\n\n{summary(board)}\n{END}{rest.split(END)[1]}")
    (docs / "reference" / "scoreboard.md").write_text(tables(board))
    folder = docs / "reference" / "scoreboard"
    folder.mkdir(exist_ok=True)
    drawn = {f"{one.place}.svg": one for one in board.places if _drawn(one)}
    for path in folder.glob("*.svg"):
        if path.name not in drawn:
            path.unlink()
    for name, one in drawn.items():
        picture.write(folder / name, f"{one.place}: {ROWS[one.row].says}", one.scores)


def summary(board: Board) -> str:
    """The part of `docs/scoreboard.md`."""
    nominal = [one for one in board.places if one.plant == 1.0 and one.own is not None]
    others = [one for one in board.places if one.plant != 1.0 and one.own is not None]
    lines = [_made(board), "", "### Asked and found", "", *_asked(nominal)]
    if others:
        lines += ["", "### On other machines", "", *_asked(others)]
    lines += ["", "### Who else", "", _WHO, "", *_who(nominal)]
    if priced := _prices(nominal):
        lines += ["", "### The price of a miss", "", _PRICES, "", *priced]
    return "\n".join([*lines, ""])


def tables(board: Board) -> str:
    """The page of all tables."""
    lines = ["# All tables of the scoreboard", "", _TABLES, "", _made(board), *_left(board.left)]
    for one in board.places:
        lines += ["", table.rendered(ROWS[one.row], one).rstrip()]
        if hidden := one.followers - sum(score.family == "follower" for score in one.scores):
            lines += ["", f"{hidden} more followers were played, each beaten by one above at no more cost."]
        if _drawn(one):
            lines += ["", f"![attainment over GPU-hours](scoreboard/{one.place}.svg)"]
    return "\n".join(lines) + "\n"


_TABLES: Final = (
    "Made from `bench/scoreboard/board.json` by `make generate`; [the scoreboard](../scoreboard.md) says how it is"
    " counted. A column in which nobody has anything is left out."
)
_WHO: Final = (
    "What was played: offered in promise at how many GPU-hours, on traces and constant rates the windows that pass. As"
    " good: what attains at least as much as Plimsoll, or passes 99 % of windows, and of that the cheapest. At no more"
    " cost than Plimsoll's: what attains most. Knows the future: the cheapest that attains or passes 99 %, else what"
    " attains most. All by means over the seeds that each was played with. Nobody below: GPU-hours"
    " that whoever keeps the promise to as large a share of the first seed's requests as Plimsoll does needs at least."
)

_PRICES: Final = "By `spec.scaling.missCost`, what a missed request is worth: offered in promise, and GPU-hours."


def _made(board: Board) -> str:
    made = f"One run: program `{board.program}`, {board.plays:,} plays, {board.cpu_s / 3600:.1f} hours of one core."
    left = f" Of its plan {len(board.left)} items were left when its time was over." if board.left else ""
    return made + left


def _left(left: Sequence[str]) -> Iterator[str]:
    """What was not played, by part of the plan."""
    parts: dict[str, list[str]] = {}
    for one in left:
        part, _, what = one.partition(": ")
        parts.setdefault(part, []).append(what)
    if parts:
        yield from ("", "Left:", "")
        yield from (f"- {part}: {'; '.join(whats)}" for part, whats in parts.items())


def _asked(places: Sequence[Judged]) -> list[str]:
    """A line a row: what was found, how many of its checks are reached, and which are not."""
    lines = []
    for one in places:
        assert one.own is not None
        missed = [check for check in one.checks if not check.passed]
        kept = f"{len(one.checks) - len(missed)} of {len(one.checks)}" if one.checks else "nothing asked"
        words = "; ".join(f"**{check.name}** {check.found}, asked {check.asked}" for check in missed)
        figures = table.share(one.own.offered), table.share(one.own.admitted), table.number(one.own.gpu_hours)
        lines.append((f"`{one.place}`", str(one.own.seeds), *figures, kept, words))
    return table.markdown(("row", "seeds", "offered", "admitted", "GPU-hours", "reached", "missed"), lines)


def _who(places: Sequence[Judged]) -> list[str]:
    lines = []
    for one in places:
        assert one.own is not None
        cells = [_cell(ROWS[one.row], choose(one, one.own)) for choose in _COLUMNS.values()]
        if any(cells):
            own, least = _figures(ROWS[one.row], one.own), _least(one)
            lines.append((f"`{one.place}`", own, *(cell or "-" for cell in cells), least))
    return table.markdown(("row", "plimsoll", *_COLUMNS, "nobody below"), lines)


def _prices(places: Sequence[Judged]) -> list[str]:
    """Plimsoll with other prices beside its own, where they were played."""
    each = {one.place: {_price(score): score for score in one.scores if score.family == OWN} for one in places}
    priced = {place: scores for place, scores in each.items() if len(scores) > 1}
    costs = sorted({cost for scores in priced.values() for cost in scores})
    lines = [
        (f"`{place}`", *(_figures(ROWS[place], scores[cost]) if cost in scores else "-" for cost in costs))
        for place, scores in priced.items()
    ]
    return table.markdown(("row", *map(str, costs)), lines) if lines else []


def _price(score: Score) -> int:
    return int(score.policy.partition("missCost=")[2] or MISS_COST)


def _cell(row: Row, score: Score | None) -> str:
    """A schedule is told by its family alone: it is long, and of this trace."""
    if score is None:
        return ""
    return f"{_figures(row, score)}, `{score.family if score.family in reach.KNOWING else score.policy}`"


def _figures(row: Row, score: Score) -> str:
    found = f"{score.windows:.1%} of windows" if row.by_windows and score.windows is not None else None
    return f"{found or f'{score.offered.value:.1%}'} at {score.gpu_hours.value:.2f}"


def _least(place: Judged) -> str:
    """Rounded down, as it is a bound."""
    return "-" if place.least is None else f"{math.floor(100 * place.least) / 100:.2f}"


def _cheapest(scores: Sequence[Score]) -> Score | None:
    return min(scores, key=lambda one: (one.gpu_hours.value, -one.offered.value), default=None)


def _best(place: Judged, scores: Sequence[Score], most_hours: float = math.inf) -> Score | None:
    def attains(one: Score) -> tuple[float, float]:
        return (one.windows or 0.0 if ROWS[place.row].by_windows else 0.0), one.offered.value

    return max([one for one in scores if one.gpu_hours.value <= most_hours], key=attains, default=None)


def _as_good(place: Judged, own: Score, scores: Sequence[Score]) -> Score | None:
    row = ROWS[place.row]
    return _cheapest([one for one in scores if reach.as_good(row, own.point, one.point)])


def _fleet(place: Judged, own: Score) -> Score | None:
    return _as_good(place, own, [one for one in place.scores if one.family == "static"])


def _peer(place: Judged, own: Score) -> Score | None:
    return _as_good(place, own, _peers(place))


def _affordable(place: Judged, own: Score) -> Score | None:
    return _best(place, _peers(place), own.gpu_hours.value)


def _follower(place: Judged, own: Score) -> Score | None:
    followers = [one for one in place.scores if one.family == "follower"]
    return _best(place, followers, own.gpu_hours.value)


def _knowing(place: Judged, own: Score) -> Score | None:
    by_windows = ROWS[place.row].by_windows
    schedules = [one for one in place.scores if one.family in reach.KNOWING]
    good = [one for one in schedules if (reach.keeps(one) if by_windows else one.offered.value >= reach.KEEPS)]
    return _cheapest(good) or _best(place, schedules)


def _peers(place: Judged) -> list[Score]:
    return [one for one in place.scores if one.family not in _YARDSTICKS]


_COLUMNS: Final[Mapping[str, Callable[[Judged, Score], Score | None]]] = {
    "constant fleet as good": _fleet,
    "peer as good": _peer,
    "peer at no more cost": _affordable,
    "follower at no more cost": _follower,
    "knows the future": _knowing,
}


def _drawn(one: Judged) -> bool:
    return one.plant == 1.0 and len(one.scores) >= _DRAWN
