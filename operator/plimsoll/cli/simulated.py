"""What runs came to, for people: a table on the terminal, or one HTML page with pictures over one axis of time."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.cli import page
from plimsoll.cli.output import NONE, Screen, duration, table
from plimsoll.cli.picture import Line, Panel, Points, draw
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.sim.timeline import Moment

_SHARES: Final = ("attainment_offered", "attainment_admitted", "attainment_tokens", "windows_met", "shed_share")
_APART: Final = ("policy", "slo", "replica_seconds")  # not rows of the table
_CUT: Final = 3.0  # times the target: what is beyond it is not drawn


@dataclass(frozen=True)
class Run:
    """One policy's run. replicas: of each tier, (moment, wanted, ready) wherever one of them changed."""

    summary: Mapping[str, Any]
    moments: Sequence[Moment]
    replicas: Mapping[Role, Sequence[tuple[float, int, int]]]


def rows(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Summaries side by side, a column each; every figure has a row, however deep it lies."""
    columns = [dict(_figures(one)) for one in found]
    figures = [[key, *(_cell(key, one[key]) for one in columns)] for key in columns[0]]
    return [["policy", *(str(one["policy"]) for one in found)], *figures]


def _figures(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each figure with all the keys that lead to it."""
    for key, value in summary.items():
        if key in _APART:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", figure) for inner, figure in _figures(value))
        else:
            yield key, value


def shown(found: Sequence[Mapping[str, Any]], screen: Screen) -> list[str]:
    """The table on a terminal."""
    return table(rows(found), screen)


def report(runs: Sequence[Run], slo: Slo | None, title: str) -> str:
    """The page."""
    head, *figures = rows([run.summary for run in runs])
    promise = "No promise is made." if slo is None else _promise(slo)
    parts = [
        ("Over time", draw(list(_panels(runs, slo)), max(1.0, float(runs[0].summary["length_s"])))),
        ("Figures", f"<p>{html.escape(promise)}</p>{page.table(head, figures)}"),
    ]
    return page.page(title, parts)


def _promise(slo: Slo) -> str:
    words = []
    if slo.ttft_s is not None:
        more = f" and {duration(slo.ttft_per_1k_tokens_s)} for each 1,000 prompt tokens"
        words.append(f"first token within {duration(slo.ttft_s)}{more if slo.ttft_per_1k_tokens_s else ''}")
    if slo.tpot_s is not None:
        words.append(f"each further one within {duration(slo.tpot_s)}")
    if slo.e2e_s is not None:
        words.append(f"the whole answer within {duration(slo.e2e_s)}")
    gaps = "" if slo.itl_s is None else f" 99 % of the gaps between tokens within {duration(slo.itl_s)}."
    return f"Promised to {slo.share:.0%} of requests: {', '.join(words)}.{gaps}"


def _cell(key: str, value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key in _SHARES:
        return f"{value:.2%}"
    if isinstance(value, list):  # of each phase
        return f"{sum(value)} in {len(value)} phase{'' if len(value) == 1 else 's'}"
    if key.endswith(("ttft_s", "tpot_s", "e2e_s", "itl_p99_s")):
        return duration(value)
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def _panels(runs: Sequence[Run], slo: Slo | None) -> Iterator[Panel]:
    first, alone = runs[0].moments, len(runs) == 1
    yield Panel("Offered, requests/s", [Line("requests", [(m.at_s, m.offered) for m in first], filled=True)])
    yield Panel(
        "Offered, tokens/s",
        [
            Line("prompt", [(m.at_s, m.prompt_tokens) for m in first]),
            Line("answer", [(m.at_s, m.output_tokens) for m in first], 1),
        ],
    )
    for role in runs[0].replicas:
        lines = []
        for place, run in enumerate(runs):
            counts = run.replicas[role]
            if alone:
                lines.append(Line("wanted", [(at_s, wanted) for at_s, wanted, _ in counts], 0, steps=True, dashed=True))
            lines.append(Line(_name(run, alone, "ready"), [(at_s, up) for at_s, _, up in counts], place, steps=True))
        yield Panel(f"Replicas: {role}", lines)
    ttft_s, tpot_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    yield _latency("TTFT, 95th percentile", runs, [[(m.at_s, m.ttft_s) for m in run.moments] for run in runs], ttft_s)
    yield _latency("TPOT, 95th percentile", runs, [[(m.at_s, m.tpot_s) for m in run.moments] for run in runs], tpot_s)
    shares: Sequence[tuple[str, Callable[[Moment], float]]] = (
        ("Refused", lambda moment: moment.shed_share),
        ("Missed, refused ones included", lambda moment: moment.missed_share),
    )
    for title, pick in shares:
        lines = [
            Line(_name(run, alone, "share"), [(m.at_s, 100.0 * pick(m)) for m in run.moments], place)
            for place, run in enumerate(runs)
        ]
        yield Panel(f"{title}, of what came", lines, unit=" %", least=10.0)


def _latency(
    title: str, runs: Sequence[Run], found: Sequence[Sequence[tuple[float, float | None]]], target_s: float | None
) -> Panel:
    """In ms; where there is a target its line, and what is far beyond it is cut off, or it could not be seen."""
    top_s = math.inf if target_s is None else _CUT * target_s
    lines = []
    for place, (run, line) in enumerate(zip(runs, found, strict=True)):
        points: Points = [(at_s, 1e3 * min(value, top_s)) for at_s, value in line if value is not None]
        lines.append(Line(_name(run, len(runs) == 1, "measured"), points, place))
    if target_s is not None:
        end_s = float(runs[0].summary["length_s"])
        lines.append(Line("promised", [(0.0, 1e3 * target_s), (end_s, 1e3 * target_s)], 4, dashed=True))
        title = f"{title}, cut at {_CUT:g} times the target"
    return Panel(title, lines, unit=" ms")


def _name(run: Run, alone: bool, word: str) -> str:
    """What a line is called: the policy, where there are several."""
    return word if alone else str(run.summary["policy"])
