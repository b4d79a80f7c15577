"""Who goes when a tier shrinks: the emptiest engines, named to Kubernetes before it is told to take some away.

Problem: which replicas are to go (`core.scaling.leaving`) is not what a ReplicaSet that shrinks takes by itself.

Idea: among ready pods it takes those of the lowest `controller.kubernetes.io/pod-deletion-cost` first (Kubernetes:
`ActivePodsWithRanks` in pkg/controller/controller_utils.go; pods that are not ready come before the cost is looked at).
So only as many pods are marked as ready ones must go, and only when a smaller count is about to be set; a mark that an
earlier try has left on a pod which stays is taken back. It is advice: a cluster that does not take it in time shrinks
the tier all the same. During a rollout each revision is a ReplicaSet, which follows the marks among its own pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from plimsoll.adapters.kube import Kube
from plimsoll.api import labels
from plimsoll.controllers import starts
from plimsoll.controllers.store import Store
from plimsoll.core.errors import Conflict, NotFound
from plimsoll.core.scaling.leaving import Candidate, Load, leaving

Object = dict[str, Any]

MARK: Final = "controller.kubernetes.io/pod-deletion-cost"
COST: Final = "-1"  # those without a mark cost 0
MARK_SECONDS: Final = 2.0  # for all marks together: a slow cluster must not hold up what is to go
NAMED: Final = 4  # pods in the words for people; a list of fifty helps nobody


class Going(NamedTuple):
    """What a smaller tier loses. unready: how many pods that are not ready go first, by themselves.

    emptiest: ready pods to be marked, the emptiest first. spared: pods that are marked and stay.
    """

    unready: int
    emptiest: tuple[tuple[Object, Load], ...]
    spared: tuple[Object, ...]

    @property
    def words(self) -> str:
        """Empty where nobody is chosen."""
        named = [f"{pod['metadata']['name']} ({load.words})" for pod, load in self.emptiest[:NAMED]]
        if len(self.emptiest) > NAMED:
            named.append(f"{len(self.emptiest) - NAMED} more")
        if self.unready:
            named.insert(0, f"{self.unready} not ready")
        return f"the emptiest go: {', '.join(named)}" if self.emptiest else ""


def choose(pods: Iterable[Object], after: int, load: Callable[[str], Load]) -> Going:
    """Who goes of a tier that is to keep `after` pods. pods: those that are not leaving; load: by a pod's name.

    Where all go, nobody is chosen.
    """
    present = {pod["metadata"]["name"]: pod for pod in pods}
    replicas = [
        Candidate(name, starts.is_ready(pod), starts.created_s(pod), load(name)) for name, pod in present.items()
    ]
    going = leaving(replicas, after)
    emptiest = [one for one in going if one.ready and after]
    staying = {one.name for one in replicas if one.ready and one not in going}
    return Going(
        unready=sum(not one.ready for one in going),
        emptiest=tuple((present[one.name], one.load) for one in emptiest),
        spared=tuple(pod for name, pod in present.items() if name in staying and _marked(pod)),
    )


async def mark(kube: Kube, store: Store, going: Going) -> None:
    """Write the marks that differ, and know them at once. Raises ClusterError, or TimeoutError."""
    due = [_wish(pod, COST) for pod, _ in going.emptiest if not _marked(pod)]
    due += [_wish(pod, None) for pod in going.spared]
    async with asyncio.timeout(MARK_SECONDS):
        for failure in await asyncio.gather(*(_write(kube, store, one) for one in due), return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, NotFound | Conflict):
                raise failure  # a pod that is gone needs no mark


async def _write(kube: Kube, store: Store, wish: Object) -> None:
    store.put(await kube.apply(wish, labels.SCALER))


def _wish(pod: Object, cost: str | None) -> Object:
    """With its uid, so that a pod that is gone is not asked for anew."""
    meta = {name: pod["metadata"][name] for name in ("namespace", "name", "uid")}
    annotations = {} if cost is None else {"annotations": {MARK: cost}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | annotations}


def _marked(pod: Object) -> bool:
    return bool((pod["metadata"].get("annotations") or {}).get(MARK) == COST)
