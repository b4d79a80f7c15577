"""KEDA's external scaler, with a real gRPC client that sends what KEDA sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import pytest

from plimsoll.api.recommendation import Recommendation, TierRecommendation
from plimsoll.controllers.keda_scaler import messages, server
from plimsoll.controllers.keda_scaler.answers import METRIC_NAME, SHOWN_CHARACTERS
from plimsoll.controllers.object_cache import Key
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.resources.platform_config import KedaScalerSettings
from plimsoll.sim.policies import hpa
from plimsoll.telemetry import operator_metrics
from tests import http2_client

Call = Callable[..., Awaitable[Any]]
METHODS = {
    "IsActive": (messages.ScaledObjectRef, messages.IsActiveResponse),
    "GetMetricSpec": (messages.ScaledObjectRef, messages.GetMetricSpecResponse),
    "GetMetrics": (messages.GetMetricsRequest, messages.GetMetricsResponse),
}


def tier(count: int | None) -> TierRecommendation:
    return TierRecommendation(
        current_replicas=1, ready_replicas=1, recommended_replicas=count, needed_replicas=None, min_replicas=0,
        max_replicas=9, limits=[], frozen=False, reasons=["so decided"], demand=None,
    )  # fmt: skip


def service(mode: ScalingMode = ScalingMode.RECOMMEND, stale_reason: str | None = None, **tiers: int | None) -> Any:
    return Recommendation(
        namespace="team", name="chat", mode=mode, paused=False, decided_at="2026-01-01T00:00:00Z", age_seconds=0.5,
        stale=stale_reason is not None, stale_reason=stale_reason, binding_tier=None,
        tiers={name: tier(count) for name, count in tiers.items()},
    )  # fmt: skip


class Client:
    """KEDA's side: unary calls and the stream of one ScaledObject in namespace `team`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, method: str, metadata: dict[str, str], namespace: str = "team") -> Any:
        request_class, response_class = METHODS[method]
        reference = messages.ScaledObjectRef(name="scaled", namespace=namespace, scalerMetadata=metadata)
        request = reference
        if method == "GetMetrics":
            request = request_class(scaledObjectRef=reference, metricName=METRIC_NAME)
        return await self.send(method, request, response_class)

    async def send(self, method: str, request: Any, response_class: Any) -> Any:
        stub = self.channel.unary_unary(
            f"/{messages.SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_class.FromString,
        )
        return await stub(request, timeout=60)

    def stream(self, **metadata: str) -> Any:
        stub = self.channel.unary_stream(
            f"/{messages.SERVICE}/StreamIsActive",
            request_serializer=messages.ScaledObjectRef.SerializeToString,
            response_deserializer=messages.IsActiveResponse.FromString,
        )
        return stub(messages.ScaledObjectRef(name="scaled", namespace="team", scalerMetadata=metadata))

    async def replicas(self, **metadata: str) -> int:
        [value] = (await self.call("GetMetrics", metadata)).metricValues
        assert (value.metricName, value.metricValueFloat) == (METRIC_NAME, value.metricValue)
        return int(value.metricValue)

    async def error(self, method: str = "GetMetrics", namespace: str = "team", **metadata: str) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(method, metadata, namespace)
        return raised.value.code().name, str(raised.value.details())


@asynccontextmanager
async def client(known: dict[Key, Recommendation]) -> AsyncIterator[Client]:
    """A client of a scaler that knows these services; a test may change them."""
    running, port = await server.KedaScaler(known.get, interval_s=0.01).start("127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel)
    finally:
        await running.stop(0)


@pytest.mark.parametrize("count", [0, 1, 7, 1000])
async def test_metric_and_activity_are_the_recommendation(count: int) -> None:
    async with client({("team", "chat"): service(serve=count)}) as keda:
        assert await keda.replicas(service="chat") == count
        assert (await keda.call("IsActive", {"service": "chat"})).result is (count > 0)


@pytest.mark.parametrize("count", [1, 11, 12, 100])
async def test_hpa_makes_exactly_the_recommended_count(count: int) -> None:
    async with client({("team", "chat"): service(serve=count)}) as keda:
        [spec] = (await keda.call("GetMetricSpec", {"service": "chat"})).metricSpecs
        value = await keda.replicas(service="chat")
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC_NAME, 1, 1.0)
    for current in (1, 50, 200):
        assert hpa.propose_from_total(value, spec.targetSizeFloat, current, 0.0) == count


