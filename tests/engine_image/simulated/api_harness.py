"""The simulated engine's application behind the project's middleware, and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from launcher.asgi import Message, Scope
from launcher.middleware import MiddlewareConfig, Plimsoll
from launcher.middleware_metrics import MiddlewareMetrics
from launcher.pod_state import PodState
from simulated.api import OpenAiApi
from simulated.kv_side_channel import LeaseServer
from simulated.options import EngineOptions, parse_options
from simulated.real_time_driver import RealTimeDriver
from simulated.server import make_api
from tests.engine_image.middleware_harness import COMPLETIONS, CONTRACT, Exchange
from tests.ports import free_ports

FAST_ARGS = ("--time-scale", "0.01", "--spread", "0", "--noise", "0", "--profile", "h200-8b-hot")
SLOW_ARGS = ("--time-scale", "10")  # for what must not end by itself: 20 tokens a second


@dataclass
class ApiHarness:
    """One engine and its client."""

    api: OpenAiApi
    app: Plimsoll
    driver: RealTimeDriver
    options: EngineOptions
    state: PodState
    registry: CollectorRegistry

    async def send(
        self,
        body: Any = None,
        path: str = COMPLETIONS,
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
        begun: asyncio.Event | None = None,
        bare: bool = False,
    ) -> Exchange:
        """One request, a GET without a body; `gone` is when the client leaves, `begun` is set at its first bytes."""
        exchange, left = Exchange(), gone or asyncio.Event()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        pending: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            exchange.messages.append(message)
            if begun is not None and message.get("body"):
                begun.set()

        sent = {"content-type": "application/json", **(headers or {})}
        scope: Scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "headers": [(key.encode(), value.encode()) for key, value in sent.items()],
            "app": self.api,
        }
        await (self.api if bare else self.app)(scope, receive, send)
        return exchange

    async def api_direct(self, body: Any, gone: asyncio.Event | None = None) -> Exchange:
        """A request past the middleware, which would take its transfer parameters away."""
        return await self.send(body, gone=gone, bare=True)

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Every sample of vLLM's metrics, by name and label values but those of engine and model."""
        text = (await self.send(path="/metrics")).body.decode()
        common = ("engine", "model_name")
        return {
            (sample.name, *(sample.labels[key] for key in sorted(sample.labels) if key not in common)): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("vllm:")
        }

    def remote_prefill_count(self, outcome: str) -> float:
        """How many prefill legs had this outcome."""
        return self.registry.get_sample_value(CONTRACT.metrics["remote_prefills"], {"outcome": outcome}) or 0.0


@asynccontextmanager
async def make_harness(folder: Path, *flags: str, role: str = "serve") -> AsyncIterator[ApiHarness]:
    """An engine with the middleware of a role; its times are a hundredth of the real ones."""
    (port,) = free_ports(1)
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # counts only with --enable-lora
    }
    given = list(FAST_ARGS)
    if role != "serve":
        kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
        config = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_load_failure_policy": "recompute"}
        given += ["--kv-transfer-config", json.dumps(config)]
    options = replace(parse_options(["serve", "m", *given, *flags], environment), middleware=())
    api, driver, engine_id = make_api(options, 1.0)
    registry, state = CollectorRegistry(), PodState(folder / role)
    state.reset()
    app = Plimsoll(
        api,
        MiddlewareConfig(
            role, "", 5.0, 1 << 20, CONTRACT, state, MiddlewareMetrics(CONTRACT, registry), options.served_names
        ),
    )
    leases = driver.core.leases
    lender = LeaseServer(
        engine_id, leases.claim, lambda name: leases.restart_expiry(name, driver.now()), driver.on_lease_freed
    )
    side = await lender.listen("127.0.0.1", port)
    try:
        yield ApiHarness(api, app, driver, options, state, registry)
    finally:
        side.close()
        await app.close()


@asynccontextmanager
async def serve_engine(one: ApiHarness) -> AsyncIterator[str]:
    """An engine on a port of loopback; its address."""

    async def handler(request: web.Request) -> web.StreamResponse:
        headers = {key.lower(): value for key, value in request.headers.items()}
        exchange = await one.send(await request.read(), request.path, headers)
        return web.Response(status=exchange.status, body=exchange.body, headers=exchange.headers)

    application = web.Application()
    application.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def wait_idle(one: ApiHarness) -> None:
    """Waits until nothing is in the engine."""
    while one.driver.live or one.driver.deferred:
        await asyncio.sleep(0)
