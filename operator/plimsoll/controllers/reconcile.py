"""One round for one service: observe, decide, plan, apply, publish.

Level-triggered and idempotent: killed between any two writes, the next round finds the rest still to be done. The
status is written once, last, and only if it says something new; Events come before it, under names that a second
telling meets again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from plimsoll.adapters.kube import BY_KIND, CONTROLLERREVISIONS, Kube
from plimsoll.api import conditions, labels
from plimsoll.api.events import Event
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import status
from plimsoll.controllers.drift import Memory
from plimsoll.controllers.endings import Endings
from plimsoll.controllers.gateways import View
from plimsoll.controllers.gauges import Conditions
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.modelnames import ModelNames, model_names
from plimsoll.controllers.observe import Observed, claimed, observe
from plimsoll.controllers.plan import Plan, plan
from plimsoll.controllers.report import Report
from plimsoll.controllers.status import Sight, TierSight
from plimsoll.controllers.store import Key, Store, key_of, role_of
from plimsoll.core.errors import Conflict, Forbidden, NotFound, PlimsollError, Rejected, Unavailable
from plimsoll.resources import meta
from plimsoll.resources.platform import Platform

Object = dict[str, Any]

log = logging.getLogger(__name__)


def now() -> str:
    """Present time as Kubernetes writes it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Reconciler:
    """Brings services to what their specs want, and says how far it got."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        platform: Platform,
        gateways: Callable[[], View],
        report: Callable[[Key], Report | None],
        endings: Endings,
        identity: str,
        errors: ObjectErrors | None = None,
        later: Callable[[Key, float], None] = lambda key, seconds: None,
    ) -> None:
        """report: what the autoscaler says of a service, None before it has looked at it. later: has a service
        reconciled after some seconds."""
        self._errors = errors or ObjectErrors()
        self._kube = kube
        self._store = store
        self._platform = platform
        self._gateways = gateways
        self._report = report
        self._endings = endings
        self._identity = identity
        self._later = later
        self._memory = Memory()
        self._shown = Conditions()

    async def reconcile(self, key: Key) -> None:
        """One round. Raises ClusterError if it must be tried again; any other error is first shown in the status."""
        try:
            await self._round(key)
        except PlimsollError:
            raise
        except Exception as error:
            raw = self._store.get(labels.KIND, key)
            if raw is not None:
                self._errors.record(Stage.RECONCILE, key, subject_of(raw), error)
                await self._publish_error(key, raw)
            raise
        raw = self._store.get(labels.KIND, key)
        if raw is not None:
            self._errors.clear(Stage.RECONCILE, key, subject_of(raw))

    async def _round(self, key: Key) -> None:
        seen = observe(self._store, self._gateways(), key)
        if seen is None:
            self._memory.forget(key)
            self._endings.forget(key)
            self._errors.forget(key)
            self._shown.show(key, ())
            return
        todo: Plan | None = None
        rejected: str | None = None
        if seen.service is not None:
            todo = plan(seen, seen.service, desired(seen, seen.service, self._report(key)), self._platform)
            try:
                await self._apply(key, seen, todo)
            except (Rejected, Forbidden) as error:
                rejected = str(error)
        seen = observe(self._store, self._gateways(), key) or seen
        names = names_of(seen, datetime.datetime.now(datetime.UTC))
        sight = sight_of(seen, todo, rejected, self._report(key), self._platform, names)
        await self._publish(seen.raw, replace(sight, internal_error=self._errors.condition(key)))
        if names.next_s is not None:
            self._later(key, names.next_s)
        if todo is not None:
            await self._sweep(seen, sight, todo)
        if rejected is not None:
            raise Unavailable(f"waiting before the next try: {rejected}", retry_after_seconds=10.0)

    async def _apply(self, key: Key, seen: Observed, todo: Plan) -> None:
        for kept in todo.keep:
            with contextlib.suppress(Conflict):
                self._store.put(await self._kube.create(kept))
        due = [
            wish
            for wish in todo.wish
            if not self._memory.settled(key, wish, seen.children.get((wish["kind"], wish["metadata"]["name"])))
        ]
        for wish in due:
            if (wish["kind"], wish["metadata"]["name"]) not in seen.children:
                await self._must_be_free(wish, seen.raw)
        results = await asyncio.gather(*(self._apply_one(key, wish) for wish in due), return_exceptions=True)
        for failure in filter(None, results):
            raise failure
        for spare in todo.spare:
            spare_meta = spare["metadata"]
            resource = BY_KIND[spare["kind"]]
            await self._kube.delete(resource, spare_meta["namespace"], spare_meta["name"], spare_meta["uid"])

    async def _apply_one(self, key: Key, wish: Object) -> None:
        live = await self._kube.apply(wish, labels.MANAGER)
        self._memory.applied(key, wish, live)
        self._store.put(live)

    async def _must_be_free(self, wish: Object, parent: Object) -> None:
        """Refuse to take over an object that somebody else made under a name that we need."""
        kind, wish_meta = wish["kind"], wish["metadata"]
        try:
            live = await self._kube.get(BY_KIND[kind], wish_meta["namespace"], wish_meta["name"])
        except NotFound:
            return
        owners = live["metadata"].get("ownerReferences", [])
        if any(owner.get("uid") == parent["metadata"]["uid"] for owner in owners):
            return
        former = (labels.KIND, parent["metadata"]["name"])
        if any((owner.get("kind"), owner.get("name")) == former for owner in owners):
            raise Conflict(f"{kind} {wish_meta['name']} of an earlier service of this name is still being deleted")
        raise Rejected(f"{kind} {wish_meta['name']} exists and is not this service's; rename one of the two")

    async def _publish(self, raw: Object, sight: Sight) -> None:
        """Events of what changed, then the status, if it says something new."""
        old = raw.get("status") or {}
        stated = status.conditions(sight)
        self._shown.show(key_of(raw), stated)
        cut_off = self._endings.owed(key_of(raw))
        for event in (*status.events(old.get("conditions", []), stated), *cut_off):
            await self.tell(raw, event)
        self._endings.told(key_of(raw), cut_off)
        generation = raw["metadata"].get("generation", 0)
        new: Object = {
            "observedGeneration": generation,
            "url": sight.url,
            "modelNames": list(sight.model_names),
            **({"formerModelNames": [asdict(one) for one in sight.former]} if sight.former else {}),
            "tiers": status.tiers(sight),
            "conditions": conditions.merge(old.get("conditions", []), stated, generation, now()),
            **status.scaling(sight, old),
        }
        if new != old:
            await self._write_status(raw, new)

    async def _publish_error(self, key: Key, raw: Object) -> None:
        """The status as it is, with the condition of the error. Where it cannot be written, the next round tries."""
        condition = self._errors.condition(key)
        old = raw.get("status") or {}
        before = old.get("conditions", [])
        if condition is None:
            return
        self._shown.add(key, condition)
        others = [one for one in before if one.get("type") != condition.type.value]
        generation = raw["metadata"].get("generation", 0)
        stated = [*others, *conditions.merge(before, (condition,), generation, now())]
        if stated == before:
            return
        try:
            await self._write_status(raw, {**old, "conditions": stated})
        except Exception:
            log.exception("the status does not show an internal error", extra={"service": "/".join(key)})

    async def _write_status(self, raw: Object, new: Object) -> None:
        body = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND,
            "metadata": {"namespace": raw["metadata"]["namespace"], "name": raw["metadata"]["name"]},
            "status": new,
        }
        with contextlib.suppress(NotFound):
            self._store.put(await self._kube.apply(body, labels.MANAGER, subresource="status"))

    async def tell(self, raw: Object, event: Event) -> None:
        """Write an Event; one that is there already, or a namespace that is going away, is no error."""
        log.info(event.message, extra={"service": raw["metadata"]["name"], "reason": event.reason.value})
        with contextlib.suppress(Conflict, Forbidden, NotFound):
            await self._kube.create(event.manifest(raw, self._identity, now()))

    async def _sweep(self, seen: Observed, sight: Sight, todo: Plan) -> None:
        """Drop kept templates that no pod needs any more, so that going back to an old spec renders anew."""
        done = {tier.kind for tier in sight.tiers if status.rolled_out(tier)}
        for name, revision in seen.revisions.items():
            tier = role_of(revision)
            if tier in done and name != todo.revisions[tier]:
                spare = revision["metadata"]
                await self._kube.delete(CONTROLLERREVISIONS, spare["namespace"], name, spare["uid"])


def desired(seen: Observed, service: InferenceService, report: Report | None) -> dict[str, int]:
    """Replicas that each tier should have; before the autoscaler's first word, those that are ordered."""
    found: dict[str, int] = {}
    for kind, tier in service.spec.tiers.items():
        live = seen.children.get(("Deployment", meta.tier_name(service.metadata.name, kind)))
        ordered = tier.min_replicas if live is None else int(live["spec"].get("replicas", 1))
        found[kind] = ordered if report is None else report.desired.get(kind, ordered)
    return found


