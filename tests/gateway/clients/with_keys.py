"""The OpenAI SDK with an API key: python with_keys.py URL KEY MODEL. Prints what it meets."""

from __future__ import annotations

import sys

from openai import APIStatusError, OpenAI

url, key, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
try:
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
    print("answered")
except APIStatusError as error:
    print(type(error).__name__, error.code)
