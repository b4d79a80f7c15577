"""The poller asks ready engines with LoRA again and again, and tells of their adapters when they change."""

from __future__ import annotations

import json
from typing import Any

from plimsoll.adapters.launcher import AdapterReport
from plimsoll.api.contract import engine_contract
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.object_cache import ObjectCache
from tests import builders

KEY = ("team", "chat")


class Engine:
    """A ready engine; `adapters` is what its launcher says of them."""

    def __init__(self, adapters: Any, revision: str | None = None) -> None:
        self.adapters, self.now_s, self.reads = adapters, 0.0, 0
        self.revision = revision
        self.changed: list[tuple[str, str]] = []
        cache = ObjectCache()
        ready = [{"type": "Ready", "status": "True"}]
        cache.put(builders.pod(builders.service(), "decode", "chat-decode-a", conditions=ready, podIP="10.0.0.1"))
        self.poller = EnginePoller(
            cache, self.answer, lambda *_: None, monotonic=lambda: self.now_s, on_adapters=self.changed.append
        )

    async def answer(self, address: str, port: int, path: str, tls_name: str = "") -> bytes:
        if path != engine_contract().paths["about"]:
            return b""
        self.reads += 1
        document = {"version": 1, "ready": True, "adapters": self.adapters, "model_revision": self.revision}
        return json.dumps(document).encode()

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.poller.poll_due()
            self.now_s += 1.0


async def test_ready_engine_with_lora_is_polled_again() -> None:
    engine = Engine([{"name": "sql", "loaded": False}])
    await engine.run(12)
    assert engine.changed == [KEY]
    assert engine.poller.adapters(KEY) == {"chat-decode-a": {"sql": AdapterReport(False)}}
    engine.adapters = [{"name": "sql", "loaded": True}]
    await engine.run(12)
    assert engine.changed == [KEY, KEY]
    assert engine.poller.adapters(KEY)["chat-decode-a"]["sql"].loaded
    assert engine.poller.adapters(("team", "other")) == {}


async def test_model_revision_is_reported_once_ready() -> None:
    engine = Engine(None, "sha256:0f")
    await engine.run(12)
    assert engine.poller.model_revisions(KEY) == ("sha256:0f",)
    assert engine.poller.model_revisions(("team", "other")) == ()
    assert engine.changed == [KEY]


async def test_engine_without_lora_is_polled_once() -> None:
    engine = Engine(None)
    await engine.run(30)
    assert engine.reads == 1
    assert engine.changed == []
    assert engine.poller.adapters(KEY) == {}
