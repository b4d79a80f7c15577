"""Several gateways' pickers in one process, with real connections between them on loopback, and no Envoy.

Each has an address of its own in 127.0.0.0/8, as pods have. Time is real; what a test waits for are states.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.one_queue.coordinator import OneQueue
from plimsoll.gateway.one_queue.tls_stream import PeerTls
from plimsoll.gateway.picker import Picker, Reply
from plimsoll.gateway.service_catalog import ServiceCatalog
from plimsoll.gateway.settings import PickerSettings, TrustedHeaders
from plimsoll.gateway.signals_document import build_signals
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import Object, build_catalog, split, with_healthy
from tests.gateway.picker_harness import response_headers
from tests.gateway.stack import wait_until
from tests.ports import free_port

SECRET = b"a secret that all gateways share"
ACK_SECONDS = 5.0  # a busy machine must not look like an owner that does not answer


class Gateway:
    """One picker with its `OneQueue`."""

    def __init__(
        self,
        number: int,
        port: int,
        secret_file: Path,
        *,
        ack_seconds: float,
        authenticator: Authenticator | None,
        address: str = "",
        tls: PeerTls | None = None,
    ) -> None:
        self.name, self.address = f"gateway-{number}", address or f"127.0.0.{number + 1}"
        settings = PickerSettings(
            address=self.address,
            pod=self.name,
            peer_secret=secret_file,
            peer_port=port,
            owner_ack_seconds=ack_seconds,
        )
        self.picker = Picker(Random(number), self.name, authenticator or Authenticator(trusted=TrustedHeaders()))
        self.queue = OneQueue(self.picker, settings, self.has_applied, tls)

    def has_applied(self, key: str, address: str) -> bool:
        """Whether this gateway's Envoy knows an engine."""
        service = self.picker.catalog.services.get(key)
        return service is not None and any(e.address == address and e.routable for e in service.endpoints)

    def send(
        self, content: str, model: str = "chat", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> asyncio.Future[bytes]:
        """A request of this content by this gateway's Envoy."""
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **fields})
        given = {name.encode(): value.encode() for name, value in (headers or {}).items()}
        request_id = f"{self.name}-{time.monotonic_ns():x}".encode()
        reply = self.picker.check(body.encode(), {b"x-plimsoll-request-id": request_id} | given, time.monotonic())
        return asyncio.ensure_future(_result(reply))

    async def ask(self, content: str, model: str = "chat", **fields: Any) -> bytes:
        """The reply to a request of this content."""
        return await asyncio.wait_for(self.send(content, model, **fields), 30.0)

    def complete(self, reply: bytes, **record: Any) -> None:
        """The request of this reply ends at the engine that was named first."""
        sent = response_headers(reply)
        host = sent["x-plimsoll-endpoint"].split(",")[0]
        fields = {"request_id": sent["x-plimsoll-request-id"], "upstream": host, "status": 200, "flags": "-"}
        self.picker.reports.on_access_record(AccessRecord(**(fields | record)), time.monotonic())

    def signals(self, key: str = "team/chat") -> dict[str, Any]:
        found: dict[str, Any] = build_signals(self.picker, self.name, synced=True)["services"][key]
        return found

    @property
    def admits(self) -> int:
        """Requests that its own admission counts at engines of team/chat."""
        replicas = self.picker.admission.services["team/chat"].controller.pool.replicas
        return sum(len(replica.running) for replica in replicas.values())


async def _result(reply: Reply) -> bytes:
    return reply if isinstance(reply, bytes) else await reply


