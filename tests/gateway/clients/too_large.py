"""What real SDKs raise for each request, one line of JSON: SDK, exception classes. Usage: URL, requests on stdin."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import litellm
import openai
from langchain_openai import ChatOpenAI

litellm.suppress_debug_info = True
BASE = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "max_retries": 0}


def with_openai(model, messages, options):
    openai.OpenAI(**BASE).chat.completions.create(model=model, messages=messages, **options)


def with_langchain(model, messages, options):
    ChatOpenAI(model=model, **BASE, **options).invoke(messages)


def with_litellm(model, messages, options):
    where = {"api_base": BASE["base_url"], "api_key": "none"}
    litellm.completion(model=f"openai/{model}", messages=messages, num_retries=0, **where, **options)


print("ready", flush=True)
for line in sys.stdin:
    options = json.loads(line)
    model, messages = options.pop("model"), options.pop("messages")
    raised = {}
    for call in (with_openai, with_langchain, with_litellm):
        try:
            call(model, messages, options)
            raised[call.__name__] = ["answered"]
        except (openai.OpenAIError, ValueError) as error:
            raised[call.__name__] = [kind.__name__ for kind in type(error).__mro__]
    print(json.dumps(raised), flush=True)
