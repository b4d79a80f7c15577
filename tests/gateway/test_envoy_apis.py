"""Every API through real Envoy and the real picker, on engine simulators, by the SDKs that people use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from e2e.lib import sdks
from plimsoll.gateway.api_routes import ROUTES
from tests.engines.test_form_data import KIND, disposition, form
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.recording_relay import CLIENTS
from tests.gateway.simulated_engine import simulated_engine
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

CHAT, VECTORS, SPEECH = "chat", "vectors", "speech"
TASKS = {CHAT: "generate", VECTORS: "embed", SPEECH: "transcribe"}


def of_task(obj: Object, task: str) -> Object:
    obj["spec"]["model"]["task"] = task
    return obj


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(shared: GatewayStack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayStack]:
    """A service of each task, with one engine simulator each."""
    async with contextlib.AsyncExitStack() as running:
        addresses = {
            name: await running.enter_async_context(
                simulated_engine(tmp_path_factory.mktemp(name), f"team/{name}", task)
            )
            for name, task in TASKS.items()
        }
        objects = [of_task(service(name), task) for name, task in TASKS.items()]
        await shared.set_objects(objects, [pod(address, service=name) for name, address in addresses.items()])

        async def routable() -> bool:
            known = [await shared.endpoints(f"team/{name}") for name in TASKS]
            return all(one["routable"] for found in known for one in found.values())

        await wait_until(routable, "all engines are routable")
        yield shared


async def run(script: str, package: str, *argv: str) -> dict[str, Any]:
    """What a client in Python found."""
    sdks.require_package(package)
    return await run_program(sys.executable, str(CLIENTS / script), *argv)


async def run_program(*argv: str) -> dict[str, Any]:
    """What a client found, the last line that it prints."""
    local = {"NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    process = await asyncio.create_subprocess_exec(
        *argv, env={**os.environ, **local}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


async def post(stack: GatewayStack, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    """Status, body and headers of an answer."""
    sent = {"content-type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with stack.http.post(f"{stack.url}{path}", data=data, headers=sent) as answer:
        return answer.status, await answer.json(), answer.headers


async def test_anthropic_sdk_streams_counts_and_raises_its_errors(served: GatewayStack) -> None:
    found = await run("anthropic_python.py", "anthropic", served.url, CHAT)
    assert found["same"]
    assert found["model"] == [CHAT, CHAT]
    assert found["stop"] == ["max_tokens", "max_tokens"]
    assert found["usage"][0] == found["usage"][1] == [found["count"], 5]
    assert found["unknown"] == ["NotFoundError", 404, "not_found_error"]
    assert found["long"] == ["BadRequestError", 400, "invalid_request_error"]
    assert found["wrong_task"] == ["NotFoundError", 404, "not_found_error"]


async def test_openai_sdk_features_of_chats_and_sound(served: GatewayStack) -> None:
    found = await run("openai_features.py", "openai", served.url, CHAT, SPEECH)
    assert found.pop("choices") == [3, 15, 15]
    kinds = ("pictures", "tools", "results", "schema", "reasoning", "logprobs", "developer", "metadata")
    assert [found[kind] for kind in kinds] == [[1, 5, 5]] * len(kinds)
    assert found["sound"] == found["streamed"] == found["translated"] != ""
    assert found["kinds"] == ["transcription.chunk"]
    assert found["model"] == [CHAT, f"team/{CHAT}"]
    assert found["sound of chat"] == [404, "route_not_served"]
    assert found["no model"] == [404, "model_not_found"]
    assert (found["too many"], found["too large"]) == ([400, "request_too_large"], [413, "body_too_large"])
    assert found["too long"][0] == 400
    assert found["no route"] == [[404, "unknown_path"]] * 2


async def test_anthropic_sdk_features_of_messages(served: GatewayStack) -> None:
    found = await run("anthropic_features.py", "anthropic", served.url, CHAT)
    assert (found.pop("beta"), sorted(found.pop("models"))) == (5, sorted(TASKS))
    assert sorted(found) == ["cached", "others", "pictures", "results", "thinking", "tools"]
    assert list(found.values()) == [[5, 5]] * len(found)


async def test_openai_sdk_responses_and_embeddings(served: GatewayStack) -> None:
    found = await run("openai_apis.py", "openai", served.url, CHAT, VECTORS)
    assert found["same"]
    assert (found["model"], found["usage"][1], found["last"]) == (CHAT, 16, "response.completed")
    assert found["stored"] == "incomplete", "store=True is accepted, and nothing is stored"
    assert found["embeddings"][:3] == [1, 2, VECTORS]
    assert found["equal"]
    assert found["previous"] == [400, "unsupported_field", "previous_response_id"]
    assert found["background"] == [400, "unsupported_field", "background"]
    assert found["retrieve"] == found["delete"] == [404, "response_not_stored", None]
    assert found["wrong_task"] == found["chat_of_embedder"] == [404, "route_not_served", None]


async def test_langchain_and_litellm_use_each_api(served: GatewayStack) -> None:
    sdks.require_package("litellm")
    found = await run("langchain_and_litellm.py", "langchain_openai", served.url, CHAT, VECTORS, SPEECH)
    langchain, litellm = found["langchain"], found["litellm"]
    assert langchain == {"same": True, "tokens": 5, "tools": 5, "vectors": [2, 8], "unknown": "NotFoundError"}
    assert litellm["chat"] == [True, 5]
    assert litellm["vectors"] == 2
    assert litellm["ranked"] == [0, 1, 2]
    assert litellm["sound"]
    assert (litellm["response"], litellm["message"]) == (16, 5)
    assert litellm["unknown"] == "NotFoundError"


async def test_node_sdk_uses_each_api(served: GatewayStack) -> None:
    script = shutil.copy2(CLIENTS / "openai_node_apis.mjs", sdks.node_folder())  # Node looks for packages beside it
    found = await run_program("node", str(script), served.url, CHAT, VECTORS, SPEECH)
    assert found["same"], "the stream and the whole response differ"
    assert found["choices"] == 2
    assert (found["response"], found["deltas"], found["vectors"]) == (16, True, [2, 8])
    assert found["sound"] == found["translated"] == found["streamed"] != ""
    assert (found["models"], found["model"]) == (sorted(TASKS), f"team/{CHAT}")
    assert found["unknown"] == [404, "model_not_found"]
    assert found["stored"] == [404, "response_not_stored"]


async def test_cohere_sdk_reranks(served: GatewayStack) -> None:
    assert await run("cohere_python.py", "cohere", served.url, VECTORS) == {
        "results": [0, 1, 2],
        "sorted": True,
        "unknown": 404,
    }


@pytest.mark.parametrize("path", ["/tokenize", "/v1/score", "/score", "/rerank", "/v1/rerank", "/v1/embeddings"])
async def test_pooling_routes_answer_by_both_names(served: GatewayStack, path: str) -> None:
    body = {"input": "a", "query": "a", "documents": ["b"], "text_1": "a", "text_2": "b", "prompt": "abc"}
    for name in (VECTORS, f"team/{VECTORS}"):
        status, answer, _ = await post(served, path, {"model": name, **body})
        assert status == 200, answer
        assert answer.get("model", name) == name


async def test_form_with_sound_reaches_its_engine(served: GatewayStack) -> None:
    body = form(
        (disposition('name="model"'), SPEECH.encode()), (disposition('name="file"; filename="a.wav"'), bytes(50_000))
    )
    status, answer, _ = await post(served, "/v1/audio/transcriptions", body, content_type=KIND)
    assert status == 200, answer
    assert answer["text"]
    status, answer, _ = await post(served, "/v1/audio/translations", b"no form", content_type=KIND)
    assert (status, answer["error"]["code"]) == (400, "invalid_form")


async def test_token_routes_leave_no_request_in_flight(served: GatewayStack) -> None:
    for _ in range(3):
        status, answer, _ = await post(served, "/tokenize", {"model": CHAT, "prompt": "Hello you"})
        assert (status, answer["count"]) == (200, 3)
        status, text, _ = await post(served, "/detokenize", {"model": CHAT, "tokens": answer["tokens"]})
        assert (status, text) == (200, {"prompt": "Hello you"})

    async def idle() -> bool:
        return all(one["inflight"] == 0 for one in (await served.endpoints(f"team/{CHAT}")).values())

    await wait_until(idle, "nothing is in flight")


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_route_rejects_other_methods_and_compressed_bodies(served: GatewayStack, path: str) -> None:
    async with served.http.get(f"{served.url}{path}") as answer:
        found = await answer.json()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    status, compressed, _ = await post(served, path, b"", content_encoding="gzip")
    assert status == 415
    is_anthropic = path.startswith("/v1/messages")
    for body in (found, compressed):
        assert (body.get("type") == "error") == is_anthropic
        assert ("code" in body["error"]) != is_anthropic


async def test_picker_503_travels_in_the_shape_of_its_route(lone: GatewayStack) -> None:
    await lone.start([service_with_slo(CHAT, {"whenFull": "Shed"})])
    body = {"model": CHAT, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    status, answer, headers = await post(lone, "/v1/messages?beta=true", body, anthropic_version="2023-06-01")
    assert (status, answer["type"], answer["error"]["type"]) == (503, "error", "overloaded_error")
    assert headers["x-plimsoll-reason"] == "model_starting"
    status, answer, _ = await post(lone, "/v1/responses", {"model": CHAT, "input": "a"})
    assert (status, answer["error"]["code"]) == (503, "model_starting")


async def test_anthropic_headers_reach_the_engine(lone: GatewayStack) -> None:
    engine = await lone.engine()
    await lone.start([service(CHAT)], [pod(engine.address, service=CHAT)])
    await lone.wait_routable(engine)
    body = {"model": CHAT, "max_tokens": 5, "messages": []}
    status, _, _ = await post(lone, "/v1/messages", body, anthropic_version="2023-06-01", anthropic_beta="b")
    assert status == 200
    assert (engine.header("anthropic-version"), engine.header("anthropic-beta")) == ("2023-06-01", "b")
