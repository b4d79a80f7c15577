"""The openai SDK with what chats have besides text, and sound. Usage: URL CHAT-MODEL SPEECH-MODEL; prints JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import openai

url, chat, speech = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
question = {"role": "user", "content": "Hello"}
picture = {"type": "image_url", "image_url": {"url": "https://pictures.example/cat.png", "detail": "low"}}
inline = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 40_000}"}}
parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": parameters, "strict": True}}
calls = [{"id": one, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for one in ("a", "b")]
results = [{"role": "tool", "tool_call_id": one, "content": "rain"} for one in ("a", "b")]
cases = {
    "pictures": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, picture, inline]}]},
    "tools": {"tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True},
    "results": {
        "messages": [question, {"role": "assistant", "content": None, "tool_calls": calls}, *results],
        "tools": [tool],
    },
    "schema": {"response_format": schema},
    "reasoning": {
        "messages": [question, {"role": "assistant", "content": "a", "reasoning_content": "b"}, question],
        "reasoning_effort": "low",
    },
    "logprobs": {"logprobs": True, "top_logprobs": 5},
    "choices": {"n": 3},
    "developer": {"messages": [{"role": "developer", "content": "Be brief"}, question]},
    "metadata": {"metadata": {"a": "b"}, "user": "u", "seed": 1, "service_tier": "auto", "logit_bias": {"5": 1}},
}


def ask(**options):
    """A chat of at most five tokens."""
    return client.chat.completions.create(model=chat, max_tokens=5, **{"messages": [question], **options})


def raised(call, **options):
    """Status and code of what the SDK raises."""
    try:
        call(**options)
    except openai.APIStatusError as error:
        return [error.status_code, error.code]
    return ["answered"]


found = {}
for name, options in cases.items():
    whole = ask(**options)
    chunks = list(ask(**options, stream=True, stream_options={"include_usage": True}))
    texts = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert [texts[index] for index in sorted(texts)] == [one.message.content for one in whole.choices], name
    found[name] = [len(whole.choices), whole.usage.completion_tokens, chunks[-1].usage.completion_tokens]

sound = {"model": speech, "file": ("a.wav", bytes(900_000))}
events = [event.to_dict() for event in client.audio.transcriptions.create(**sound, stream=True)]
found |= {
    "sound": client.audio.transcriptions.create(**sound).text,
    "streamed": "".join(event["choices"][0]["delta"]["content"] for event in events),
    "kinds": sorted({event["object"] for event in events}),
    "translated": client.audio.translations.create(**sound).text,
    "sound of chat": raised(client.audio.transcriptions.create, **{**sound, "model": chat}),
    "model": [client.models.retrieve(name).id for name in (chat, f"team/{chat}")],
    "no model": raised(client.models.retrieve, model="nobody"),
    "too many": raised(ask, n=10_000),
    "too long": raised(ask, messages=[{"role": "system", "content": "word " * 20_000}, question]),
    "too large": raised(ask, messages=[{"role": "system", "content": "word " * 2_000_000}, question]),
    "no route": [raised(client.files.list), raised(client.responses.input_tokens.count, model=chat, input="a")],
}
print(json.dumps(found))
