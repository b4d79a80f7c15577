"""The gateway's client certificate for engines: read from the mounted Secret, checked, and delivered to Envoy.

Problem: a rotation must fail no request, and a Secret that is broken must not replace a certificate that works.

Idea: the picker reads the files each second and delivers only what TLS can use. Envoy takes it for new connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from plimsoll.adapters.certificate_files import InvalidCertificate, TlsIdentity, load_identity
from plimsoll.gateway.certificate_watch import READ_SECONDS
from plimsoll.gateway.envoy.delta import AppliedCertificate
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

ENGINES: Final = "engines"  # a value of the metrics' label


class EngineIdentityWatch:
    """Follows the client certificate of one gateway. `publish` delivers it to Envoy."""

    def __init__(self, directory: Path, publish: Callable[[TlsIdentity], None]) -> None:
        self._directory = directory
        self._publish = publish
        self._identity: TlsIdentity | None = None
        self._file_error = ""
        self._envoy_error = ""

    @property
    def context(self) -> ssl.SSLContext | None:
        """For the picker's own calls of engines; None while there is no certificate."""
        return None if self._identity is None else self._identity.context

    @property
    def not_ready_reason(self) -> str:
        """Why Envoy cannot reach engines that require a certificate, "" if it has one, be it an earlier one."""
        if self._identity is not None:
            return ""
        return f"the Secret of gateway.engineTls.secretName holds no certificate that can be used: {self._file_error}"

    async def follow(self) -> None:
        """Keep Envoy's certificate in sync with the files. Never returns."""
        while True:
            self.take(await asyncio.to_thread(read_identity, self._directory))
            await asyncio.sleep(READ_SECONDS)

    def take(self, found: TlsIdentity | InvalidCertificate) -> None:
        """Publish an identity that is new. Keep the one before while the files hold none."""
        problem = str(found) if isinstance(found, InvalidCertificate) else ""
        if problem and problem != self._file_error:
            log.error("no client certificate for engines in %s: %s", self._directory, problem)
        self._file_error = problem
        if isinstance(found, TlsIdentity) and found != self._identity:
            self._identity, self._envoy_error = found, ""
            self._publish(found)
            gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(ENGINES).set(found.pair.expires_s)
        self._export()

    def on_applied(self, applied: AppliedCertificate) -> None:
        """Record what Envoy says of the certificate or of the authority."""
        if applied.error:
            self._envoy_error = applied.error
            log.error("Envoy does not accept the client certificate in %s: %s", self._directory, applied.error)
        self._export()

    def _export(self) -> None:
        invalid = bool(self._file_error or self._envoy_error)
        gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(ENGINES).set(invalid)


def read_identity(directory: Path) -> TlsIdentity | InvalidCertificate:
    """Returns the identity in the directory, or what is wrong with it."""
    try:
        return load_identity(directory)
    except InvalidCertificate as error:
        return error
