"""A picker with gates in virtual time: its clock is the test's hand, its services promise something."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from plimsoll.core import codec
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import ErrorResponse, from_header
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.picker import Picker, Reply
from plimsoll.gateway.settings import TrustedHeaders
from plimsoll.gateway.signals_document import build_signals
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import LIMITS, CatalogOfPods, Object, pod, service, split, with_healthy

START_UNIX_S = 1_800_000_000.0  # the moment at which the monotonic clock is 0
MIX = from_samples([500.0, 1000.0, 2000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
SLO = {"ttft": "10s", "tpot": "50ms"}
GATEWAY = "gateway-0"


def cost_models(classes: int = 1, batch: int = 2, transfer: KvTransfer | None = None) -> EngineCostModel:
    """Limits of engines that take so many sequences each; transfer: of those that receive KV."""
    slo = Slo(0.95, 10.0, 0.0, 0.05)
    role = Role.SERVE if transfer is None else Role.DECODE
    made = engine_cost_model(
        TierSpec(role, MODEL, MIX, EngineLimits(1024, 200_000, 8192), slo, transfer),
        tuple(ClassPolicy(str(k), 0, slo) for k in range(classes)),
    )
    return replace(made, batch=batch)


def service_with_slo(
    name: str = "chat",
    admission: Mapping[str, Any] | None = None,
    *,
    batch: int = 2,
    classes: tuple[str, ...] = ("default",),
    model: bool = True,
    transfer: KvTransfer | None = None,
    move_token_s: float | None = None,
    slo: Mapping[str, str] | None = None,
    ready_at_s: float | None = None,
    ready_work: float = 0.0,
    starting: bool = True,
    shares: Mapping[str, int] | None = None,
    starts: tuple[tuple[float, float], ...] = (),
    token_ratios: Mapping[str, float] | None = None,
) -> Object:
    """An InferenceService with a promise, and what the operator has told of it; times are on the test's clock."""
    published = AdmissionLimits(
        classes,
        replace(cost_models(len(classes), batch, transfer), kv_transfer_token_s=move_token_s) if model else None,
        None if ready_at_s is None else START_UNIX_S + ready_at_s,
        ready_work,
        starting,
        {GATEWAY: batch} if shares is None else shares,
        tuple((START_UNIX_S + at_s, work) for at_s, work in starts),
        token_ratios or {},
    )
    obj = service(name)
    obj["spec"] |= {"slo": dict(slo or SLO), "tiers": {"serve": {"maxReplicas": 8}}}
    if admission is not None:
        obj["spec"]["admission"] = dict(admission)
    return obj | {LIMITS: json.loads(json.dumps(codec.encode(published)))}


