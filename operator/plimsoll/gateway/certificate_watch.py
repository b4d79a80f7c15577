"""The gateway's certificate: read from the mounted Secret, checked, delivered to Envoy, and its state exported.

Problem: a rotation must fail no request, and a Secret that is broken must not replace a certificate that works.

Idea: the picker reads the files each second and delivers only a pair that TLS can use. Envoy takes it for new
connections, without a restart, and says whether it accepts it. Until it does, the gateway goes on with the certificate
before, and logs and metrics say why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from plimsoll.adapters.certificate_files import CertificatePair, InvalidCertificate, load_pair
from plimsoll.gateway.envoy.delta import AppliedCertificate
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

LISTENER: Final = "listener"  # values of the metrics' label
ENDPOINT_PICKER: Final = "endpoint-picker"
READ_SECONDS: Final = 1.0  # between two reads of the files; the kubelet takes a minute to write them


class CertificateWatch:
    """Follows the certificate of one gateway. `publish` delivers a pair to Envoy."""

    def __init__(self, directory: Path, publish: Callable[[CertificatePair], None]) -> None:
        self._directory = directory
        self._publish = publish
        self._pair: CertificatePair | None = None
        self._file_error = ""
        self._envoy_error = ""
        self._is_served = False
        self._served: CertificatePair | None = None

    @property
    def not_ready_reason(self) -> str:
        """Why Envoy has no certificate, "" if it has one, be it an earlier one."""
        if self._is_served:
            return ""
        problem = self._file_error or self._envoy_error
        if problem:
            return f"the Secret of gateway.tls.secretName holds no certificate that can be used: {problem}"
        return "Envoy has not taken the certificate of gateway.tls.secretName yet"

    async def follow(self) -> None:
        """Keep Envoy's certificate in sync with the files. Never returns."""
        while True:
            self.take(await asyncio.to_thread(self.read))
            await asyncio.sleep(READ_SECONDS)

    def read(self) -> CertificatePair | InvalidCertificate:
        """Returns the pair in the files, or what is wrong with it."""
        return read_pair(self._directory)

    def take(self, found: CertificatePair | InvalidCertificate) -> None:
        """Publish a pair that is new. Keep the one before while the files hold none."""
        problem = str(found) if isinstance(found, InvalidCertificate) else ""
        if problem and problem != self._file_error:
            log.error("no certificate in %s: %s", self._directory, problem)
        self._file_error = problem
        if isinstance(found, CertificatePair) and found != self._pair:
            self._pair, self._envoy_error = found, ""
            self._publish(found)
        self._export()

    def on_applied(self, applied: AppliedCertificate) -> None:
        """Record what Envoy says of its certificate."""
        self._is_served, self._envoy_error = applied.is_present, applied.error
        if applied.error:
            log.error("Envoy does not accept the certificate in %s: %s", self._directory, applied.error)
        elif applied.is_present and applied.is_current and self._pair is not None and self._served != self._pair:
            self._served = self._pair
            expires = datetime.fromtimestamp(self._pair.expires_s, UTC).isoformat()
            log.info("Envoy uses the certificate in %s, which expires at %s", self._directory, expires)
        self._export()

    def _export(self) -> None:
        gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER).set(bool(self._file_error or self._envoy_error))
        if self._served is not None:
            gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(LISTENER).set(self._served.expires_s)


def export_endpoint_picker(expires_s: float | None, problem: str) -> None:
    """Export the state of the endpoint picker's certificate. expires_s: of the one in use, None without one."""
    gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(ENDPOINT_PICKER).set(bool(problem))
    if expires_s is not None:
        gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(ENDPOINT_PICKER).set(expires_s)


def read_pair(directory: Path) -> CertificatePair | InvalidCertificate:
    """Returns the pair in the directory, or what is wrong with it."""
    try:
        return load_pair(directory)
    except InvalidCertificate as error:
        return error