async def test_tier_and_namespace_of_trigger_are_used() -> None:
    known = {("team", "chat"): service(prefill=2, decode=5), ("other", "chat"): service(serve=3)}
    async with client(known) as keda:
        assert await keda.replicas(service="chat", tier="prefill") == 2
        assert await keda.replicas(service="chat", tier="decode", scalerAddress="operator:8082") == 5
        assert await keda.replicas(service="chat", namespace="other") == 3


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({}, "INVALID_ARGUMENT", "needs service"),
        ({"service": "absent"}, "NOT_FOUND", "does not scale InferenceService team/absent"),
        ({"service": "chat", "namespace": "absent"}, "NOT_FOUND", "InferenceService absent/chat"),
        ({"service": "chat"}, "INVALID_ARGUMENT", "set tier to one of prefill, decode"),
        ({"service": "chat", "tier": "serve"}, "NOT_FOUND", "no tier serve: set tier to one of prefill, decode"),
        ({"service": "old"}, "UNAVAILABLE", "the last decision is 75 s old"),
        ({"service": "off"}, "FAILED_PRECONDITION", "spec.scaling.mode to Recommend"),
        ({"service": "free"}, "FAILED_PRECONDITION", "set spec.slo"),
    ],
)
async def test_error_has_status_and_next_action(metadata: dict[str, str], code: str, words: str) -> None:
    known = {
        ("team", "chat"): service(prefill=2, decode=5),
        ("team", "old"): service(stale_reason="the last decision is 75 s old", serve=1),
        ("team", "off"): service(ScalingMode.OFF, serve=None),
        ("team", "free"): service(serve=None),
    }
    async with client(known) as keda:
        for method in ("GetMetrics", "IsActive"):
            found, details = await keda.error(method, **metadata)
            assert (found, words in details) == (code, True), details


async def test_metric_spec_is_known_before_the_service() -> None:
    """KEDA makes no HPA without one, and does not ask again."""
    async with client({}) as keda:
        assert len((await keda.call("GetMetricSpec", {"service": "later"})).metricSpecs) == 1
        assert (await keda.error("GetMetricSpec"))[0] == "INVALID_ARGUMENT"


async def test_other_metric_is_refused() -> None:
    async with client({("team", "chat"): service(serve=1)}) as keda:
        reference = messages.ScaledObjectRef(namespace="team", scalerMetadata={"service": "chat"})
        request = messages.GetMetricsRequest(scaledObjectRef=reference, metricName="s0-other")
        with pytest.raises(grpc.aio.AioRpcError, match=METRIC_NAME):
            await keda.send("GetMetrics", request, messages.GetMetricsResponse)


async def test_hostile_names_are_shortened_in_errors() -> None:
    async with client({}) as keda:
        _, details = await keda.error(service="x\x1b[2J" + "y" * 5000)
        assert "\x1b" not in details
        assert len(details) < SHOWN_CHARACTERS + 120


async def test_large_request_is_refused() -> None:
    async with client({("team", "chat"): service(serve=1)}) as keda:
        code, _ = await keda.error(service="chat", ballast="x" * server.MAX_MESSAGE_BYTES)
        assert code == "RESOURCE_EXHAUSTED"
        assert await keda.replicas(service="chat") == 1


async def test_stream_sends_activity_at_once_and_at_each_change() -> None:
    known = {("team", "chat"): service(serve=0)}
    async with client(known) as keda:
        stream = keda.stream(service="chat")
        seen = [(await stream.read()).result]
        for count in (3, 5, 0):
            known["team", "chat"] = service(serve=count)
            if count != 5:  # still active: nothing to send
                seen.append((await stream.read()).result)
        assert seen == [False, True, False]
        stream.cancel()


async def test_stream_ends_when_recommendation_becomes_stale() -> None:
    known = {("team", "chat"): service(serve=2)}
    async with client(known) as keda:
        stream = keda.stream(service="chat")
        assert (await stream.read()).result is True
        known["team", "chat"] = service(stale_reason="too old", serve=2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_streams_are_bounded_and_leave_room_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STREAMS", 3)
    async with client({("team", "chat"): service(serve=1)}) as keda:
        streams = [keda.stream(service="chat") for _ in range(3)]
        assert [(await stream.read()).result for stream in streams] == [True] * 3
        with pytest.raises(grpc.aio.AioRpcError, match="at most 3 streams") as raised:
            await keda.stream(service="chat").read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await keda.replicas(service="chat") == 1
        streams.pop().cancel()
        while True:  # until the server has seen that one stream ended
            try:
                streams.append(again := keda.stream(service="chat"))
                assert (await again.read()).result is True
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
            else:
                break
        for stream in streams:
            stream.cancel()


async def test_unknown_method_is_unimplemented() -> None:
    """So KEDA goes on without StreamMetricSpec."""
    async with client({}) as keda:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await keda.send("StreamMetricSpec", messages.ScaledObjectRef(), messages.GetMetricSpecResponse)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def served() -> AsyncIterator[tuple[asyncio.Task[NoReturn], grpc.aio.Channel]]:
    """The task of `serve` for one service that wants four replicas, and a channel to it."""
    running, port = await server.KedaScaler({}.get).start("127.0.0.1:0")
    await running.stop(0)
    task = asyncio.create_task(server.serve(KedaScalerSettings(port=port), {("team", "chat"): service(serve=4)}.get))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 60)
        yield task, channel


