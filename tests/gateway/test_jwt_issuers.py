"""Issuers and the claims of verified tokens: who a client is by its token, and which declarations are refused."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.identity import Authenticator, Identity
from plimsoll.gateway.jwt_issuers import (
    PAYLOAD_HEADER,
    InvalidClaims,
    InvalidIssuers,
    expired_at,
    is_token_like,
    parse_issuers,
    read_claims,
)
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings, TrustedHeaders
from tests.gateway.api_key_secrets import key_of

ISSUER = {"issuer": "https://a.example", "audiences": ["llm"], "jwksUri": "https://a.example/keys"}
CLAIMS = {"tenant": "org.name", "class": "class", "models": "models"}
NOW = 1_800_000_000.0


def declared(**changes: Any) -> str:
    return json.dumps([{**ISSUER, **changes}])


def encode(claims: Any) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=")


def identify(
    claims: dict[str, Any], headers: dict[bytes, bytes] | None = None, trusted: TrustedHeaders | None = None
) -> Identity | Rejection:
    """Who a client is whose verified token has these claims."""
    authenticator = Authenticator(ApiKeyMode.DISABLED, trusted, parse_issuers(declared(claims=CLAIMS)))
    payload = encode({"iss": "https://a.example", "sub": "alice", **claims})
    return authenticator.authenticate({PAYLOAD_HEADER.encode(): payload, **(headers or {})}, NOW)


def test_claims_name_tenant_class_and_models() -> None:
    found = identify({"org": {"name": "acme"}, "class": "batch", "models": ["chat", "team/large"]})
    models = frozenset({"chat", "team/large"})
    assert found == Identity("", "acme", b"batch", models, token_subject="alice")


@pytest.mark.parametrize(
    ("claims", "tenant"), [({}, "partner:alice"), ({"org": {"name": "acme"}}, "partner:acme"), ({"sub": ""}, "")]
)
def test_prefix_keeps_tenants_of_issuers_apart(claims: dict[str, Any], tenant: str) -> None:
    partner = parse_issuers(declared(claims=CLAIMS, tenantPrefix="partner:"))
    payload = encode({"iss": "https://a.example", "sub": "alice", **claims})
    found = Authenticator(ApiKeyMode.DISABLED, None, partner).authenticate({PAYLOAD_HEADER.encode(): payload}, NOW)
    assert isinstance(found, Identity)
    assert found.tenant == tenant


@pytest.mark.parametrize(
    ("models", "allowed"),
    [
        ("chat, large", {"chat", "large"}),
        ("chat large", {"chat", "large"}),
        ("*", None),
        (["chat", "*"], None),
        ([], set()),
        ("", set()),
        (None, set()),
    ],
)
def test_models_claim_is_read(models: Any, allowed: set[str] | None) -> None:
    found = identify({"models": models})
    assert isinstance(found, Identity)
    assert found.models == (None if allowed is None else frozenset(allowed))


@pytest.mark.parametrize(
    "claims", [{"models": {"chat": 1}}, {"models": [1]}, {"class": 7}, {"org": {"name": ["x"]}}, {"iss": "b"}]
)
def test_claims_of_other_types_are_refused(claims: dict[str, Any]) -> None:
    found = identify(claims)
    assert isinstance(found, Rejection)
    assert found.reason is RejectionReason.INVALID_TOKEN
    assert "claim '" in found.message


def test_long_names_of_two_clients_stay_two_tenants() -> None:
    """Service accounts of a cluster: `system:serviceaccount:NAMESPACE:NAME`."""
    account = "system:serviceaccount:machine-learning-production:batch-inference-client"
    for claims in ({"sub": f"{account}-a"}, {"org": {"name": f"{account}-a"}}):
        first = identify(claims)
        second = identify(json.loads(json.dumps(claims).replace("-a", "-b")))
        assert isinstance(first, Identity)
        assert isinstance(second, Identity)
        assert first.tenant != second.tenant
        assert len(first.tenant) == len(second.tenant) == 64
        assert first.tenant[:47] == account[:47]
        assert ("sub" not in claims) or first.token_subject != second.token_subject


def test_trusted_headers_fill_what_token_leaves_open() -> None:
    trusted = TrustedHeaders()
    headers = {trusted.tenant: b"from-header", trusted.request_class: b"chat"}
    assert identify({}, headers).tenant == "alice"  # type: ignore[union-attr]
    found = identify({}, headers, trusted)
    assert isinstance(found, Identity)
    assert (found.tenant, found.request_class) == ("from-header", b"chat")
    found = identify({"org": {"name": "acme"}, "class": "batch"}, headers, trusted)
    assert isinstance(found, Identity)
    assert (found.tenant, found.request_class) == ("acme", b"batch")


@pytest.mark.parametrize(
    ("mode", "credential", "reason"),
    [
        (ApiKeyMode.DISABLED, b"", RejectionReason.MISSING_API_KEY),
        (ApiKeyMode.DISABLED, b"none", RejectionReason.INVALID_TOKEN),
        (ApiKeyMode.DISABLED, key_of("ci").encode(), RejectionReason.INVALID_TOKEN),
        (ApiKeyMode.DISABLED, b"eyJ.eyJ.x", RejectionReason.INVALID_TOKEN),
        (ApiKeyMode.OPTIONAL, b"", None),
        (ApiKeyMode.OPTIONAL, b"none", None),
        (ApiKeyMode.OPTIONAL, b"eyJ.eyJ.x", RejectionReason.INVALID_TOKEN),
        (ApiKeyMode.REQUIRED, b"", RejectionReason.MISSING_API_KEY),
        (ApiKeyMode.REQUIRED, b"none", RejectionReason.INVALID_API_KEY),
        (ApiKeyMode.REQUIRED, b"eyJ.eyJ.x", RejectionReason.INVALID_TOKEN),
    ],
)
def test_credential_without_verified_token(mode: ApiKeyMode, credential: bytes, reason: RejectionReason | None) -> None:
    authenticator = Authenticator(mode, None, parse_issuers(declared()))
    found = authenticator.authenticate({b"authorization": b"Bearer " + credential} if credential else {}, NOW)
    assert (found.reason if isinstance(found, Rejection) else None) is reason


def test_payload_header_without_issuers_is_ignored() -> None:
    headers = {PAYLOAD_HEADER.encode(): encode({"iss": "https://a.example", "sub": "alice"})}
    found = Authenticator(ApiKeyMode.REQUIRED).authenticate(headers, NOW)
    assert isinstance(found, Rejection)


def test_expired_token_is_named_so() -> None:
    token = b"eyJ." + encode({"exp": NOW - 100}) + b".x"
    found = Authenticator(ApiKeyMode.DISABLED, None, parse_issuers(declared())).authenticate(
        {b"authorization": b"Bearer " + token}, NOW
    )
    assert isinstance(found, Rejection)
    assert found.message == "The token expired at 2027-01-15T07:58:20Z. Get a new one."


@given(st.binary(max_size=200))
def test_any_bytes_are_no_error(data: bytes) -> None:
    expired_at(data)
    expired_at(b"eyJ." + base64.urlsafe_b64encode(data) + b".x")
    is_token_like(data)
    with pytest.raises(InvalidClaims):
        read_claims(data, {})


@given(st.floats() | st.integers() | st.text(max_size=5) | st.none() | st.booleans())
def test_any_expiry_is_no_error(value: Any) -> None:
    expired_at(b"eyJ." + encode({"exp": value}) + b".x")


def prefixed(*prefixes: str) -> str:
    """Issuers with these prefixes of tenants."""
    return json.dumps([{**ISSUER, "issuer": str(n), "tenantPrefix": one} for n, one in enumerate(prefixes)])


@pytest.mark.parametrize("prefixes", [("", "corp:"), ("corp:", "corp:"), ("corp:", "partner:"), ("", "")])
def test_prefixes_that_do_not_overlap_are_valid(prefixes: tuple[str, ...]) -> None:
    assert tuple(one.tenant_prefix for one in parse_issuers(prefixed(*prefixes))) == prefixes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "issuers: "),
        (declared(audience="x"), "unknown field `audience`"),
        (declared(issuer=""), r"issuers\[0\].issuer"),
        (json.dumps([ISSUER, ISSUER]), r"issuers\[1\].issuer: 'https://a.example' is empty or occurs twice"),
        (declared(audiences=[]), r"issuers\[0\].audiences"),
        (declared(audiences=[""]), r"issuers\[0\].audiences"),
        (declared(jwks="{}"), "set either jwksUri or jwks"),
        (declared(jwksUri=""), "set either jwksUri or jwks"),
        (declared(jwksUri="", jwks="{}"), r"issuers\[0\].jwks: is no JSON object"),
        (declared(jwksUri="", jwks="no"), r"issuers\[0\].jwks: is no JSON object"),
        (declared(jwksUri="http://a.example"), r"issuers\[0\].jwksUri"),
        (declared(jwksUri="https://"), r"issuers\[0\].jwksUri"),
        (declared(jwksUri="https://user@a.example"), r"issuers\[0\].jwksUri"),
        (declared(jwksUri="https://a.example:no/keys"), r"issuers\[0\].jwksUri"),
        (prefixed("corp", "corp:eu:"), r"issuers\[1\].tenantPrefix: of 'corp:eu:' and 'corp' of issuer '0'"),
        (prefixed("corp:eu:", "corp:"), r"issuers\[1\].tenantPrefix: of 'corp:' and 'corp:eu:' of issuer '0'"),
        (json.dumps([{**ISSUER, "issuer": str(n)} for n in range(17)]), "17 issuers are more than 16"),
    ],
)
def test_invalid_issuers_name_the_value(text: str, message: str) -> None:
    with pytest.raises(InvalidIssuers, match=message):
        PickerSettings.from_environment({"PLIMSOLL_JWT_ISSUERS": text})


@pytest.mark.parametrize(
    ("mode", "issuers", "required"),
    [("Disabled", "[]", False), ("Disabled", declared(), True), ("Optional", declared(), False)],
)
def test_issuers_without_keys_require_credentials(mode: str, issuers: str, required: bool) -> None:
    environment = {"PLIMSOLL_API_KEYS": mode, "PLIMSOLL_JWT_ISSUERS": issuers, "POD_NAMESPACE": "x"}
    assert PickerSettings.from_environment(environment).requires_credentials == required
