"""Requests as vLLM's API reads them, and its refusals in its words.

Problem: clients and gateways match on words like "maximum context length" and on which field is named.
Idea: what this engine cannot use (sampling, tools, log-probabilities) is accepted and means nothing; what decides
lengths and routes is checked as vLLM checks it. A refusal is an exception that carries vLLM's error object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from simulated import words

DEFAULT_MAX_TOKENS: Final = 16  # of a completion; a chat goes on to the context's end
_ROLES: Final = {"system": b"<|s>", "user": b"<|u>", "assistant": b"<|a>", "tool": b"<|t>"}
_OTHER_ROLE: Final = b"<|o>"


class Refused(Exception):
    """An answer that is an error: HTTP status, and vLLM's error object."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad(message: str, param: str | None = None, value: int | None = None) -> Refused:
    """The request makes no sense; vLLM's own words for a field and its value end the message."""
    if param is not None:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return Refused(400, message, "BadRequestError", param)


def internal(message: str) -> Refused:
    """The engine failed."""
    return Refused(500, message, "InternalServerError")


@dataclass(frozen=True)
class Asked:
    """A request that makes sense. `prompts` are token bytes; each is answered `n` times with `max_tokens` tokens."""

    chat: bool
    model: str
    prompts: tuple[bytes, ...]
    n: int
    max_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    salt: str
    request_id: str
    transfer: Mapping[str, Any] | None


def read(body: bytes, chat: bool, names: tuple[str, ...], max_model_len: int) -> Asked:
    """Reads a request's body; raises Refused."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _invalid("json_invalid", f"JSON decode error: {error}") from None
    if not isinstance(document, dict):
        raise _invalid("model_attributes_type", "Input should be a valid dictionary or object to extract fields from")
    model = document.get("model") or names[0]
    if model not in names:
        raise Refused(
            404, f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}.", "NotFoundError", "model"
        )
    prompts = (_chat(document),) if chat else _prompts(document)
    if any(not prompt for prompt in prompts):
        raise bad("The decoder prompt cannot be empty")
    stream = bool(document.get("stream"))
    options = document.get("stream_options") or {}
    if options and not stream:
        raise bad("Stream options can only be defined when `stream=True`.", "stream_options")
    transfer = document.get("kv_transfer_params")
    return Asked(
        chat=chat,
        model=names[0],  # as vLLM: its first name, whichever it was asked by
        prompts=prompts,
        n=_n(document),
        max_tokens=_max_tokens(document, chat, max(map(words.count, prompts)), max_model_len),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        salt=str(document.get("cache_salt") or ""),
        request_id=str(document.get("request_id") or ""),
        transfer=transfer if isinstance(transfer, dict) else None,
    )


def _invalid(kind: str, message: str, field: str = "body") -> Refused:
    """A refusal by the web framework, before vLLM's own code."""
    return Refused(400, str([{"type": kind, "loc": ("body", field), "msg": message}]), "Bad Request")


def _integer(document: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = document.get(key, default)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _invalid("int_type", "Input should be a valid integer", key)


def _n(document: Mapping[str, Any]) -> int:
    n = _integer(document, "n", 1)
    if n is not None and n < 1:
        raise bad(f"n must be at least 1, got {n}.")
    return n or 1


def _max_tokens(document: Mapping[str, Any], chat: bool, prompt: int, context: int) -> int:
    """Tokens to make: what was asked for, as far as prompt and answer fit into the context together."""
    asked = _integer(document, "max_tokens", None if chat else DEFAULT_MAX_TOKENS)
    if chat:
        asked = _integer(document, "max_completion_tokens", None) or asked
    if asked is not None and asked > context:
        words = (
            f"max_tokens={asked} cannot be greater than max_model_len={context}. Please request fewer output tokens."
        )
        raise bad(words, "max_tokens", asked)
    if prompt > context:
        raise bad(
            f"This model's maximum context length is {context} tokens. However, your prompt contains "
            f"{'at least ' * (prompt == context + 1)}{prompt} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt,
        )
    room = context - prompt
    tokens = room if asked is None else min(asked, room)
    if tokens < 1:
        raise bad(f"max_tokens must be at least 1, got {tokens}.", "max_tokens", tokens)
    least = _integer(document, "min_tokens", 0) or 0
    if least < 0:
        raise bad(f"min_tokens must be greater than or equal to 0, got {least}.")
    if least > tokens:
        raise bad(f"min_tokens must be less than or equal to max_tokens={tokens}, got {least}.")
    return tokens


def _prompts(document: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The prompt of a completion: a text, token ids, or a list of either."""
    prompt = document.get("prompt")
    if isinstance(prompt, str) or _ids(prompt):
        return (_tokens(prompt),)
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _ids(one) for one in prompt):
        return tuple(map(_tokens, prompt))
    if prompt == []:
        raise bad("You must pass at least one prompt")
    if prompt is None:
        raise bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    raise _invalid("string_type", "Input should be a valid string, or lists of strings or token ids", "prompt")


def _ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def _tokens(prompt: Any) -> bytes:
    return words.encode(prompt) if isinstance(prompt, str) else words.from_ids(prompt)


def _chat(document: Mapping[str, Any]) -> bytes:
    """A conversation as one prompt: a token for each role, the words, a token for the role that is to speak."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise _invalid("missing", "Field required", "messages")
    parts = []
    for message in messages:
        said = _said(message.get("content"))
        parts += [_ROLES.get(str(message.get("role")), _OTHER_ROLE), words.encode(said) if said else b""]
    return b"".join([*parts, _ROLES["assistant"]])


def _said(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
