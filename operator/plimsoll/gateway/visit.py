"""One request at the gateway, from its question to its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from plimsoll.core.admission import Request
from plimsoll.core.picking.endpoint import Prompt
from plimsoll.gateway.classify import Request as Asked

TENANT_LENGTH = 64  # bytes of a tenant's name; the rest is cut
MODEL_LENGTH = 200  # of a model's name in a message
KEY_LENGTH = 255  # bytes of an idempotency key; a longer one is none

RETRY_COUNT = b"x-stainless-retry-count"
IDEMPOTENCY_KEY = b"idempotency-key"
TICKET = b"x-plimsoll-ticket"

_TICKET_LENGTH = 64


@dataclass(frozen=True)
class Names:
    """Headers by which clients, or a proxy before them, say what a request is; in lower case."""

    klass: bytes = b"x-gateway-inference-objective"
    tenant: bytes = b"x-gateway-inference-fairness-id"


class Visit(msgspec.Struct, eq=False):
    """What is known of it. Times are monotonic seconds.

    ticket: its name everywhere. model: as the client calls it. prompt, max_tokens, stream: see `classify.Request`.
    service: key of the one that the client named, place: of the one that has it now, the same or its fallback.
    fallback: key of the one that may take it. klass, tenant: as told, unchecked. digest, size: of its body. n: answers
    to each prompt. blocks: hashes of its prompt's beginning. retry: the client was refused before. request: as the gate
    of its place was asked. answer: there while it is held.
    """

    ticket: str
    model: str
    prompt: Prompt
    max_tokens: int | None
    stream: bool
    service: str
    place: str
    klass: bytes
    tenant: str
    digest: int
    size: int
    idempotency_key: str | None
    arrived_s: float
    n: int = 1
    blocks: tuple[int, ...] = ()
    fallback: str | None = None
    retry: bool = False
    request: Request | None = None
    answer: asyncio.Future[bytes] | None = None

    @property
    def demand(self) -> tuple[str, int]:
        """By which its client is known when it comes back."""
        return self.tenant, self.digest

    @property
    def downgraded(self) -> bool:
        return self.place != self.service


def ticket_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The ticket that Envoy gave; None if it is none."""
    told = headers.get(TICKET, b"")
    return told.decode() if 0 < len(told) <= _TICKET_LENGTH and told.isascii() else None


def visit(
    ticket: str,
    asked: Asked,
    service: str,
    digest: int,
    size: int,
    headers: Mapping[bytes, bytes],
    names: Names,
    now: float,
) -> Visit:
    """A request that has just come, for a service that exists. digest, size: of its body."""
    key = headers.get(IDEMPOTENCY_KEY, b"")
    return Visit(  # by position: names would cost a microsecond
        ticket,
        asked.model[:MODEL_LENGTH],
        asked.prompt,
        asked.max_tokens,
        asked.stream,
        service,
        service,
        headers.get(names.klass, b""),
        headers.get(names.tenant, b"")[:TENANT_LENGTH].decode("ascii", "replace"),
        digest,
        size,
        key.decode("ascii", "replace") if 0 < len(key) <= KEY_LENGTH else None,
        now,
        asked.n,
    )
