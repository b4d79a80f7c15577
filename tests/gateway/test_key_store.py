"""The keys follow their Secrets: made, changed, revoked, invalid, and too many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.kube_client import SECRETS, Resource, WatchEvent
from plimsoll.gateway import key_store
from plimsoll.gateway.app import GatewayProcess
from plimsoll.gateway.key_store import KeyStore
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings
from plimsoll.gateway.watch_cache import WATCHED_RESOURCES
from plimsoll.telemetry import gateway_metrics
from tests.gateway.api_key_secrets import key_of, key_secret
from tests.gateway.kube_objects import SYSTEM, Object


def synced(*secrets: Object) -> KeyStore:
    store = KeyStore()
    store.apply(WatchEvent("SYNC", objects=secrets))
    return store


def gauge(state: str) -> float:
    found = gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_api_keys", {"state": state})
    assert found is not None
    return found


def test_keys_follow_secrets() -> None:
    store = KeyStore()
    assert not store.synced
    store.apply(WatchEvent("SYNC", objects=(key_secret("a"), key_secret("b"))))
    assert store.synced
    assert len(store) == 2
    store.apply(WatchEvent("ADDED", key_secret("c", tenant="t")))
    store.apply(WatchEvent("MODIFIED", key_secret("a", tenant="u")))
    store.apply(WatchEvent("DELETED", key_secret("b")))
    tenants = {name: None if (key := store.get(name)) is None else key.tenant for name in "abc"}
    assert tenants == {"a": "u", "b": None, "c": "t"}
    store.apply(WatchEvent("SYNC", objects=(key_secret("c"),)))
    assert store.get("a") is None
    assert len(store) == 1


def test_key_of_secret_that_is_being_deleted_is_revoked() -> None:
    secret = key_secret("a")
    store = synced(secret)
    secret = secret | {"metadata": secret["metadata"] | {"deletionTimestamp": "2026-01-02T03:04:06Z"}}
    store.apply(WatchEvent("MODIFIED", secret))
    assert store.get("a") is None
    assert len(store) == 0


def test_invalid_secret_is_named_once_and_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad = key_secret("bad")
    bad["data"]["hash"] = bad["data"].pop("hash")[:8]
    store = synced(bad, key_secret("good"))
    store.apply(WatchEvent("SYNC", objects=(bad, key_secret("good"))))
    assert store.get("good") is not None
    assert store.get("bad") is None
    assert (gauge("accepted"), gauge("invalid"), gauge("excess")) == (1.0, 1.0, 0.0)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("Secret bad declares no API key: hash: ")
    assert key_of("bad") not in warnings[0]
    store.apply(WatchEvent("MODIFIED", key_secret("bad")))
    assert store.get("bad") is not None
    assert gauge("invalid") == 0.0


def test_key_that_becomes_invalid_is_revoked() -> None:
    store = synced(key_secret("a"))
    broken = key_secret("a")
    del broken["data"]["hash"]
    store.apply(WatchEvent("MODIFIED", broken))
    assert store.get("a") is None


def test_newest_keys_beyond_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_store, "MAX_KEYS", 2)
    secrets = [key_secret(f"k{n}", created=f"2026-01-0{9 - n}T00:00:00Z") for n in range(4)]
    store = synced(*secrets)
    assert [n for n in range(4) if store.get(f"k{n}")] == [2, 3]
    assert (len(store), gauge("excess")) == (2, 2.0)
    assert any("2 API keys are refused, the newest beyond 2" in record.getMessage() for record in caplog.records)
    store.apply(WatchEvent("DELETED", secrets[3]))
    assert [n for n in range(4) if store.get(f"k{n}")] == [1, 2]


class OneSync:
    """A source that lists one Secret and then is silent."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        self.asked.append((resource, namespace, selector))
        yield WatchEvent("SYNC", objects=(key_secret("a"),))
        await asyncio.Event().wait()


async def test_store_watches_labelled_secrets_of_its_namespace_only() -> None:
    source, store, changed = OneSync(), KeyStore(), asyncio.Event()
    following = asyncio.create_task(store.follow(source, SYSTEM, changed.set))
    await changed.wait()
    following.cancel()
    assert source.asked == [(SECRETS, SYSTEM, "plimsoll.dev/api-key")]
    assert store.get("a") is not None


@pytest.mark.parametrize("mode", ApiKeyMode)
def test_gateway_is_ready_after_first_list_of_keys(mode: ApiKeyMode, tmp_path: Path) -> None:
    gateway = GatewayProcess(PickerSettings(directory=tmp_path, api_keys=mode), OneSync())
    gateway._ads._loop.close()  # it is not started
    for resource, _ in WATCHED_RESOURCES:
        gateway._watch_cache.apply(resource, None, WatchEvent("SYNC"))
    waits_for_keys = "API keys" in gateway.not_ready_reason()
    assert waits_for_keys == (mode is not ApiKeyMode.DISABLED)
    gateway._authenticator.keys.apply(WatchEvent("SYNC"))
    assert "Envoy is not running" in gateway.not_ready_reason()
