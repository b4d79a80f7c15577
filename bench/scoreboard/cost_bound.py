"""Lower bound on cost: the fewest GPU-hours that serve a given share of a row's requests within the SLO.

The bound is `plimsoll.sim.lower_bound`, applied to a row's requests, plant, initial replicas and start-ups. The head of
that module has the proof. It holds for every policy that respects the row's replica bounds, whatever else the policy
knows. It is at least the cost of the row's minimum replicas, which every such fleet pays at all times. The bound treats
replicas as a fluid. Each is as fast as the fastest that may be drawn, and its steps are as full as the SLO allows.
"""

from __future__ import annotations

from typing import Final

from bench.scoreboard.rows import BoardRow
from bench.scoreboard.simulate_run import HOUR_S, search_space
from plimsoll.sim.lower_bound import CostLowerBound

_SEED: Final = 1


def min_gpu_hours(row: BoardRow, plant: float, attainment: float) -> float:
    """Return a lower bound of the GPU-hours that serve this share (0 to 1) of the requests of the row's first seed in
    time.

    plant: seconds of a step over the nominal ones. Infinite if no engine can serve this share within the SLO.
    """
    platform = search_space(row, plant, requests := row.load.make(_SEED))
    scene, length_s = platform.context, platform.length_s
    prices = CostLowerBound(requests, scene.plant, scene.slo, scene.bounds, platform.initial, length_s)
    fleet = sum(count * row.gpus for _, count, _ in row.tiers) * length_s / HOUR_S
    return max(fleet, prices.gpu_hours(attainment))
