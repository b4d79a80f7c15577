"""The checkpoint objects of all services: listed once at the start, then only written.

Problem: what the operator has learned about a service must survive its process. In the service's status it would be
sent to every watcher, and printed by every `kubectl describe`.

Idea: each service owns an InferenceServiceCheckpoint of its own name, as a VerticalPodAutoscaler has its checkpoint.
Kubernetes deletes it with the service. A checkpoint that cannot be read or written costs learned state, nothing else.
One without an owner comes from a backup: it counts for the service of its name, and gets it as its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from plimsoll.adapters.kube_client import INFERENCESERVICECHECKPOINTS, KubeClient
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import MAX_STATE_CHARS
from plimsoll.controllers.object_cache import Key, key_of
from plimsoll.core.errors import Conflict, Forbidden, NotFound, ObjectRejected
from plimsoll.resources import object_meta
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)


class CheckpointStore:
    """The newest stored state of each service, as text."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        # The uid of the service, None for a checkpoint from a backup, and the state.
        self._stored: dict[Key, tuple[str | None, str]] = {}

    async def load(self, namespaces: Iterable[str | None]) -> None:
        """List the checkpoints of these namespaces; None stands for all. Without them the operator learns again."""
        for namespace in namespaces:
            try:
                items, _ = await self._kube.list(INFERENCESERVICECHECKPOINTS, namespace)
            except (NotFound, Forbidden) as error:
                log.warning(None, "cannot list the checkpoints; learned state starts empty", error=str(error))
                continue
            for item in items:
                state, uid = item.get("state"), object_meta.owner_uid(item)
                text = state.get("zlib") if isinstance(state, dict) else None
                if isinstance(text, str) and (uid is not None or not item["metadata"].get("ownerReferences")):
                    self._stored[key_of(item)] = uid, text

    def get(self, service_object: Object) -> str | None:
        """The state of this very service; None if there is none, or only that of a deleted one of its name."""
        uid, text = self._stored.get(key_of(service_object), ("", None))
        return text if uid in (service_object["metadata"]["uid"], None) else None

    async def write(self, service_object: Object, state: str | None) -> None:
        """Store a state that differs from the stored one. Raises BackendUnavailable if it is worth a retry."""
        key, meta = key_of(service_object), service_object["metadata"]
        if state is None or self._stored.get(key) == (meta["uid"], state):
            return
        if len(state) > MAX_STATE_CHARS:
            log.warning(key, "the learned state is too large to be stored", characters=len(state))
            return
        checkpoint = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.CHECKPOINT_KIND,
            "metadata": object_meta.child_metadata(
                service_object, meta["name"], object_meta.service_labels(meta["name"])
            ),
            "state": {"time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"), "zlib": state},
        }
        try:
            await self._kube.apply(checkpoint, labels.FIELD_MANAGER)
        except (NotFound, Forbidden, Conflict, ObjectRejected) as error:
            log.warning(key, "cannot store the learned state; a restart loses it", error=str(error))
        self._stored[key] = meta["uid"], state

    def forget(self, key: Key) -> None:
        """Drop the state of a deleted service."""
        self._stored.pop(key, None)
