"""Answers as vLLM writes them: whole ones, and the events of a stream, one for each token.

Problem: a busy engine writes thousands of events a second.
Idea: what surrounds a token's word is the same for a whole stream and is made once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Several
from typing import Any, Final

from simulated import words
from simulated.protocol import Asked, Refused
from simulated.sequences import Sequence
from simulated.start import VERSION

DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = f"vllm-{VERSION}"
_PROMPT: Final = {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}  # of a whole chat


def dump(document: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(document, separators=(",", ":")).encode()


def event(document: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + dump(document) + b"\n\n"


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """vLLM's usage object."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def _counted(prompt: int, completion: int) -> dict[str, int]:
    """The usage object in a stream: its other fields are left out there."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def _used(asked: Asked, sequences: Several[Sequence]) -> tuple[int, int]:
    """Tokens of the prompts and of the answers."""
    return sum(words.count(one) for one in asked.prompts), sum(sequence.emitted for sequence in sequences)


def whole(asked: Asked, name: str, created: int, sequences: Several[Sequence], transfer: Any) -> bytes:
    """An answer in one piece."""
    make = _message if asked.chat else _completed
    document = {
        "id": name,
        "object": "chat.completion" if asked.chat else "text_completion",
        "created": created,
        "model": asked.model,
        "choices": [make(index, sequence) for index, sequence in enumerate(sequences)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage(*_used(asked, sequences)),
        "kv_transfer_params": transfer,
        "ec_transfer_params": None,
        "metrics": None,
    }
    return dump(document | _PROMPT if asked.chat else document)


def _completed(index: int, sequence: Sequence) -> dict[str, Any]:
    return {
        "index": index,
        "text": sequence.text(0, sequence.emitted),
        "logprobs": None,
        "finish_reason": sequence.outcome,
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }


def _message(index: int, sequence: Sequence) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": sequence.text(0, sequence.emitted),
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


class Stream:
    """The events of one streamed answer."""

    def __init__(self, asked: Asked, name: str, created: int, sequences: Several[Sequence]) -> None:
        self._asked = asked
        self._sequences = sequences
        self._said = [0] * len(sequences)
        self._ended: set[int] = set()
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created, "model": asked.model}
        self._pieces = [self._around(index) for index in range(len(sequences))]

    def news(self) -> bytes:
        """The events since the last call."""
        events: list[str] = []
        for index, sequence in enumerate(self._sequences):
            said = self._said[index]
            if index not in self._ended and (sequence.emitted > said or sequence.outcome):
                if not said and self._asked.chat:
                    events.append(self._opening(index))
                events += self._tokens(index, sequence, said)
                self._said[index] = sequence.emitted
        return "".join(events).encode()

    def end(self) -> bytes:
        """What comes after the last token."""
        if not self._asked.include_usage:
            return DONE
        used = _counted(*_used(self._asked, self._sequences))
        return event({**self._head, "choices": [], "system_fingerprint": FINGERPRINT, "usage": used}) + DONE

    def _tokens(self, index: int, sequence: Sequence, said: int) -> list[str]:
        before, between, middle, last = self._pieces[index]
        until, outcome = sequence.emitted, sequence.outcome
        spoken = [words.word(sequence.seed, place) for place in range(said, until)]
        if outcome is not None:
            self._ended.add(index)
            if outcome != "length" or not spoken:
                spoken.append("")  # ended by the engine: an event of its own
        ends = ["null" + middle] * len(spoken)
        if outcome is not None:
            ends[-1] = f'"{outcome}"{last}'
        if not self._asked.continuous_usage:
            return [f"{before}{word}{between}{end}}}\n\n" for word, end in zip(spoken, ends, strict=True)]
        return [
            f"{before}{word}{between}{end}{self._usage(sequence, min(said + number, until))}}}\n\n"
            for number, (word, end) in enumerate(zip(spoken, ends, strict=True), start=1)
        ]

    def _around(self, index: int) -> tuple[str, str, str, str]:
        """What stands before a word, between it and the finish reason, after that, and after that of the last one."""
        start = "data: " + json.dumps(self._head, separators=(",", ":"))[:-1] + f',"choices":[{{"index":{index},'
        mark = "" if self._asked.include_usage else f',"system_fingerprint":"{FINGERPRINT}"'
        if self._asked.chat:
            between, middle = '"},"logprobs":null,"finish_reason":', ',"token_ids":null}]'
            return start + '"delta":{"content":"', between, middle, f',"stop_reason":null{middle}{mark}'
        middle = ',"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
        return start + '"text":"', '","logprobs":null,"finish_reason":', middle, middle + mark

    def _usage(self, sequence: Sequence, completion: int) -> str:
        """What ends each event where it was asked for."""
        details = {"completion_tokens_details": None} if self._asked.chat else {}
        return ',"usage":' + dump(_counted(sequence.prompt_tokens, completion) | details).decode()

    def _opening(self, index: int) -> str:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        opening = {**self._head, "choices": [choice], "prompt_token_ids": None, "prompt_text": None}
        used = self._usage(self._sequences[index], 0) if self._asked.continuous_usage else ""
        return f"data: {dump(opening).decode()[:-1]}{used}}}\n\n"


def failure(refused: Refused) -> bytes:
    """An error inside a stream that has begun."""
    return event(refused.document) + DONE
