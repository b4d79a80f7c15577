"""Who goes when a tier shrinks: the emptiest, marked once, and never at the price of the shrinking itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.api import labels
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.autoscale import pod_deletion_cost
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.pod_deletion_cost import DELETION_COST_ANNOTATION, SCALE_DOWN_COST, select_pods
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.core.autoscaling.scale_down_candidates import UNKNOWN_LOAD, ReplicaLoad
from plimsoll.core.errors import ClusterError, Conflict, Forbidden
from plimsoll.core.ports import GatewayReading
from tests import builders
from tests.controllers.conftest import ControllerHarness
from tests.controllers.test_autoscale import arrivals

Object = dict[str, Any]

NOW_S = 1.8e9
PARENT = builders.service(tiers={"serve": {"minReplicas": 2, "maxReplicas": 2}})


def pod(name: str, *, ready: bool = True, created_second: int = 0, marked: bool = False) -> Object:
    made = builders.pod(PARENT, "serve", name, conditions=[{"type": "Ready", "status": "True" if ready else "False"}])
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{created_second:02}Z"
    if marked:
        made["metadata"]["annotations"] = {DELETION_COST_ANNOTATION: SCALE_DOWN_COST}
    return made


def selected_names(pods: list[Object], after: int, **sent: float) -> list[str]:
    going = select_pods(pods, after, lambda name: ReplicaLoad(sent.get(name), None))
    return [one["metadata"]["name"] for one, _ in going.least_loaded]


def test_select_prefers_youngest_of_equally_loaded() -> None:
    assert selected_names(
        [pod("a", created_second=1), pod("b", created_second=3), pod("c", created_second=2)], 1, a=1, b=1, c=1
    ) == ["b", "c"]


def test_select_unready_pods_go_first_without_annotation() -> None:
    pods = [pod("a"), pod("b"), pod("new", ready=False)]
    assert selected_names(pods, 2, a=0, b=0) == []
    assert selected_names(pods, 1, a=3, b=4) == ["a"]
    assert select_pods(pods, 2, lambda name: UNKNOWN_LOAD).unready_count == 1
    assert select_pods(pods, 2, lambda name: UNKNOWN_LOAD).summary == "", "nobody is selected_names"


def test_select_all_or_none_annotates_nothing() -> None:
    pods = [pod("a", marked=True), pod("b")]
    for after in (0, 2, 5):
        assert selected_names(pods, after, a=0, b=0) == []
    assert select_pods(pods, 0, lambda name: UNKNOWN_LOAD).retained == (), "what goes need not be unmarked"
    assert select_pods([], 3, lambda name: UNKNOWN_LOAD) == ((0, (), ()))


def test_select_unmarks_pods_that_stay() -> None:
    pods = [pod("a", marked=True), pod("b"), pod("c", marked=True)]
    going = select_pods(pods, 1, lambda name: ReplicaLoad({"a": 9.0, "b": 0.0, "c": 1.0}[name], None))
    assert [one["metadata"]["name"] for one, _ in going.least_loaded] == ["b", "c"]
    assert [one["metadata"]["name"] for one in going.retained] == ["a"]


def test_selection_summary_names_few_and_counts_rest() -> None:
    pods = [pod(f"p{n}", created_second=n) for n in range(8)] + [pod("p8", ready=False)]
    words = select_pods(pods, 2, lambda name: ReplicaLoad(float(name[1:]), None)).summary
    assert words == (
        "deleted first: 1 not ready, p0 (0 in flight), p1 (1 in flight), p2 (2 in flight),"
        " p3 (3 in flight), p4 (4 in flight), 1 more"
    )


class Recorder(KubeClient):
    """Keeps what is written; `refuses` is raised by every mark, `hangs` never answers one."""

    def __init__(self, refuses: ClusterError | None = None, *, hangs: bool = False) -> None:
        self.marks: list[tuple[str, str | None]] = []
        self.scaled: list[int] = []
        self.refuses, self.hangs = refuses, hangs

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        assert not self.scaled, "too late: the tier has shrunk already"
        assert manager == labels.SCALER_FIELD_MANAGER
        if self.hangs:
            await asyncio.Event().wait()
        if self.refuses is not None:
            raise self.refuses
        meta = obj["metadata"]
        self.marks.append((meta["name"], meta.get("annotations", {}).get(DELETION_COST_ANNOTATION)))
        found = {**pod(meta["name"], marked="annotations" in meta)}
        found["metadata"]["resourceVersion"] = "6"
        return found

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        self.scaled.append(replicas)


async def shrink(kube: KubeClient, *, replicas: int = 4) -> tuple[list[Event], ObjectCache]:
    """One tick for a service that wants 2 of so many replicas; c and a are the emptiest."""
    store, reported = ObjectCache(), list[Event]()
    sent = {"a": 1, "b": 7, "c": 0, "d": 3}
    store.put(PARENT)
    store.put(builders.deployment(PARENT, "serve", replicas=replicas, ready=replicas))
    for name in list(sent)[:replicas]:
        store.put(pod(name, marked=name == "d"))
    reading = GatewayReading("gw-1", NOW_S, "a", {"team/chat": replace(arrivals(9.0), inflight=sent)})

    async def report_event(_: Object, event: Event) -> None:
        reported.append(event)

    sources = SignalSources(lambda: ((reading,), ("gw-1",)), lambda namespace, pod: None, lambda namespace, pod: None)
    scaler = Autoscaler(store, kube, sources, report_event, lambda key: None)
    scaler.tick(NOW_S)
    await scaler.finish_writes()
    return reported, store


async def test_scale_down_annotates_selected_pods_and_names_them() -> None:
    kube = Recorder()
    [event], store = await shrink(kube)
    assert sorted(kube.marks, key=str) == [("a", SCALE_DOWN_COST), ("c", SCALE_DOWN_COST), ("d", None)]
    assert kube.scaled == [2]
    assert event.reason is EventReason.SCALED_DOWN
    assert event.message.endswith("; deleted first: c (0 in flight), a (1 in flight)")
    kept = {
        one["metadata"]["name"]: DELETION_COST_ANNOTATION in one["metadata"].get("annotations", {})
        for one in store.all("Pod")
    }
    assert kept == {"a": True, "b": False, "c": True, "d": False}, "what was written is known at once"


@pytest.mark.parametrize("replicas", [1, 2])
async def test_scale_up_or_unchanged_annotates_nothing(replicas: int) -> None:
    kube = Recorder()
    await shrink(kube, replicas=replicas)
    assert kube.marks == []


async def test_annotation_forbidden_leaves_choice_to_kubernetes() -> None:
    kube = Recorder(Forbidden("pods is forbidden", 403))
    [event], _ = await shrink(kube)
    assert kube.scaled == [2]
    assert event.message.endswith("; Kubernetes selects the pods to delete, because pod-deletion-cost could not be set")


async def test_annotation_conflict_of_deleted_pod_is_ignored() -> None:
    kube = Recorder(Conflict("the UID in the precondition differs", 409))
    [event], _ = await shrink(kube)
    assert kube.scaled == [2]
    assert "deleted first" in event.message


async def test_annotation_timeout_does_not_delay_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_deletion_cost, "ANNOTATE_TIMEOUT_SECONDS", 0.01)
    kube = Recorder(hangs=True)
    [event], _ = await shrink(kube)
    assert kube.scaled == [2]
    assert "Kubernetes selects" in event.message


async def test_annotate_round_trips_through_api_server(world: ControllerHarness) -> None:
    spec = {"containers": [{"name": "engine", "image": "example.com/engine:1"}]}
    meta = {"name": "a", "namespace": world.namespace, "annotations": {"team": "ours"}}
    made = await world.kube.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
    store = ObjectCache()
    await pod_deletion_cost.annotate(
        world.kube, store, pod_deletion_cost.ScaleDownSelection(0, ((made, UNKNOWN_LOAD),), ())
    )
    marked = await world.get("Pod", "a")
    assert marked["metadata"]["annotations"] == {"team": "ours", DELETION_COST_ANNOTATION: SCALE_DOWN_COST}
    writes = world.kube.writes
    await pod_deletion_cost.annotate(
        world.kube, store, pod_deletion_cost.ScaleDownSelection(0, ((marked, UNKNOWN_LOAD),), ())
    )
    assert world.kube.writes == writes, "it is marked already"
    await pod_deletion_cost.annotate(world.kube, store, pod_deletion_cost.ScaleDownSelection(0, (), (marked,)))
    assert (await world.get("Pod", "a"))["metadata"]["annotations"] == {"team": "ours"}
    gone = {**made, "metadata": {**made["metadata"], "name": "b"}}
    await pod_deletion_cost.annotate(
        world.kube, store, pod_deletion_cost.ScaleDownSelection(0, ((gone, UNKNOWN_LOAD),), ())
    )
    assert await world.names("Pod") == ["a"]
