"""A kind of another project while the API server does not answer: how long the operator waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

from plimsoll.adapters.kube_client import LEADERWORKERSETS
from plimsoll.api import labels
from plimsoll.controllers.leader_worker_sets import LeaderWorkerSetWatch
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.optional_kind import MAX_FAILURES
from plimsoll.core.errors import BackendUnavailable
from tests import builders
from tests.cli.fake_kube import FakeKube

DEADLINE_SECONDS = 30
GROUP = f"/apis/{labels.SET_API_VERSION}"
SERVICE = builders.service(tiers={"serve": {"nodes": 2}})


class UnsteadyKube(FakeKube):
    """It fails the first questions, and then answers."""

    def __init__(self, failures: int, listed: dict[str, Any]) -> None:
        own = {"name": labels.SET_PLURAL, "kind": labels.SET_KIND, "namespaced": True}
        objects = {"items": [listed], "metadata": {"resourceVersion": "1"}}
        broken = {"resources": [{}, {"kind": labels.SET_KIND}, {"name": "others"}, own]}
        super().__init__({GROUP: broken, LEADERWORKERSETS.path(None): objects})
        self.failures = failures
        self.requests = 0

    async def _json(self, method: str, path: str, *others: Any) -> Any:
        self.requests += 1
        if self.requests <= self.failures:
            raise BackendUnavailable("no answer")
        return await super()._json(method, path, *others)

    async def watch(self, *_: Any) -> Any:
        await asyncio.Event().wait()
        yield


async def first_news(kube: UnsteadyKube) -> tuple[LeaderWorkerSetWatch, ObjectCache]:
    """The watch as it is when it first says that it is in sync."""
    cache, news = ObjectCache(), asyncio.Event()
    cache.put(SERVICE)
    watch = LeaderWorkerSetWatch(kube, cache, None, lambda key: news.set(), retry_seconds=0.0)
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await news.wait()
    finally:
        running.cancel()
        await asyncio.wait({running})
    assert watch.is_synced
    return watch, cache


async def test_watch_waits_for_the_objects_through_a_short_outage() -> None:
    """Otherwise the autoscaler runs as if the tiers had no engines."""
    watch, cache = await first_news(UnsteadyKube(MAX_FAILURES - 1, builders.leader_worker_set(SERVICE)))
    assert watch.problem is None
    assert cache.get(labels.SET_KIND, ("team", "chat-serve")) is not None


async def test_watch_goes_on_without_them_after_a_long_outage() -> None:
    watch, _ = await first_news(UnsteadyKube(MAX_FAILURES, builders.leader_worker_set(SERVICE)))
    assert watch.problem is not None
    assert "cannot list LeaderWorkerSets: no answer" in watch.problem.message


async def test_discovery_survives_entries_without_name_or_kind() -> None:
    kube = UnsteadyKube(0, builders.leader_worker_set(SERVICE))
    found = await kube.discover(labels.SET_API_VERSION, labels.SET_KIND)
    assert found is not None
    assert found[0].plural == labels.SET_PLURAL
