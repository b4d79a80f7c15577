"""One queue for each service, whatever the number of gateways: asks the owner of a service, or decides here.

Problem: gateways that decide alone must divide each engine's slots, and each knows only its own quotas, reservations,
rejections and prefixes. With few slots a share is far less than the whole.

Idea: one ready gateway owns each service and decides for all of them. Only sizes, hashes and names travel, and the end
of each request. Every gateway counts the requests that its own Envoy carries. So it can decide by itself, with an equal
share, when the owner does not answer, and it can tell a new owner what runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.gateway import error_messages
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.inflight import InFlightRequest
from plimsoll.gateway.one_queue import conversions, messages
from plimsoll.gateway.one_queue.applied_engines import AppliedEngines
from plimsoll.gateway.one_queue.owner_link import FallbackReason, OwnerLink, Result
from plimsoll.gateway.one_queue.owner_server import OwnerServer
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from plimsoll.gateway.one_queue.peer_views import PeerViews
from plimsoll.gateway.one_queue.spent_limits import SpentLimits
from plimsoll.gateway.one_queue.tls_stream import PeerTls
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.picker_replies import slo_deadlines
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.retry_identity import shared_seed
from plimsoll.gateway.service_catalog import EMPTY_CATALOG, ServiceCatalog, ServiceEntry
from plimsoll.gateway.settings import PickerSettings
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

MAX_MOVES: Final = 3  # of one request from owner to owner, before this gateway decides
LOG_SECONDS: Final = 10.0  # between two messages about one owner that does not answer


class _PendingQuestion:
    """A request that another gateway decides about. `link` and `number` are those of the open question."""

    __slots__ = ("ctx", "link", "moves", "number", "reply")

    def __init__(self, ctx: RequestContext, reply: asyncio.Future[bytes]) -> None:
        self.ctx = ctx
        self.reply = reply
        self.link: OwnerLink | None = None
        self.number = 0
        self.moves = 0


class OneQueue:
    """Implements `Owners` for one picker. Start it with `start`, and keep `set_pods` up to date."""

    def __init__(
        self,
        picker: Picker,
        settings: PickerSettings,
        has_applied: Callable[[str, str], bool],
        tls: PeerTls | None = None,
    ) -> None:
        """`has_applied` returns whether this gateway's Envoy knows an address of a service, by the service's key.

        `tls`: for connections to other gateways, None for plain TCP.

        Raises OSError if the secret cannot be read, and ValueError if it is too short.
        """
        assert settings.peer_secret is not None
        self._picker = picker
        self._settings = settings
        self._secret = PeerSecret(settings.peer_secret, self._on_secret)
        self._ownership = Ownership(settings.pod)
        self._views = PeerViews(self._ownership, picker.on_ownership_change)
        self._links: dict[str, OwnerLink] = {}
        self._spent = SpentLimits(picker, self._ownership, self._links)
        self._server = OwnerServer(picker, self._ownership, self._secret, self._views, self._spent, tls)
        self._tls = tls
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pending: dict[str, _PendingQuestion] = {}
        self._applied_engines = AppliedEngines(has_applied)
        self._catalog: ServiceCatalog = EMPTY_CATALOG
        self._sized: frozenset[str] = frozenset()  # the keys of the services with an SLO
        self._external: Mapping[str, int] = {}
        self._logged_s: dict[str, float] = {}
        self._on_secret(self._secret.accepted[0])
        picker.key_limits.gateways = self._gateways_of_key
        picker.admission.gateways = self._gateways_of_service
        picker.owners = self

    async def start(self) -> None:
        """Open the port for other gateways. Raises OSError."""
        await self._server.start(self._settings.address, self._settings.peer_port)

    async def follow_secret(self) -> None:
        """Follow the file of the secret. Never returns."""
        await self._secret.follow()

    def close(self) -> None:
        """End all connections. Requests that wait for another gateway are decided here."""
        self._server.close()
        self._spent.close()
        for task in self._tasks.values():
            task.cancel()

    # ---------------------------------------------------------------- pods and services

    def set_pods(self, ready: Mapping[str, str], existing: Iterable[str]) -> None:
        """Set the ready gateway pods that stay, with their addresses, and the names of all that exist."""
        own, now = self._settings.pod, time.monotonic()
        for name, link in list(self._links.items()):
            if link.address != ready.get(name):
                self._tasks.pop(name).cancel()
                del self._links[name]
        for name, address in ready.items():
            if name != own and name not in self._links:
                link = self._links[name] = OwnerLink(
                    name,
                    address,
                    self._settings.peer_port,
                    own,
                    self._secret,
                    self._views,
                    self._settings.owner_ack_seconds,
                    self._on_link_ready,
                    self._tls,
                )
                self._tasks[name] = asyncio.create_task(link.run())
        gateway_metrics.GATEWAY_PEERS.set(len(self._links))
        if self._ownership.set_candidates(ready):
            self._on_owners_changed(now)
        self._server.keep_gateways({*existing, *ready}, ready.values())

    def set_catalog(self, catalog: ServiceCatalog) -> None:
        self._catalog = catalog
        self._applied_engines.check()
        policies = ((key, service.policy) for key, service in catalog.services.items())
        sized = {key: policy.fallback for key, policy in policies if policy is not None}
        before, self._sized = self._sized, frozenset(sized)
        fallbacks = {key: fallback for key, fallback in sized.items() if fallback}
        if self._ownership.set_fallbacks(fallbacks) or before != self._sized:
            asyncio.get_running_loop().call_soon(lambda: self._on_owners_changed(time.monotonic()))
        elif self._spent.is_waiting:
            asyncio.get_running_loop().call_soon(lambda: self._spent.take_back(time.monotonic()))

    def owner_of(self, key: str) -> str:
        """Returns the name of the gateway that owns a service."""
        return self._ownership.owner_of(key)

    def update_metrics(self) -> None:
        """Update the metrics just before they are read."""
        own = self._settings.pod
        owned = sum(
            self._ownership.owner_of(key) == own for key, service in self._catalog.services.items() if service.policy
        )
        gateway_metrics.GATEWAY_OWNED_SERVICES.set(owned)
        gateway_metrics.GATEWAY_PEERS_CONNECTED.set(sum(link.is_ready for link in self._links.values()))

    def _on_owners_changed(self, now: float) -> None:
        """Hand over what belongs to other owners now: queued requests, and the knowledge of running ones.

        Call this too when services have got or lost their SLO: those without one have no owner.
        """
        self._spent.collect(now)
        for link in self._links.values():
            link.ping()
            self._report_running(link, now, is_all=False)
            self._spent.hand_over(link, now)
        self._spent.copy_all(self._links.values(), now)
        self._views.check()
        self._server.hand_over(now)
        for ctx in self._picker.queue.requests():
            if not ctx.via and self._owner_link(ctx.service) is not None:
                self._move(ctx, now)
        self._picker.on_ownership_change()

    def _move(self, ctx: RequestContext, now: float) -> None:
        """Ask the new owner about a request that is queued here."""
        reply = ctx.response
        self._picker.remove_queued(ctx, now)
        if reply is not None and not reply.done():
            self._ask_owner(self._track(ctx, reply), now)

    def _owner_link(self, key: str) -> OwnerLink | None:
        """Returns the link to the owner of a service, None if it is this gateway, or if the service has no SLO."""
        service = self._catalog.services.get(key)
        if not self._links or service is None or service.policy is None:
            return None
        return self._links.get(self._ownership.owner_of(key))

    def _gateways_of_service(self, key: str) -> int:
        return self._shared_with(self._ownership.owner_of(key))

    def _gateways_of_key(self, name: str) -> int:
        return self._shared_with(self._ownership.owner_of_key(name))

    def _shared_with(self, owner: str) -> int:
        """Returns among how many gateways this one shares what the owner has alone."""
        if self._views.differ:
            return self._views.gateways
        return 1 if owner == self._settings.pod else self._ownership.gateways

    def _on_secret(self, secret: bytes) -> None:
        self._picker.digest_seed = shared_seed(secret)

    # ---------------------------------------------------------------- requests of this gateway

    def ask(self, service: ServiceEntry, ctx: RequestContext, now: float) -> asyncio.Future[bytes] | None:
        if not self._links or not conversions.is_expressible(ctx):
            return None
        key_link = self._key_link(ctx)
        if key_link is None and (not ctx.route.is_booked or self._owner_link(service.key) is None):
            return None
        pending = self._track(ctx, asyncio.get_running_loop().create_future())
        if key_link is None:
            self._ask_owner(pending, now)
        else:
            self._ask_charge(pending, service, key_link)
        return pending.reply

    def withdraw(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.reply.cancel()

    def reject_revoked(self, now: float) -> None:
        for pending in list(self._pending.values()):
            if (rejection := self._picker.revoked.rejection(pending.ctx)) is not None:
                if pending.link is not None:
                    pending.link.withdraw(pending.number)
                ctx = pending.ctx
                self._resolve(pending, self._picker.reject(rejection, ctx.route.shape, ctx.service), now)

    def _track(self, ctx: RequestContext, reply: asyncio.Future[bytes]) -> _PendingQuestion:
        pending = self._pending[ctx.request_id] = _PendingQuestion(ctx, reply)
        self._picker.queue.add_bytes(ctx.client, ctx.body_bytes)
        reply.add_done_callback(lambda done: self._on_cancelled(pending) if done.cancelled() else None)
        return pending

    def _untrack(self, pending: _PendingQuestion) -> bool:
        """Returns whether another gateway still had to decide about the request."""
        if self._pending.get(pending.ctx.request_id) is not pending:
            return False
        del self._pending[pending.ctx.request_id]
        self._picker.queue.add_bytes(pending.ctx.client, -pending.ctx.body_bytes)
        return True

    def _on_cancelled(self, pending: _PendingQuestion) -> None:
        """The client of a request has left."""
        if self._untrack(pending):
            if pending.link is not None:
                pending.link.withdraw(pending.number)
            self._picker.attributes.answer(pending.ctx.request_id, time.monotonic())

    def _key_link(self, ctx: RequestContext) -> OwnerLink | None:
        """Returns the link to the owner of the request's key, None if the key is to be charged here."""
        if ctx.is_charged or not ctx.identity.is_limited:
            return None
        link = self._links.get(self._ownership.owner_of_key(ctx.identity.key_name))
        if link is None:
            return None
        obstacle = link.obstacle()
        if obstacle is not None:
            self._count_fallback(link, obstacle)
            return None
        return link

    def _ask_charge(self, pending: _PendingQuestion, service: ServiceEntry, link: OwnerLink) -> None:
        identity, number = pending.ctx.identity, link.next_number()
        charge = messages.Charge(
            number,
            identity.key_name,
            identity.requests_per_minute,
            identity.tokens_per_minute,
            self._picker.tokens_charged(service, pending.ctx),
        )
        pending.link, pending.number = link, number
        link.ask(charge, pending.ctx.request_id, lambda result: self._on_charged(pending, link, result))

    def _on_charged(self, pending: _PendingQuestion, link: OwnerLink, result: Result) -> None:
        now = time.monotonic()
        if isinstance(result, messages.Charged):
            pending.ctx.is_charged, pending.ctx.rate_headers = True, result.headers
            if result.message:
                self._resolve(
                    pending, self._picker.reject_charge(pending.ctx, conversions.to_rejection(result), now), now
                )
                return
        else:
            self._count_fallback(link, result if isinstance(result, FallbackReason) else FallbackReason.REFUSED)
        self._ask_owner(pending, now)

    def _ask_owner(self, pending: _PendingQuestion, now: float) -> None:
        """Ask the owner of the request's service, or decide here if it cannot be reached."""
        picker, ctx = self._picker, pending.ctx
        pending.link = None
        link = self._owner_link(ctx.service) if ctx.route.is_booked and pending.moves < MAX_MOVES else None
        if link is None:
            self._decide_here(pending, now)
            return
        service = self._catalog.services[ctx.service]
        if (rejection := picker.charge(service, ctx, now)) is not None:
            self._resolve(pending, picker.reject_charge(ctx, rejection, now), now)
            return
        ctx.rate_headers = ctx.rate_headers or picker.key_limits.headers(ctx.identity, now)
        obstacle = link.obstacle()
        if obstacle is not None:
            self._count_fallback(link, obstacle)
            self._decide_here(pending, now)
            return
        pending.link, pending.number = link, link.next_number()
        question = conversions.to_question(pending.number, ctx, picker.queue.has_memory(ctx.client, 0), now)
        link.ask(question, ctx.request_id, lambda result: self._on_answer(pending, link, result))

    def _on_answer(self, pending: _PendingQuestion, link: OwnerLink, result: Result) -> None:
        now = time.monotonic()
        if isinstance(result, messages.Answer):
            self._follow(pending, link, result, now)
            return
        pending.moves += 1
        if self._owner_link(pending.ctx.service) is not link:
            self._ask_owner(pending, now)  # the owner has changed meanwhile
            return
        self._count_fallback(link, result if isinstance(result, FallbackReason) else FallbackReason.REFUSED)
        self._decide_here(pending, now)

    def _follow(self, pending: _PendingQuestion, link: OwnerLink, answer: messages.Answer, now: float) -> None:
        """Reply as the owner decided, and count the request if it is sent."""
        picker, ctx, running = self._picker, pending.ctx, answer.running
        gateway_metrics.GATEWAY_OWNER_ANSWERS.inc()
        ctx.is_retry, ctx.target_service = answer.is_retry, answer.service
        if running is not None:
            service = self._catalog.services.get(running.service)
            deadlines = None if service is None else slo_deadlines(service, ctx)
            in_flight, forwarded = conversions.from_running(running, "", now, ctx.tenant, deadlines, ctx.is_foreign)
            ctx.prefill, ctx.admission_request = running.prefill or "", forwarded.request
            picker.inflight.add(running.request_id, in_flight)
            picker.admission.adopt(forwarded, now)
            if self._owner_link(running.service) is not link:
                self.on_sent(running.request_id, now)  # the owner has changed meanwhile
            self._applied_engines.when_applied(
                running.service, in_flight.endpoint, lambda: self._resolve(pending, answer.reply, time.monotonic())
            )
            return
        if answer.request_class:
            ctx.admission_request = AdmissionRequest(ctx.request_id, answer.request_class, ctx.tenant, ctx.arrived_s, 0)
        self._resolve(pending, answer.reply, now)

    def _decide_here(self, pending: _PendingQuestion, now: float) -> None:
        picker, ctx = self._picker, pending.ctx
        if not self._untrack(pending):
            return
        service = self._catalog.services.get(ctx.service)
        if service is None:
            rejection = error_messages.model_not_found(ctx.model)
            self._set(pending, picker.reject(rejection, ctx.route.shape), now)
            return
        if ctx.fallback is not None and ctx.fallback not in self._catalog.services:
            ctx.fallback = None
        reply = picker.decide_here(service, ctx, now)
        if isinstance(reply, bytes):
            self._set(pending, reply, now)
            return
        queued, outer = asyncio.ensure_future(reply), pending.reply
        outer.add_done_callback(lambda done: queued.cancel() if done.cancelled() else None)
        queued.add_done_callback(lambda done: _copy(done, outer))

    def _resolve(self, pending: _PendingQuestion, reply: bytes, now: float) -> None:
        if self._untrack(pending):
            self._set(pending, reply, now)

    def _set(self, pending: _PendingQuestion, reply: bytes, now: float) -> None:
        if not pending.reply.done():
            pending.reply.set_result(self._picker.attributes.tag(pending.ctx, reply, now))

    def _count_fallback(self, link: OwnerLink, reason: FallbackReason) -> None:
        gateway_metrics.GATEWAY_OWNER_FALLBACKS.labels(reason.value).inc()
        now = time.monotonic()
        if now - self._logged_s.get(link.name, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_s[link.name] = now
            share = f"1/{self._shared_with(link.name)} of the capacity"
            log.warning("the gateway %s does not decide (%s): deciding here, with %s", link.name, reason.value, share)

    # ---------------------------------------------------------------- what this gateway's Envoy carries

    def on_sent(self, request_id: str, now: float) -> None:
        in_flight = self._picker.inflight.get(request_id)
        if in_flight is None or in_flight.via:
            return
        link = self._owner_link(in_flight.service)
        if link is not None and link.is_ready and (running := self._running(request_id, in_flight, now)) is not None:
            link.send(messages.RunningRequests([running]))

    def on_first_token(self, request_id: str, in_flight: InFlightRequest, record: AccessRecord) -> None:
        link = None if in_flight.via else self._owner_link(in_flight.service)
        if link is not None and link.takes_first_tokens:
            link.send(conversions.to_first_token(request_id, record))

    def on_end(self, request_id: str, in_flight: InFlightRequest, record: AccessRecord | None) -> None:
        link = None if in_flight.via else self._owner_link(in_flight.service)
        if link is not None and in_flight.is_booked:
            link.send(conversions.to_ended(request_id, record))

    def on_external(self, counts: Mapping[str, int]) -> None:
        if counts == self._external:
            return
        self._external = dict(list(counts.items())[: messages.MAX_EXTERNAL])
        for link in self._links.values():
            link.send(messages.External(dict(self._external)))

    def _on_link_ready(self, link: OwnerLink) -> None:
        link.send(messages.External(dict(self._external)))
        self._report_running(link, now := time.monotonic(), is_all=True)
        self._spent.on_link_ready(link, now)

    def _report_running(self, link: OwnerLink, now: float, *, is_all: bool) -> None:
        """Name the requests of the services that the other gateway owns."""
        running = list(self._running_at(link, now))
        for start in range(0, len(running), messages.MAX_BATCH):
            link.send(messages.RunningRequests(running[start : start + messages.MAX_BATCH]))
        if is_all:
            link.send(messages.RunningRequests([], is_last=True))

    def _running_at(self, link: OwnerLink, now: float) -> Iterator[messages.Running]:
        for request_id, in_flight in self._picker.inflight.requests():
            if in_flight.via or not in_flight.is_booked or self._owner_link(in_flight.service) is not link:
                continue
            if (running := self._running(request_id, in_flight, now)) is not None:
                yield running

    def _running(self, request_id: str, in_flight: InFlightRequest, now: float) -> messages.Running | None:
        forwarded = self._picker.admission.forwarded(request_id)
        return None if forwarded is None else conversions.to_running(request_id, in_flight, forwarded, now)


def _copy(done: asyncio.Future[bytes], outer: asyncio.Future[bytes]) -> None:
    if outer.done():
        return
    if done.cancelled():
        outer.cancel()
    elif (error := done.exception()) is not None:
        outer.set_exception(error)
    else:
        outer.set_result(done.result())
