"""Who sends a request: by key, by a trusted proxy, or nobody that is known."""

from __future__ import annotations

import orjson
import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.core.ports import NO_DEMAND_REASONS
from plimsoll.gateway.api_routes import ErrorShape
from plimsoll.gateway.body_budget import BodyBudget
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.http1 import HttpRequest
from plimsoll.gateway.identity import ANONYMOUS, MAX_COUNTED_KEYS, OTHER_KEYS, Authenticator, Identity
from plimsoll.gateway.parse_worker import ParseWorker
from plimsoll.gateway.routes import EnvoyEndpoint, model, models_body
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from plimsoll.telemetry import gateway_metrics
from tests.gateway.api_key_secrets import bearer, key_of, key_secret
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import (
    START_UNIX_S,
    PickerHarness,
    cost_models,
    engine_names,
    rejection_of,
    response_headers,
    service_with_slo,
)

CLASS, TENANT = (name.decode() for name in TrustedHeaders())
CLAIMS = {CLASS: "high", TENANT: "other"}
NOW_S = 1_800_000_000.0


def authenticator(
    *secrets: Object, mode: ApiKeyMode = ApiKeyMode.REQUIRED, trusted: TrustedHeaders | None = None
) -> Authenticator:
    made = Authenticator(mode, trusted)
    made.keys.apply(WatchEvent("SYNC", objects=secrets))
    return made


def identity(made: Authenticator, **headers: str) -> Identity | Rejection:
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return made.authenticate(sent, NOW_S)


def reason(found: Identity | Rejection) -> RejectionReason:
    assert isinstance(found, Rejection)
    return found.reason


def test_key_gives_identity_and_headers_claim_nothing() -> None:
    made = authenticator(
        key_secret(
            "ci", tenant="team-a", request_class="batch", models="chat", requests_per_minute=6, tokens_per_minute=9
        )
    )
    found = identity(made, **bearer("ci"), **CLAIMS)
    assert found == Identity("ci", "team-a", b"batch", frozenset({"chat"}), 6, 9)


def test_key_without_tenant_is_a_tenant_of_its_own() -> None:
    assert identity(authenticator(key_secret("ci")), **bearer("ci")) == Identity("ci", "ci")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {key_of('ci')}"},
        {"authorization": f"bearer  {key_of('ci')}"},
        {"x-api-key": key_of("ci")},
        {"api-key": key_of("ci")},
        {"authorization": "Basic abc", "x-api-key": key_of("ci")},
    ],
)
def test_key_is_read_from_headers_of_all_sdks(headers: dict[str, str]) -> None:
    assert isinstance(identity(authenticator(key_secret("ci")), **headers), Identity)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, RejectionReason.MISSING_API_KEY),
        ({"authorization": "Basic abc"}, RejectionReason.MISSING_API_KEY),
        ({"authorization": "Bearer "}, RejectionReason.MISSING_API_KEY),
        ({"authorization": "Bearer none"}, RejectionReason.INVALID_API_KEY),
        (bearer("unknown"), RejectionReason.INVALID_API_KEY),
        ({"x-api-key": key_of("ci") + "0"}, RejectionReason.INVALID_API_KEY),
        ({"x-api-key": key_of("ci").replace("plim-ci-", "plim-other-")}, RejectionReason.INVALID_API_KEY),
        (bearer("old"), RejectionReason.EXPIRED_API_KEY),
    ],
)
def test_wrong_keys_are_rejected_where_required(headers: dict[str, str], expected: RejectionReason) -> None:
    made = authenticator(key_secret("ci"), key_secret("other"), key_secret("old", expires="2027-01-01T00:00:00Z"))
    found = identity(made, **headers)
    assert reason(found) is expected
    assert isinstance(found, Rejection)
    assert "plim-" not in found.message


