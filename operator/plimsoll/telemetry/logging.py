"""Logs: one JSON object a line, a constant message plus fields.

info: a decision or a transition; warning: something a person may have to look at; debug: inputs.
"""

from __future__ import annotations

import datetime
import logging
from typing import Any

import orjson

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "taskName", "asctime"}


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; what was given as `extra` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def configure(level: str = "INFO") -> None:
    """All logging of this process to standard error; libraries speak from warning up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("plimsoll").setLevel(level)
