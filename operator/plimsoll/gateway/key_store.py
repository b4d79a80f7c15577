"""The API keys of this release, from the Secrets that declare them.

Problem: a revoked key must stop at once, one bad Secret must not affect other keys, and every gateway must accept the
same keys.

Idea: the keys follow one watch of the labelled Secrets, and only what is read from a Secret is kept. Each key depends
on its own Secret alone. Of more than `MAX_KEYS`, the oldest count, so that all gateways choose alike.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.kube_client import SECRETS, WatchEvent
from plimsoll.api import labels
from plimsoll.api.api_keys import ApiKey, InvalidApiKey, read_secret
from plimsoll.gateway.watch_cache import WatchSource
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

MAX_KEYS: Final = 10_000

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Declared:
    """One labelled Secret. `key` is None if it declares no valid key."""

    created: str
    key: ApiKey | None


class KeyStore:
    """The keys by name. `synced` is true after the first list of Secrets."""

    def __init__(self) -> None:
        self.synced = False
        self._declared: dict[str, _Declared] = {}
        self._errors: dict[str, str] = {}
        self._excess: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """The number of keys that are accepted."""
        return len(self._declared) - len(self._errors) - len(self._excess)

    def get(self, name: str) -> ApiKey | None:
        declared = self._declared.get(name)
        return None if declared is None or name in self._excess else declared.key

    def apply(self, event: WatchEvent) -> None:
        """Apply one event of the watch."""
        if event.type == "SYNC":
            gone = self._declared.keys() - {secret["metadata"]["name"] for secret in event.objects}
            for name in gone:
                self._remove(name)
            for secret in event.objects:
                self._read(secret)
            self.synced = True
        elif event.type == "DELETED":
            self._remove(event.object["metadata"]["name"])
        else:
            self._read(event.object)
        self._limit()
        for state, count in (("accepted", len(self)), ("invalid", len(self._errors)), ("excess", len(self._excess))):
            gateway_metrics.GATEWAY_API_KEYS.labels(state).set(count)

    async def follow(self, source: WatchSource, namespace: str, on_change: Callable[[], None]) -> None:
        """Keep the keys in sync with the API server. Never returns."""
        async for event in source.watch(SECRETS, namespace, labels.API_KEY):
            self.apply(event)
            on_change()

    def _remove(self, name: str) -> None:
        self._declared.pop(name, None)
        self._errors.pop(name, None)

    def _read(self, secret: Object) -> None:
        meta = secret["metadata"]
        name, key = meta["name"], None
        if meta.get("deletionTimestamp"):  # a finalizer keeps it; its key is revoked
            self._remove(name)
            return
        try:
            key = read_secret(secret)
        except InvalidApiKey as error:
            if self._errors.get(name) != str(error):
                log.warning("Secret %s declares no API key: %s", name, error)
            self._errors[name] = str(error)
        else:
            self._errors.pop(name, None)
        self._declared[name] = _Declared(meta.get("creationTimestamp", ""), key)

    def _limit(self) -> None:
        """Exclude the newest keys beyond `MAX_KEYS`."""
        before, valid = self._excess, len(self._declared) - len(self._errors)
        self._excess = frozenset()
        if valid > MAX_KEYS:
            ages = ((d.created, name) for name, d in self._declared.items() if d.key is not None)
            self._excess = frozenset(name for _, name in heapq.nlargest(valid - MAX_KEYS, ages))
        if len(self._excess) > len(before):
            log.warning("%d API keys are refused, the newest beyond %d: delete Secrets", len(self._excess), MAX_KEYS)
