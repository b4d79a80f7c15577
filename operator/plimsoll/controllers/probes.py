"""The operator's own small HTTP server: liveness, readiness, metrics, and why it decided what it decided.

It runs from the first second, standby or not; a standby decides nothing, so it explains nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plimsoll.telemetry import metrics

Explain = Callable[[tuple[str, str]], dict[str, Any] | None]


@dataclass
class Answers:
    """What can be asked beyond health and metrics.

    explain: the document of a service by namespace and name, None for one that is not known. Itself None while this
    process does not lead.
    """

    explain: Explain | None = None


async def serve(port: int, metrics_port: int, answers: Answers | None = None) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. A stuck loop answers nothing: that is the liveness test."""
    runner = web.AppRunner(app(answers or Answers()), access_log=None)
    await runner.setup()
    for number in sorted({port, metrics_port}):
        await web.TCPSite(runner, port=number).start()
    return runner


def app(answers: Answers) -> web.Application:
    """All that is served, on either port. `answers` is looked at anew for each request."""

    async def explain(request: web.Request) -> web.Response:
        if answers.explain is None:
            return _error(
                HTTPStatus.SERVICE_UNAVAILABLE, "NotLeading", "this process does not lead; ask the one that does"
            )
        key = request.match_info["namespace"], request.match_info["name"]
        found = answers.explain(key)
        if found is None:
            return _error(
                HTTPStatus.NOT_FOUND, "UnknownService", f"the operator does not scale a service {'/'.join(key)}"
            )
        return web.json_response(found)

    made = web.Application()
    made.router.add_get("/healthz", _fine)
    made.router.add_get("/readyz", _fine)
    made.router.add_get("/metrics", _metrics)
    made.router.add_get("/explain/{namespace}/{name}", explain)
    return made


async def _fine(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(metrics.OPERATOR), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _error(status: HTTPStatus, reason: str, message: str) -> web.Response:
    return web.json_response({"reason": reason, "message": message}, status=status)
