"""The operator's HTTP server: liveness, readiness, metrics, and the explanation and recommendation of replica counts.

It also runs in a standby, which has no decisions. A standby closes the connection with its answer, so that a client's
next try through a Service may reach the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from plimsoll.adapters.connection_guard import ConnectionGuard, CutReason
from plimsoll.controllers.autoscale.recommendations import Recommendations, to_json
from plimsoll.controllers.reconcile_progress import ReconcileProblems, ReconcileProgress
from plimsoll.telemetry import operator_metrics, service_gauge
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

BACKLOG = 128  # connections that wait to be accepted, as aiohttp has it
PAGE_STEP_BYTES = 1 << 18  # of the metrics page, some milliseconds, between which other work runs
STOP_SECONDS = 5.0  # for answers that a client reads slowly

ExplainService = Callable[[tuple[str, str]], dict[str, Any] | None]


@dataclass
class HttpEndpoints:
    """Endpoints beyond health and metrics.

    explain: returns the decision document of a service by namespace and name, None for an unknown service.
    recommendations: those of all services. Both are themselves None while this process does not lead.
    progress: returns why a leader reconciles nothing.
    """

    explain: ExplainService | None = None
    recommendations: Recommendations | None = None
    progress: Callable[[], ReconcileProblems] = ReconcileProblems

    @contextmanager
    def leading(
        self, explain: ExplainService, recommendations: Recommendations, progress: ReconcileProgress
    ) -> Iterator[None]:
        """Answer as the leader meanwhile."""
        self.explain, self.recommendations, self.progress = explain, recommendations, progress.problems
        try:
            with progress.exported():
                yield
        finally:
            self.explain, self.recommendations, self.progress = None, None, ReconcileProblems


async def serve(port: int, metrics_port: int, endpoints: HttpEndpoints | None = None) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. A blocked event loop fails the liveness probe.

    So does a leader that finishes no reconcile. One that cannot list its objects is not ready. The two ports have a
    bound of connections each: clients of the metrics port keep no probe out.
    """
    app, listeners = build_app(endpoints or HttpEndpoints()), list[asyncio.Server]()
    app.on_shutdown.append(partial(_close, listeners))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    assert runner.server is not None
    for number in sorted({port, metrics_port}):
        guard = ConnectionGuard(runner.server, count_cut)
        listeners.append(await asyncio.get_running_loop().create_server(guard, port=number, backlog=BACKLOG))
    return runner


def count_cut(reason: CutReason) -> None:
    """Count a connection that was cut."""
    operator_metrics.OPERATOR_CONNECTIONS_CUT.labels(reason.value).inc()


async def _close(listeners: list[asyncio.Server], _: web.Application) -> None:
    for listener in listeners:
        listener.close()


def build_app(endpoints: HttpEndpoints) -> web.Application:
    """The application for both ports. `endpoints` is read at each request."""

    async def is_live(_: web.Request) -> web.Response:
        return _probe(endpoints.progress().stalled)

    async def is_ready(_: web.Request) -> web.Response:
        return _probe(endpoints.progress().unsynced)

    async def explain(request: web.Request) -> web.Response:
        if endpoints.explain is None:
            return _not_leading()
        document = endpoints.explain(_key(request))
        return _unknown_service(request) if document is None else web.json_response(document)

    async def recommend(request: web.Request) -> web.Response:
        if endpoints.recommendations is None:
            return _not_leading()
        found = endpoints.recommendations.get(_key(request))
        return _unknown_service(request) if found is None else _json(to_json(found))

    async def recommend_all(_: web.Request) -> web.Response:
        return _not_leading() if endpoints.recommendations is None else _json(endpoints.recommendations.list_json())

    application = web.Application()
    application.router.add_get("/healthz", is_live)
    application.router.add_get("/readyz", is_ready)
    application.router.add_get("/metrics", _metrics)
    application.router.add_get("/explain/{namespace}/{name}", explain)
    application.router.add_get("/v1/recommendations", recommend_all)
    application.router.add_get("/v1/recommendations/{namespace}/{name}", recommend)
    return application


def _probe(problem: str) -> web.Response:
    if problem:
        log.warning(None, "probe fails", reason=problem)
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return web.Response(text=f"{problem or 'ok'}\n", status=status)


async def _metrics(_: web.Request) -> web.Response:
    pieces, step_bytes = list[bytes](), 0
    for piece in service_gauge.page(operator_metrics.OPERATOR):
        pieces.append(piece)
        step_bytes += len(piece)
        if step_bytes >= PAGE_STEP_BYTES:
            step_bytes = 0
            await asyncio.sleep(0)  # the page of a large fleet takes tens of milliseconds
    return web.Response(body=b"".join(pieces), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _key(request: web.Request) -> tuple[str, str]:
    return request.match_info["namespace"], request.match_info["name"]


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _not_leading() -> web.Response:
    response = _error(
        HTTPStatus.SERVICE_UNAVAILABLE, "NotLeading", "this operator replica does not lead; query the leader"
    )
    response.force_close()
    return response


def _unknown_service(request: web.Request) -> web.Response:
    name = "/".join(_key(request))
    return _error(HTTPStatus.NOT_FOUND, "UnknownService", f"the operator does not scale InferenceService {name}")


def _error(status: HTTPStatus, reason: str, message: str) -> web.Response:
    return web.json_response({"reason": reason, "message": message}, status=status)
