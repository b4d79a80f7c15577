"""What the openai SDK for Python says of its timeouts, and what it makes of the gateway's answers to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from e2e.lib import sdks
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT = {"x-request-timeout": "3"}  # seconds: on a busy machine the engine must have the request by then
LONG_PROMPT = "word " * 120_000  # 150,000 tokens by its bytes, more than three seconds of prefill


async def start(stack: GatewayStack, made: Object) -> FakeEngine:
    sdks.require_package("openai")
    engine = await stack.engine()
    await stack.set_objects([made], [pod(engine.address)])
    await stack.wait_routable(engine)
    return engine


def asking(stack: GatewayStack, content: str = "hi", *, stream: bool = False, **client: Any) -> Callable[[], list[Any]]:
    """A call of the SDK, which blocks; its default retries apply."""
    from openai import OpenAI

    def call_sdk() -> list[Any]:
        headers = client.pop("headers", None)
        with OpenAI(base_url=f"{stack.url}/v1", api_key="none", **client) as sdk:
            answer = sdk.chat.completions.create(
                model="chat", messages=[{"role": "user", "content": content}], stream=stream, extra_headers=headers
            )
            return list(answer) if stream else [answer]

    return call_sdk


async def test_sdk_default_timeout_is_a_deadline_of_whole_responses(stack: GatewayStack) -> None:
    engine = await start(stack, service())
    await asyncio.to_thread(asking(stack))
    assert float(engine.header("x-stainless-read-timeout") or 0) == 600
    assert engine.header("x-plimsoll-deadline-seconds") == "600"
    await asyncio.to_thread(asking(stack, stream=True))
    assert float(engine.header("x-stainless-read-timeout") or 0) == 600
    assert engine.header("x-plimsoll-deadline-seconds") is None


async def test_sdk_past_its_deadline_gets_504_without_retry(stack: GatewayStack) -> None:
    from openai import APIStatusError

    engine = await start(stack, service())
    engine.behaviour.release_event = asyncio.Event()
    with pytest.raises(APIStatusError) as raised:
        await asyncio.to_thread(asking(stack, headers=TIMEOUT))
    assert (raised.value.status_code, raised.value.code) == (504, "deadline_exceeded")
    assert len(engine.received) == 1
    await wait_until(lambda: engine.open == 0, "the engine sees that the client is gone")


async def test_sdk_stream_past_its_deadline_is_an_error(stack: GatewayStack) -> None:
    from openai import APIConnectionError

    engine = await start(stack, service())
    engine.behaviour.pause = asyncio.Event()
    with pytest.raises(APIConnectionError):
        await asyncio.to_thread(asking(stack, stream=True, headers=TIMEOUT))
    assert len(engine.received) == 1


async def test_sdk_timeout_too_short_for_prompt_is_rejected(stack: GatewayStack) -> None:
    from openai import BadRequestError

    engine = await start(stack, service_with_slo(slo={"ttft": "1h"}))
    for stream in (False, True):
        with pytest.raises(BadRequestError) as raised:
            await asyncio.to_thread(asking(stack, LONG_PROMPT, stream=stream, timeout=3.0))
        assert raised.value.code == "deadline_too_short"
        assert "3 s (x-stainless-read-timeout)" in raised.value.message
    assert engine.received == []
