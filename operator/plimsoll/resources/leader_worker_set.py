"""The LeaderWorkerSet of a tier whose engines have several pods each. Pure.

Problem: an engine of several nodes is ready or not as a whole, and clients reach only the pod with its API server.

Idea: the leader is the engine's pod as in a Deployment. The workers have the same template, but another label in place
of the role: so gateways, scrapers and the Service see leaders only. The launcher learns which of them it is from the
variables that the LeaderWorkerSet controller sets. Once a container of a group restarts, or a pod is deleted, the
controller replaces the whole group.

Schedulers that place a group as a whole read the LeaderWorkerSet (Kueue a label, Volcano an annotation): it has the
labels and annotations that the user gives its pods.
"""

from __future__ import annotations

from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import EngineTier, RoleName
from plimsoll.resources import object_meta

Object = dict[str, Any]


def templates(role: RoleName, leader: Object) -> Object:
    """The templates of leader and workers, which a ControllerRevision stores. leader: the pod template of the tier.

    Their pods tell by a label which template they have.
    """
    leader_labels = {**leader["metadata"]["labels"], labels.TEMPLATE: object_meta.short_hash(leader)}
    own = {name: value for name, value in leader_labels.items() if name != labels.ROLE}
    worker_labels = {**own, labels.COMPONENT: f"{role}-worker", labels.WORKER_OF: role}
    # The spread of the leaders does not select workers.
    spec = {name: value for name, value in leader["spec"].items() if name != "topologySpreadConstraints"}
    worker = {"metadata": {**leader["metadata"], "labels": worker_labels}, "spec": spec}
    return {
        "leaderTemplate": {**leader, "metadata": {**leader["metadata"], "labels": leader_labels}},
        "workerTemplate": worker,
    }


def leader_worker_set(tier: EngineTier, metadata: Object, stored: Object, replicas: int | None) -> Object:
    """The LeaderWorkerSet. stored: `templates`. replicas: None if another field manager owns that field."""
    topology = tier.exclusive_topology
    exclusive = {} if topology is None else {labels.SET_EXCLUSIVE_TOPOLOGY: topology}
    annotations = {**tier.pod.annotations, **exclusive}
    own = {
        **metadata,
        "labels": {**tier.pod.labels, **metadata["labels"]},
        **({"annotations": annotations} if annotations else {}),
    }
    rollout = tier.rollout
    return {
        "apiVersion": labels.SET_API_VERSION,
        "kind": labels.SET_KIND,
        "metadata": own,
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "startupPolicy": "LeaderCreated",  # the leader becomes ready only with its workers
            # A Service for each leader, because the tier's own Service has the name of a shared one.
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxSurge": rollout.max_surge,
                    "maxUnavailable": rollout.max_unavailable,
                },
            },
            "leaderWorkerTemplate": {"size": tier.nodes, "restartPolicy": "RecreateGroupOnPodRestart", **stored},
        },
    }
