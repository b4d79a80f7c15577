"""A whole gateway that writes an access log, and the lines of it."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.stack import GatewayStack, wait_until

Line = dict[str, Any]


class LoggedGateway(GatewayStack):
    """A gateway that writes an access log."""

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.log.read_bytes().split(b"\n") if line.startswith(b'{"time"')]

    async def line_of(self, request_id: str) -> Line:
        """The one line of the request that a client sent with this id."""
        await wait_until(lambda: any(line["request_id"] == request_id for line in self.lines()), f"{request_id} logged")
        (found,) = (line for line in self.lines() if line["request_id"] == request_id)
        return found
