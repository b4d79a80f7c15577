"""The log lines about requests that failed at an engine.

Problem: a client that knows a request at which the engine fails could fill the log.

Idea: in each interval the first lines are written, and of the others their number.
"""

from __future__ import annotations

import logging
from typing import Final

from plimsoll.gateway.envoy.access_log import AccessRecord, RequestOutcome

log = logging.getLogger(__name__)

MAX_LINES: Final = 10  # of one interval
_LOGGED: Final = (RequestOutcome.FAILED, RequestOutcome.IDLE_TIMEOUT)


class FailureLog:
    """Writes the lines. Call `flush` at the end of each interval."""

    def __init__(self) -> None:
        self._failed = 0  # in this interval

    def write(self, record: AccessRecord) -> None:
        """Write a line about a request that the picker sent to an engine, if it failed there."""
        if record.outcome not in _LOGGED:
            return
        self._failed += 1
        if self._failed <= MAX_LINES:
            log.warning(
                "request %s failed at %s: %s %s %s",
                record.client_request_id,
                record.upstream,
                record.status,
                record.flags,
                record.details,
            )

    def flush(self) -> None:
        """Write how many lines were left out, and begin the next interval."""
        if self._failed > MAX_LINES:
            log.warning("%d more requests failed at engines", self._failed - MAX_LINES)
        self._failed = 0
