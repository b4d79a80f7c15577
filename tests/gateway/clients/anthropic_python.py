"""The anthropic SDK for Python on a service that generates. Usage: URL MODEL; prints one line of JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
ask = {"model": model, "max_tokens": 5, "system": "Be brief", "messages": [{"role": "user", "content": "Hello"}]}
whole = client.messages.create(**ask)
with client.messages.stream(**ask) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
found = {
    "same": whole.content[0].text == text == streamed.content[0].text,
    "model": [whole.model, streamed.model],
    "stop": [whole.stop_reason, streamed.stop_reason],
    "usage": [[one.usage.input_tokens, one.usage.output_tokens] for one in (whole, streamed)],
    "count": client.messages.count_tokens(**{key: ask[key] for key in ("model", "system", "messages")}).input_tokens,
}


def raised(**changes):
    """Class, status and type of what the SDK raises."""
    try:
        client.messages.create(**{**ask, **changes})
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.body["error"]["type"]]
    return ["answered"]


found["unknown"] = raised(model="nobody")
found["long"] = raised(messages=[{"role": "user", "content": "x" * 40_000}])
found["wrong_task"] = raised(model=sys.argv[2].replace("chat", "vectors"))
print(json.dumps(found))
