"""The event stream of a model that has no engine, and when it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.identity import ANONYMOUS, CLOCK_SKEW_S, Authenticator, Identity, source_network
from plimsoll.gateway.model_progress import (
    EVENT_SECONDS,
    MAX_CLIENT_STREAMS,
    MAX_MODEL_STREAMS,
    STREAM_SECONDS,
    ModelProgress,
    ModelState,
    state_of,
)
from plimsoll.gateway.routes import wants_events
from plimsoll.gateway.settings import ApiKeyMode
from plimsoll.telemetry import gateway_metrics
from tests.gateway.api_key_secrets import key_of, key_secret
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import PickerHarness, service_with_slo, times_reached
from tests.gateway.test_next_engine import deleted, with_status

SOURCE = "10.0.0.9"
ENGINE = pod("10.0.0.1:8000")


def progress_of(harness: PickerHarness) -> ModelProgress:
    return ModelProgress(harness.picker, harness.clock, poll_s=0.0)


def opened(
    progress: ModelProgress, name: str = "chat", source: str = SOURCE, identity: Identity = ANONYMOUS
) -> AsyncIterator[bytes]:
    found = progress.open(identity, name, source)
    assert isinstance(found, AsyncIterator)
    return found


def event(part: bytes) -> tuple[str, dict[str, Any]]:
    """The one event of a part of the body."""
    _, kind, data, *_ = part.decode().splitlines()
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def rest(stream: AsyncIterator[bytes]) -> list[bytes]:
    async with asyncio.timeout(30.0):
        return [part async for part in stream]


async def test_stream_names_expected_time_and_ends_when_ready() -> None:
    harness = PickerHarness(with_status(service_with_slo("chat", ready_at_s=40.0), 40.0))
    stream = opened(progress_of(harness))
    head = await anext(stream)
    assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
    kind, data = event(await anext(stream))
    assert (kind, data["state"], data["expected_in_s"], data["model"]) == ("starting", "starting", 40, "chat")
    assert data["message"] == (
        "Model 'chat' is starting: none of its engines is ready yet. The next one is expected in 40 s."
    )
    harness.clock.advance_to(EVENT_SECONDS)
    assert event(await anext(stream))[1]["expected_in_s"] == 35
    harness.set_objects(service_with_slo("chat"), pods=(ENGINE,))
    ready, end = await rest(stream)
    assert (event(ready)[0], event(ready)[1]["expected_in_s"], end) == ("ready", None, b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("obj", "pods", "state"),
    [
        (service_with_slo("chat"), (), ModelState.ASLEEP),
        (service_with_slo("chat"), (pod("10.0.0.1:8000", ready=False),), ModelState.STARTING),
        (service_with_slo("chat"), (ENGINE,), ModelState.READY),
        (deleted(service()), (), ModelState.STOPPED),
    ],
)
def test_state_says_what_client_can_do(obj: Object, pods: tuple[Object, ...], state: ModelState) -> None:
    harness = PickerHarness(obj, pods=pods)
    assert state_of(harness.picker.catalog.by_name["chat"]) is state


async def test_asleep_model_says_what_starts_it_and_then_starts() -> None:
    harness = PickerHarness(service_with_slo("chat"))
    stream = opened(progress_of(harness))
    await anext(stream)
    kind, data = event(await anext(stream))
    assert (kind, data["expected_in_s"]) == ("asleep", None)
    assert "A request to /v1/chat/completions starts one" in data["message"]
    harness.set_objects(with_status(service_with_slo("chat", ready_at_s=30.0), 30.0))
    assert event(await anext(stream))[0] == "starting"


async def test_model_that_goes_ends_stream_with_api_error() -> None:
    harness = PickerHarness(service_with_slo("chat"))
    stream = opened(progress_of(harness))
    await anext(stream)
    await anext(stream)
    harness.set_objects()
    error, _ = await rest(stream)
    assert (event(error)[0], event(error)[1]["error"]["code"]) == ("error", "model_not_found")


async def test_stream_ends_after_its_longest_time() -> None:
    harness = PickerHarness(service_with_slo("chat"))
    stream = opened(progress_of(harness))
    await anext(stream)
    await anext(stream)
    harness.clock.advance_to(STREAM_SECONDS)
    assert await rest(stream) == [b"0\r\n\r\n"]


async def test_stopping_gateway_ends_streams_after_an_event() -> None:
    progress = progress_of(PickerHarness(service_with_slo("chat")))
    first = opened(progress)
    await anext(first)
    await anext(first)
    progress.stop()
    assert await rest(first) == [b"0\r\n\r\n"]
    assert [event(part)[0] for part in (await rest(opened(progress)))[1:-1]] == ["asleep"]


async def first_parts(streams: list[AsyncIterator[bytes]]) -> list[bytes]:
    """The first part of each stream; all are opened before the first one runs, as by a burst of requests."""
    return await asyncio.gather(*(anext(stream) for stream in streams))


@pytest.mark.parametrize(
    ("limit", "bound", "message"),
    [
        (
            GatewayLimit.CLIENT_PROGRESS_STREAMS,
            32,
            "This client has 32 event streams of models open at this gateway instance already",
        ),
        (
            GatewayLimit.MODEL_PROGRESS_STREAMS,
            128,
            "Model 'team/one' has 128 event streams of models open at this gateway instance already",
        ),
        (
            GatewayLimit.PROGRESS_STREAMS,
            256,
            "This gateway instance has 256 event streams of models open already, its limit.",
        ),
    ],
)
async def test_streams_are_limited(limit: GatewayLimit, bound: int, message: str) -> None:
    services = ("one", "two", "three")
    progress = progress_of(PickerHarness(*(service_with_slo(name) for name in services)))
    before, count = times_reached(limit), bound
    streams = []
    for number in range(count + 1):
        name = services[min(2, number // MAX_MODEL_STREAMS)] if limit is GatewayLimit.PROGRESS_STREAMS else "one"
        source = SOURCE if limit is GatewayLimit.CLIENT_PROGRESS_STREAMS else f"10.0.0.{number // MAX_CLIENT_STREAMS}"
        streams.append(opened(progress, f"team/{name}" if number % 2 == 0 else name, source))
    heads = await first_parts(streams)
    assert all(head.startswith(b"HTTP/1.1 200 OK") for head in heads[:-1])
    assert gateway_metrics.GATEWAY_PROGRESS_STREAMS._value.get() == count
    assert heads[-1].startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 10\r\n" in heads[-1]
    assert message in heads[-1].decode()
    assert times_reached(limit) == before + 1
    if limit is not GatewayLimit.PROGRESS_STREAMS:
        assert (await anext(opened(progress, "two", "10.0.1.1"))).startswith(b"HTTP/1.1 200 OK")
    await asyncio.gather(*(stream.aclose() for stream in streams))  # type: ignore[attr-defined]
    assert (await anext(opened(progress, "one"))).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("identity", "source", "client"),
    [
        (Identity(key_name="a", tenant="t"), SOURCE, "key a"),
        (Identity(token_subject="a", tenant="t"), SOURCE, "token a"),
        (Identity(tenant="a"), SOURCE, "tenant a"),
        (ANONYMOUS, SOURCE, f"source {SOURCE}"),
    ],
)
def test_client_is_key_else_token_else_tenant_else_source(identity: Identity, source: str, client: str) -> None:
    assert identity.client(source) == client


@pytest.mark.parametrize(
    ("forwarded", "source"),
    [
        (b"10.0.0.1", "10.0.0.1"),
        (b"1.2.3.4, 10.0.0.1", "10.0.0.1"),  # what the client claims comes first
        (b"1.2.3.4,2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        (b"1.2.3.4, unknown", ""),
        (b"", ""),
    ],
)
def test_source_is_what_envoy_appended(forwarded: bytes, source: str) -> None:
    assert source_network({b"x-forwarded-for": forwarded}) == source


@pytest.mark.parametrize(
    ("accept", "is_stream"),
    [
        (b"text/event-stream", True),
        (b"Text/Event-Stream;q=1", True),
        (b"application/json, text/event-stream", False),
        (b"*/*", False),
        (b"", False),
    ],
)
def test_client_that_takes_json_gets_no_stream(accept: bytes, is_stream: bool) -> None:
    assert wants_events(accept) is is_stream


def test_unknown_model_is_404_without_stream() -> None:
    refused = progress_of(PickerHarness(service_with_slo("chat"))).open(ANONYMOUS, "none", SOURCE)
    assert isinstance(refused, bytes)
    assert refused.startswith(b"HTTP/1.1 404 ")


def keys_of(*secrets: Object) -> Authenticator:
    made = Authenticator(ApiKeyMode.REQUIRED)
    made.keys.apply(WatchEvent("SYNC", objects=secrets))
    return made


REVOKED, REPLACED = (), (key_secret("ci") | {"data": key_secret("other")["data"]},)
EXPIRED, NARROWED = (key_secret("ci", expires="2026-01-02T03:04:05Z"),), (key_secret("ci", models="other"),)


@pytest.mark.parametrize(
    ("secrets", "code"),
    [
        (REVOKED, "invalid_api_key"),
        (REPLACED, "invalid_api_key"),
        (EXPIRED, "expired_api_key"),
        (NARROWED, "model_not_allowed"),
    ],
)
async def test_stream_ends_when_its_key_is_not_accepted(secrets: tuple[Object, ...], code: str) -> None:
    keys = keys_of(key_secret("ci"))
    harness = PickerHarness(service_with_slo("chat"), authenticator=keys)
    found = keys.authenticate({b"x-api-key": key_of("ci").encode()}, harness.clock.unix())
    assert isinstance(found, Identity)
    stream = opened(progress_of(harness), identity=found)
    await anext(stream)
    await anext(stream)
    keys.keys.apply(WatchEvent("SYNC", objects=secrets))
    error, end = await rest(stream)
    assert (event(error)[0], event(error)[1]["error"]["code"], end) == ("error", code, b"0\r\n\r\n")


async def test_stream_ends_when_its_token_expires() -> None:
    harness = PickerHarness(service_with_slo("chat"))
    token = Identity(token_subject="alice", token_expires_s=harness.clock.unix() + 1.0)
    stream = opened(progress_of(harness), identity=token)
    await anext(stream)
    await anext(stream)
    harness.clock.advance_to(CLOCK_SKEW_S)  # Envoy would still accept it
    assert event(await anext(stream))[0] == "asleep"
    harness.clock.advance_to(CLOCK_SKEW_S + 1.0)
    error, _ = await rest(stream)
    assert (event(error)[0], event(error)[1]["error"]["code"]) == ("error", "invalid_token")
