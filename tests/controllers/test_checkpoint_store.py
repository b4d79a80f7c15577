"""Learned state in an object of its own: written when it changes, restored for the same service only."""

from __future__ import annotations

import base64
import logging
import zlib
from typing import Any

import orjson
import pytest

from plimsoll.adapters.kube_client import INFERENCESERVICECHECKPOINTS, KubeClient
from plimsoll.adapters.normalize import normalize
from plimsoll.api.v1alpha1 import MAX_STATE_CHARS
from plimsoll.controllers.autoscale import learned_state
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.errors import BackendUnavailable, Forbidden, NotFound, ObjectRejected
from tests import builders
from tests.controllers.conftest import ControllerHarness

Object = dict[str, Any]


class FakeKube(KubeClient):
    """Answers a list with `items` or `error`, and counts the objects that are applied."""

    def __init__(self, items: tuple[Object, ...] = (), error: Exception | None = None) -> None:
        self.items, self.error = items, error
        self.applied: list[Object] = []

    async def list(self, *_: Any) -> tuple[list[Object], str]:
        if self.error is not None:
            raise self.error
        return [normalize(item) for item in self.items], "1"

    async def apply(self, obj: Object, *_: Any, **__: Any) -> Object:
        self.applied.append(obj)
        if self.error is not None:
            raise self.error
        return obj


def checkpoint(parent: Object, state: object) -> Object:
    owner = {"uid": parent["metadata"]["uid"], "controller": True}
    meta = {"name": parent["metadata"]["name"], "namespace": parent["metadata"]["namespace"]}
    return {"metadata": {**meta, "ownerReferences": [owner]}, "state": state}


@pytest.mark.api
async def test_checkpoint_is_written_once_and_restored_by_next_process(world: ControllerHarness) -> None:
    parent = await world.create(slo={"ttft": "2s", "tpot": "50ms"}, tiers={"serve": {"minReplicas": 1}})
    first = await world.reconcile_once("chat")
    await first.reconciler.reconcile((world.namespace, "chat"))
    stored = await world.kube.get(INFERENCESERVICECHECKPOINTS, world.namespace, "chat")
    assert "learned" not in (await world.get("InferenceService", "chat"))["status"]
    assert stored["metadata"]["ownerReferences"][0]["uid"] == parent["metadata"]["uid"]
    assert orjson.loads(zlib.decompress(base64.b64decode(stored["state"]["zlib"])))["version"] == 1
    await first.reconciler.reconcile((world.namespace, "chat"))
    unchanged = await world.kube.get(INFERENCESERVICECHECKPOINTS, world.namespace, "chat")
    assert unchanged["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"]
    successor = CheckpointStore(world.kube)
    await successor.load([world.namespace])
    assert successor.get(parent) == stored["state"]["zlib"]


async def test_checkpoint_of_deleted_service_is_not_restored() -> None:
    parent = builders.service()
    store = CheckpointStore(FakeKube((checkpoint(parent, {"zlib": "c3RhdGU="}),)))
    await store.load([None])
    assert store.get(parent) == "c3RhdGU="
    successor = {**parent, "metadata": {**parent["metadata"], "uid": "another"}}
    assert store.get(successor) is None
    store.forget((parent["metadata"]["namespace"], parent["metadata"]["name"]))
    assert store.get(parent) is None


@pytest.mark.parametrize("state", [None, 7, "text", {}, {"zlib": None}, {"zlib": 3}, {"zlib": ["x"]}])
async def test_unreadable_checkpoint_is_no_checkpoint(state: object) -> None:
    parent = builders.service()
    store = CheckpointStore(FakeKube((checkpoint(parent, state), {"metadata": {"name": "x"}})))
    await store.load([None])
    assert store.get(parent) is None


@pytest.mark.parametrize("text", ["", "no base64", "AAAA", base64.b64encode(zlib.compress(b"[1]")).decode()])
def test_unreadable_state_leaves_fresh_state(text: str) -> None:
    fresh, restored = ServiceState.for_roles(["serve"]), ServiceState.for_roles(["serve"])
    learned_state.restore(restored, text)
    assert learned_state.encode(restored) == learned_state.encode(fresh)


def test_state_that_expands_without_bound_is_ignored() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (64 << 20), 9)).decode()
    fresh, restored = ServiceState.for_roles(["serve"]), ServiceState.for_roles(["serve"])
    learned_state.restore(restored, bomb)
    assert learned_state.encode(restored) == learned_state.encode(fresh)


@pytest.mark.parametrize("error", [NotFound("no such kind", 404), Forbidden("not allowed", 403)])
async def test_missing_kind_costs_learned_state_only(error: Exception) -> None:
    store, parent = CheckpointStore(FakeKube(error=error)), builders.service()
    await store.load([None])
    await store.write(parent, "c3RhdGU=")
    assert store.get(parent) == "c3RhdGU=", "the next attempt is that of the next state"


async def test_unanswered_write_is_retried() -> None:
    kube, parent = FakeKube(error=BackendUnavailable("slow", 503)), builders.service()
    store = CheckpointStore(kube)
    with pytest.raises(BackendUnavailable):
        await store.write(parent, "c3RhdGU=")
    kube.error = None
    await store.write(parent, "c3RhdGU=")
    assert len(kube.applied) == 2


async def test_rejected_write_is_logged_with_service(caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(FakeKube(error=ObjectRejected("quota", 422)))
    with caplog.at_level(logging.WARNING):
        await store.write(builders.service(), "c3RhdGU=")
    assert [record.__dict__["service"] for record in caplog.records] == ["team/chat"]


async def test_oversized_state_is_not_sent() -> None:
    kube = FakeKube()
    await CheckpointStore(kube).write(builders.service(), "x" * (MAX_STATE_CHARS + 1))
    assert kube.applied == []


async def test_checkpoint_from_backup_gets_its_service_as_owner() -> None:
    """A restored service has another uid, and Kubernetes would delete a checkpoint with the former one."""
    parent, kube = builders.service(), FakeKube()
    restored = checkpoint(parent, {"zlib": "c3RhdGU="})
    del restored["metadata"]["ownerReferences"]
    kube.items = (restored,)
    store = CheckpointStore(kube)
    await store.load([None])
    assert store.get(parent) == "c3RhdGU="
    for _ in range(2):
        await store.write(parent, "c3RhdGU=")
    [bound] = kube.applied
    assert bound["metadata"]["ownerReferences"][0]["uid"] == parent["metadata"]["uid"]
    assert store.get({**parent, "metadata": {**parent["metadata"], "uid": "another"}}) is None
