"""TLS of a gRPC server: the certificate of a mounted Secret, read again when it changes.

Problem: clients keep their connections for ever, and a restart of the listener would end them at each rotation.

Idea: gRPC asks for the certificate at each new connection. So a rotation needs no restart, and breaks no connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import grpc

from plimsoll.adapters.certificate_files import CertificatePair, InvalidCertificate, load_authority, load_pair
from plimsoll.telemetry.service_log import ServiceLog

CHECK_SECONDS: Final = 10.0  # between two looks at the files
WAIT_SECONDS: Final = 5.0  # the same, while there is no certificate

_Files: TypeAlias = "tuple[CertificatePair, bytes | None]"  # the pair, and the authority of clients

log = ServiceLog(__name__)


class ServerCredentials:
    """Credentials from the files in a directory. check_s: seconds between two looks at them."""

    def __init__(
        self,
        directory: Path,
        require_client_certificate: bool,
        check_s: float = CHECK_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
        report: Callable[[float | None, str], None] = lambda expires_s, problem: None,
    ) -> None:
        """require_client_certificate: accept only clients with a certificate of the authority in `ca.crt`.

        report: called after each look with the end of the validity of the certificate in use, Unix time, None without
        one, and with what is wrong with the files.
        """
        self._report = report
        self._directory = directory
        self._require_client_certificate = require_client_certificate
        self._check_s = check_s
        self._monotonic = monotonic
        self._files: _Files | None = None
        self._next_check_s = 0.0
        self._problem = ""

    async def wait(self, interval_s: float = WAIT_SECONDS) -> grpc.ServerCredentials:
        """Return the credentials once there is a certificate. There is no plaintext meanwhile."""
        while True:
            first = self._changed(await asyncio.to_thread(self._load))
            if first is not None:
                return grpc.dynamic_ssl_server_credentials(first, self._fetch, self._require_client_certificate)
            await asyncio.sleep(interval_s)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificate; None to keep the present one. gRPC calls it for each new connection."""
        now_s = self._monotonic()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + self._check_s
        return self._changed(self._load())

    async def follow(self) -> None:
        """Look at the files without end, so that `report` knows them while no client connects."""
        while True:
            await asyncio.sleep(self._check_s)
            self._show(await asyncio.to_thread(self._load))

    def _changed(self, found: _Files | InvalidCertificate) -> grpc.ServerCertificateConfiguration | None:
        """The files as a configuration; None if they are as before, or cannot be used."""
        self._show(found)
        if isinstance(found, InvalidCertificate) or found == self._files:
            return None
        self._files = found
        log.info(None, "certificate of the gRPC server loaded")
        return grpc.ssl_server_certificate_configuration([(found[0].key, found[0].certificate)], found[1])

    def _load(self) -> _Files | InvalidCertificate:
        """The files, or what is wrong with them."""
        try:
            pair = load_pair(self._directory)
            return pair, load_authority(pair.directory) if self._require_client_certificate else None
        except InvalidCertificate as error:
            return error

    def _show(self, found: _Files | InvalidCertificate) -> None:
        """Report the files, and log each problem with them once."""
        before, self._problem = self._problem, str(found) if isinstance(found, InvalidCertificate) else ""
        if self._problem and self._problem != before:
            directory = str(self._directory)
            log.warning(
                None, "cannot read the certificate of the gRPC server", error=self._problem, directory=directory
            )
        used = self._files if isinstance(found, InvalidCertificate) else found
        self._report(None if used is None else used[0].expires_s, self._problem)