def names_of(seen: Observed, at: datetime.datetime) -> ModelNames:
    """The model names of a service at a time."""
    view = seen.gateways
    answered = view.models.get(key_of(seen.raw))
    complete = view.answering == view.present
    return model_names(seen.raw, claimed(seen.raw), seen.owned_by, answered, complete, at)


def sight_of(
    seen: Observed,
    todo: Plan | None,
    rejected: str | None,
    report: Report | None,
    platform: Platform,
    names: ModelNames,
) -> Sight:
    """What the status is made from."""
    raw_meta = seen.raw["metadata"]
    key = (raw_meta["namespace"], raw_meta["name"])
    long_name = "/".join(key)
    service = seen.service
    owner = seen.owned_by.get(claimed(seen.raw), long_name)
    view = seen.gateways
    return Sight(
        service=seen.raw,
        tiers=_tiers(seen, todo, report) if todo else (),
        report=report,
        gateways_present=view.present,
        gateways_say=view.why,
        routable=view.routable.get(key, 0) if view.answering else None,
        model_names=names.listed,
        former=names.former,
        name_pending=names.pending,
        name_taken_by=None if owner == long_name else owner,
        invalid=seen.problems,
        rejected=rejected,
        url=platform.gateway.url,
        sleeps=service is not None and _sleeps(service),
        fallback=seen.fallback,
    )


def _sleeps(service: InferenceService) -> bool:
    """May all its tiers go, and will they come back by themselves?"""
    scaling = service.spec.scaling
    acts = scaling.mode == "Auto" and not scaling.paused
    return acts and all(tier.min_replicas == 0 for _, tier in service.spec.tiers.items())


def _tiers(seen: Observed, todo: Plan, report: Report | None) -> tuple[TierSight, ...]:
    assert seen.service is not None
    replicas = desired(seen, seen.service, report)
    return tuple(
        TierSight(
            kind=kind,
            desired=replicas[kind],
            deployment=seen.children.get(("Deployment", meta.tier_name(seen.service.metadata.name, kind))),
            pods=tuple(p for p in seen.pods if role_of(p) == kind),
            revision=todo.revisions[kind],
        )
        for kind, _ in seen.service.spec.tiers.items()
    )