class Gateways:
    """A number of gateways over the same objects. Use it as an asynchronous context manager."""

    def __init__(
        self,
        directory: Path,
        count: int,
        *services: Object,
        pods: tuple[Object, ...] = (),
        ack_seconds: float = ACK_SECONDS,
        authenticator: Authenticator | None = None,
        tls: Sequence[PeerTls | None] | None = None,
    ) -> None:
        self.port = free_port()
        self._secret_file = secret_file = directory / "secret"
        self._ack_seconds, self._authenticator = ack_seconds, authenticator
        secret_file.write_bytes(SECRET)
        self.all = [
            Gateway(number, self.port, secret_file, ack_seconds=ack_seconds, authenticator=authenticator, tls=own)
            for number, own in enumerate(tls or [None] * count)
        ]
        self.ready = list(self.all)
        self._existing = list(self.all)
        self.set_objects(*services, pods=pods)

    async def __aenter__(self) -> Gateways:
        for gateway in self.all:
            await gateway.queue.start()
        await self.set_ready(*self.all)
        return self

    async def __aexit__(self, *_: object) -> None:
        for gateway in self.all:
            gateway.queue.close()
        await asyncio.sleep(0.01)

    def set_objects(self, *services: Object, pods: tuple[Object, ...] = ()) -> None:
        """These are the objects from now on, and all Envoys reach all ready engines."""
        catalog = make_catalog(services, pods)
        for gateway in self.all:
            gateway.picker.set_catalog(catalog)

    async def set_ready(self, *gateways: Gateway) -> None:
        """These gateways are ready from now on, and connected."""
        self.publish(*gateways)
        await self.connected(*gateways)

    def publish(self, *gateways: Gateway) -> None:
        """The API server says to all gateways that run that these are ready."""
        self.ready = list(gateways)
        for gateway in self._existing:
            gateway.queue.set_pods({g.name: g.address for g in gateways}, [g.name for g in self._existing])

    async def connected(self, *gateways: Gateway) -> None:
        def are() -> bool:
            for gateway in gateways:
                gateway.queue.update_metrics()
                if (
                    gateway in self._existing
                    and gateway_metrics.GATEWAY_PEERS_CONNECTED._value.get() != len(gateways) - 1
                ):
                    return False
            return True

        await wait_until(are, "the gateways are connected")

    def owner(self, key: str = "team/chat") -> Gateway:
        """The gateway that owns a service."""
        found = {gateway.queue.owner_of(key) for gateway in self._existing}
        assert len(found) == 1
        return next(gateway for gateway in self.all if gateway.name in found)

    def others(self, key: str = "team/chat") -> list[Gateway]:
        owner = self.owner(key)
        return [gateway for gateway in self.ready if gateway is not owner]

    def kill(self, gateway: Gateway) -> None:
        """The process of a gateway ends at once, and with it its connections. The API server does not know yet."""
        gateway.queue.close()
        self._existing.remove(gateway)
        gateway.picker.owners = None

    async def start_again(self, gateway: Gateway, address: str = "") -> Gateway:
        """The process of a killed gateway starts again, maybe at another address, and knows no services yet."""
        again = Gateway(
            self.all.index(gateway),
            self.port,
            self._secret_file,
            ack_seconds=self._ack_seconds,
            authenticator=self._authenticator,
            address=address,
        )
        self.all[self.all.index(gateway)] = again
        self._existing.append(again)
        await again.queue.start()
        self.publish(*(again if g is gateway else g for g in self.ready))
        return again


def make_catalog(services: tuple[Object, ...], pods: tuple[Object, ...]) -> ServiceCatalog:
    plain, admissions = split(services)
    known = build_catalog(plain, pods, admissions)
    healthy = {key: {e.address for e in s.serving_endpoints} for key, s in known.services.items()}
    return with_healthy(known, healthy)


async def eventually(true: Callable[[], bool], what: str) -> None:
    await wait_until(true, what)


def is_admitted(reply: bytes) -> bool:
    return "x-plimsoll-endpoint" in response_headers(reply)


def fallbacks(reason: str) -> float:
    """How many requests the gateways of this process decided about because an owner did not answer."""
    return float(gateway_metrics.GATEWAY_OWNER_FALLBACKS.labels(reason)._value.get())
