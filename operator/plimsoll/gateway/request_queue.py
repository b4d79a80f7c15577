"""The requests that wait at this gateway for a decision, the bytes of their bodies, and the time of the next decision.

Problem: Envoy keeps the body of a request in memory until the picker replies, so queued requests need a limit in bytes.
One client must not use it up: it would take the queues of all services from the others.
Admission control knows at which time a queue changes next, without any event.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from plimsoll.gateway.clock import Clock, TimerHandle
from plimsoll.gateway.request_context import RequestContext

MAX_QUEUED_BYTES = 64 << 20  # bodies of queued requests; Envoy keeps them in memory
MAX_CLIENT_QUEUED_BYTES = 48 << 20  # the same of one client


class RequestQueue:
    """The queued requests of all services, by request id. Times are monotonic seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._requests: dict[str, RequestContext] = {}
        self._bytes = 0
        self._client_bytes: Counter[str] = Counter()
        self._wakeups: dict[str, tuple[float, TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def requests(self) -> list[RequestContext]:
        """Returns the queued requests."""
        return list(self._requests.values())

    def add(self, ctx: RequestContext, on_cancel: Callable[[], None]) -> asyncio.Future[bytes]:
        """Queue a request. Returns the future of its reply; `on_cancel` is called when the client cancels it."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: on_cancel() if done.cancelled() else None)
        ctx.response = future
        self._requests[ctx.request_id] = ctx
        self.add_bytes(ctx.client, ctx.body_bytes)
        return future

    def remove(self, request_id: str) -> RequestContext | None:
        """Remove a request from the queue. Returns None if it is not queued."""
        ctx = self._requests.pop(request_id, None)
        if ctx is not None:
            self.add_bytes(ctx.client, -ctx.body_bytes)
        return ctx

    def can_queue(self, ctx: RequestContext) -> bool:
        """Whether the memory limit allows queueing the request, or it is queued already."""
        return ctx.response is not None or (ctx.can_queue and self.has_memory(ctx.client, ctx.body_bytes))

    def has_memory(self, client: str, body_bytes: int) -> bool:
        """Whether the memory limits allow to hold a client's body of this size. Its only one may be larger."""
        held = self._client_bytes.get(client, 0)
        is_within = not held or held + body_bytes <= MAX_CLIENT_QUEUED_BYTES
        return is_within and self._bytes + body_bytes <= MAX_QUEUED_BYTES

    def add_bytes(self, client: str, body_bytes: int) -> None:
        """Count a body that waits here, or for the decision of another gateway. A negative size ends it."""
        self._bytes += body_bytes
        self._client_bytes[client] += body_bytes
        if not self._client_bytes[client]:
            del self._client_bytes[client]

    def schedule(self, service: str, wake_at_s: float, now: float, on_wake: Callable[[], None]) -> None:
        """Call `on_wake` at `wake_at_s` in place of the service's earlier time; infinity cancels it."""
        scheduled = self._wakeups.get(service)
        if scheduled is not None and scheduled[0] == wake_at_s:
            return
        if scheduled is not None:
            scheduled[1].cancel()
            del self._wakeups[service]
        if wake_at_s < math.inf:
            self._wakeups[service] = (
                wake_at_s,
                self._clock.call_at(max(wake_at_s, now), lambda: self._wake(service, on_wake)),
            )

    def _wake(self, service: str, on_wake: Callable[[], None]) -> None:
        del self._wakeups[service]
        on_wake()
