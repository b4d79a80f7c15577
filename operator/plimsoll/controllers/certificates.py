"""The operator's certificates other than the webhook's, as metrics."""

from __future__ import annotations

from typing import Final

from plimsoll.adapters.internal_tls import IdentityWatch
from plimsoll.telemetry import operator_metrics

INTERNAL: Final = "internal"  # values of the metrics' label
KEDA_SCALER: Final = "keda-scaler"


class OperatorIdentity(IdentityWatch):
    """The certificate by which gateways and engines know the operator."""

    def export(self) -> None:
        """Export metrics."""
        export(INTERNAL, None if self.identity is None else self.identity.pair.expires_s, self.problem)


def export(certificate: str, expires_s: float | None, problem: str) -> None:
    """Export the state of a certificate. expires_s: of the one in use, None without one."""
    operator_metrics.OPERATOR_CERTIFICATE_INVALID.labels(certificate).set(bool(problem))
    if expires_s is not None:
        operator_metrics.OPERATOR_CERTIFICATE_EXPIRY.labels(certificate).set(expires_s)
