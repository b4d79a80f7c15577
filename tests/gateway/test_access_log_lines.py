"""Lines of the gateway's access log: what they hold, and what a client cannot make of them."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

import msgspec
import pytest

from plimsoll.gateway import request_attributes
from plimsoll.gateway.access_log_lines import access_line
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.http1 import HttpRequest
from plimsoll.gateway.identity import Authenticator, Identity
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.request_attributes import AttributeStore, RequestAttributes
from plimsoll.gateway.routes import EnvoyEndpoint
from plimsoll.gateway.settings import TrustedHeaders
from tests.gateway.kube_objects import catalog, pod, service

SERVED = AccessRecord(
    "ab-1", "10.0.0.1:8000", "pick/team/chat", 200, "-", "via_upstream", 1, 1500, 90_000, 200, 100, "theirs",
    "POST", "/v1/chat/completions", None, 64, "4bf92f3577b34da6a3ce929d0e0e4736",
)  # fmt: skip
HEADERS = {b"x-plimsoll-request-id": b"ab-1"}


def line_of(record: AccessRecord, attributes: RequestAttributes | None = None) -> dict[str, Any]:
    line = access_line(record, attributes, 1_800_000_000.25)
    assert line is not None
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    found: dict[str, Any] = json.loads(line)
    return found


def attributes_of(model: str, identity: Identity) -> RequestAttributes:
    attributes = AttributeStore(is_enabled=True).begin(HEADERS, identity, model)
    assert attributes is not None
    return attributes


def test_served_request_line_has_all_fields() -> None:
    known = RequestAttributes("acme", "batch", "acme-1", "chat", "team/chat", 42, True, 0.5, "10.0.0.9:8000")
    assert line_of(SERVED, known) == {
        "time": "2027-01-15T08:00:00.250+00:00",
        "log": "access",
        "request_id": "theirs",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "method": "POST",
        "path": "/v1/chat/completions",
        "tenant": "acme",
        "class": "batch",
        "api_key": "acme-1",
        "model": "chat",
        "service": "team/chat",
        "endpoint": "10.0.0.1:8000",
        "prefill_endpoint": "10.0.0.9:8000",
        "status": 200,
        "reason": None,
        "outcome": "succeeded",
        "flags": "-",
        "details": "via_upstream",
        "retry": True,
        "attempts": 1,
        "queue_s": 0.5,
        "ttft_s": 0.0015,
        "duration_s": 0.09,
        "prompt_tokens": 42,
        "output_tokens": None,
        "output_tokens_from": None,
        "request_bytes": 64,
        "response_bytes": 100,
    }


def test_request_unknown_to_picker_has_envoys_fields() -> None:
    line = line_of(
        AccessRecord("ab-2", "/run/plimsoll/picker.sock", "picker", 503, "-", ttft_us=10, reason="overloaded")
    )
    assert (line["status"], line["reason"], line["endpoint"], line["ttft_s"]) == (503, "overloaded", None, None)
    assert (line["model"], line["queue_s"], line["retry"]) == (None, None, False)


@pytest.mark.parametrize(
    ("reported", "estimated", "tokens", "source"),
    [(7, 90, 7, "usage"), (0, 90, 0, "usage"), (None, 90, 90, "size"), (None, None, None, None)],
)
def test_output_tokens_are_reported_or_estimated(
    reported: int | None, estimated: int | None, tokens: int | None, source: str | None
) -> None:
    known = RequestAttributes("acme", "batch", "acme-1", output_tokens=estimated)
    line = line_of(msgspec.structs.replace(SERVED, output_tokens=reported), known)
    assert (line["output_tokens"], line["output_tokens_from"]) == (tokens, source)


def test_health_check_has_no_line() -> None:
    assert access_line(AccessRecord(path="/healthz"), None, 0.0) is None


@pytest.mark.parametrize(
    "text",
    ['a"}\n{"log":"access","status":200}', "a\u2028b\u2029c\x85d", "\x00\x1b[31m\r", "💥" * 500, "\\n\\u000a"],
)
def test_client_text_cannot_forge_a_line(text: str) -> None:
    known = attributes_of(text, Identity(tenant=text[:64], request_class=text.encode()))
    found = line_of(AccessRecord("ab-1", client_request_id=text[:80], path=text[:200], method=text[:20]), known)
    assert (found["model"], found["tenant"], found["path"]) == (text[:200], text[:64], text[:200])
    assert len(found["class"]) <= 64


def test_client_text_has_no_secrets() -> None:
    secret = "sk-" + "a1" * 12
    known = attributes_of(secret, Identity(tenant=secret, request_class=secret.encode()))
    found = line_of(AccessRecord("ab-1", client_request_id=secret, path=f"/v1/{secret}"), known)
    assert secret not in json.dumps(found)
    assert found["model"] == "***"


def picker(store: AttributeStore) -> Picker:
    made = Picker(Random(1), attributes=store)
    made.set_catalog(catalog([service()], [pod("10.0.0.1:8000")]))
    return made


@pytest.mark.parametrize(
    ("body", "model", "named"),
    [(b'{"model":"chat"}', "chat", "team/chat"), (b'{"model":"nope"}', "nope", ""), (b"{", "", "")],
)
def test_store_has_attributes_of_served_and_rejected(body: bytes, model: str, named: str) -> None:
    store = AttributeStore(is_enabled=True)
    picker(store).check(body, HEADERS, 1.0)
    found = store.take("ab-1")
    assert found is not None
    assert (found.model, found.service, found.context) == (model, named, None)
    assert (found.queued_s is None) == (named == "")
    assert store.take("ab-1") is None


@pytest.mark.parametrize("path", [b"/reserve/v1/completions", b"/v1/models", b"/v1/models/nope"])
def test_store_has_tenant_of_requests_without_a_body(path: bytes) -> None:
    """The body of one that is refused for lack of memory is never read."""
    store = AttributeStore(is_enabled=True)
    made = Picker(Random(1), authenticator=Authenticator(trusted=TrustedHeaders()), attributes=store)
    bodies = BodyBudget(100_000, 60_000)
    assert bodies.reserve("other", b"60000", time.monotonic(), "other") is None
    headers = HEADERS | {TrustedHeaders().tenant: b"team-a", b"x-plimsoll-body-bytes": b"60000"}
    EnvoyEndpoint(made, ParseWorker(), bodies)(HttpRequest(b"GET", path, headers, b""))
    found = store.take("ab-1")
    assert found is not None
    assert found.tenant == "team-a"


def test_store_keeps_nothing_unless_enabled() -> None:
    store = AttributeStore()
    picker(store).check(b'{"model":"chat"}', HEADERS, 1.0)
    assert len(store) == 0


def test_full_store_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_attributes, "MAX_ENTRIES", 2)
    store = AttributeStore(is_enabled=True)
    for number in range(3):
        store.begin({b"x-plimsoll-request-id": b"r%d" % number}, Identity(), "chat")
    assert (len(store), store.take("r0")) == (2, None)
