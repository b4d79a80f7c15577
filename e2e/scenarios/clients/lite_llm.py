"""LiteLLM's completion: a whole answer, a stream, a refusal. Usage: URL MODEL"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import litellm

url, model = sys.argv[1:]
ask = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0,
       "messages": [{"role": "user", "content": "Say something."}], "extra_body": {"ignore_eos": True}}  # fmt: skip
whole = litellm.completion(**ask)
text = "".join(c.choices[0].delta.content or "" for c in litellm.completion(**ask, stream=True) if c.choices)
try:
    litellm.completion(**{**ask, "model": "openai/nobody"})
    refusal = "none"
except litellm.NotFoundError:
    refusal = "model_not_found"
print(json.dumps({
    "same": text == whole.choices[0].message.content,
    "tokens": [whole.usage.completion_tokens],
    "finish": whole.choices[0].finish_reason,
    "refusal": refusal,
}))  # fmt: skip