def test_revoked_and_expiring_keys_stop_at_once() -> None:
    secret = key_secret("ci", expires="2027-01-15T08:00:01Z")  # a second after NOW_S
    made = authenticator(secret)
    sent = {b"authorization": bearer("ci")["authorization"].encode()}
    assert isinstance(made.authenticate(sent, NOW_S), Identity)
    expired = made.authenticate(sent, NOW_S + 1.0)
    assert isinstance(expired, Rejection)
    assert expired.message == "The API key 'ci' expired at 2027-01-15T08:00:01Z. Use a new one."
    made.keys.apply(WatchEvent("DELETED", secret))
    assert reason(made.authenticate(sent, NOW_S)) is RejectionReason.INVALID_API_KEY


def test_optional_keys_admit_strangers_and_reject_wrong_keys() -> None:
    made = authenticator(key_secret("ci"), mode=ApiKeyMode.OPTIONAL)
    assert identity(made) == identity(made, authorization="Bearer none") == ANONYMOUS
    assert identity(made, **CLAIMS) == ANONYMOUS
    assert identity(made, **bearer("ci")) == Identity("ci", "ci")
    assert reason(identity(made, **bearer("unknown"))) is RejectionReason.INVALID_API_KEY


@pytest.mark.parametrize("key", ["plim-", "plim-ci", key_of("ci")[:-20], key_of("ci") + "!", key_of("ci") + "0" * 256])
def test_optional_keys_reject_malformed_keys(key: str) -> None:
    made = authenticator(key_secret("ci"), mode=ApiKeyMode.OPTIONAL)
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"api-key": key}):
        assert reason(identity(made, **headers)) is RejectionReason.INVALID_API_KEY


def test_without_authentication_headers_count_only_if_trusted() -> None:
    assert identity(Authenticator(), **CLAIMS, **bearer("ci")) == ANONYMOUS
    trusting = Authenticator(trusted=TrustedHeaders())
    assert identity(trusting, **CLAIMS) == Identity("", "other", b"high")


@pytest.mark.parametrize(("one", "other"), [("grün", "grön"), ("a" * 64 + "b", "a" * 65)])
def test_different_trusted_names_are_different_tenants(one: str, other: str) -> None:
    made = Authenticator(trusted=TrustedHeaders())
    found = [made.authenticate({TrustedHeaders().tenant: name.encode()}, NOW_S) for name in (one, other)]
    tenants = [client.tenant for client in found if isinstance(client, Identity)]
    assert len({*tenants}) == 2
    assert all(len(tenant) <= 64 and tenant.isascii() for tenant in tenants)


def test_trusted_headers_fill_only_what_the_key_leaves_open() -> None:
    made = authenticator(key_secret("proxy"), key_secret("ci", tenant="team-a"), trusted=TrustedHeaders())
    assert identity(made, **bearer("proxy"), **CLAIMS) == Identity("proxy", "other", b"high")
    assert identity(made, **bearer("proxy")) == Identity("proxy", "proxy")
    assert identity(made, **bearer("ci"), **CLAIMS) == Identity("ci", "team-a", b"high")


def test_required_keys_are_ready_after_their_first_list() -> None:
    assert Authenticator().ready
    assert not Authenticator(ApiKeyMode.REQUIRED).ready
    assert not Authenticator(ApiKeyMode.OPTIONAL).ready
    assert authenticator().ready


def counted_requests(made: Authenticator, key: str) -> float | None:
    made.update_metrics()
    return gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_api_key_requests_total", {"key": key})


def test_requests_by_key_have_bounded_series() -> None:
    names = [f"counted-{n}" for n in range(MAX_COUNTED_KEYS + 3)]
    made = authenticator(*(key_secret(name) for name in names))
    for name in names:
        found = identity(made, **bearer(name))
        assert isinstance(found, Identity)
        made.count(found)
    made.count(ANONYMOUS)
    assert counted_requests(made, names[0]) == counted_requests(made, names[0]) == 1.0
    assert (counted_requests(made, names[-1]), counted_requests(made, OTHER_KEYS), counted_requests(made, "")) == (
        None,
        3.0,
        None,
    )


