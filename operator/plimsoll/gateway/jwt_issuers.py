"""The issuers of JSON Web Tokens (JWT) that the gateway trusts, and what a verified token says of its holder.

Envoy verifies a token: signature, issuer, audience and times. It hands the claims of a valid one to the picker in a
header that clients cannot set. A claim that should limit a client and is missing allows nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

PAYLOAD_HEADER: Final = "x-plimsoll-jwt-payload"  # the claims of a verified token, set by Envoy
MAX_ISSUERS: Final = 16
_VALUE: Final = "gateway.authentication.jwt.issuers"


class InvalidIssuers(ValueError):
    """The chart value is invalid. The message names the part."""


class InvalidClaims(ValueError):
    """A verified token lacks a claim, or has one of another type. The message names the claim."""


class JwtClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"request_class": "class"}):
    """The claims that name tenant, class and models. "" is none; a dot leads into an object."""

    tenant: str = ""
    request_class: str = ""
    models: str = ""


class JwtIssuer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One issuer. Its keys are at `jwks_uri` or in `jwks`. `ca_bundle` are certificates in PEM, "" for public ones.

    `tenant_prefix` begins the names of its tenants, so that two issuers cannot name the same one.
    """

    issuer: str
    audiences: tuple[str, ...]
    jwks_uri: str = ""
    jwks: str = ""
    ca_bundle: str = ""
    tenant_prefix: str = ""
    claims: JwtClaims = JwtClaims()


class TokenClaims(msgspec.Struct, frozen=True):
    """What a token says. "" is nothing. `models` are None for all. `expires_s` is a Unix time, None for never."""

    subject: str
    tenant: str
    request_class: str
    models: frozenset[str] | None
    expires_s: float | None = None


def parse_issuers(text: str) -> tuple[JwtIssuer, ...]:
    """Returns the issuers from JSON. Raises InvalidIssuers."""
    try:
        issuers = msgspec.json.decode(text or "[]", type=tuple[JwtIssuer, ...])
    except msgspec.DecodeError as error:
        raise InvalidIssuers(f"{_VALUE}: {error}") from error
    if len(issuers) > MAX_ISSUERS:
        raise InvalidIssuers(f"{_VALUE}: {len(issuers)} issuers are more than {MAX_ISSUERS}")
    for number, issuer in enumerate(issuers):
        if problem := _problem(issuer, issuers[:number]):
            raise InvalidIssuers(f"{_VALUE}[{number}]{problem}")
    return issuers


def _problem(issuer: JwtIssuer, earlier: tuple[JwtIssuer, ...]) -> str:
    if not issuer.issuer or issuer.issuer in {other.issuer for other in earlier}:
        return f".issuer: '{issuer.issuer}' is empty or occurs twice"
    for other in earlier:
        if issuer.tenant_prefix != other.tenant_prefix and _overlap(issuer.tenant_prefix, other.tenant_prefix):
            return (
                f".tenantPrefix: of '{issuer.tenant_prefix}' and '{other.tenant_prefix}' of issuer '{other.issuer}', "
                "one begins with the other, so both issuers could name the same tenant"
            )
    if not issuer.audiences or not all(issuer.audiences):
        return ".audiences: name at least one, else tokens for other services would be accepted"
    if bool(issuer.jwks_uri) == bool(issuer.jwks):
        return ": set either jwksUri or jwks"
    if issuer.jwks:
        return "" if _is_key_set(issuer.jwks) else '.jwks: is no JSON object with a list "keys"'
    try:
        url = urlsplit(issuer.jwks_uri)
        is_valid = url.scheme == "https" and bool(url.hostname) and (url.port or 443) > 0 and "@" not in url.netloc
    except ValueError:
        is_valid = False
    return "" if is_valid else f".jwksUri: '{issuer.jwks_uri}' is no URL that begins with https://"


def _overlap(first: str, second: str) -> bool:
    """Whether one of two prefixes begins with the other. An issuer without one is compared with none."""
    return bool(first and second) and (first.startswith(second) or second.startswith(first))


def _is_key_set(text: str) -> bool:
    try:
        keys = msgspec.json.decode(text, type=dict[str, Any]).get("keys")
    except msgspec.DecodeError:
        return False
    return isinstance(keys, list) and bool(keys)


def is_token_like(credential: bytes) -> bool:
    """Whether this is meant as a JWT: three parts, of which the first is a JSON object."""
    return credential.startswith(b"eyJ") and credential.count(b".") == 2


def expired_at(credential: bytes) -> datetime | None:
    """Returns the `exp` of a token that is not verified, for a message; None without one."""
    try:
        exp = _decode(credential.split(b".")[1]).get("exp")
        return datetime.fromtimestamp(exp, UTC) if isinstance(exp, int | float) else None
    except (InvalidClaims, IndexError, OverflowError, OSError, ValueError):
        return None


def read_claims(payload: bytes, issuers: Mapping[str, JwtIssuer]) -> TokenClaims:
    """Returns what a verified token says. `payload` is the value of the payload header. Raises InvalidClaims."""
    document = _decode(payload)
    issuer = issuers.get(str(document.get("iss", "")))
    if issuer is None:
        raise InvalidClaims("the claim 'iss' names no issuer of this gateway")
    claims = issuer.claims
    subject, tenant = _text(document, "sub"), _text(document, claims.tenant)
    return TokenClaims(
        subject and issuer.tenant_prefix + subject,
        tenant and issuer.tenant_prefix + tenant,
        _text(document, claims.request_class),
        _models(document, claims.models) if claims.models else None,
        float(exp) if isinstance(exp := document.get("exp"), int | float) else None,
    )


def _decode(part: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4)), type=dict[str, Any])
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise InvalidClaims("the claims are no JSON object") from error


def _find(document: Mapping[str, Any], name: str) -> Any:
    """Returns the claim of this name, or the one to which its dots lead; None if there is none."""
    if not name or name in document:
        return document.get(name)
    found: Any = document
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _text(document: Mapping[str, Any], name: str) -> str:
    found = _find(document, name)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise InvalidClaims(f"the claim '{name}' is no string")
    return found


def _models(document: Mapping[str, Any], name: str) -> frozenset[str] | None:
    """Returns the allowed models: of a list, or of a string with commas or spaces. None for `*`, empty without one."""
    found = _find(document, name)
    listed = found.replace(",", " ").split() if isinstance(found, str) else [] if found is None else found
    if not isinstance(listed, list) or not all(isinstance(model, str) for model in listed):
        raise InvalidClaims(f"the claim '{name}' is neither a string nor a list of strings")
    return None if "*" in listed else frozenset(listed)
