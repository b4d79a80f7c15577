"""The webhook's certificate, from the files of a mounted Secret, read again when they change."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, CertificatePair, InvalidCertificate, load_pair
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)


class CertificateFiles:
    """Loads certificate and key into a TLS context. New connections then have them; no listener is restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pair: CertificatePair | None = None
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    async def load(self) -> bool:
        """Load the files if they have changed. Returns whether the context has a certificate.

        Files that are missing or invalid are logged, and the certificate of before stays in use.
        """
        try:
            await asyncio.to_thread(self._load)
        except InvalidCertificate as error:
            file = str(self._directory / CERTIFICATE_FILE)
            log.warning(None, "cannot read the webhook's certificate", error=str(error), file=file)
        return self._pair is not None

    async def wait(self, interval_s: float) -> None:
        """Return once there is a certificate. interval_s: seconds between two looks at the files."""
        while True:
            if await self.load():
                return
            await asyncio.sleep(interval_s)

    def _load(self) -> None:
        pair = load_pair(self._directory)
        if pair == self._pair:
            return
        pair.load_into(self.context)
        self._pair = pair
        operator_metrics.OPERATOR_WEBHOOK_CERTIFICATE_EXPIRY.set(pair.expires_s)
        log.info(None, "webhook certificate loaded", expires=datetime.fromtimestamp(pair.expires_s, UTC).isoformat())
