"""The operator's own small HTTP server: liveness, readiness, metrics. It runs from the first second, standby or not."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from plimsoll.telemetry import metrics


async def serve(port: int, metrics_port: int) -> web.AppRunner:
    """Serve until the returned runner is cleaned up. A stuck loop answers nothing: that is the liveness test."""
    app = web.Application()
    app.router.add_get("/healthz", _fine)
    app.router.add_get("/readyz", _fine)
    app.router.add_get("/metrics", _metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for number in sorted({port, metrics_port}):
        await web.TCPSite(runner, port=number).start()
    return runner


async def _fine(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _metrics(_: web.Request) -> web.Response:
    return web.Response(body=generate_latest(metrics.OPERATOR), headers={"Content-Type": CONTENT_TYPE_LATEST})
