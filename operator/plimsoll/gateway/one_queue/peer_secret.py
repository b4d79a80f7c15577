"""The secret that all gateways of a release share: read from the mounted Secret, and followed when it is rotated.

Problem: the kubelet of each node writes a changed Secret at its own time, so that for a minute or two some gateways
have the new one and others the former. And a Secret that is broken must not replace one that works.

Idea: the picker reads the file each second. After a change the former secret is valid for `FORMER_SECONDS`: a
connection that it opened goes on, and a gateway that cannot connect with the new one offers the former. Then
connections of the former secret end, and are opened again with the new one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from plimsoll.gateway.one_queue.frames import MIN_SECRET_BYTES
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

READ_SECONDS: Final = 1.0  # between two reads of the file
FORMER_SECONDS: Final = 300.0  # a kubelet writes a changed Secret within about two minutes


class PeerSecret:
    """The secret in a file. Keep it up to date with `follow`."""

    def __init__(self, path: Path, on_change: Callable[[bytes], None]) -> None:
        """`on_change` is called with each new secret. Raises OSError, or ValueError if the secret is too short."""
        self._path = path
        self._on_change = on_change
        self._current = read_secret(path)
        self._former: bytes | None = None
        self._former_until_s = 0.0
        self._error = ""

    @property
    def accepted(self) -> tuple[bytes, ...]:
        """The secrets that are valid now, the current one first."""
        if self._former is None or time.monotonic() >= self._former_until_s:
            return (self._current,)
        return self._current, self._former

    async def follow(self) -> None:
        """Keep the secret in sync with the file. Never returns."""
        while True:
            self.take(await asyncio.to_thread(_read, self._path))
            await asyncio.sleep(READ_SECONDS)

    def take(self, found: bytes | str) -> None:
        """Use a secret that is new, or keep the present one while the file holds none: `found` is then the reason."""
        problem = found if isinstance(found, str) else ""
        if problem and problem != self._error:
            log.error("keeping the secret of the gateways: %s", problem)
        self._error = problem
        gateway_metrics.GATEWAY_PEER_SECRET_INVALID.set(bool(problem))
        if isinstance(found, bytes) and found != self._current:
            self._former, self._current = self._current, found
            self._former_until_s = time.monotonic() + FORMER_SECONDS
            log.info("the secret of the gateways has changed; the former one is valid for %.0f s", FORMER_SECONDS)
            self._on_change(found)


def read_secret(path: Path) -> bytes:
    """Returns the secret in a file. Raises OSError, or ValueError if it is too short."""
    secret = path.read_bytes().strip()
    if len(secret) < MIN_SECRET_BYTES:
        message = f"the secret of the gateways in {path} must have at least {MIN_SECRET_BYTES} bytes, not {len(secret)}"
        raise ValueError(message)
    return secret


def _read(path: Path) -> bytes | str:
    try:
        return read_secret(path)
    except (OSError, ValueError) as error:
        return str(error)
