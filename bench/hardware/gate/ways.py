"""Where the time of first tokens went: before an engine's step, in its steps, and after.

    python -m bench.hardware.gate.ways bench/hardware/data/h100-8b-gate c02.cap160.200 --cap 160

Problem: clients know when a first token came, the engine's log when a step was composed and done, and neither names the
other's requests.
Idea: both count from one clock, and a step says how many tokens of how many prompts it read. The prompts that add up to
just that, of those that had been sent and had no first token yet, soonest first, are the step's. One that does not fit
into what is left of a step is read on in the next. Under a constant cap it is known from the clients alone when each
request was let go (first come first served), so that what lies before the step is the host's.
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

from bench.hardware import fit, keep

BUDGET: Final = 8192
_FULL: Final = BUDGET - 40  # tokens of a step to which no chunk was added any more
_WINDOWS: Final = (3, 7, 12)  # requests beyond a step's own that are looked at
_LATE_S: Final = 2e-3  # that clocks and logs may differ by


@dataclass
class Way:
    """One answered request; times of the one clock, s. earlier_s: of the composition before its first step's, which it
    did not reach or came too late for."""

    sent_s: float
    prompt: int
    first_s: float
    last_s: float
    let_go_s: float = 0.0
    earlier_s: float = 0.0
    composed_s: float = 0.0
    done_s: float | None = None


@dataclass
class _Step:
    composed_s: float
    done_s: float
    earlier_s: float
    prompts: int
    tokens: int
    full: bool
    ways: list[Way] = field(default_factory=list)


def ways(document: dict[str, Any]) -> list[Way]:
    """The answered requests of a run, by their first tokens."""
    found = []
    for row in document["requests"]:
        if row["ok"]:
            sent_s = document["start"] + row["at_s"] + row["late_s"]
            found.append(Way(sent_s, row["prompt"], sent_s + row["first_s"], sent_s + row["last_s"]))
    return sorted(found, key=lambda way: way.first_s)


def steps(log: dict[str, fit.Floats], begin_s: float, end_s: float) -> list[_Step]:
    """Steps that read prompts, composed between these."""
    earlier = np.concatenate(([-np.inf], log["t_sched"][:-1]))
    columns = (log["t_sched"], log["t_out"], earlier, log["npre"], log["pretok"], log["ndec"])
    return [
        _Step(composed, done, before, int(prompts), int(tokens), tokens + decoding >= _FULL)
        for composed, done, before, prompts, tokens, decoding in zip(*columns, strict=True)
        if prompts and begin_s <= composed <= end_s
    ]


def match(mine: list[Way], log: dict[str, fit.Floats]) -> None:
    """Fills in each request's steps, where they are found."""
    known = steps(log, min(way.sent_s for way in mine), max(way.first_s for way in mine))
    left = list(mine)
    rest: tuple[Way, int] | None = None
    for number, step in enumerate(known):
        prompts, tokens, ended = step.prompts, step.tokens, []
        if rest is not None:
            prompts, tokens, ended = prompts - 1, tokens - rest[1], [rest[0]]
        whole, rest = _read(left, step, prompts, tokens, known[number + 1] if number + 1 < len(known) else None)
        for way in whole + ([rest[0]] if rest else []):
            way.earlier_s, way.composed_s = step.earlier_s, step.composed_s
            left.remove(way)
        for way in ended + whole:
            way.done_s = step.done_s


def _read(
    left: list[Way], step: _Step, prompts: int, tokens: int, following: _Step | None
) -> tuple[list[Way], tuple[Way, int] | None]:
    """Those that the step read whole, and the one that it began, with what is left of it."""
    if not prompts:
        return [], None
    able = [way for way in left if way.sent_s <= step.composed_s + _LATE_S and way.first_s >= step.done_s - _LATE_S]
    for wider in _WINDOWS:
        near = able[: prompts + wider]
        if step.full and following is not None:
            for whole, part, rest in _begun(near, prompts, tokens):
                if _fits(able, following, rest, {id(way) for way in (*whole, part)}):
                    return list(whole), (part, rest)
        for found in _whole(near, prompts, tokens):
            return list(found), None
    return [], None


def _whole(near: Sequence[Way], prompts: int, tokens: int) -> Iterator[tuple[Way, ...]]:
    return (some for some in combinations(near, prompts) if sum(way.prompt for way in some) == tokens)


def _begun(near: Sequence[Way], prompts: int, tokens: int) -> Iterator[tuple[tuple[Way, ...], Way, int]]:
    for whole in combinations(near, prompts - 1):
        part = tokens - sum(way.prompt for way in whole)
        if part > 0:
            for way in near:
                if way.prompt > part and way not in whole:
                    yield whole, way, way.prompt - part


def _fits(able: Sequence[Way], following: _Step, rest: int, taken: set[int]) -> bool:
    """Whether the next step can have begun with so many tokens."""
    prompts, tokens = following.prompts - 1, following.tokens - rest
    if tokens < 0 or (not prompts) != (not tokens):
        return False
    near = [way for way in able if id(way) not in taken][: prompts + _WINDOWS[1]]
    return following.full or not prompts or next(_whole(near, prompts, tokens), None) is not None


def let_go(mine: Sequence[Way], cap: int) -> None:
    """Fills in when each was let go by a constant cap, first come first served."""
    inside: list[float] = []
    for way in sorted(mine, key=lambda way: way.sent_s):
        at_s = way.sent_s
        while inside and inside[0] <= at_s:
            heapq.heappop(inside)
        if len(inside) >= cap:
            at_s = max(at_s, heapq.heappop(inside))
        way.let_go_s = at_s
        heapq.heappush(inside, way.last_s)


def read(folder: Path, name: str, cap: int | None) -> tuple[float, list[Way]]:
    """A run's first instant, and those of its answered requests that were found in steps; without a cap let go when
    sent. Of few steps nothing adds up, since a prompt of theirs was taken for another step's."""
    document = keep.requests(folder / f"{name}.requests.json.gz")
    mine = ways(document)
    match(mine, fit.steps(folder / "engine.steps.csv.gz"))
    let_go(mine, len(mine) if cap is None else cap)
    return document["start"], [way for way in mine if way.done_s is not None]


def parts(mine: Sequence[Way]) -> dict[str, fit.Floats]:
    """ms of each: from being let go to the composition of the first step; of that, for certain outside of the engine's
    core, which took up no request at the composition before; in steps; from the last step's end to the client."""
    rows = [
        (
            way.composed_s - way.let_go_s,
            max(0.0, way.earlier_s - way.let_go_s),
            (way.done_s or way.composed_s) - way.composed_s,
            way.first_s - (way.done_s or way.composed_s),
        )
        for way in mine
    ]
    return dict(zip(("before", "of it outside", "in steps", "after"), 1e3 * np.array(rows).T, strict=True))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.gate.ways", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run", help="the name of its requests' file, without the ending")
    parser.add_argument("--cap", type=int, help="requests in flight, for a run under a cap")
    given = parser.parse_args(words)
    _, mine = read(given.folder, given.run, given.cap)
    print(f"{len(mine)} requests\n\n| ms | mean | p50 | p95 | p99 |\n|---|---|---|---|---|")
    for name, values in parts(mine).items():
        cells = (np.mean(values), *np.percentile(values, (50, 95, 99)))
        print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
