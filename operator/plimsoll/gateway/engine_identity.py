"""The gateway's client certificate for engines: read from the mounted Secret, checked, and delivered to Envoy.

Problem: a rotation must fail no request, and a Secret that is broken must not replace a certificate that works.

Idea: the picker reads the files each second and delivers only what engines accept. Envoy takes certificate and
authority for new connections, each by itself, and says so. What it has outlives a picker that can read neither.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from plimsoll.adapters.certificate_files import InvalidCertificate, TlsIdentity, load_identity
from plimsoll.gateway.certificate_watch import READ_SECONDS
from plimsoll.gateway.envoy.delta import AppliedCertificate
from plimsoll.gateway.envoy.tls import ENGINE_AUTHORITY, ENGINE_CERTIFICATE
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

ENGINES: Final = "engines"  # a value of the metrics' label
RESOURCES: Final = frozenset({ENGINE_CERTIFICATE, ENGINE_AUTHORITY})


class EngineIdentityWatch:
    """Follows the client certificate of one gateway. `publish` delivers it to Envoy."""

    def __init__(self, directory: Path, publish: Callable[[TlsIdentity], None]) -> None:
        self._directory = directory
        self._publish = publish
        self._identity: TlsIdentity | None = None
        self._file_error = ""
        self._envoy_errors: dict[str, str] = {}  # by resource
        self._applied: set[str] = set()  # resources that Envoy has, be they earlier ones
        self._used: TlsIdentity | None = None  # of which Envoy has the certificate

    @property
    def context(self) -> ssl.SSLContext | None:
        """For the picker's own calls of engines; None while there is no certificate."""
        return None if self._identity is None else self._identity.context

    @property
    def not_ready_reason(self) -> str:
        """Why Envoy cannot reach engines that require a certificate, "" if it can.

        Envoy asks for it with its first cluster, which it uses only once it has it. Without a service none is missing.
        """
        problem = self._file_error or "not read yet" if self._identity is None else ". ".join(self._problems())
        if self._applied == RESOURCES or not problem:
            return ""
        return f"the Secret of gateway.engineTls.secretName holds no certificate that can be used: {problem}"

    async def follow(self) -> None:
        """Keep Envoy's certificate in sync with the files. Never returns."""
        while True:
            self.take(await asyncio.to_thread(self.read))
            await asyncio.sleep(READ_SECONDS)

    def read(self) -> TlsIdentity | InvalidCertificate:
        """Returns the identity in the files, or what is wrong with it."""
        try:
            return load_identity(self._directory, self._identity)
        except InvalidCertificate as error:
            return error

    def take(self, found: TlsIdentity | InvalidCertificate) -> None:
        """Publish an identity that is new. Keep the one before while the files hold none."""
        problem = str(found) if isinstance(found, InvalidCertificate) else ""
        if problem and problem != self._file_error:
            log.error("no client certificate for engines in %s: %s", self._directory, problem)
        self._file_error = problem
        if isinstance(found, TlsIdentity) and found != self._identity:
            before, self._identity = self._identity, found
            if before is None or before.pair != found.pair:  # else Envoy answers no more about it
                self._envoy_errors.pop(ENGINE_CERTIFICATE, None)
            if before is None or before.authority != found.authority:
                self._envoy_errors.pop(ENGINE_AUTHORITY, None)
            self._publish(found)
        self._export()

    def on_applied(self, applied: AppliedCertificate) -> None:
        """Record what Envoy says of the certificate or of the authority."""
        name = applied.name
        if applied.error:
            self._envoy_errors[name] = applied.error
            log.error("Envoy does not accept %s of %s: %s", name, self._directory, applied.error)
        else:
            self._envoy_errors.pop(name, None)
            (self._applied.add if applied.is_present else self._applied.discard)(name)
            if name == ENGINE_CERTIFICATE and applied.is_present and applied.is_current:
                self._use(self._identity)
        self._export()

    def _use(self, identity: TlsIdentity | None) -> None:
        if identity is not None and identity != self._used:
            self._used = identity
            expires = datetime.fromtimestamp(identity.pair.expires_s, UTC).isoformat()
            log.info("Envoy uses the client certificate in %s, which expires at %s", self._directory, expires)

    def _problems(self) -> list[str]:
        return [f"Envoy does not accept {name}: {error}" for name, error in sorted(self._envoy_errors.items())]

    def _export(self) -> None:
        invalid = bool(self._file_error or self._envoy_errors)
        gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(ENGINES).set(invalid)
        if self._used is not None:
            gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(ENGINES).set(self._used.pair.expires_s)
