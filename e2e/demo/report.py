"""The report of a demo: one JSON for programs, one HTML file for people, both made of the demo's lines and facts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from e2e.demo import figures as f
from e2e.demo.criteria import Criterion, Facts
from e2e.demo.followers import Pair
from e2e.demo.lines import Replicas, Request
from e2e.demo.watch import Told
from plimsoll.cli.page import table
from plimsoll.cli.picture import Line, Panel, draw

EVERY_S: Final = 5.0
WINDOW_S: Final = 30.0
LOAD_WINDOW_S: Final = 10.0
_DIGITS: Final = 4


def summary(requests: Sequence[Request], replicas: Sequence[Replicas], facts: Facts) -> dict[str, Any]:
    """The figures of one run, which is everything in the report that follows from the lines."""
    targets = facts.targets
    counted = f.attainment(requests, targets)
    good, good_tokens = f.goodput(requests, targets, facts.end_s)
    paid = f.replica_seconds(replicas, facts.end_s)
    return {
        **asdict(counted),
        "attainment_offered": round(counted.of_offered, _DIGITS),
        "attainment_admitted": round(counted.of_admitted, _DIGITS),
        "attainment_by_class": {
            name: round(f.attainment([r for r in requests if r.klass == name], targets).of_offered, _DIGITS)
            for name in sorted({r.klass for r in requests})
        },
        "goodput_requests_per_s": round(good, _DIGITS),
        "goodput_output_tokens_per_s": round(good_tokens, 1),
        "ttft_p50_s": f.percentile((r.ttft_s for r in requests), 50),
        "ttft_p95_s": f.percentile((r.ttft_s for r in requests), 95),
        "tpot_p50_s": f.percentile((r.tpot_s for r in requests), 50),
        "tpot_p95_s": f.percentile((r.tpot_s for r in requests), 95),
        "replica_seconds": {tier: round(value, 1) for tier, value in paid.items()},
        "replica_seconds_total": round(sum(paid.values()), 1),
        "changes": [asdict(change) for change in f.changes(replicas)],
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
        constant=f.Span(**body["constant"]),
        kills=tuple(f.Span(**kill) for kill in body["kills"]),
    )


def panels(requests: Sequence[Request], replicas: Sequence[Replicas], facts: Facts) -> list[Panel]:
    """Load, replicas, latency and shedding of one run."""
    marks = [(kill.begin_s, "kill") for kill in facts.kills]
    load = f.moments(requests, facts.targets, facts.end_s, EVERY_S, LOAD_WINDOW_S)
    seen = f.moments(requests, facts.targets, facts.end_s, EVERY_S, WINDOW_S)
    targets = facts.targets
    return [
        Panel(
            "Load: requests/s offered, and thousands of tokens/s",
            [
                Line("requests/s", [(m.t_s, m.offered_per_s) for m in load], 0, filled=True),
                Line("prompt ktok/s", [(m.t_s, m.prompt_tokens_per_s / 1000) for m in load], 1),
                Line("output ktok/s", [(m.t_s, m.output_tokens_per_s / 1000) for m in load], 2),
            ],
            marks=marks,
        ),
        Panel("Replicas: wanted (dashed) and ready", _replica_lines(replicas), marks=marks),
        Panel(
            f"Latency: p{targets.percentile} over its target, {WINDOW_S:.0f} s",
            [
                Line(f"TTFT / {targets.ttft_s:g} s", [(m.t_s, _ratio(m.ttft_s, targets.ttft_s)) for m in seen], 0),
                Line(
                    f"TPOT / {1000 * targets.tpot_s:g} ms", [(m.t_s, _ratio(m.tpot_s, targets.tpot_s)) for m in seen], 1
                ),
                Line("target", [(0.0, 1.0), (facts.end_s, 1.0)], 4, dashed=True),
            ],
            least=1.0,
            marks=marks,
        ),
        Panel(
            f"Shed and missed: % of what was sent in the last {LOAD_WINDOW_S:.0f} s",
            [
                Line("missed", [(m.t_s, 100 * m.missed_share) for m in load], 1, filled=True),
                Line("shed", [(m.t_s, 100 * m.shed_share) for m in load], 3),
            ],
            unit=" %",
            least=10.0,
            marks=marks,
        ),
    ]


def _ratio(value: float | None, target: float) -> float:
    return math.nan if value is None else value / target


def _replica_lines(replicas: Sequence[Replicas]) -> list[Line]:
    found = []
    for n, tier in enumerate(f.tiers(replicas)):
        own = f.of_tier(replicas, tier)
        found.append(Line(f"{tier} wanted", [(one.t_s, one.desired) for one in own], n, steps=True, dashed=True))
        found.append(Line(f"{tier} ready", [(one.t_s, one.ready) for one in own], n, steps=True))
    return found


def verdicts(found: Sequence[Criterion]) -> str:
    """The criteria as a table."""
    rows = "".join(
        f'<tr><td class="{"yes" if one.holds else "no"}">{"holds" if one.holds else "fails"}</td>'
        f"<td>{html.escape(one.name)}</td><td>{html.escape(one.found)}</td></tr>"
        for one in found
    )
    return f"<table><tr><th></th><th>must hold</th><th>found</th></tr>{rows}</table>"


def figures_table(run: dict[str, Any]) -> str:
    """The figures of a run as a table."""
    plain = {key: value for key, value in run.items() if key != "changes"}
    return table(["figure", "value"], ((key.replace("_", " "), _shown(value)) for key, value in plain.items()))


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return "-" if value is None else value


def told_table(told: Sequence[Told]) -> str:
    """Decisions or Events as a table."""
    return table(["s", "what", "words"], ((f"{one.t_s:.0f}", one.what, one.words) for one in told))


def follower_table(pairs: Sequence[Pair]) -> str:
    """The followers' frontier as a table."""
    rows = ((f"{p.paid_s:.0f}", f"{p.attainment:.2%}", _setting(p.prefill), _setting(p.decode)) for p in pairs)
    return table(["replica-seconds", "attainment", "prefill follower", "decode follower"], rows)


def _setting(one: Any) -> str:
    cap = "" if one.cap is None else f", cap {one.cap:g}"
    return f"margin {one.margin:g}, spare {one.spare}, hold {one.hold_s:.0f} s, window {one.window_s:.0f} s{cap}"


def pictures(
    requests: Sequence[Request], replicas: Sequence[Replicas], facts: Facts, bands: Sequence[tuple[float, float, str]]
) -> str:
    """The four panels of a run as SVG."""
    return draw(panels(requests, replicas, facts), facts.end_s, bands)
