"""The owner's side: decides about the requests of other gateways, and counts what their Envoys carry.

Problem: a gateway that is gone withdraws nothing. Its requests would occupy slots for ever, and its queued requests
would be sent to engines without a client.

Idea: everything belongs to a connection. When it ends, its queued requests end too. Its requests at engines stay for
`PEER_GRACE_SECONDS`, because Envoy outlives a picker, or until the gateway connects again and names those that run. A
gateway that leaves the list of pods has ended its streams.

Whoever reaches the port can open connections. Those that have not proved the secret have few places of their own. When
they are full, the oldest one makes room, first of those that do not come from a gateway's address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from plimsoll.gateway.identity import Identity
from plimsoll.gateway.one_queue import conversions, messages
from plimsoll.gateway.one_queue.connection import Connection, PeerConnection
from plimsoll.gateway.one_queue.frames import FrameError
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from plimsoll.gateway.one_queue.peer_views import PeerViews
from plimsoll.gateway.one_queue.spent_limits import SpentLimits
from plimsoll.gateway.one_queue.tls_stream import PeerTls
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.request_context import RequestContext
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256  # of gateways
MAX_UNPROVEN: Final = 32  # further ones, whose peers have not proved the secret yet
LOG_SECONDS: Final = 10.0  # between two messages about connections that were rejected
PEER_GRACE_SECONDS: Final = 30.0

_Queue = dict[str, tuple[int, RequestContext, "asyncio.Future[bytes]"]]  # by request ID: number, request, reply


class OwnerServer:
    """The listener for other gateways."""

    def __init__(
        self,
        picker: Picker,
        ownership: Ownership,
        peer_secret: PeerSecret,
        views: PeerViews,
        spent: SpentLimits,
        tls: PeerTls | None = None,
    ) -> None:
        """tls: None for plain TCP."""
        self._tls = tls
        self._picker = picker
        self._ownership = ownership
        self._peer_secret = peer_secret
        self._views = views
        self._spent = spent
        self._connections: set[Connection] = set()  # of gateways
        self._unproven: dict[Connection, None] = {}  # in the order in which they were opened
        self._addresses: frozenset[str] = frozenset()  # of the gateways
        self._logged_s = -LOG_SECONDS
        self._by_gateway: dict[str, Connection] = {}
        self._queued: dict[Connection, _Queue] = {}
        self._named: dict[Connection, set[str]] = {}  # running requests since the connection was made
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._existing: frozenset[str] = frozenset()
        self._server: asyncio.Server | None = None
        self._handlers: dict[type[messages.ToOwner], Callable[..., None]] = {
            messages.Ping: self._pong,
            messages.Question: self._decide,
            messages.FirstToken: self._record_first_token,
            messages.Ended: self._end,
            messages.Withdrawn: self._withdraw,
            messages.RunningRequests: self._adopt,
            messages.External: self._set_external,
            messages.Charge: self._charge,
            messages.SpentLimits: self._count_spent,
            messages.SpentCopies: self._keep_copies,
        }

    async def start(self, address: str, port: int) -> None:
        """Open the port. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(self._accept, address, port)

    def close(self) -> None:
        """Close the port and all connections."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._connections, *self._unproven]:
            connection.close()
        for timer in self._grace.values():
            timer.cancel()

    def keep_gateways(self, names: Collection[str], addresses: Collection[str]) -> None:
        """Drop the requests of gateways that have left. `addresses`: of those that are ready."""
        self._existing, self._addresses = frozenset(names), frozenset(addresses)
        gateways = {request.via for _, request in self._picker.inflight.requests() if request.via}
        for gone in (gateways | self._grace.keys()) - self._existing - self._by_gateway.keys():
            self._drop_gateway(gone)

    def hand_over(self, now: float) -> None:
        """Give up the requests of other gateways whose services have another owner now."""
        for connection, queue in self._queued.items():
            for request_id, (number, ctx, future) in list(queue.items()):
                if not self._is_owner(ctx.service):
                    del queue[request_id]
                    self._picker.remove_queued(ctx, now)
                    future.cancel()
                    connection.send(messages.Refused(number, is_moved=True))
        requests = self._picker.inflight.requests()
        self._drop([id for id, request in requests if request.via and not self._counts(request.service)])

    def _is_owner(self, service: str) -> bool:
        return self._ownership.owner_of(service) == self._ownership.own_name

    def _counts(self, key: str) -> bool:
        """Whether the requests of a service count here, whichever Envoy carries them. One that is unknown may come."""
        service = self._picker.catalog.services.get(key)
        return self._is_owner(key) and (service is None or service.policy is not None)

    def _accept(self) -> asyncio.Protocol:
        connection: PeerConnection[messages.ToOwner] = PeerConnection(
            self._peer_secret.accepted,
            self._peer_secret,
            messages.decode_to_owner,
            lambda connection: None,
            self._on_message,
            self._on_close,
            ping=None,
            tls=self._tls,
        )
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = min(self._unproven, key=lambda one: one.address in self._addresses)
            del self._unproven[oldest]
            self._reject(oldest, "surplus", f"more than {MAX_UNPROVEN} have not proved the secret")
        self._unproven[connection] = None
        return connection

    def _reject(self, connection: Connection, reason: str, words: str) -> None:
        """Count a connection that is no gateway's, and close it."""
        gateway_metrics.GATEWAY_PEER_CONNECTIONS_REJECTED.labels(reason).inc()
        now = time.monotonic()
        if now - self._logged_s >= LOG_SECONDS:
            self._logged_s = now
            log.warning("rejecting a connection from %s to the port for gateways: %s", connection.address, words)
        connection.close()

    def _on_message(self, connection: Connection, message: messages.ToOwner) -> None:
        if isinstance(message, messages.Greeting):
            self._greet(connection, message)
            return
        if self._by_gateway.get(connection.peer) is not connection:
            raise FrameError("the peer has not said which gateway it is, or has connected again")
        now = time.monotonic()
        self._handlers[type(message)](connection, message, now)

    def _pong(self, connection: Connection, message: messages.Ping, now: float) -> None:
        self._views.record(connection.peer, message.view)
        pong = messages.Pong(
            self._views.own, takes_first_tokens=True, takes_spent_limits=True, instance=self._spent.instance
        )
        connection.send(pong)

    def _set_external(self, connection: Connection, message: messages.External, now: float) -> None:
        if self._picker.inflight.set_peer_external(connection.peer, message.counts):
            self._picker.on_ownership_change()

    def _greet(self, connection: Connection, message: messages.Greeting) -> None:
        name = message.gateway
        if connection.peer or not name or name == self._ownership.own_name:
            raise FrameError(f"a gateway cannot be called {name[:100]!r} here")
        if self._unproven.pop(connection, connection) is connection:
            return  # it has made room for another one
        if len(self._connections) >= MAX_CONNECTIONS:
            self._reject(connection, "limit", f"{MAX_CONNECTIONS} gateways are connected")
            return
        self._connections.add(connection)
        if (previous := self._by_gateway.get(name)) is not None:
            previous.close()
        connection.peer = name
        self._by_gateway[name] = connection
        self._queued[connection], self._named[connection] = {}, set()
        if (timer := self._grace.pop(name, None)) is not None:
            timer.cancel()

    def _on_close(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._unproven.pop(connection, connection) is None:
            self._reject(connection, "unproven", connection.failure)
        self._named.pop(connection, None)
        for _, _, future in list(self._queued.pop(connection, {}).values()):
            future.cancel()
        name = connection.peer
        if name and self._by_gateway.get(name) is connection:
            del self._by_gateway[name]
            self._views.drop(name)
            if name not in self._existing:
                self._drop_gateway(name)
                return
            self._grace[name] = asyncio.get_running_loop().call_later(PEER_GRACE_SECONDS, self._drop_gateway, name)

    def _decide(self, connection: Connection, question: messages.Question, now: float) -> None:
        picker, request_id = self._picker, question.request_id
        service = picker.catalog.services.get(question.service)
        is_known = request_id in picker.inflight or request_id in picker.queue
        if service is None or service.policy is None or is_known or not self._is_owner(question.service):
            connection.send(messages.Refused(question.number))
            return
        ctx = conversions.to_context(question, service, connection.peer, now)
        if ctx is None:
            connection.send(messages.Refused(question.number))
            return
        if ctx.adapter is None and question.may_fall_back:
            ctx.fallback = picker.catalog.fallback_of(service, ctx.route)
        reply = picker.decide_here(service, ctx, now)
        if isinstance(reply, bytes):
            self._answer(connection, question.number, ctx, reply)
            return
        future = asyncio.ensure_future(reply)
        self._queued[connection][request_id] = question.number, ctx, future
        connection.send(messages.Queued(question.number))
        future.add_done_callback(lambda done: self._on_decided(connection, request_id, done))

    def _on_decided(self, connection: Connection, request_id: str, done: asyncio.Future[bytes]) -> None:
        """Answer about a queued request, unless it was withdrawn or handed over."""
        found = self._queued.get(connection, {}).pop(request_id, None)
        if found is None:
            if not done.cancelled():  # decided in the very moment in which the connection ended
                self._abandon(request_id, time.monotonic())
        elif done.cancelled() or done.exception() is not None:
            connection.send(messages.Refused(found[0]))
        else:
            self._answer(connection, found[0], found[1], done.result())

    def _answer(self, connection: Connection, number: int, ctx: RequestContext, reply: bytes) -> None:
        in_flight = self._picker.inflight.get(ctx.request_id)
        forwarded = self._picker.admission.forwarded(ctx.request_id)
        running = None
        if in_flight is not None and forwarded is not None:
            running = conversions.to_running(ctx.request_id, in_flight, forwarded, time.monotonic())
        request_class = "" if ctx.admission_request is None else ctx.admission_request.request_class
        answer = messages.Answer(number, reply, running, ctx.target_service, request_class, ctx.is_retry)
        if not connection.send(answer) and running is not None:
            self._abandon(ctx.request_id, time.monotonic())

    def _withdraw(self, connection: Connection, message: messages.Withdrawn, now: float) -> None:
        found = self._queued[connection].pop(message.request_id, None)
        if found is not None:
            found[2].cancel()
        elif self._is_via(connection, message.request_id):
            self._abandon(message.request_id, now)

    def _abandon(self, request_id: str, now: float) -> None:
        """Free what a request occupies that was admitted here and is not sent."""
        self._drop([request_id])
        self._picker.on_ownership_change()

    def _record_first_token(self, connection: Connection, message: messages.FirstToken, now: float) -> None:
        if self._is_via(connection, message.request_id):
            self._picker.reports.on_running_record(conversions.to_running_record(message), now)

    def _end(self, connection: Connection, message: messages.Ended, now: float) -> None:
        if not self._is_via(connection, message.request_id):
            return
        record = conversions.to_record(message)
        if record is None:
            self._abandon(message.request_id, now)
        else:
            self._picker.reports.on_access_record(record, now)

    def _adopt(self, connection: Connection, message: messages.RunningRequests, now: float) -> None:
        picker, named = self._picker, self._named[connection]
        for running in message.requests:
            named.add(running.request_id)
            if running.request_id in picker.inflight:
                continue  # a service that is unknown here may come with the first list from the API server
            in_flight, forwarded = conversions.from_running(running, connection.peer, now)
            picker.inflight.add(running.request_id, in_flight)
            picker.admission.adopt(forwarded, now)
        if message.is_last:
            requests = picker.inflight.requests()
            self._drop([id for id, request in requests if request.via == connection.peer and id not in named])
            picker.on_ownership_change()
            named.clear()

    def _charge(self, connection: Connection, message: messages.Charge, now: float) -> None:
        limits = self._picker.key_limits
        if self._ownership.owner_of_key(message.key_name) != self._ownership.own_name:
            connection.send(messages.Refused(message.number))
            return
        identity = Identity(
            message.key_name,
            requests_per_minute=message.requests_per_minute,
            tokens_per_minute=message.tokens_per_minute,
        )
        rejection = limits.take(identity, message.tokens, now)
        headers = limits.headers(identity, now)
        charged = messages.Charged(message.number, headers)
        if rejection is not None:
            charged = messages.Charged(message.number, headers, rejection.message, rejection.retry.eta_s or 0.0)
        connection.send(charged)

    def _count_spent(self, connection: Connection, message: messages.SpentLimits, now: float) -> None:
        self._spent.count(connection.peer, message.spent, now)

    def _keep_copies(self, connection: Connection, message: messages.SpentCopies, now: float) -> None:
        self._spent.keep_copies(connection.peer, message, now)

    def _is_via(self, connection: Connection, request_id: str) -> bool:
        in_flight = self._picker.inflight.get(request_id)
        return in_flight is not None and in_flight.via == connection.peer

    def _drop_gateway(self, name: str) -> None:
        if (timer := self._grace.pop(name, None)) is not None:
            timer.cancel()
        self._picker.inflight.set_peer_external(name, {})
        self._drop([id for id, request in self._picker.inflight.requests() if request.via == name])
        self._picker.on_ownership_change()

    def _drop(self, request_ids: list[str]) -> None:
        """Forget requests at engines without a record of their end."""
        now = time.monotonic()
        for request_id in request_ids:
            self._picker.inflight.complete(request_id, "", now)
            self._picker.admission.complete(request_id, None, now)