def test_request_with_large_body_is_counted_once() -> None:
    made = authenticator(key_secret("large"))
    world = PickerHarness(service_with_slo(), pods=engine_names(1), authenticator=made)
    endpoint = EnvoyEndpoint(world.picker, ParseWorker(), BodyBudget(120, 60))

    def call(path: bytes, body: bytes = b"", request_id: bytes = b"a") -> str:
        sent = {b"x-api-key": key_of("large").encode(), b"x-plimsoll-request-id": request_id}
        reply = endpoint(HttpRequest(b"POST", path, sent | {b"x-plimsoll-body-bytes": b"60"}, body))
        assert isinstance(reply, bytes)
        return response_headers(reply)[":status"]

    assert call(b"/reserve/v1/completions") == "200"
    assert call(b"/check/v1/completions", b'{"model":"chat","prompt":"a"}') == "200"
    assert counted_requests(made, "large") == 1.0
    assert call(b"/reserve/v1/completions", request_id=b"b") == "200"
    assert call(b"/reserve/v1/completions", request_id=b"c") == "429"  # it never gets to the check
    assert counted_requests(made, "large") == 2.0


def services() -> tuple[Object, ...]:
    return (
        service("chat"),
        service("large", model="big"),
        service("chat", "lab", creationTimestamp="2026-03-02T03:04:05Z"),
    )


@pytest.mark.parametrize(
    ("models", "allowed"),
    [
        ("chat", {"chat", "team/chat"}),
        ("team/large", {"big", "team/large"}),
        ("big,lab/chat", {"big", "team/large", "lab/chat"}),
        ("absent", set()),
        ("*", {"chat", "team/chat", "big", "team/large", "lab/chat"}),
    ],
)
def test_key_may_use_the_services_that_it_names(models: str, allowed: set[str]) -> None:
    made = authenticator(key_secret("ci", models=models))
    world = PickerHarness(*services(), pods=(pod("10.0.0.1:8000"),), authenticator=made)
    found = made.authenticate({b"x-api-key": key_of("ci").encode()}, NOW_S)
    assert isinstance(found, Identity)
    names = world.picker.catalog.by_name
    assert {n for n in names if found.may_use(n, names[n], world.picker.catalog)} == allowed
    listed = {card["id"] for card in orjson.loads(models_body(world.picker, found))["data"]}
    assert listed == {names[n].preferred_name for n in allowed}
    shape = ErrorShape.OPENAI
    statuses = {n: response_headers(model(world.picker, found, n, shape))[":status"] for n in [*names, "absent"]}
    expected = {name: "200" if name in allowed else "403" for name in names}
    assert statuses == expected | {"absent": "404" if models in ("absent", "*") else "403"}


def test_model_that_is_not_allowed_is_rejected_and_no_demand() -> None:
    made = authenticator(key_secret("ci", models="team/large"))
    world = PickerHarness(service_with_slo(), pods=engine_names(1), authenticator=made)
    for name in ("chat", "nowhere"):
        reply = rejection_of(world.send(name, headers=bearer("ci")))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (403, "model_not_allowed", "model")
        assert f"'ci' may not use the model '{name}'" in (reply.error["message"] or "")
    missing = rejection_of(world.send())
    assert (missing.status, missing.headers["www-authenticate"]) == (401, "Bearer")
    assert missing.error["type"] == "invalid_request_error"
    assert world.service()["requests"]["arrived"] == 0


def test_key_decides_tenant_and_class_of_admission() -> None:
    classes = {"classes": [{"name": "default"}, {"name": "high", "priority": 10}]}
    made = authenticator(key_secret("ci", tenant="team-a", request_class="high"))
    world = PickerHarness(
        service_with_slo(admission=classes, classes=("default", "high")), pods=engine_names(1), authenticator=made
    )
    running = [world.send(headers={**bearer("ci"), TENANT: "other", CLASS: "default"}) for _ in range(2)]
    assert all(isinstance(reply, bytes) for reply in running)
    requests = [forwarded.request for forwarded in world.picker.admission._forwarded.values()]
    assert [(one.tenant, one.request_class) for one in requests] == [("team-a", "high")] * 2


