"""The openai SDK for Python with its default retries, as often as it is told to ask on stdin. Usage: URL

It says "ready". Then each line in is `{"model", "words", "stream"}`, with one user for each of the words, all at once,
and each line out what each user got: "succeeded" or what the SDK raised in the end.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import APIConnectionError, APIError, APIStatusError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")


def ask(model: str, words: str, stream: bool) -> str:
    """One user's request, from its first attempt to its last."""
    try:
        found = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": words}], stream=stream
        )
        if stream:
            list(found)
    except APIStatusError as error:
        return f"{error.status_code} {error.code}"
    except (APIConnectionError, APIError) as error:
        return type(error).__name__
    return "succeeded"


print("ready", flush=True)
with ThreadPoolExecutor(32) as threads:
    for line in sys.stdin:
        task = json.loads(line)
        tasks = [threads.submit(ask, task["model"], words, task["stream"]) for words in task["words"]]
        print(json.dumps([one.result() for one in tasks]), flush=True)
