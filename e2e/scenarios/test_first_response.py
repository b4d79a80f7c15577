"""a. A manifest becomes a served model: Ready, a streamed answer through the gateway, the engine's own words."""

from __future__ import annotations

import httpx

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.service import Service

QUESTION = Prompt("What does the line on the hull of a ship show?", max_tokens=32)


def test_gateway_stream_equals_engine_response(solo: Service) -> None:
    ledger = Load(solo.target, OpenLoop([Arrival(0, QUESTION)])).run()
    assert not ledger.failures, ledger.explain()
    [answer] = ledger.records
    (engine,) = solo.ready_pods("serve")
    direct = solo.ask_engine(
        engine, QUESTION.path, {**QUESTION.body(solo.name), "stream": False, "stream_options": None}
    )
    print(f"{answer.events} events, {answer.output_tokens} tokens, TTFT {answer.ttft_s:.3f} s: {answer.text[:60]!r}")
    assert answer.events > 2, "the answer did not come as a stream"
    assert answer.text == direct["choices"][0]["message"]["content"]


def test_status_and_models_endpoint_list_model_names(solo: Service) -> None:
    listed = [m["id"] for m in httpx.get(f"{stack.GATEWAY_URL}/v1/models", timeout=60, trust_env=False).json()["data"]]
    status = solo.status()
    print(f"models {listed}; status {status['modelNames']} {status['tiers']['serve']['summary']} at {status['url']}")
    assert status["modelNames"] == [solo.name, solo.key]
    assert solo.name in listed
    assert status["tiers"]["serve"]["summary"] == "1/1"


def test_long_model_name_is_served(solo: Service) -> None:
    body = {**QUESTION.body(solo.key), "stream": False, "stream_options": None}
    answer = httpx.post(
        solo.url + QUESTION.path, json=body, headers={"x-request-id": "e2e-long-name"}, timeout=60, trust_env=False
    )
    print(f"{answer.status_code} {answer.json().get('usage')} x-request-id {answer.headers.get('x-request-id')}")
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == QUESTION.max_tokens
    assert answer.headers["x-request-id"] == "e2e-long-name"


def test_unknown_model_returns_openai_404(solo: Service) -> None:
    answer = httpx.post(solo.url + QUESTION.path, json=QUESTION.body("nobody"), timeout=60, trust_env=False)
    print(f"{answer.status_code} {answer.text}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert answer.headers["x-should-retry"] == "false"
