"""Isolation of unexpected errors: each is contained to one object, counted, and shown in its service's status.

Problem: an unexpected error about one object would end the process, and with it the scaling of every service. After a
restart the object still exists, and the process ends again.

Idea: work on one object runs inside `contained`. An error is logged with its traceback, counted by stage, and kept
until the same work succeeds or the object is deleted. Meanwhile the service that owns the object has the condition
InternalError. `supervise` does the same for components of the process: it restarts a failed one after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from enum import StrEnum
from typing import Any, Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.controllers.object_cache import Key
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

NAMED: Final = 3  # objects that the condition's message lists
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Stage(StrEnum):
    """The work during which an error occurred."""

    WATCH = "watch"
    POD_ENDING = "pod_ending"
    ENGINE_LIST = "engine_list"
    ENGINE_METRICS = "engine_metrics"
    ENGINE_ABOUT = "engine_about"
    GATEWAY = "gateway"
    TARGET = "target"
    SCALING = "scaling"
    RECONCILE = "reconcile"
    ROLLOUT = "rollout"
    PART = "part"


for _stage in Stage:
    operator_metrics.OPERATOR_INTERNAL_ERRORS.labels(_stage.value)

_DOING: Final = {
    Stage.WATCH: "its watch event was processed",
    Stage.POD_ENDING: "the end of its container was read",
    Stage.ENGINE_LIST: "its address and readiness were read",
    Stage.ENGINE_METRICS: "its engine's metrics were read",
    Stage.ENGINE_ABOUT: "its launcher's /about was read",
    Stage.GATEWAY: "its /signals was read",
    Stage.TARGET: "its target was read",
    Stage.SCALING: "its replicas were decided",
    Stage.RECONCILE: "it was reconciled",
    Stage.ROLLOUT: "its place in the rollout of engines was found",
    Stage.PART: "it ran",
}
_ADVICE: Final = (
    "Other objects are not affected. Report the traceback in the operator's log; until it is fixed, correct or"
    " delete the object"
)


def subject_of(obj: dict[str, Any]) -> str:
    """Kind, namespace and name of an object, as messages name it."""
    meta = obj.get("metadata") or {}
    return f"{obj.get('kind', 'object')} {meta.get('namespace', '')}/{meta.get('name', '')}"


class ObjectErrors:
    """The current errors of each service and of its objects."""

    def __init__(self, changed: Callable[[Key], None] = lambda key: None) -> None:
        """changed: called with a service whose InternalError condition changes."""
        self._changed = changed
        self._present: dict[Key, dict[tuple[Stage, str], str]] = {}  # by stage and subject: class of the error

    @property
    def present(self) -> bool:
        """True while some service has an error."""
        return bool(self._present)

    @contextlib.contextmanager
    def contained(self, stage: Stage, service: Key | None, subject: str) -> Iterator[None]:
        """Run work on one object. An error is recorded and goes no further; success clears an earlier one."""
        try:
            yield
        except Exception as error:
            log.exception(service, "unexpected error about one object", stage=stage.value, object=subject)
            self.record(stage, service, subject, error)
        else:
            if service is not None:
                self.clear(stage, service, subject)

    def record(self, stage: Stage, service: Key | None, subject: str, error: Exception) -> None:
        """Count an error, and keep it for its service."""
        operator_metrics.OPERATOR_INTERNAL_ERRORS.labels(stage.value).inc()
        if service is None:
            return
        known, name = self._present.setdefault(service, {}), type(error).__name__
        if known.get((stage, subject)) != name:
            known[stage, subject] = name
            self._changed(service)

    def clear(self, stage: Stage, service: Key, subject: str) -> None:
        """Remove an error after the same work has succeeded or the object was deleted."""
        known = self._present.get(service)
        if known is None or known.pop((stage, subject), None) is None:
            return
        if not known:
            del self._present[service]
        self._changed(service)

    def retain(self, stage: Stage, subjects: Collection[str]) -> None:
        """Clear the errors of a stage about deleted objects. subjects: the objects that exist."""
        for service, known in list(self._present.items()):
            for at, subject in list(known):
                if at is stage and subject not in subjects:
                    self.clear(stage, service, subject)

    def forget(self, service: Key) -> None:
        """Drop the errors of a deleted service."""
        self._present.pop(service, None)

    def condition(self, service: Key) -> Condition | None:
        """The InternalError condition of a service; None without an error."""
        known = sorted(self._present.get(service, {}).items())
        if not known:
            return None
        lines = [f"{subject}: {name} while {_DOING[stage]}" for (stage, subject), name in known[:NAMED]]
        if len(known) > NAMED:
            lines.append(f"{len(known) - NAMED} more")
        return Condition(
            ConditionType.INTERNAL_ERROR, True, ConditionReason.OPERATOR_ERROR, f"{'; '.join(lines)}. {_ADVICE}"
        )


async def supervise(
    part: str, work: Callable[[], Awaitable[None]], errors: ObjectErrors, first_pause_s: float = FIRST_PAUSE_S
) -> None:
    """Run a component until it returns, and restart it after a pause whenever it fails.

    The pause doubles from `first_pause_s` to LONGEST_PAUSE_S seconds. A CancelledError that does not come from a
    cancellation of this task, such as one from a task inside the component, counts as a failure.
    """
    clock, pause_s = asyncio.get_running_loop().time, first_pause_s
    while True:
        began_s = clock()
        try:
            await _uncancelled(work)
            return
        except Exception as error:
            log.exception(None, "component failed; restarting it", part=part)
            errors.record(Stage.PART, None, part, error)
        if clock() - began_s > LONGEST_PAUSE_S:
            pause_s = first_pause_s
        await asyncio.sleep(pause_s)
        pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)


async def _uncancelled(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("cancelled from within") from error
