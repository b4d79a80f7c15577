"""Events about recommended replica counts that Plimsoll does not set: in mode Recommend, and where it yields.

Problem: without a write there is no scale Event, so that a changed recommendation shows in figures alone. A load near
the capacity of a count changes it many times.

Idea: an Event announces a count that differs from the one announced before, at most one per tier in INTERVAL_SECONDS.
What changes in between is announced at the end of the interval, if it still differs. So is what changes while an Event
of the tier is not written yet: a slow API server has one Event per tier to write. The first count is compared with the
present one, so a recommendation that agrees with the fleet has no Event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import join_within
from plimsoll.controllers.object_cache import Key, key_of
from plimsoll.core.autoscaling.inputs import ScalingSpec
from plimsoll.core.autoscaling.scaling_decision import MODE_STEP, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.errors import ClusterError
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
RecordEvent = Callable[[Object, Event], Awaitable[None]]

INTERVAL_SECONDS: Final = 60.0  # least time between two Events of a tier; 1,000 services then write 17 in a second
MAX_WRITES: Final = 4  # at once; Events of writes go through `scale_action`

log = ServiceLog(__name__)


@dataclass(frozen=True)
class AnnouncedCount:
    """A recommended count that an Event has announced. at_s: when; -inf for one of an earlier process."""

    replicas: int
    at_s: float


def restore_announced(state: ServiceState) -> dict[str, AnnouncedCount]:
    """The last change of each tier that an earlier process has kept, so that a restart does not repeat its Event."""
    counts = {
        name: tier.recommended
        for timed in state.decisions
        for name, tier in timed.decision.tiers.items()
        if tier.recommended is not None
    }
    return {name: AnnouncedCount(count, float("-inf")) for name, count in counts.items()}


def recommended_event(tier: str, decision: TierDecision, before: int, other_writer: str | None, at_s: float) -> Event:
    """The Event about a recommended count. before: the count announced before. at_s: time of the decision."""
    count, present = decision.recommended or 0, decision.previous_replicas or 0
    steps = tuple(step for step in decision.steps if step.name != MODE_STEP)
    reasons = replace(decision, replicas=count, steps=steps).brief_reasons if count != present else ()
    head = f"{tier}: {count} {'replica' if count == 1 else 'replicas'} recommended, {present} set"
    message = join_within(MAX_EVENT_MESSAGE_CHARS, head, *reasons[:1], other_writer or "", *reasons[1:])
    return Event(EventReason.RECOMMENDED, message, f"{tier}/{before}/{count}/{at_s:.0f}")


class RecommendationEvents:
    """Writes the Events outside the ticks, at most MAX_WRITES at once."""

    def __init__(self, record_event: RecordEvent) -> None:
        self._record_event = record_event
        self._due: list[tuple[Object, str, Event]] = []  # service, tier
        self._tasks: dict[tuple[Key, str], asyncio.Task[None]] = {}  # by service and tier
        self._slots = asyncio.Semaphore(MAX_WRITES)

    def update(
        self,
        service_object: Object,
        state: ServiceState,
        spec: ScalingSpec,
        announced: dict[str, AnnouncedCount],
        other_writer: str | None,
        now_s: float,
    ) -> None:
        """Find what has changed. announced: the counts announced before by tier, which this updates."""
        if spec.policy.mode is not ScalingMode.RECOMMEND or spec.policy.paused or spec.slo is None:
            announced.clear()
            return
        if state.last_decision is None:
            return
        key = key_of(service_object)
        for tier, decision in state.last_decision.decision.tiers.items():
            if (
                (key, tier) in self._tasks
                or decision.recommended is None
                or decision.previous_replicas is None
                or decision.is_held
            ):
                continue
            before = announced.setdefault(tier, AnnouncedCount(decision.previous_replicas, float("-inf")))
            if decision.recommended == before.replicas or 0.0 <= now_s - before.at_s < INTERVAL_SECONDS:
                continue
            announced[tier] = AnnouncedCount(decision.recommended, now_s)
            event = recommended_event(tier, decision, before.replicas, other_writer, now_s)
            self._due.append((service_object, tier, event))

    def submit(self) -> None:
        """Start to write the Events of this tick."""
        for service_object, tier, event in self._due:
            key = key_of(service_object)
            self._tasks[key, tier] = asyncio.create_task(self._write(key, tier, service_object, event))
        self._due.clear()

    async def finish(self) -> None:
        """Wait for the writes under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def cancel(self) -> None:
        """Cancel the writes under way, since this process no longer leads."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _write(self, key: Key, tier: str, service_object: Object, event: Event) -> None:
        try:
            async with self._slots:
                await self._record_event(service_object, event)
        except ClusterError as error:
            log.warning(key, "the Event of a recommendation cannot be written", error=str(error))
        finally:
            self._tasks.pop((key, tier), None)
