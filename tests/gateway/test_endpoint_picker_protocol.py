"""The endpoint-picker protocol over gRPC: what names an endpoint, what rejects, what is counted, what is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plimsoll.gateway.endpoint_picker import messages
from plimsoll.gateway.endpoint_picker import server as endpoint_picker_server
from plimsoll.gateway.endpoint_picker.exchange import Exchange
from plimsoll.gateway.envoy.access_log import RequestOutcome
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.settings import ApiKeyMode
from tests import http2_client
from tests.gateway.endpoint_picker_harness import (
    BODY,
    PickerServer,
    body_message,
    error_of,
    first_message,
    response_body,
    response_message,
    serve,
    set_headers,
)
from tests.gateway.kube_objects import pod, service
from tests.gateway.one_queue_harness import Gateways
from tests.gateway.picker_harness import engine_names, service_with_slo, times_reached
from tests.gateway.stack import wait_until

pytestmark = pytest.mark.asyncio

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
DESTINATION = "x-gateway-destination-endpoint"
ENGINES = engine_names(2)


async def end(server: PickerServer, stream: Any) -> None:
    """The other gateway closes the stream, and the picker has recorded the end."""
    count = len(server.records)
    await stream.done_writing()
    await wait_until(lambda: len(server.records) > count, "the request has ended")


async def test_header_and_metadata_name_one_endpoint() -> None:
    async with serve(service(), pods=ENGINES) as server:
        _, response = await server.ask()
        named = set_headers(response)[DESTINATION]
        assert named in (A, B)
        assert response.dynamic_metadata["envoy.lb"][DESTINATION] == named
        assert response.request_headers.response.clear_route_cache
        assert server.inflight() == {named: 1}


async def test_body_comes_back_unchanged_in_parts() -> None:
    text = BODY[:-1] + b" " * 200_000 + b"}"
    async with serve(service(), pods=ENGINES) as server:
        stream, _ = await server.ask(first_message(), body_message(text[:7], False), body_message(text[7:]))
        parts = []
        while not parts or not parts[-1].end_of_stream:
            parts.append((await stream.read()).request_body.response.body_mutation.streamed_response)
        assert b"".join(part.body for part in parts) == text
        assert all(len(part.body) < 65536 for part in parts)


async def test_trailers_end_the_body() -> None:
    trailers = messages.ProcessingRequest()
    trailers.request_trailers.SetInParent()
    async with serve(service(), pods=ENGINES) as server:
        stream, _ = await server.ask(first_message(), body_message(end_of_stream=False), trailers)
        part = (await stream.read()).request_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (BODY, False)
        assert (await stream.read()).HasField("request_trailers")


@pytest.mark.parametrize("subset", [[B], [f"10.9.9.9:8000,{B}"], f"10.9.9.9:8000, {B}"])
@pytest.mark.parametrize("slo", [False, True])
async def test_subset_hint_limits_the_choice(subset: object, slo: bool) -> None:
    async with serve(service_with_slo(batch=8) if slo else service(), pods=ENGINES) as server:
        for _ in range(3):
            _, response = await server.ask(first_message(subset=subset), body_message())
            assert set_headers(response)[DESTINATION] == B
        assert server.inflight() == {B: 3}


@pytest.mark.parametrize("subset", [[], [""], ["10.9.9.9:8000"], 7])
async def test_subset_without_usable_engine_gets_503(subset: object) -> None:
    async with serve(service_with_slo(), pods=ENGINES) as server:
        _, response = await server.ask(first_message(subset=subset), body_message())
        status, code, headers = error_of(response)
        assert (status, code) == (503, "no_endpoint")
        assert int(headers["retry-after"]) > 0


async def test_prefill_engine_of_the_same_revision_is_named() -> None:
    pods = (pod(A, role="decode"), pod(B, role="prefill"))
    body = b'{"model": "chat", "prompt": "%s"}' % (b"a" * 4000)
    async with serve(service(), pods=pods) as server:
        _, response = await server.ask(first_message({":path": "/v1/completions"}), body_message(body))
        headers = set_headers(response)
        assert (headers[DESTINATION], headers["x-plimsoll-prefill"]) == (A, B)


async def test_response_is_recorded_as_by_own_envoy() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, response = await server.ask()
        named = set_headers(response)[DESTINATION]
        await stream.read()
        for message in (response_message(), response_body(b"data: 1"), response_body(b"data: 2", True)):
            await stream.write(message)
        assert (await stream.read()).HasField("response_headers")
        parts = [(await stream.read()).response_body.response.body_mutation.streamed_response for _ in range(2)]
        assert [(part.body, part.end_of_stream) for part in parts] == [(b"data: 1", False), (b"data: 2", True)]
        await wait_until(lambda: bool(server.records), "the request has ended")
        [record] = server.records
        assert (record.upstream, record.cluster, record.status) == (named, "pick/team/chat", 200)
        assert (record.outcome, record.sent_bytes, record.received_bytes) == (RequestOutcome.SUCCEEDED, 14, len(BODY))
        assert record.ttft_us is not None
        assert record.duration_us is not None
        assert 0 < record.ttft_us <= record.duration_us
        assert server.inflight() == {}


async def test_first_token_of_a_long_stream_is_known_while_it_runs() -> None:
    """Else the engine looks hung for as long as the stream takes, and gets no requests that another one can take."""
    async with serve(service_with_slo(batch=8), pods=engine_names(1)) as server:
        body = b'{"model": "chat", "messages": [], "stream": true}'
        stream, _ = await server.ask(first_message(), body_message(body))
        await stream.read()
        (replica,) = server.picker.admission.services["team/chat"].controller.pool.replicas.values()
        (running,) = replica.running.values()
        later_s = running.admitted_s + 60.0
        assert replica.silence_s(later_s) > 0.0
        for message in (response_message(), response_body(b"data: 1")):
            await stream.write(message)
        await wait_until(lambda: running.has_first_token, "the first token is known")
        assert replica.silence_s(later_s) == 0.0
        assert not server.records, "the stream runs still"
        await end(server, stream)
        assert server.picker.stats("team/chat").early_first_tokens == 1


async def test_stream_that_ends_early_counts_as_cancelled() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, _ = await server.ask()
        await stream.read()
        await stream.write(response_message())
        await end(server, stream)
        assert server.records[0].outcome is RequestOutcome.CANCELLED
        assert server.inflight() == {}


async def test_gateway_may_end_the_stream_during_the_last_answer() -> None:
    async with serve(service(), pods=ENGINES) as server:
        sent = [first_message(), body_message(), response_message(), response_body(b"data: 1", True)]

        async def read() -> Any:
            return sent.pop(0)

        async def write(message: Any) -> None:
            if message.HasField("response_body"):
                raise asyncio.CancelledError

        exchange = Exchange(server.server.parts, read, write)
        with pytest.raises(asyncio.CancelledError):
            await exchange.run()
        exchange.close()
        [record] = server.records
        assert record.outcome is RequestOutcome.SUCCEEDED
        assert server.inflight() == {}


async def test_engine_that_refused_is_suspect() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, response = await server.ask()
        await stream.write(response_message("503"))
        await stream.write(response_body(b"upstream connect error or disconnect/reset before headers", True))
        await wait_until(lambda: bool(server.records), "the request has ended")
        assert server.records[0].outcome is RequestOutcome.FAILED
        assert server.picker.inflight.loads[set_headers(response)[DESTINATION]].suspect


async def test_engine_that_another_served_for_is_suspect() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, response = await server.ask()
        named = set_headers(response)[DESTINATION]
        other = B if named == A else A
        await stream.write(response_message(served=other))
        await stream.write(response_body(b"x", True))
        await wait_until(lambda: bool(server.records), "the request has ended")
        assert server.records[0].upstream == other
        assert server.picker.inflight.loads[named].suspect


async def test_counts_survive_what_own_envoy_reports() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, response = await server.ask()
        for _ in range(4):
            server.picker.reports.on_envoy_stats({A: 0, B: 0})
        named = set_headers(response)[DESTINATION]
        assert server.inflight() == {named: 1}
        assert server.picker.inflight.carried(named) == 1
        await end(server, stream)
        server.picker.reports.on_envoy_stats({A: 0, B: 0})
        assert server.inflight() == {}


async def test_queued_request_leaves_with_its_stream() -> None:
    async with serve(service_with_slo(batch=1), pods=ENGINES[:1]) as server:
        first, _ = await server.ask()
        waiting = server.stream()
        for message in (first_message(), body_message()):
            await waiting.write(message)
        await wait_until(lambda: len(server.picker.queue) == 1, "the request is queued")
        await end(server, waiting)
        assert len(server.picker.queue) == 0
        await end(server, first)


async def test_fallback_service_gets_no_request_of_a_pool() -> None:
    chat = service_with_slo(admission={"whenFull": "Downgrade", "fallback": {"name": "small"}}, batch=1)
    pods = (*ENGINES[:1], pod("10.0.1.1:8000", service="small"))
    async with serve(chat, service_with_slo("small"), pods=pods) as server:
        answers = [await server.ask() for _ in range(2)]
        assert error_of(answers[1][1])[0] == 429


async def test_key_is_required_before_the_body() -> None:
    authenticator = Authenticator(ApiKeyMode.REQUIRED)
    async with serve(service(), pods=ENGINES, authenticator=authenticator) as server:
        _, response = await server.ask(first_message())
        assert error_of(response)[:2] == (401, "missing_api_key")


async def test_both_gateways_of_one_queue_count_a_foreign_request(tmp_path: Path) -> None:
    """The owner decides, and neither Envoy carries the request."""
    shed = service_with_slo(admission={"whenFull": "Shed"}, batch=1)
    async with Gateways(tmp_path, 2, shed, pods=ENGINES[:1]) as gateways:
        [other] = gateways.others()
        async with serve(picker=other.picker) as server:
            stream, response = await server.ask()
            assert set_headers(response)[DESTINATION] == A
            for gateway in gateways.all:
                for _ in range(3):
                    gateway.picker.reports.on_envoy_stats({A: 0})
                assert gateway.picker.inflight.loads[A].inflight == 1
            assert gateways.owner().picker.inflight.carried(A) == 0
            _, rejected = await server.ask()
            assert error_of(rejected)[:2] == (429, "overloaded")
            await stream.done_writing()
            await wait_until(lambda: gateways.owner().admits == 0, "the owner knows of the end")


# -------------------------------------------------------------------- bounds and faults


async def error_code(stream: Any) -> tuple[str, str]:
    code = await stream.code()
    return code.name, await stream.details()


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (body_message(), "the first message must be request_headers"),
        (first_message(request_mode=1), "set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED"),
    ],
)
async def test_unsupported_mode_is_named(sent: Any, text: str) -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream = server.stream()
        await stream.write(sent)
        code, details = await error_code(stream)
        assert code == "INVALID_ARGUMENT"
        assert text in details


async def test_message_out_of_order_ends_the_stream() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream = server.stream()
        await stream.write(first_message())
        await stream.write(response_message())
        assert (await error_code(stream))[0] == "INVALID_ARGUMENT"
        assert server.inflight() == {}


async def test_garbage_ends_its_stream_only() -> None:
    async with serve(service(), pods=ENGINES) as server:
        broken = server.stream(serializer=lambda message: message)
        await broken.write(b"\xff" * 100)
        assert (await error_code(broken))[0] != "OK"
        _, response = await server.ask()
        assert set_headers(response)[DESTINATION] in (A, B)


async def test_too_many_streams_get_429() -> None:
    before = times_reached(GatewayLimit.ENDPOINT_PICKER_STREAMS)
    async with serve(service(), pods=ENGINES, max_streams=2) as server:
        held = [await server.ask() for _ in range(2)]
        _, response = await server.ask(first_message())
        status, code, headers = error_of(response)
        assert (status, code) == (429, "gateway_full")
        assert int(headers["retry-after"]) > 0
        assert times_reached(GatewayLimit.ENDPOINT_PICKER_STREAMS) == before + 1
        await end(server, held[0][0])
        _, response = await server.ask()
        assert set_headers(response)[DESTINATION] in (A, B)


async def test_silent_stream_ends() -> None:
    async with serve(service(), pods=ENGINES, headers_timeout_seconds=0.05) as server:
        stream = server.stream()
        assert (await error_code(stream))[0] == "DEADLINE_EXCEEDED"


async def test_body_that_does_not_end_gets_408() -> None:
    async with serve(service(), pods=ENGINES, body_timeout_seconds=0.05) as server:
        _, response = await server.ask(first_message(), body_message(end_of_stream=False))
        assert error_of(response)[:2] == (408, "request_timeout")


@pytest.mark.parametrize("headers", [{"content-length": "2000"}, {"content-length": "x"}, {}])
async def test_body_beyond_the_limit_gets_413(headers: dict[str, str]) -> None:
    async with serve(service(), pods=ENGINES, max_body_bytes=1000) as server:
        _, response = await server.ask(first_message(headers), body_message(b" " * 1001, False))
        assert error_of(response)[:2] == (413, "body_too_large")


async def test_bodies_share_one_budget() -> None:
    """Two bodies of 40 MiB do not fit 64 MiB; the second may come when the first one is gone."""
    before = times_reached(GatewayLimit.ENDPOINT_PICKER_BODY_BYTES)
    async with serve(service(), pods=ENGINES, max_body_bytes=40 << 20) as server:
        large = first_message({"content-length": str(40 << 20)})
        held = server.stream()
        await held.write(large)
        await wait_until(lambda: server.server.bodies.reserved_bytes > 0, "the first body has its room")
        _, response = await server.ask(large)
        assert error_of(response)[:2] == (429, "gateway_full")
        assert times_reached(GatewayLimit.ENDPOINT_PICKER_BODY_BYTES) == before + 1
        await end(server, held)
        assert server.server.bodies.reserved_bytes == 0


async def test_body_has_no_room_once_it_is_sent() -> None:
    async with serve(service(), pods=ENGINES) as server:
        stream, _ = await server.ask()
        await stream.read()
        await stream.write(response_message())
        await stream.read()
        assert server.server.bodies.reserved_bytes == 0


async def test_health_follows_readiness() -> None:
    async with serve(service()) as server:
        assert [await server.health(name) for name in ("liveness", "readiness", messages.SERVICE)] == [1, 1, 1]
        assert await server.health("unknown") == "NOT_FOUND"
        server.reason = "the gateway is stopping"
        assert [await server.health(name) for name in ("liveness", "readiness", "")] == [1, 2, 2]


async def test_many_streams_that_vanish_leave_nothing() -> None:
    async with serve(service_with_slo(batch=4), pods=ENGINES, max_streams=200) as server:

        async def vanish() -> None:
            stream = server.stream()
            await stream.write(first_message())
            await stream.write(body_message())
            stream.cancel()

        await asyncio.gather(*(vanish() for _ in range(100)))
        _, response = await server.ask()
        assert set_headers(response)[DESTINATION] in (A, B)
        await wait_until(lambda: sum(server.inflight().values()) == 1, "only the last request is left")
        assert len(server.picker.queue) == 0
        assert server.server.bodies.reserved_bytes <= len(BODY)


async def test_idle_connection_is_closed_and_streams_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_picker_server, "IDLE_SECONDS", 0.5)
    async with serve(service(), pods=ENGINES) as server:
        stream, _ = await server.ask()
        await http2_client.wait_closed(server.port)
        await end(server, stream)
        assert server.inflight() == {}
