"""What real SDKs raise for a request, one line of JSON: SDK, exception class. Usage: URL, and the request on stdin."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import litellm
import openai
from langchain_openai import ChatOpenAI

litellm.suppress_debug_info = True
BASE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}
options = json.load(sys.stdin)
model, messages = options.pop("model"), options.pop("messages")


def with_openai():
    openai.OpenAI(**BASE).chat.completions.create(model=model, messages=messages, **options)


def with_langchain():
    ChatOpenAI(model=model, **BASE, **options).invoke(messages)


def with_litellm():
    where = {"api_base": BASE["base_url"], "api_key": "none"}
    litellm.completion(model=f"openai/{model}", messages=messages, num_retries=0, **where, **options)


raised = {}
for call in (with_openai, with_langchain, with_litellm):
    try:
        call()
        raised[call.__name__] = ["answered"]
    except (openai.OpenAIError, ValueError) as error:
        raised[call.__name__] = [kind.__name__ for kind in type(error).__mro__]
print(json.dumps(raised))
