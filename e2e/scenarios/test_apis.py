"""The APIs beyond chat: messages and responses of real vLLM, embeddings and scores of an engine simulator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from e2e.lib import remote_prefills
from e2e.lib.kube import Cluster
from e2e.lib.load import unique_text
from e2e.lib.prober import Prober
from e2e.lib.service import Service, make_manifest
from e2e.lib.simulated_fleet import engine_args

TIMEOUT_S = 120.0
WORDS = 160  # more than a block of tokens, so that prefill engines are asked
TOKENS = 12
LARGE_BYTES = 600 << 10  # more than the picker parses itself


def _post(service: Service, path: str, **fields: Any) -> httpx.Response:
    body = {"model": service.name, **fields}
    return httpx.post(f"{service.url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = response.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def _conversation(seed: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": unique_text(WORDS, seed)}]


@pytest.mark.parametrize("name", ["pd", "solo"])
def test_message_stream_equals_full_message(name: str, shared: dict[str, Service]) -> None:
    service, messages = shared[name], _conversation(f"message {time.time_ns()}")
    ask = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "system": "Say something."}
    whole = _post(service, "/v1/messages", **ask)
    assert whole.status_code == 200, whole.text
    stream = _post(service, "/v1/messages", **ask, stream=True)
    events = _events(stream)
    assert events[-1]["type"] == "message_stop", stream.text
    text = "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")
    assert text == "".join(block.get("text", "") for block in whole.json()["content"])
    assert events[0]["message"]["model"] == whole.json()["model"] == service.name
    count = _post(service, "/v1/messages/count_tokens", messages=messages, system="Say something.")
    assert count.json()["input_tokens"] == whole.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("name", ["pd", "solo"])
def test_response_stream_equals_full_response(name: str, shared: dict[str, Service]) -> None:
    service = shared[name]
    ask = {"input": unique_text(WORDS, f"response {time.time_ns()}"), "max_output_tokens": TOKENS, "temperature": 0}
    whole = _post(service, "/v1/responses", **ask)
    assert whole.status_code == 200, whole.text
    events = _events(_post(service, "/v1/responses", **ask, stream=True))
    assert events[-1]["type"] == "response.completed"
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    parts = [part for item in whole.json()["output"] if item["type"] == "message" for part in item["content"]]
    assert text == "".join(part["text"] for part in parts)
    assert whole.json()["model"] == service.name


def test_large_body_is_answered(solo: Service) -> None:
    messages = _conversation(f"large {time.time_ns()}")
    answer = _post(solo, "/v1/chat/completions", messages=messages, max_tokens=1, metadata={"note": "a" * LARGE_BYTES})
    assert answer.status_code == 200, answer.text


def test_messages_and_responses_are_prefilled_remotely(pd: Service, prober: Prober) -> None:
    def run() -> dict[str, int]:
        with prober.paused():
            before, seed = pd.metrics("decode"), time.time_ns()
            answers = [
                _post(pd, "/v1/messages", messages=_conversation(f"remote {seed}"), max_tokens=TOKENS),
                _post(pd, "/v1/responses", input=unique_text(WORDS, f"far {seed}"), max_output_tokens=TOKENS),
            ]
            assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
            return remote_prefills.outcomes(pd.metrics("decode") - before)

    assert remote_prefills.first_in_time(run, dict) == {"remote": 2}


def test_errors_and_routes_of_a_generating_service(solo: Service) -> None:
    unknown_model = {"model": "nobody", "messages": [], "max_tokens": 1}
    unknown = httpx.post(f"{solo.url}/v1/messages", json=unknown_model, timeout=TIMEOUT_S, trust_env=False)
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    invalid = _post(solo, "/v1/messages", messages=[{"role": "nobody", "content": "a"}], max_tokens=1)
    assert (invalid.status_code, invalid.json()["type"]) == (400, "error")
    vectors = _post(solo, "/v1/embeddings", input="a")
    assert (vectors.status_code, vectors.json()["error"]["code"]) == (404, "route_not_served")
    tokens = _post(solo, "/tokenize", prompt="Hello you").json()
    back = _post(solo, "/detokenize", tokens=tokens["tokens"]).json()
    assert "Hello you" in back["prompt"]


def test_embedding_service_is_ready_and_serves_its_routes(service: Callable[[str], Service], cluster: Cluster) -> None:
    vectors = service("vectors")
    engine = {"runtime": "simulated", "args": engine_args()}
    model = {"uri": "hf://example/sim-8b", "task": "embed"}
    manifest = make_manifest("vectors", {"serve": {"gpus": 0}}, model=model, engine=engine)
    cluster.apply(manifest, namespace=vectors.namespace)
    vectors.wait_ready()
    found = _post(vectors, "/v1/embeddings", input=["a", "b"])
    assert found.status_code == 200, found.text
    assert (len(found.json()["data"]), found.json()["model"]) == (2, vectors.name)
    ranked = _post(vectors, "/v1/rerank", query="a", documents=["b", "c", "d"])
    assert sorted(result["index"] for result in ranked.json()["results"]) == [0, 1, 2]
    chat = _post(vectors, "/v1/chat/completions", messages=_conversation("no"))
    assert (chat.status_code, chat.json()["error"]["code"]) == (404, "route_not_served")
    assert "/v1/embeddings" in chat.json()["error"]["message"]
