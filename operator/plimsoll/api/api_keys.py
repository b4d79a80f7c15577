"""API keys of the gateway, as Secrets declare them.

Problem: a person who reads a Secret, a backup or a repository of manifests must not be able to use the key in it.

Idea: a Secret holds the SHA-256 of the key, never the key. A key has at least 160 random bits, so nobody can guess it
from its hash, and a slow hash would only cost time in each request. The key names its Secret, `plim-NAME-RANDOM`, so
the gateway finds it by name and compares one hash. Messages never contain a value of a Secret: it may be a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from plimsoll.api import labels

Object = dict[str, Any]

KEY_PREFIX: Final = "plim-"
SECRET_TYPE: Final = "plimsoll.dev/api-key"
RANDOM_ALPHABET: Final = string.ascii_letters + string.digits
RANDOM_LENGTH: Final = 32  # 190 bits
MIN_RANDOM_LENGTH: Final = 27  # 160 bits
MAX_SECRET_BYTES: Final = 16 << 10  # of all values of one Secret
MAX_MODELS: Final = 100
ALL_MODELS: Final = "*"

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_TENANT: Final = re.compile(r"[!-~]{1,64}")
_MODEL: Final = re.compile(r"[!-+\--~]{1,320}")  # no space and no comma
_LIMIT: Final = re.compile(r"[1-9][0-9]{0,11}")


class InvalidApiKey(ValueError):
    """A Secret or an option declares no valid key. The message names the field, never its value."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key, as its Secret declares it.

    `digest` is the SHA-256 of the key. `tenant` and `request_class` are "" if the Secret names none. `models` are model
    names or NAMESPACE/NAME, None for all models. Limits are per minute, None without one. `expires_s` is a Unix time in
    seconds, None for never.
    """

    name: str
    digest: bytes
    tenant: str = ""
    request_class: str = ""
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    expires_s: float | None = None

    def is_expired(self, unix_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= unix_s


def make_key(name: str) -> str:
    """Returns a new key for the Secret `name`."""
    return f"{KEY_PREFIX}{name}-{''.join(secrets.choice(RANDOM_ALPHABET) for _ in range(RANDOM_LENGTH))}"


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def is_key_like(credential: bytes) -> bool:
    """Whether this looks like a key, perhaps a truncated one."""
    return credential.startswith(_PREFIX_BYTES)


def name_in_key(key: bytes) -> str | None:
    """Returns the name of the Secret that a key belongs to, None for anything that is no key of this form."""
    if not is_key_like(key):
        return None
    name, _, random = key[len(_PREFIX_BYTES) :].rpartition(b"-")
    if len(random) < MIN_RANDOM_LENGTH or len(key) > _MAX_KEY_BYTES or not random.isalnum() or not name.isascii():
        return None
    return name.decode()


_PREFIX_BYTES: Final = KEY_PREFIX.encode()
_MAX_KEY_BYTES: Final = 256


def to_secret(namespace: str, name: str, key: str, fields: Mapping[str, str]) -> Object:
    """Returns the Secret of a key. `fields` are those of `FIELDS`, without the hash. Raises InvalidApiKey."""
    values = {"hash": f"sha256:{key_digest(key.encode()).hex()}", **fields}
    secret: Object = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": SECRET_TYPE,
        "metadata": {"name": name, "namespace": namespace, "labels": {labels.API_KEY: "true"}},
        "data": {field: base64.b64encode(value.encode()).decode() for field, value in values.items()},
    }
    read_secret(secret)
    return secret


def read_secret(secret: Mapping[str, Any]) -> ApiKey:
    """Returns the key that a Secret declares. Raises InvalidApiKey."""
    name = secret["metadata"]["name"]
    if not _NAME.fullmatch(name):
        raise InvalidApiKey("the name must have at most 63 lower-case letters, digits and '-'")
    data = secret.get("data")
    if not isinstance(data, Mapping) or not data:
        raise InvalidApiKey("it has no data")
    if sum(len(value) for value in data.values() if isinstance(value, str)) > MAX_SECRET_BYTES * 4 // 3:
        raise InvalidApiKey(f"its data is larger than {MAX_SECRET_BYTES} bytes")
    if unknown := sorted(data.keys() - FIELDS.keys()):
        raise InvalidApiKey(f"unknown field {unknown[0][:40]!r}; fields are {', '.join(FIELDS)}")
    values = {field: FIELDS[field](field, _decoded(field, value)) for field, value in data.items()}
    if "hash" not in values:
        raise InvalidApiKey("it has no field 'hash'")
    return ApiKey(
        name,
        values["hash"],
        values.get("tenant", ""),
        values.get("class", ""),
        values.get("models"),
        values.get("requestsPerMinute"),
        values.get("tokensPerMinute"),
        values.get("expires"),
    )


def _decoded(field: str, value: object) -> str:
    try:
        return base64.b64decode(str(value), validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidApiKey(f"{field}: not base64 of UTF-8 text") from error


def _hash(field: str, text: str) -> bytes:
    found = _HASH.fullmatch(text)
    if found is None:
        raise InvalidApiKey(f"{field}: must be 'sha256:' and 64 hexadecimal digits, the SHA-256 of the key")
    return bytes.fromhex(found[1])


def _tenant(field: str, text: str) -> str:
    if not _TENANT.fullmatch(text):
        raise InvalidApiKey(f"{field}: must have 1 to 64 printable ASCII characters without spaces")
    return text


def _class(field: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise InvalidApiKey(f"{field}: must have 1 to 63 lower-case letters, digits and '-', as class names have")
    return text


def _models(field: str, text: str) -> frozenset[str] | None:
    names = text.replace(",", " ").split()
    if names == [ALL_MODELS]:
        return None
    if not names or len(names) > MAX_MODELS or not all(_MODEL.fullmatch(n) and n != ALL_MODELS for n in names):
        raise InvalidApiKey(
            f"{field}: must be 1 to {MAX_MODELS} model names separated by commas, or '{ALL_MODELS}' for all"
        )
    return frozenset(names)


def _limit(field: str, text: str) -> int:
    if not _LIMIT.fullmatch(text):
        raise InvalidApiKey(f"{field}: must be a whole number of at least 1")
    return int(text)


def _expires(field: str, text: str) -> float:
    message = f"{field}: must be a time with a zone, such as 2027-01-31T00:00:00Z"
    try:
        found = datetime.fromisoformat(text)
        format_time(found.timestamp())  # UTC has no time before the year 1 or after 9999
    except (ValueError, OverflowError):
        raise InvalidApiKey(message) from None  # the error contains the value
    if found.tzinfo is None:
        raise InvalidApiKey(message)
    return found.timestamp()


def format_time(unix_s: float) -> str:
    """Returns a Unix time in the format of `expires`."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# The fields of a Secret, in the order of the documentation, with their readers.
FIELDS: Final[Mapping[str, Callable[[str, str], Any]]] = {
    "hash": _hash,
    "tenant": _tenant,
    "class": _class,
    "models": _models,
    "requestsPerMinute": _limit,
    "tokensPerMinute": _limit,
    "expires": _expires,
}
