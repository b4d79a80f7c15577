"""What gateways are to know of the engines of a service, from its workloads and pods. Pure.

Problem: gateways read EndpointSlices, which say nothing of the template of a pod or why it leaves. They need it of each
pod at once, also of one that appears while the operator is down.

Idea: the template of each tier is published before the workload gets it. Of pods, only what differs from that. Where a
pod's name does not say which template it has, or more differs than can be published, the template of the tier is left
out: then gateways use only the pods that are published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, islice, takewhile
from typing import Any, Final

from plimsoll.adapters.engine_of_pod import engine_args, engine_of, has_launcher
from plimsoll.adapters.object_size import measure
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers import tier_workload
from plimsoll.controllers.object_cache import role_of
from plimsoll.core import codec
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.published_engines import MAX_PUBLISHED, EngineTemplate, PodState, PublishedEngines
from plimsoll.core.types import Role

Object = dict[str, Any]

_EVICTED: Final = "EvictionByEvictionAPI"  # reason of DisruptionTarget: the node is drained, and gives no room
_PREEMPTED: Final = "PreemptionByScheduler"  # another pod waits for the engine's room
_MAX_FIGURE: Final = 2**53  # of an argument, so that its JSON is exact
_MAX_BYTES: Final = 352 * 1024  # of the entries of one list, so that readers keep the object (`MAX_CHILD_BYTES`)


def published_engines(
    workloads: Iterable[Object],
    pods: Iterable[Object],
    earlier_pods: Iterable[Object],
    targets: Iterable[str] = (),
) -> PublishedEngines:
    """What to publish of one service. workloads: as they are to be. pods: of its tiers, or copies of its targets'.

    earlier_pods: that an earlier service of its name has left. targets: roles of targets, whose engines take requests
    also while the operator cannot read them.
    """
    engines = sorted((pod for pod in pods if role_of(pod) in set(Role)), key=_age)
    current: dict[str, EngineTemplate] = dict.fromkeys(targets, EngineTemplate())
    current |= {role_of(pod): template_of(pod) for pod in engines if labels.ADOPTED in pod}  # that of the youngest
    current |= {role_of(one): _template_of_workload(one) for one in workloads}
    known = [(role_of(pod), _template_key(pod), template_of(pod), pod) for pod in engines]
    earlier = {_uid(pod): role_of(pod) for pod in earlier_pods if role_of(pod) in set(Role)}
    absent = {role for role, key, template, pod in known if key == _uid(pod) and template != current.get(role)}
    absent |= {earlier[uid] for uid in earlier.keys() - _bounded(earlier).keys()}
    others = _others(known, current, absent)
    if beyond := others.keys() - _bounded(others).keys():
        absent |= {role for role, key, _, _ in known if key in beyond}
        others = _others(known, current, absent)
    states = {_uid(pod): state for _, _, template, pod in known if (state := _state(pod, template)) is not None}
    return PublishedEngines(
        {role: template for role, template in current.items() if role not in absent},
        _bounded(others),
        dict(islice({**dict.fromkeys(sorted(earlier), PodState.EARLIER), **states}.items(), MAX_PUBLISHED)),
        tuple(sorted({role_of(pod) for pod in engines if is_unplaced(pod)})),
    )


def left_out(published: PublishedEngines, pods: Iterable[Object]) -> int:
    """Returns the number of engines that gateways do not use, since more differ than can be published."""
    found = (pod for pod in pods if role_of(pod) in set(Role))
    return sum(published.template_of(role_of(pod), str(pod["metadata"]["name"]), _uid(pod)) is None for pod in found)


def left_out_event(count: int) -> Event:
    """Says that engines get no requests."""
    return Event(
        EventReason.ENGINES_LEFT_OUT,
        f"{count} of the engines get no requests, because more differ from their tier than can be published: "
        f"{MAX_PUBLISHED}, or fewer with long names. Let the rollout end, or divide the service.",
    )


def _others(
    known: Iterable[tuple[str, str, EngineTemplate, Object]],
    current: Mapping[str, EngineTemplate],
    absent: Collection[str],
) -> dict[str, EngineTemplate]:
    """The templates to publish by ReplicaSet or pod. absent: roles without a template in `current`."""
    return {key: one for role, key, one, _ in known if role in absent or one != current.get(role)}


def template_of(pod: Object) -> EngineTemplate:
    """What the template of an engine pod says."""
    pod_labels = pod["metadata"].get("labels") or {}
    return EngineTemplate(
        revision="" if labels.ADOPTED in pod else pod_labels.get(labels.REVISION, ""),
        tls=pod_labels.get(labels.TLS) == labels.MUTUAL_TLS,
        max_queued=_max_queued(pod),
        max_model_len=_figure(engine_of(pod).max_model_len(engine_args(pod))),
        hands_over=has_launcher(pod) and labels.SET_NAME not in pod_labels,
    )


def is_unplaced(pod: Object) -> bool:
    """Whether the scheduler has found no node for a pod that is to stay."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any(one.get("type") == "PodScheduled" and one.get("status") == "False" for one in _conditions(pod))


