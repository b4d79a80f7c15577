"""The openai SDK for Python beyond chat. Usage: URL CHAT-MODEL EMBEDDING-MODEL; prints one line of JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import openai

url, chat, vectors = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
ask = {"model": chat, "input": "Hello", "instructions": "Be brief", "max_output_tokens": 16}
whole = client.responses.create(**ask)
with client.responses.stream(**ask) as stream:
    kinds = [event.type for event in stream]
deltas = client.responses.create(**ask, stream=True)
text = "".join(event.delta for event in deltas if event.type == "response.output_text.delta")
one = client.embeddings.create(model=vectors, input="Hello")
many = client.embeddings.create(model=vectors, input=["Hello", "you"], encoding_format="float")


def raised(call, **options):
    """Status, code and field of what the SDK raises."""
    try:
        call(**options)
    except openai.APIStatusError as error:
        return [error.status_code, error.code, error.param]
    return ["answered"]


print(
    json.dumps(
        {
            "same": whole.output_text == text,
            "model": whole.model,
            "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
            "last": kinds[-1],
            "stored": client.responses.create(**ask, store=True).status,
            "embeddings": [len(one.data), len(many.data), one.model, one.usage.prompt_tokens],
            "equal": one.data[0].embedding == many.data[0].embedding,
            "previous": raised(client.responses.create, **ask, previous_response_id="resp_1"),
            "background": raised(client.responses.create, **ask, background=True),
            "retrieve": raised(client.responses.retrieve, response_id="resp_1"),
            "delete": raised(client.responses.delete, response_id="resp_1"),
            "wrong_task": raised(client.embeddings.create, model=chat, input="a"),
            "chat_of_embedder": raised(client.chat.completions.create, model=vectors, messages=[]),
        }
    )
)
