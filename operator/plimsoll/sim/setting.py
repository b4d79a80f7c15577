"""How one run of the fleet is set up, beside the service, its plant and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.clients import Manner


@dataclass(frozen=True)
class Setting:
    """How a run is set up. initial: ready replicas at the start. epoch_s: the start, seconds since the epoch.

    knows_starts: whether the starts of the initial replicas were seen. told_max: whether clients state how long the
    answer may be. kills: tier and moment at which its busiest replica dies. tail_s: how long a run goes on for what is
    under way after its end. clients: what those do who are refused. max_gpus: of the cluster, None without a limit.
    """

    initial: Mapping[Role, int]
    end_s: float
    gateways: int = 1
    seed: int = 0
    epoch_s: float = 1_767_225_600.0
    knows_starts: bool = False
    told_max: bool = True
    kills: tuple[tuple[Role, float], ...] = ()
    tail_s: float = 600.0
    clients: Manner = Manner.NONE
    max_gpus: int | None = None
