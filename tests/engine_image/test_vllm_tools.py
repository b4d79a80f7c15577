"""Tool calls and structured output of a real prefill and decode engine, with the arguments of the demo's manifest.

The weights are random: what must hold does so by guided decoding, whatever the model would say.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from launcher.contract import IMAGE_ROOT
from tests.engine_image.test_vllm import Pair, engine, model, pytestmark, unique_prompt  # noqa: F401

MANIFEST = IMAGE_ROOT.parent / "crds" / "examples" / "prefill-decode.yaml"
PATH = "/v1/chat/completions"
PLACES, DAYS = ["Berlin", "Oslo", "Rome"], [1, 2, 3]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": PLACES}, "days": {"type": "integer", "enum": DAYS}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "forecast", "strict": True, "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "forecast"}}


@pytest.fixture(scope="module")
def tools(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:  # noqa: F811
    """Both engines of the demo's service, ready."""
    folder = tmp_path_factory.mktemp("tools")
    args = yaml.safe_load(MANIFEST.read_text())["spec"]["engine"]["args"]
    with engine(model, "prefill", folder, args) as prefill, engine(model, "decode", folder, args) as decode:
        for one in (prefill, decode):
            one.ready.wait()
            assert one.process.poll() is None, "".join(one.log[-40:])
        yield Pair(prefill, decode)


def _chat_request(seed: str, **more: Any) -> dict[str, Any]:
    """A chat request without a known prefix."""
    messages = [{"role": "user", "content": unique_prompt(seed)}]
    return {"model": "tiny", "messages": messages, "max_tokens": 200, "temperature": 0, **more}


def _is_valid(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"city", "days"} and found["city"] in PLACES and found["days"] in DAYS


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_vllm_forced_tool_call_is_parsed(tools: Pair, choice: Any) -> None:
    before = tools.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote")
    headers = {"x-plimsoll-prefill": f"127.0.0.1:{tools.prefill.api}"}
    requested = _chat_request(f"forced {choice}", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    status, got = tools.decode.post(requested, headers, PATH)
    print(got)
    assert status == 200
    assert tools.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote") == before + 1
    calls = got["choices"][0]["message"]["tool_calls"]
    assert calls
    assert {call["function"]["name"] for call in calls} == {"forecast"}
    assert all(_is_valid(call["function"]["arguments"]) for call in calls)


def test_vllm_streamed_tool_call_is_parsed(tools: Pair) -> None:
    with tools.decode.stream(_chat_request("stream", tools=TOOLS, tool_choice=NAMED), PATH) as stream:
        lines = [line[6:] for line in stream.read().decode().splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    assert {call["name"] for call in calls if call.get("name")} == {"forecast"}
    assert _is_valid("".join(call.get("arguments") or "" for call in calls))


def test_vllm_tool_choice_auto_is_accepted(tools: Pair) -> None:
    headers = {"x-plimsoll-prefill": f"127.0.0.1:{tools.prefill.api}"}
    status, got = tools.decode.post(_chat_request("auto", tools=TOOLS, max_tokens=16), headers, PATH)
    assert (status, got["choices"][0]["finish_reason"]) == (200, "length")


def test_vllm_tool_result_continues_chat(tools: Pair) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "forecast", "arguments": '{"city": "Oslo", "days": 1}'}}
    chat = _chat_request("result", tools=TOOLS, max_tokens=16)
    chat["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    status, got = tools.decode.post(chat, path=PATH)
    assert status == 200, got


def test_vllm_json_schema_response_is_valid(tools: Pair) -> None:
    before = tools.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote")
    expected = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": SCHEMA, "strict": True}}
    headers = {"x-plimsoll-prefill": f"127.0.0.1:{tools.prefill.api}"}
    status, got = tools.decode.post(_chat_request("schema", response_format=expected), headers, PATH)
    print(got)
    assert (status, got["choices"][0]["finish_reason"]) == (200, "stop")
    assert _is_valid(got["choices"][0]["message"]["content"])
    assert tools.decode.metric("plimsoll_engine_remote_prefills_total", outcome="remote") == before + 1
