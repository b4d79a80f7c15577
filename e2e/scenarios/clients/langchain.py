"""LangChain's ChatOpenAI: a whole answer and a stream. Usage: URL MODEL"""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

sys.path.pop(0)  # this folder: the script bears the library's name

from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key="none", model=model, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
)
whole = chat.invoke("Say something.")
streamed = "".join(str(chunk.content) for chunk in chat.stream("Say something."))
print(json.dumps({
    "same": streamed == whole.content,
    "tokens": [whole.usage_metadata["output_tokens"]] if whole.usage_metadata else [],
    "finish": whole.response_metadata["finish_reason"],
}))  # fmt: skip
