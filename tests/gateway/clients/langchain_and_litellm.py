"""LangChain and LiteLLM beyond a chat of text. Usage: URL CHAT-MODEL EMBEDDING-MODEL SPEECH-MODEL; prints JSON."""

# mypy: ignore-errors

from __future__ import annotations

import json
import sys

import litellm
import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

litellm.suppress_debug_info = True
url, chat, vectors, speech = sys.argv[1:]
base = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
where = {"api_base": f"{url}/v1", "api_key": "none"}
messages = [{"role": "user", "content": "Hello"}]
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def raised(call, *args, **options):
    """The class of openai's SDK in what the library raises."""
    try:
        call(*args, **options)
    except openai.OpenAIError as error:
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("openai"))
    return "answered"


model = ChatOpenAI(model=chat, max_tokens=5, **base)
whole = model.invoke("Hello")
embeddings = OpenAIEmbeddings(model=vectors, check_embedding_ctx_length=False, **base).embed_documents(["a", "b"])
by_langchain = {
    "same": "".join(str(chunk.content) for chunk in model.stream("Hello")) == whole.content,
    "tokens": whole.usage_metadata["output_tokens"],
    "tools": model.bind_tools([tool]).invoke("Hello").usage_metadata["output_tokens"],
    "vectors": [len(embeddings), len(embeddings[0])],
    "unknown": raised(ChatOpenAI(model="nobody", **base).invoke, "Hello"),
}
ask = {"model": f"openai/{chat}", "messages": messages, "max_tokens": 5, **where}
whole = litellm.completion(**ask, tools=[tool])
text = "".join(one.choices[0].delta.content or "" for one in litellm.completion(**ask, stream=True) if one.choices)
ranked = litellm.rerank(
    model=f"hosted_vllm/{vectors}", query="What?", documents=["one", "two", "three"], api_base=url, api_key="none"
)
by_litellm = {
    "chat": [whole.choices[0].message.content == text, whole.usage.completion_tokens],
    "vectors": len(litellm.embedding(model=f"openai/{vectors}", input=["a", "b"], **where).data),
    "ranked": sorted(one["index"] for one in ranked.results),
    "sound": litellm.transcription(model=f"openai/{speech}", file=("a.wav", bytes(60_000)), **where).text,
    "response": litellm.responses(
        model=f"openai/{chat}", input="Hello", max_output_tokens=16, **where
    ).usage.output_tokens,
    "message": litellm.completion(
        model=f"anthropic/{chat}", messages=messages, max_tokens=5, api_base=url, api_key="none"
    ).usage.completion_tokens,
    "unknown": raised(litellm.completion, **{**ask, "model": "openai/nobody"}),
}
print(json.dumps({"langchain": by_langchain, "litellm": by_litellm}))
