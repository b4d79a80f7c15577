"""Mutual TLS between operator, gateways and engines: one Secret of the release, and one rule for all connections.

Problem: pods have addresses that no certificate can name, their namespaces do not trust each other, and a Secret is
renewed while connections are open.

Idea: one authority signs a certificate for each namespace of services and one for the release. A peer is verified by
the authority and by the name of its namespace: `plimsoll-engine.NAMESPACE.svc` for engines, and
`plimsoll-internal.NAMESPACE.svc` for operator and gateways, where NAMESPACE is the release's. The files are read again
each second. A Secret that is new is used for new connections, and open ones go on. One that cannot be used is reported,
and the one before stays.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from plimsoll.adapters.certificate_files import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    CertificatePair,
    InvalidCertificate,
    load_authority,
    load_pair,
    pem_text,
    read_file,
    resolved,
)
from plimsoll.telemetry.service_log import ServiceLog

READ_SECONDS: Final = 1.0  # between two reads of the files; the kubelet takes a minute to write them
# Only pods of Plimsoll, the kubelet and Prometheus connect. In TLS 1.3 a server can let no client resume a session,
# which would outlive the authority of the client.
_SERVER_VERSION: Final = ssl.TLSVersion.TLSv1_3
_MAX_FLIGHTS: Final = 4  # messages of each side until a handshake is over

log = ServiceLog(__name__)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """A pair, the certificates in PEM of the authorities whose peers are trusted, and the contexts of both sides.

    A server accepts a client without a certificate: `has_name` says whether it has one with a name.
    """

    pair: CertificatePair
    authority: bytes
    client: ssl.SSLContext = field(compare=False, repr=False)
    server: ssl.SSLContext = field(compare=False, repr=False)


def load_identity(directory: Path, name: str, known: TlsIdentity | None = None) -> TlsIdentity:
    """Read pair and authority, and check that peers with this authority accept the pair for `name`.

    Returns `known` if the files are those that it was made of, which costs a tenth. Raises InvalidCertificate.
    """
    source = resolved(directory)
    if known is not None:
        names, before = (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE), known.pair
        if [read_file(source, one) for one in names] == [before.certificate, before.key, known.authority]:
            if before.expires_s <= time.time():
                raise InvalidCertificate(f"{CERTIFICATE_FILE} has expired at {before.expires}")
            return known
    pair, authority = load_pair(source), load_authority(source)
    trusted = pem_text(authority)
    client, server = ssl.create_default_context(cadata=trusted), _server_context()
    server.load_verify_locations(cadata=trusted)
    for context in (client, server):
        pair.load_into(context)
    _check(client, server, name)
    return TlsIdentity(pair, authority, client, server)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _SERVER_VERSION
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0
    return context


def _check(client: ssl.SSLContext, server: ssl.SSLContext, name: str) -> None:
    """Let both sides of one identity meet in memory. Raises InvalidCertificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    ends = {
        f"a server named {name}": client.wrap_bio(to_client, to_server, server_hostname=name),
        f"a client of servers with {AUTHORITY_FILE}": server_end,
    }
    for _ in range(_MAX_FLIGHTS):
        for peer, end in ends.items():  # each end verifies its peer
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise InvalidCertificate(f"{CERTIFICATE_FILE} is not valid for {peer}: {tls_reason(error)}") from error
    if not has_name(server_end.getpeercert(), name):  # a wildcard is enough for clients alone
        raise InvalidCertificate(f"{CERTIFICATE_FILE} is not valid for servers, which look for the DNS name {name}")


def tls_reason(error: ssl.SSLError) -> str:
    """Why a handshake failed, in OpenSSL's words."""
    return getattr(error, "verify_message", "") or (error.reason or str(error)).lower().replace("_", " ")


def has_name(certificate: Any, name: str) -> bool:
    """Whether a verified certificate, as `getpeercert` returns it, has the DNS name. False without a certificate."""
    return ("DNS", name) in (certificate or {}).get("subjectAltName", ())


def listener_context(current: Callable[[], TlsIdentity | None]) -> ssl.SSLContext:
    """Returns the context of a listener whose connections have the identity of the moment at which they are opened.

    Without one, no handshake succeeds.
    """
    listener = _server_context()

    def select(connection: ssl.SSLObject, _server_name: str | None, _listener: ssl.SSLContext) -> int | None:
        identity = current()
        if identity is None:
            return int(ssl.ALERT_DESCRIPTION_INTERNAL_ERROR)
        connection.context = identity.server
        return None

    listener.sni_callback = select  # called for clients without a server name too
    return listener


class IdentityWatch:
    """The identity in a mounted Secret. Keep it up to date with `follow`."""

    def __init__(self, directory: Path, name: str) -> None:
        """name: in the certificate."""
        self._directory = directory
        self._name = name
        self.identity: TlsIdentity | None = None
        self.problem = ""  # why the files cannot be used

    async def follow(self) -> None:
        """Keep the identity in sync with the files. Never returns."""
        while True:
            self.take(await asyncio.to_thread(self.read))
            await asyncio.sleep(READ_SECONDS)

    def read(self) -> TlsIdentity | InvalidCertificate:
        """Returns the identity in the files, or what is wrong with it."""
        try:
            return load_identity(self._directory, self._name, self.identity)
        except InvalidCertificate as error:
            return error

    def take(self, found: TlsIdentity | InvalidCertificate) -> None:
        """Use an identity that is new. Keep the one before while the files hold none."""
        problem = str(found) if isinstance(found, InvalidCertificate) else ""
        if problem and problem != self.problem:
            log.warning(
                None, "cannot use the Secret of internalTls.secretName", files=str(self._directory), error=problem
            )
        self.problem = problem
        if isinstance(found, TlsIdentity) and found != self.identity:
            before, self.identity = self.identity, found
            self.on_new(before, found)
        self.export()

    def on_new(self, before: TlsIdentity | None, found: TlsIdentity) -> None:
        """Called with each new identity."""
        log.info(None, "certificate of internalTls.secretName loaded", expires=found.pair.expires)

    def export(self) -> None:
        """Export metrics; called after each read."""
