"""The scaling tick: what was heard of all services, one pass of the core over them, and what differs is set.

Only `spec.replicas` is written here, through the scale subresource and under the scaler's own field manager, so that
it never meets the rest of the Deployment, and so that another scaler could own that one field instead.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plimsoll.adapters.about import Start
from plimsoll.adapters.kube import Kube
from plimsoll.api import labels
from plimsoll.api.events import Event, EventReason
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers import explain, memory, report, starts, victims
from plimsoll.controllers.gauges import Gauges
from plimsoll.controllers.hearing import SILENT_SECONDS, Hearing
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.past import Past
from plimsoll.controllers.report import Report
from plimsoll.controllers.store import Key, Store, key_of, role_of, version_of
from plimsoll.core.admission.published import Published, from_dict
from plimsoll.core.autoscaler import Seen, TierSeen, Wish
from plimsoll.core.autoscaler.fleet import decide_all
from plimsoll.core.autoscaler.gatekeeper import Gatekeeper
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.errors import ClusterError, InvalidSpec, NotFound
from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About, EngineReading, GatewayReading, History
from plimsoll.core.scaling import Mode, TierDecision
from plimsoll.core.scaling.leaving import load
from plimsoll.core.signals import Heard, Listener
from plimsoll.core.transfer import Moved, Verdict, computing_s, judge
from plimsoll.core.variants import Variant
from plimsoll.resources import meta
from plimsoll.telemetry import metrics

Object = dict[str, Any]
Tell = Callable[[Object, Event], Awaitable[None]]
Asked = tuple[Service, Seen, Wish]

log = logging.getLogger(__name__)

REPORT_SECONDS = 60.0  # between two looks at whether the figures in the status have moved
REST_SECONDS = 4.0  # an idle service is looked at so often, and at once when a request comes
PATIENCE_SECONDS = 15.0  # for a launcher's last word on a start that is over
TRANSFER_SECONDS = 10.0  # between two looks at whether KV transfer pays
FAILED_SECONDS = 30.0  # until a service is tried again whose decision failed
DEFAULT_SHARE = 0.95  # where a service promises nothing, percentiles are still looked at


def _told(status: Object) -> Published | None:
    """What an earlier process has told the gateways."""
    try:
        return from_dict(status["admission"]) if "admission" in status else None
    except ValueError:
        return None


def wish(service: InferenceService, now_s: float) -> Wish:
    """What the user wants, as the core takes it."""
    spec = service.spec
    slo = None if spec.slo is None else spec.slo.to_core()
    return Wish(service.policy(now_s), slo, spec.scaling.headroom_share, spec.scaling.horizon_s, service.classes)


@dataclass(frozen=True)
class Change:
    """One tier whose Deployment has other replicas than decided."""

    raw: Object
    deployment: Object
    tier: str
    before: int
    decision: TierDecision

    def event(self, going: str = "") -> Event:
        """going: who goes, in words."""
        after, generation = self.decision.replicas, self.deployment["metadata"].get("generation")
        reason = EventReason.SCALED_UP if after > self.before else EventReason.SCALED_DOWN
        if not (after and self.before):
            reason = EventReason.SCALED_FROM_ZERO if after else EventReason.SCALED_TO_ZERO
        message = f"{self.tier} {self.before} -> {after}: {self.decision.why}{going and f'; {going}'}"
        return Event(reason, message, f"{self.tier}/{self.before}/{after}/{generation}")


@dataclass
class _Known:
    """One service in this process. starting: pods that were seen before they were ready, so that their start counts."""

    service: Service
    listener: Listener
    gatekeeper: Gatekeeper
    uid: str  # of the object: another one of the same name begins anew
    kept: object  # what an earlier process had learned, as the status has it
    met_s: float
    transfer: Verdict | None = None
    transfer_s: float = -math.inf  # when it was last judged
    starting: set[str] = field(default_factory=set)
    report: Report | None = None
    reported_s: float = -math.inf
    horizon_s: float | None = None  # as the user last had it
    hearing: Hearing = field(default_factory=Hearing)
    arrived: dict[str, float] = field(default_factory=dict)  # as each gateway last counted
    variants: dict[str, tuple[Object, Variant]] = field(default_factory=dict)  # of each tier, and what told it
    rest_s: float = -math.inf  # until when nothing need be decided
    failed_s: float = -math.inf  # when an error last kept it from being decided
    seen_raw: Object | None = None
    heard: tuple[float, Heard] | None = None  # by the last tick that decided, and when that was

    def stir(self, gateway: str, arrived: float) -> None:
        """A gateway has counted: what arrives ends the rest."""
        if self.arrived.get(gateway) != arrived:
            self.rest_s = -math.inf
        self.arrived[gateway] = arrived

    def keep(self, gateways: Iterable[str], pods: Iterable[str]) -> None:
        """Forget those that are gone: a pod may go before it was ever ready."""
        for gone in self.arrived.keys() - set(gateways):
            del self.arrived[gone]
        self.starting &= set(pods)

    def variant(self, tier: str, deployment: Object) -> Variant:
        """What a tier's new pods are made of; read when its Deployment is another one than before."""
        before = self.variants.get(tier)
        if before is None or before[0] is not deployment:
            before = self.variants[tier] = deployment, starts.variant(deployment["spec"].get("template") or {})
        return before[1]

    def judge_transfer(self, moved: Moved, now_s: float) -> None:
        """Whether remote prefill pays, by what the decode engines moved and what computing it would have taken them.

        A verdict holds until there is another: where moving is dear gates move little, and too little tells nothing.
        """
        if 0.0 <= now_s - self.transfer_s < TRANSFER_SECONDS:
            return
        self.transfer_s = now_s
        tier, workload = self.service.tiers.get(Role.DECODE), self.service.workload
        if tier is None or tier.model is None or tier.limits is None or isinstance(workload, Unknown):
            return
        took_s = computing_s(tier.model, workload, tier.limits.token_budget)
        if not isinstance(took_s, Unknown):
            found = judge(moved, took_s, self.transfer is None or self.transfer.pays)
            if not isinstance(found, Unknown):
                self.transfer = found

    @property
    def slow_transfer(self) -> str | None:
        """Why remote prefill does not pay; None where it does, or where that is not known."""
        return self.transfer.words if self.transfer is not None and not self.transfer.pays else None

    def rests(self, raw: Object, now_s: float) -> bool:
        """Nothing has come since the last look, nothing is under way, and the user wants what was wanted then."""
        return raw is self.seen_raw and 0.0 < self.rest_s - now_s <= REST_SECONDS

    def is_failed(self, now_s: float) -> bool:
        """An error kept it from being decided, lately."""
        return 0.0 <= now_s - self.failed_s < FAILED_SECONDS

    def lay_to_rest(self, raw: Object, seen: Seen, wanted: Wish, moves: bool, now_s: float) -> None:
        """Until the next look, where nothing is sized or nothing happens."""
        idle = not seen.heard.rate_per_s and seen.heard.coverage == 1.0
        settled = all(tier.ready == tier.replicas and not tier.starting for tier in seen.tiers.values())
        rest = not moves and (wanted.slo is None or (idle and settled))
        self.seen_raw = raw
        self.rest_s = now_s + REST_SECONDS if rest else -math.inf


