"""LiteLLM as it is told to ask on stdin, see openai_python.py. Usage: URL completion|router

`completion` is litellm.completion with two retries, `router` the Router that its proxy is made of, with its defaults.
"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import litellm
from openai import OpenAIError

litellm.suppress_debug_info = True
url, way = sys.argv[1:]
routers = {}


def call(model: str, **options):
    """The request by the way that was chosen."""
    where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    if way == "completion":
        return litellm.completion(**where, **options, num_retries=2)
    return routers[model].completion(model=model, **options)


def ask(model: str, words: str, stream: bool) -> str:
    """One user's request, from its first attempt to its last."""
    try:
        found = call(model, messages=[{"role": "user", "content": words}], stream=stream)
        if stream:
            list(found)
    except (OpenAIError, ValueError) as error:
        status = getattr(error, "status_code", None)
        return f"{status} {type(error).__name__}"
    return "succeeded"


print("ready", flush=True)
with ThreadPoolExecutor(32) as threads:
    for line in sys.stdin:
        task = json.loads(line)
        model = task["model"]
        where = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
        routers.setdefault(model, litellm.Router([{"model_name": model, "litellm_params": where}]))
        tasks = [threads.submit(ask, model, words, task["stream"]) for words in task["words"]]
        print(json.dumps([one.result() for one in tasks]), flush=True)