def test_limits_of_a_key_reject_without_demand() -> None:
    made = authenticator(key_secret("ci", requests_per_minute=2))
    world = PickerHarness(service_with_slo(batch=64), pods=engine_names(1), authenticator=made)
    first = response_headers(world.send(headers=bearer("ci")))
    assert first["x-ratelimit-limit-requests"] == "2"
    assert first["x-ratelimit-remaining-requests"] == "1"
    world.send(headers=bearer("ci"))
    reply = rejection_of(world.send(headers=bearer("ci")))
    assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert reply.headers["retry-after"] == "30"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    assert (reply.error["message"] or "").startswith("The API key 'ci' has reached its limit of 2 requests per minute.")
    requests = world.service()["requests"]
    assert (requests["arrived"], requests["rejected"]) == (2, {"rate_limit_exceeded": 1})
    world.advance(30.0)
    assert "x-plimsoll-endpoint" in response_headers(world.send(headers=bearer("ci")))


@pytest.mark.parametrize(("fields", "output"), [({}, None), ({"max_tokens": 1000}, 1000), ({"n": 2}, None)])
def test_request_without_max_tokens_is_charged_the_mean_output(fields: dict[str, int], output: int | None) -> None:
    made = authenticator(key_secret("ci", tokens_per_minute=10_000))
    world = PickerHarness(service_with_slo(batch=64), pods=engine_names(1), authenticator=made)
    mean = cost_models(batch=64).output_mean
    left = int(response_headers(world.send(headers=bearer("ci"), **fields))["x-ratelimit-remaining-tokens"])
    prompt = world.service()["requests"]["arrived_tokens"]
    assert mean > 100
    assert left == pytest.approx(10_000 - prompt - (output or mean * fields.get("n", 1)), abs=1.0)


def test_impossible_request_is_charged_no_tokens() -> None:
    made = authenticator(key_secret("ci", tokens_per_minute=10_000))
    world = PickerHarness(service_with_slo(batch=64), pods=engine_names(1), authenticator=made)
    assert rejection_of(world.send(headers=bearer("ci"), n=100_000)).status == 400
    assert response_headers(world.send(headers=bearer("ci"), max_tokens=1))[":status"] == "200"


def test_output_beyond_the_longest_sequence_is_not_charged() -> None:
    made = authenticator(key_secret("ci", tokens_per_minute=10_000))
    engine = engine_names(1)[0]
    engine["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": '["--max-model-len", "4096"]'}]
    world = PickerHarness(service_with_slo(batch=64), pods=(engine,), authenticator=made)
    sent = response_headers(world.send(headers=bearer("ci"), max_tokens=100_000))
    prompt = world.service()["requests"]["arrived_tokens"]
    assert int(sent["x-ratelimit-remaining-tokens"]) == 10_000 - prompt - 4096


async def test_queued_requests_end_when_their_key_is_revoked() -> None:
    made = authenticator(key_secret("ci"), key_secret("good"))
    world = PickerHarness(service_with_slo(batch=1), pods=engine_names(1), authenticator=made)
    running = world.send(headers=bearer("ci"))
    assert "x-plimsoll-endpoint" in response_headers(running)
    revoked, kept = (world.send_queued(headers=bearer(name)) for name in ("ci", "good"))
    world.advance(1.0)
    assert not revoked.done()
    made.keys.apply(WatchEvent("DELETED", key_secret("ci")))
    world.advance(1.0)
    reply = rejection_of(revoked.result())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (401, "invalid_api_key", "false")
    assert not kept.done()
    assert isinstance(running, bytes)
    world.complete(running)
    assert "x-plimsoll-endpoint" in response_headers(kept.result())


def test_reasons_of_identity_size_nothing() -> None:
    statuses = {"missing_api_key", "invalid_api_key", "expired_api_key", "model_not_allowed", "rate_limit_exceeded"}
    assert statuses <= NO_DEMAND_REASONS
    assert START_UNIX_S == NOW_S
