"""Kubernetes' autoscaler on what engines say of themselves: `hpa-queue` and `hpa-concurrency`.

Problem: what most people run is a HorizontalPodAutoscaler on a metric of vLLM's, with a target that somebody chose.

Idea: the autoscaler itself (`hpa`), with Kubernetes' own periods, windows, rates and tolerance, on the mean over the
tier's engines of the requests that wait there, or of those that are there at all. Kubernetes has no default target: 5
waiting requests are what guides for vLLM start from, 16 at an engine what llm-d's guide for KEDA has. Engines are read
at the moment of the sync, which is kinder than a scrape and an adapter's cache in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.hpa import SYNC_S, Behaviour, Hpa, by_pods
from plimsoll.sim.policies.options import Options
from plimsoll.sim.policies.peer import Peer, Timer, scalers

QUEUE_TARGET: Final = 5.0
CONCURRENCY_TARGET: Final = 16.0


class _Tier:
    """One autoscaler. metric: of an engine; None where it does not tell."""

    def __init__(
        self, role: Role, metric: Callable[[EngineReading], float | None], target: float, sync_s: float, hpa: Hpa,
        tolerance: float,
    ) -> None:  # fmt: skip
        self._role, self._metric, self._target, self._tolerance = role, metric, target, tolerance
        self._hpa, self._timer = hpa, Timer(sync_s)

    def wanted(self, look: Look) -> int | None:
        if not self._timer.due(look.now_s):
            return None
        told = [self._metric(engine) for engine in look.engines[self._role]]
        values = [value for value in told if value is not None]
        missing = len(told) - len(values) + look.starting.get(self._role, 0)
        current = look.ordered[self._role]
        return self._hpa.sync(look.now_s, current, by_pods(values, missing, self._target, current, self._tolerance))


def queue(options: Options, scene: Scene) -> Policy:
    """Options target, up and down (stabilisation windows, seconds), tolerance, sync (seconds), gated."""
    return _policy(options, scene, lambda engine: engine.waiting, QUEUE_TARGET)


def concurrency(options: Options, scene: Scene) -> Policy:
    """As of `queue`."""
    return _policy(options, scene, _at_engine, CONCURRENCY_TARGET)


def queue_settings() -> Sequence[str]:
    return _settings((0.5, 1, 2, 5, 10, 20, 50))


def concurrency_settings() -> Sequence[str]:
    return _settings((2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128))


def _policy(options: Options, scene: Scene, metric: Callable[[EngineReading], float | None], usual: float) -> Policy:
    defaults = Behaviour()
    target = options.positive("target", usual)
    rules = Behaviour(
        up_s=options.number("up", defaults.up_s, most=3600.0),
        down_s=options.number("down", defaults.down_s, most=3600.0),
        tolerance=options.number("tolerance", defaults.tolerance, most=1.0),
    )
    sync_s = options.period("sync", SYNC_S)
    gated = options.flag("gated", False)
    options.end()
    if target < 0.001:
        raise options.bad("target is at least 0.001: Kubernetes counts in thousandths")

    def tier(role: Role, bounds: tuple[int, int]) -> _Tier:
        return _Tier(role, metric, target, sync_s, Hpa(rules, bounds), rules.tolerance)

    return Peer(scalers(scene.bounds, tier), gated)


def _settings(targets: Sequence[float]) -> Sequence[str]:
    return tuple(f"target={target:g},down={down_s}" for target in targets for down_s in (300, 60))


def _at_engine(engine: EngineReading) -> float | None:
    if engine.running is None or engine.waiting is None:
        return None
    return engine.running + engine.waiting
