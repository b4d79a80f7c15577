"""Whether the cluster has InferencePools, and a watch of those in the picker's namespace.

Problem: the kind is another project's. It may come after the operator, or go, and the operator must not wait for it.

Idea: ask the API server which kinds it serves. While it has this one, the pools are watched as other objects are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from plimsoll.adapters.kube_client import INFERENCEPOOLS, KubeClient
from plimsoll.api import labels
from plimsoll.api.conditions import Condition
from plimsoll.controllers.inference_pools.pool_conditions import KIND_MISSING, rejected
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.core.errors import ClusterError, Forbidden, NotFound
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

CHECK_SECONDS = 30.0  # between two looks whether the API server serves the kind
RETRY_SECONDS = 2.0  # after a look that failed


class PoolWatch:
    """Keeps the pools of one namespace in the cache. `on_change` is called with each service to reconcile again."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        namespace: str,
        on_change: Callable[[Key], None],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._namespace = namespace
        self._on_change = on_change
        self._check_s = check_seconds
        self.is_synced = False  # whether `problem` and the cache are known
        self.problem: Condition | None = None  # why no pool can be applied, None if one can

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                is_usable = await self.update()
            except ClusterError as error:
                log.warning(None, "cannot list InferencePools; trying again", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if is_usable:
                await self._follow_while_served()
            else:
                await asyncio.sleep(self._check_s)

    async def update(self) -> bool:
        """List the pools. Returns whether they can be watched. Raises ClusterError if that is unknown."""
        if not await self._is_served():
            return self._set(KIND_MISSING)
        try:
            pools, _ = await self._kube.list(INFERENCEPOOLS, self._namespace)
        except NotFound:
            return self._set(KIND_MISSING)
        except Forbidden as error:
            return self._set(rejected(str(error)))
        self._cache.replace(labels.POOL_KIND, tuple(pools), self._namespace)
        return self._set(None)

    def _set(self, problem: Condition | None) -> bool:
        if problem is not None:
            self._cache.replace(labels.POOL_KIND, (), self._namespace)
        if not self.is_synced or problem != self.problem:
            self.is_synced, self.problem = True, problem
            message = "InferencePools are served" if problem is None else problem.message
            log.info(None, message, namespace=self._namespace)
            for service in self._cache.all(labels.KIND):
                self._on_change(key_of(service))
        return problem is None

    async def _is_served(self) -> bool:
        return await self._kube.discover(labels.POOL_API_VERSION, labels.POOL_KIND) is not None

    async def _follow_while_served(self) -> None:
        """Follow the pools until the API server no longer serves the kind."""
        following = asyncio.create_task(self._follow())
        try:
            while True:
                await asyncio.wait({following}, timeout=self._check_s)
                if following.done():
                    following.result()
                    return
                with contextlib.suppress(ClusterError):  # no answer: the watch goes on
                    if not await self._is_served():
                        return
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        async for event in self._kube.watch(INFERENCEPOOLS, self._namespace):
            match event.type:
                case "SYNC":
                    self._cache.replace(labels.POOL_KIND, event.objects, self._namespace)
                    changed = [key_of(service) for service in self._cache.all(labels.KIND)]
                case "DELETED":
                    self._cache.remove(event.object)
                    changed = [key_of(event.object)]
                case _:
                    self._cache.put(event.object)
                    changed = [key_of(event.object)]
            for key in changed:  # by name, since a pool of somebody else has no label of a service
                if self._cache.get(labels.KIND, key) is not None:
                    self._on_change(key)
