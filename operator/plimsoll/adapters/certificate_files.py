"""A server certificate and its key in a directory, as a mounted Secret of type kubernetes.io/tls has them.

Problem: the kubelet replaces both files together, by a swap of the link `..data`. A reader that opens one file before
the swap and the other one after it gets a pair that does not match.

Idea: resolve the link once and read both files from the directory that it names. That directory never changes.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

CERTIFICATE_FILE: Final = "tls.crt"
AUTHORITY_FILE: Final = "ca.crt"
KEY_FILE: Final = "tls.key"
MAX_FILE_BYTES: Final = 1 << 20  # a Secret is not larger
_DATA_LINK: Final = "..data"  # of a mounted Secret
_INTEGER, _UTC_TIME, _VERSION = 0x02, 0x17, 0xA0  # tags of DER


class InvalidCertificate(ValueError):
    """A certificate or key that cannot be used. The message names the file."""


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """A certificate chain and its private key in PEM. `expires_s` is the end of its validity as Unix time.

    `directory` has its files. It is gone soon after the Secret changed.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    expires_s: float
    directory: Path = field(compare=False)

    @property
    def expires(self) -> str:
        """`expires_s` for people."""
        return datetime.fromtimestamp(self.expires_s, UTC).isoformat()

    def load_into(self, context: ssl.SSLContext) -> None:
        """Let new connections of this context have the pair. Raises InvalidCertificate."""
        try:
            context.load_cert_chain(self.directory / CERTIFICATE_FILE, self.directory / KEY_FILE, _refuse_password)
        except ssl.SSLError as error:
            reason = (error.reason or str(error)).lower().replace("_", " ")
            raise InvalidCertificate(f"{CERTIFICATE_FILE} and {KEY_FILE} cannot be used together: {reason}") from error
        except OSError as error:
            raise InvalidCertificate(f"{self.directory} cannot be read: {error.strerror}") from error


def load_authority(directory: Path) -> bytes:
    """The authority's certificates in PEM. Raises InvalidCertificate."""
    try:
        authority = read_file(directory, AUTHORITY_FILE)
        ssl.create_default_context(cadata=pem_text(authority))
    except (ssl.SSLError, ValueError) as error:
        if isinstance(error, InvalidCertificate):
            raise
        raise InvalidCertificate(f"{AUTHORITY_FILE} has no certificate of an authority: {error}") from error
    return authority


def pem_text(content: bytes) -> str:
    """The certificates in a file as ASCII, as `ssl` takes them. Only comments have other characters.

    It is not empty: with empty text, `ssl` would trust the authorities of the system.
    """
    return content.decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?")


def load_pair(directory: Path) -> CertificatePair:
    """Read the pair and check that key and certificate belong together. Raises InvalidCertificate.

    A pair that has expired is valid here.
    """
    source = resolved(directory)
    certificate, key = (read_file(source, name) for name in (CERTIFICATE_FILE, KEY_FILE))
    pair = CertificatePair(certificate, key, expiry_s(pem_text(certificate)), source)
    pair.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    if (certificate, key) != (read_file(source, CERTIFICATE_FILE), read_file(source, KEY_FILE)):
        raise InvalidCertificate(f"{CERTIFICATE_FILE} or {KEY_FILE} changed while they were read")
    return pair


def resolved(directory: Path) -> Path:
    """Return the directory that the kubelet does not change."""
    link = directory / _DATA_LINK
    return link.resolve() if link.exists() else directory


def read_file(directory: Path, name: str) -> bytes:
    """Return the content of a file. Raises InvalidCertificate if it is empty or cannot be read."""
    try:
        with (directory / name).open("rb") as file:
            content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidCertificate(f"{name} cannot be read: {error.strerror}") from error
    if not content.strip():
        raise InvalidCertificate(f"{name} is empty")
    return content


def _refuse_password() -> str:
    """Called for an encrypted key only; OpenSSL would ask for its password on the terminal."""
    raise InvalidCertificate(f"{KEY_FILE} is encrypted: store it without a password")


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
