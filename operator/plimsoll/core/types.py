"""Types that every layer shares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

KV_BLOCK_TOKENS: Final = 128  # of prefill and decode engines (`--block-size`): KV travels in whole blocks


class Role(StrEnum):
    """The work of an engine. `SERVE` does both prefill and decode."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVE = "serve"


class Task(StrEnum):
    """Task of a service's model; it decides which routes of the API the service serves."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    TRANSCRIBE = "transcribe"

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


class MediaKind(StrEnum):
    """A kind of content of a request that is no plain text of its prompt.

    Most chat templates leave the schema of a response format out: the engine only holds the response to it.
    """

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    SCHEMA = "schema"

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The absence of a value, with its reason. It never counts as 0."""

    reason: str
