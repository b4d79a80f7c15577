"""Requests through real Envoy: the ways that are open, the picks that are obeyed, the refusals' shape."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest

from plimsoll.adapters.gateway_signals import parse_signals
from plimsoll.core import histogram
from tests.gateway.kube_objects import pod, service
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


def is_openai_error(body: Any) -> bool:
    """Is this OpenAI's error shape, with words in it?"""
    error = body["error"]
    return bool(
        isinstance(error["message"], str)
        and error["message"]
        and isinstance(error["type"], str)
        and "param" in error
        and (error["code"] is None or isinstance(error["code"], str))
    )


async def test_completion_is_returned_from_engine(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    status, body, headers = await stack.ask_fully()
    assert (status, body["model"]) == (200, "m")
    assert headers["x-engine"] == engine.address
    assert len(headers["x-request-id"]) == 36


async def test_stream_is_complete_and_request_id_is_echoed(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    body = {"model": "team/chat", "messages": [], "stream": True}
    url = f"{stack.url}/v1/chat/completions"
    async with stack.http.post(url, json=body, headers={"x-request-id": "mine-1"}) as answer:
        text = await answer.text()
    assert text.count("data: {") == 3
    assert text.endswith("data: [DONE]\n\n")
    assert answer.headers["x-request-id"] == "mine-1"
    assert engine.header("x-request-id") == "mine-1"


async def test_least_loaded_engine_is_picked(stack: GatewayStack) -> None:
    first, second = await stack.engine(), await stack.engine()
    hold = asyncio.Event()
    first.behaviour.release_event = second.behaviour.release_event = hold
    await stack.set_objects([service()], [pod(first.address), pod(second.address)])
    await stack.wait_routable(first, second)
    pending = [asyncio.create_task(stack.ask_fully()) for _ in range(6)]
    await wait_until(lambda: first.open == second.open == 3, "three requests at each engine")
    await stack.wait_inflight(first, 3)
    hold.set()
    assert [status for status, *_ in await asyncio.gather(*pending)] == [200] * 6
    await stack.wait_inflight(first, 0)
    await stack.wait_inflight(second, 0)


async def test_long_prompt_gets_prefill_engine_of_same_revision(stack: GatewayStack) -> None:
    decode, prefill = await stack.engine(), await stack.engine()
    pods = [
        pod(decode.address, role="decode"),
        pod(prefill.address, role="prefill"),
        pod("127.0.0.9:8000", role="prefill", revision="r2"),
    ]
    await stack.set_objects([service()], pods)

    async def is_routable() -> bool:
        return bool((await stack.endpoints()).get(decode.address, {}).get("routable"))

    await wait_until(is_routable, "the decode engine is routable")
    await stack.ask_fully()
    assert decode.header("x-plimsoll-prefill") is None
    await stack.ask_fully(messages=[{"role": "user", "content": "word " * 200}])
    assert decode.header("x-plimsoll-prefill") == prefill.address
    assert decode.header("x-plimsoll-endpoint") == decode.address
    assert prefill.received == []
    signals = await stack.signals()
    assert signals["services"]["team/chat"]["prefill"] == {"remote": 1, "local": 1}


async def test_client_routing_headers_are_removed(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    mine = {
        "x-plimsoll-endpoint": "127.0.0.9:1",
        "x-plimsoll-cluster": "picker",
        "X-Plimsoll-Prefill": "10.0.0.1:8000",
        "x-plimsoll-remote-prefill": "prefill",
        "x-plimsoll-error-response": "AAAA",
        "x-data-parallel-rank": "7",
        "x-envoy-auth-failure-mode-allowed": "true",
        "x-envoy-max-retries": "9",
    }
    body = {"model": "chat", "messages": []}
    async with stack.http.post(f"{stack.url}/v1/chat/completions", json=body, headers=mine) as answer:
        assert answer.status == 200
    seen = engine.received[-1].headers
    assert seen[b"x-plimsoll-endpoint"] == engine.address.encode()
    for name in mine.keys() - {"x-plimsoll-endpoint", "x-plimsoll-cluster"}:
        assert name.lower().encode() not in seen, name


async def test_models_endpoint_lists_api_objects(stack: GatewayStack) -> None:
    await stack.set_objects([service(model="tiny"), service("other", creationTimestamp="2026-02-02T00:00:00Z")], [])
    async with stack.http.get(f"{stack.url}/v1/models") as answer:
        listed = await answer.json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["other", "tiny"]
    assert listed["data"][1] == {"id": "tiny", "object": "model", "created": 1767323045, "owned_by": "plimsoll"}


async def test_model_without_engines_is_503_starting(stack: GatewayStack) -> None:
    await stack.set_objects([service()], [])
    status, body, headers = await stack.ask_fully()
    assert status == 503
    assert is_openai_error(body)
    assert body["error"]["code"] == headers["x-plimsoll-reason"] == "model_starting"
    assert 10 <= int(headers["retry-after"]) <= 30
    async with stack.ask() as answer:
        assert answer.headers["content-type"] == "application/json"
    assert (await stack.signals())["services"]["team/chat"]["requests"]["rejected"] == {"model_starting": 2}


async def test_unknown_model_is_404_without_retry(stack: GatewayStack) -> None:
    await stack.set_objects([service()], [])
    status, body, headers = await stack.ask_fully("nobody")
    assert status == 404
    assert is_openai_error(body)
    assert (body["error"]["code"], body["error"]["param"]) == ("model_not_found", "model")
    assert headers["x-should-retry"] == "false"
    assert "chat" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_path"),
        ("GET", "/metrics", 404, "unknown_path"),
        ("POST", "/v1/completions/", 404, "unknown_path"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_other_paths_and_methods_return_openai_errors(
    stack: GatewayStack, method: str, path: str, status: int, code: str
) -> None:
    await stack.set_objects([service()], [])
    async with stack.http.request(method, stack.url + path) as answer:
        body = await answer.json()
    assert (answer.status, body["error"]["code"]) == (status, code)
    assert is_openai_error(body)
    assert answer.headers["x-should-retry"] == "false"


async def test_body_above_limit_is_413(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    status, body, headers = await stack.ask_fully(pad="x" * (8 << 20))
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (413, "body_too_large", "false")
    assert is_openai_error(body)
    assert engine.received == []
    status, *_ = await stack.ask_fully(pad="x" * ((8 << 20) - 1000))
    assert status == 200


async def test_large_suspicious_body_is_parsed_in_worker(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    status, *_ = await stack.ask_fully(tools=[{"model": "x"}], pad="x" * 300_000)
    assert status == 200
    twice = b'{"model":"chat","model":"other","pad":"' + b"x" * 300_000 + b'"}'
    async with stack.http.post(f"{stack.url}/v1/completions", data=twice) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (400, "duplicate_key")


async def test_deleted_service_is_removed(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    stack.write_objects([], [])

    async def is_gone() -> bool:
        return (await stack.ask_fully())[0] == 404

    await wait_until(is_gone, "the model is unknown")
    assert (await stack.admin.state()).active == {}


async def test_running_stream_survives_service_deletion(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.pause = asyncio.Event()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    async with stack.ask(stream=True) as answer:
        first = await answer.content.readany()
        stack.write_objects([], [])

        async def is_gone() -> bool:
            return (await stack.admin.state()).active == {}

        await wait_until(is_gone, "Envoy has no such endpoint any more")
        engine.behaviour.pause.set()
        rest = await answer.text()
    assert (first.decode() + rest).endswith("data: [DONE]\n\n")


async def test_engine_errors_pass_through_without_ejection(stack: GatewayStack) -> None:
    engine = await stack.engine()
    engine.behaviour.status = 500
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    for _ in range(10):
        assert (await stack.ask_fully())[0] == 500
    engine.behaviour.status = 200
    assert (await stack.ask_fully())[0] == 200
    assert len(engine.received) == 11


async def test_client_retries_are_not_new_demand(stack: GatewayStack) -> None:
    await stack.set_objects([service()], [])
    body = json.dumps({"model": "chat", "messages": []}).encode()
    for count in ("0", "1", "2"):
        headers = {"x-stainless-retry-count": count}
        async with stack.http.post(f"{stack.url}/v1/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == 503
    unseen = {"x-stainless-retry-count": "1"}
    async with stack.http.post(f"{stack.url}/v1/chat/completions", data=body + b" ", headers=unseen):
        pass
    requests = (await stack.signals())["services"]["team/chat"]["requests"]
    assert (requests["arrived"], requests["retried"]) == (2, 2)


async def test_signals_report_tokens_and_latency(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    body = {"model": "chat", "messages": [{"role": "user", "content": "x" * 4000}], "stream": True}
    for _ in range(3):
        async with stack.http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
            await answer.read()
    await stack.wait_completed(3)
    document = await stack.signals()
    heard = parse_signals(document, document["gateway"], 0.0)
    assert heard.routable_endpoints == {("team", "chat"): 1}
    found = heard.reading.services["team/chat"]
    assert (found.arrived, found.succeeded) == (3, 3)
    assert found.arrived_tokens is not None
    assert 3000 < found.arrived_tokens < 3100
    assert found.ttft_s is not None
    assert histogram.total_count(found.ttft_s) == 3
    assert found.ttft_s.value_sum > 0.0


async def test_metrics_report_served_requests(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service()], [pod(engine.address)])
    await stack.wait_routable(engine)
    async with stack.ask(stream=True) as answer:
        await answer.read()
    await stack.ask_fully("nobody")
    await stack.wait_completed(1)
    async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
        text = await answer.text()
    assert 'plimsoll_gateway_requests_completed_total{outcome="succeeded",service="team/chat"} 1.0' in text
    assert 'plimsoll_gateway_time_to_first_byte_seconds_count{service="team/chat"} 1.0' in text
    assert 'plimsoll_gateway_requests_rejected_total{reason="model_not_found",service=""}' in text
    assert 'plimsoll_gateway_endpoints{role="serve",service="team/chat",state="usable"} 1.0' in text
    assert "plimsoll_gateway_failed_open_total 0.0" in text


async def test_admin_port_reads_no_bodies(stack: GatewayStack) -> None:
    await stack.set_objects([service()], [])
    with pytest.raises((aiohttp.ClientError, AssertionError)):
        async with stack.http.post(f"{stack.picker_url}/signals", data=io.BytesIO(b"x" * 10_000_000)) as answer:
            assert answer.status not in (405, 413)
    async with stack.http.get(f"{stack.picker_url}/healthz") as answer:
        assert answer.status == 200
