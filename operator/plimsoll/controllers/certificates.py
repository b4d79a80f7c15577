"""The operator's certificates other than the webhook's, as metrics."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from plimsoll.adapters.internal_tls import IdentityWatch
from plimsoll.api.contract import internal_tls_name
from plimsoll.controllers.isolation import ObjectErrors, supervise
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.telemetry import operator_metrics

INTERNAL: Final = "internal"  # values of the metrics' label
KEDA_SCALER: Final = "keda-scaler"


class OperatorIdentity(IdentityWatch):
    """The certificate by which gateways and engines know the operator."""

    def export(self) -> None:
        """Export metrics."""
        export(INTERNAL, None if self.identity is None else self.identity.pair.expires_s, self.problem)


@contextlib.asynccontextmanager
async def internal_identity(config: OperatorConfig) -> AsyncIterator[Callable[[], ssl.SSLContext | None]]:
    """Follow the certificate of internalTls.secretName meanwhile, if any. Yields the context of its clients."""
    settings = config.platform.internal_tls
    if settings is None:
        yield lambda: None
        return
    watch = OperatorIdentity(Path(settings.certificate_directory), internal_tls_name(config.namespace))
    watch.take(await asyncio.to_thread(watch.read))
    task = asyncio.create_task(supervise("certificate of internalTls.secretName", watch.follow, ObjectErrors()))
    try:
        yield lambda: None if watch.identity is None else watch.identity.client
    finally:
        task.cancel()
        await asyncio.wait((task,))


def export(certificate: str, expires_s: float | None, problem: str) -> None:
    """Export the state of a certificate. expires_s: of the one in use, None without one."""
    operator_metrics.OPERATOR_CERTIFICATE_INVALID.labels(certificate).set(bool(problem))
    if expires_s is not None:
        operator_metrics.OPERATOR_CERTIFICATE_EXPIRY.labels(certificate).set(expires_s)


def remove(certificate: str) -> None:
    """Remove the series of a certificate that this process does not use any more."""
    for gauge in (operator_metrics.OPERATOR_CERTIFICATE_INVALID, operator_metrics.OPERATOR_CERTIFICATE_EXPIRY):
        gauge.remove_by_labels({"certificate": certificate})
