"""The gate and a cap before a slow host's front end as it was seen: an H100's overload, played again in virtual time.

    python -m bench.hardware.gate.front [--scale 1 1.5] [--draws 6]

Problem: a fault that one host showed is not shown again at will, and the gate that is mended is to be held against it.
Idea: the lab's engine (`tests.core.admission_lab`) with the law that was fitted to this card, hot, and the requests as
they were sent, in virtual time. The gate has the limits that the operator told in that very run. What a request takes
outside of the engine, and what its first token and its end take back, is what it took those that were sent at that
second of the run under the cap, the only one where it is known (`ways`); each draw begins elsewhere in it. It stays as
it was, however the gate decides. --scale: so many times as long.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.hardware import keep
from bench.hardware.gate import ways
from bench.hardware.gate.runs import cap_seconds
from plimsoll.core.admission import Gate, Outcome, Request
from plimsoll.core.admission.gate import Outlook
from plimsoll.core.admission.limits import ClassPolicy, Limits
from plimsoll.core.knee import HTTP_S, HTTP_TOKEN_S
from plimsoll.core.latency import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from tests.core.admission_lab import CapPolicy, Engine, Front, GatePolicy, Job, run

DATA: Final = Path(__file__).parents[1] / "data" / "h100-8b-gate"
LINE, OVERLOAD, CAPPED, CAP = "c00.gate.100", "c01.gate.200", "c02.cap160.200", 160
LAW: Final = StepModel(6.491e-3, -1.539e-3, 2.227e-5, 8.507e-10, 9.754e-6, 4.428e-8)  # h100-8b, hot
PLACES: Final = EngineLimits(256, 462_944, 8192)
SLO: Final = Slo(0.95, 1.0, 0.0, 0.05)
WARM_S, WINDOW_S, LASTS_S = 6.0, 40.0, 46.0
_FILLED_S: Final = 4.0  # until then the run under the cap was not full
_REST_S: Final = 30.0
_TOLD: Final = ("goodput/s", "of those let in", "shed", "TTFT p50 / p95, ms", "TPOT p95, ms")


class Host:
    """What lay outside of the engine, second by second of the run under the cap."""

    def __init__(self) -> None:
        start_s, found = ways.read(DATA, CAPPED, CAP)
        core_s = HTTP_S + HTTP_TOKEN_S * 1000  # which the lab's engines have
        # It came to the core between two compositions: in their middle.
        before = sorted(
            (way.let_go_s - start_s, (way.composed_s - way.let_go_s + max(0.0, way.earlier_s - way.let_go_s)) / 2)
            for way in found
        )
        after = sorted((way.done_s - start_s, way.first_s - way.done_s) for way in found if way.done_s is not None)
        self._series = tuple(
            ([at for at, _ in series], [max(0.0, took - core_s) for _, took in series]) for series in (before, after)
        )

    def front(self, scale: float, from_s: float = 0.0, ahead_s: float = 0.0) -> Front:
        """A run that begins at from_s and, once full, is so far ahead of the run under the cap."""

        def took(now: float, running: int) -> tuple[float, float]:
            at = now - from_s
            if at >= _FILLED_S:
                at = _FILLED_S + (at - _FILLED_S + ahead_s) % (LASTS_S - _FILLED_S)
            before, after = (scale * values[max(0, bisect_right(times, at) - 1)] for times, values in self._series)
            return before, after

        return took


class Turns(CapPolicy):
    """The turnstile's cap: first come first served, each for half of what an idle engine would leave it."""

    def wake(self, now: float) -> list[tuple[Job, int]]:
        let_in: list[tuple[Job, int]] = []
        while self.queue and self.inflight and self.inflight[0] < self.cap:
            job = self.queue.popleft()
            alone_s = HTTP_S + LAW.base_s + (HTTP_TOKEN_S + LAW.prefill_token_s) * job.prompt
            late = now - job.arrived_s > cap_seconds(SLO, alone_s)
            job.outcome = Outcome.SHED_SATURATED if late else Outcome.ADMITTED
            if not late:
                self.inflight[0], self.where[job.id] = self.inflight[0] + 1, 0
                let_in.append((job, 0))
        return let_in


