"""Hostile requests never reach a route of the engine that is not allowed, and never disturb the next good one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator

import pytest

from tests.gateway import malformed_requests
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.malformed_requests import GOOD_BODY, Case, request
from tests.gateway.stack import TIMEOUT_S, GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ALLOWED = (b"/v1/chat/completions", b"/v1/completions")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# These are the allowed path once they are decoded, and the engine gets them decoded.
DECODED = (
    "path '/v1/chat/%63ompletions'",
    r"path '/v1/chat\\completions'",
    "path '/v1%2fchat%2fcompletions'",
)


async def exchange(stack: GatewayStack, raw: bytes) -> bytes:
    """What comes back for these bytes, up to the end of one answer or of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    answer = b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(raw)
            while not complete(answer):
                piece = await reader.read(65536)
                if not piece:
                    break
                answer += piece
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer.removeprefix(CONTINUE)


def complete(answer: bytes) -> bool:
    head, end, body = answer.removeprefix(CONTINUE).partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return answer.endswith(b"0\r\n\r\n")


def shape_error(answer: bytes) -> str:
    """What is wrong with a refusal's shape; "" if nothing is. A closed connection is a refusal too."""
    if not answer:
        return ""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status < 400 or b"HEAD" in head:
        return ""
    lines = head.lower()
    if b"x-should-retry: false" not in lines and b"retry-after: " not in lines:
        return f"{status} without a word on retries"
    if not body:
        return f"{status} without a body"
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{status} in another shape: {body[:200]!r}"
    return "" if error["message"] and (error["code"] is None or isinstance(error["code"], str)) else f"{error}"


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1]) if answer else 0


async def run(
    gateway_and_engine: tuple[GatewayStack, FakeEngine], cases: Iterator[Case], right: Callable[[str, int], bool]
) -> None:
    """Send each case and a good request after it; tell all that went wrong at once."""
    stack, engine = gateway_and_engine
    wrong: list[str] = []
    count = 0
    for name, raw in cases:
        count += 1
        engine.received.clear()
        try:
            answer = await exchange(stack, raw)
        except TimeoutError:
            wrong.append(f"{name}: no answer")
            continue
        status = status_of(answer)
        reached = [seen.path for seen in engine.received if seen.path.partition(b"?")[0] not in ALLOWED]
        problems = [
            f"reached {reached}" if reached else "",
            shape_error(answer) if not name.startswith("method HEAD") else "",
        ]
        problems.append("" if right(name, status) else f"status {status}")
        if (good := status_of(await exchange(stack, request()))) != 200:
            problems.append(f"the next good request got {good}")
        wrong += [f"{name}: {problem}" for problem in problems if problem]
    print(f"{count} cases")
    assert not wrong, "\n" + "\n".join(wrong)


async def test_hostile_paths_and_methods_have_safe_outcome(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    refused = (0, 400, 403, 404, 405, 413, 414, 431)
    await run(
        gateway_and_engine,
        malformed_requests.paths(),
        lambda name, status: status in refused or (name in DECODED and status == 200),
    )


async def test_hostile_framing_has_safe_outcome(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    await run(
        gateway_and_engine,
        malformed_requests.framing(),
        lambda name, status: status in (0, 200, 400, 404, 408, 413, 426, 431, 501, 505),
    )


async def test_hostile_headers_have_safe_outcome(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    await run(
        gateway_and_engine,
        malformed_requests.headers(),
        lambda name, status: status in (0, 200, 400, 403, 404, 408, 411, 415, 417, 431),
    )


async def test_hostile_bodies_are_rejected(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    await run(gateway_and_engine, malformed_requests.bodies(), lambda name, status: status in (400, 404))


async def test_unusual_valid_bodies_reach_engine(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    await run(gateway_and_engine, malformed_requests.harmless(), lambda name, status: status == 200)


async def test_partial_requests_time_out(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = gateway_and_engine
    engine.received.clear()
    whole = request()
    cuts = [1, 10, 40, whole.index(b"\r\n\r\n") + 2, whole.index(GOOD_BODY), whole.index(GOOD_BODY) + 5, len(whole) - 1]
    answers = await asyncio.gather(*(exchange(stack, whole[:cut]) for cut in cuts for _ in range(5)))
    assert {status_of(answer) for answer in answers} <= {0, 408}
    assert [shape_error(answer) for answer in answers if shape_error(answer)] == []
    assert engine.received == []
    assert status_of(await exchange(stack, whole)) == 200


async def test_slow_bytes_do_not_extend_timeout(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = gateway_and_engine
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)

    async def drip() -> None:
        for byte in request():
            writer.write(bytes([byte]))
            await asyncio.sleep(0.1)

    dripping = asyncio.ensure_future(drip())
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # closed with a byte on its way
        answer = await asyncio.wait_for(reader.read(1000), TIMEOUT_S)
    dripping.cancel()
    writer.close()
    assert status_of(answer) in (0, 408)


async def test_connection_without_first_byte_is_closed(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = gateway_and_engine
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    assert await asyncio.wait_for(reader.read(1000), TIMEOUT_S) == b""
    writer.close()
    assert status_of(await exchange(stack, request())) == 200


async def test_stream_outlasts_time_limit_of_request(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = gateway_and_engine
    engine.behaviour.pause = asyncio.Event()
    try:
        async with stack.ask(stream=True) as answer:
            await answer.content.readany()
            await asyncio.sleep(2 * stack.settings.body_timeout_seconds)
            engine.behaviour.pause.set()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    finally:
        engine.behaviour.pause = None


async def test_timeouts_are_counted(gateway_and_engine: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = gateway_and_engine
    whole = request()
    for raw in (b"", whole[: whole.index(b"\r\n\r\n") + 2], whole[:-1]):
        await exchange(stack, raw)

    async def are_counted() -> bool:
        async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
            text = await answer.text()
        return all(
            f'plimsoll_gateway_limit_reached_total{{limit="{limit}"}} 0.0' not in text and f'limit="{limit}"' in text
            for limit in ("first_byte_time", "headers_time", "body_time")
        )

    await wait_until(are_counted, "each limit has been counted")
