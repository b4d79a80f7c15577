"""What nobody can do: the least GPU-hours with which a share of a row's requests is served in time.

It is the bound of `plimsoll.sim.bound`, whose head has the proof, over a row's own requests, plant, first replicas and
start-ups, for everybody who keeps to the row's replicas, whatever else they know; and never less than the least
replicas cost, which such a fleet pays at all times. Replicas are a fluid in it, all as fast as the fastest that may be
drawn, and their steps are as full as the promise lets them be.
"""

from __future__ import annotations

from typing import Final

from bench.scoreboard.play import HOUR_S, ground
from bench.scoreboard.rows import Row
from plimsoll.sim.bound import Bound

_SEED: Final = 1


def least(row: Row, plant: float, attainment: float) -> float:
    """GPU-hours below which nobody serves that share (0 to 1) of the row's first seed's requests in time.

    plant: seconds of a step over the nominal ones. inf: no engine keeps the promise to so many.
    """
    known = ground(row, plant, asked := row.load.make(_SEED))
    scene, length_s = known.scene, known.length_s
    prices = Bound(asked, scene.plant, scene.slo, scene.bounds, known.initial, length_s)
    fleet = sum(count * row.gpus for _, count, _ in row.tiers) * length_s / HOUR_S
    return max(fleet, prices.gpu_hours(attainment))