@dataclass(frozen=True)
class Sources:
    """Where the tick hears from. gateways: fresh readings, and names of all there are. about, start: by pod.

    running: requests that a pod's engine last told of. stir: told of a service to which requests come, so that its
    engines are asked more often. history: None where no store of metrics is named. second_hand: tiers of a service some
    engine of which is known by such a store alone.
    """

    gateways: Callable[[], tuple[Iterable[GatewayReading], Iterable[str]]]
    about: Callable[[str], About | None]
    start: Callable[[str], Start | None]
    running: Callable[[str], float | None] = lambda pod: None
    stir: Callable[[Key], None] = lambda key: None
    history: History | None = None
    second_hand: Callable[[Key], tuple[str, ...]] = lambda key: ()


class Autoscaler:
    """Decides for every service, after each round of the gateways, and remembers what it has learned of each."""

    def __init__(
        self,
        store: Store,
        kube: Kube,
        sources: Sources,
        tell: Tell,
        changed: Callable[[Key], None],
        monotonic: Callable[[], float] = time.monotonic,
        errors: ObjectErrors | None = None,
    ) -> None:
        """changed: called with a service whose report says something new."""
        self._errors = errors or ObjectErrors()
        self._store = store
        self._kube = kube
        self._sources = sources
        self._tell = tell
        self._changed = changed
        self._monotonic = monotonic
        self._known: dict[Key, _Known] = {}
        self._gauges = Gauges()
        self._past = Past(sources.history)

    def hear_engine(self, key: Key, role: Role, reading: EngineReading) -> None:
        """An engine's metrics have come."""
        known = self._known.get(key)
        if known is not None:
            with self._apart(key, reading.at_s):
                known.listener.hear_engine(role, reading)

    def report(self, key: Key) -> Report | None:
        """What the status says of the scaling of a service; None before its first tick."""
        known = self._known.get(key)
        return None if known is None else known.report

    def explain(self, key: Key) -> dict[str, Any] | None:
        """The last decisions of a service and what they rest on; None for one that is not known."""
        known = self._known.get(key)
        if known is None:
            return None
        return explain.document(known.service, key, time.time(), known.horizon_s, known.heard)

    async def tick(self, now_s: float) -> float:
        """One pass over all services. now_s: seconds since the epoch. Returns the seconds in which nothing else ran."""
        began_s = self._monotonic()
        due = self.decide(now_s)
        took_s = self._monotonic() - began_s
        for change in due:
            with self._apart(key_of(change.raw), now_s):
                await self._set(change)
        for key, known in self._known.items():
            if not known.is_failed(now_s):
                self._errors.clear(Stage.SCALING, key, _subject(key))
        self._past.look({key: known.service for key, known in self._known.items()}, now_s)
        return took_s

    def decide(self, now_s: float) -> list[Change]:
        """Every tier that must be scaled; reads the caches alone."""
        typed = {key_of(raw): (raw, service) for raw, service in self._services(now_s)}
        for gone in self._known.keys() - typed.keys():
            del self._known[gone]
            self._gauges.forget(gone)
        readings, gateways = self._sources.gateways()
        self._hear(tuple(readings), now_s)
        asked = {}
        for key, (raw, service) in typed.items():
            with self._apart(key, now_s):
                known = self._known.get(key)
                if known is None or known.uid != raw["metadata"]["uid"]:
                    known = self._meet(key, raw, service, now_s)
                if known.rests(raw, now_s) or known.is_failed(now_s):
                    continue
                wanted = wish(service, now_s)
                asked[key] = (known.service, self._see(key, raw, known, wanted, tuple(gateways), now_s), wanted)
        due: list[Change] = []
        for key, (_, seen, wanted) in self._decided(asked, now_s).items():
            with self._apart(key, now_s):
                raw, service = typed[key]
                known = self._known[key]
                known.heard = now_s, seen.heard
                known.gatekeeper.tell(known.service, seen, wanted, tuple(gateways), now_s)
                self._judge(key, service, seen, wanted, tuple(gateways), now_s)
                changes = list(self._changes(raw, known.service, wanted))
                known.lay_to_rest(raw, seen, wanted, bool(changes), now_s)
                due += changes
        return due

    def _decided(self, asked: dict[Key, Asked], now_s: float) -> dict[Key, Asked]:
        """Those for which a decision was made: all in one pass or, where that fails, each by itself."""
        try:
            decide_all(asked, now_s)
        except Exception:  # of one of them, which is found below
            log.exception("the pass over all services failed, each is decided by itself")
        else:
            return asked
        found = {}
        for key, one in asked.items():
            with self._apart(key, now_s):
                decide_all({key: one}, now_s)
                found[key] = one
        return found

    @contextlib.contextmanager
    def _apart(self, key: Key, now_s: float) -> Iterator[None]:
        """The tick's boundary: an error about one service stops no other. Its own replicas stay, and it says so."""
        try:
            yield
        except Exception as error:  # uncaught it would end the operator, now and after each restart
            log.exception("not decided, its replicas stay", extra={"service": "/".join(key)})
            self._errors.record(Stage.SCALING, key, _subject(key), error)
            known = self._known.get(key)
            if known is not None:
                known.failed_s = now_s
                known.report = report.failed(known.report or self._nothing(known, now_s), error)
                self._changed(key)

    def _services(self, now_s: float) -> Iterable[tuple[Object, InferenceService]]:
        for raw in self._store.all(labels.KIND):
            service: InferenceService | InvalidSpec | None = None
            if not raw["metadata"].get("deletionTimestamp"):
                with self._apart(key_of(raw), now_s):
                    service = self._store.typed(raw)
            if isinstance(service, InferenceService):
                yield raw, service

    def _meet(self, key: Key, raw: Object, service: InferenceService, now_s: float) -> _Known:
        roles = [kind for kind, _ in service.spec.tiers.items()]
        status = raw.get("status") or {}
        kept, listener = status.get("learned"), Listener([Role(role) for role in roles])
        keeper, uid = Gatekeeper.after(_told(status)), raw["metadata"]["uid"]
        known = _Known(Service.of(roles), listener, keeper, uid, kept, now_s)
        self._known[key] = known
        memory.recall(known.service, kept)
        memory.retell(known.service, status)
        self._past.meet(key, known.service)
        return known

    def _nothing(self, known: _Known, now_s: float) -> Report:
        """Before the first report of this process."""
        return report.nothing(known.kept if isinstance(known.kept, dict) else None, now_s)

    def _hear(self, readings: Iterable[GatewayReading], now_s: float) -> None:
        for reading in readings:
            for name, counted in reading.services.items():
                namespace, _, short = name.partition("/")
                known, raw = self._known.get((namespace, short)), self._store.get(labels.KIND, (namespace, short))
                if known is not None and raw is not None:
                    with self._apart((namespace, short), now_s):
                        known.hearing.took(reading.gateway, counted.taken, version_of(raw), now_s)
                        known.stir(reading.gateway, counted.arrived)
                        known.listener.hear_gateway(reading.gateway, reading.born, reading.at_s, counted)
                        known.gatekeeper.sharing.hear(reading.gateway, reading.born, reading.at_s, counted)

    def _see(self, key: Key, raw: Object, known: _Known, wanted: Wish, gateways: tuple[str, ...], now_s: float) -> Seen:
        tiers: dict[str, TierSeen] = {}
        ready: dict[Role, list[str]] = {}
        pods = self._store.children("Pod", key)
        known.keep(gateways, [p["metadata"]["name"] for p in pods])
        for name in known.service.tiers:
            own = [p for p in pods if _of_tier(p, name)]
            ready[Role(name)] = [p["metadata"]["name"] for p in own if starts.is_ready(p)]
            live = self._deployment(raw, name)
            if live is not None:
                tiers[name] = self._tier(known, name, live, own, ready[Role(name)], now_s)
        known.horizon_s = wanted.horizon_s
        share = DEFAULT_SHARE if wanted.slo is None else wanted.slo.share
        heard = known.listener.heard(now_s, ready, gateways, share)
        if heard.fresh and heard.rate_per_s:
            self._sources.stir(key)
        return Seen(heard, tiers)

    def _tier(
        self, known: _Known, name: str, live: Object, pods: list[Object], ready: list[str], now_s: float
    ) -> TierSeen:
        able = set(ready)
        waiting = [p for p in pods if p["metadata"]["name"] not in able]
        known.starting |= {p["metadata"]["name"] for p in waiting}
        for pod in pods:
            pod_name = pod["metadata"]["name"]
            if pod_name in able and pod_name in known.starting:
                told = self._sources.start(pod_name)
                if starts.told_whole(told) or starts.ready_for_s(pod, now_s) > PATIENCE_SECONDS:
                    known.starting.discard(pod_name)
                    known.service.started(name, starts.took(pod, told), starts.variant(pod))
        return TierSeen(
            replicas=int(live["spec"].get("replicas", 1)),
            ready=len(ready),
            starting=tuple(starts.starting(p, self._sources.start(p["metadata"]["name"])) for p in waiting),
            about=next(filter(None, map(self._sources.about, ready)), None),
            variant=known.variant(name, live),
        )

    def _deployment(self, raw: Object, tier: str) -> Object | None:
        namespace, name = key_of(raw)
        live = self._store.get("Deployment", (namespace, meta.tier_name(name, tier)))
        return live if live is not None and meta.owner_uid(live) == raw["metadata"]["uid"] else None

    def _changes(self, raw: Object, service: Service, wanted: Wish) -> Iterable[Change]:
        if wanted.policy.mode is not Mode.AUTO or wanted.policy.paused or service.last is None:
            return
        for tier, decision in service.last.decision.tiers.items():
            live = self._deployment(raw, tier)
            before = None if live is None else int(live["spec"].get("replicas", 1))
            if live is not None and before is not None and before != decision.replicas:
                yield Change(raw, live, tier, before, decision)

    def _judge(
        self, key: Key, spec: InferenceService, seen: Seen, wanted: Wish, gateways: tuple[str, ...], now_s: float
    ) -> None:
        """Make the service's report anew where it says something else, and now and then for its figures."""
        known = self._known[key]
        self._gauges.show(key, known.service, seen, wanted)
        old = known.report
        told = known.gatekeeper.told
        silent = known.hearing.silence(seen, told is not None and told.limits is not None, gateways, now_s)
        silent = silent._replace(second_hand=self._sources.second_hand(key))
        shedding = report.sheds(seen, old)
        known.judge_transfer(seen.heard.moved, now_s)
        slow = known.slow_transfer
        if slow is not None and old is not None and old.slow_transfer is not None:
            slow = old.slow_transfer  # figures that moved a little are no news
        same = old is not None and old.state == report.state(known.service, seen, silent, shedding) and old.told is told
        same = same and old is not None and bool(old.slow_transfer) == bool(slow)
        if same and now_s - known.reported_s < REPORT_SECONDS:
            return
        unsure = any(isinstance(need, Unknown) for need in known.service.needs.values())
        if old is None and known.kept and unsure and now_s - known.met_s < SILENT_SECONDS:
            return  # after a restart: what the status has is better than nothing known yet
        last = old or self._nothing(known, now_s)
        new = report.make(spec, known.service, seen, wanted, last, told, slow, silent, now_s)
        known.reported_s = now_s
        if new != old:
            known.report = new
            self._changed(key)

    async def _set(self, change: Change) -> None:
        """A tier that cannot be set is tried again at the next tick."""
        target = change.deployment["metadata"]
        going = await self._mark(change) if change.decision.replicas < change.before else ""
        try:
            await self._kube.scale(target["namespace"], target["name"], change.decision.replicas, labels.SCALER)
        except NotFound:
            return
        except ClusterError as error:
            log.warning("could not scale", extra={"deployment": target["name"], "error": str(error)})
            return
        direction = "up" if change.decision.replicas > change.before else "down"
        metrics.OPERATOR_SCALED.labels(change.tier, direction).inc()
        try:
            await self._tell(change.raw, change.event(going))
        except ClusterError as error:
            log.warning("scaled without an Event", extra={"deployment": target["name"], "error": str(error)})

    async def _mark(self, change: Change) -> str:
        """Name those that are to go; returns who, in words. A failure leaves the choice to Kubernetes."""
        key, after = key_of(change.raw), change.decision.replicas
        service = "/".join(key)
        told = [one.services[service] for one in self._sources.gateways()[0] if service in one.services]
        going = victims.choose(
            (p for p in self._store.children("Pod", key) if _of_tier(p, change.tier)),
            after,
            lambda pod: load(told, pod, self._sources.running(pod)),
        )
        try:
            await victims.mark(self._kube, self._store, going)
        except (ClusterError, TimeoutError) as error:
            log.warning("could not mark who goes", extra={"service": service, "error": str(error)})
            return "which pods go is left to Kubernetes: the emptiest could not be marked"
        return going.words


def _subject(key: Key) -> str:
    return f"{labels.KIND} {'/'.join(key)}"


def _of_tier(pod: Object, tier: str) -> bool:
    return role_of(pod) == tier and not starts.is_leaving(pod)
