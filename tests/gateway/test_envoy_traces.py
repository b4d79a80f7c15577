"""Traces of a whole gateway at a receiver for OTLP: one trace from client to engine, and its attributes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

PARENT = "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3


class Receiver:
    """Spans by trace id. `status` is what an export gets."""

    def __init__(self) -> None:
        self.port, self.status = free_port(), 200
        self.spans: dict[str, list[Any]] = {}

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            for resource in message.resource_spans:
                for scope in resource.instrumentation_library_spans:  # the former name of scope_spans
                    for span in scope.spans:
                        self.spans.setdefault(span.trace_id.hex(), []).append(span)
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def trace(self, trace_id: str, count: int) -> dict[str, Any]:
        """The spans of a trace by the first word of their names, once there are so many."""
        await wait_until(lambda: len(self.spans.get(trace_id, [])) >= count, f"{count} spans of {trace_id}")
        assert len(self.spans[trace_id]) == count
        return {span.name.split()[0]: span for span in self.spans[trace_id]}


def attributes(span: Any) -> dict[str, str]:
    return {a.key: a.value.string_value for a in span.attributes}


def sent(trace_id: str, flags: str = "01", **headers: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT}-{flags}", **headers}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: object) -> AsyncIterator[tuple[GatewayStack, FakeEngine, Receiver]]:
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", receiver.port).start()
    stack = GatewayStack(
        make_directory(tmp_path_factory), traces_endpoint=f"http://127.0.0.1:{receiver.port}", traces_sampling=0.0
    )
    try:
        engine = await stack.engine()
        await stack.start([service_with_slo(batch=1)], [pod(engine.address)])
        await stack.wait_routable(engine)
        yield stack, engine, receiver
    finally:
        await stack.shut_down()
        await runner.cleanup()
        print(stack.log.read_text()[-4000:])


Traced = tuple[GatewayStack, FakeEngine, Receiver]


async def test_served_request_is_one_trace_with_attributes(traced: Traced) -> None:
    stack, engine, receiver = traced
    trace_id, tenant = "a1" * 16, {"x-gateway-inference-fairness-id": "acme"}
    async with stack.ask(sent=sent(trace_id, **tenant)) as answer:
        assert (answer.status, [n for n in answer.headers if n.startswith("plimsoll-trace")]) == (200, [])
    spans = await receiver.trace(trace_id, 3)
    request, question, engines = spans["ingress"], spans["async"], spans["router"]
    assert (request.kind, question.kind, engines.kind) == (SERVER, CLIENT, CLIENT)
    assert request.parent_span_id.hex() == PARENT
    assert question.parent_span_id == engines.parent_span_id == request.span_id
    assert engine.header("traceparent") == f"00-{trace_id}-{engines.span_id.hex()}-01"
    assert not any(name.startswith(b"plimsoll-trace") for name in engine.received[-1].headers)
    found = attributes(request)
    assert {name: value for name, value in found.items() if name.startswith(("gen_ai.", "plimsoll."))} == {
        "gen_ai.request.model": "chat",
        "gen_ai.operation.name": "chat",
        "plimsoll.tenant": "acme",
        "plimsoll.class": "default",
        "plimsoll.service": "team/chat",
        "plimsoll.queue_seconds": "0.000000",
    }
    assert found["http.status_code"] == "200"


async def test_queued_and_cancelled_requests_have_traces(traced: Traced) -> None:
    stack, engine, receiver = traced
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    leaving = asyncio.create_task(stack.ask_fully(sent=sent("b1" * 16)))
    await stack.wait_queued(1)
    waiting = asyncio.create_task(stack.ask_fully(sent=sent("b2" * 16)))
    await stack.wait_queued(2)
    leaving.cancel()
    await stack.wait_queued(1)
    hold.set()
    assert [status for status, *_ in (await running, await waiting)] == [200, 200]
    engine.behaviour.release_event = None
    spans = await receiver.trace("b2" * 16, 3)
    assert float(attributes(spans["ingress"])["plimsoll.queue_seconds"]) > 0
    assert spans["async"].end_time_unix_nano <= spans["router"].end_time_unix_nano
    left = await receiver.trace("b1" * 16, 2)
    assert attributes(left["ingress"])["response_flags"] == "DC"
    assert left["async"].parent_span_id == left["ingress"].span_id


async def test_rejected_request_has_bounded_escaped_attributes(traced: Traced) -> None:
    stack, _, receiver = traced
    model = "no\r\nplimsoll-trace-tenant: root\u2028%" + "m" * 500
    agent = {"user-agent": "u" * 5000, "x-request-id": "i" * 5000}
    status, *_ = await stack.ask_fully(model, sent=sent("c1" * 16, **agent))
    assert status == 404
    spans = await receiver.trace("c1" * 16, 2)
    found = attributes(spans["ingress"])
    assert found["http.status_code"] == "404"
    assert found["gen_ai.request.model"].startswith("no%0D%0Aplimsoll-trace-tenant: root%E2%80%A8%25mmm")
    assert "plimsoll.tenant" not in found
    assert all(len(value) <= 300 for span in spans.values() for value in attributes(span).values())


async def test_unsampled_request_has_no_span_and_no_attributes(traced: Traced) -> None:
    stack, engine, receiver = traced
    assert (await stack.ask_fully(sent=sent("d1" * 16, "00")))[0] == 200
    assert (engine.header("traceparent") or "").endswith("-00")
    assert (await stack.ask_fully(sent={"traceparent": "garbage"}))[0] == 200
    assert (await stack.ask_fully())[0] == 200
    assert (await stack.ask_fully(sent=sent("d2" * 16)))[0] == 200
    await receiver.trace("d2" * 16, 3)
    known_ids = {"a1", "b1", "b2", "c1", "d2"}
    assert {i: [s.name for s in v] for i, v in receiver.spans.items() if i[:2] not in known_ids} == {}
    assert "d1" * 16 not in receiver.spans


async def test_query_is_in_no_span(traced: Traced) -> None:
    stack, _, receiver = traced
    async with stack.http.get(f"{stack.url}/nope?api-key=s3cr3t-in-query", headers=sent("e1" * 16)) as answer:
        assert answer.status == 404
    spans = await receiver.trace("e1" * 16, 1)
    assert "s3cr3t-in-query" not in str(spans["ingress"])


async def test_failed_exports_are_counted_and_requests_go_on(traced: Traced) -> None:
    stack, _, receiver = traced
    receiver.status = 500

    async def counted() -> bool:
        assert (await stack.ask_fully(sent=sent("f1" * 16)))[0] == 200
        async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
            text = await answer.text()
        (line,) = (line for line in text.splitlines() if line.startswith("plimsoll_gateway_trace_exports_failed_total"))
        return float(line.split()[1]) > 0

    await wait_until(counted, "failed exports are counted")
    receiver.status = 200
