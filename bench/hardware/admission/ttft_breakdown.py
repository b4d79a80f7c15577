"""Breakdown of TTFT: time before an engine's step, in its steps, and after.

    python -m bench.hardware.admission.ttft_breakdown bench/hardware/data/h100-8b-gate c02.cap160.200 --cap 160

Problem: clients know when a first token came, the engine's log when a step was composed and done, and neither
identifies the other's requests.

Idea: both use one clock, and a step records how many tokens of how many prompts it read. Of the prompts that had been
sent and had no first token, those that add up to exactly that, earliest first, are the step's. One that does not fit
into the rest of a step continues in the next. Under a constant cap the clients alone show when each request was
released (first come, first served), so the time before the step is the host's.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import archive, fit_step_model

STEP_BUDGET_TOKENS: Final = 8192
_FULL_STEP_TOKENS: Final = STEP_BUDGET_TOKENS - 40  # tokens of a step to which no chunk was added any more
_WINDOWS: Final = (3, 7, 12)  # requests beyond a step's own that are looked at
_CLOCK_TOLERANCE_S: Final = 2e-3  # that clocks and logs may differ by


@dataclass
class RequestTimeline:
    """One completed request; times of one clock, s.

    previous_composed_s: composition of the step before the request's first one, which the request did not reach in
    time.
    """

    sent_s: float
    prompt: int
    first_s: float
    last_s: float
    released_s: float = 0.0
    previous_composed_s: float = 0.0
    composed_s: float = 0.0
    done_s: float | None = None


@dataclass
class _Step:
    composed_s: float
    done_s: float
    previous_composed_s: float
    prompts: int
    tokens: int
    full: bool
    timelines: list[RequestTimeline] = field(default_factory=list)


def load_timelines(document: dict[str, Any]) -> list[RequestTimeline]:
    """The answered requests of a run, by their first tokens."""
    timelines = []
    for row in document["requests"]:
        if row["ok"]:
            sent_s = document["start"] + row["at_s"] + row["late_s"]
            timelines.append(RequestTimeline(sent_s, row["prompt"], sent_s + row["first_s"], sent_s + row["last_s"]))
    return sorted(timelines, key=lambda way: way.first_s)


def prefill_steps(log: dict[str, fit_step_model.Floats], begin_s: float, end_s: float) -> list[_Step]:
    """Steps that read prompts, composed between these."""
    previous_composed = np.concatenate(([-np.inf], log["t_sched"][:-1]))
    columns = (log["t_sched"], log["t_out"], previous_composed, log["npre"], log["pretok"], log["ndec"])
    return [
        _Step(composed, done, before, int(prompts), int(tokens), tokens + decoding >= _FULL_STEP_TOKENS)
        for composed, done, before, prompts, tokens, decoding in zip(*columns, strict=True)
        if prompts and begin_s <= composed <= end_s
    ]


def match(timelines: list[RequestTimeline], log: dict[str, fit_step_model.Floats]) -> None:
    """Fills in each request's steps, where they are found."""
    known = prefill_steps(
        log, min(timeline.sent_s for timeline in timelines), max(timeline.first_s for timeline in timelines)
    )
    candidates = list(timelines)
    partial_tokens: tuple[RequestTimeline, int] | None = None
    for number, step in enumerate(known):
        prompts, tokens, ended = step.prompts, step.tokens, []
        if partial_tokens is not None:
            prompts, tokens, ended = prompts - 1, tokens - partial_tokens[1], [partial_tokens[0]]
        complete, partial_tokens = _match_step(
            candidates, step, prompts, tokens, known[number + 1] if number + 1 < len(known) else None
        )
        for timeline in complete + ([partial_tokens[0]] if partial_tokens else []):
            timeline.previous_composed_s, timeline.composed_s = step.previous_composed_s, step.composed_s
            candidates.remove(timeline)
        for timeline in ended + complete:
            timeline.done_s = step.done_s


