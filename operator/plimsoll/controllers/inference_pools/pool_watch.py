"""The watch of InferencePools in the picker's namespace."""

from __future__ import annotations

from collections.abc import Callable

from plimsoll.adapters.kube_client import INFERENCEPOOLS, KubeClient
from plimsoll.api.conditions import Condition
from plimsoll.controllers.inference_pools.pool_conditions import KIND_MISSING, rejected
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.optional_kind import CHECK_SECONDS, RETRY_SECONDS, OptionalKindWatch


class PoolWatch(OptionalKindWatch[Condition]):
    """Keeps the pools of one namespace in the cache. `on_change` is called with each service to reconcile again."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        namespace: str,
        on_change: Callable[[Key], None],
        check_seconds: float = CHECK_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        super().__init__(
            kube,
            cache,
            INFERENCEPOOLS,
            namespace,
            on_change,
            missing=KIND_MISSING,
            rejected=rejected,
            check_seconds=check_seconds,
            retry_seconds=retry_seconds,
        )
