"""The report of a demo: one JSON for programs, one HTML file for people, both made of the demo's lines and facts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from e2e.demo import figures as f
from e2e.demo.criteria import Criterion, Facts
from e2e.demo.observer import OperatorMessage
from e2e.demo.reactive_baseline import Pair
from e2e.demo.records import ReplicaSample, RequestLine
from plimsoll.cli.html_report import render_table
from plimsoll.cli.svg_chart import Panel, Series, draw

CHART_STEP_S: Final = 5.0
WINDOW_S: Final = 30.0
LOAD_WINDOW_S: Final = 10.0
_DIGITS: Final = 4


def summary(requests: Sequence[RequestLine], replicas: Sequence[ReplicaSample], facts: Facts) -> dict[str, Any]:
    """The figures of one run, which is everything in the report that follows from the lines."""
    targets = facts.targets
    attainment = f.attainment(requests, targets)
    good_requests, good_tokens = f.goodput(requests, targets, facts.end_s)
    replica_seconds = f.replica_seconds(replicas, facts.end_s)
    return {
        **asdict(attainment),
        "attainment_offered": round(attainment.of_offered, _DIGITS),
        "attainment_admitted": round(attainment.of_admitted, _DIGITS),
        "attainment_by_class": {
            name: round(f.attainment([r for r in requests if r.request_class == name], targets).of_offered, _DIGITS)
            for name in sorted({r.request_class for r in requests})
        },
        "goodput_requests_per_s": round(good_requests, _DIGITS),
        "goodput_output_tokens_per_s": round(good_tokens, 1),
        "ttft_p50_s": f.nearest_rank((r.ttft_s for r in requests), 50),
        "ttft_p95_s": f.nearest_rank((r.ttft_s for r in requests), 95),
        "tpot_p50_s": f.nearest_rank((r.tpot_s for r in requests), 50),
        "tpot_p95_s": f.nearest_rank((r.tpot_s for r in requests), 95),
        "replica_seconds": {tier: round(value, 1) for tier, value in replica_seconds.items()},
        "replica_seconds_total": round(sum(replica_seconds.values()), 1),
        "changes": [asdict(change) for change in f.replica_changes(replicas)],
    }


def facts_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON."""
    return asdict(facts)


def facts_from(body: dict[str, Any]) -> Facts:
    """The facts of a report.json."""
    return Facts(
        targets=f.Targets(**body["targets"]),
        most=dict(body["most"]),
        end_s=body["end_s"],
        constant=f.TimeSpan(**body["constant"]),
        kills=tuple(f.TimeSpan(**kill) for kill in body["kills"]),
    )


def panels(requests: Sequence[RequestLine], replicas: Sequence[ReplicaSample], facts: Facts) -> list[Panel]:
    """Load, replicas, latency and shedding of one run."""
    marks = [(kill.begin_s, "kill") for kill in facts.kills]
    load = f.window_series(requests, facts.targets, facts.end_s, CHART_STEP_S, LOAD_WINDOW_S)
    seen = f.window_series(requests, facts.targets, facts.end_s, CHART_STEP_S, WINDOW_S)
    targets = facts.targets
    return [
        Panel(
            "Load: requests/s offered, and thousands of tokens/s",
            [
                Series("requests/s", [(figures.t_s, figures.offered_per_s) for figures in load], 0, is_filled=True),
                Series("prompt ktok/s", [(figures.t_s, figures.prompt_tokens_per_s / 1000) for figures in load], 1),
                Series("output ktok/s", [(figures.t_s, figures.output_tokens_per_s / 1000) for figures in load], 2),
            ],
            marks=marks,
        ),
        Panel("Replicas: wanted (dashed) and ready", _replica_lines(replicas), marks=marks),
        Panel(
            f"Latency: p{targets.percentile} over its target, {WINDOW_S:.0f} s",
            [
                Series(
                    f"TTFT / {targets.ttft_s:g} s",
                    [(figures.t_s, _ratio(figures.ttft_s, targets.ttft_s)) for figures in seen],
                    0,
                ),
                Series(
                    f"TPOT / {1000 * targets.tpot_s:g} ms",
                    [(figures.t_s, _ratio(figures.tpot_s, targets.tpot_s)) for figures in seen],
                    1,
                ),
                Series("target", [(0.0, 1.0), (facts.end_s, 1.0)], 4, is_dashed=True),
            ],
            min_axis_max=1.0,
            marks=marks,
        ),
        Panel(
            f"Shed and missed: % of what was sent in the last {LOAD_WINDOW_S:.0f} s",
            [
                Series("missed", [(figures.t_s, 100 * figures.missed_share) for figures in load], 1, is_filled=True),
                Series("shed", [(figures.t_s, 100 * figures.shed_share) for figures in load], 3),
            ],
            unit=" %",
            min_axis_max=10.0,
            marks=marks,
        ),
    ]


def _ratio(value: float | None, target: float) -> float:
    return math.nan if value is None else value / target


def _replica_lines(replicas: Sequence[ReplicaSample]) -> list[Series]:
    chart_lines = []
    for n, tier in enumerate(f.tier_names(replicas)):
        samples = f.tier_samples(replicas, tier)
        chart_lines.append(
            Series(
                f"{tier} wanted", [(sample.t_s, sample.desired) for sample in samples], n, is_step=True, is_dashed=True
            )
        )
        chart_lines.append(Series(f"{tier} ready", [(sample.t_s, sample.ready) for sample in samples], n, is_step=True))
    return chart_lines


def criteria_table(criteria_results: Sequence[Criterion]) -> str:
    """The criteria as a table."""
    rows = "".join(
        f'<tr><td class="{"yes" if criterion.holds else "no"}">{"holds" if criterion.holds else "fails"}</td>'
        f"<td>{html.escape(criterion.name)}</td><td>{html.escape(criterion.found)}</td></tr>"
        for criterion in criteria_results
    )
    return f"<table><tr><th></th><th>must hold</th><th>found</th></tr>{rows}</table>"


def figures_table(run: dict[str, Any]) -> str:
    """The figures of a run as a table."""
    plain = {key: value for key, value in run.items() if key != "changes"}
    return render_table(["figure", "value"], ((key.replace("_", " "), _format(value)) for key, value in plain.items()))


def _format(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "-" if value is None else value


def messages_table(messages: Sequence[OperatorMessage]) -> str:
    """Decisions or Events as a table."""
    return render_table(
        ["s", "what", "words"], ((f"{message.t_s:.0f}", message.what, message.words) for message in messages)
    )


def follower_table(pairs: Sequence[Pair]) -> str:
    """The followers' frontier as a table."""
    rows = (
        (f"{p.paid_s:.0f}", f"{p.attainment:.2%}", _setting_text(p.prefill), _setting_text(p.decode)) for p in pairs
    )
    return render_table(["replica-seconds", "attainment", "prefill follower", "decode follower"], rows)


def _setting_text(setting: Any) -> str:
    cap = "" if setting.cap is None else f", cap {setting.cap:g}"
    return (
        f"margin {setting.margin:g}, spare {setting.spare}, hold {setting.hold_s:.0f} s, "
        f"window {setting.window_s:.0f} s{cap}"
    )


def charts(
    requests: Sequence[RequestLine],
    replicas: Sequence[ReplicaSample],
    facts: Facts,
    bands: Sequence[tuple[float, float, str]],
) -> str:
    """The four panels of a run as SVG."""
    return draw(panels(requests, replicas, facts), facts.end_s, bands)
