"""Whether the cluster has a kind of another project, and a watch of its objects.

Problem: the kind may come after the operator, or go, and the operator must not wait for it.

Idea: ask the API server which kinds it serves. While it has this one, its objects are watched as others are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.api import labels
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.core.errors import ClusterError, Forbidden, NotFound
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

CHECK_SECONDS = 30.0  # between two looks whether the API server serves the kind
RETRY_SECONDS = 2.0  # after a look that failed
MAX_FAILURES = 5  # in a row, before the operator goes on without the objects


class Problem(Protocol):
    """Why no object of the kind can be applied."""

    @property
    def message(self) -> str:
        """A sentence with the remedy."""


P = TypeVar("P", bound=Problem)


class OptionalKindWatch(Generic[P]):
    """Keeps the objects of one kind in the cache. `on_change` is called with each service to reconcile again.

    A subclass sets `resource`, the `selector` of its objects, and `missing`, the problem of a kind that is not served.
    """

    resource: Resource
    selector: str | None = None
    missing: P

    def rejected(self, message: str) -> P:
        """The problem of a list that is refused."""
        raise NotImplementedError

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        namespace: str | None,
        on_change: Callable[[Key], None],
        check_seconds: float = CHECK_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """namespace: None for all."""
        self._kube = kube
        self._cache = cache
        self._namespace = namespace
        self._on_change = on_change
        self._check_s = check_seconds
        self._retry_s = retry_seconds
        self.is_synced = False  # whether `problem` and the cache are known
        self.problem: P | None = None  # why no object can be applied, None if one can

    async def run(self) -> None:
        """Watch until cancelled."""
        kind, failures = self.resource.kind, 0
        while True:
            try:
                is_usable, failures = await self.update(), 0
            except ClusterError as error:
                log.warning(None, "cannot list objects of an optional kind; trying again", kind=kind, error=str(error))
                failures += 1
                if not self.is_synced and failures >= MAX_FAILURES:
                    self._set(self.rejected(f"cannot list {kind}s: {error}"))
                await asyncio.sleep(self._retry_s)
                continue
            if is_usable:
                await self._follow_while_served()
            else:
                await asyncio.sleep(self._check_s)

    async def update(self) -> bool:
        """List the objects. Returns whether they can be watched. Raises ClusterError if that is unknown."""
        if not await self._is_served():
            return self._set(self.missing)
        try:
            objects, _ = await self._kube.list(self.resource, self._namespace, self.selector)
        except NotFound:
            return self._set(self.missing)
        except Forbidden as error:
            return self._set(self.rejected(str(error)))
        self._cache.replace(self.resource.kind, tuple(objects), self._namespace)
        return self._set(None)

    def _set(self, problem: P | None) -> bool:
        kind = self.resource.kind
        if problem is not None:
            self._cache.replace(kind, (), self._namespace)
        if not self.is_synced or problem != self.problem:
            self.is_synced, self.problem = True, problem
            if problem is None:
                log.info(None, "objects of an optional kind can be applied", kind=kind, namespace=self._namespace)
            elif problem == self.missing:
                log.info(None, "the cluster lacks an optional kind", kind=kind, effect=problem.message)
            else:
                log.warning(None, "objects of an optional kind cannot be applied", kind=kind, error=problem.message)
            for service in self._cache.all(labels.KIND):
                self._on_change(key_of(service))
        return problem is None

    async def _is_served(self) -> bool:
        return await self._kube.discover(self.resource.api_version, self.resource.kind) is not None

    async def _follow_while_served(self) -> None:
        """Follow the objects until the API server no longer serves the kind."""
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
        async for event in self._kube.watch(self.resource, self._namespace, self.selector):
            match event.type:
                case "SYNC":
                    self._cache.replace(self.resource.kind, event.objects, self._namespace)
                    changed = [key_of(service) for service in self._cache.all(labels.KIND)]
                case "DELETED":
                    self._cache.delete(event.object)
                    changed = [key_of(event.object)]
                case _:
                    self._cache.put(event.object)
                    changed = [key_of(event.object)]
            for key in changed:  # by name too, since an object of somebody else has no label of a service
                if self._cache.get(labels.KIND, key) is not None:
                    self._on_change(key)
