"""What breaks: engines, the picker, Envoy itself. Nobody else's request may notice."""

from __future__ import annotations

import asyncio
import os
import signal

import aiohttp
import pytest

from tests.gateway.background_load import BackgroundLoad
from tests.gateway.kube_objects import pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_refusing_engine_is_skipped(stack: GatewayStack) -> None:
    dead, alive = await stack.engine(), await stack.engine()
    await stack.set_objects([service()], [pod(dead.address), pod(alive.address)])
    await stack.wait_routable(dead, alive)
    dead.kill()
    for _ in range(20):
        status, _, headers = await stack.ask_fully()
        assert (status, headers["x-engine"]) == (200, alive.address)


async def test_marked_rejection_is_retried_on_other_engine(stack: GatewayStack) -> None:
    draining, alive = await stack.engine(), await stack.engine()
    draining.behaviour.error_marker = "draining"
    await stack.set_objects([service()], [pod(draining.address), pod(alive.address)])
    await stack.wait_routable(draining, alive)
    for _ in range(10):
        status, _, headers = await stack.ask_fully()
        assert (status, headers["x-engine"]) == (200, alive.address)
    assert 0 < len(draining.received) < 10


async def test_large_body_is_retried_on_other_engine(stack: GatewayStack) -> None:
    draining, alive = await stack.engine(), await stack.engine()
    draining.behaviour.error_marker = "draining"
    await stack.set_objects([service()], [pod(draining.address), pod(alive.address)])
    await stack.wait_routable(draining, alive)
    statuses = [(await stack.ask_fully(pad="x" * (7 << 20)))[0] for _ in range(2)]
    assert statuses == [200, 200]
    assert len(draining.received) == 1
    assert {len(seen.body) for seen in alive.received} == {len(draining.received[0].body)}


@pytest.mark.parametrize("reason", ["draining", "queue_full"])
async def test_marked_rejection_by_all_engines_reaches_client(stack: GatewayStack, reason: str) -> None:
    engine = await stack.engine()
    engine.behaviour.error_marker = reason
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    status, body, headers = await stack.ask_fully()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, reason, "1")
    assert headers["x-plimsoll-reason"] == reason


