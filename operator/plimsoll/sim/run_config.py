"""Configuration of one simulation run, besides the service, its plant and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.core.types import Role
from plimsoll.sim.clients import RetryBehavior


@dataclass(frozen=True)
class RunConfig:
    """initial: ready replicas at the start. epoch_s: the start, seconds since the epoch.

    observes_initial_startups: whether the operator observed the start-ups of the initial replicas. sends_max_tokens:
    whether clients set a token limit. kills: tier and time at which its busiest replica dies. tail_s: how long a run
    continues for unfinished requests after end_s. retry_behavior: of rejected clients. max_gpus: of the cluster, None
    without a limit.
    """

    initial: Mapping[Role, int]
    end_s: float
    gateways: int = 1
    seed: int = 0
    epoch_s: float = 1_767_225_600.0
    observes_initial_startups: bool = False
    sends_max_tokens: bool = True
    kills: tuple[tuple[Role, float], ...] = ()
    tail_s: float = 600.0
    retry_behavior: RetryBehavior = RetryBehavior.NONE
    max_gpus: int | None = None
