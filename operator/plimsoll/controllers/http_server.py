"""The operator's HTTP server: liveness, readiness, metrics, and the explanation of scaling decisions.

It also runs in a standby, which has no decisions to explain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plimsoll.telemetry import metrics

ExplainService = Callable[[tuple[str, str]], dict[str, Any] | None]


@dataclass
class HttpEndpoints:
    """Endpoints beyond health and metrics.

    explain: returns the decision document of a service by namespace and name, None for an unknown service. The function
    itself is None while this process does not lead.
    """

    explain: ExplainService | None = None


async def serve(port: int, metrics_port: int, endpoints: HttpEndpoints | None = None) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. A blocked event loop fails the liveness probe."""
    runner = web.AppRunner(build_app(endpoints or HttpEndpoints()), access_log=None)
    await runner.setup()
    for number in sorted({port, metrics_port}):
        await web.TCPSite(runner, port=number).start()
    return runner


def build_app(endpoints: HttpEndpoints) -> web.Application:
    """The application for both ports. `endpoints` is read at each request."""

    async def explain(request: web.Request) -> web.Response:
        if endpoints.explain is None:
            return _error(
                HTTPStatus.SERVICE_UNAVAILABLE, "NotLeading", "this operator replica does not lead; query the leader"
            )
        key = request.match_info["namespace"], request.match_info["name"]
        document = endpoints.explain(key)
        if document is None:
            return _error(
                HTTPStatus.NOT_FOUND, "UnknownService", f"the operator does not scale InferenceService {'/'.join(key)}"
            )
        return web.json_response(document)

    application = web.Application()
    application.router.add_get("/healthz", _ok)
    application.router.add_get("/readyz", _ok)
    application.router.add_get("/metrics", _metrics)
    application.router.add_get("/explain/{namespace}/{name}", explain)
    return application


async def _ok(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(metrics.OPERATOR), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _error(status: HTTPStatus, reason: str, message: str) -> web.Response:
    return web.json_response({"reason": reason, "message": message}, status=status)