class Told(GatePolicy):
    """Clients say how long the answer will be, and limits are those that the operator told."""

    def __init__(self, told: list[tuple[float, Limits]]) -> None:
        super().__init__(Gate((ClassPolicy("chat", 0, SLO),), told[0][1], {}))
        self._limits = told

    def offer(self, job: Job, now: float) -> list[tuple[Job, int]]:
        id = f"{job.id}/{job.attempts}"
        job.attempts += 1
        self.jobs[id] = job
        asked = Request(id, job.klass, job.tenant, now, job.prompt, max_tokens=job.output)
        return self._take([self.gate.offer(asked, now)], now)

    def tick(self, now: float) -> None:
        limits = [limits for at, limits in self._limits if at <= now] or [self._limits[0][1]]
        self.gate.tick(now, Outlook(), limits[-1])
        self.gate.set_replicas({"0": limits[-1].batch}, now)


def told(start_s: float) -> list[tuple[float, Limits]]:
    """The limits of the run and when, from its first instant on."""
    names, found = {one.name for one in fields(Limits)}, []
    with gzip.open(DATA / "c.operator.jsonl.gz", "rt") as file:
        for line in map(json.loads, file):
            given = (line.get("admission") or {}).get("limits")
            if given:
                values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in names}
                found.append((line["monotonic_s"] - start_s, Limits(**values)))
    return found


def jobs(document: dict[str, Any], from_s: float) -> list[Job]:
    """The requests of a run as they were sent."""
    return [
        Job(
            f"{document['trace']}.{row['row']}", from_s + row["at_s"] + row["late_s"], row["prompt"], row["output"],
            target_s=SLO.ttft_s or 0.0,
        )
        for row in document["requests"]
    ]  # fmt: skip


def judged(mine: Sequence[Job], from_s: float) -> list[float]:
    """Goodput, share of those let in, shed, p50 and p95 of TTFT and p95 of TPOT in ms, of those counted."""
    counted = [job for job in mine if WARM_S <= job.arrived_s - from_s < WARM_S + WINDOW_S]
    let_in = [job for job in counted if job.admitted_s is not None]
    good = sum(job.good(SLO.tpot_s or 0.0) for job in counted)
    first = [1e3 * (job.first_s - job.arrived_s) for job in let_in if job.first_s is not None]
    pace = [1e3 * job.tpot_s for job in let_in]
    shares = [good / WINDOW_S, good / len(let_in), 1 - len(let_in) / len(counted)]
    return shares + [float(np.percentile(v, q)) for v, q in ((first, 50), (first, 95), (pace, 95))]


def played(host: Host, scale: float, draw: int, draws: int) -> dict[str, list[float]]:
    """One draw of all arms; the gate's runs follow each other as they did."""
    line, overload, capped = (keep.requests(DATA / f"{name}.requests.json.gz") for name in (LINE, OVERLOAD, CAPPED))
    later_s, ahead_s = overload["start"] - line["start"], draw * (LASTS_S - _FILLED_S) / draws
    first, second, third = jobs(line, 0.0), jobs(overload, later_s), jobs(capped, 0.0)
    at_first, at_second = host.front(scale, 0.0, ahead_s), host.front(scale, later_s, ahead_s)

    def front(now: float, running: int) -> tuple[float, float]:
        return (at_first if now < later_s else at_second)(now, running)

    engine = Engine(LAW, PLACES, np.random.default_rng(draw), front=front)
    run(Told(told(line["start"])), [engine], first + second, later_s + LASTS_S + _REST_S)
    run(
        Turns(CAP, True, LAW),
        [Engine(LAW, PLACES, np.random.default_rng(draw), front=at_first)],
        third,
        LASTS_S + _REST_S,
    )
    return {
        "gate, 1.0": judged(first, 0.0),
        "gate, 2.0": judged(second, later_s),
        f"cap {CAP}, 2.0": judged(third, 0.0),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.gate.front", description=__doc__)
    parser.add_argument("--scale", type=float, nargs="+", default=[0.0, 1.0, 1.5], help="times as long as it was seen")
    parser.add_argument("--draws", type=int, default=6)
    given = parser.parse_args(words)
    host = Host()
    print(f"| front end | arm, load | {' | '.join(_TOLD)} |\n|{'---|' * (len(_TOLD) + 2)}")
    for scale in given.scale:
        found = [played(host, scale, draw, given.draws) for draw in range(given.draws)]
        for arm in found[0]:
            goodput, share, shed, middle, high, pace = np.mean([one[arm] for one in found], axis=0)
            cells = f"{goodput:.1f} | {share:.1%} | {shed:.1%} | {middle:.0f} / {high:.0f} | {pace:.1f}"
            print(f"| {scale:g} times | {arm} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
