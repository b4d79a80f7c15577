"""Responses in vLLM's format: complete ones, and the events of a stream, one per token.

Problem: a busy engine writes thousands of events per second. Idea: the text around a token is the same for a whole
stream and is built once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from simulated import token_text
from simulated.cold_start import VERSION
from simulated.protocol import GenerationRequest, RequestError
from simulated.sequence import ServedSequence

DONE_EVENT: Final = b"data: [DONE]\n\n"
SYSTEM_FINGERPRINT: Final = f"vllm-{VERSION}"
_CHAT_PROMPT_FIELDS: Final = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}  # of a whole chat


def to_json(document: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


def to_event(document: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + to_json(document) + b"\n\n"


def usage_document(prompt: int, completion: int) -> dict[str, Any]:
    """Return vLLM's usage object."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _stream_usage(prompt: int, completion: int) -> dict[str, int]:
    """Return the usage object of a stream, which has fewer fields."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _token_counts(request: GenerationRequest, sequences: Sequence[ServedSequence]) -> tuple[int, int]:
    """Return the tokens of the prompts and of the outputs."""
    return sum(token_text.count_tokens(one) for one in request.prompts), sum(
        sequence.emitted_tokens for sequence in sequences
    )


def complete_response(
    request: GenerationRequest, name: str, created: int, sequences: Sequence[ServedSequence], transfer: Any
) -> bytes:
    """Return a complete response."""
    make_choice = _chat_choice if request.chat else _completion_choice
    document = {
        "id": name,
        "object": "chat.completion" if request.chat else "text_completion",
        "created": created,
        "model": request.model,
        "choices": [make_choice(index, sequence) for index, sequence in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage_document(*_token_counts(request, sequences)),
        "kv_transfer_params": transfer,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return to_json(document | _CHAT_PROMPT_FIELDS if request.chat else document)


def _completion_choice(index: int, sequence: ServedSequence) -> dict[str, Any]:
    return {
        "index": index,
        "text": sequence.text(0, sequence.emitted_tokens),
        "logprobs": None,
        "finish_reason": sequence.outcome,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def _chat_choice(index: int, sequence: ServedSequence) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": sequence.text(0, sequence.emitted_tokens),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": sequence.outcome,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }


class ResponseStream:
    """The events of one streamed response."""

    def __init__(
        self, request: GenerationRequest, name: str, created: int, sequences: Sequence[ServedSequence]
    ) -> None:
        self._request = request
        self._sequences = sequences
        self._emitted_tokens = [0] * len(sequences)
        self._ended: set[int] = set()
        kind = "chat.completion.chunk" if request.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": request.model}
        self._event_parts = [self._event_frame(index) for index in range(len(sequences))]

    def new_events(self) -> bytes:
        """Return the events since the last call."""
        events: list[str] = []
        for index, sequence in enumerate(self._sequences):
            already_emitted = self._emitted_tokens[index]
            if index not in self._ended and (sequence.emitted_tokens > already_emitted or sequence.outcome):
                if not already_emitted and self._request.chat:
                    events.append(self._opening_event(index))
                events += self._token_events(index, sequence, already_emitted)
                self._emitted_tokens[index] = sequence.emitted_tokens
        return "".join(events).encode()

    def final_events(self) -> bytes:
        """Return the events after the last token."""
        if not self._request.include_usage:
            return DONE_EVENT
        usage = _stream_usage(*_token_counts(self._request, self._sequences))
        return (
            to_event({**self._head, "choices": [], "system_fingerprint": SYSTEM_FINGERPRINT, "usage": usage})
            + DONE_EVENT
        )

    def _token_events(self, index: int, sequence: ServedSequence, already_emitted: int) -> list[str]:
        before, between, middle, last = self._event_parts[index]
        until, outcome = sequence.emitted_tokens, sequence.outcome
        emitted_words = [token_text.word(sequence.seed, place) for place in range(already_emitted, until)]
        if outcome is not None:
            self._ended.add(index)
            if outcome != "length" or not emitted_words:
                emitted_words.append("")  # ended by the engine: an event of its own
        ends = ["null" + middle] * len(emitted_words)
        if outcome is not None:
            ends[-1] = f'"{outcome}"{last}'
        if not self._request.continuous_usage:
            return [f"{before}{word}{between}{end}}}\n\n" for word, end in zip(emitted_words, ends, strict=True)]
        return [
            f"{before}{word}{between}{end}{self._usage_suffix(sequence, min(already_emitted + number, until))}}}\n\n"
            for number, (word, end) in enumerate(zip(emitted_words, ends, strict=True), start=1)
        ]

    def _event_frame(self, index: int) -> tuple[str, str, str, str]:
        """Return the text before a token, between it and the finish reason, after that, and after the last one's."""
        start = "data: " + json.dumps(self._head, separators=(",", ":"))[:-1] + f',"choices":[{{"index":{index},'
        fingerprint = "" if self._request.include_usage else f',"system_fingerprint":"{SYSTEM_FINGERPRINT}"'
        if self._request.chat:
            between, middle = '"},"logprobs":null,"finish_reason":', ',"token_ids":null}]'
            return start + '"delta":{"content":"', between, middle, f',"stop_reason":null{middle}{fingerprint}'
        middle = ',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        return start + '"text":"', '","logprobs":null,"finish_reason":', middle, middle + fingerprint

    def _usage_suffix(self, sequence: ServedSequence, completion: int) -> str:
        """Return the usage that ends each event if the request asks for it."""
        details = {"completion_tokens_details": None} if self._request.chat else {}
        return ',"usage":' + to_json(_stream_usage(sequence.prompt_tokens, completion) | details).decode()

    def _opening_event(self, index: int) -> str:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        opening = {**self._head, "choices": [choice], "prompt_token_ids": None, "prompt_text": None}
        usage_suffix = self._usage_suffix(self._sequences[index], 0) if self._request.continuous_usage else ""
        return f"data: {to_json(opening).decode()[:-1]}{usage_suffix}}}\n\n"


def error_events(error: RequestError) -> bytes:
    """Return an error inside a stream that has begun."""
    return to_event(error.document) + DONE_EVENT
