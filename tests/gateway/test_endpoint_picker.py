"""The endpoint picker behind the Envoy of another gateway, with both modes for bodies and both ways to the engines."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.foreign_envoy import BUFFERED, DESTINATION, DUPLEX, SUBSET_HEADER, Json
from tests.gateway.foreign_gateway import ForeignGateway, wait_listening
from tests.gateway.kube_objects import pod, service, target_pod, target_service, with_adapters
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


class Foreign:
    """A gateway of Plimsoll, of which only the endpoint picker is used, and the other gateway in front."""

    def __init__(self, stack: GatewayStack, envoy: ForeignGateway) -> None:
        self.stack = stack
        self.envoy = envoy

    def ask(self, model: str = "chat", sent: dict[str, str] | None = None, **fields: object) -> object:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
        headers = {"content-type": "application/json", **(sent or {})}
        url = f"{self.envoy.url}/v1/chat/completions"
        return self.stack.http.post(url, data=io.BytesIO(json.dumps(body).encode()), headers=headers)

    async def ask_fully(self, model: str = "chat", **fields: object) -> tuple[int, Json, object]:
        async with self.ask(model, **fields) as answer:  # type: ignore[attr-defined]
            return answer.status, await answer.json(), answer.headers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def picker(tmp_path_factory: object) -> AsyncIterator[GatewayStack]:
    stack = GatewayStack(
        make_directory(tmp_path_factory),
        endpoint_picker_port=free_port(),
        max_body_bytes=1 << 20,
        body_timeout_seconds=2.0,
        access_log=True,
    )
    try:
        yield await stack.start()
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-6000:])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[DUPLEX, BUFFERED], ids=["duplex", "buffered"])
async def envoy(
    picker: GatewayStack, tmp_path_factory: object, request: pytest.FixtureRequest
) -> AsyncIterator[ForeignGateway]:
    port = picker.settings.endpoint_picker_port
    assert port is not None
    gateway = ForeignGateway(make_directory(tmp_path_factory), port, request.param)
    try:
        await wait_listening(gateway, picker.http)
        yield gateway
    finally:
        gateway.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def foreign(picker: GatewayStack, envoy: ForeignGateway) -> AsyncIterator[Foreign]:
    yield Foreign(picker, envoy)
    await picker.reset()


async def with_engines(stack: GatewayStack, count: int, **slo: object) -> list[FakeEngine]:
    engines = [await stack.engine() for _ in range(count)]
    found = service_with_slo(**slo) if slo else service()
    await stack.set_objects([found], [pod(engine.address) for engine in engines])
    await stack.wait_routable(*engines)
    return engines


async def test_request_is_served_and_counted(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    status, body, headers = await foreign.ask_fully()
    assert (status, headers["x-engine"], body["model"]) == (200, engine.address, "m")  # type: ignore[index]
    found = await foreign.stack.wait_completed(1)
    assert found["requests"]["succeeded"] == 1
    assert found["ttft"]["counts"] == [1]
    await foreign.stack.wait_inflight(engine, 0)
    assert json.loads(engine.received[0].body)["messages"] == [{"role": "user", "content": "hi"}]


async def test_engine_of_a_target_is_picked(foreign: Foreign) -> None:
    engine = await foreign.stack.engine()
    foreign.stack.write_objects([target_service(port=engine.port)], [target_pod(engine.host)])
    await foreign.stack.wait_routable(engine)
    status, _, headers = await foreign.ask_fully()
    assert (status, headers["x-engine"]) == (200, engine.address)  # type: ignore[index]
    assert (await foreign.stack.wait_completed(1))["requests"]["succeeded"] == 1


async def test_engine_gets_only_headers_of_the_picker(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    sent = {
        "x-plimsoll-model": "theirs/other",
        "x-plimsoll-prefill": "10.0.0.9:8000",
        "x-plimsoll-response-model": "x",
        "x-plimsoll-request-id": "mine",
        "x-data-parallel-rank": "3",
        "authorization": "Bearer secret",
        DESTINATION: "10.0.0.9:8000",
    }
    assert (await foreign.ask_fully(sent=sent))[0] == 200
    assert engine.header("x-plimsoll-model") == "team/chat"
    assert engine.header("x-plimsoll-endpoint") == engine.address
    assert engine.header("x-plimsoll-request-id") not in (None, "mine")
    assert engine.header(DESTINATION) == engine.address
    for name in ("x-plimsoll-prefill", "x-plimsoll-response-model", "x-data-parallel-rank", "authorization"):
        assert engine.header(name) is None, name


async def test_stream_arrives_in_parts(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    engine.behaviour.pause = pause = asyncio.Event()
    async with foreign.ask(stream=True) as answer:  # type: ignore[attr-defined]
        assert b"data:" in await answer.content.readany()
        await foreign.stack.wait_inflight(engine, 1)
        pause.set()
        assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
    await foreign.stack.wait_inflight(engine, 0)
    assert (await foreign.stack.wait_completed(1))["requests"]["succeeded"] == 1


async def test_full_service_rejects_with_retry_after(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1, admission={"whenFull": "Shed"}, batch=1)
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(foreign.ask_fully())
    await foreign.stack.wait_inflight(engine, 1)
    status, body, headers = await foreign.ask_fully()
    assert (status, body["error"]["code"]) == (429, "overloaded")
    assert 10 <= int(headers["retry-after"]) <= 30  # type: ignore[index]
    hold.set()
    assert (await running)[0] == 200


async def test_queued_request_is_sent_when_a_place_is_free(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1, batch=1)
    hold = engine.behaviour.release_event = asyncio.Event()
    tasks = [asyncio.create_task(foreign.ask_fully()) for _ in range(2)]
    await foreign.stack.wait_queued(1)
    await wait_until(lambda: engine.open == 1, "the other runs")
    hold.set()
    assert [status for status, *_ in await asyncio.gather(*tasks)] == [200, 200]
    await foreign.stack.wait_inflight(engine, 0)


async def test_client_that_leaves_the_queue_frees_its_place(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1, batch=1)
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(foreign.ask_fully())
    await foreign.stack.wait_inflight(engine, 1)
    leaving = asyncio.create_task(foreign.ask_fully())
    await foreign.stack.wait_queued(1)
    leaving.cancel()
    await foreign.stack.wait_queued(0)
    hold.set()
    assert (await running)[0] == 200
    assert len(engine.received) == 1
    assert (await foreign.stack.admission())["outcomes"]["ClientGone"] == 1


async def test_client_that_leaves_a_stream_ends_the_request(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    engine.behaviour.pause = asyncio.Event()
    async with foreign.ask(stream=True) as answer:  # type: ignore[attr-defined]
        await answer.content.readany()
        await foreign.stack.wait_inflight(engine, 1)
        answer.close()
    await foreign.stack.wait_inflight(engine, 0)
    assert (await foreign.stack.wait_completed(1))["requests"]["cancelled"] == 1


async def test_engine_killed_before_its_response_is_avoided(foreign: Foreign) -> None:
    killed, other = await with_engines(foreign.stack, 2)
    for engine in (killed, other):
        engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(foreign.ask("chat").__aenter__())  # type: ignore[attr-defined]
    await wait_until(lambda: killed.open + other.open == 1, "one engine has the request")
    if other.open:
        killed, other = other, killed
    killed.kill()
    assert (await running).status == 503
    assert (await foreign.stack.wait_completed(1))["requests"]["failed"] == 1
    assert other.behaviour.release_event is not None
    other.behaviour.release_event.set()
    for _ in range(3):
        status, _, headers = await foreign.ask_fully()
        assert (status, headers["x-engine"]) == (200, other.address)  # type: ignore[index]


async def test_subset_hint_is_kept(foreign: Foreign) -> None:
    engines = await with_engines(foreign.stack, 3)
    allowed = engines[1].address
    for _ in range(4):
        status, _, headers = await foreign.ask_fully(sent={SUBSET_HEADER: f"10.1.1.1:8000, {allowed}"})
        assert (status, headers["x-engine"]) == (200, allowed)  # type: ignore[index]
    assert engines[1].header("x-plimsoll-endpoint") == allowed


@pytest.mark.parametrize("slo", [{}, {"batch": 1}])
async def test_subset_without_engine_gets_503(foreign: Foreign, slo: Json) -> None:
    await with_engines(foreign.stack, 1, **slo)
    status, body, headers = await foreign.ask_fully(sent={SUBSET_HEADER: "10.1.1.1:8000"})
    assert (status, body["error"]["code"]) == (503, "no_endpoint")
    assert int(headers["retry-after"]) > 0  # type: ignore[index]


async def test_no_ready_engine_gets_503(foreign: Foreign) -> None:
    await foreign.stack.set_objects([service()], [])
    status, body, _ = await foreign.ask_fully()
    assert (status, body["error"]["code"]) == (503, "model_starting")


async def test_unknown_model_gets_404_and_models_are_listed(foreign: Foreign) -> None:
    await with_engines(foreign.stack, 1)
    status, body, _ = await foreign.ask_fully("nobody")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    async with foreign.stack.http.get(f"{foreign.envoy.url}/v1/models") as answer:
        assert [card["id"] for card in (await answer.json())["data"]] == ["chat"]
    async with foreign.stack.http.post(f"{foreign.envoy.url}/load_lora_adapter", data=b"{}") as answer:
        assert answer.status == 404
    async with foreign.stack.http.get(f"{foreign.envoy.url}/v1/chat/completions") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_adapter_is_named_to_the_engine(foreign: Foreign) -> None:
    engine = await foreign.stack.engine()
    await foreign.stack.set_objects([with_adapters(service(), "sql")], [pod(engine.address)])
    await foreign.stack.wait_routable(engine)
    assert (await foreign.ask_fully("sql"))[0] == 200
    assert engine.header("x-plimsoll-adapter") == "sql"


async def test_large_body_passes_and_too_large_one_gets_413(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    text = "a" * (700 << 10)
    assert (await foreign.ask_fully(messages=[{"role": "user", "content": text}]))[0] == 200
    assert json.loads(engine.received[0].body)["messages"][0]["content"] == text
    status, body, _ = await foreign.ask_fully(messages=[{"role": "user", "content": text * 2}])
    assert (status, body["error"]["code"]) == (413, "body_too_large")


async def test_chunked_body_passes(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"model": "chat", "messa'
        yield b'ges": []}'

    async with foreign.stack.http.post(f"{foreign.envoy.url}/v1/chat/completions", data=parts()) as answer:
        assert answer.status == 200
    assert engine.received[0].body == b'{"model": "chat", "messages": []}'


async def test_body_that_never_ends_gets_408(foreign: Foreign) -> None:
    if foreign.envoy.is_buffered:
        pytest.skip("the gateway itself waits for the body")

    async def parts() -> AsyncIterator[bytes]:
        yield b'{"model": "chat", '
        await asyncio.sleep(3600)

    async with foreign.stack.http.post(f"{foreign.envoy.url}/v1/chat/completions", data=parts()) as answer:
        assert answer.status == 408


async def test_pool_with_override_host_follows_the_pick(picker: GatewayStack, tmp_path_factory: object) -> None:
    engines = await with_engines(picker, 3)
    assert picker.settings.endpoint_picker_port is not None
    addresses = tuple(engine.address for engine in engines)
    envoy = ForeignGateway(make_directory(tmp_path_factory), picker.settings.endpoint_picker_port, DUPLEX, addresses)
    try:
        await wait_listening(envoy, picker.http)
        for _ in range(6):
            status, _, headers = await Foreign(picker, envoy).ask_fully()
            assert status == 200
            served = next(engine for engine in engines if engine.address == headers["x-engine"])  # type: ignore[index]
            assert (served.header("x-plimsoll-endpoint") or "").split(",")[0] == served.address
    finally:
        envoy.stop()
        await picker.reset()


async def test_model_of_another_pool_is_named_to_the_engine(picker: GatewayStack, tmp_path_factory: object) -> None:
    """A gateway that does not know the picked engine takes one of its pool, whose launcher then refuses the name."""
    own, other = [await picker.engine() for _ in range(2)]
    await picker.set_objects([service(), service("other")], [pod(own.address), pod(other.address, service="other")])
    await picker.wait_routable(own)
    await picker.wait_routable(other, service="team/other")
    assert picker.settings.endpoint_picker_port is not None
    port = picker.settings.endpoint_picker_port
    envoy = ForeignGateway(make_directory(tmp_path_factory), port, DUPLEX, (own.address,))
    try:
        await wait_listening(envoy, picker.http)
        _, _, headers = await Foreign(picker, envoy).ask_fully("other")
        assert headers["x-engine"] == own.address  # type: ignore[index]
        assert own.header("x-plimsoll-model") == "team/other"
        assert own.header("x-plimsoll-endpoint") == other.address
    finally:
        envoy.stop()
        await picker.reset()


@pytest.mark.parametrize(("objective", "found"), [("batch", "batch"), ("unknown", "default"), ("", "default")])
async def test_objective_names_the_class(foreign: Foreign, objective: str, found: str) -> None:
    classes = {"classes": [{"name": "batch", "maxUtilization": "50%"}, {"name": "default"}]}
    engine = await foreign.stack.engine()
    await foreign.stack.set_objects(
        [service_with_slo(admission=classes, classes=("batch", "default"))], [pod(engine.address)]
    )
    await foreign.stack.wait_routable(engine)
    name = f"{objective}-of-{foreign.envoy.port}"
    sent = {"x-request-id": name} | ({"x-gateway-inference-objective": objective} if objective else {})
    assert (await foreign.ask_fully(sent=sent))[0] == 200

    def is_logged() -> bool:
        lines = [line for line in foreign.stack.log.read_text().splitlines() if f'"{name}"' in line]
        return any(json.loads(line)["class"] == found for line in lines if line.startswith("{"))

    await wait_until(is_logged, "the access log has the class")


async def test_access_log_has_the_request(foreign: Foreign) -> None:
    [engine] = await with_engines(foreign.stack, 1)
    assert (await foreign.ask_fully(sent={"x-request-id": f"of-{foreign.envoy.port}"}))[0] == 200

    def is_logged() -> bool:
        lines = [line for line in foreign.stack.log.read_text().splitlines() if f"of-{foreign.envoy.port}" in line]
        return any(json.loads(line)["endpoint"] == engine.address for line in lines if line.startswith("{"))

    await wait_until(is_logged, "the access log has the request")


async def test_metrics_count_requests(foreign: Foreign) -> None:
    async with foreign.stack.http.get(f"{foreign.stack.picker_url}/metrics") as answer:
        page = await answer.text()
    assert 'plimsoll_gateway_endpoint_picker_requests_total{outcome="sent"}' in page
    assert "plimsoll_gateway_endpoint_picker_streams 0.0" in page
