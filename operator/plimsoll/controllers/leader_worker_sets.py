"""The watch of LeaderWorkerSets, and the problem of tiers with several nodes while the cluster has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from plimsoll.adapters.kube_client import LEADERWORKERSETS, KubeClient
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.optional_kind import CHECK_SECONDS, OptionalKindWatch
from plimsoll.controllers.reconcile.pod_diagnosis import PodProblem


def _unusable(message: str) -> PodProblem:
    return PodProblem(ConditionReason.LEADER_WORKER_SETS_UNUSABLE, message)


KIND_MISSING: Final = _unusable(
    f"nodes above 1 needs the kind {labels.SET_KIND} of {labels.SET_API_VERSION}, which the cluster does not have;"
    " install the LeaderWorkerSet controller (https://lws.sigs.k8s.io), or leave nodes out"
)


class LeaderWorkerSetWatch(OptionalKindWatch[PodProblem]):
    """Keeps the LeaderWorkerSets of the operator in the cache, those of one namespace or of all."""

    resource = LEADERWORKERSETS
    selector = f"{labels.MANAGED_BY}=plimsoll,{labels.SERVICE}"
    missing = KIND_MISSING

    def rejected(self, message: str) -> PodProblem:
        return _unusable(message)


class LeaderWorkerSetWatches:
    """The watches of all namespaces that the operator watches."""

    def __init__(
        self,
        kube: KubeClient,
        cache: ObjectCache,
        namespaces: Sequence[str],
        on_change: Callable[[Key], None],
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """namespaces: empty for all."""
        self._watches = {
            namespace: LeaderWorkerSetWatch(kube, cache, namespace, on_change, check_seconds)
            for namespace in namespaces or (None,)
        }

    @property
    def is_synced(self) -> bool:
        """Whether the cache has all LeaderWorkerSets, or it is known why it has none."""
        return all(watch.is_synced for watch in self._watches.values())

    def parts(self) -> list[Callable[[], Awaitable[None]]]:
        """The work of each watch, which never ends."""
        return [watch.run for watch in self._watches.values()]

    def problem(self, namespace: str) -> PodProblem | None:
        """Why no LeaderWorkerSet can be applied in a namespace; None if one can."""
        watch = self._watches.get(namespace) or self._watches.get(None)
        return None if watch is None else watch.problem
