"""Requests through real Envoy to engines that Plimsoll did not make, from its own gateway and another's."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.kube_objects import target_pod, target_service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_requests_reach_an_engine_of_a_target_unchanged(stack: GatewayStack) -> None:
    """The body is the client's: no middleware is there that would turn another name into the engine's own."""
    engine = await stack.engine()
    stack.write_objects([target_service(port=engine.port)], [target_pod(engine.host)])
    await stack.wait_routable(engine)
    status, _, headers = await stack.ask_fully("chat")
    assert (status, headers["x-engine"]) == (200, engine.address)
    assert json.loads(engine.received[-1].body)["model"] == "chat"
    found = await stack.wait_completed(1)
    assert found["requests"]["succeeded"] == 1
    assert found["ttft"]["counts"] == [1]


async def test_unready_engine_of_a_target_gets_no_request(stack: GatewayStack) -> None:
    engine = await stack.engine()
    stack.write_objects([target_service(port=engine.port)], [target_pod(engine.host)])
    await stack.wait_routable(engine)
    stack.write_objects([target_service(port=engine.port)], [target_pod(engine.host, ready=False)])
    await stack.wait_routable()
    status, body, _ = await stack.ask_fully("chat")
    assert (status, body["error"]["code"]) == (503, "model_starting")
    assert engine.received == []


async def test_limits_of_a_target_queue_what_exceeds_them(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.release_event = hold = asyncio.Event()
    limited, target = service_with_slo(batch=1), target_service(port=engine.port)
    found = {
        **limited,
        "spec": {**{name: part for name, part in limited["spec"].items() if name != "tiers"}, **target["spec"]},
        "status": {**limited["status"], **target["status"]},
    }
    stack.write_objects([found], [target_pod(engine.host)])
    await stack.wait_routable(engine)
    pending = [asyncio.create_task(stack.ask_fully("chat")) for _ in range(2)]
    await stack.wait_queued(1)
    assert len(engine.received) == 1
    hold.set()
    assert [status for status, *_ in await asyncio.gather(*pending)] == [200, 200]


async def test_restarted_picker_still_knows_the_engines_of_targets(stack: GatewayStack) -> None:
    engine = await stack.engine()
    stack.write_objects([target_service(port=engine.port)], [target_pod(engine.host)])
    await stack.wait_routable(engine)
    assert stack.picker is not None
    stack.picker.kill()
    stack.picker.wait()
    stack.start_picker()
    await stack.ready()
    await stack.wait_routable(engine)
    assert (await stack.ask_fully("chat"))[0] == 200