async def test_unreachable_engines_return_openai_503(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    engine.kill()
    status, body, headers = await stack.ask_fully()
    assert (status, body["error"]["code"], headers["x-plimsoll-reason"]) == (503, "unavailable", "unavailable")
    assert 10 <= int(headers["retry-after"]) <= 30
    assert body["error"]["message"].endswith(f"try again in {headers['retry-after']} s.")


async def test_only_unreachable_engine_names_time_of_next(stack: GatewayStack) -> None:
    """The client waits for the start-up that the operator expects, not for a second."""
    engine, startup = await stack.engine(), "45s"
    obj = service()
    obj["status"]["recovery"] = startup
    await stack.set_objects([obj], [pod(engine.address)])
    await stack.wait_routable(engine)
    engine.kill()
    status, body, headers = await stack.ask_fully()
    assert (status, headers["retry-after"]) == (503, "45")
    assert body["error"]["message"].endswith("try again in 45 s.")
    sent = {"x-plimsoll-next-engine-seconds": "1"}
    _, _, headers = await stack.ask_fully(sent=sent)
    assert headers["retry-after"] == "45"


async def test_unmarked_503_is_not_retried(stack: GatewayStack) -> None:
    first, second = await stack.engine(), await stack.engine()
    first.behaviour.status = second.behaviour.status = 503
    await stack.set_objects([service()], [pod(first.address), pod(second.address)])
    await stack.wait_routable(first, second)
    assert (await stack.ask_fully())[0] == 503
    assert len(first.received) + len(second.received) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_reset_before_first_byte_suspends_engine(stack: GatewayStack, stream: bool) -> None:
    broken, alive = await stack.engine(), await stack.engine()
    broken.behaviour.die_after = 0
    await stack.set_objects([service()], [pod(broken.address), pod(alive.address)])
    await stack.wait_routable(broken, alive)
    statuses = []
    for _ in range(8):
        async with stack.ask(stream=stream) as answer:
            await answer.read()
            statuses.append(answer.status)
        await stack.wait_inflight(broken, 0)
        await stack.wait_inflight(alive, 0)
    assert statuses.count(503) == len(broken.received) == 1


async def test_cut_stream_never_ends_cleanly(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.tokens, engine.behaviour.die_after = 10, 4
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    async with stack.ask(stream=True) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert (await stack.wait_completed(1))["requests"]["failed"] == 1


async def test_cut_streams_eject_no_engine(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.tokens, engine.behaviour.die_after = 10, 4
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)

    async def cut() -> None:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with stack.ask(stream=True) as answer:
                await answer.read()

    await asyncio.gather(*(cut() for _ in range(20)))
    engine.behaviour.die_after = None
    assert (await stack.ask_fully())[0] == 200


async def test_client_disconnect_reaches_engine_and_is_no_failure(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.pause = asyncio.Event()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    async with stack.ask(stream=True) as answer:
        await answer.content.readany()
        answer.close()
    await wait_until(lambda: engine.open == 0, "the engine sees that the client has left")
    requests = (await stack.wait_completed(1))["requests"]
    assert (requests["cancelled"], requests["failed"]) == (1, 0)


async def test_killed_picker_fails_no_request_and_is_counted(lone: GatewayStack) -> None:
    first, second = await lone.engine(), await lone.engine()
    await lone.start([service()], [pod(first.address), pod(second.address)])
    await lone.wait_routable(first, second)
    assert (await lone.admin.stats()).failed_open == 0
    load = BackgroundLoad(lone)
    await load.more()
    assert lone.picker is not None
    stop(lone.picker)
    await load.more(80)
    failed_open = (await lone.admin.stats()).failed_open
    assert failed_open > 0
    status, body, _ = await lone.ask_fully("nobody")
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert body["error"]["message"].startswith("This gateway instance knows no engine of the model yet (")
    async with lone.http.get(f"{lone.url}/v1/models/tiny") as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "cannot list models, because its picker does not respond" in await answer.text()
    lone.start_picker()
    await lone.ready()
    await lone.wait_routable(first, second)
    before = (await lone.admin.stats()).failed_open
    await load.more()
    await load.end()
    assert (await lone.admin.stats()).failed_open == before
    async with lone.http.get(f"{lone.picker_url}/metrics") as answer:
        assert f"plimsoll_gateway_failed_open_total {before}.0" in await answer.text()


async def test_fail_open_routes_only_unambiguous_models(lone: GatewayStack) -> None:
    engine = await lone.engine()
    await lone.start([service(model="org/tiny-1.5")], [pod(engine.address)])
    await lone.wait_routable(engine)
    assert lone.picker is not None
    stop(lone.picker)
    for name in ("org/tiny-1.5", "team/chat"):
        assert (await lone.ask_fully(name))[0] == 200
    doubtful = (
        b'{"model":"org/tiny-1.5","model":"org/tiny-1.5"}',
        b'{"m\\u006fdel":"org/tiny-1.5"}',
        b'{"model":"org/tiny-1.5","x":{"model":"other"}}',
        b'{"model":"no\\tsuch"}',
        b'{"model":null}',
        b'{"model":"a\\"b"}',
        b'{"model":"' + b"x" * 400 + b'"}',
        b'{"model":"../org/tiny-1.5"}',
        b"not json",
        b"",
    )
    for body in doubtful:
        async with lone.http.post(f"{lone.url}/v1/completions", data=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], answer.headers["retry-after"]) == (503, "unavailable", "1"), body
    assert len(engine.received) == 2
    async with lone.http.get(f"{lone.url}/v1/models") as answer:
        assert answer.status == 503


async def test_fail_open_respects_engine_slots(lone: GatewayStack) -> None:
    first, second = await lone.engine(), await lone.engine()
    for engine in (first, second):
        engine.behaviour.pause = asyncio.Event()
    engines = [pod(first.address), pod(second.address)]
    await lone.start([service_with_slo(batch=4, shares={"gateway-0": 3, "gateway-1": 1})], engines)
    await lone.wait_routable(first, second)
    assert lone.picker is not None
    stop(lone.picker)

    async def stream() -> str:
        async with lone.ask(stream=True) as answer:
            return await answer.text()

    streams = [asyncio.ensure_future(stream()) for _ in range(4)]
    await wait_until(lambda: first.open + second.open == 4, "this gateway's share of both engines runs")
    for _ in range(3):
        status, body, headers = await lone.ask_fully()
        assert (status, body["error"]["type"], body["error"]["code"]) == (429, "rate_limit_error", "overloaded")
        assert (headers["retry-after"], headers["x-plimsoll-reason"]) == ("10", "overloaded")
    kept = first.open
    assert kept + second.open == 4
    # An engine less is a smaller bound; those who run do not notice, and the next picker knows of them.
    lone.write_objects([service_with_slo(batch=4, shares={"gateway-0": 3, "gateway-1": 1})], [pod(first.address)])
    lone.start_picker()
    await lone.ready()
    await lone.wait_inflight(first, kept)
    stop(lone.picker)
    assert (await lone.ask_fully())[0] == 429
    for engine in (first, second):
        engine.behaviour.pause.set()
    assert all(text.endswith("data: [DONE]\n\n") for text in await asyncio.gather(*streams))

    async def is_idle() -> bool:
        return (await lone.admin.stats()).active == 0

    await wait_until(is_idle, "Envoy has let the streams go")  # a moment after their last bytes
    assert (await lone.ask_fully())[0] == 200


async def test_hung_picker_is_bypassed_by_health_check(lone: GatewayStack) -> None:
    engine = await lone.engine()
    await lone.start([service()], [pod(engine.address)])
    await lone.wait_routable(engine)
    load = BackgroundLoad(lone)
    await load.more()
    assert lone.picker is not None
    lone.picker.send_signal(signal.SIGSTOP)

    async def is_away() -> bool:
        return not (await lone.admin.state()).picker_healthy

    await wait_until(is_away, "Envoy takes the picker for unhealthy")
    # New requests pass at once; those that were already asked for wait, until the picker answers or is killed.
    status, *_ = await lone.ask_fully()
    assert status == 200
    assert (await lone.admin.stats()).failed_open > 0
    os.kill(lone.picker.pid, signal.SIGCONT)
    await lone.ready()
    await load.more()
    await load.end()


async def test_restarted_picker_recovers_inflight_counts(lone: GatewayStack) -> None:
    engine = await lone.engine()
    engine.behaviour.pause = asyncio.Event()
    await lone.start([service()], [pod(engine.address)])
    await lone.wait_routable(engine)

    async def stream() -> str:
        async with lone.ask(stream=True) as answer:
            return await answer.text()

    streams = [asyncio.ensure_future(stream()) for _ in range(5)]
    await wait_until(lambda: engine.open == 5, "five streams run")
    assert lone.picker is not None
    stop(lone.picker)
    lone.start_picker()
    await lone.ready()
    await lone.wait_inflight(engine, 5)
    streams += [asyncio.ensure_future(stream()) for _ in range(2)]
    await lone.wait_inflight(engine, 7)
    engine.behaviour.pause.set()
    assert all(text.endswith("data: [DONE]\n\n") for text in await asyncio.gather(*streams))
    await lone.wait_inflight(engine, 0)


async def test_restarted_envoy_serves_with_zero_inflight(lone: GatewayStack) -> None:
    engine = await lone.engine()
    engine.behaviour.pause = asyncio.Event()
    await lone.start([service()], [pod(engine.address)])
    await lone.wait_routable(engine)

    async def stream() -> None:
        with pytest.raises(aiohttp.ClientError):
            async with lone.ask(stream=True) as answer:
                await answer.read()

    cut = asyncio.ensure_future(stream())
    await lone.wait_inflight(engine, 1)
    assert lone.envoy is not None
    stop(lone.envoy)
    await cut
    lone.start_envoy()
    await lone.wait_inflight(engine, 0)
    await lone.ready()
    engine.behaviour.pause.set()
    assert (await lone.ask_fully())[0] == 200
    await lone.wait_inflight(engine, 0)
