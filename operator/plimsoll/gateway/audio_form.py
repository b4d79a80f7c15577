"""Requests with sound: a multipart form with the model's name, a file, and options.

Problem: the audio's length decides the work, and only the engine decodes it.

Idea: the header of the sound has its rate (`sound_length`). vLLM cuts sound into clips of 30 seconds, each of which is
a sequence of its own. What the model makes of a second is learned as a ratio, as for sound in a chat.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.admission.request import MAX_REQUEST_TOKENS
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.engines.form_data import FormError, FormField, parse_form
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.media_parts import BYTES_PER_TOKEN
from plimsoll.gateway.request_parser import ParsedRequest, bounded, is_true, model_required
from plimsoll.gateway.sound_length import TOKENS_PER_SECOND, sound_seconds

CLIP_SECONDS: Final = 30  # vLLM's default
_MAX_FIELD_BYTES: Final = 1024  # of fields other than `prompt` and the file
_READ_FIELDS: Final = frozenset({"model", "stream", "max_completion_tokens", "file", "prompt"})


def parse_audio_form(body: bytes, content_type: bytes) -> ParsedRequest | Rejection:
    """Returns the parsed request or its rejection. Never raises."""
    try:
        fields = parse_form(body, content_type.decode("latin-1"))
    except FormError as error:
        return Rejection(RejectionReason.INVALID_FORM, f"The request body is not a valid form: {error}.")
    by_name: dict[str, FormField] = {}
    for field in fields:
        if field.name in by_name and field.name in _READ_FIELDS:
            message = f"The form contains the field '{field.name}' more than once. Send each field once."
            return Rejection(RejectionReason.DUPLICATE_KEY, message, param=field.name)
        by_name[field.name] = field
    model = _text(body, by_name.get("model"))
    if not model:
        return model_required(model)
    file, hint = by_name.get("file"), by_name.get("prompt")
    seconds = 0.0 if file is None else _seconds(body, file)
    clips = max(1, math.ceil(seconds / CLIP_SECONDS))
    audio_tokens = int(min(seconds * TOKENS_PER_SECOND, MAX_REQUEST_TOKENS)) // clips
    text_tokens = 0 if hint is None else (hint.end - hint.start) // BYTES_PER_TOKEN
    limit = _text(body, by_name.get("max_completion_tokens")) or ""
    max_tokens = int(limit) if limit.isascii() and limit.isdecimal() and len(limit) < 9 else 0
    return ParsedRequest(
        model,
        bounded(Prompt(audio_tokens + text_tokens, clips)),
        max_tokens or None,
        is_true(_text(body, by_name.get("stream"))),
        media_tokens={MediaKind.AUDIO: audio_tokens} if audio_tokens else {},
        prompt_field="file",
    )


def _seconds(body: bytes, file: FormField) -> float:
    """Returns the estimated length of the sound in a file."""

    def read(offset: int, count: int) -> bytes:
        start = file.start + offset
        return body[start : min(start + count, file.end)]

    return sound_seconds(file.end - file.start, read)


def _text(body: bytes, field: FormField | None) -> str | None:
    """Returns the value of a short field; None if it is absent, a file, or too long."""
    if field is None or field.is_file or field.end - field.start > _MAX_FIELD_BYTES:
        return None
    return body[field.start : field.end].decode("utf-8", "replace")
