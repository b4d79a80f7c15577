"""Who goes when a tier shrinks: the emptiest engines, named to Kubernetes before it is told to take some away.

Problem: a ReplicaSet that shrinks takes the pods that are not ready and then the youngest, whatever runs on them, so
that the busiest engine is drained while an idle one stays.

Idea: among ready pods it takes those of the lowest `controller.kubernetes.io/pod-deletion-cost` first (Kubernetes:
`ActivePodsWithRanks` in pkg/controller/controller_utils.go; pods that are not ready come before the cost is looked at).
So only as many pods are marked as ready ones must go, and only when a smaller count is about to be set; a mark that an
earlier try has left on a pod which stays is taken back. It is advice: a cluster that does not take it in time shrinks
the tier all the same. During a rollout each revision is a ReplicaSet, which follows the marks among its own pods.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from plimsoll.adapters.kube import Kube
from plimsoll.api import labels
from plimsoll.controllers import starts
from plimsoll.controllers.store import Store
from plimsoll.core.errors import Conflict, NotFound
from plimsoll.core.ports import GatewayReading

Object = dict[str, Any]

MARK: Final = "controller.kubernetes.io/pod-deletion-cost"
COST: Final = "-1"  # those without a mark cost 0
MARK_SECONDS: Final = 2.0  # for all marks together: a slow cluster must not hold up what is to go
NAMED: Final = 4  # pods in the words for people; a list of fifty helps nobody


class Load(NamedTuple):
    """Requests at one engine. sent: by the gateways' count, running: by its own; None where nobody told.

    Gateways count to the second; the engine is asked seldom, but knows of those that came past every gateway.
    """

    sent: float | None
    running: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Less is emptier; what nobody tells of is not taken for empty."""
        counts = [math.inf if count is None else count for count in (self.sent, self.running)]
        return (counts[0], counts[1]) if self.sent is not None else (counts[1], counts[1])

    @property
    def words(self) -> str:
        count = self.running if self.sent is None else self.sent
        return "load not known" if count is None else f"{count:.0f} in flight"


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

    Of equally empty ones the youngest goes, which has the least in its prefix cache. Where all go, nobody is chosen.
    """
    present = list(pods)
    able = sorted((pod for pod in present if starts.is_ready(pod)), key=_created, reverse=True)
    ranked = sorted(((pod, load(pod["metadata"]["name"])) for pod in able), key=lambda one: one[1].rank)
    count = len(able) - after if 0 < after < len(able) else 0
    return Going(
        unready=max(0, min(len(present) - len(able), len(present) - after)),
        emptiest=tuple(ranked[:count]),
        spared=tuple(pod for pod, _ in ranked[count:] if after and _marked(pod)),
    )


def load(readings: Iterable[GatewayReading], service: str, pod: str, running: float | None) -> Load:
    """What gateways say of one pod of a service (NAMESPACE/NAME), beside what its engine said."""
    told = [reading.services[service].inflight for reading in readings if service in reading.services]
    return Load(float(sum(counts.get(pod, 0) for counts in told)) if told else None, running)


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


def _created(pod: Object) -> str:
    return str(pod["metadata"].get("creationTimestamp", ""))
