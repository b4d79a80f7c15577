"""What the gateway's admission control predicted for each request that it admitted in the overload.

    python -m e2e.gpu.gateway_replay e2e/gpu/data/h100-8b

Problem: the gateway does not log its predictions, and whether they or the engine were wrong decides what to change.
Idea: the replica's own state (`core.admission.placement`) is fed the requests when the gateway sent them, and their
ends when it saw them, whatever it would decide itself. The cost model is the one published before the load, and from
`SWITCH_S` on the one published after it; when the operator changed it in between was not recorded.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from e2e.gpu.scenarios import TTFT_S
from plimsoll.core import codec
from plimsoll.core.admission.placement import Placement, ReplicaPool
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.admission.ttft_margin import TtftMargin

SWITCH_S: Final = 36.0
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


def replay(folder: Path, switch_s: float = SWITCH_S) -> list[Predicted]:
    """The admitted requests of all loads up to the overload's end, in the order of their sending."""
    results = json.loads((folder / "results.json").read_text())
    limits = [codec.decode(AdmissionLimits, results[name]["limits"]) for name in ("steady", "overload")]
    before, after = (one.cost_model for one in limits)
    assert before is not None
    assert after is not None
    with gzip.open(folder / "gateway.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "200"]
    events = [(float(row["began_s"]) + float(row["queue_s"]), 0, number) for number, row in enumerate(rows)]
    events += [(float(row["ended_s"]) + _LOG_DELAY_S, 1, number) for number, row in enumerate(rows)]
    heapq.heapify(events)
    pool, margin, found = ReplicaPool(before), TtftMargin(TTFT_S), []
    pool.set_replicas({_REPLICA: before.batch}, events[0][0] - 1.0)
    while events:
        at_s, is_end, number = heapq.heappop(events)
        if at_s > switch_s and pool.cost_model is before:
            pool.set_cost_model(after)
            pool.set_replicas({_REPLICA: after.batch}, at_s)
        row = rows[number]
        ttft_s = float(row["ttft_s"]) - float(row["queue_s"])
        if is_end:
            running = pool.record_first_token(str(number), ttft_s, at_s)
            if running is not None:
                margin.observe(ttft_s - running.predicted_ttft_s)
            pool.remove(str(number), at_s, int(row["output"]) or None, ttft_s)
            continue
        output = int(row["output"]) or None
        request = AdmissionRequest(str(number), _CLASS, "", at_s, int(row["prompt"]), max_tokens=output)
        cost, replica = pool.estimate_cost(request), pool.replicas[_REPLICA]
        predicted_s, residual_s = replica.predict_ttft_s(cost, at_s), replica.ttft_residual_s
        found.append(Predicted(at_s, predicted_s - residual_s, residual_s, margin.margin_s, ttft_s))
        pool.add(request, 0, Placement(replica, predicted_s, math.inf, cost), at_s)
    return found


def within(rows: Sequence[Predicted], begin_s: float, end_s: float) -> list[Predicted]:
    """Those that were sent in [begin_s, end_s)."""
    return [row for row in rows if begin_s <= row.at_s < end_s]


if __name__ == "__main__":
    replayed = replay(Path(sys.argv[1]))
    for begin_s, end_s in WINDOWS_S:
        part = within(replayed, begin_s, end_s)
        late = sum(row.ttft_s > TTFT_S for row in part)
        means = [sum(values) / len(part) for values in zip(*part, strict=True)][1:]
        print(f"{begin_s} to {end_s} s: {len(part)} sent, {late} late;", *(f"{1000 * mean:.0f} ms" for mean in means))
