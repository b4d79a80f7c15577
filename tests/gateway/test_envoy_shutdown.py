"""A gateway that is told to stop: it serves until another one is ready, and until its clients have gone there."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import aiohttp
import pytest

from tests.gateway.kube_objects import gateway_pod, pod, service
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

DELETED = {"deletionTimestamp": "2026-01-02T03:04:05Z"}


async def _started(gateway: GatewayStack) -> None:
    """The gateway serves with one engine, and is the only gateway that there is."""
    engine = await gateway.engine()
    gateway.write_gateways(gateway_pod("gateway-0"))
    await gateway.start([service()], [pod(engine.address)])
    await gateway.wait_routable(engine)


def _terminate(gateway: GatewayStack) -> Callable[[], bool]:
    """SIGTERM to the picker; returns whether it has ended."""
    assert gateway.picker is not None
    picker = gateway.picker
    picker.send_signal(signal.SIGTERM)
    return lambda: picker.poll() is not None


async def _until_said(gateway: GatewayStack, words: str) -> None:
    await wait_until(lambda: words in gateway.log.read_text(), f"the picker logs: {words}")


async def _health(gateway: GatewayStack) -> int:
    async with gateway.http.get(f"{gateway.url}/healthz") as answer:
        return answer.status


async def _readiness(gateway: GatewayStack) -> int:
    async with gateway.http.get(f"{gateway.picker_url}/readyz") as answer:
        return answer.status


async def _until_drains(gateway: GatewayStack) -> None:
    async def drains() -> bool:
        return await _health(gateway) == 503

    await wait_until(drains, "the gateway drains")


async def _ask_alone(gateway: GatewayStack, expected: int = 200) -> str | None:
    """One request on a connection of its own; returns its `Connection` header."""
    async with aiohttp.ClientSession() as fresh:
        body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
        async with fresh.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == expected
            return answer.headers.get("connection")


async def test_stop_serves_until_successor_is_ready(lone: GatewayStack) -> None:
    await _started(lone)
    lone.write_gateways(gateway_pod("gateway-0", **DELETED), gateway_pod("gateway-1", ready=False))
    has_ended = _terminate(lone)
    await _until_said(lone, "waiting for another gateway pod to be ready")
    settings = lone.settings
    await asyncio.sleep(settings.successor_seconds + settings.drain_quiet_seconds + settings.drain_idle_seconds)
    assert not has_ended()
    assert (await _readiness(lone), await _health(lone)) == (200, 200)
    assert await _ask_alone(lone) is None, "clients have nowhere else to go"
    lone.write_gateways(gateway_pod("gateway-0", **DELETED), gateway_pod("gateway-1"))
    await _until_drains(lone)
    assert await _readiness(lone) == 200, "it still accepts"
    assert await _ask_alone(lone) == "close"
    await wait_until(has_ended, "the picker ends")
    assert lone.picker is not None
    assert lone.picker.returncode == 0


async def test_stop_with_ready_sibling_drains_at_once(lone: GatewayStack) -> None:
    await _started(lone)
    lone.write_gateways(gateway_pod("gateway-0"), gateway_pod("gateway-1"))
    has_ended = _terminate(lone)
    await _until_drains(lone)
    await wait_until(has_ended, "the picker ends")
    assert "waiting for another gateway pod" not in lone.log.read_text()


@pytest.mark.parametrize("others", [(), (gateway_pod("gateway-1", **DELETED),)], ids=["none", "deleted"])
async def test_stop_without_successor_is_bounded(lone: GatewayStack, others: tuple[dict[str, object], ...]) -> None:
    """As of an uninstalled release: no other pod is to come."""
    await _started(lone)
    lone.write_gateways(gateway_pod("gateway-0", **DELETED), *others)
    has_ended = _terminate(lone)
    await _until_said(lone, "no other gateway pod exists")
    await wait_until(has_ended, "the picker ends")


async def test_stop_ends_at_drain_time_without_successor(tmp_path_factory: pytest.TempPathFactory) -> None:
    gateway = GatewayStack(tmp_path_factory.mktemp("gw"), drain_seconds=4.0)
    try:
        await _started(gateway)
        gateway.write_gateways(gateway_pod("gateway-0", **DELETED), gateway_pod("gateway-1", ready=False))
        has_ended = _terminate(gateway)
        await _until_said(gateway, "waiting for another gateway pod to be ready")
        while not has_ended():
            assert (await gateway.ask_fully())[0] == 200  # Envoy, which ends after it, serves to the end
            await asyncio.sleep(0.05)
        assert "no other gateway pod was ready in 4 s" in gateway.log.read_text()
    finally:
        await gateway.shut_down()


async def test_drain_lasts_while_requests_arrive(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As from nodes that do not know yet that the pod is leaving."""
    quiet_s, steps = 3.0, 30
    gateway = GatewayStack(tmp_path_factory.mktemp("gw"), drain_quiet_seconds=quiet_s)
    try:
        await _started(gateway)
        gateway.write_gateways(gateway_pod("gateway-0", **DELETED), gateway_pod("gateway-1"))
        has_ended = _terminate(gateway)
        await _until_drains(gateway)
        for _ in range(int(1.5 * steps)):
            assert await _ask_alone(gateway) == "close"
            await asyncio.sleep(quiet_s / steps)
            assert not has_ended()
        await wait_until(has_ended, "the picker ends")
    finally:
        await gateway.shut_down()


