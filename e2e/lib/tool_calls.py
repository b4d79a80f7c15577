"""Tool calls and structured output, as requests to a service with the tiny model.

Its weights are random. So what must hold is forced by guided decoding, and the schema has no value without a bound: a
model that makes no sense would never end a free text.
"""

from __future__ import annotations

import json
from typing import Final

import httpx

from e2e.lib.client import Target
from e2e.lib.kube import Object
from e2e.lib.load import unique_text

TOOL_ARGS: Final = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CITIES, DAYS = ("Berlin", "Oslo", "Rome"), (1, 2, 3)
SCHEMA: Final[Object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"type": "integer", "enum": list(DAYS)}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME: Final = "forecast"
TOOLS: Final[list[Object]] = [{"type": "function", "function": {"name": NAME, "strict": True, "parameters": SCHEMA}}]
NAMED: Final[Object] = {"type": "function", "function": {"name": NAME}}
RESPONSE_FORMAT: Final[Object] = {
    "type": "json_schema",
    "json_schema": {"name": NAME, "schema": SCHEMA, "strict": True},
}
_TIMEOUT_S = 120.0


def ask(target: Target, seed: str, **fields: object) -> tuple[int, Object, httpx.Headers]:
    """Status, body and headers of a chat completion whose prompt no cache has."""
    messages = [{"role": "user", "content": unique_text(150, seed)}]
    body = {"model": target.model, "messages": messages, "max_tokens": 200, "temperature": 0, **fields}
    response = httpx.post(f"{target.url}/v1/chat/completions", json=body, timeout=_TIMEOUT_S, trust_env=False)
    return response.status_code, response.json(), response.headers


def called_arguments(response: Object) -> list[str]:
    """The arguments of each call of the tool in a response, as they came."""
    calls = response["choices"][0]["message"].get("tool_calls") or []
    return [call["function"]["arguments"] for call in calls if call["function"]["name"] == NAME]


def is_forecast(text: str) -> bool:
    """Whether this is JSON of the schema."""
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and found.keys() == {"city", "days"}
        and found["city"] in CITIES
        and found["days"] in DAYS
    )
