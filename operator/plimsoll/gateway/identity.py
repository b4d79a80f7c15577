"""Who sends a request: its tenant, its class, the models that it may use, and its limits.

Problem: headers are what a client says about itself. A tenant could take another one's share, and a batch job the class
of people who wait.

Idea: one place turns the headers of a request into an `Identity`, before anything else reads the request. It comes from
an API key or from a verified token (JWT). Headers for tenant and class count only if the chart says that a trusted
proxy sets them, and only for what key or token leave open. All else reads the `Identity`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Final

from plimsoll.api.api_keys import ApiKey, format_time, is_key_like, key_digest, name_in_key
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.jwt_issuers import (
    PAYLOAD_HEADER,
    InvalidClaims,
    JwtIssuer,
    expired_at,
    is_token_like,
    read_claims,
)
from plimsoll.gateway.key_store import KeyStore
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from plimsoll.telemetry import gateway_metrics

MAX_TENANT_CHARS: Final = 64
_DIGEST_CHARS: Final = 16  # at the end of a longer name of a tenant
MAX_COUNTED_KEYS: Final = 200  # keys with a series of their own in /metrics; all others share one
IPV6_NETWORK_BITS: Final = 64  # a client has any number of the addresses of one network
_MAX_ADDRESS_CHARS: Final = 64  # an IPv6 address with a zone
_KNOWN_SOURCES: Final = 4096  # whose networks are remembered: to parse an address takes longer than to pick an engine
CLOCK_SKEW_S: Final = 60.0  # by which Envoy accepts a token after its expiry
OTHER_KEYS: Final = "other keys"  # no name of a key: it has a space

# Headers in which SDKs send a key, in the order in which they are read: OpenAI's, Anthropic's, Azure's.
AUTHORIZATION: Final = "authorization"
KEY_HEADERS: Final = ("x-api-key", "api-key")
FORWARDED_FOR: Final = "x-forwarded-for"
CREDENTIAL_HEADERS: Final = (AUTHORIZATION, *KEY_HEADERS)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request. "" means none; a class that a service does not have counts as none.

    `models` are model names or NAMESPACE/NAME, None for all. Limits are per minute, None without one. `key_digest` and
    `token_expires_s` say whether the credential is still the same: the SHA-256 of the key, and the Unix time in seconds
    at which the token expires, None for never.
    """

    key_name: str = ""
    tenant: str = ""
    request_class: bytes = b""
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    token_subject: str = ""  # of a client with a token
    key_digest: bytes = field(default=b"", compare=False, repr=False)
    token_expires_s: float | None = field(default=None, compare=False)

    @property
    def is_limited(self) -> bool:
        """Whether the key has limits of its own."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def client(self, source: str) -> str:
        """Returns what distinguishes clients: key, token or tenant, and without one the network `source`."""
        if self.key_name:
            return f"key {self.key_name}"
        if self.token_subject:
            return f"token {self.token_subject}"
        if self.tenant:
            return f"tenant {self.tenant}"
        return f"source {source}" if source else ""

    def usable_services(self, catalog: ServiceCatalog) -> Iterable[ServiceEntry]:
        """Returns the services of this catalog that are allowed."""
        if self.models is None:
            return catalog.services.values()
        found = (catalog.by_name.get(name) for name in self.models)
        return {service.key: service for service in found if service is not None}.values()

    def may_use(self, model: str, service: ServiceEntry | None, catalog: ServiceCatalog) -> bool:
        """Whether the model name is allowed. `service` is what it names in this catalog.

        An entry allows every name of the service that it names now, but of an adapter only the adapter's names.
        """
        if self.models is None or model in self.models:
            return True
        if service is None:
            return False
        adapter = service.adapters.get(model)
        if adapter is not None:
            return not self.models.isdisjoint(adapter.names)
        return any(catalog.by_name.get(name) is service and name not in service.adapters for name in self.models)


ANONYMOUS: Final = Identity()


class Authenticator:
    """Turns request headers into an identity or a rejection."""

    def __init__(
        self,
        mode: ApiKeyMode = ApiKeyMode.DISABLED,
        trusted: TrustedHeaders | None = None,
        issuers: Iterable[JwtIssuer] = (),
    ) -> None:
        self.mode = mode
        self._issuers = {issuer.issuer: issuer for issuer in issuers}
        self.keys = KeyStore()
        self._trusted = trusted
        self._is_open = mode is ApiKeyMode.DISABLED and not self._issuers and trusted is None
        self._requests_by_key: Counter[str] = Counter()
        self._exported: Counter[str] = Counter()

    @property
    def ready(self) -> bool:
        """Whether the keys are known, or not needed."""
        return self.mode is ApiKeyMode.DISABLED or self.keys.synced

    def authenticate(self, headers: Mapping[bytes, bytes], unix_s: float) -> Identity | Rejection:
        """Returns the identity of a request at this Unix time, or why it is rejected."""
        if self._is_open:
            return ANONYMOUS
        if self.mode is ApiKeyMode.DISABLED and not self._issuers:
            return self._with_headers(ANONYMOUS, headers)
        credential = _credential(headers)
        if self._issuers:
            if (payload := headers.get(_PAYLOAD)) is not None:
                return self._of_token(payload, headers)
            if credential is not None and is_token_like(credential):
                return _invalid_token(credential, unix_s)
        if self.mode is ApiKeyMode.DISABLED:
            return _MISSING_TOKEN if credential is None else _NO_TOKEN
        if self.mode is ApiKeyMode.OPTIONAL and not is_key_like(credential or b""):
            return self._with_headers(ANONYMOUS, headers)
        if credential is None:
            return _MISSING_EITHER if self._issuers else _MISSING
        return self._of_key(credential, headers, unix_s)

    def _of_key(self, credential: bytes, headers: Mapping[bytes, bytes], unix_s: float) -> Identity | Rejection:
        """Returns the identity of a client with this API key."""
        name = name_in_key(credential)
        if name is None:
            return _INVALID
        key = self.keys.get(name)
        # An unknown name takes as long as a wrong key.
        is_valid = hmac.compare_digest(key_digest(credential), _NO_DIGEST if key is None else key.digest)
        if key is None or not is_valid:
            return _INVALID
        if key.is_expired(unix_s):
            return _expired(key)
        limits = (key.requests_per_minute, key.tokens_per_minute)
        found = Identity(key.name, key.tenant, key.request_class.encode(), key.models, *limits, key_digest=key.digest)
        return self._with_headers(found, headers, key.name)

    def _of_token(self, payload: bytes, headers: Mapping[bytes, bytes]) -> Identity | Rejection:
        """Returns the identity of a client whose token Envoy has verified."""
        try:
            claims = read_claims(payload, self._issuers)
        except InvalidClaims as error:
            return Rejection(RejectionReason.INVALID_TOKEN, f"The token cannot be used: {error}. Get another one.")
        tenant, subject = bounded_name(claims.tenant), bounded_name(claims.subject)
        found = Identity(
            "",
            tenant,
            claims.request_class.encode(),
            claims.models,
            token_subject=subject,
            token_expires_s=claims.expires_s,
        )
        return self._with_headers(found, headers, subject)

    def renew(self, identity: Identity, unix_s: float) -> Identity | Rejection:
        """Returns the identity with the models that it may use now, or why it would be rejected at this Unix time."""
        if identity.key_name:
            key = self.keys.get(identity.key_name)
            if key is None or not hmac.compare_digest(key.digest, identity.key_digest):
                return _INVALID
            return _expired(key) if key.is_expired(unix_s) else replace(identity, models=key.models)
        expires_s = identity.token_expires_s
        if expires_s is not None and expires_s + CLOCK_SKEW_S <= unix_s:
            return _expired_token(expires_s)
        return identity

    def count(self, identity: Identity) -> None:
        """Count a request of this identity, if it has a key. Call this once for each request."""
        if identity.key_name:
            self._requests_by_key[self._counted_name(identity.key_name)] += 1

    def update_metrics(self) -> None:
        """Update the counters of `/metrics` just before they are read."""
        for name, count in self._requests_by_key.items():
            gateway_metrics.GATEWAY_KEY_REQUESTS.labels(name).inc(count - self._exported[name])
            self._exported[name] = count

    def _counted_name(self, name: str) -> str:
        known = name in self._requests_by_key or len(self._requests_by_key) < MAX_COUNTED_KEYS
        return name if known else OTHER_KEYS

    def _with_headers(self, found: Identity, headers: Mapping[bytes, bytes], default_tenant: str = "") -> Identity:
        """Returns the identity, with what it leaves open from trusted headers."""
        tenant, found_class = found.tenant, found.request_class
        if self._trusted is not None:
            name = bounded_name(headers.get(self._trusted.tenant, b"").decode("ascii", "backslashreplace"))
            tenant, found_class = tenant or name, found_class or headers.get(self._trusted.request_class, b"")
        tenant = tenant or default_tenant
        if tenant == found.tenant and found_class == found.request_class:
            return found
        return replace(found, tenant=tenant, request_class=found_class)


def source_network(headers: Mapping[bytes, bytes]) -> str:
    """Returns who sent a request to Envoy: the address that it appended to X-Forwarded-For, of IPv6 the /64."""
    source = headers.get(_FORWARDED_FOR, b"").rpartition(b",")[2].strip()
    return _network_of(source) if len(source) <= _MAX_ADDRESS_CHARS else ""


@lru_cache(_KNOWN_SOURCES)
def _network_of(source: bytes) -> str:
    text = source.decode("ascii", "replace")
    try:
        address = ip_address(text)
    except ValueError:
        return ""
    return text if address.version == 4 else str(ip_network((address, IPV6_NETWORK_BITS), strict=False))


def client_of(identity: Identity, headers: Mapping[bytes, bytes]) -> str:
    """Returns what tells the clients of requests apart, as `Identity.client`."""
    return identity.client("") or identity.client(source_network(headers))


def bounded_name(name: str) -> str:
    """Returns a name of at most `MAX_TENANT_CHARS`. A longer name ends with a digest of the whole.

    So different names stay different: two tenants share neither limits nor KV blocks.
    """
    if len(name) <= MAX_TENANT_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARS]
    return f"{name[: MAX_TENANT_CHARS - _DIGEST_CHARS - 1]}~{digest}"


_PAYLOAD: Final = PAYLOAD_HEADER.encode()
_FORWARDED_FOR: Final = FORWARDED_FOR.encode()
_NO_DIGEST: Final = bytes(32)
_HOW: Final = "Send it as 'Authorization: Bearer KEY', 'x-api-key: KEY' or 'api-key: KEY'."
_MISSING: Final = Rejection(RejectionReason.MISSING_API_KEY, f"This gateway requires an API key. {_HOW}")
_INVALID: Final = Rejection(
    RejectionReason.INVALID_API_KEY, "The API key is not valid: it is wrong, or it has been revoked. Use a valid key."
)


_MISSING_TOKEN: Final = Rejection(
    RejectionReason.MISSING_API_KEY, "This gateway requires a token. Send it as 'Authorization: Bearer TOKEN'."
)
_MISSING_EITHER: Final = Rejection(
    RejectionReason.MISSING_API_KEY,
    f"This gateway requires an API key or a token. {_HOW} Send a token as 'Authorization: Bearer TOKEN'.",
)
_NO_TOKEN: Final = Rejection(
    RejectionReason.INVALID_TOKEN, "The credential is no token (JWT). This gateway accepts no other. Send a token."
)


def _invalid_token(credential: bytes, unix_s: float) -> Rejection:
    """Returns the rejection of a token that Envoy did not verify."""
    at = expired_at(credential)
    if at is not None and at.timestamp() <= unix_s:
        return _expired_token(at.timestamp())
    message = (
        "The token is not valid: this gateway does not accept its issuer, audience, signature or times. Get a new one."
    )
    return Rejection(RejectionReason.INVALID_TOKEN, message)


def _expired_token(at_s: float) -> Rejection:
    return Rejection(RejectionReason.INVALID_TOKEN, f"The token expired at {format_time(at_s)}. Get a new one.")


def _expired(key: ApiKey) -> Rejection:
    message = f"The API key '{key.name}' expired at {format_time(key.expires_s or 0.0)}. Use a new one."
    return Rejection(RejectionReason.EXPIRED_API_KEY, message)


def _credential(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Returns the first credential in the headers, None without one."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and (token := token.strip()):
        return token
    return headers.get(b"x-api-key") or headers.get(b"api-key") or None


def count_unknown_class(identity: Identity, service: ServiceEntry) -> None:
    """Count a request of a class that its service does not have. Call this once for each request."""
    if service.policy is not None and service.policy.is_unknown(identity.request_class):
        gateway_metrics.GATEWAY_UNKNOWN_CLASSES.labels(service.key).inc()


def model_not_allowed(identity: Identity, model: str) -> Rejection:
    """Returns the rejection of a model that is not allowed, whether the model exists or not."""
    who = f"API key '{identity.key_name}'" if identity.key_name else f"token of '{identity.token_subject}'"
    message = f"The {who} may not use the model '{model[:200]}'. GET /v1/models lists the models that it may use."
    return Rejection(RejectionReason.MODEL_NOT_ALLOWED, message, param="model")
