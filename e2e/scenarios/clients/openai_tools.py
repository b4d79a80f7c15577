"""The openai SDK for Python: forced tool calls, `auto`, and structured output by a pydantic model. Usage: URL MODEL"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys
import time
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict


class Forecast(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Berlin", "Oslo", "Rome"]
    days: Literal[1, 2, 3]


url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
tool = pydantic_function_tool(Forecast, name="forecast")
ask = {
    "model": model,
    "messages": [{"role": "user", "content": f"What will the weather be? {time.time_ns()}"}],
    "max_tokens": 200,
    "temperature": 0,
}
named = {"type": "function", "function": {"name": "forecast"}}


def forecast(text: str) -> dict:
    return Forecast.model_validate_json(text).model_dump()


def streamed(choice) -> list:
    """The calls of a stream, their arguments put together."""
    calls: dict[int, list] = {}
    stream = client.chat.completions.create(
        **ask, tools=[tool], tool_choice=choice, parallel_tool_calls=False, stream=True
    )
    for part in (p for chunk in stream for c in chunk.choices for p in c.delta.tool_calls or ()):
        call = calls.setdefault(part.index, ["", ""])
        call[0] += part.function.name or ""
        call[1] += part.function.arguments or ""
    return [[name, forecast(text)] for name, text in calls.values()]


def whole(choice) -> list:
    answer = client.chat.completions.create(**ask, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
    return [[c.function.name, forecast(c.function.arguments)] for c in answer.choices[0].message.tool_calls or ()]


auto = client.chat.completions.create(**{**ask, "max_tokens": 12}, tools=[tool])
parsed = client.chat.completions.parse(**ask, response_format=Forecast)
print(json.dumps({
    "named": whole(named),
    "required": whole("required"),
    "streamed": streamed(named),
    "auto": auto.choices[0].finish_reason,
    "parsed": parsed.choices[0].message.parsed.model_dump(),
}))  # fmt: skip
