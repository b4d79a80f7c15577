"""The APIs that generate text: how each says that an answer is complete, was aborted, or failed.

Problem: an answer that ends badly must look bad to the SDK of its API. Chat streams end with `[DONE]`, Anthropic's with
`message_stop`, and those of the Responses API with `response.completed`; each has error events of its own.
Idea: a few byte patterns that cannot occur inside a JSON string, because there quotes and line ends are escaped.
An aborted answer has the finish reason `abort`. vLLM gives Anthropic's clients no stop reason for it, and the Responses
API the status `cancelled`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher import errors

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")

# vLLM's error event: `{"error"` has no `event:` line before it.
OPENAI_ERROR = b'\ndata: {"error"'
NAMED_ERROR = b"\nevent: error\n"

Document = dict[str, Any]
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True)
class ApiFormat:
    """What the middleware looks for in answers of one API.

    `abort_mark` and `done_marks` are those of a stream, `is_aborted` judges a whole answer. `error_mark` begins an
    error event, with the line end before it. `error_event` makes one from a message and a code.
    `output_limit` is the request's field that limits the output.
    """

    abort_mark: bytes
    done_marks: tuple[bytes, ...]
    error_mark: bytes
    is_aborted: Callable[[bytes], bool]
    error_event: Callable[[str, str], bytes]
    output_limit: str = "max_tokens"

    @property
    def seam_bytes(self) -> int:
        """Bytes of a chunk's end that a mark may begin in."""
        return max(map(len, (self.abort_mark, *self.done_marks, self.error_mark))) - 1


def _anthropic_event(message: str, code: str) -> bytes:
    document = to_anthropic(errors.error_document(message, 500, code=code), 500)
    return b"event: error\ndata: " + errors.to_json(document) + b"\n\n"


def _responses_event(message: str, code: str) -> bytes:
    # The SDK reads `sequence_number`; the one of a cut stream means nothing.
    document = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
    return b"event: error\ndata: " + errors.to_json(document) + b"\n\n"


OPENAI = ApiFormat(
    abort_mark=b'"finish_reason":"abort"',
    done_marks=(b"\ndata: [DONE]",),
    error_mark=OPENAI_ERROR,
    is_aborted=lambda body: b'"finish_reason":"abort"' in body,
    error_event=errors.error_event,
)
ANTHROPIC = ApiFormat(
    abort_mark=b'"delta":{"stop_reason":null',
    done_marks=(b"\nevent: message_stop",),
    error_mark=NAMED_ERROR,
    is_aborted=lambda body: b'"type":"message"' in body and b'"stop_reason":"' not in body,
    error_event=_anthropic_event,
)
RESPONSES = ApiFormat(
    abort_mark=b'"status":"cancelled"',
    done_marks=(b"\nevent: response.completed", b"\nevent: response.incomplete", b"\nevent: response.failed"),
    error_mark=NAMED_ERROR,
    is_aborted=lambda body: b'"status":"cancelled"' in body,
    error_event=_responses_event,
    output_limit="max_output_tokens",
)
FORMATS = {
    COMPLETIONS_PATH: OPENAI,
    CHAT_PATH: OPENAI,
    MESSAGES_PATH: ANTHROPIC,
    RESPONSES_PATH: RESPONSES,
    **dict.fromkeys(AUDIO_PATHS, OPENAI),
}


def to_anthropic(document: Document, status: int) -> Document:
    """Anthropic's error object from OpenAI's."""
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": document["error"]["message"]}}


def error_body(document: Document, status: int, path: str) -> bytes:
    """The JSON of an error in the shape of the path's API, from OpenAI's error object."""
    is_anthropic = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return errors.to_json(to_anthropic(document, status) if is_anthropic else document)


def event_message(chunk: bytes) -> str:
    """The words of an error event of any API."""
    for line in chunk.partition(b"\n\n")[0].split(b"\n"):
        if line.startswith(b"data: "):
            try:
                document = json.loads(line[6:])
            except (ValueError, RecursionError):
                break
            if isinstance(document, dict):
                return str(errors.to_openai_error(line[6:], 500)["error"]["message"])
    return "Internal server error"
