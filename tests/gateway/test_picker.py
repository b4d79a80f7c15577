"""The picker without Envoy: questions in, answers out."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from plimsoll.adapters.kube_client import ENDPOINTSLICES, INFERENCESERVICEADMISSIONS, INFERENCESERVICES, WatchEvent
from plimsoll.core.histogram import LATENCY_EDGES_S
from plimsoll.gateway import routes
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.errors import from_header
from plimsoll.gateway.http1 import HttpRequest
from plimsoll.gateway.identity import ANONYMOUS, Authenticator
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.picker import Picker, Reply
from plimsoll.gateway.retry_identity import body_digest, claims_retry
from plimsoll.gateway.routes import EnvoyEndpoint, models_body
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings, TrustedHeaders
from plimsoll.gateway.signals_document import build_signals
from plimsoll.gateway.watch_cache import WatchCache
from tests.gateway.kube_objects import Object, build_catalog, pod, service, with_healthy
from tests.gateway.stack import ENDS

BODY = b'{"model":"chat","messages":[]}'


def build_picker(*pods: Object, services: tuple[Object, ...] | None = None) -> Picker:
    made = Picker(Random(1), authenticator=Authenticator(trusted=TrustedHeaders()))
    known = build_catalog(services if services is not None else (service(),), pods)
    made.set_catalog(with_healthy(known, {key: {e.address for e in s.endpoints} for key, s in known.services.items()}))
    return made


def headers(reply: Reply) -> dict[str, str]:
    assert isinstance(reply, bytes)
    head = reply.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return {":status": head[0].split(" ")[1]} | dict(line.split(": ", 1) for line in head[1:])


def test_check_returns_cluster_endpoints_and_request_id() -> None:
    picker = build_picker(pod("10.0.0.1:8000"), pod("10.0.0.2:8000"))
    found = headers(picker.check(BODY, {}, 0.0))
    assert found[":status"] == "200"
    assert found["x-plimsoll-cluster"] == "pick/team/chat"
    assert found["x-plimsoll-endpoint"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert "x-plimsoll-prefill" not in found
    again = headers(picker.check(BODY, {}, 0.0))
    assert again["x-plimsoll-endpoint"] == "10.0.0.2:8000,10.0.0.1:8000"
    assert again["x-plimsoll-request-id"] != found["x-plimsoll-request-id"]


def test_check_503_routes_to_picker_listener() -> None:
    found = headers(build_picker().check(BODY, {}, 0.0))
    assert (found[":status"], found["x-plimsoll-cluster"]) == ("200", "picker")
    reply = from_header(found["x-plimsoll-error-response"])
    assert (reply.status, reply.error["code"]) == (503, "model_starting")


def test_check_unhealthy_engines_return_no_endpoint() -> None:
    picker = Picker(Random(1))
    picker.set_catalog(build_catalog([service()], [pod("10.0.0.1:8000")]))
    reply = from_header(headers(picker.check(BODY, {}, 0.0))["x-plimsoll-error-response"])
    assert reply.error["code"] == "no_endpoint"


def test_reset_record_ends_request_and_suspends_engine() -> None:
    picker = build_picker(pod("10.0.0.1:8000"), pod("10.0.0.2:8000"))
    found = headers(picker.check(BODY, {}, 0.0))
    picker.reports.on_access_record(
        AccessRecord(request_id=found["x-plimsoll-request-id"], upstream="10.0.0.1:8000", status=503, flags="UC"), 1.0
    )
    for _ in range(3):
        assert headers(picker.check(BODY, {}, 2.0))["x-plimsoll-endpoint"] == "10.0.0.2:8000"
    after = headers(picker.check(BODY, {}, 60.0))["x-plimsoll-endpoint"]
    assert after.startswith("10.0.0.1:8000")
    signals = build_signals(picker, "g", synced=True)["services"]["team/chat"]
    assert (signals["requests"]["arrived"], signals["requests"]["failed"]) == (5, 1)


def test_record_of_deleted_service_is_ignored() -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    ticket = headers(picker.check(BODY, {}, 0.0))["x-plimsoll-request-id"]
    picker.set_catalog(build_catalog([], []))
    picker.reports.on_access_record(AccessRecord(request_id=ticket, upstream="10.0.0.1:8000", status=200), 1.0)
    assert build_signals(picker, "g", synced=True)["services"] == {}


def test_signals_list_endpoints_with_inflight() -> None:
    picker = build_picker(pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill"))
    picker.check(b'{"model":"chat","prompt":[' + b"1," * 200 + b"1]}", {}, 0.0)
    signals = build_signals(picker, "gateway-0", synced=True, clock=lambda: 12.3456)
    assert list(signals) == ["version", "gateway", "instance_id", "at", "synced", "services"]
    assert (signals["version"], signals["gateway"], signals["at"], signals["synced"]) == (3, "gateway-0", 12.346, True)
    assert signals["instance_id"] == picker.instance_id
    found = signals["services"]["team/chat"]
    assert found["models"] == ["chat", "team/chat"]
    assert [(e["address"], e["role"], e["revision"], e["routable"], e["inflight"]) for e in found["endpoints"]] == [
        ("10.0.0.1:8000", "decode", "r1", True, 1),
        ("10.0.0.2:8000", "prefill", "r1", True, 1),
    ]
    assert found["prefill"] == {"remote": 1, "local": 0}


def requests(picker: Picker) -> dict[str, Any]:
    found: dict[str, Any] = build_signals(picker, "g", synced=True)["services"]["team/chat"]["requests"]
    return found


def test_arrived_tokens_count_each_sequence() -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    picker.check(b'{"model":"chat","n":3,"prompt":[1,2,3,4,5]}', {}, 0.0)
    assert (requests(picker)["arrived"], requests(picker)["arrived_tokens"]) == (1, 15)
    picker.check(b'{"model":"chat","prompt":"%s"}' % (b"x" * 398), {}, 0.0)
    assert (requests(picker)["arrived"], requests(picker)["arrived_tokens"]) == (2, 115)


def test_demand_is_counted_once_before_rejection() -> None:
    picker = build_picker()
    body = b'{"model":"chat","prompt":[1,2,3,4]}'
    for retry_count in (b"0", b"1", b"2"):
        picker.check(body, {b"x-stainless-retry-count": retry_count}, 0.0)
    found = requests(picker)
    assert (found["arrived"], found["arrived_tokens"], found["retried"]) == (1, 4, 2)
    assert found["rejected"] == {"model_starting": 3}


PROMPT_BODY = b'{"model":"chat","prompt":[1,2,3,4]}'
RETRY_HEADERS = {b"x-stainless-retry-count": b"1"}


def demand(picker: Picker) -> tuple[int, int]:
    found = requests(picker)
    return found["arrived"], found["retried"]


def test_unmarked_retry_within_twice_retry_after_is_one_demand() -> None:
    picker = build_picker()
    rejection = from_header(headers(picker.check(PROMPT_BODY, {}, 0.0))["x-plimsoll-error-response"])
    wait_s = int(rejection.headers["retry-after"])
    picker.check(PROMPT_BODY, {}, float(2 * wait_s))
    assert demand(picker) == (1, 1)
    picker.check(PROMPT_BODY, {}, 200.0)
    assert demand(picker) == (2, 1)


def test_identical_requests_beyond_sdk_attempts_are_new_demand() -> None:
    picker = build_picker()
    for _ in range(20):
        picker.check(PROMPT_BODY, {}, 0.0)
    assert demand(picker) == (4, 16)


def test_identical_requests_of_two_tenants_are_two_demands() -> None:
    picker = build_picker()
    for tenant in (b"a", b"b"):
        picker.check(PROMPT_BODY, {b"x-gateway-inference-fairness-id": tenant}, 0.0)
    assert demand(picker) == (2, 0)


def test_repeated_request_after_success_is_new_demand() -> None:
    picker = build_picker()
    picker.check(PROMPT_BODY, {}, 0.0)
    known = build_catalog([service()], [pod("10.0.0.1:8000")])
    picker.set_catalog(with_healthy(known, {"team/chat": {"10.0.0.1:8000"}}))
    picker.check(PROMPT_BODY, {}, 1.0)
    picker.check(PROMPT_BODY, {}, 1.0)
    assert demand(picker) == (2, 1)


@pytest.mark.parametrize(("code", "counted"), [(503, (1, 1)), (500, (1, 1)), (400, (1, 0)), (200, (2, 0))])
def test_marked_retry_after_engine_failure_is_one_demand(code: int, counted: tuple[int, int]) -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    ticket = headers(picker.check(PROMPT_BODY, {}, 0.0))["x-plimsoll-request-id"]
    picker.reports.on_access_record(AccessRecord(request_id=ticket, upstream="10.0.0.1:8000", status=code), 0.1)
    picker.check(PROMPT_BODY, RETRY_HEADERS, 0.6)
    assert demand(picker) == counted


def test_unmarked_repeat_after_engine_failure_is_new_demand() -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    ticket = headers(picker.check(PROMPT_BODY, {}, 0.0))["x-plimsoll-request-id"]
    picker.reports.on_access_record(AccessRecord(request_id=ticket, upstream="10.0.0.1:8000", status=503), 0.1)
    picker.check(PROMPT_BODY, {}, 0.6)
    assert demand(picker) == (2, 0)


def test_unknown_model_is_no_demand() -> None:
    picker = build_picker()
    picker.check(b'{"model":"other","prompt":[1,2,3,4]}', {}, 0.0)
    picker.check(b"not json", {}, 0.0)
    assert (requests(picker)["arrived"], requests(picker)["arrived_tokens"]) == (0, 0)


def complete_request(picker: Picker, **record: Any) -> None:
    ticket = headers(picker.check(BODY, {}, 0.0))["x-plimsoll-request-id"]
    picker.reports.on_access_record(AccessRecord(request_id=ticket, upstream="10.0.0.1:8000", **record), 1.0)


def test_latencies_are_counted_by_bucket() -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    for ttft_us in (1_000, 1_001, 1_050, 250_000, 2_000_000_000):
        complete_request(picker, status=200, flags="-", ttft_us=ttft_us)
    signals = build_signals(picker, "g", synced=True)["services"]["team/chat"]["ttft"]
    assert dict(zip(signals["buckets"], signals["counts"], strict=True)) == {0: 1, 1: 2, 64: 1, 161: 1}
    assert signals["sum_s"] == pytest.approx(2000.253051)
    assert LATENCY_EDGES_S[63] < 0.25 <= LATENCY_EDGES_S[64]


@pytest.mark.parametrize(
    "record",
    [
        {"status": 200, "flags": "-", "duration_us": 900},  # no body
        {"status": 400, "flags": "-", "ttft_us": 900},  # the engine's own refusal comes at once
        {"status": 500, "flags": "-", "ttft_us": 900},
        {"status": 200, "flags": "UC", "ttft_us": 900},
        {"status": 200, "flags": "DC", "ttft_us": 900},
    ],
)
def test_only_successful_responses_have_latency(record: dict[str, Any]) -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    complete_request(picker, **record)
    found = build_signals(picker, "g", synced=True)["services"]["team/chat"]
    assert found["ttft"] == found["e2e"] == {"sum_s": 0.0, "buckets": [], "counts": []}
    assert sum(found["requests"][outcome] for outcome in ENDS) == 1


@pytest.mark.parametrize(
    ("status", "counted"),
    [(200, "succeeded"), (400, "rejected_by_engine"), (429, "rejected_by_engine"), (500, "failed")],
)
def test_engine_4xx_is_no_success_in_signals(status: int, counted: str) -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    complete_request(picker, status=status, flags="-", ttft_us=900, duration_us=900)
    found = build_signals(picker, "g", synced=True)["services"]["team/chat"]["requests"]
    assert {end: found[end] for end in ENDS} == dict.fromkeys(ENDS, 0) | {counted: 1}


def test_instance_id_differs_per_picker() -> None:
    assert build_picker().instance_id != build_picker().instance_id


def test_recreated_service_counts_from_zero() -> None:
    picker = build_picker(pod("10.0.0.1:8000"))
    picker.check(BODY, {}, 0.0)
    picker.set_catalog(build_catalog([], []))
    picker.set_catalog(build_catalog([service()], []))
    assert requests(picker)["arrived"] == 0


async def test_envoy_endpoint_routes_by_path() -> None:
    bodies = BodyBudget(100, 60)
    endpoint = EnvoyEndpoint(build_picker(), ParseWorker(), bodies)

    def picked_headers(path: bytes, body: bytes = b"", **sent: bytes) -> dict[str, str]:
        picker = {name.replace("_", "-").encode(): value for name, value in sent.items()}
        reply = endpoint(HttpRequest(b"POST", path, picker, body))
        assert isinstance(reply, bytes)
        return headers(reply)

    assert picked_headers(b"/healthz")[":status"] == "200"
    assert picked_headers(b"/v1/models?x=y")["content-type"] == "application/json"
    assert picked_headers(b"/v1/models/") == picked_headers(b"/v1/models")
    assert picked_headers(b"/other")[":status"] == "404"
    refused = picked_headers(b"/check/v1/completions", BODY)
    written = picked_headers(
        b"/v1/completions", b"", x_plimsoll_error_response=refused["x-plimsoll-error-response"].encode()
    )
    assert (written[":status"], written["x-plimsoll-reason"]) == ("503", "model_starting")
    for request_id, status in ((b"a", "200"), (b"b", "429")):
        sent = {"x_plimsoll_request_id": request_id, "x_plimsoll_body_bytes": b"60"}
        assert picked_headers(b"/reserve/v1/completions", **sent)[":status"] == status
    picked_headers(b"/check/v1/completions", BODY, x_plimsoll_request_id=b"a")
    assert bodies.reserved_bytes == len(BODY)


@pytest.mark.parametrize("path", [b"/check/v1/completions", b"/reserve/v1/completions", b"/v1/models"])
def test_envoy_endpoint_has_no_options(path: bytes) -> None:
    endpoint = EnvoyEndpoint(build_picker(pod("10.0.0.1:8000")), ParseWorker(), BodyBudget(100, 60))
    reply = endpoint(HttpRequest(b"OPTIONS", path, {b"x-plimsoll-error-response": b"e30"}, BODY))
    assert isinstance(reply, bytes)
    assert headers(reply)[":status"] == "404"


def test_models_are_listed_once_by_preferred_name() -> None:
    picker = build_picker(services=(service(model="tiny"), service("two", model="tiny", uid="z")))
    assert [part["id"] for part in orjson.loads(models_body(picker, ANONYMOUS))["data"]] == ["team/two", "tiny"]


def test_models_are_listed_once_for_each_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    picker = build_picker(services=(service(),))
    endpoint = EnvoyEndpoint(picker, ParseWorker(), BodyBudget(100, 60))
    made: list[bytes] = []

    def record(*given: Any) -> bytes:
        made.append(models_body(*given))
        return made[-1]

    monkeypatch.setattr(routes, "models_body", record)

    def listed() -> set[str]:
        reply = endpoint(HttpRequest(b"GET", b"/v1/models", {}, b""))
        assert isinstance(reply, bytes)
        return {card["id"] for card in orjson.loads(reply.partition(b"\r\n\r\n")[2])["data"]}

    assert listed() == listed() == {"chat"}
    picker.set_catalog(build_catalog([service(), service("two")], []))
    assert listed() == {"chat", "two"}
    assert len(made) == 2


def test_digest_and_retry_header_identify_retries() -> None:
    assert body_digest(BODY) == body_digest(bytes(bytearray(BODY))) != body_digest(BODY + b" ")
    assert body_digest(BODY) == body_digest((BODY[:9], BODY[9:]))
    assert [claims_retry(header) for header in (None, b"", b"0", b"1", b"x")] == [False, False, False, True, True]


def test_watch_cache_is_synced_after_first_list_of_each_scope() -> None:
    objects = WatchCache(("a", "b"))
    listed = service(namespace="a")
    objects.apply(INFERENCESERVICES, "a", WatchEvent("SYNC", objects=(listed,)))
    objects.apply(INFERENCESERVICES, "b", WatchEvent("SYNC"))
    objects.apply(ENDPOINTSLICES, "a", WatchEvent("SYNC"))
    assert not objects.synced
    objects.apply(ENDPOINTSLICES, "b", WatchEvent("SYNC"))
    objects.apply(INFERENCESERVICEADMISSIONS, "a", WatchEvent("SYNC"))
    assert not objects.synced, "without its limits a service would admit everything"
    objects.apply(INFERENCESERVICEADMISSIONS, "b", WatchEvent("SYNC"))
    assert objects.synced
    assert objects.take_changes().services == {"a/chat": listed}


def test_watch_cache_tells_changes_once() -> None:
    objects = WatchCache()
    one, two = service("one"), service("two")
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC", objects=(one,)))
    objects.apply(INFERENCESERVICES, None, WatchEvent("ADDED", two))
    changed = service("one", model="other")
    objects.apply(INFERENCESERVICES, None, WatchEvent("MODIFIED", changed))
    objects.apply(ENDPOINTSLICES, None, WatchEvent("ADDED", service("pod")))
    changes = objects.take_changes()
    assert (changes.services, changes.slices.keys()) == ({"team/one": changed, "team/two": two}, {"team/pod"})
    for _ in range(2):
        objects.apply(INFERENCESERVICES, None, WatchEvent("DELETED", changed))
        assert objects.take_changes().services == {"team/one": None}
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC"))
    assert objects.take_changes().services == {"team/two": None}
    assert objects.take_changes().services == {}


def test_watch_cache_relist_changes_only_new_versions() -> None:
    objects = WatchCache()
    same, old = service("same", resourceVersion="1"), service("old", resourceVersion="2")
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC", objects=(same, old)))
    objects.take_changes()
    new = service("old", resourceVersion="3")
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC", objects=(service("same", resourceVersion="1"), new)))
    assert objects.take_changes().services == {"team/old": new}


def test_settings_are_read_from_environment() -> None:
    settings = PickerSettings.from_environment(
        {"PLIMSOLL_GATEWAY_DIR": "/x", "PLIMSOLL_WATCH_NAMESPACES": "a, b,", "PLIMSOLL_DRAIN_SECONDS": "7"}
    )
    assert (str(settings.fifo), settings.namespaces, settings.drain_seconds) == ("/x/access.fifo", ("a", "b"), 7.0)
    named = PickerSettings.from_environment({"PLIMSOLL_CLASS_HEADER": "X-Class", "PLIMSOLL_TENANT_HEADER": "X-Tenant"})
    assert (named.class_header, named.tenant_header) == ("x-class", "x-tenant")
    assert (named.api_keys, named.trusted_headers) == (ApiKeyMode.DISABLED, None)
    secured = {"PLIMSOLL_API_KEYS": "Required", "PLIMSOLL_TRUST_IDENTITY_HEADERS": "true"}
    in_namespace = PickerSettings.from_environment(secured | {"POD_NAMESPACE": "plimsoll-system"})
    assert (in_namespace.api_keys, in_namespace.namespace) == (ApiKeyMode.REQUIRED, "plimsoll-system")
    assert in_namespace.trusted_headers == TrustedHeaders()
    for name in secured:
        with pytest.raises(ValueError, match="yes"):
            PickerSettings.from_environment({name: "yes"})
    with pytest.raises(ValueError, match="many"):
        PickerSettings.from_environment({"PLIMSOLL_GATEWAY_PORT": "many"})


@pytest.mark.parametrize("namespace", [{}, {"POD_NAMESPACE": ""}])
def test_settings_with_keys_need_a_namespace(namespace: dict[str, str]) -> None:
    """Without one, the Secrets of all namespaces would declare keys."""
    for mode in ("Required", "Optional"):
        with pytest.raises(ValueError, match=f"POD_NAMESPACE is empty, but PLIMSOLL_API_KEYS is {mode}"):
            PickerSettings.from_environment({"PLIMSOLL_API_KEYS": mode, **namespace})
    assert PickerSettings.from_environment({"PLIMSOLL_API_KEYS": "Disabled", **namespace}).namespace == ""
