"""What the picker knows of a request and Envoy does not, until Envoy's access-log record of the request's end.

Problem: tenant, class, key, model and queue time are known when the picker answers. Status, duration and bytes are
known at the end, and only Envoy's record tells them.

Idea: the attributes wait by request ID. They are text of bounded length without secrets, ready for a log. If a record
is lost, the oldest attributes make room for new ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec

from plimsoll.engines.redaction import redact
from plimsoll.gateway.api_routes import ApiRoute, BodyForm
from plimsoll.gateway.envoy.tracing import ATTRIBUTE_PREFIX
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.request_context import RequestContext, request_id_of

MAX_ENTRIES = 50_000  # some 20 MB
MAX_TEXT_LENGTH = 200  # characters of what a client wrote
MAX_CLASS_LENGTH = 64

# Clients repeat the same few names, and a search for secrets costs as much as the rest of a line.
redact_repeated = functools.lru_cache(2048)(redact)


class RequestAttributes(msgspec.Struct, eq=False):
    """The attributes of one request.

    `model` is the name that the client sent, "" if the body has none. `service` handles the request. `queued_s` is the
    time from its arrival at the picker to the picker's answer, None without an answer. `prompt_tokens` are those of all
    sequences, estimated. `prefill` is the address of the prefill engine, "" without one. `output_tokens` are estimated
    from the size of a complete stream, None if unknown.
    """

    tenant: str
    request_class: str
    key_name: str
    model: str = ""
    service: str = ""
    prompt_tokens: int | None = None
    is_retry: bool = False
    queued_s: float | None = None
    prefill: str = ""
    output_tokens: int | None = None
    context: RequestContext | None = None  # until the picker answers
    is_sampled: bool = False  # whether it has a trace

    def tag(self, reply: bytes, route: ApiRoute, now: float) -> bytes:
        """Record the picker's reply at monotonic time `now`. Returns it with the attributes of the request's span."""
        self.answer(now)
        return _with_attributes(reply, self, route) if self.is_sampled else reply

    def answer(self, now: float) -> None:
        """Record what the picker decided at monotonic time `now`, or that the client left the queue."""
        ctx = self.context
        if ctx is None:
            return
        self.context = None
        self.service = ctx.target_service
        self.prompt_tokens = ctx.prompt.tokens * ctx.prompt.sequences
        self.is_retry = ctx.is_retry
        self.queued_s = now - ctx.arrived_s
        self.prefill = ctx.prefill
        if ctx.admission_request is not None and ctx.admission_request.request_class:
            self.request_class = ctx.admission_request.request_class


class AttributeStore:
    """The attributes of the requests that run, by request ID. It keeps none unless it `is_enabled`."""

    def __init__(self, *, is_enabled: bool = False, is_traced: bool = False) -> None:
        """`is_enabled`: for all requests. `is_traced`: for those that have a trace."""
        self.is_enabled = is_enabled
        self._is_traced = is_traced
        self._attributes: dict[str, RequestAttributes] = {}

    def __len__(self) -> int:
        return len(self._attributes)

    def begin(self, headers: Mapping[bytes, bytes], identity: Identity, model: str) -> RequestAttributes | None:
        """Returns the attributes of a new request whose client is known, None if they are not kept."""
        is_sampled = self._is_traced and _is_sampled(headers)
        request_id = request_id_of(headers) if self.is_enabled or is_sampled else None
        if request_id is None:
            return None
        if len(self._attributes) >= MAX_ENTRIES:
            del self._attributes[next(iter(self._attributes))]
        request_class = identity.request_class[:MAX_CLASS_LENGTH].decode("ascii", "replace")
        attributes = self._attributes[request_id] = RequestAttributes(
            redact_repeated(identity.tenant),
            redact_repeated(request_class),
            identity.key_name,
            redact_repeated(model[:MAX_TEXT_LENGTH]),
            is_sampled=is_sampled,
        )
        return attributes

    def set_context(self, ctx: RequestContext) -> None:
        """Record that the request names a service."""
        attributes = self._attributes.get(ctx.request_id)
        if attributes is not None:
            attributes.context = ctx

    def tag(self, ctx: RequestContext, reply: bytes, now: float) -> bytes:
        """As `RequestAttributes.tag`, for a request that was queued."""
        attributes = self._attributes.get(ctx.request_id)
        return reply if attributes is None else attributes.tag(reply, ctx.route, now)

    def answer(self, request_id: str, now: float) -> None:
        """As `RequestAttributes.answer`, for a request whose client left the queue."""
        attributes = self._attributes.get(request_id)
        if attributes is not None:
            attributes.answer(now)

    def set_output(self, request_id: str, tokens: int | None) -> None:
        """Record the estimated output of a request that ends."""
        attributes = self._attributes.get(request_id)
        if attributes is not None:
            attributes.output_tokens = tokens

    def take(self, request_id: str) -> RequestAttributes | None:
        """Returns and forgets the attributes of a request that ended, None if there are none."""
        return self._attributes.pop(request_id, None)


_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_OPERATIONS: Final = {BodyForm.EMBEDDING: "embeddings", BodyForm.COMPLETION: "chat", BodyForm.MESSAGES: "chat"}


def _is_sampled(headers: Mapping[bytes, bytes]) -> bool:
    """Whether Envoy, which sets `traceparent` in its question, records this request."""
    flags = headers.get(b"traceparent", b"")[-1:]
    return flags in (b"1", b"3", b"5", b"7", b"9", b"b", b"d", b"f")


def _with_attributes(reply: bytes, known: RequestAttributes, route: ApiRoute) -> bytes:
    is_completion = route.path == "/v1/completions"
    values = {
        "model": known.model,
        "operation": "text_completion" if is_completion else _OPERATIONS.get(route.form, "generate_content"),
        "tenant": known.tenant,
        "class": known.request_class,
        "key": known.key_name,
        "service": known.service,
        "prefill": known.prefill,
        "queue": "" if known.queued_s is None else f"{known.queued_s:.6f}",
        "retry": "true" if known.is_retry else "",
    }
    lines = [f"{ATTRIBUTE_PREFIX}{name}: {quote(text, _PRINTABLE)}\r\n" for name, text in values.items() if text]
    start, end, rest = reply.partition(b"\r\n")
    return start + end + "".join(lines).encode("ascii") + rest
