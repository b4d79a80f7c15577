"""Text generation APIs: how each marks a response as complete, aborted or failed.

Problem: a failed response must look failed to the SDK of its API. Chat streams end with `[DONE]`, Anthropic's with
`message_stop`, and those of the Responses API with `response.completed`; each has error events of its own. Idea: a few
byte patterns that cannot occur inside a JSON string, where quotes and line ends are escaped. An aborted response has
the finish reason `abort`. vLLM gives Anthropic's clients no stop reason for it, and the Responses API the status
`cancelled`. The responses of these two APIs may contain objects of the client or of the model, such as `metadata` and
`tools`, where any pattern can occur. There only the document's own field decides.
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

MAX_INSPECTED_BYTES = 16 << 20  # a longer document is not read, and passes
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
    """Patterns of one API in its responses.

    `abort_marks` and `done_marks` are those of a stream, `is_aborted` classifies a whole response. If an event with an
    abort mark may be something else, `is_abort_event` classifies it, from the mark to its end. `error_mark` begins an
    error event, with the line end before it. `error_event` builds one from a message and a code. `output_limit` is the
    request's field that limits the output.
    """

    abort_marks: tuple[bytes, ...]
    done_marks: tuple[bytes, ...]
    error_mark: bytes
    is_aborted: Callable[[bytes], bool]
    error_event: Callable[[str, str], bytes]
    is_abort_event: Callable[[bytes], bool] | None = None
    output_limit: str = "max_tokens"

    @property
    def seam_bytes(self) -> int:
        """Bytes at a chunk's end in which a mark may begin."""
        return max(map(len, (*self.abort_marks, *self.done_marks, self.error_mark))) - 1


def _parse_object(raw: bytes) -> Document:
    """Return the JSON object; an empty one if the text is too long or no object."""
    try:
        document = json.loads(raw) if len(raw) <= MAX_INSPECTED_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _event_data(event: bytes) -> bytes:
    """Return the first data of a server-sent event; empty if it has none."""
    lines = event.partition(b"\n\n")[0].split(b"\n")
    return next((line[6:] for line in lines if line.startswith(b"data: ")), b"")


def _is_aborted_message(body: bytes) -> bool:
    document = _parse_object(body)
    return document.get("type") == "message" and document.get("stop_reason") is None


def _is_cancelled_response(body: bytes) -> bool:
    return b'"cancelled"' in body and _parse_object(body).get("status") == "cancelled"


def _is_cancelled_event(event: bytes) -> bool:
    response = _parse_object(_event_data(event)).get("response") if b'"cancelled"' in event else None
    return isinstance(response, dict) and response.get("status") == "cancelled"


def _anthropic_event(message: str, code: str) -> bytes:
    document = to_anthropic(errors.error_document(message, 500, code=code), 500)
    return b"event: error\ndata: " + errors.to_json(document) + b"\n\n"


def _responses_event(message: str, code: str) -> bytes:
    # The SDK reads `sequence_number`; the one of a cut stream means nothing.
    document = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
    return b"event: error\ndata: " + errors.to_json(document) + b"\n\n"


OPENAI = ApiFormat(
    abort_marks=(b'"finish_reason":"abort"',),
    done_marks=(b"\ndata: [DONE]",),
    error_mark=OPENAI_ERROR,
    is_aborted=lambda body: b'"finish_reason":"abort"' in body,
    error_event=errors.error_event,
)
ANTHROPIC = ApiFormat(
    abort_marks=(b'"delta":{"stop_reason":null',),
    done_marks=(b"\nevent: message_stop",),
    error_mark=NAMED_ERROR,
    is_aborted=_is_aborted_message,
    error_event=_anthropic_event,
)
_FINAL_EVENTS = (b"\nevent: response.completed", b"\nevent: response.incomplete", b"\nevent: response.failed")
RESPONSES = ApiFormat(
    abort_marks=_FINAL_EVENTS,
    done_marks=_FINAL_EVENTS,
    error_mark=NAMED_ERROR,
    is_aborted=_is_cancelled_response,
    error_event=_responses_event,
    is_abort_event=_is_cancelled_event,
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
    """Return Anthropic's error object from OpenAI's."""
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": document["error"]["message"]}}


def error_body(document: Document, status: int, path: str) -> bytes:
    """Return an error as JSON in the format of the path's API, from OpenAI's error object."""
    is_anthropic = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
    return errors.to_json(to_anthropic(document, status) if is_anthropic else document)


def event_message(chunk: bytes) -> str:
    """Return the message of an error event of any API."""
    data = _event_data(chunk)
    if not _parse_object(data):
        return "Internal server error"
    return str(errors.to_openai_error(data, 500)["error"]["message"])