@dataclass(order=True)
class FakeTimer:
    """A call that a fake clock will make."""

    at_s: float
    number: int
    call: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Time passes when `pass_to` says so. fired: calls that were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.fired = 0
        self._calls: list[FakeTimer] = []
        self._number = 0

    @property
    def armed(self) -> list[float]:
        return sorted(call.at_s for call in self._calls if not call.cancelled)

    def now(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return START_UNIX_S + self.now_s

    def call_at(self, at_s: float, call: Callable[[], None]) -> FakeTimer:
        self._number += 1
        heapq.heappush(self._calls, made := FakeTimer(at_s, self._number, call))
        return made

    def advance_to(self, now_s: float) -> None:
        while self._calls and self._calls[0].at_s <= now_s:
            due = heapq.heappop(self._calls)
            if not due.cancelled:
                self.now_s = max(self.now_s, due.at_s)
                self.fired += 1
                due.call()
        self.now_s = now_s


def key_of(obj: Object) -> str:
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


def running_record(reply: bytes, ttft_us: int | None) -> AccessRecord:
    """Envoy's record of a running response of the engine that this reply names first."""
    sent = response_headers(reply)
    host = sent["x-plimsoll-endpoint"].split(",")[0]
    return AccessRecord(
        sent["x-plimsoll-request-id"], host, status=200, flags="-", ttft_us=ttft_us, received_us=0, is_running=True
    )


class PickerHarness:
    """One gateway's picker, its clock, and the objects that it is told."""

    def __init__(
        self,
        *services: Object,
        pods: tuple[Object, ...] = (),
        authenticator: Authenticator | None = None,
        has_engine_tls: bool = True,
    ) -> None:
        """authenticator: without one, headers say class and tenant, as a trusted proxy's do.

        has_engine_tls: whether the gateway has a client certificate for engines.
        """
        self.clock = FakeClock()
        trusting = Authenticator(trusted=TrustedHeaders())
        self.picker = Picker(Random(1), GATEWAY, authenticator or trusting, clock=self.clock)
        self._catalog = CatalogOfPods(has_engine_tls)
        self.requests = 0
        self.set_objects(*services, pods=pods)

    def set_objects(self, *services: Object, pods: tuple[Object, ...] = (), unreachable: tuple[str, ...] = ()) -> None:
        """These are the objects from now on, and Envoy reaches all ready engines but some."""
        plain, admissions = split(services)
        self.set_api_objects(plain, admissions, pods, unreachable)

    def set_api_objects(
        self,
        services: Iterable[Object],
        admissions: Iterable[Object],
        pods: tuple[Object, ...] = (),
        unreachable: tuple[str, ...] = (),
    ) -> None:
        """The same, with InferenceServiceAdmissions of their own."""
        known = self._catalog.set(services, pods, admissions)
        healthy = {
            key: {e.address for e in s.serving_endpoints if e.address not in unreachable}
            for key, s in known.services.items()
        }
        self.picker.set_catalog(with_healthy(known, healthy))

    def send(self, model: str = "chat", *, headers: Mapping[str, str] | None = None, **fields: Any) -> Reply:
        """A new question, each with another body and ticket. It is a chat, unless `fields` has a prompt."""
        self.requests += 1
        text = f"hi {self.requests}"
        question = {"user": text} if "prompt" in fields else {"messages": [{"role": "user", "content": text}]}
        body = json.dumps({"model": model, **question, **fields})
        sent_headers = {name.encode(): value.encode() for name, value in (headers or {}).items()}
        return self.picker.check(
            body.encode(), {b"x-plimsoll-request-id": b"t%d" % self.requests} | sent_headers, self.clock.now()
        )

    def send_queued(self, model: str = "chat", **fields: Any) -> asyncio.Future[bytes]:
        """A new question that is held."""
        reply = self.send(model, **fields)
        assert isinstance(reply, asyncio.Future)
        assert not reply.done()
        return reply

    def complete(self, reply: bytes, **record: Any) -> None:
        """The request of this reply ends at the engine that was named first."""
        sent = response_headers(reply)
        host = sent["x-plimsoll-endpoint"].split(",")[0]
        self.picker.reports.on_access_record(
            AccessRecord(
                **(
                    {"request_id": sent["x-plimsoll-request-id"], "upstream": host, "status": 200, "flags": "-"}
                    | record
                )
            ),
            self.clock.now(),
        )

    def report_first_token(self, reply: bytes, ttft_us: int | None) -> None:
        """Envoy reports that the response to the request of this reply runs, and when it began."""
        self.picker.reports.on_running_record(running_record(reply, ttft_us), self.clock.now())

    def advance(self, seconds: float) -> None:
        """Time passes, with a tick every second."""
        until = self.clock.now_s + seconds
        while self.clock.now_s < until:
            self.clock.advance_to(min(until, self.clock.now_s + 1.0))
            self.picker.tick()

    def service(self, key: str = "team/chat") -> dict[str, Any]:
        """The service's part of /signals."""
        found: dict[str, Any] = build_signals(self.picker, GATEWAY, synced=True)["services"][key]
        return found

    def outcomes(self, key: str = "team/chat") -> dict[str, int]:
        found: dict[str, int] = self.service(key)["admission"]["outcomes"]
        return found

    def running_by_engine(self, key: str = "team/chat") -> dict[str, int]:
        """Requests that the gate counts at each engine."""
        replicas = self.picker.admission.services[key].controller.pool.replicas
        return {address: len(replica.running) for address, replica in replicas.items()}


def engine_names(count: int, **fields: Any) -> tuple[Object, ...]:
    return tuple(pod(f"10.0.0.{n + 1}:8000", **fields) for n in range(count))


def response_headers(reply: Reply) -> dict[str, str]:
    """Headers and `:status` of an answer that came at once, or that a future has by now."""
    if isinstance(reply, asyncio.Future):
        reply = reply.result()
    assert isinstance(reply, bytes)
    head = reply.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return {":status": head[0].split(" ")[1]} | dict(line.split(": ", 1) for line in head[1:])


def rejection_of(reply: Reply) -> ErrorResponse:
    """What the client of a refused request gets."""
    sent = response_headers(reply)
    if "x-plimsoll-error-response" in sent:
        return from_header(sent["x-plimsoll-error-response"])
    assert sent[":status"] != "200"
    whole = reply.result() if isinstance(reply, asyncio.Future) else reply
    assert isinstance(whole, bytes)
    return ErrorResponse(int(sent.pop(":status")), sent, json.loads(whole.partition(b"\r\n\r\n")[2])["error"])


def picked_engine(reply: Reply) -> str:
    """The engine that a request was sent to."""
    return response_headers(reply)["x-plimsoll-endpoint"].split(",")[0]


def times_reached(limit: GatewayLimit) -> float:
    """How often a limit of the gateway was reached."""
    labels = {"limit": limit.value}
    return gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_limit_reached_total", labels) or 0.0
