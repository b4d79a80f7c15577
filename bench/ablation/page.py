"""The page: the effect of switching each mechanism off, and all mechanisms with their lines of code.

A difference is between runs without and with the mechanism at the same place and seed, so the noise of a place cancels
out. The mean over places is taken per seed; its confidence interval is Student's t over the seeds.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import plimsoll
from bench.ablation.mechanisms import MECHANISMS
from bench.ablation.runs import ROWS, AblationRunner, AblationTask
from bench.ablation.switches import Mechanism
from bench.ablation.verdicts import DELETIONS, NAMED_CASES, UNDECIDED, NamedCase
from bench.mismatch.cases import CASES
from bench.scoreboard.markdown import markdown
from bench.scoreboard.scoring import MeanWithError, mean_with_error

CORE: Final = Path(plimsoll.__file__).parent / "core"
_NONE: Final = "-"

_HEAD: Final = """# What each mechanism of the law earns

The law sizes and admits by demand, capacity and placement. Around these are learning loops and optional mechanisms.
What does each of them earn? Each one is switched off alone, with the same requests and the same noise, and the run is
compared with that of the whole law.

## Method

```bash
python -m bench ablation --screen                  # one seed of the rows and mismatches that take least time
python -m bench ablation --seeds 5 --processes 4   # twelve rows of the scoreboard and all mismatches
python -m bench ablation --places step-60 sigma --mechanisms standby trend --seeds 10
python -m bench.ablation.demand_series             # parts of the forecast, on days and bursts of demand alone
```

The product has no switches. The bench replaces one function or constant of a module for the time of a run
(`bench/ablation/*mechanisms.py`). A difference is *without the mechanism* less *whole law*, of the same place and seed:
if attainment falls without it, the mechanism earns that. Attainment is the share of all offered requests within the
SLO, in points. A mechanism that is never called in the run of the whole law, or only with the results that the
replacement has, cannot change that run, so it is not run again. Two runs *do not differ* if all their figures are the
same: requests within the SLO, percentiles, and on rows the replica counts of each minute. A screening does not run a
mechanism again in later places once it has shown a difference."""

_LIMITS: Final = """## Limits

- A mechanism without a difference here may have one on another load: pictures need prompts with pictures.
- Mechanisms are switched off one at a time. Two that do the same hide each other.
- Lines are those of the functions or modules that would go; what calls them is not counted."""


@dataclass(frozen=True)
class Difference:
    """Of a run without a mechanism from the whole law's. attainment: points. gpu_hours: percent. changes: decisions."""

    attainment: float
    gpu_hours: float
    changes: float
    differs: bool
    reached: bool


def difference(mechanism: str, whole: Mapping[str, Any], without: Mapping[str, Any]) -> Difference:
    """Of two runs of the same place and seed."""
    return Difference(
        100.0 * (without["attainment"] - whole["attainment"]),
        100.0 * (without["gpu_hours"] / whole["gpu_hours"] - 1.0) if whole["gpu_hours"] else 0.0,
        without["changes"] - whole["changes"],
        without["digest"] != whole["digest"],
        mechanism in whole["reached"],
    )


Differences = Mapping[str, Mapping[int, Difference]]  # by place and seed


def differences(runner: AblationRunner, mechanism: str, places: Sequence[str], seeds: int) -> Differences:
    """Those of the runs that are made."""
    found: dict[str, dict[int, Difference]] = {}
    for place in places:
        for seed in range(1, seeds + 1):
            whole = runner.figures(AblationTask(place, seed))
            without = runner.figures(AblationTask(place, seed, mechanism))
            if whole is not None and without is not None:
                found.setdefault(place, {})[seed] = difference(mechanism, whole, without)
    return found


def mean_difference(found: Differences, value: Callable[[Difference], float]) -> MeanWithError | None:
    """Mean over the places of each seed, then over the seeds that have all these places; None without any."""
    seeds = set.intersection(*(set(by_seed) for by_seed in found.values())) if found else set()
    if not seeds:
        return None
    return mean_with_error(
        statistics.fmean(value(by_seed[seed]) for by_seed in found.values()) for seed in sorted(seeds)
    )


