"""The launcher's own requests to its engine: health, progress and metrics.

Problem: some engines that cannot serve need no restart, which would only abort their requests. An engine whose
certificate expires serves its open connections on, but refuses new ones, also the launcher's. vLLM that changes its
number of data-parallel engines answers 503, as it does when it has died.

Idea: an API server that answers a TLS handshake is alive, and so is one that says that it is scaling. Else, only a
response counts.
"""

from __future__ import annotations

import logging
from enum import Enum, auto

from launcher import command, errors, progress
from launcher.client import EngineClient, TlsRefused
from launcher.contract import Contract

API_SERVER_SECONDS = 3.0  # beyond the middleware's own wait, until a new connection is tried

log = logging.getLogger("launcher")


class Health(Enum):
    """What vLLM's /health says. UNKNOWN: nothing (it is starting or busy)."""

    HEALTHY = auto()
    DEAD = auto()
    SCALING = auto()
    UNKNOWN = auto()


class EngineProbe:
    """Asks one engine. No method raises if it does not respond."""

    def __init__(self, client: EngineClient, contract: Contract) -> None:
        self._client = client
        self._contract = contract
        self._is_refused = False

    async def step_seconds(self) -> float | None:
        """Return the response time of the engine core, s; None without a response from it or its API server.

        It is 0 if the API server refuses the launcher's certificate: then the core is not known to hang.
        """
        seconds = self._contract.progress.answer_seconds + API_SERVER_SECONDS
        try:
            response = await self._client.request(self._contract.paths["progress"], timeout=seconds)
        except TlsRefused as error:
            if not self._is_refused:
                log.error("the engine refuses the launcher's certificate, so its progress is unknown: %s", error)
            self._is_refused = True
            return 0.0
        except (OSError, TimeoutError, ValueError):
            return None
        self._is_refused = False
        return progress.parse_step_seconds(response.status, response.body)

    async def health(self) -> Health:
        """Return what vLLM says of its health."""
        try:
            response = await self._client.request(command.HEALTH_PATH)
        except (OSError, TimeoutError, ValueError):
            return Health.UNKNOWN
        if response.status == 503:
            message = errors.to_openai_error(response.body, 503)["error"]["message"]
            return Health.SCALING if errors.is_scaling(message) else Health.DEAD
        return Health.HEALTHY if response.status == 200 else Health.UNKNOWN

    async def metrics(self) -> bytes:
        """Return the engine's own metrics; b"" without a response."""
        try:
            response = await self._client.request(self._contract.paths["metrics"])
        except (OSError, TimeoutError, ValueError):
            return b""
        return response.body if response.status == 200 else b""
