"""Who sends a request: its tenant, its class, the models that it may use, and its limits.

Problem: headers are what a client says about itself. A tenant could take another one's share, and a batch job the class
of people who wait.

Idea: one place turns the headers of a request into an `Identity`, before anything else reads the request. It comes from
an API key. Headers for tenant and class count only if the chart says that a trusted proxy sets them, and only for what
the key leaves open. All else reads the `Identity`.
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from plimsoll.api.api_keys import ApiKey, format_time, is_key_like, key_digest, name_in_key
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.key_store import KeyStore
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from plimsoll.telemetry import metrics

MAX_TENANT_BYTES: Final = 64  # a longer tenant name in a header is truncated
MAX_COUNTED_KEYS: Final = 200  # keys with a series of their own in /metrics; all others share one
OTHER_KEYS: Final = "other keys"  # no name of a key: it has a space

# Headers in which SDKs send a key, in the order in which they are read: OpenAI's, Anthropic's, Azure's.
AUTHORIZATION: Final = "authorization"
KEY_HEADERS: Final = ("x-api-key", "api-key")
CREDENTIAL_HEADERS: Final = (AUTHORIZATION, *KEY_HEADERS)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request. "" means none; a class that a service does not have counts as none.

    `models` are model names or NAMESPACE/NAME, None for all. Limits are per minute, None without one.
    """

    key_name: str = ""
    tenant: str = ""
    request_class: bytes = b""
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

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

    def __init__(self, mode: ApiKeyMode = ApiKeyMode.DISABLED, trusted: TrustedHeaders | None = None) -> None:
        self.mode = mode
        self.keys = KeyStore()
        self._trusted = trusted
        self._requests_by_key: Counter[str] = Counter()
        self._exported: Counter[str] = Counter()

    @property
    def ready(self) -> bool:
        """Whether the keys are known, or not needed."""
        return self.mode is ApiKeyMode.DISABLED or self.keys.synced

    def authenticate(self, headers: Mapping[bytes, bytes], unix_s: float) -> Identity | Rejection:
        """Returns the identity of a request at this Unix time, or why it is rejected."""
        if self.mode is ApiKeyMode.DISABLED:
            return ANONYMOUS if self._trusted is None else self._with_headers(None, headers)
        credential = _credential(headers)
        name = None if credential is None else name_in_key(credential)
        if credential is None or name is None:
            if self.mode is ApiKeyMode.OPTIONAL and not is_key_like(credential or b""):
                return self._with_headers(None, headers)
            return _MISSING if credential is None else _INVALID
        key = self.keys.get(name)
        # An unknown name takes as long as a wrong key.
        is_valid = hmac.compare_digest(key_digest(credential), _NO_DIGEST if key is None else key.digest)
        if key is None or not is_valid:
            return _INVALID
        if key.is_expired(unix_s):
            return _expired(key)
        return self._with_headers(key, headers)

    def count(self, identity: Identity) -> None:
        """Count a request of this identity, if it has a key. Call this once for each request."""
        if identity.key_name:
            self._requests_by_key[self._counted_name(identity.key_name)] += 1

    def update_metrics(self) -> None:
        """Update the counters of `/metrics` just before they are read."""
        for name, count in self._requests_by_key.items():
            metrics.GATEWAY_KEY_REQUESTS.labels(name).inc(count - self._exported[name])
            self._exported[name] = count

    def _counted_name(self, name: str) -> str:
        known = name in self._requests_by_key or len(self._requests_by_key) < MAX_COUNTED_KEYS
        return name if known else OTHER_KEYS

    def _with_headers(self, key: ApiKey | None, headers: Mapping[bytes, bytes]) -> Identity:
        tenant, request_class = ("", "") if key is None else (key.tenant, key.request_class)
        found_class = request_class.encode()
        if self._trusted is not None:
            name = headers.get(self._trusted.tenant, b"")[:MAX_TENANT_BYTES].decode("ascii", "replace")
            tenant, found_class = tenant or name, found_class or headers.get(self._trusted.request_class, b"")
        if key is None:
            return Identity("", tenant, found_class)
        return Identity(
            key.name, tenant or key.name, found_class, key.models, key.requests_per_minute, key.tokens_per_minute
        )


_NO_DIGEST: Final = bytes(32)
_HOW: Final = "Send it as 'Authorization: Bearer KEY', 'x-api-key: KEY' or 'api-key: KEY'."
_MISSING: Final = Rejection(RejectionReason.MISSING_API_KEY, f"This gateway requires an API key. {_HOW}")
_INVALID: Final = Rejection(
    RejectionReason.INVALID_API_KEY, "The API key is not valid: it is wrong, or it has been revoked."
)


def _expired(key: ApiKey) -> Rejection:
    message = f"The API key '{key.name}' expired at {format_time(key.expires_s or 0.0)}."
    return Rejection(RejectionReason.EXPIRED_API_KEY, message)


def _credential(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Returns the first credential in the headers, None without one."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and (token := token.strip()):
        return token
    return headers.get(b"x-api-key") or headers.get(b"api-key") or None


def model_not_allowed(identity: Identity, model: str) -> Rejection:
    """Returns the rejection of a model that the key does not allow, whether the model exists or not."""
    message = (
        f"The API key '{identity.key_name}' may not use the model '{model[:200]}'."
        " GET /v1/models lists the models that it may use."
    )
    return Rejection(RejectionReason.MODEL_NOT_ALLOWED, message, param="model")
