"""Pod deletion cost: makes a scale-down delete the least loaded engines.

Problem: a shrinking ReplicaSet does not choose the pods that `core.autoscaling.scale_down_candidates` selects.

Idea: among ready pods it deletes those with the lowest `controller.kubernetes.io/pod-deletion-cost` first (Kubernetes:
`ActivePodsWithRanks` in pkg/controller/controller_utils.go). Pods that are not ready go before any cost is compared.
So the selected ready pods are annotated just before a smaller count is set. An annotation that an earlier attempt left
on a retained pod is removed. The annotation is best effort: if it fails, the tier still shrinks. During a rollout each
revision is a ReplicaSet of its own, which compares its own pods only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from plimsoll.controllers import pod_startup
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.core.autoscaling.scale_down_candidates import ReplicaLoad, ScaleDownCandidate, select_for_removal
from plimsoll.core.errors import Conflict, NotFound

Object = dict[str, Any]

DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"
SCALE_DOWN_COST: Final = "-1"  # pods without the annotation cost 0
ANNOTATE_TIMEOUT_SECONDS: Final = (
    2.0  # for all annotations together, so that a slow API server does not delay a scale-down
)
MAX_NAMED_PODS_CHARS: Final = 80  # of the pods named in the Event; the first is always named


class ScaleDownSelection(NamedTuple):
    """The pods that a scale-down deletes.

    unready_count: pods that are not ready; Kubernetes deletes them first. least_loaded: ready pods to annotate, least
    loaded first. retained: pods that stay, but have an annotation from an earlier attempt.
    """

    unready_count: int
    least_loaded: tuple[tuple[Object, ReplicaLoad], ...]
    retained: tuple[Object, ...]

    @property
    def summary(self) -> str:
        """Text for the Event; empty if no pod is selected."""
        if not self.least_loaded:
            return ""
        named: list[str] = []
        for pod, load in self.least_loaded:
            text = f"{pod['metadata']['name']} ({load.description})"
            if named and sum(map(len, named)) + len(text) > MAX_NAMED_PODS_CHARS:
                break
            named.append(text)
        others = len(self.least_loaded) - len(named)
        unready = [f"{self.unready_count} not ready"] if self.unready_count else []
        return f"deleted first: {', '.join([*unready, *named, *([f'{others} more'] if others else [])])}"


def select_pods(pods: Iterable[Object], replicas: int, load_of: Callable[[str], ReplicaLoad]) -> ScaleDownSelection:
    """The pods to delete from a tier that keeps `replicas` pods; no ready pod is selected if all go.

    pods: those that are not terminating. load_of: the load of a pod, by name.
    """
    pods_by_name = {pod["metadata"]["name"]: pod for pod in pods}
    candidates = [
        ScaleDownCandidate(name, pod_startup.is_ready(pod), pod_startup.created_s(pod), load_of(name))
        for name, pod in pods_by_name.items()
    ]
    selected = select_for_removal(candidates, replicas)
    least_loaded = [candidate for candidate in selected if candidate.ready and replicas]
    retained_names = {candidate.name for candidate in candidates if candidate.ready and candidate not in selected}
    return ScaleDownSelection(
        unready_count=sum(not candidate.ready for candidate in selected),
        least_loaded=tuple((pods_by_name[candidate.name], candidate.load) for candidate in least_loaded),
        retained=tuple(
            pod for name, pod in pods_by_name.items() if name in retained_names and _has_scale_down_cost(pod)
        ),
    )


async def annotate(kube: KubeClient, cache: ObjectCache, selection: ScaleDownSelection) -> None:
    """Write the annotations that differ, and update the cache. Raises ClusterError or TimeoutError."""
    patches = [_cost_patch(pod, SCALE_DOWN_COST) for pod, _ in selection.least_loaded if not _has_scale_down_cost(pod)]
    patches += [_cost_patch(pod, None) for pod in selection.retained]
    async with asyncio.timeout(ANNOTATE_TIMEOUT_SECONDS):
        for failure in await asyncio.gather(*(_apply(kube, cache, patch) for patch in patches), return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, NotFound | Conflict):
                raise failure  # a deleted pod needs no annotation


async def _apply(kube: KubeClient, cache: ObjectCache, patch: Object) -> None:
    cache.put(await kube.apply(patch, labels.SCALER_FIELD_MANAGER))


def _cost_patch(pod: Object, cost: str | None) -> Object:
    """Patch with the pod's uid, so that an apply cannot re-create a deleted pod."""
    meta = {name: pod["metadata"][name] for name in ("namespace", "name", "uid")}
    annotations = {} if cost is None else {"annotations": {DELETION_COST_ANNOTATION: cost}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta | annotations}


def _has_scale_down_cost(pod: Object) -> bool:
    return bool((pod["metadata"].get("annotations") or {}).get(DELETION_COST_ANNOTATION) == SCALE_DOWN_COST)
