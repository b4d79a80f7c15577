"""Errors of the operator about single objects: each is contained, counted, and shown by the object's service.

Problem: an error about one object that no reader expects would end the process, and with it the scaling of every
service. After a restart the object is still there, and the process ends again.

Idea: work on one object runs inside `contained`. An error is logged with its traceback, counted by stage, and kept
until the same work succeeds or the object is gone. Meanwhile it is a condition of the service that the object belongs
to. `supervise` does the same for parts of the process: a part that fails is started again after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from enum import StrEnum
from typing import Any, Final

from plimsoll.api.conditions import Condition, Reason, Type
from plimsoll.controllers.store import Key
from plimsoll.telemetry import metrics

log = logging.getLogger(__name__)

NAMED: Final = 3  # objects that the condition's message lists
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0


class Stage(StrEnum):
    """What the operator did when the error occurred."""

    WATCH = "watch"
    POD_ENDING = "pod_ending"
    ENGINE_LIST = "engine_list"
    ENGINE_METRICS = "engine_metrics"
    ENGINE_ABOUT = "engine_about"
    GATEWAY = "gateway"
    SCALING = "scaling"
    RECONCILE = "reconcile"
    PART = "part"


for _stage in Stage:
    metrics.OPERATOR_INTERNAL_ERRORS.labels(_stage.value)

_DOING: Final = {
    Stage.WATCH: "it was taken from a watch",
    Stage.POD_ENDING: "the end of its container was read",
    Stage.ENGINE_LIST: "its address and readiness were read",
    Stage.ENGINE_METRICS: "its engine's metrics were read",
    Stage.ENGINE_ABOUT: "its launcher's /about was read",
    Stage.GATEWAY: "its gateway was asked",
    Stage.SCALING: "its replicas were decided",
    Stage.RECONCILE: "it was reconciled",
    Stage.PART: "it ran",
}
_ADVICE: Final = (
    "Other objects are not affected, and the operator tries again. Please report it with the traceback from the log"
    " (kubectl logs -n plimsoll-system -l app.kubernetes.io/component=operator). Until it is fixed, correct or delete"
    " the object"
)


def subject_of(obj: dict[str, Any]) -> str:
    """Kind, namespace and name of an object, as messages name it."""
    meta = obj.get("metadata") or {}
    return f"{obj.get('kind', 'object')} {meta.get('namespace', '')}/{meta.get('name', '')}"


class ObjectErrors:
    """The present errors of each service and of its objects."""

    def __init__(self, changed: Callable[[Key], None] = lambda key: None) -> None:
        """changed: called with a service whose condition changes."""
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
            log.exception("internal error, contained", extra={"stage": stage.value, "object": subject})
            self.record(stage, service, subject, error)
        else:
            if service is not None:
                self.clear(stage, service, subject)

    def record(self, stage: Stage, service: Key | None, subject: str, error: Exception) -> None:
        """Count an error, and remember it for its service."""
        metrics.OPERATOR_INTERNAL_ERRORS.labels(stage.value).inc()
        if service is None:
            return
        known, name = self._present.setdefault(service, {}), type(error).__name__
        if known.get((stage, subject)) != name:
            known[stage, subject] = name
            self._changed(service)

    def clear(self, stage: Stage, service: Key, subject: str) -> None:
        """The same work has succeeded, or the object is gone."""
        known = self._present.get(service)
        if known is None or known.pop((stage, subject), None) is None:
            return
        if not known:
            del self._present[service]
        self._changed(service)

    def retain(self, stage: Stage, subjects: Collection[str]) -> None:
        """Clear the errors of a stage whose objects are gone. subjects: the objects that exist."""
        for service, known in list(self._present.items()):
            for at, subject in list(known):
                if at is stage and subject not in subjects:
                    self.clear(stage, service, subject)

    def forget(self, service: Key) -> None:
        """The service is gone."""
        self._present.pop(service, None)

    def condition(self, service: Key) -> Condition | None:
        """The errors of a service and of its objects; None while there is none."""
        known = sorted(self._present.get(service, {}).items())
        if not known:
            return None
        lines = [f"{subject}: {name} while {_DOING[stage]}" for (stage, subject), name in known[:NAMED]]
        if len(known) > NAMED:
            lines.append(f"{len(known) - NAMED} more")
        return Condition(Type.INTERNAL_ERROR, True, Reason.OPERATOR_ERROR, f"{'; '.join(lines)}. {_ADVICE}")


async def supervise(
    part: str, work: Callable[[], Awaitable[None]], errors: ObjectErrors, first_pause_s: float = FIRST_PAUSE_S
) -> None:
    """Run a part of the process until it returns; start it again after a pause whenever it fails.

    A cancellation that nobody asked for, as by a task of the part's own that was cancelled, is a failure too.
    """
    clock, pause_s = asyncio.get_running_loop().time, first_pause_s
    while True:
        began_s = clock()
        try:
            await _uncancelled(work)
            return
        except Exception as error:
            log.exception("a part of the operator failed and is started again", extra={"part": part})
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
