"""The OpenAI SDK with API keys: python with_keys.py URL MODEL KEY... Prints what it meets, one line a key."""

from __future__ import annotations

import sys

from openai import APIStatusError, OpenAI

url, model, *keys = sys.argv[1:]
for key in keys:
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        print("answered")
    except APIStatusError as error:
        print(type(error).__name__, error.code)
