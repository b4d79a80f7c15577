"""Replay an overload on an H100 with a slow host, in virtual time: admission control against a constant cap.

    python -m bench.hardware.admission.frontend_replay [--scale 1 1.5] [--draws 6]

Problem: one host's fault cannot be reproduced at will, and a corrected admission controller must be tested against it.
Idea: run the simulated engine (`tests.core.admission_simulator`) with the step model fitted to this card when hot. The
recorded requests arrive at their recorded times. The admission controller has the limits that the operator published
in that run. Time outside the engine, before the first token and after it and the last one, comes from the run under the
cap, the only one that recorded it (`ttft_breakdown`): a request takes what requests sent in that second took. Each draw
starts at another place of that run. These times do not depend on admission decisions. --scale multiplies them.
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

from bench.hardware import archive
from bench.hardware.admission import ttft_breakdown
from bench.hardware.admission.runs import cap_seconds
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel
from plimsoll.core.admission.request import AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from tests.core.admission_engine import ClientRequest, FrontendModel, StepEngine
from tests.core.admission_simulator import CapPolicy, ControllerPolicy, run

DATA: Final = Path(__file__).parents[1] / "data" / "h100-8b-gate"
CAPACITY_RUN, OVERLOAD_RUN, CAPPED_RUN, CAP = "c00.gate.100", "c01.gate.200", "c02.cap160.200", 160
STEP_MODEL: Final = StepModel(6.491e-3, -1.539e-3, 2.227e-5, 8.507e-10, 9.754e-6, 4.428e-8)  # h100-8b, hot
ENGINE_LIMITS: Final = EngineLimits(256, 462_944, 8192)
SLO: Final = Slo(0.95, 1.0, 0.0, 0.05)
WARM_S, WINDOW_S, RUN_S = 6.0, 40.0, 46.0
_FILLED_S: Final = 4.0  # until then the run under the cap was not full
_REST_S: Final = 30.0
_COLUMNS: Final = ("goodput/s", "of those let in", "shed", "TTFT p50 / p95, ms", "TPOT p95, ms")


class HostOverhead:
    """What lay outside of the engine, second by second of the run under the cap."""

    def __init__(self) -> None:
        start_s, found = ttft_breakdown.load(DATA, CAPPED_RUN, CAP)
        core_s = HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * 1000  # which the lab's engines have
        # It came to the core between two compositions: in their middle.
        before = sorted(
            (
                way.released_s - start_s,
                (way.composed_s - way.released_s + max(0.0, way.previous_composed_s - way.released_s)) / 2,
            )
            for way in found
        )
        after = sorted((way.done_s - start_s, way.first_s - way.done_s) for way in found if way.done_s is not None)
        self._series = tuple(
            ([at for at, _ in series], [max(0.0, frontend_s - core_s) for _, frontend_s in series])
            for series in (before, after)
        )

    def frontend(self, scale: float, from_s: float = 0.0, ahead_s: float = 0.0) -> FrontendModel:
        """A run that begins at from_s and, once full, is so far ahead of the run under the cap."""

        def took(now: float, running: int) -> tuple[float, float]:
            at = now - from_s
            if at >= _FILLED_S:
                at = _FILLED_S + (at - _FILLED_S + ahead_s) % (RUN_S - _FILLED_S)
            before, after = (scale * values[max(0, bisect_right(times, at) - 1)] for times, values in self._series)
            return before, after

        return took


class StaticCapPolicy(CapPolicy):
    """The turnstile's cap: first come first served, each for half of what an idle engine would leave it."""

    def wake(self, now: float) -> list[tuple[ClientRequest, int]]:
        let_in: list[tuple[ClientRequest, int]] = []
        while self.queue and self.inflight and self.inflight[0] < self.cap:
            request = self.queue.popleft()
            unloaded_s = (
                HTTP_OVERHEAD_S
                + STEP_MODEL.base_s
                + (HTTP_OVERHEAD_PER_TOKEN_S + STEP_MODEL.prefill_token_s) * request.prompt
            )
            expired = now - request.arrived_s > cap_seconds(SLO, unloaded_s)
            request.outcome = AdmissionOutcome.SHED_SATURATED if expired else AdmissionOutcome.ADMITTED
            if not expired:
                self.inflight[0], self.where[request.id] = self.inflight[0] + 1, 0
                let_in.append((request, 0))
        return let_in