def _template_of_workload(workload: Object) -> EngineTemplate:
    """What the template of a tier says. The leader of several pods has a label that its controller sets."""
    template = tier_workload.pod_template(workload)
    meta = template.get("metadata") or {}
    own = {labels.SET_NAME: ""} if tier_workload.is_set(workload) else {}
    return template_of({**template, "metadata": {**meta, "labels": {**(meta.get("labels") or {}), **own}}})


def _state(pod: Object, template: EngineTemplate) -> PodState | None:
    """How a leaving pod differs from one that is deleted without a reason, None if it does not."""
    meta, spec = pod["metadata"], pod.get("spec") or {}
    if not meta.get("deletionTimestamp") or not template.hands_over:
        return None
    reason = _disruption(pod)
    grace_s, full_grace_s = meta.get("deletionGracePeriodSeconds"), spec.get("terminationGracePeriodSeconds")
    is_hurried = grace_s is not None and full_grace_s is not None and grace_s < full_grace_s
    if is_hurried or reason == _PREEMPTED:
        return PodState.AT_ONCE
    return PodState.DRAINED_NODE if reason == _EVICTED else None


def _template_key(pod: Object) -> str:
    """The ReplicaSet of a pod, if the pod's name says it; a long one is cut there. Else the pod's uid."""
    meta = pod["metadata"]
    owners = {one.get("name") for one in meta.get("ownerReferences") or () if one.get("kind") == "ReplicaSet"}
    name = str(meta["name"]).rpartition("-")[0]
    return name if name in owners else _uid(pod)


def _max_queued(pod: Object) -> int:
    """How many sequences the engine of a pod accepts at once, by the rule that its launcher uses too."""
    if labels.ADOPTED in pod:  # no launcher limits it
        return MAX_REQUEST_SEQUENCES
    limits = engine_contract().limits
    limit = engine_of(pod).queue_limit(engine_args(pod), limits["queued_requests"], limits["queued_per_sequence"])
    return _figure(limit) or MAX_REQUEST_SEQUENCES


def _figure(value: int | None) -> int:
    return min(max(value or 0, 0), _MAX_FIGURE)


def _disruption(pod: Object) -> str:
    """The reason of the pod's DisruptionTarget, "" without one."""
    targets = (one for one in _conditions(pod) if one.get("type") == "DisruptionTarget" and one.get("status") == "True")
    return str(next(targets, {}).get("reason", ""))


def _conditions(pod: Object) -> Iterable[Object]:
    return (pod.get("status") or {}).get("conditions") or ()


def _bounded(found: Mapping[str, Any]) -> dict[str, Any]:
    """The first entries by name, as many as can be published."""
    names = sorted(found)[:MAX_PUBLISHED]
    sizes = accumulate(measure({name: None})[0] + _bytes(found[name]) for name in names)
    fitting = takewhile(lambda size: size <= _MAX_BYTES, sizes)
    return {name: found[name] for name, _ in zip(names, fitting, strict=False)}


@lru_cache(maxsize=MAX_PUBLISHED)
def _bytes(value: EngineTemplate | str) -> int:
    return measure(codec.encode(value))[0]


def _age(pod: Object) -> tuple[str, str]:
    return str(pod["metadata"].get("creationTimestamp", "")), str(pod["metadata"]["name"])


def _uid(pod: Object) -> str:
    return str(pod["metadata"].get("uid", ""))
