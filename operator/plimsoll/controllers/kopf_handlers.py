"""kopf handlers: they forward changes of InferenceServices and do no other work.

kopf asks for the next watch at once when the API server ends one, so a server that ends each of them at once would get
two thousand requests a second. Its session is therefore paced. Only the further chunks of a list are free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import kopf

from plimsoll.adapters.kube_client import received
from plimsoll.api import labels
from plimsoll.controllers.operator_config import configure_kopf

# Called with the current object, or with the last known object and True after its deletion.
OnServiceChange = Callable[[dict[str, Any], bool], None]

BURST_REQUESTS: Final = 30  # for kopf's discovery, lists and first watches
REQUESTS_PER_SECOND: Final = 2.0  # once the burst is used up


def build_registry(on_change: OnServiceChange, *, namespaced: bool) -> kopf.OperatorRegistry:
    """A registry whose handlers call `on_change`."""
    kopf_registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=kopf_registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings, namespaced=namespaced)

    @kopf.on.login(registry=kopf_registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        found = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return None if found is None else paced_session(found)

    @kopf.on.event(labels.GROUP, labels.VERSION, labels.PLURAL, registry=kopf_registry)
    async def on_service_event(event: Any, **_: Any) -> None:
        obj = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, **event["object"]}
        on_change(received(obj), event["type"] == "DELETED")

    return kopf_registry


class RequestPacer:
    """A token bucket for the requests of one session, as a hook of aiohttp's tracing."""

    def __init__(self, burst: int = BURST_REQUESTS, per_second: float = REQUESTS_PER_SECOND) -> None:
        self._burst_s, self._interval_s = burst / per_second, 1.0 / per_second
        self._next_s = float("-inf")  # loop time at which the bucket was, or would be, full less one burst

    def delay_s(self, now_s: float) -> float:
        """Take a token; returns the seconds to wait for it."""
        self._next_s = max(self._next_s, now_s - self._burst_s) + self._interval_s
        return max(0.0, self._next_s - now_s)

    async def __call__(self, session: object, context: object, request: aiohttp.TraceRequestStartParams) -> None:
        if "continue" in request.url.query:
            return
        await asyncio.sleep(self.delay_s(asyncio.get_running_loop().time()))


def paced_session(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """A session with the same credentials that limits the rate of its requests. kopf closes it."""
    tracing = aiohttp.TraceConfig()
    tracing.on_request_start.append(RequestPacer())
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        trace_configs=[tracing],
    )
    return kopf.AiohttpSession(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        aiohttp_session=session,
    )


async def watch_services(
    on_change: OnServiceChange, namespaces: tuple[str, ...], take_signals: Callable[[], None] = lambda: None
) -> None:
    """Forward changes of services until cancelled.

    take_signals: called when kopf has started. kopf replaces the handlers of SIGTERM and SIGINT, and leaves its own
    behind when it fails: a signal before its next start would be lost.
    """
    has_started = asyncio.Event()
    restoring = asyncio.create_task(_call_when_set(has_started, take_signals))
    try:
        await kopf.operator(
            registry=build_registry(on_change, namespaced=bool(namespaces)),
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            ready_flag=has_started,
        )
    finally:
        restoring.cancel()
        take_signals()


async def _call_when_set(event: asyncio.Event, call: Callable[[], None]) -> None:
    await event.wait()
    call()
