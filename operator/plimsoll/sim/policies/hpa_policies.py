"""Kubernetes' autoscaler on engine metrics: `hpa-queue` and `hpa-concurrency`.

Problem: the most common set-up is a HorizontalPodAutoscaler on a metric of vLLM's, with a hand-picked target.

Idea: the autoscaler itself (`hpa`), with Kubernetes' own periods, windows, rates and tolerance, on the mean over the
tier's engines of the waiting requests, or of all requests. Kubernetes has no default target: guides for vLLM start from
5 waiting requests, llm-d's guide for KEDA has 16 requests per engine. Engines are read at the moment of the sync, which
favours the policy over a scrape and an adapter's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.hpa import SYNC_S, Hpa, HpaBehavior, propose_from_pods
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers

QUEUE_TARGET: Final = 5.0
CONCURRENCY_TARGET: Final = 16.0


class _HpaTier:
    """One autoscaler. metric: of an engine; None if it does not report it."""

    def __init__(
        self, role: Role, metric: Callable[[EngineReading], float | None], target: float, sync_s: float, hpa: Hpa,
        tolerance: float,
    ) -> None:  # fmt: skip
        self._role, self._metric, self._target, self._tolerance = role, metric, target, tolerance
        self._hpa, self._timer = hpa, PeriodicTimer(sync_s)

    def desired_replicas(self, observation: Observation) -> int | None:
        if not self._timer.is_due(observation.now_s):
            return None
        readings = [self._metric(engine) for engine in observation.engine_readings[self._role]]
        values = [value for value in readings if value is not None]
        missing = len(readings) - len(values) + observation.starting.get(self._role, 0)
        current = observation.desired[self._role]
        return self._hpa.sync(
            observation.now_s, current, propose_from_pods(values, missing, self._target, current, self._tolerance)
        )


def make_queue(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options target, up and down (stabilisation windows, seconds), tolerance, sync (seconds), gated."""
    return _policy(options, context, lambda engine: engine.waiting, QUEUE_TARGET)


def make_concurrency(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options as in `make_queue`."""
    return _policy(options, context, _requests_at_engine, CONCURRENCY_TARGET)


def queue_settings() -> Sequence[str]:
    return _settings((0.5, 1, 2, 5, 10, 20, 50))


def concurrency_settings() -> Sequence[str]:
    return _settings((2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128))


def _policy(
    options: PolicyOptions,
    context: PolicyContext,
    metric: Callable[[EngineReading], float | None],
    default_target: float,
) -> SimulatedPolicy:
    defaults = HpaBehavior()
    target = options.positive("target", default_target)
    behavior = HpaBehavior(
        up_window_s=options.number("up", defaults.up_window_s, maximum=3600.0),
        down_window_s=options.number("down", defaults.down_window_s, maximum=3600.0),
        tolerance=options.number("tolerance", defaults.tolerance, maximum=1.0),
    )
    sync_s = options.period("sync", SYNC_S)
    gated = options.flag("gated", False)
    options.finish()
    if target < 0.001:
        raise options.error("target is at least 0.001: Kubernetes counts in thousandths")

    def tier(role: Role, bounds: tuple[int, int]) -> _HpaTier:
        return _HpaTier(role, metric, target, sync_s, Hpa(behavior, bounds), behavior.tolerance)

    return PeerPolicy(scalers(context.bounds, tier), gated)


def _settings(targets: Sequence[float]) -> Sequence[str]:
    return tuple(f"target={format_number(target)},down={down_s}" for target in targets for down_s in (300, 60))


def _requests_at_engine(engine: EngineReading) -> float | None:
    if engine.running is None or engine.waiting is None:
        return None
    return engine.running + engine.waiting
