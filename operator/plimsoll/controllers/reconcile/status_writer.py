"""Writes a service's status and its Events.

The status is written last, once, and only if it differs. Events are written before it, under deterministic names, so
that a repeated write creates no duplicate.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import conditions, labels
from plimsoll.api.conditions import Condition
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.isolation import ObjectErrors
from plimsoll.controllers.metrics_export import ConditionGauges
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.reconcile import condition_events, service_status
from plimsoll.controllers.reconcile.adapter_status import adapters_status
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.name_claims import ADAPTERS
from plimsoll.controllers.reconcile.name_claims import FIELD as NAME_CLAIM
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.core.errors import (
    Conflict,
    Forbidden,
    NotFound,
)
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)


def rfc3339_now() -> str:
    """The current time in the API's format."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class StatusWriter:
    """Writes status and Events of services. A write that fails raises ClusterError: the reconcile is repeated."""

    def __init__(
        self, kube: KubeClient, cache: ObjectCache, drain_reports: DrainReports, identity: str, errors: ObjectErrors
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._drain_reports = drain_reports
        self._identity = identity
        self._errors = errors
        self._condition_gauges = ConditionGauges()
        self._other_releases: dict[Key, tuple[str, str]] = {}  # uid and release that a status has
        # Version of an object whose Events are written, but whose status is not. A retry writes the same Events.
        self._event_versions: dict[Key, str] = {}

    def forget(self, key: Key) -> None:
        """Forget a deleted service."""
        self._condition_gauges.export(key, ())
        self._event_versions.pop(key, None)
        self._other_releases.pop(key, None)

    def clear_other_release(self, key: Key) -> None:
        """Note that this release manages the service, so that its status is written in full."""
        self._other_releases.pop(key, None)

    async def publish(self, service_object: Object, inputs: StatusInputs) -> None:
        """Write Events for changed conditions, then the status if it differs."""
        old_status = service_object.get("status") or {}
        stated_conditions = service_status.build_conditions(inputs)
        self._condition_gauges.export(key_of(service_object), stated_conditions)
        drain_events = self._drain_reports.pending(key_of(service_object))
        version = self._event_versions.setdefault(
            key_of(service_object), service_object["metadata"].get("resourceVersion", "")
        )
        for event in (
            *condition_events.changed_events(
                old_status.get("conditions", []),
                stated_conditions,
                service_status.recovery_messages(inputs),
                version,
            ),
            *drain_events,
        ):
            await self.record_event(service_object, event)
        self._drain_reports.ack(key_of(service_object), drain_events)
        former = inputs.model_names.former
        new_status: Object = {
            "observedGeneration": service_object["metadata"].get("generation", 0),
            "url": inputs.url,
            "modelNames": list(inputs.model_names.listed),
            **({NAME_CLAIM: old_status[NAME_CLAIM]} if NAME_CLAIM in old_status else {}),
            **({"formerNames": [str(one) for one in former]} if former else {}),
            **({ADAPTERS: _adapters_status(old_status[ADAPTERS], inputs)} if ADAPTERS in old_status else {}),
            "tiers": service_status.tiers_status(inputs),
            **({"engineTuning": inputs.engine_tuning} if inputs.engine_tuning else {}),
            **service_status.model_revision(inputs, old_status),
            "conditions": conditions.merge(old_status.get("conditions", []), stated_conditions, rfc3339_now()),
            **service_status.scaling_fields(inputs, old_status),
        }
        if new_status != old_status:
            await self.write(service_object, new_status)
        self._event_versions.pop(key_of(service_object), None)

    async def publish_error(self, key: Key, raw: Object) -> None:
        """Add the InternalError condition to the current status. A failed write is left to the next reconcile."""
        condition = self._errors.condition(key)
        if condition is None:
            return
        try:
            await self._add(key, raw, condition)
        except Exception:
            log.exception(key, "cannot write the InternalError condition")

    async def publish_other_release(self, key: Key, release: str) -> None:
        """Add to the status that another release manages the service, once: a live one then writes its own status.

        Raises ClusterError if a retry is needed.
        """
        raw = self._cache.get(labels.KIND, key)
        if raw is None:
            self._other_releases.pop(key, None)
            self._condition_gauges.export(key, ())
            return
        if raw["metadata"].get("deletionTimestamp"):
            return
        known = raw["metadata"]["uid"], release
        if self._other_releases.get(key) == known:
            return
        condition = service_status.other_release(key[0], release)
        await self.record_event(raw, Event(EventReason.OTHER_RELEASE, condition.event_message, release))
        await self._add(key, raw, condition)
        self._other_releases[key] = known

    async def record_event(self, service_object: Object, event: Event) -> None:
        """Write an Event. An existing one, or a namespace that is being deleted, is not an error."""
        try:
            await self._kube.create(event.manifest(service_object, self._identity, rfc3339_now()))
        except Conflict:
            return
        except (Forbidden, NotFound):
            pass
        log.info(key_of(service_object), event.message, reason=event.reason.value)

    async def write(self, raw: Object, new: Object) -> None:
        """Write the status of this version of the object.

        Raises Conflict if the object has changed: a status that was computed from an earlier spec, or for a deleted
        object of the same name, could give a model name away or back.
        """
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": {name: raw["metadata"][name] for name in ("namespace", "name", "resourceVersion")},
            "status": new,
        }
        with contextlib.suppress(NotFound):
            live = await self._kube.apply(body, labels.FIELD_MANAGER, subresource="status")
            self._cache.put(live, notify=False)  # a reconcile is under way, which has just computed this status

    async def _add(self, key: Key, raw: Object, condition: Condition) -> None:
        """Add a condition to the status, in place of one of its type."""
        self._condition_gauges.add(key, condition)
        old = raw.get("status") or {}
        before = old.get("conditions", [])
        others = [one for one in before if one.get("type") != condition.type.value]
        stated = [*others, *conditions.merge(before, (condition,), rfc3339_now())]
        if stated != before:
            await self.write(raw, {**old, "conditions": stated})


def _adapters_status(entries: list[Object], inputs: StatusInputs) -> list[Object]:
    """The entries; as before while the tiers are unknown, because the spec is not valid."""
    has_engines = not inputs.tiers or any(tier.ready for tier in inputs.tiers)
    return adapters_status(entries, inputs.adapters, has_engines=has_engines)
