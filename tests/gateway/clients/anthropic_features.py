"""The anthropic SDK with what messages have besides text. Usage: URL MODEL; prints one line of JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
question = {"role": "user", "content": "Hello"}
text = {"type": "text", "text": "What?"}
inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 40_000}}
by_url = {"type": "image", "source": {"type": "url", "url": "https://pictures.example/cat.png"}}
tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"data": "rain and wind " * 1000}}
result = {"type": "tool_result", "tool_use_id": "1", "content": [text, inline]}
thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
cases = {
    "pictures": {"messages": [{"role": "user", "content": [text, inline, by_url]}]},
    "tools": {"tools": [tool], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "results": {
        "messages": [question, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
        "tools": [tool],
    },
    "thinking": {
        "messages": [question, {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}, question],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
    "cached": {"system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]},
    "others": {"stop_sequences": ["x"], "metadata": {"user_id": "u"}, "extra_body": {"temperature": 0.5, "top_k": 5}},
}
found = {}
for name, options in cases.items():
    ask = {"model": model, "max_tokens": 5, "messages": [question], **options}
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text, name
    found[name] = [whole.usage.output_tokens, streamed.usage.output_tokens]
beta = client.beta.messages.create(model=model, max_tokens=5, messages=[question], betas=["a-2026-01-01"])
found |= {"beta": beta.usage.output_tokens, "models": [one.id for one in client.models.list()]}
print(json.dumps(found))
