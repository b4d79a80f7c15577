"""What the gateway's admission control predicted for each request that it admitted in the overload.

    python -m e2e.gpu.gateway_replay e2e/gpu/data/h100-8b

Problem: the gateway does not log its predictions, and whether they or the engine were wrong decides what to change.
Idea: the replica's own state (`core.admission.placement`) is fed the requests when the gateway sent them, and their
ends when it saw them, whatever it would decide itself. The cost model is the one published before the load, and from
`SWITCH_S` on the one published after it; when the operator changed it in between was not recorded. The recorded gateway
learned first tokens at the ends of responses, and had a smaller bound of the margin. It is replayed as it was, and as
it is now.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from e2e.gpu.scenarios import TTFT_S
from plimsoll.core import codec
from plimsoll.core.admission.first_token_reports import report_age_s
from plimsoll.core.admission.placement import Placement, ReplicaPool
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.admission.ttft_margin import TtftMargin

SWITCH_S: Final = 36.0
RECORDED_MAX_MARGIN_S: Final = 0.4 * TTFT_S
WINDOWS_S: Final = ((30, 36), (36, 45), (45, 63), (63, 90))  # of the overload
_LOG_DELAY_S: Final = 0.1  # from the end of a response until the gateway's picker reads it
_CLASS, _REPLICA = "default", "engine"


class Predicted(NamedTuple):
    """One admitted request, and when it was sent (seconds since the load began).

    model_s: TTFT that the cost model predicts; residual_s: what the TTFT residual adds; margin_s: the safety margin if
    there is contention; ttft_s: the measured one. All count from the sending.
    """

    at_s: float
    model_s: float
    residual_s: float
    margin_s: float
    ttft_s: float

    @property
    def is_late_predicted(self) -> bool:
        """Whether the first token and its margin are predicted after the target."""
        return self.model_s + self.residual_s + self.margin_s > TTFT_S


def replay(folder: Path, switch_s: float = SWITCH_S, *, as_recorded: bool = False) -> list[Predicted]:
    """The admitted requests of all loads up to the overload's end, in the order of their sending.

    as_recorded: with the gateway as it was then.
    """
    results = json.loads((folder / "results.json").read_text())
    limits = [codec.decode(AdmissionLimits, results[name]["limits"]) for name in ("steady", "overload")]
    before, after = (one.cost_model for one in limits)
    assert before is not None
    assert after is not None
    with gzip.open(folder / "gateway.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "200"]
    events = [(float(row["began_s"]) + float(row["queue_s"]), 0, number) for number, row in enumerate(rows)]
    events += [(float(row["ended_s"]) + _LOG_DELAY_S, 1, number) for number, row in enumerate(rows)]
    if not as_recorded:
        events += [(at_s, 2, number) for number, row in enumerate(rows) if (at_s := _report_s(row)) is not None]
    heapq.heapify(events)
    pool, margin, found = ReplicaPool(before), TtftMargin(TTFT_S), []
    if as_recorded:
        margin.max_margin_s = RECORDED_MAX_MARGIN_S
    pool.set_replicas({_REPLICA: before.batch}, events[0][0] - 1.0)
    while events:
        at_s, kind, number = heapq.heappop(events)
        if at_s > switch_s and pool.cost_model is before:
            pool.set_cost_model(after)
            pool.set_replicas({_REPLICA: after.batch}, at_s)
        row = rows[number]
        ttft_s = float(row["ttft_s"]) - float(row["queue_s"])
        if kind:
            running = pool.record_first_token(str(number), ttft_s, at_s)
            if running is not None:
                margin.observe(ttft_s - running.predicted_ttft_s)
            if kind == 1:
                pool.remove(str(number), at_s, int(row["output"]) or None, ttft_s)
            continue
        output = int(row["output"]) or None
        request = AdmissionRequest(str(number), _CLASS, "", at_s, int(row["prompt"]), max_tokens=output)
        cost, replica = pool.estimate_cost(request), pool.replicas[_REPLICA]
        predicted_s, residual_s = replica.predict_ttft_s(cost, at_s), replica.ttft_residual_s
        found.append(Predicted(at_s, predicted_s - residual_s, residual_s, margin.margin_s, ttft_s))
        pool.add(request, 0, Placement(replica, predicted_s, math.inf, cost), at_s)
    return found


def _report_s(row: Mapping[str, str]) -> float | None:
    """When the gateway learns the first token, None if not before the response ends."""
    age_s, began_s = report_age_s(float(row["ttft_s"])), float(row["began_s"])
    return None if age_s is None or began_s + age_s >= float(row["ended_s"]) else began_s + age_s + _LOG_DELAY_S


def within(rows: Sequence[Predicted], begin_s: float, end_s: float) -> list[Predicted]:
    """Those that were sent in [begin_s, end_s)."""
    return [row for row in rows if begin_s <= row.at_s < end_s]


if __name__ == "__main__":
    for as_recorded in (True, False):
        print("the gateway as recorded:" if as_recorded else "the gateway as it is now:")
        replayed = replay(Path(sys.argv[1]), as_recorded=as_recorded)
        for begin_s, end_s in WINDOWS_S:
            part = within(replayed, begin_s, end_s)
            late = [row.is_late_predicted for row in part if row.ttft_s > TTFT_S]
            wrongly = sum(row.is_late_predicted for row in part) - sum(late)
            means = [sum(values) / len(part) for values in zip(*part, strict=True)][1:]
            shown = " ".join(f"{1000 * mean:.0f} ms" for mean in means)
            print(f"{begin_s} to {end_s} s: {len(part)} sent; {len(late)} late, {sum(late)} of them foreseen;", end=" ")
            print(f"{wrongly} predicted late wrongly; {shown}")
