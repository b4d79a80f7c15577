"""The gateway's own certificate inside the cluster: read from the mounted Secret, checked, and delivered to Envoy.

Problem: a rotation must fail no request, and a Secret that is broken must not replace a certificate that works.

Idea: the picker reads the files each second, and uses and delivers only what peers accept. Envoy takes certificate and
authority for new connections to engines, each by itself, and says so. What it has outlives a picker that can read
neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from plimsoll.adapters.internal_tls import IdentityWatch, TlsIdentity
from plimsoll.gateway.envoy.delta import AppliedCertificate
from plimsoll.gateway.envoy.tls import ENGINE_AUTHORITY, ENGINE_CERTIFICATE
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

INTERNAL: Final = "internal"  # a value of the metrics' label
RESOURCES: Final = frozenset({ENGINE_CERTIFICATE, ENGINE_AUTHORITY})


class InternalIdentityWatch(IdentityWatch):
    """Follows the identity of one gateway. `publish` delivers it to Envoy."""

    def __init__(self, directory: Path, name: str, publish: Callable[[TlsIdentity], None]) -> None:
        super().__init__(directory, name)
        self._publish = publish
        self._envoy_errors: dict[str, str] = {}  # by resource
        self._applied: set[str] = set()  # resources that Envoy has, be they earlier ones
        self._used: TlsIdentity | None = None  # of which Envoy has the certificate

    @property
    def not_ready_reason(self) -> str:
        """Why Envoy cannot reach engines that require a certificate, "" if it can.

        Envoy asks for it with its first cluster, which it uses only once it has it. Without a service none is missing.
        """
        problem = self.problem or "not read yet" if self.identity is None else ". ".join(self._problems())
        if self._applied == RESOURCES or not problem:
            return ""
        return f"the Secret of internalTls.secretName holds no certificate that can be used: {problem}"

    def on_new(self, before: TlsIdentity | None, found: TlsIdentity) -> None:
        """Publish a new identity."""
        super().on_new(before, found)
        if before is None or before.pair != found.pair:  # else Envoy answers no more about it
            self._envoy_errors.pop(ENGINE_CERTIFICATE, None)
        if before is None or before.authority != found.authority:
            self._envoy_errors.pop(ENGINE_AUTHORITY, None)
        self._publish(found)

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
                self._used = self.identity
        self.export()

    def _problems(self) -> list[str]:
        return [f"Envoy does not accept {name}: {error}" for name, error in sorted(self._envoy_errors.items())]

    def export(self) -> None:
        """Export the earlier end of what picker and Envoy use."""
        invalid = bool(self.problem or self._envoy_errors)
        gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(INTERNAL).set(invalid)
        ends_s = [one.pair.expires_s for one in (self.identity, self._used) if one is not None]
        if ends_s:
            gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(INTERNAL).set(min(ends_s))