def _match_step(
    candidates: list[RequestTimeline], step: _Step, prompts: int, tokens: int, following: _Step | None
) -> tuple[list[RequestTimeline], tuple[RequestTimeline, int] | None]:
    """Those that the step read whole, and the one that it began, with what is left of it."""
    if not prompts:
        return [], None
    eligible = [
        timeline
        for timeline in candidates
        if timeline.sent_s <= step.composed_s + _CLOCK_TOLERANCE_S
        and timeline.first_s >= step.done_s - _CLOCK_TOLERANCE_S
    ]
    for window in _WINDOWS:
        nearest = eligible[: prompts + window]
        if step.full and following is not None:
            for complete, partial, remaining in _partial_prompt(nearest, prompts, tokens):
                if _fits(eligible, following, remaining, {id(timeline) for timeline in (*complete, partial)}):
                    return list(complete), (partial, remaining)
        for matches in _complete_prompts(nearest, prompts, tokens):
            return list(matches), None
    return [], None


def _complete_prompts(
    nearest: Sequence[RequestTimeline], prompts: int, tokens: int
) -> Iterator[tuple[RequestTimeline, ...]]:
    return (
        subset for subset in combinations(nearest, prompts) if sum(timeline.prompt for timeline in subset) == tokens
    )


def _partial_prompt(
    nearest: Sequence[RequestTimeline], prompts: int, tokens: int
) -> Iterator[tuple[tuple[RequestTimeline, ...], RequestTimeline, int]]:
    for complete in combinations(nearest, prompts - 1):
        partial = tokens - sum(timeline.prompt for timeline in complete)
        if partial > 0:
            for timeline in nearest:
                if timeline.prompt > partial and timeline not in complete:
                    yield complete, timeline, timeline.prompt - partial


def _fits(eligible: Sequence[RequestTimeline], following: _Step, remaining: int, taken: set[int]) -> bool:
    """Whether the next step can have begun with so many tokens."""
    prompts, tokens = following.prompts - 1, following.tokens - remaining
    if tokens < 0 or (not prompts) != (not tokens):
        return False
    nearest = [timeline for timeline in eligible if id(timeline) not in taken][: prompts + _WINDOWS[1]]
    return following.full or not prompts or next(_complete_prompts(nearest, prompts, tokens), None) is not None


def assign_release_times(timelines: Sequence[RequestTimeline], cap: int) -> None:
    """Fills in when each was let go by a constant cap, first come first served."""
    inside: list[float] = []
    for timeline in sorted(timelines, key=lambda timeline: timeline.sent_s):
        at_s = timeline.sent_s
        while inside and inside[0] <= at_s:
            heapq.heappop(inside)
        if len(inside) >= cap:
            at_s = max(at_s, heapq.heappop(inside))
        timeline.released_s = at_s
        heapq.heappush(inside, timeline.last_s)


def load(folder: Path, name: str, cap: int | None) -> tuple[float, list[RequestTimeline]]:
    """A run's first instant, and those of its answered requests that were found in steps; without a cap let go when
    sent. Of few steps nothing adds up, since a prompt of theirs was taken for another step's."""
    document = archive.read_run(folder / f"{name}.requests.json.gz")
    timelines = load_timelines(document)
    match(timelines, fit_step_model.read_steps(folder / "engine.steps.csv.gz"))
    assign_release_times(timelines, len(timelines) if cap is None else cap)
    return document["start"], [timeline for timeline in timelines if timeline.done_s is not None]


def ttft_parts(timelines: Sequence[RequestTimeline]) -> dict[str, fit_step_model.Floats]:
    """ms of each: from being let go to the composition of the first step; of that, for certain outside of the engine's
    core, which took up no request at the composition before; in steps; from the last step's end to the client."""
    rows = [
        (
            timeline.composed_s - timeline.released_s,
            max(0.0, timeline.previous_composed_s - timeline.released_s),
            (timeline.done_s or timeline.composed_s) - timeline.composed_s,
            timeline.first_s - (timeline.done_s or timeline.composed_s),
        )
        for timeline in timelines
    ]
    return dict(zip(("before", "of it outside", "in steps", "after"), 1e3 * np.array(rows).T, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.ttft_breakdown", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run", help="the name of its requests' file, without the ending")
    parser.add_argument("--cap", type=int, help="requests in flight, for a run under a cap")
    given = parser.parse_args(words)
    _, timelines = load(given.folder, given.run, given.cap)
    print(f"{len(timelines)} requests\n\n| ms | mean | p50 | p95 | p99 |\n|---|---|---|---|---|")
    for name, values in ttft_parts(timelines).items():
        cells = (np.mean(values), *np.percentile(values, (50, 95, 99)))
        print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
