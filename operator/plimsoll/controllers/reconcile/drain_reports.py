"""Requests that were aborted because a pod's drain timed out: counted, and reported as Events.

Problem: only the launcher knows their number, and its process and pod are about to end.
Idea: the launcher writes the number into its termination message, which the kubelet copies into the pod's status before
the pod is deleted. Every version of a pod that the watch delivers is checked, and each pod is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import Key, ObjectCache, owning_service, role_of
from plimsoll.core.units import format_seconds
from plimsoll.telemetry import operator_metrics

Object = dict[str, Any]

SIGKILL_EXIT_CODE: Final = 137  # of a container that was ended by SIGKILL
CLOCK_RESOLUTION_S: Final = 1.0  # times in a pod's status are whole seconds


@dataclass(frozen=True)
class DrainTimeout:
    """A pod that ended before its requests were complete. aborted_requests: None if the number is unknown."""

    service: Key
    tier: str
    pod: str
    uid: str
    aborted_requests: int | None
    drain_s: float  # drain timeout, or the termination grace period if the pod was killed

    @property
    def event(self) -> Event:
        """The DrainTimedOut Event."""
        if self.aborted_requests is None:
            message = (
                f"{self.tier} pod {self.pod} was killed after its termination grace period of "
                f"{format_seconds(self.drain_s)}, before its drain ended; the number of aborted requests is unknown"
            )
        else:
            count_text = "1 request was" if self.aborted_requests == 1 else f"{self.aborted_requests} requests were"
            message = (
                f"{count_text} aborted in {self.tier} pod {self.pod}, still running "
                f"{format_seconds(self.drain_s)} after its stop; raise spec.engine.drainTimeout for longer requests"
            )
        return Event(EventReason.DRAIN_TIMED_OUT, message, self.uid)


def drain_timeout_of(pod: Object) -> DrainTimeout | None:
    """The drain timeout of a terminated pod; None if it had none."""
    meta, service = pod["metadata"], owning_service(pod)
    terminated = _terminated_state(pod)
    if terminated is None or service is None:
        return None
    tier, name, uid = role_of(pod), meta["name"], meta["uid"]
    report = _parse_termination_message(terminated.get("message", ""))
    if report is not None:
        return DrainTimeout(service, tier, name, uid, *report)
    due_s, ended_s = epoch_s(meta.get("deletionTimestamp")), epoch_s(terminated.get("finishedAt"))
    if (
        terminated.get("exitCode") != SIGKILL_EXIT_CODE
        or terminated.get("reason") == "OOMKilled"
        or due_s is None
        or ended_s is None
    ):
        return None
    if ended_s < due_s - CLOCK_RESOLUTION_S:  # the kubelet kills at the deletion time, so another cause ended it
        return None
    return DrainTimeout(service, tier, name, uid, None, float(meta.get("deletionGracePeriodSeconds", 0)))


class DrainReports:
    """Counts drain timeouts, and keeps their Events until they are written."""

    def __init__(self, cache: ObjectCache, errors: ObjectErrors | None = None) -> None:
        self._cache = cache
        self._errors = errors or ObjectErrors()
        self._reported_uids: set[str] = set()  # uids of reported pods that still exist
        self._pending: dict[Key, dict[str, Event]] = {}

    def on_pod_event(self, event: WatchEvent) -> None:
        """Process an event of the pod watch, after the cache has been updated."""
        match event.type:
            case "SYNC":
                pods_by_uid = {pod["metadata"]["uid"]: pod for pod in self._cache.all("Pod")}
                self._reported_uids &= pods_by_uid.keys()
                self._errors.retain(Stage.POD_ENDING, {subject_of(pod) for pod in pods_by_uid.values()})
                for pod in pods_by_uid.values():
                    self._record(pod)
            case "DELETED":
                self._record(event.object)
                self._reported_uids.discard(event.object["metadata"]["uid"])
                if (service := owning_service(event.object)) is not None:
                    self._errors.clear(Stage.POD_ENDING, service, subject_of(event.object))
            case _:
                self._record(event.object)

    def _record(self, pod: Object) -> None:
        """Count a pod's drain timeout, if it has one. Only pods with a role take requests."""
        service = owning_service(pod)
        if (
            service is None
            or not role_of(pod)
            or self._cache.get(labels.KIND, service) is None
            or self._cache.is_of_earlier_service(pod)
        ):
            return
        with self._errors.contained(Stage.POD_ENDING, service, subject_of(pod)):
            self._count(service, pod)

    def _count(self, service: Key, pod: Object) -> None:
        series = ("/".join(service), role_of(pod))
        drains, lost = (
            operator_metrics.OPERATOR_DRAINS_TIMED_OUT.labels(*series),
            operator_metrics.OPERATOR_REQUESTS_ABORTED.labels(*series),
        )
        found = None if pod["metadata"]["uid"] in self._reported_uids else drain_timeout_of(pod)
        if found is None:
            return
        self._reported_uids.add(found.uid)
        self._pending.setdefault(service, {})[found.uid] = found.event
        drains.inc()
        lost.inc(found.aborted_requests or 0)

    def pending(self, service: Key) -> tuple[Event, ...]:
        """Events that are not written yet."""
        return tuple(self._pending.get(service, {}).values())

    def ack(self, service: Key, events: Iterable[Event]) -> None:
        """Drop Events that have been written."""
        pending = self._pending.get(service, {})
        for event in events:
            pending.pop(event.dedup_key, None)
        if not pending:
            self._pending.pop(service, None)

    def forget(self, service: Key) -> None:
        """Drop the Events and metric series of a deleted service."""
        self._pending.pop(service, None)
        operator_metrics.remove_drain_series("/".join(service))


def _terminated_state(pod: Object) -> Object | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        if container.get("name") == "engine":
            terminated: Object | None = container.get("state", {}).get("terminated")
            return terminated
    return None


def _parse_termination_message(message: str) -> tuple[int, float] | None:
    """Aborted requests and drain timeout in seconds; None if the message is not a launcher's."""
    try:
        document = orjson.loads(message)
        return int(document["abortedRequests"]), float(document["drainSeconds"])
    except (ValueError, TypeError, KeyError):  # any other termination message
        return None
