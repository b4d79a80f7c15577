"""The webhook's certificate, from the files of a mounted Secret, read again when they change."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from plimsoll.telemetry import metrics
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
RETRY_SECONDS: Final = 5.0  # while there is no certificate
_INTEGER, _UTC_TIME, _VERSION = 0x02, 0x17, 0xA0  # tags of DER


class InvalidCertificate(ValueError):
    """A certificate, or its key, that cannot be read; the message names the file."""


class CertificateFiles:
    """Loads certificate and key into a TLS context. New connections then have them; no listener is restarted."""

    def __init__(self, directory: Path) -> None:
        self._certificate, self._key = directory / CERTIFICATE_FILE, directory / KEY_FILE
        self._digest = b""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    async def load(self) -> bool:
        """Load the files if they have changed. Returns whether the context has a certificate.

        Files that are missing or invalid are logged, and the certificate of before stays in use.
        """
        try:
            await asyncio.to_thread(self._load)
        except (OSError, InvalidCertificate) as error:  # an SSLError is an OSError
            log.warning(None, "cannot read the webhook's certificate", error=str(error), file=str(self._certificate))
        return bool(self._digest)

    async def wait(self) -> None:
        """Return once there is a certificate."""
        while True:
            if await self.load():
                return
            await asyncio.sleep(RETRY_SECONDS)

    def _load(self) -> None:
        certificate, key = self._certificate.read_bytes(), self._key.read_bytes()
        digest = hashlib.sha256(certificate + key).digest()
        if digest == self._digest:
            return
        expires_s = expiry_s(certificate.decode("ascii", "replace"))
        self.context.load_cert_chain(self._certificate, self._key)
        self._digest = digest
        metrics.OPERATOR_WEBHOOK_CERTIFICATE_EXPIRY.set(expires_s)
        log.info(None, "webhook certificate loaded", expires=datetime.fromtimestamp(expires_s, UTC).isoformat())


def expiry_s(pem: str) -> float:
    """Return the end of the validity of the first certificate, seconds since the epoch. Raises InvalidCertificate.

    The standard library decodes only the certificates of peers. Validity is the fifth field of a certificate (RFC 5280,
    4.1), after the optional version, the serial number, the algorithm and the issuer.
    """
    begin, end = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[begin : end + len(ssl.PEM_FOOTER)] if begin >= 0 else pem)
        _, at, _ = _element(der, 0)  # Certificate
        _, at, _ = _element(der, at)  # TBSCertificate
        if der[at] == _VERSION:
            _, _, at = _element(der, at)
        if der[at] != _INTEGER:
            raise ValueError("no serial number")
        for _ in range(3):
            _, _, at = _element(der, at)
        _, at, _ = _element(der, at)  # Validity
        _, _, at = _element(der, at)  # notBefore
        tag, begin, end = _element(der, at)
        year = "%y" if tag == _UTC_TIME else "%Y"
        return datetime.strptime(der[begin:end].decode("ascii"), f"{year}%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (ValueError, IndexError) as error:
        raise InvalidCertificate(f"{CERTIFICATE_FILE} holds no X.509 certificate in PEM: {error}") from error


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at `at`, and the begin and end of its content."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & 0x80:
        digits = length & 0x7F
        length, begin = int.from_bytes(der[begin : begin + digits], "big"), begin + digits
    return tag, begin, begin + length