async def test_serve_stops_listening_when_it_is_cancelled() -> None:
    """A standby must not answer: a connection to it is refused."""
    async with served() as (task, channel):
        assert await Client(channel).replicas(service="chat") == 4
        task.cancel()
        await asyncio.wait([task])
        assert (await Client(channel).error(service="chat"))[0] == "UNAVAILABLE"


async def test_cancelled_serve_ends_streams_without_an_error() -> None:
    """After an error KEDA waits longer each time before it asks for the stream again."""
    async with served() as (task, channel):
        stream = Client(channel).stream(service="chat")
        assert (await stream.read()).result is True
        task.cancel()
        assert await stream.read() is grpc.aio.EOF
        await asyncio.wait([task])


async def test_connections_are_bounded() -> None:
    running, port = await server.KedaScaler({}.get).start("127.0.0.1:0")
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(server.MAX_CONNECTIONS + 2)]
    accepted = [await reader.read(1) != b"" for reader, _ in connections]  # the server speaks first
    for _, writer in connections:
        writer.close()
    await running.stop(0)
    assert accepted.count(True) == server.MAX_CONNECTIONS


async def test_answers_are_counted_by_code() -> None:
    def counts() -> list[float]:
        return [operator_metrics.OPERATOR_KEDA_ANSWERS.labels(code)._value.get() for code in ("OK", "NOT_FOUND")]

    before = counts()
    async with client({("team", "chat"): service(serve=1)}) as keda:
        await keda.replicas(service="chat")
        await keda.error(service="absent")
    assert [after - first for after, first in zip(counts(), before, strict=True)] == [1.0, 1.0]


def test_messages_have_the_wire_format_of_keda() -> None:
    """Bytes by hand: field numbers and types of KEDA's externalscaler.proto."""
    entry = b"\x0a\x07service\x12\x04chat"
    reference = b"\x0a\x01a\x12\x01b\x1a" + bytes([len(entry)]) + entry
    assert messages.ScaledObjectRef.FromString(reference).scalerMetadata == {"service": "chat"}
    request = messages.GetMetricsRequest.FromString(b"\x0a" + bytes([len(reference)]) + reference + b"\x12\x01m")
    assert (request.scaledObjectRef.name, request.scaledObjectRef.namespace, request.metricName) == ("a", "b", "m")
    value = messages.MetricValue(metricName="m", metricValue=300, metricValueFloat=1.0)
    assert value.SerializeToString() == b"\x0a\x01m\x10\xac\x02\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
    assert messages.GetMetricsResponse(metricValues=[value]).SerializeToString()[:2] == bytes([0x0A, 15])
    spec = messages.MetricSpec(metricName="m", targetSize=1, targetSizeFloat=1.0)
    assert spec.SerializeToString() == b"\x0a\x01m\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
    assert messages.GetMetricSpecResponse(metricSpecs=[spec]).SerializeToString()[:2] == bytes([0x0A, 14])
    assert messages.IsActiveResponse(result=True).SerializeToString() == b"\x08\x01"
    assert messages.SERVICE == "externalscaler.ExternalScaler"


async def test_silent_connections_leave_room_for_keda(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are allowed would else keep KEDA out for two minutes."""
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    running, port = await server.KedaScaler({}.get).start("127.0.0.1:0")
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    async with asyncio.timeout(10.0):
        for reader, writer in silent:
            while await reader.read(1000):  # the server speaks first
                pass
            writer.close()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert (await Client(channel).error(service="chat"))[0] == "NOT_FOUND"
    await running.stop(0)


async def test_idle_connection_is_closed_and_streams_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.5)
    known = {("team", "chat"): service(serve=1)}
    running, port = await server.KedaScaler(known.get, interval_s=0.01).start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = Client(channel).stream(service="chat")
        assert (await stream.read()).result is True
        await http2_client.wait_closed(port)
        known["team", "chat"] = service(serve=0)
        assert (await stream.read()).result is False
    await running.stop(0)
