"""What the operator publishes of the engines of a service, so that gateways need not read pods.

Problem: an EndpointSlice has the address and readiness of a pod, but not the revision of its KV blocks, whether it
requires TLS, or how it leaves. A gateway that reads pods for that reads their whole specification.

Idea: what a pod template decides is published per template, so a new pod needs no write. Only what differs from the
template of its tier is published for a ReplicaSet or a single pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from plimsoll.core import codec
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.codec import Count

MAX_PUBLISHED: Final = 2000  # templates that differ, and as many pods; engines beyond are not used


class PodState(StrEnum):
    """How a pod differs from one of its template. The values are those of the published object.

    A leaving pod that is not published hands over, if engines of its template do.
    """

    AT_ONCE = "AtOnce"  # leaves at once: preempted, or with a short grace period
    DRAINED_NODE = "DrainedNode"  # hands over, and gives no room to others
    EARLIER = "Earlier"  # an engine of an earlier service of this name


@codec.stored_as(
    "an engine template",
    optional=("revision", "tls", "max_queued", "max_model_len", "hands_over"),
    max_queued="maxQueued",
    max_model_len="maxModelLen",
    hands_over="handsOver",
)
@dataclass(frozen=True, slots=True)
class EngineTemplate:
    """What is the same for all engines of one pod template.

    revision: engines of one revision can exchange KV blocks. tls: they require mutual TLS. max_queued: sequences that
    an engine accepts at once. max_model_len: the longest sequence in tokens, 0 if the arguments leave it to the model.
    hands_over: a leaving engine takes requests until another one is ready.
    """

    revision: str = ""
    tls: bool = False
    max_queued: Count = MAX_REQUEST_SEQUENCES
    max_model_len: Count = 0
    hands_over: bool = False


@codec.stored_as(
    "published engines",
    version=1,
    optional=("others", "pods", "unplaced"),
)
@dataclass(frozen=True)
class PublishedEngines:
    """The engines of one service.

    - `current`: the template of each tier, by role, from which new pods are made. It lacks a role while some of its
      pods can be known by `others` alone.
    - `others`: templates that differ from it, by the name of a ReplicaSet, or by the uid of a pod that has none.
    - `pods`: `PodState` of pods, by uid.
    - `unplaced`: roles of which a pod waits for room in the cluster.
    """

    current: Mapping[str, EngineTemplate]
    others: Mapping[str, EngineTemplate] = field(default_factory=dict)
    pods: Mapping[str, str] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()

    def template_of(self, role: str, pod: str, uid: str) -> EngineTemplate | None:
        """Returns the template of a pod, None for one that is not known: it is not to be used.

        The name of a ReplicaSet is that of its pods without the last part.
        """
        return self.others.get(uid) or self.others.get(pod.rpartition("-")[0]) or self.current.get(role)
