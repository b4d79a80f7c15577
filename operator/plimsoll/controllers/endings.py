"""What pods leave undone: requests that a drain had no time for are counted and told.

Problem: who knows of them is a process that has ended, in a pod that is about to be forgotten.
Idea: the launcher leaves their number as its container's last words; the kubelet shows those in the pod's status before
the pod goes, so that every version of a pod that the watch brings is looked at, and each pod told of once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from plimsoll.adapters.kube import WatchEvent
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.store import Key, Store, role_of, service_of
from plimsoll.telemetry import metrics

Object = dict[str, Any]

KILLED: Final = 137  # the exit code of what SIGKILL ended
CLOCK_S: Final = 1.0  # times in a status are whole seconds


@dataclass(frozen=True)
class Ending:
    """A pod that ended before all its requests had their answers. requests: None where it could not say how many."""

    service: Key
    tier: str
    pod: str
    uid: str
    requests: int | None
    seconds: float  # that its requests were given, or its whole grace where it was killed

    @property
    def event(self) -> Event:
        """What is told of it."""
        if self.requests is None:
            words = (
                f"{self.tier} pod {self.pod} was killed when its grace of {self.seconds:g} s was over, before its "
                "drain was; what it still held was cut off, and how much that was is not known"
            )
        else:
            many = "1 request was" if self.requests == 1 else f"{self.requests} requests were"
            words = (
                f"{many} cut off with {self.tier} pod {self.pod}: not done {self.seconds:g} s after it was stopped "
                "(engine.drainTimeout)"
            )
        return Event(EventReason.DRAIN_TIMED_OUT, words, self.uid)


def of_pod(pod: Object) -> Ending | None:
    """How a pod ended, if that left requests without their answers."""
    meta, service = pod["metadata"], service_of(pod)
    ended = _ended(pod)
    if ended is None or service is None:
        return None
    tier, name, uid = role_of(pod), meta["name"], meta["uid"]
    said = _said(ended.get("message", ""))
    if said is not None:
        return Ending(service, tier, name, uid, *said)
    due_s, ended_s = epoch_s(meta.get("deletionTimestamp")), epoch_s(ended.get("finishedAt"))
    if ended.get("exitCode") != KILLED or ended.get("reason") == "OOMKilled" or due_s is None or ended_s is None:
        return None
    if ended_s < due_s - CLOCK_S:  # the kubelet kills when the time of deletion has come
        return None
    return Ending(service, tier, name, uid, None, float(meta.get("deletionGracePeriodSeconds", 0)))


class Endings:
    """Of each service, what is to be told of its pods."""

    def __init__(self, store: Store, errors: ObjectErrors | None = None) -> None:
        self._store = store
        self._errors = errors or ObjectErrors()
        self._seen: set[str] = set()  # uids of pods that ended badly and are still there
        self._owed: dict[Key, dict[str, Event]] = {}

    def hear(self, event: WatchEvent) -> None:
        """What the watch of pods says, once the store has it."""
        match event.type:
            case "SYNC":
                there = {pod["metadata"]["uid"]: pod for pod in self._store.all("Pod")}
                self._seen &= there.keys()
                self._errors.retain(Stage.POD_ENDING, {subject_of(pod) for pod in there.values()})
                for pod in there.values():
                    self._see(pod)
            case "DELETED":
                self._see(event.object)
                self._seen.discard(event.object["metadata"]["uid"])
                if (service := service_of(event.object)) is not None:
                    self._errors.clear(Stage.POD_ENDING, service, subject_of(event.object))
            case _:
                self._see(event.object)

    def _see(self, pod: Object) -> None:
        """A pod as it is now; counted at once if it has ended badly."""
        service = service_of(pod)
        if service is None or self._store.get(labels.KIND, service) is None:
            return
        with self._errors.contained(Stage.POD_ENDING, service, subject_of(pod)):
            self._count(service, pod)

    def _count(self, service: Key, pod: Object) -> None:
        series = ("/".join(service), role_of(pod))
        drains, lost = metrics.OPERATOR_DRAINS_TIMED_OUT.labels(*series), metrics.OPERATOR_CUT_OFF.labels(*series)
        found = None if pod["metadata"]["uid"] in self._seen else of_pod(pod)
        if found is None:
            return
        self._seen.add(found.uid)
        self._owed.setdefault(service, {})[found.uid] = found.event
        drains.inc()
        lost.inc(found.requests or 0)

    def owed(self, service: Key) -> tuple[Event, ...]:
        """What has not been told yet."""
        return tuple(self._owed.get(service, {}).values())

    def told(self, service: Key, events: Iterable[Event]) -> None:
        """These have been written."""
        left = self._owed.get(service, {})
        for event in events:
            left.pop(event.since, None)
        if not left:
            self._owed.pop(service, None)

    def forget(self, service: Key) -> None:
        """The service is gone, and its series with it."""
        self._owed.pop(service, None)
        metrics.forget_drained_service("/".join(service))


def _ended(pod: Object) -> Object | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        if container.get("name") == "engine":
            found: Object | None = container.get("state", {}).get("terminated")
            return found
    return None


def _said(message: str) -> tuple[int, float] | None:
    """The launcher's last words: how many requests, and the seconds that they were given."""
    try:
        document = orjson.loads(message)
        return int(document["cutOff"]), float(document["drainSeconds"])
    except (ValueError, TypeError, KeyError):  # anything else that a container can say
        return None
