"""Log fields that name the service a line is about: `service=NAMESPACE/NAME`, made at one place.

Problem: an operator's log is read for one service, and a line without its name cannot be found.
Idea: the loggers of the controllers require the service of each line, or None for a line about no single service.
"""

from __future__ import annotations

import logging
from typing import Final

Key = tuple[str, str]  # namespace and name

SERVICE_FIELD: Final = "service"


class ServiceLog:
    """The logger of one module. `fields` appear next to the message in the JSON line."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def debug(self, service: Key | None, message: str, **fields: object) -> None:
        self._write(logging.DEBUG, service, message, fields)

    def info(self, service: Key | None, message: str, **fields: object) -> None:
        self._write(logging.INFO, service, message, fields)

    def warning(self, service: Key | None, message: str, **fields: object) -> None:
        self._write(logging.WARNING, service, message, fields)

    def exception(self, service: Key | None, message: str, **fields: object) -> None:
        """Log at error level, with the traceback of the exception that is handled."""
        self._write(logging.ERROR, service, message, fields, with_traceback=True)

    def write(self, level: int, service: Key | None, message: str, **fields: object) -> None:
        """Log at a level of the logging module."""
        self._write(level, service, message, fields)

    def _write(
        self,
        level: int,
        service: Key | None,
        message: str,
        fields: dict[str, object],
        with_traceback: bool = False,
    ) -> None:
        if self._log.isEnabledFor(level):
            extra = fields if service is None else {SERVICE_FIELD: "/".join(service), **fields}
            self._log.log(level, message, extra=extra, exc_info=with_traceback, stacklevel=3)