class PublishedLimitsPolicy(ControllerPolicy):
    """Clients say how long the answer will be, and limits are those that the operator told."""

    def __init__(self, limits: list[tuple[float, EngineCostModel]]) -> None:
        super().__init__(AdmissionController((ClassPolicy("chat", 0, SLO),), limits[0][1], {}))
        self._limits = limits

    def offer(self, request: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        request_id = f"{request.id}/{request.attempts}"
        request.attempts += 1
        self.jobs[request_id] = request
        admission_request = AdmissionRequest(
            request_id, request.request_class, request.tenant, now, request.prompt, max_tokens=request.output
        )
        return self._take([self.gate.submit(admission_request, now)], now)

    def tick(self, now: float) -> None:
        limits = [limits for at, limits in self._limits if at <= now] or [self._limits[0][1]]
        self.gate.tick(now, CapacityAnnouncement(), limits[-1])
        self.gate.set_replicas({"0": limits[-1].batch}, now)


def published_limits(start_s: float) -> list[tuple[float, EngineCostModel]]:
    """The limits of the run and when, from its first instant on."""
    names, timeline = {field_info.name for field_info in fields(EngineCostModel)}, []
    with gzip.open(DATA / "c.operator.jsonl.gz", "rt") as file:
        for line in map(json.loads, file):
            published = (line.get("admission") or {}).get("costModel")
            if published:
                values = {k: tuple(v) if isinstance(v, list) else v for k, v in published.items() if k in names}
                timeline.append((line["monotonic_s"] - start_s, EngineCostModel(**values)))
    return timeline


def load_jobs(document: dict[str, Any], from_s: float) -> list[ClientRequest]:
    """The requests of a run as they were sent."""
    return [
        ClientRequest(
            f"{document['trace']}.{row['row']}", from_s + row["at_s"] + row["late_s"], row["prompt"], row["output"],
            target_s=SLO.ttft_s or 0.0,
        )
        for row in document["requests"]
    ]  # fmt: skip


def figures(run_jobs: Sequence[ClientRequest], from_s: float) -> list[float]:
    """Goodput, share of those let in, shed, p50 and p95 of TTFT and p95 of TPOT in ms, of those counted."""
    counted = [job for job in run_jobs if WARM_S <= job.arrived_s - from_s < WARM_S + WINDOW_S]
    let_in = [job for job in counted if job.admitted_s is not None]
    within_slo = sum(job.within_slo(SLO.tpot_s or 0.0) for job in counted)
    first = [1e3 * (job.first_s - job.arrived_s) for job in let_in if job.first_s is not None]
    tpot_ms = [1e3 * job.tpot_s for job in let_in]
    shares = [within_slo / WINDOW_S, within_slo / len(let_in), 1 - len(let_in) / len(counted)]
    return shares + [float(np.percentile(v, q)) for v, q in ((first, 50), (first, 95), (tpot_ms, 95))]


def play(host: HostOverhead, scale: float, draw: int, draws: int) -> dict[str, list[float]]:
    """One draw of all arms; the gate's runs follow each other as they did."""
    capacity_jobs, overload_jobs, capped_jobs = (
        archive.read_run(DATA / f"{name}.requests.json.gz") for name in (CAPACITY_RUN, OVERLOAD_RUN, CAPPED_RUN)
    )
    later_s, ahead_s = overload_jobs["start"] - capacity_jobs["start"], draw * (RUN_S - _FILLED_S) / draws
    first, second, third = load_jobs(capacity_jobs, 0.0), load_jobs(overload_jobs, later_s), load_jobs(capped_jobs, 0.0)
    at_first, at_second = host.frontend(scale, 0.0, ahead_s), host.frontend(scale, later_s, ahead_s)

    def front(now: float, running: int) -> tuple[float, float]:
        return (at_first if now < later_s else at_second)(now, running)

    engine = StepEngine(STEP_MODEL, ENGINE_LIMITS, np.random.default_rng(draw), front=front)
    run(
        PublishedLimitsPolicy(published_limits(capacity_jobs["start"])),
        [engine],
        first + second,
        later_s + RUN_S + _REST_S,
    )
    run(
        StaticCapPolicy(CAP, True, STEP_MODEL),
        [StepEngine(STEP_MODEL, ENGINE_LIMITS, np.random.default_rng(draw), front=at_first)],
        third,
        RUN_S + _REST_S,
    )
    return {
        "gate, 1.0": figures(first, 0.0),
        "gate, 2.0": figures(second, later_s),
        f"cap {CAP}, 2.0": figures(third, 0.0),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.frontend_replay", description=__doc__)
    parser.add_argument("--scale", type=float, nargs="+", default=[0.0, 1.0, 1.5], help="times as long as it was seen")
    parser.add_argument("--draws", type=int, default=6)
    given = parser.parse_args(words)
    host = HostOverhead()
    print(f"| front end | arm, load | {' | '.join(_COLUMNS)} |\n|{'---|' * (len(_COLUMNS) + 2)}")
    for scale in given.scale:
        results = [play(host, scale, draw, given.draws) for draw in range(given.draws)]
        for arm in results[0]:
            goodput, share, shed, ttft_p50, high, tpot = np.mean([values[arm] for values in results], axis=0)
            cells = f"{goodput:.1f} | {share:.1%} | {shed:.1%} | {ttft_p50:.0f} / {high:.0f} | {tpot:.1f}"
            print(f"| {scale:g} times | {arm} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
