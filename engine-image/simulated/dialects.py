"""The APIs of vLLM beyond completions and chat, in front of the same engine.

Problem: each API has its own request, answer, stream and errors, and all of them are sequences in the engine.
Idea: a `Dialect` turns a body into the request that the engine knows, and sequences into an answer. Messages and
responses become a chat. An embedding and a score are sequences of one token, whose prompts decide the numbers.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from simulated import protocol, responses, token_text
from simulated.protocol import GenerationRequest, RequestError
from simulated.sequence import EngineSequence

COMPLETIONS_PATH: Final = "/v1/completions"
CHAT_PATH: Final = "/v1/chat/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
TOKEN_PATHS: Final = ("/tokenize", "/detokenize", f"{MESSAGES_PATH}/count_tokens")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS: Final = ("/score", "/v1/score")
EMBEDDING_SIZE: Final = 8
_STOP_REASONS: Final = {"length": "max_tokens"}  # vLLM names no reason for an aborted answer

Sequences = Sequence[EngineSequence]
Names = tuple[str, ...]


class EventStream(Protocol):
    """The events of one streamed answer."""

    def new_events(self) -> bytes:
        """The events since the last call."""
        ...

    def final_events(self) -> bytes:
        """What comes after the last token."""
        ...


@dataclass(frozen=True)
class Dialect:
    """One API. `parse` takes a body, the engine's names and its context; `complete` and `stream` make the answer."""

    prefix: str
    parse: Callable[[bytes, Names, int], GenerationRequest]
    complete: Callable[[GenerationRequest, str, int, Sequences, Any], bytes]
    stream: Callable[[GenerationRequest, str, int, Sequences], EventStream] = responses.ResponseStream
    error_body: Callable[[RequestError], bytes] = lambda error: responses.to_json(error.document)
    error_events: Callable[[RequestError], bytes] = responses.error_events


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise protocol.invalid_request(f"JSON decode error: {error}") from None
    if not isinstance(document, dict):
        raise protocol.invalid_request("Input should be a valid dictionary or object to extract fields from")
    return document


# Anthropic's messages


