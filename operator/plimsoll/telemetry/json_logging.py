"""Logging as one JSON object per line: a constant message and fields, without secrets.

Levels: info for a decision or transition, warning for a condition that may need attention, debug for inputs.
"""

from __future__ import annotations

import datetime
import logging
from typing import Any

import orjson

from plimsoll.engines.redaction import redact

_STANDARD_FIELDS = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {
    "message",
    "taskName",
    "asctime",
}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with the fields of `extra` next to the message."""

    def format(self, record: logging.LogRecord) -> str:
        record_fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        record_fields |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD_FIELDS}
        if record.exc_info:
            record_fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps({k: _redacted(v) for k, v in record_fields.items()}, default=_text).decode()


def _redacted(value: object) -> object:
    """A field without secrets; text in lists and objects too."""
    match value:
        case str():
            return redact(value)
        case list() | tuple():
            return [_redacted(item) for item in value]
        case dict():
            return {key: _redacted(item) for key, item in value.items()}
        case _:
            return value


def _text(value: object) -> str:
    return redact(str(value))


def configure(level: str = "INFO") -> None:
    """Send all logs of this process to standard error; libraries log from warning up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("plimsoll").setLevel(level)
