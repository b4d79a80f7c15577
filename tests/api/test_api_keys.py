"""API keys: what a Secret declares, what it must not, and the form of a key."""

from __future__ import annotations

import base64
import hashlib
import math

import pytest

from plimsoll.api import api_keys
from plimsoll.api.api_keys import ApiKey, InvalidApiKey, make_key, name_in_key, read_secret, to_secret

KEY = "plim-ci-bot-" + "a1B2c3D4" * 4
HASH = f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"


def secret(name: str = "ci-bot", **fields: str) -> api_keys.Object:
    data = {field: base64.b64encode(value.encode()).decode() for field, value in fields.items()}
    return {"metadata": {"name": name, "namespace": "plimsoll-system"}, "data": data}


def test_key_names_its_secret_and_has_160_random_bits() -> None:
    key = make_key("ci-bot")
    assert key.startswith("plim-ci-bot-")
    assert name_in_key(key.encode()) == "ci-bot"
    assert make_key("ci-bot") != key
    for length in (api_keys.RANDOM_LENGTH, api_keys.MIN_RANDOM_LENGTH):
        assert length * math.log2(len(api_keys.RANDOM_ALPHABET)) >= 160


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"none",
        b"sk-abc",
        b"plim-",
        b"plim-x",
        b"plim-ci-bot-short",
        b"plim-ci-bot-" + b"a" * 26,
        b"plim-ci-bot-" + b"a" * 26 + b"!",
        b"plim-ci-bot-" + b"a" * 300,
        b"plim-\xff-" + b"a" * 32,
    ],
)
def test_text_of_another_form_is_no_key(text: bytes) -> None:
    assert name_in_key(text) is None


def test_secret_declares_all_fields() -> None:
    found = read_secret(
        secret(
            hash=f"{HASH}\n",
            tenant="team-a",
            models="chat, team/large\ndraft",
            requestsPerMinute="60",
            tokensPerMinute="100000",
            expires="2027-01-31T01:00:00+01:00",
            **{"class": "batch"},
        )
    )
    digest = hashlib.sha256(KEY.encode()).digest()
    models = frozenset({"chat", "team/large", "draft"})
    assert found == ApiKey("ci-bot", digest, "team-a", "batch", models, 60, 100_000, 1_801_353_600.0)
    assert api_keys.format_time(1_801_353_600.0) == "2027-01-31T00:00:00Z"
    assert found.is_expired(1_801_353_600.0)
    assert not found.is_expired(1_801_353_599.0)


def test_secret_with_hash_alone_allows_everything_for_ever() -> None:
    found = read_secret(secret(hash=HASH))
    assert found == ApiKey("ci-bot", hashlib.sha256(KEY.encode()).digest())
    assert not found.is_expired(1e12)
    assert read_secret(secret(hash=HASH, models="*")).models is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "no data"),
        ({"tenant": "a"}, "no field 'hash'"),
        ({"hash": KEY}, "hash: must be 'sha256:' and 64"),
        ({"hash": HASH.upper()}, "hash: must be"),
        ({"hash": HASH, "expire": "2027-01-31T00:00:00Z"}, "unknown field 'expire'"),
        ({"hash": HASH, "expires": "2027-01-31T00:00:00"}, "expires: must be a time with a zone"),
        ({"hash": HASH, "expires": "tomorrow"}, "expires: must be a time"),
        ({"hash": HASH, "expires": "0001-01-01T00:00:00+14:00"}, "expires: must be a time"),
        ({"hash": HASH, "expires": "9999-12-31T23:59:59-00:01"}, "expires: must be a time"),
        ({"hash": HASH, "expires": "9999-12-31T23:59:59.999999Z"}, "expires: must be a time"),
        ({"hash": HASH, "models": " "}, "models: must be 1 to 100"),
        ({"hash": HASH, "models": "chat,*"}, "models: must be"),
        ({"hash": HASH, "models": ",".join(f"m{n}" for n in range(101))}, "models: must be"),
        ({"hash": HASH, "requestsPerMinute": "0"}, "requestsPerMinute: must be a whole number"),
        ({"hash": HASH, "tokensPerMinute": "1.5"}, "tokensPerMinute: must be a whole number"),
        ({"hash": HASH, "tenant": "two words"}, "tenant: must have"),
        ({"hash": HASH, "class": "Batch"}, "class: must have"),
        ({"hash": HASH, "tenant": "x" * 20_000}, "larger than 16384 bytes"),
    ],
)
def test_invalid_secret_names_field_and_no_value(fields: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidApiKey) as caught:
        read_secret(secret(**fields))
    assert words in str(caught.value)
    assert KEY not in str(caught.value)


def test_invalid_name_and_encoding_are_refused() -> None:
    with pytest.raises(InvalidApiKey, match="the name must have at most 63"):
        read_secret(secret("ci.bot", hash=HASH))
    with pytest.raises(InvalidApiKey, match="tenant: not base64"):
        read_secret(secret(hash=HASH) | {"data": secret(hash=HASH)["data"] | {"tenant": "?"}})


def test_made_secret_has_hash_and_never_the_key() -> None:
    made = to_secret("plimsoll-system", "ci-bot", KEY, {"tenant": "team-a"})
    assert read_secret(made).tenant == "team-a"
    assert made["metadata"]["labels"] == {"plimsoll.dev/api-key": "true"}
    values = [base64.b64decode(value).decode() for value in made["data"].values()]
    assert HASH in values
    assert KEY not in str(made) + " ".join(values)
    with pytest.raises(InvalidApiKey, match="class: must have"):
        to_secret("plimsoll-system", "ci-bot", KEY, {"class": "A B"})
