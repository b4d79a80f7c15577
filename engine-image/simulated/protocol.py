"""Requests as vLLM's API reads them, and its errors with its messages.

Problem: clients and gateways match on texts like "maximum context length" and on the named field. Idea: fields without
effect here (sampling, tools, log-probabilities) are accepted and ignored; fields that decide lengths and routes are
validated as in vLLM. A rejection is an exception with vLLM's error object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from simulated import token_text

DEFAULT_MAX_TOKENS: Final = 16  # of a completion; a chat goes on to the context's end
_ROLES: Final = {"system": b"<|s>", "user": b"<|u>", "assistant": b"<|a>", "tool": b"<|t>"}
_OTHER_ROLE: Final = b"<|o>"


class RequestError(Exception):
    """An error response: HTTP status, and vLLM's error object."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.document = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid_request(message: str, param: str | None = None, value: int | None = None) -> RequestError:
    """Return the error of an invalid request; vLLM's text for a field and its value ends the message."""
    if param is not None:
        message += f" (parameter={param})" if value is None else f" (parameter={param}, value={value})"
    return RequestError(400, message, "BadRequestError", param)


def internal_error(message: str) -> RequestError:
    """Return the error of a failed engine."""
    return RequestError(500, message, "InternalServerError")


@dataclass(frozen=True)
class GenerationRequest:
    """A valid request. `prompts` are token bytes; each gets `n` outputs of `max_tokens` tokens."""

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
    encoding: str = "float"  # of an embedding; or base64
    metadata: Mapping[str, Any] | None = None  # of a response, which repeats it
    adapter: str = ""  # the LoRA adapter, "" for the model itself


def parse_request(body: bytes, chat: bool, names: tuple[str, ...], max_model_len: int) -> GenerationRequest:
    """Return a request from its body; raises RequestError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _validation_error("json_invalid", f"JSON decode error: {error}") from None
    if not isinstance(document, dict):
        raise _validation_error(
            "model_attributes_type", "Input should be a valid dictionary or object to extract fields from"
        )
    model = document.get("model") or names[0]
    if model not in names:
        raise RequestError(
            404, f"The model `{model}` does not exist. Valid aliases: {', '.join(names)}.", "NotFoundError", "model"
        )
    prompts = (_chat_prompt(document),) if chat else _prompts(document)
    if any(not prompt for prompt in prompts):
        raise invalid_request("The decoder prompt cannot be empty")
    stream = bool(document.get("stream"))
    options = document.get("stream_options") or {}
    if options and not stream:
        raise invalid_request("Stream options can only be defined when `stream=True`.", "stream_options")
    transfer = document.get("kv_transfer_params")
    return GenerationRequest(
        chat=chat,
        model=names[0],  # as vLLM: its first name, whichever it was asked by
        prompts=prompts,
        n=_choices(document),
        max_tokens=_max_tokens(document, chat, max(map(token_text.count_tokens, prompts)), max_model_len),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        salt=str(document.get("cache_salt") or ""),
        request_id=str(document.get("request_id") or ""),
        transfer=transfer if isinstance(transfer, dict) else None,
    )


def _validation_error(kind: str, message: str, field: str = "body") -> RequestError:
    """Return an error of the web framework, before vLLM's own code."""
    return RequestError(400, str([{"type": kind, "loc": ("body", field), "msg": message}]), "Bad Request")


def _integer(document: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = document.get(key, default)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise _validation_error("int_type", "Input should be a valid integer", key)


def _choices(document: Mapping[str, Any]) -> int:
    n = _integer(document, "n", 1)
    if n is not None and n < 1:
        raise invalid_request(f"n must be at least 1, got {n}.")
    return n or 1


def _max_tokens(document: Mapping[str, Any], chat: bool, prompt: int, context: int) -> int:
    """Return the output tokens: the requested ones, as far as prompt and output fit into the context together."""
    requested = _integer(document, "max_tokens", None if chat else DEFAULT_MAX_TOKENS)
    if chat:
        requested = _integer(document, "max_completion_tokens", None) or requested
    if requested is not None and requested > context:
        message = (
            f"max_tokens={requested} cannot be greater than max_model_len={context}. "
            "Please request fewer output tokens."
        )
        raise invalid_request(message, "max_tokens", requested)
    if prompt > context:
        raise invalid_request(
            f"This model's maximum context length is {context} tokens. However, your prompt contains "
            f"{'at least ' * (prompt == context + 1)}{prompt} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt,
        )
    room_tokens = context - prompt
    tokens = room_tokens if requested is None else min(requested, room_tokens)
    if tokens < 1:
        raise invalid_request(f"max_tokens must be at least 1, got {tokens}.", "max_tokens", tokens)
    minimum = _integer(document, "min_tokens", 0) or 0
    if minimum < 0:
        raise invalid_request(f"min_tokens must be greater than or equal to 0, got {minimum}.")
    if minimum > tokens:
        raise invalid_request(f"min_tokens must be less than or equal to max_tokens={tokens}, got {minimum}.")
    return tokens


def _prompts(document: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the prompts of a completion: a text, token ids, or a list of either."""
    prompt = document.get("prompt")
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return (_to_tokens(prompt),)
    if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_token_ids(one) for one in prompt):
        return tuple(map(_to_tokens, prompt))
    if prompt == []:
        raise invalid_request("You must pass at least one prompt")
    if prompt is None:
        raise invalid_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    raise _validation_error("string_type", "Input should be a valid string, or lists of strings or token ids", "prompt")


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def _to_tokens(prompt: Any) -> bytes:
    return token_text.encode(prompt) if isinstance(prompt, str) else token_text.encode_ids(prompt)


def _chat_prompt(document: Mapping[str, Any]) -> bytes:
    """Return a conversation as one prompt: a token for each role, the text, a token for the next role."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise _validation_error("missing", "Field required", "messages")
    parts = []
    for message in messages:
        content = _content_text(message.get("content"))
        parts += [_ROLES.get(str(message.get("role")), _OTHER_ROLE), token_text.encode(content) if content else b""]
    return b"".join([*parts, _ROLES["assistant"]])


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
