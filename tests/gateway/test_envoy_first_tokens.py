"""First tokens through real Envoy: admission control learns them while responses run, and counts each once."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def _early(stack: GatewayStack) -> float:
    name = 'plimsoll_gateway_early_first_tokens_total{service="team/chat"}'
    async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def _is_early(stack: GatewayStack, count: float) -> bool:
    return await _early(stack) == count


async def _started(stack: GatewayStack) -> tuple[FakeEngine, asyncio.Event]:
    engine = await stack.engine()
    pause = engine.behaviour.pause = asyncio.Event()
    await stack.set_objects([service_with_slo(batch=4)], [pod(engine.address)])
    await stack.wait_routable(engine)
    return engine, pause


async def test_first_token_is_known_before_the_response_ends(stack: GatewayStack) -> None:
    engine, pause = await _started(stack)
    before = await _early(stack)

    async with stack.ask(stream=True) as answer:
        assert b"data:" in await answer.content.readline()
        await wait_until(lambda: _is_early(stack, before + 1), "the first token is known")
        found = (await stack.signals())["services"]["team/chat"]
        assert (found["endpoints"][0]["inflight"], found["requests"]["succeeded"], found["ttft"]["counts"]) == (
            1,
            0,
            [],
        )
        pause.set()
        await answer.read()
    found = await stack.wait_completed(1)
    assert found["ttft"]["counts"] == [1]
    assert await _is_early(stack, before + 1)
    await stack.wait_inflight(engine, 0)


async def test_response_without_a_token_is_not_reported(stack: GatewayStack) -> None:
    engine, pause = await _started(stack)
    hold = engine.behaviour.release_event = asyncio.Event()
    before = await _early(stack)
    older = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    engine.behaviour.release_event = None
    async with stack.ask(stream=True) as answer:
        await wait_until(lambda: _is_early(stack, before + 1), "the stream's first token is known")
        hold.set()
        assert (await older)[0] == 200
        pause.set()
        await answer.read()
    assert (await stack.wait_completed(2))["ttft"]["counts"]
    assert await _is_early(stack, before + 1)
    await stack.wait_inflight(engine, 0)
