"""Mutual TLS of an engine: files for vLLM, the launcher's own port, and the context of a client that engines accept.

Problem: vLLM watches its certificate files, but a mounted Secret consists of links that are swapped. A watch sees the
first swap only. And a Secret that is broken must not replace a certificate that works.

Idea: the launcher checks the mounted files each few seconds by a handshake with themselves, since every engine is
server and client of its namespace. It writes what it can use into files of its own, in place. vLLM
(`--enable-ssl-refresh`) loads them for new connections, and open ones go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import vllm
from launcher.contract import Contract
from launcher.settings import SettingsError, TlsSettings

CERTIFICATE, KEY, AUTHORITY = FILES = ("tls.crt", "tls.key", "ca.crt")
DATA_LINK = "..data"  # of a mounted Secret
READ_SECONDS = 2.0
MIN_VERSION = ssl.TLSVersion.TLSv1_2
MAX_FLIGHTS = 4  # messages of each side until a handshake is over

log = logging.getLogger("launcher")

Content = dict[str, bytes]


class InvalidSecret(ValueError):
    """The Secret cannot be used; the message names the key."""


@dataclass
class CertificateStatus:
    """Until when the certificate in use is valid, as Unix time, and whether the Secret holds none that is usable."""

    expires_s: float = 0.0
    is_invalid: bool = False


@dataclass(frozen=True)
class EngineTls:
    """`source` is the mounted Secret, and `target` the folder of the files that the engine reads."""

    settings: TlsSettings
    source: Path
    target: Path
    status: CertificateStatus = field(default_factory=CertificateStatus)

    @classmethod
    def of(cls, settings: TlsSettings | None, contract: Contract) -> EngineTls | None:
        """Return None for plain HTTP."""
        if settings is None:
            return None
        return cls(settings, Path(contract.paths["tls"]), Path(contract.paths["state"]) / "tls")

    def prepare(self) -> None:
        """Write the files for the engine's start. Raises SettingsError with the name of the Secret."""
        try:
            content, _ = self._read()
        except InvalidSecret as error:
            raise SettingsError(
                f"engines require TLS, but Secret {self.settings.secret} has no usable certificate: {error}"
            ) from None
        try:
            self.target.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._write(content)
        except OSError as error:
            raise SettingsError(
                f"Secret {self.settings.secret} cannot be written to {self.target}: {error.strerror}"
            ) from None

    async def follow(self, seconds: float = READ_SECONDS) -> None:
        """Write what has changed and can be used. Never returns."""
        reported = ""
        while True:
            problem = ""
            try:
                await asyncio.to_thread(self.update)
            except (InvalidSecret, OSError) as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001  whatever it is, the next Secret may be right
                problem = repr(error)
            self.status.is_invalid = bool(problem)
            if problem and problem != reported:
                log.error("Secret %s: %s; the certificate before stays", self.settings.secret, problem)
            reported = problem
            await asyncio.sleep(seconds)

    def update(self) -> None:
        """Write what has changed. Raises InvalidSecret, or OSError for a full disk."""
        content, expires_s = self._read()
        if any((self.target / name).read_bytes() != content[name] for name in FILES):
            self._write(content)
            log.info("Secret %s: a new certificate is used", self.settings.secret)
        self.status.expires_s = expires_s

    def arguments(self) -> list[str]:
        """Return vLLM's flags."""
        return [
            *(vllm.SSL_KEY_FILE, str(self.target / KEY)),
            *(vllm.SSL_CERTIFICATE_FILE, str(self.target / CERTIFICATE)),
            *(vllm.SSL_AUTHORITY_FILE, str(self.target / AUTHORITY)),
            *(vllm.SSL_CLIENT_CERTIFICATE, str(int(ssl.CERT_REQUIRED))),
            vllm.SSL_REFRESH,
        ]

    def client(self) -> tuple[ssl.SSLContext, str]:
        """Return the context of a client of an engine of this namespace, and the name in the engine's certificate."""
        return _client_context(self.target, self._written(), True), self.settings.name

    def loopback(self) -> ssl.SSLContext:
        """Return the context of a client of the engine in this pod, whose certificate needs no check.

        Raises SSLError while the files are written.
        """
        return _client_context(self.target, self._written(), False)

    def listener(self) -> ssl.SSLContext:
        """Return the context of the launcher's own port, whose connections have the certificate of their moment.

        A client without a certificate is accepted, such as the kubelet: `is_release` says whose it is.
        """
        listener, latest = _for_pages(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)), list[ssl.SSLContext]()

        def select(connection: ssl.SSLObject, _server_name: str | None, _listener: ssl.SSLContext) -> int | None:
            with contextlib.suppress(ssl.SSLError, OSError):  # while the files are written, the one before
                latest[:] = [_page_context(self.target, self._written())]
            if not latest:
                return int(ssl.ALERT_DESCRIPTION_INTERNAL_ERROR)
            connection.context = latest[0]
            return None

        listener.sni_callback = select  # called for clients without a server name too
        return listener

    def is_release(self, certificate: Any) -> bool:
        """Whether a verified certificate, as `getpeercert` returns it, is that of the operator and the gateways."""
        return ("DNS", self.settings.release) in (certificate or {}).get("subjectAltName", ())

    def _written(self) -> tuple[int, ...]:
        return tuple((self.target / name).stat().st_mtime_ns for name in FILES)

    def _read(self) -> tuple[Content, float]:
        """Return files that peers with the same authority accept, and until when. Raises InvalidSecret."""
        link = self.source / DATA_LINK
        folder = link.resolve() if link.exists() else self.source
        try:
            content = {name: (folder / name).read_bytes() for name in FILES}
        except OSError as error:
            raise InvalidSecret(f"{Path(str(error.filename)).name}: {error.strerror}") from None
        try:
            server, client = _context(ssl.PROTOCOL_TLS_SERVER, folder), _context(ssl.PROTOCOL_TLS_CLIENT, folder)
        except (ssl.SSLError, OSError) as error:
            reason = str(getattr(error, "reason", None) or error).lower().replace("_", " ")
            raise InvalidSecret(f"{', '.join(FILES)} cannot be used together: {reason}") from None
        server.verify_mode = ssl.CERT_REQUIRED
        return content, _check_handshake(server, client, self.settings.name)

    def _write(self, content: Content) -> None:
        """Write in place, the certificate last. A replaced file would end vLLM's watch of it."""
        for name in (AUTHORITY, KEY, CERTIFICATE):
            number = os.open(self.target / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(number, "wb") as file:
                file.write(content[name])


def _check_handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> float:
    """Let client and server of one certificate meet in memory; returns when it expires. Raises InvalidSecret."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    ends = {
        "server": caller,
        "client": server.wrap_bio(to_server, to_client, server_side=True),
    }
    for _ in range(MAX_FLIGHTS):
        for peer, end in ends.items():  # each end verifies its peer
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or str(error)
                raise InvalidSecret(f"{CERTIFICATE} is not valid for a {peer}: {reason}") from None
    certificate = caller.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


@functools.lru_cache(maxsize=2)
def _client_context(folder: Path, _written: tuple[int, ...], verifies: bool) -> ssl.SSLContext:
    """Return the context of the files as they were written."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, folder)
    if not verifies:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@functools.lru_cache(maxsize=2)
def _page_context(folder: Path, _written: tuple[int, ...]) -> ssl.SSLContext:
    """Return the context of the launcher's port with the files as they were written."""
    return _for_pages(_context(ssl.PROTOCOL_TLS_SERVER, folder))


def _for_pages(context: ssl.SSLContext) -> ssl.SSLContext:
    """Set up a server for clients with and without certificates.

    With TLS 1.3 and no tickets, no client resumes a session that outlives its authority.
    """
    context.minimum_version, context.verify_mode, context.num_tickets = ssl.TLSVersion.TLSv1_3, ssl.CERT_OPTIONAL, 0
    return context


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = MIN_VERSION
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, _refuse_password)
    context.load_verify_locations(folder / AUTHORITY)
    return context


def _refuse_password() -> str:
    """Called for an encrypted key only; OpenSSL would ask for its password on the terminal."""
    raise ssl.SSLError("the key is encrypted")
