"""The openai SDK for Python: a stream, a whole answer, the model list, a refusal. Usage: URL MODEL"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

from openai import NotFoundError, OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
ask = {"model": model, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 12, "temperature": 0}
extra = {"ignore_eos": True}
whole = client.chat.completions.create(**ask, extra_body=extra)
stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}, extra_body=extra)
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
plain = client.completions.create(model=model, prompt="Say", max_tokens=5, extra_body=extra)
try:
    client.chat.completions.create(**{**ask, "model": "nobody"})
    refusal = "none"
except NotFoundError as error:
    refusal = str(error.code)
print(json.dumps({
    "same": text == whole.choices[0].message.content,
    "tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens, plain.usage.completion_tokens],
    "finish": whole.choices[0].finish_reason,
    "models": [m.id for m in client.models.list()],
    "refusal": refusal,
}))  # fmt: skip