async def test_drain_waits_for_idle_connection(tmp_path_factory: pytest.TempPathFactory) -> None:
    """And only for it: the drain ends when the connection has closed."""
    gateway = GatewayStack(tmp_path_factory.mktemp("gw"), drain_quiet_seconds=0.2, drain_idle_seconds=300.0)
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=300)
    try:
        await _started(gateway)
        gateway.write_gateways(gateway_pod("gateway-0", **DELETED), gateway_pod("gateway-1"))
        async with aiohttp.ClientSession(connector=connector) as client:

            async def ask() -> tuple[int, str | None]:
                async with client.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
                    await answer.read()
                    return answer.status, answer.headers.get("connection")

            assert await ask() == (200, None)
            has_ended = _terminate(gateway)
            await _until_drains(gateway)
            await asyncio.sleep(5 * gateway.settings.drain_quiet_seconds)
            assert not has_ended()
            assert await ask() == (200, "close")
            await wait_until(has_ended, "the picker ends")
    finally:
        await gateway.shut_down()


async def test_drain_finishes_streams_and_closes_idle_connections(lone: GatewayStack) -> None:
    engine = await lone.engine()
    pause = engine.behaviour.pause = asyncio.Event()
    await lone.start([service()], [pod(engine.address)])
    await lone.wait_routable(engine)

    async def stream() -> str:
        async with lone.ask(stream=True) as answer:
            return await answer.text()

    running = asyncio.ensure_future(stream())
    await wait_until(lambda: engine.open == 1, "a stream runs")
    assert lone.picker is not None
    picker = lone.picker
    picker.send_signal(signal.SIGTERM)
    await _until_drains(lone)
    engine.behaviour.pause = None
    status, _, headers = await lone.ask_fully()
    assert (status, headers.get("connection")) == (200, "close")
    assert (await lone.admin.stats()).failed_open == 0
    assert picker.poll() is None
    await wait_until(lambda: engine.open == 1, "the stream still runs")
    pause.set()
    assert (await running).endswith("data: [DONE]\n\n")
    await wait_until(lambda: picker.poll() is not None, "the picker ends")
    assert picker.returncode == 0


async def test_restarted_picker_does_not_inherit_drain(lone: GatewayStack) -> None:
    """A kubelet may end the picker and leave Envoy: the next picker must not inherit the drain of the one before."""
    engine = await lone.engine()
    await lone.start([service()], [pod(engine.address)])
    await lone.wait_routable(engine)
    assert lone.picker is not None
    picker = lone.picker
    picker.send_signal(signal.SIGTERM)
    await wait_until(lambda: picker.poll() is not None, "the picker ends")
    lone.start_picker()
    await lone.ready()
    status, _, headers = await lone.ask_fully()
    assert (status, headers.get("connection")) == (200, None)
