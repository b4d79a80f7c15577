"""The rollout of the leader: plans again every few seconds, and reconciles the services whose plan has changed.

Memory has only a bridge: a turn lasts until the objects of its service show it, so that no other service gets it
meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from plimsoll.api import labels
from plimsoll.api.conditions import Condition
from plimsoll.controllers.engine_rollout.rollout_plan import Phase, RolloutPlan, plan_rollout
from plimsoll.controllers.engine_rollout.rollout_state import RolloutState, rollout_state
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.resources.platform_config import EngineRolloutSettings
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

PLAN_SECONDS: Final = 5.0
SLICE_SIZE: Final = 10  # services of a plan that are read before other work of the event loop


@dataclass(frozen=True)
class ServiceRollout:
    """What the rollout says of a service. has_turn: its engines may be replaced now."""

    has_turn: bool = False
    condition: Condition | None = None


class EngineRollout:
    """Rolls services out to the present generation of the platform's settings of engines."""

    def __init__(
        self,
        cache: ObjectCache,
        settings: EngineRolloutSettings,
        changed: Callable[[Key], None],
        is_foreign: Callable[[Key], bool] = lambda key: False,
        clock: Callable[[], float] = time.time,
        errors: ObjectErrors | None = None,
    ) -> None:
        """changed: called with a service whose turn or condition has changed. is_foreign: another release manages it.
        clock: seconds since the epoch."""
        self._cache = cache
        self._settings = settings
        self._changed = changed
        self._is_foreign = is_foreign
        self._clock = clock
        self._errors = errors or ObjectErrors()
        self._plan: RolloutPlan | None = None
        self._lock = asyncio.Lock()

    async def run(self, is_synced: Callable[[], bool]) -> None:
        """Plan until cancelled. A standby exports nothing."""
        try:
            while True:
                if is_synced():
                    async with self._lock:
                        await self._plan_in_slices()
                await asyncio.sleep(PLAN_SECONDS)
        finally:
            operator_metrics.OPERATOR_ENGINE_ROLLOUT.clear()

    def of(self, key: Key) -> ServiceRollout:
        """What the present plan says of a service. The first call plans."""
        plan = self._plan or self.plan()
        return ServiceRollout(key in plan.turns, plan.conditions.get(key))

    async def wait_planned(self) -> None:
        """Plan if there is no plan yet."""
        if self._plan is None:
            async with self._lock:
                if self._plan is None:
                    await self._plan_in_slices()

    async def _plan_in_slices(self) -> None:
        """As `plan`, but let other tasks of the event loop run after each slice of the services."""
        for _ in self._planning():
            await asyncio.sleep(0)

    def plan(self) -> RolloutPlan:
        """Plan from the present objects."""
        for _ in self._planning():
            pass
        assert self._plan is not None
        return self._plan

    def _planning(self) -> Iterator[None]:
        """Plan; yields after each slice of the services."""
        now_s = self._clock()
        states: list[RolloutState] = []
        for number, one in enumerate(self._cache.all(labels.KIND), 1):
            if number % SLICE_SIZE == 0:
                yield
            if self._is_foreign(key_of(one)):
                continue
            with self._errors.contained(Stage.ROLLOUT, key_of(one), subject_of(one)):
                state = rollout_state(self._cache, one, self._settings, now_s)
                states += () if state is None else (state,)
        before = self._plan or RolloutPlan()
        plan = self._plan = plan_rollout(states, self._settings, before.turns, now_s)
        counts = Counter(plan.phases.values())
        for phase in Phase:
            operator_metrics.OPERATOR_ENGINE_ROLLOUT.labels(phase.value).set(counts[phase])
        generation = self._settings.generation
        for key in plan.phases.keys() | before.phases.keys():
            now = plan.phases.get(key)
            if now is not before.phases.get(key, Phase.UPDATED) and now not in (None, Phase.WAITING):
                log.info(key, "rollout of engines", phase=now, generation=generation)
            if (key in plan.turns) != (key in before.turns) or plan.conditions.get(key) != before.conditions.get(key):
                self._changed(key)
