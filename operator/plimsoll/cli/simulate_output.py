"""Results of simulation runs: a table for the terminal, or an HTML page with charts."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from plimsoll.cli import html_report
from plimsoll.cli.output import MISSING, Screen, format_duration, format_duration_cell, format_table
from plimsoll.cli.svg_chart import Panel, PlotPoints, Series, draw
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.timeline import TimelinePoint

_SHARE_KEYS: Final = ("attainment_offered", "attainment_admitted", "attainment_tokens", "windows_met", "shed_share")
_OMITTED_KEYS: Final = ("policy", "slo", "replica_seconds")  # keys without a row
_CUTOFF_RATIO: Final = 3.0  # charts are cut at this multiple of the target


@dataclass(frozen=True)
class PolicyRun:
    """Run of one policy. replicas: per tier, (time in s, desired, ready) at each change."""

    summary: Mapping[str, Any]
    points: Sequence[TimelinePoint]
    replicas: Mapping[Role, Sequence[tuple[float, int, int]]]


def summary_rows(summaries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table with a column per summary and a row per figure, including nested figures."""
    columns = [dict(_flatten(one)) for one in summaries]
    figures = [[key, *(_format_cell(key, one[key]) for one in columns)] for key in columns[0]]
    return [["policy", *(str(one["policy"]) for one in summaries)], *figures]


def _flatten(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each figure with its dotted key."""
    for key, value in summary.items():
        if key in _OMITTED_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", figure) for inner, figure in _flatten(value))
        else:
            yield key, value


def table_lines(summaries: Sequence[Mapping[str, Any]], screen: Screen) -> list[str]:
    """Return the table as lines of text."""
    return format_table(summary_rows(summaries), screen)


def html_page(runs: Sequence[PolicyRun], slo: Slo | None, title: str) -> str:
    """Return the HTML page."""
    head, *figures = summary_rows([run.summary for run in runs])
    slo_text = "No SLO is set." if slo is None else _slo_sentence(slo)
    parts = [
        ("Over time", draw(list(_build_panels(runs, slo)), max(1.0, float(runs[0].summary["length_s"])))),
        ("Figures", f"<p>{html.escape(slo_text)}</p>{html_report.render_table(head, figures)}"),
    ]
    return html_report.render_page(title, parts)


def _slo_sentence(slo: Slo) -> str:
    clauses = []
    if slo.ttft_s is not None:
        per_prompt = f" plus {format_duration(slo.ttft_per_1k_tokens_s)} per 1,000 prompt tokens"
        clauses.append(f"TTFT within {format_duration(slo.ttft_s)}{per_prompt if slo.ttft_per_1k_tokens_s else ''}")
    if slo.tpot_s is not None:
        clauses.append(f"TPOT within {format_duration(slo.tpot_s)}")
    if slo.e2e_s is not None:
        clauses.append(f"end-to-end latency within {format_duration(slo.e2e_s)}")
    itl = "" if slo.itl_s is None else f" p99 inter-token latency within {format_duration(slo.itl_s)}."
    return f"SLO for {slo.share:.0%} of requests: {', '.join(clauses)}.{itl}"


def _format_cell(key: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key in _SHARE_KEYS:
        return f"{value:.2%}"
    if isinstance(value, list):  # one value per phase
        return f"{sum(value)} in {len(value)} phase{'' if len(value) == 1 else 's'}"
    if key.endswith(("ttft_s", "tpot_s", "e2e_s", "itl_p99_s")):
        return format_duration_cell(value)
    return f"{Decimal(format_number(value)):,f}" if isinstance(value, float) else f"{value:,}"


def _build_panels(runs: Sequence[PolicyRun], slo: Slo | None) -> Iterator[Panel]:
    first, single = runs[0].points, len(runs) == 1
    yield Panel("Arrival rate, requests/s", [Series("requests", [(m.at_s, m.offered) for m in first], is_filled=True)])
    yield Panel(
        "Arrival rate, tokens/s",
        [
            Series("prompt", [(m.at_s, m.prompt_tokens) for m in first]),
            Series("output", [(m.at_s, m.output_tokens) for m in first], 1),
        ],
    )
    for role in runs[0].replicas:
        lines = []
        for index, run in enumerate(runs):
            counts = run.replicas[role]
            if single:
                lines.append(
                    Series("desired", [(at_s, desired) for at_s, desired, _ in counts], 0, is_step=True, is_dashed=True)
                )
            lines.append(
                Series(_series_name(run, single, "ready"), [(at_s, up) for at_s, _, up in counts], index, is_step=True)
            )
        yield Panel(f"Replicas: {role}", lines)
    ttft_s, tpot_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    yield _latency_panel(
        "TTFT, 95th percentile", runs, [[(m.at_s, m.ttft_s) for m in run.points] for run in runs], ttft_s
    )
    yield _latency_panel(
        "TPOT, 95th percentile", runs, [[(m.at_s, m.tpot_s) for m in run.points] for run in runs], tpot_s
    )
    shares: Sequence[tuple[str, Callable[[TimelinePoint], float]]] = (
        ("Rejected", lambda moment: moment.shed_share),
        ("Missed or rejected", lambda moment: moment.missed_share),
    )
    for title, select in shares:
        lines = [
            Series(_series_name(run, single, "share"), [(m.at_s, 100.0 * select(m)) for m in run.points], index)
            for index, run in enumerate(runs)
        ]
        yield Panel(f"{title}, share of arrivals", lines, unit=" %", min_axis_max=10.0)


def _latency_panel(
    title: str,
    runs: Sequence[PolicyRun],
    series: Sequence[Sequence[tuple[float, float | None]]],
    target_s: float | None,
) -> Panel:
    """Return a panel in ms with the target; values far above the target are cut, so that it stays visible."""
    cutoff_s = math.inf if target_s is None else _CUTOFF_RATIO * target_s
    lines = []
    for index, (run, values) in enumerate(zip(runs, series, strict=True)):
        points: PlotPoints = [(at_s, 1e3 * min(value, cutoff_s)) for at_s, value in values if value is not None]
        lines.append(Series(_series_name(run, len(runs) == 1, "measured"), points, index))
    if target_s is not None:
        end_s = float(runs[0].summary["length_s"])
        lines.append(Series("target", [(0.0, 1e3 * target_s), (end_s, 1e3 * target_s)], 4, is_dashed=True))
        title = f"{title}, cut at {format_number(_CUTOFF_RATIO)} times the target"
    return Panel(title, lines, unit=" ms")


def _series_name(run: PolicyRun, single: bool, label: str) -> str:
    """Return the name of a series: the policy if there are several."""
    return label if single else str(run.summary["policy"])
