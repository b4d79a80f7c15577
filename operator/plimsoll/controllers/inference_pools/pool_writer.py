"""Keeps the InferencePool of each service as it should be, and says what keeps gateways from using it.

A pool of the service's name that somebody else owns is never changed. It serves as well if it names the same engines
and the same picker. Nothing here fails a reconcile: engines and Plimsoll's own gateway do not depend on a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from plimsoll.api.conditions import Condition
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.inference_pools.pool_conditions import (
    KIND_MISSING,
    not_accepted,
    rejected,
    taken,
)
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.reconcile.applied_cache import AppliedCache, annotated
from plimsoll.controllers.reconcile.ownership import get_live, is_leftover, is_owned_by, require_parent
from plimsoll.controllers.targets.target_state import TargetState
from plimsoll.core.errors import ClusterError, Conflict, LeaseLost, NotFound
from plimsoll.resources.inference_pool import differences, inference_pool, match_labels
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

RETRY_SECONDS = 60.0  # after a failed apply


class PoolWriter:
    """Applies the pools of services."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        platform: PlatformConfig,
        watch: PoolWatch | None,
        later: Callable[[Key, float], None],
    ) -> None:
        """watch: None if no pools are asked for. later: reconciles a service after some seconds."""
        self._kube = kube
        self._cache = cache
        self._platform = platform
        self._watch = watch
        self._later = later
        self._applied = AppliedCache()

    async def reconcile(
        self, service_object: Object, service: InferenceService, target: TargetState | None = None
    ) -> Condition | None:
        """Apply the pool of a service. Returns what keeps gateways from using it, None outside the picker's namespace.

        target: of a service with targets, as last read; without a selector its pool stays as it is. Raises Conflict and
        LeaseLost.
        """
        settings, home = self._platform.inference_pools, self._platform.gateway.namespace
        key = key_of(service_object)
        if settings is None or self._watch is None or not service.spec.takes_requests or key[0] != home:
            return None
        target_labels = None if target is None or target.selector is None else match_labels(target.selector)
        if service.spec.targets is not None and target_labels is None:
            return None
        if self._watch.problem is not None:
            return self._watch.problem
        desired = inference_pool(service, service_object, settings, target_labels)
        try:
            live = await self._apply(key, desired, service_object)
        except NotFound:
            return KIND_MISSING
        except (Conflict, LeaseLost):
            raise
        except ClusterError as error:
            self._later(key, RETRY_SECONDS)
            return rejected(f"{labels.POOL_KIND} {key[1]}: {error}")
        if is_leftover(live, service_object):
            return None  # its deletion is an event of the watch
        if not is_owned_by(live, service_object) and (found := differences(live, desired)):
            return taken(live, found)
        return not_accepted(live)

    def forget(self, key: Key) -> None:
        """Forget a deleted service. Kubernetes deletes its pool."""
        self._applied.forget(key)

    async def _apply(self, key: Key, desired: Object, parent: Object) -> Object:
        """Returns the live pool, applied if it is the service's own and has changed."""
        live = self._cache.get(labels.POOL_KIND, key)
        if live is None:
            live = await get_live(self._kube, desired)
        if live is None:
            await require_parent(self._kube, parent)
        elif not is_owned_by(live, parent) or self._applied.is_in_sync(key, desired, live):
            return live
        applied = await self._kube.apply(annotated(desired), labels.FIELD_MANAGER)
        self._applied.record(key, desired, applied)
        self._cache.put(applied)
        return applied
