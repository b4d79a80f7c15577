"""vLLM's APIs beyond completions and chat, in front of the same engine.

Problem: each API has its own request, response, stream and errors, and all of them are sequences in the engine. Idea: a
`Dialect` converts a body into the engine's request, and sequences into a response. Messages and responses become a
chat. `task_dialects` has the APIs of models that generate no text, and the tables of paths.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from simulated import protocol, responses
from simulated.protocol import GenerationRequest, RequestError
from simulated.sequence import ServedSequence

COMPLETIONS_PATH: Final = "/v1/completions"
CHAT_PATH: Final = "/v1/chat/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
_STOP_REASONS: Final = {"length": "max_tokens"}  # vLLM names no reason for an aborted answer

Sequences = Sequence[ServedSequence]
Names = tuple[str, ...]


class EventStream(Protocol):
    """The events of one streamed response."""

    def new_events(self) -> bytes:
        """Return the events since the last call."""
        ...

    def final_events(self) -> bytes:
        """Return the events after the last token."""
        ...


@dataclass(frozen=True)
class Dialect:
    """One API. `parse` takes a body, the engine's names and its context length; `complete` and `stream` build the
    response.
    """

    prefix: str
    parse: Callable[[bytes, Names, int], GenerationRequest]
    complete: Callable[[GenerationRequest, str, int, Sequences, Any], bytes]
    stream: Callable[[GenerationRequest, str, int, Sequences], EventStream] = responses.ResponseStream
    error_body: Callable[[RequestError], bytes] = lambda error: responses.to_json(error.document)
    error_events: Callable[[RequestError], bytes] = responses.error_events


def document_of(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise protocol.invalid_request(f"JSON decode error: {error}") from None
    if not isinstance(document, dict):
        raise protocol.invalid_request("Input should be a valid dictionary or object to extract fields from")
    return document


# Anthropic's messages


def block_text(content: Any) -> str:
    """Return the text of content blocks, and of a tool's results in them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(
        str(block.get("text") or "") + block_text(block.get("content")) for block in content if isinstance(block, dict)
    )


def _chat(chat: dict[str, Any], names: Names, context: int) -> GenerationRequest:
    document = {key: value for key, value in chat.items() if value is not None}
    return protocol.parse_request(json.dumps(document).encode(), True, names, context)


def messages_chat(document: Mapping[str, Any]) -> dict[str, Any]:
    found = document.get("messages")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise protocol.invalid_request("messages: Field required")
    messages = [{"role": str(one.get("role")), "content": block_text(one.get("content"))} for one in found]
    if document.get("system"):
        messages.insert(0, {"role": "system", "content": block_text(document["system"])})
    return {"model": document.get("model"), "messages": messages}


def _parse_messages(body: bytes, names: Names, context: int) -> GenerationRequest:
    document = document_of(body)
    if not isinstance(document.get("max_tokens"), int) or document["max_tokens"] < 1:
        raise protocol.invalid_request("max_tokens: Field required")
    shared = {key: document.get(key) for key in ("max_tokens", "stream", "kv_transfer_params")}
    return _chat(messages_chat(document) | shared, names, context)


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
        """Return the events since the last call."""
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
        """Return the end of the message, with its usage."""
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
    document = document_of(body)
    given = document.get("input")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        messages = [
            {"role": str(one.get("role") or "tool"), "content": block_text(one.get("content") or one.get("output"))}
            for one in given
        ]
    else:
        raise protocol.invalid_request("input: Field required", "input")
    if isinstance(document.get("instructions"), str):
        messages.insert(0, {"role": "system", "content": document["instructions"]})
    shared = {key: document.get(key) for key in ("model", "stream", "kv_transfer_params")}
    chat = shared | {"messages": messages, "max_tokens": document.get("max_output_tokens")}
    metadata = document.get("metadata")
    return replace(_chat(chat, names, context), metadata=metadata if isinstance(metadata, dict) else None)


def _response_document(
    request: GenerationRequest, name: str, created: int, sequence: ServedSequence, status: str, transfer: Any = None
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
        "metadata": request.metadata,
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


def _output_item(name: str, sequence: ServedSequence, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": sequence.text(0, sequence.emitted_tokens), "annotations": [], "logprobs": []}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _response_status(sequence: ServedSequence) -> str:
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
        """Return the events since the last call."""
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
        """Return the end of the response. vLLM calls it completed with any status."""
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


GENERATION: Final[Mapping[str, Dialect]] = {
    MESSAGES_PATH: Dialect(
        "chatcmpl", _parse_messages, _complete_message, MessageStream, _message_error, _message_error_events
    ),
    RESPONSES_PATH: Dialect("resp", _parse_responses, _complete_response, ResponseEventStream),
}
