"""The endpoint picker's process: its certificate, its end, a burst of clients, and the loss of its connection."""

from __future__ import annotations

import asyncio
import io
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from tests.certificates import SecretVolume
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.foreign_gateway import ForeignGateway, wait_listening
from tests.gateway.kube_objects import gateway_pod, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

BODY = json.dumps({"model": "chat", "messages": [], "stream": True}).encode()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(tmp_path_factory: object) -> AsyncIterator[tuple[GatewayStack, ForeignGateway]]:
    """A picker that is not started yet, and another gateway that asks it."""
    port = free_port()
    stack = GatewayStack(make_directory(tmp_path_factory), endpoint_picker_port=port)
    foreign = ForeignGateway(make_directory(tmp_path_factory), port)
    try:
        yield stack, foreign
    finally:
        foreign.stop()
        await stack.shut_down()
        print(stack.log.read_text()[-4000:])


def post_chat(stack: GatewayStack, foreign: ForeignGateway) -> aiohttp.client._RequestContextManager:
    return stack.http.post(f"{foreign.url}/v1/chat/completions", data=io.BytesIO(BODY))


async def serving(stack: GatewayStack, foreign: ForeignGateway) -> FakeEngine:
    """The picker has one engine, and the other gateway gets answers from it."""
    engine = await stack.engine()
    stack.write_gateways(gateway_pod("gateway-0"))
    await stack.start([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    await wait_listening(foreign, stack.http)

    async def answers() -> bool:
        async with stack.http.get(f"{foreign.url}/v1/models") as answer:
            return answer.status == 200

    await wait_until(answers, "the other gateway reaches the picker")
    return engine


async def health(port: int, certificate: bytes, name: str) -> int:
    credentials = grpc.ssl_channel_credentials(certificate)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        return int((await check(StringValue(value=name), wait_for_ready=True)).value)


async def test_certificate_of_a_late_secret_is_used(tmp_path_factory: object, tmp_path: Path) -> None:
    secret = SecretVolume(tmp_path / "tls")
    stack = GatewayStack(
        make_directory(tmp_path_factory), endpoint_picker_port=free_port(), endpoint_picker_tls=secret.directory
    )
    try:
        await stack.start([service()])
        certificate = secret.rotate().encode()
        assert stack.settings.endpoint_picker_port is not None
        assert await health(stack.settings.endpoint_picker_port, certificate, "readiness") == 1
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-4000:])


async def test_stop_waits_for_open_responses(pair: tuple[GatewayStack, ForeignGateway]) -> None:
    stack, foreign = pair
    engine = await serving(stack, foreign)
    engine.behaviour.pause = pause = asyncio.Event()
    picker = stack.picker
    assert picker is not None
    async with post_chat(stack, foreign) as answer:
        await answer.content.readany()
        stack.write_gateways(gateway_pod("gateway-0"), gateway_pod("gateway-1"))
        picker.send_signal(signal.SIGTERM)
        await wait_until(lambda: "stopping" in stack.log.read_text(), "the picker is told to stop")

        async def drains() -> bool:
            async with stack.http.get(f"{stack.url}/healthz") as found:
                return found.status == 503

        await wait_until(drains, "the picker drains")
        pause.set()
        assert (await answer.content.read()).endswith(b"[DONE]\n\n")
    await wait_until(lambda: picker.poll() is not None, "the picker has ended")
    assert picker.returncode == 0


async def test_picker_killed_gets_requests_again_after_its_restart(pair: tuple[GatewayStack, ForeignGateway]) -> None:
    stack, foreign = pair
    await serving(stack, foreign)
    assert stack.picker is not None
    stack.picker.kill()
    stack.picker.wait()
    async with post_chat(stack, foreign) as answer:
        assert answer.status >= 500
    stack.start_picker()

    async def answers() -> bool:
        async with post_chat(stack, foreign) as answer:
            return answer.status == 200

    await wait_until(answers, "the picker serves again")


async def test_burst_of_clients_that_partly_leave_leaves_nothing(pair: tuple[GatewayStack, ForeignGateway]) -> None:
    stack, foreign = pair
    engine = await serving(stack, foreign)
    await stack.set_objects([service_with_slo(batch=4)], [pod(engine.address)])
    await stack.wait_routable(engine)
    hold = engine.behaviour.release_event = asyncio.Event()

    async def one() -> int:
        async with post_chat(stack, foreign) as answer:
            await answer.read()
            return answer.status

    tasks = [asyncio.create_task(one()) for _ in range(200)]
    await stack.wait_inflight(engine, 4)
    for task in tasks[::2]:
        task.cancel()
    hold.set()
    statuses = [status for status in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(status, int)]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 2
    await stack.wait_inflight(engine, 0)
    await stack.wait_queued(0)
    await wait_until(lambda: engine.open == 0, "no request is left")