# -------------------------------------------------------------------- lines of code


def count_lines(code: Iterable[str]) -> int:
    """Lines of these files below `core`, or of `file:name` in them. Raises KeyError for a name that is not there."""
    whole = {one for one in code if ":" not in one}
    parts = (one for one in code if ":" in one and one.partition(":")[0] not in whole)
    return sum(len((CORE / one).read_text().splitlines()) for one in whole) + sum(map(_part_lines, parts))


def _part_lines(part: str) -> int:
    file, _, name = part.partition(":")
    first, last = _definitions(CORE / file)[name]
    return last - first + 1


@cache
def _definitions(path: Path) -> Mapping[str, tuple[int, int]]:
    def walk(nodes: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                yield prefix + node.name, (first, node.end_lineno or first)
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return dict(walk(ast.parse(path.read_text()).body, ""))


# -------------------------------------------------------------------- the page


def render(runner: AblationRunner, places: Sequence[str], seeds: int, names: Sequence[str]) -> str:
    """The whole page, of the runs that are made."""
    found = {name: differences(runner, name, places, seeds) for name in names}
    parts = [
        _HEAD,
        "\n".join(("## What was measured", "", *_measured(runner, found, places, seeds))),
        "\n".join(("## Results", "", *_results(found, seeds))),
        "\n".join(("## Without any difference", "", *_unchanged(found))),
        "\n".join(("## Places where it differs", "", *_by_place(found))),
        "\n".join(("## Kept for a named case", "", *_named_cases(NAMED_CASES))),
        "\n".join(("## Undecided", "", *(_named_cases(UNDECIDED) if UNDECIDED else ["None."]))),
        "\n".join(("## Deleted", "", *_deletions())),
        "\n".join(("## The mechanisms", "", *_table(list(MECHANISMS.values())))),
        _LIMITS,
    ]
    return "\n\n".join(parts) + "\n"


def _measured(
    runner: AblationRunner, found: Mapping[str, Differences], places: Sequence[str], seeds: int
) -> Iterator[str]:
    possible = len(found) * len(places) * seeds
    made = sum(len(by_seed) for by_place in found.values() for by_seed in by_place.values())
    yield f"{seeds} {'seed' if seeds == 1 else 'seeds'}; {made} of {possible} comparisons are made, program"
    yield f"`{runner.program.with_operator}`. The page claims nothing about other places and seeds." + (
        " With one seed there is no confidence interval, and a difference may be chance." * (seeds == 1)
    )
    yield ""
    rows = []
    for place in places:
        compared = sum(len(by_place.get(place, ())) for by_place in found.values())
        whole = [runner.figures(AblationTask(place, seed)) for seed in range(1, seeds + 1)]
        known = [one for one in whole if one is not None]
        means = (
            (
                f"{100 * statistics.fmean(one['attainment'] for one in known):.2f} %",
                f"{statistics.fmean(one['gpu_hours'] for one in known):.3f}",
                f"{statistics.fmean(one['changes'] for one in known):.1f}",
            )
            if known
            else (_NONE,) * 3
        )
        kind, text = ("mismatch", CASES[place].description) if place in CASES else ("row", ROWS[place].description)
        rows.append((f"`{place}`", kind, text, *means, f"{compared} of {len(found) * seeds}"))
    yield from markdown(("place", "kind", "load", "attainment", "GPU-hours", "changes", "comparisons"), rows)


def _results(found: Mapping[str, Differences], seeds: int) -> Iterator[str]:
    yield "Without the mechanism, less the whole law; mean over the places that were compared" + (
        ", with the half width of the 95 % confidence interval." if seeds > 1 else "."
    )
    yield ""
    rows = []
    for name, by_place in found.items():
        every = [one for by_seed in by_place.values() for one in by_seed.values()]
        rows.append(
            (
                f"`{name}`",
                f"{sum(one.differs for one in every)} of {len(every)}",
                _cell(mean_difference(by_place, lambda one: one.attainment), "{:+.2f}"),
                _cell(mean_difference(by_place, lambda one: one.gpu_hours), "{:+.2f} %"),
                _cell(mean_difference(by_place, lambda one: one.changes), "{:+.1f}"),
                str(count_lines(MECHANISMS[name].code) or _NONE),
            )
        )
    yield from markdown(("mechanism", "runs that differ", "attainment", "GPU-hours", "changes", "lines"), rows)


def _cell(mean: MeanWithError | None, form: str) -> str:
    if mean is None:
        return _NONE
    text = form.format(mean.value)
    if mean.half_width is None:
        return text
    return f"{text} ± {mean.half_width:.2f}"


def _unchanged(found: Mapping[str, Differences]) -> Iterator[str]:
    """Mechanisms of which no run differs: those that were called, and those that never were."""
    called, never = [], []
    for name, by_place in found.items():
        every = [one for by_seed in by_place.values() for one in by_seed.values()]
        if every and not any(one.differs for one in every):
            places = [place for place, by_seed in by_place.items() if any(one.reached for one in by_seed.values())]
            lines = count_lines(MECHANISMS[name].code)
            if places:
                called.append((f"`{name}`", str(lines or _NONE), ", ".join(f"`{place}`" for place in places)))
            else:
                never.append((f"`{name}`", str(lines or _NONE), f"{len(by_place)}"))
    yield "Called, and no run differs:"
    yield ""
    yield from markdown(("mechanism", "lines", "called in"), called) if called else ("None.",)
    yield ""
    yield "Never called in any of these runs, or only with the results that the switch has:"
    yield ""
    yield from markdown(("mechanism", "lines", "places"), never) if never else ("None.",)


def _by_place(found: Mapping[str, Differences]) -> Iterator[str]:
    rows = [
        (
            f"`{name}`",
            f"`{place}`",
            f"{sum(one.differs for one in by_seed.values())} of {len(by_seed)}",
            _cell(mean_with_error(one.attainment for one in by_seed.values()), "{:+.2f}"),
            _cell(mean_with_error(one.gpu_hours for one in by_seed.values()), "{:+.2f} %"),
            _cell(mean_with_error(one.changes for one in by_seed.values()), "{:+.1f}"),
        )
        for name, by_place in found.items()
        for place, by_seed in by_place.items()
        if any(one.differs for one in by_seed.values())
    ]
    head = ("mechanism", "place", "seeds that differ", "attainment", "GPU-hours", "changes")
    yield from markdown(head, rows) if rows else ("None.",)


def _named_cases(cases: Sequence[NamedCase]) -> Iterator[str]:
    yield "Figures are those without the mechanism, or the difference from the whole law."
    yield ""
    yield from markdown(("mechanism", "case", "without it"), [(f"`{one.name}`", *one[1:]) for one in cases])


def _deletions() -> Iterator[str]:
    yield "Without the mechanism, less with it. The runs after a deletion equal those with the switch."
    yield ""
    rows = [(f"`{one.name}`", one.did, str(one.lines), one.shown) for one in DELETIONS]
    yield from markdown(("mechanism", "what it did", "lines", "without it"), rows)


def _table(mechanisms: Sequence[Mechanism]) -> Iterator[str]:
    yield "Paths are below `operator/plimsoll/core`."
    yield ""
    rows = []
    for one in mechanisms:
        off = "; ".join(f"`{switch.label}` {switch.replacement.says}" for switch in one.switches)
        modules = dict.fromkeys(
            [part.partition(":")[0] for part in one.code]
            or [f"{switch.module.replace('.', '/')}.py" for switch in one.switches]
        )
        lines = count_lines(one.code)
        rows.append(
            (f"`{one.name}`", one.does, ", ".join(f"`{path}`" for path in modules), str(lines or "a constant"), off)
        )
    yield from markdown(("mechanism", "what it does", "code", "lines", "switched off"), rows)
