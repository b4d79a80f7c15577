"""A client whose model has no engine, through real Envoy: it gets the time at once, or it can follow the start."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from e2e.lib import sdks
from plimsoll.gateway.api_routes import EVENT_STREAM
from plimsoll.gateway.model_progress import MAX_CLIENT_STREAMS
from tests.gateway.kube_objects import LIMITS, Object, pod
from tests.gateway.picker_harness import START_UNIX_S, service_with_slo
from tests.gateway.stack import GatewayStack, wait_until
from tests.gateway.test_next_engine import with_status

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

LONG_START_S = 600.0
WATCHING = {"accept": EVENT_STREAM}
CLASSES = [{"name": "interactive", "maxQueueTime": "5s"}, {"name": "batch", "maxQueueTime": "120s"}]


def asleep(startup_s: float | None = None, **fields: Any) -> Object:
    """A service at zero whose engines usually take this long to start."""
    made = service_with_slo("chat", ready_work=10.0, **fields)
    if startup_s is not None:
        made[LIMITS]["startupSeconds"] = startup_s
    return made


def starting(in_s: float) -> Object:
    """The same, after the operator has ordered an engine."""
    ready_at_s = time.time() - START_UNIX_S + in_s
    return with_status(service_with_slo("chat", ready_at_s=ready_at_s, ready_work=10.0), ready_at_s)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    kind = ""
    async for line in response.content:
        name, _, value = line.decode().strip().partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [], "stream": True}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [], "max_tokens": 9, "stream": True}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_wake_beyond_wait_is_told_at_once(stack: GatewayStack, path: str, fields: dict[str, Any]) -> None:
    await stack.set_objects([asleep(LONG_START_S)], [])
    async with stack.http.post(stack.url + path, json={"model": "chat", **fields}) as response:
        body = await response.json()
    error = body["error"]
    assert (response.status, response.headers["x-plimsoll-reason"]) == (503, "model_starting")
    assert error["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
    assert response.headers["x-should-retry"] == "false"
    assert int(response.headers["retry-after"]) >= LONG_START_S
    assert f"Try again in {response.headers['retry-after']} s." in error["message"]
    assert (await stack.admission())["queued"] == 0


async def test_class_that_may_wait_longer_is_queued(stack: GatewayStack) -> None:
    classes = ("interactive", "batch")
    await stack.set_objects([asleep(60.0, classes=classes, admission={"classes": CLASSES})], [])
    status, _, headers = await stack.ask_fully(sent={"x-gateway-inference-objective": "interactive"})
    assert (status, headers["x-plimsoll-reason"], headers["retry-after"]) == (503, "model_starting", "60")
    waiting = asyncio.create_task(stack.ask_fully(sent={"x-gateway-inference-objective": "batch"}))
    await stack.wait_queued(1)
    waiting.cancel()


async def test_waiting_request_is_told_when_start_turns_out_long(stack: GatewayStack) -> None:
    """The start was never measured, so the first request waits until the operator expects an engine too late."""
    await stack.set_objects([asleep()], [])
    waiting = asyncio.create_task(stack.ask_fully())
    await stack.wait_queued(1)
    stack.write_objects([starting(LONG_START_S)], [])
    status, body, headers = await waiting
    assert (status, body["error"]["code"]) == (503, "model_starting")
    assert int(headers["retry-after"]) > LONG_START_S / 2


async def test_watched_start_ends_ready_and_request_is_served(stack: GatewayStack) -> None:
    await stack.set_objects([asleep(20.0)], [])
    async with stack.http.get(f"{stack.url}/v1/models/chat", headers=WATCHING) as response:
        assert (response.status, response.headers["content-type"]) == (200, EVENT_STREAM)
        seen = events(response)
        assert (await anext(seen))[0] == "asleep"
        assert (await stack.admission())["queued"] == 0, "to watch starts nothing"
        waiting = asyncio.create_task(stack.ask_fully())
        await stack.wait_queued(1)
        stack.write_objects([starting(20.0)], [])
        kind, data = await anext(seen)
        assert (kind, data["object"]) == ("starting", "model.progress")
        assert 0 < data["expected_in_s"] <= 20
        engine = await stack.engine()
        stack.write_objects([starting(20.0)], [pod(engine.address)])
        assert [kind async for kind, _ in seen if kind != "starting"] == ["ready"]
    assert (await waiting)[0] == 200


async def test_one_source_leaves_streams_to_others(stack: GatewayStack) -> None:
    """The source address is that of the connection, not that of a header."""
    await stack.set_objects([asleep(20.0)], [])

    async def watch(source: str, claimed: str) -> tuple[asyncio.StreamWriter, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port, local_addr=(source, 0))
        head = (
            f"GET /v1/models/chat HTTP/1.1\r\nhost: x\r\naccept: {EVENT_STREAM}\r\nx-forwarded-for: {claimed}\r\n\r\n"
        )
        writer.write(head.encode())
        return writer, (await reader.readline()).decode().split()[1]

    greedy = [await watch("127.0.0.2", f"10.0.0.{number}") for number in range(MAX_CLIENT_STREAMS + 1)]
    assert [status for _, status in greedy] == ["200"] * MAX_CLIENT_STREAMS + ["429"]
    other = await watch("127.0.0.3", "10.0.0.1")
    assert other[1] == "200"
    for writer, _ in [*greedy, other]:
        writer.close()


async def test_openai_sdk_reads_progress(stack: GatewayStack) -> None:
    sdks.require_package("openai")
    from openai import OpenAI, Stream

    await stack.set_objects([starting(20.0)], [])
    seen: list[Any] = []

    def watch() -> None:
        with OpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
            options: Any = {"headers": WATCHING}
            for event in sdk.get("/models/chat", cast_to=object, options=options, stream=True, stream_cls=Stream[Any]):
                seen.append(event["state"])

    watching = asyncio.create_task(asyncio.to_thread(watch))
    await wait_until(lambda: bool(seen), "the SDK has an event")
    engine = await stack.engine()
    stack.write_objects([starting(20.0)], [pod(engine.address)])
    await watching
    assert (seen[0], seen[-1]) == ("starting", "ready")


@pytest.mark.parametrize("path", ["/v1/models/none", "/v1/models/"])
async def test_watch_of_unknown_model_is_plain_reply(stack: GatewayStack, path: str) -> None:
    await stack.set_objects([asleep()], [])
    async with stack.http.get(stack.url + path, headers=WATCHING) as response:
        body = await response.json()
    assert (response.status, "error" in body) == ((404, True) if path.endswith("none") else (200, False))


async def test_drain_ends_watching(lone: GatewayStack) -> None:
    await lone.start([asleep()], [])
    async with lone.http.get(f"{lone.url}/v1/models/chat", headers=WATCHING) as response:
        seen = events(response)
        assert (await anext(seen))[0] == "asleep"
        assert lone.picker is not None
        lone.picker.terminate()
        assert [kind async for kind, _ in seen if kind != "asleep"] == []