def _block_text(content: Any) -> str:
    """The text of content blocks, and of a tool's results in them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(
        str(block.get("text") or "") + _block_text(block.get("content")) for block in content if isinstance(block, dict)
    )


def _chat(chat: dict[str, Any], names: Names, context: int) -> GenerationRequest:
    document = {key: value for key, value in chat.items() if value is not None}
    return protocol.parse_request(json.dumps(document).encode(), True, names, context)


def _messages_chat(document: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get("messages")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise protocol.invalid_request("messages: Field required")
    messages = [{"role": str(one.get("role")), "content": _block_text(one.get("content"))} for one in found]
    if document.get("system"):
        messages.insert(0, {"role": "system", "content": _block_text(document["system"])})
    return {"model": document.get("model"), "messages": messages}


def _parse_messages(body: bytes, names: Names, context: int) -> GenerationRequest:
    document = _document(body)
    if not isinstance(document.get("max_tokens"), int) or document["max_tokens"] < 1:
        raise protocol.invalid_request("max_tokens: Field required")
    shared = {key: document.get(key) for key in ("max_tokens", "stream", "kv_transfer_params")}
    return _chat(_messages_chat(document) | shared, names, context)


def _complete_message(
    request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any
) -> bytes:
    (sequence,) = sequences
    text = [{"type": "text", "text": sequence.text(0, sequence.emitted_tokens)}]
    document = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "content": text,
        "model": request.model,
        "stop_reason": _STOP_REASONS.get(sequence.outcome or ""),
        "usage": {"input_tokens": sequence.prompt_tokens, "output_tokens": sequence.emitted_tokens},
        "kv_transfer_params": transfer,
    }
    return responses.to_json({key: value for key, value in document.items() if value is not None})


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + responses.to_event({"type": kind, **fields})


class MessageStream:
    """The events of a streamed message."""

    def __init__(self, request: GenerationRequest, name: str, created: int, sequences: Sequences) -> None:
        (self._sequence,) = sequences
        self._request = request
        self._name = name
        self._emitted = -1

    def new_events(self) -> bytes:
        """The events since the last call."""
        sequence, events = self._sequence, []
        if self._emitted < 0:
            self._emitted = 0
            events += [self._opening(), _event("content_block_start", index=0, content_block=_EMPTY_TEXT)]
        if sequence.emitted_tokens > self._emitted:
            delta = {"type": "text_delta", "text": sequence.text(self._emitted, sequence.emitted_tokens)}
            events.append(_event("content_block_delta", index=0, delta=delta))
            self._emitted = sequence.emitted_tokens
        return b"".join(events)

    def final_events(self) -> bytes:
        """The end of the message, with its usage."""
        sequence = self._sequence
        delta = {"stop_reason": _STOP_REASONS.get(sequence.outcome or ""), "stop_sequence": None}
        usage = {"input_tokens": sequence.prompt_tokens, "output_tokens": sequence.emitted_tokens}
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=delta, usage=usage)
            + _event("message_stop")
        )

    def _opening(self) -> bytes:
        usage = {"input_tokens": self._sequence.prompt_tokens, "output_tokens": 0}
        message = {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._request.model,
        }
        return _event("message_start", message=message | {"stop_reason": None, "stop_sequence": None, "usage": usage})


_EMPTY_TEXT: Final = {"type": "text", "text": ""}


def _message_error(error: RequestError) -> bytes:
    details = error.document["error"]
    return responses.to_json({"type": "error", "error": {"type": details["type"], "message": details["message"]}})


def _message_error_events(error: RequestError) -> bytes:
    details = {"type": "internal_error", "message": "1 validation error for ChatCompletionStreamResponse"}
    return _event("error", error=details)


# The Responses API


def _parse_responses(body: bytes, names: Names, context: int) -> GenerationRequest:
    document = _document(body)
    given = document.get("input")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        messages = [
            {"role": str(one.get("role") or "tool"), "content": _block_text(one.get("content") or one.get("output"))}
            for one in given
        ]
    else:
        raise protocol.invalid_request("input: Field required", "input")
    if isinstance(document.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": document["instructions"]})
    shared = {key: document.get(key) for key in ("model", "stream", "kv_transfer_params")}
    chat = shared | {"messages": messages, "max_tokens": document.get("max_output_tokens")}
    return _chat(chat, names, context)


def _response_document(
    request: GenerationRequest, name: str, created: int, sequence: EngineSequence, status: str, transfer: Any = None
) -> dict[str, Any]:
    item, tokens = _output_item(name, sequence, status), (sequence.prompt_tokens, sequence.emitted_tokens)
    usage = {
        "input_tokens": tokens[0],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": tokens[1],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": sum(tokens),
    }
    return {
        "id": name,
        "created_at": created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": None,
        "model": request.model,
        "object": "response",
        "output": [] if status == "in_progress" else [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": status,
        "usage": None if status == "in_progress" else usage,
        "kv_transfer_params": transfer,
    }


def _output_item(name: str, sequence: EngineSequence, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": sequence.text(0, sequence.emitted_tokens), "annotations": [], "logprobs": []}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _response_status(sequence: EngineSequence) -> str:
    return "incomplete" if sequence.outcome == "length" else "cancelled"


def _complete_response(
    request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any
) -> bytes:
    (sequence,) = sequences
    status = _response_status(sequence)
    return responses.to_json(_response_document(request, name, created, sequence, status, transfer))


class ResponseEventStream:
    """The events of a streamed response."""

    def __init__(self, request: GenerationRequest, name: str, created: int, sequences: Sequences) -> None:
        (self._sequence,) = sequences
        self._request, self._name, self._created = request, name, created
        self._item = {"item_id": f"msg_{name}", "output_index": 0, "content_index": 0}
        self._emitted = -1
        self._number = -1

    def new_events(self) -> bytes:
        """The events since the last call."""
        sequence, events = self._sequence, []
        if self._emitted < 0:
            self._emitted = 0
            opening = self._document("in_progress")
            events += [
                self._event("response.created", response=opening),
                self._event("response.in_progress", response=opening),
            ]
            item = _output_item(self._name, sequence, "in_progress") | {"content": []}
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events.append(self._event("response.content_part.added", **self._item, part=part))
        if sequence.emitted_tokens > self._emitted:
            text = sequence.text(self._emitted, sequence.emitted_tokens)
            events.append(self._event("response.output_text.delta", **self._item, delta=text, logprobs=[]))
            self._emitted = sequence.emitted_tokens
        return b"".join(events)

    def final_events(self) -> bytes:
        """The end of the response. vLLM calls it completed whatever its status is."""
        sequence, status = self._sequence, _response_status(self._sequence)
        item = _output_item(self._name, sequence, status)
        part = item["content"][0]
        return (
            self._event("response.output_text.done", **self._item, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **self._item, part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event("response.completed", response=self._document(status))
        )

    def _document(self, status: str) -> dict[str, Any]:
        return _response_document(self._request, self._name, self._created, self._sequence, status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return _event(kind, **fields, sequence_number=self._number)


# Embeddings and scores: sequences of one token


def _pooling_request(document: Mapping[str, Any], prompts: list[Any], names: Names, context: int) -> GenerationRequest:
    body = json.dumps({"model": document.get("model"), "prompt": prompts, "max_tokens": 1}).encode()
    return protocol.parse_request(body, False, names, context)


def _parse_embedding(body: bytes, names: Names, context: int) -> GenerationRequest:
    document = _document(body)
    given = document.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise protocol.invalid_request("input: Field required", "input")
    encoding = "base64" if document.get("encoding_format") == "base64" else "float"
    return replace(_pooling_request(document, given, names, context), encoding=encoding)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [one if isinstance(one, str) else _block_text(one.get("content")) for one in values if one is not None]


def _parse_pairs(first: tuple[str, ...], second: tuple[str, ...]) -> Callable[[bytes, Names, int], GenerationRequest]:
    def parse(body: bytes, names: Names, context: int) -> GenerationRequest:
        document = _document(body)
        lefts = _texts(next((document[key] for key in first if key in document), None))
        rights = _texts(next((document[key] for key in second if key in document), None))
        if not lefts or not rights or len(lefts) not in (1, len(rights)):
            raise protocol.invalid_request("Input lengths must be either 1:1, 1:N or N:N")
        lefts = lefts * len(rights) if len(lefts) == 1 else lefts
        pairs = [f"{left} {right}" for left, right in zip(lefts, rights, strict=True)]
        return _pooling_request(document, pairs, names, context)

    return parse


def _vector(sequence: EngineSequence) -> list[float]:
    return [((sequence.seed >> 4 * place) % 16 - 7.5) / 16 for place in range(EMBEDDING_SIZE)]


def _score(sequence: EngineSequence) -> float:
    return sequence.seed % 1000 / 1000


def _pooling_usage(sequences: Sequences) -> dict[str, Any]:
    return responses.usage_document(sum(sequence.prompt_tokens for sequence in sequences), 0)


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _complete_embedding(
    request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any
) -> bytes:
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(_vector(sequence), request.encoding)}
        for index, sequence in enumerate(sequences)
    ]
    head = {"id": name, "object": "list", "created": created, "model": request.model}
    return responses.to_json({**head, "data": data, "usage": _pooling_usage(sequences)})


def _complete_score(request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any) -> bytes:
    data = [{"index": index, "object": "score", "score": _score(one)} for index, one in enumerate(sequences)]
    head = {"id": name, "object": "list", "created": created, "model": request.model}
    return responses.to_json({**head, "data": data, "usage": _pooling_usage(sequences)})


def _complete_rerank(request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any) -> bytes:
    ranked = sorted(enumerate(sequences), key=lambda item: -_score(item[1]))
    results = [
        {"index": index, "document": {"text": None}, "relevance_score": _score(sequence)} for index, sequence in ranked
    ]
    tokens = sum(sequence.prompt_tokens for sequence in sequences)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return responses.to_json({"id": name, "model": request.model, "usage": usage, "results": results})


# Tokens, without the engine


def tokens_response(path: str, body: bytes, names: Names, context: int) -> bytes:
    """The answer of a path of TOKEN_PATHS; raises RequestError."""
    document = _document(body)
    if path == "/detokenize":
        ids = document.get("tokens")
        if not isinstance(ids, list):
            raise protocol.invalid_request("tokens: Field required", "tokens")
        text = token_text.encode_ids(ids).rstrip(b"\0").decode("utf-8", "replace")
        return responses.to_json({"prompt": text})
    chat = path.startswith(MESSAGES_PATH)
    found = _messages_chat(document) if chat or "messages" in document else document
    asked = {key: found.get(key) for key in ("model", "messages", "prompt") if found.get(key) is not None}
    request = protocol.parse_request(json.dumps(asked).encode(), "messages" in asked, names, context)
    (prompt,) = request.prompts
    count = token_text.count_tokens(prompt)
    if chat:
        return responses.to_json({"input_tokens": count})
    ids = [number for (number,) in struct.iter_unpack("=I", prompt)]
    return responses.to_json({"count": count, "max_model_len": context, "tokens": ids, "token_strs": None})


def _of_protocol(chat: bool) -> Callable[[bytes, Names, int], GenerationRequest]:
    return lambda body, names, context: protocol.parse_request(body, chat, names, context)


GENERATION: Final[Mapping[str, Dialect]] = {
    COMPLETIONS_PATH: Dialect("cmpl", _of_protocol(False), responses.complete_response),
    CHAT_PATH: Dialect("chatcmpl", _of_protocol(True), responses.complete_response),
    MESSAGES_PATH: Dialect(
        "chatcmpl", _parse_messages, _complete_message, MessageStream, _message_error, _message_error_events
    ),
    RESPONSES_PATH: Dialect("resp", _parse_responses, _complete_response, ResponseEventStream),
}
POOLING: Final[Mapping[str, Dialect]] = {
    "/v1/embeddings": Dialect("embd", _parse_embedding, _complete_embedding),
    **dict.fromkeys(RERANK_PATHS, Dialect("rerank", _parse_pairs(("query",), ("documents",)), _complete_rerank)),
    **dict.fromkeys(
        SCORE_PATHS,
        Dialect(
            "score",
            _parse_pairs(("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")),
            _complete_score,
        ),
    ),
}
