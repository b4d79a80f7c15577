"""The watch of InferencePools in the picker's namespace."""

from __future__ import annotations

from plimsoll.adapters.kube_client import INFERENCEPOOLS
from plimsoll.api.conditions import Condition
from plimsoll.controllers.inference_pools import pool_conditions
from plimsoll.controllers.optional_kind import OptionalKindWatch


class PoolWatch(OptionalKindWatch[Condition]):
    """Keeps the pools of one namespace in the cache. `on_change` is called with each service to reconcile again."""

    resource = INFERENCEPOOLS
    missing = pool_conditions.KIND_MISSING

    def rejected(self, message: str) -> Condition:
        return pool_conditions.rejected(message)
