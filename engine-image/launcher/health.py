"""The launcher's own port: readiness, liveness and metrics of the pod.

Problem: vLLM's /health is 200 before anything is compiled and while it drains, so it is no readiness probe. Idea: a
server of four paths that responds from the launcher's own state. /metrics has the launcher's metrics and then vLLM's
text, so that one scrape of one port has both and the API port stays closed to scrapers. /about describes the engine and
its start-up progress from stored facts, so it never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from launcher.contract import Contract
from launcher.startup_phases import StartupPhases
from launcher.tls import CertificateStatus, EngineTls

REQUEST_SECONDS = 5.0  # for the TLS handshake, for a request, and for the client to read the response
MAX_CONNECTIONS = 128  # a further one replaces the oldest
MAX_HEADER_BYTES = 16384
TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JSON_CONTENT_TYPE = "application/json"


@dataclass
class EngineStatus:
    """The launcher's view of its engine.

    It is ready when warmed up, making progress, and neither dead, draining nor scaling. leaving: the pod is being
    deleted; draining: the engine takes no request any more; scaling: it says that it changes its number of engines.
    silent_s: seconds since the last sign of progress; stalled and hung: it is too long for requests, and for a restart.
    """

    warm: bool = False
    dead: bool = False
    leaving: bool = False
    draining: bool = False
    stalled: bool = False
    hung: bool = False
    scaling: bool = False
    silent_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether the pod may get requests."""
        return self.warm and not self.dead and not self.draining and not self.stalled and not self.scaling

    @property
    def live(self) -> bool:
        """Whether a restart would not help: the engine makes progress, starts, or drains in time."""
        return not self.hung or not self.warm or self.draining

    @property
    def state_name(self) -> str:
        """The state in one word, for people."""
        if self.draining:
            return "draining"
        if self.dead:
            return "unreachable"
        if not self.warm:
            return "starting"
        if self.scaling:
            return "scaling"
        return "stalled" if self.stalled else "ready"


def render_metrics(
    contract: Contract,
    status: EngineStatus,
    phases: StartupPhases,
    adapters: list[dict[str, Any]] | None = None,
    certificate: CertificateStatus | None = None,
) -> str:
    """Return the launcher's own metrics in Prometheus' text format."""
    names = contract.metrics
    lines = [
        f"# HELP {names['ready']} 1 while this engine may get requests.",
        f"# TYPE {names['ready']} gauge",
        f"{names['ready']} {int(status.ready)}",
        f"# HELP {names['draining']} 1 while this engine's pod is being deleted.",
        f"# TYPE {names['draining']} gauge",
        f"{names['draining']} {int(status.leaving)}",
        f"# HELP {names['no_progress']} Seconds since the engine core last answered that it makes progress.",
        f"# TYPE {names['no_progress']} gauge",
        f"{names['no_progress']} {status.silent_s:.1f}",
        f"# HELP {names['startup_phase']} Seconds that a phase of this start took; phases add up to the whole.",
        f"# TYPE {names['startup_phase']} gauge",
    ]
    lines += [
        f'{names["startup_phase"]}{{phase="{phase}"}} {seconds:.3f}' for phase, seconds in phases.seconds().items()
    ]
    name = names["adapter_loaded"]
    lines += [f"# HELP {name} 1 if the engine has loaded the LoRA adapter.", f"# TYPE {name} gauge"]
    lines += [f'{name}{{adapter="{one["name"]}"}} {int(one["loaded"])}' for one in adapters or ()]
    if certificate is not None:
        expiry, invalid = names["certificate_expiry"], names["certificate_invalid"]
        lines += [
            f"# HELP {expiry} End of the validity of the certificate that this engine uses, as Unix time.",
            f"# TYPE {expiry} gauge",
            *([f"{expiry} {certificate.expires_s:.0f}"] if certificate.expires_s else []),
            f"# HELP {invalid} 1 while the Secret holds no certificate that can be used; the one before stays.",
            f"# TYPE {invalid} gauge",
            f"{invalid} {int(certificate.is_invalid)}",
        ]
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class HealthServer:
    """Serves the launcher's port.

    scrape_engine: returns vLLM's metrics, or nothing without a response. engine_info: returns the document of /about at
    once. tls: None for plain HTTP. With it, /about needs a certificate of the operator; the kubelet has none, and
    Prometheus needs none.
    """

    contract: Contract
    status: EngineStatus
    phases: StartupPhases
    scrape_engine: Callable[[], Awaitable[bytes]]
    engine_info: Callable[[], bytes]
    adapters: Callable[[], list[dict[str, Any]]] = list
    tls: EngineTls | None = None
    _open: dict[asyncio.StreamWriter, None] = field(default_factory=dict, init=False)  # the oldest first

    async def start(self, port: int) -> asyncio.Server:
        """Listen on all addresses (IPv6 too if available); the caller closes the server."""
        context = None if self.tls is None else self.tls.listener()
        names = () if context is None else ("ssl_handshake_timeout", "ssl_shutdown_timeout")
        times = dict.fromkeys(names, REQUEST_SECONDS)
        return await asyncio.start_server(self._serve, None, port, limit=MAX_HEADER_BYTES, ssl=context, **times)

    async def respond(self, path: str) -> tuple[int, bytes]:
        """Return status code and body for a path."""
        paths = self.contract.paths
        if path == paths["ready"]:
            return (200 if self.status.ready else 503), self.status.state_name.encode()
        if path == paths["live"]:
            return (200 if self.status.live else 503), self.status.state_name.encode()
        if path == paths["metrics"]:
            return 200, self._own_metrics() + await self.scrape_engine()
        if path == paths["about"]:
            return 200, self.engine_info()
        return 404, b"not found"

    def _own_metrics(self) -> bytes:
        certificate = None if self.tls is None else self.tls.status
        return render_metrics(self.contract, self.status, self.phases, self.adapters(), certificate).encode()

    def _may_read(self, path: str, certificate: Any) -> bool:
        return path != self.contract.paths["about"] or self.tls is None or self.tls.is_release(certificate)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. A connection is closed at the end whatever happens, and at once if it is slow."""
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                await self._answer(head, writer)
                async with asyncio.timeout(REQUEST_SECONDS):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        request_line = head.split(b" ", 2)
        target = request_line[1].decode("latin-1") if len(request_line) == 3 else ""
        path = target.split("?", 1)[0]
        code, body = 403, b"this page needs a client certificate of the operator"
        if self._may_read(path, writer.get_extra_info("peercert")):
            code, body = await self.respond(path)
        content_type = JSON_CONTENT_TYPE if path == self.contract.paths["about"] else TEXT_CONTENT_TYPE
        lines = f"HTTP/1.1 {code} -\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close"
        writer.write(lines.encode() + b"\r\n\r\n" + (b"" if request_line[0] == b"HEAD" else body))
