"""Tiers with several nodes against a real API server. The controller of the groups is `pod_groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.adapters.kube_client import LEADERWORKERSETS, PODDISRUPTIONBUDGETS, PODS, SERVICES
from plimsoll.api import labels
from plimsoll.controllers.leader_worker_sets import KIND_MISSING, LeaderWorkerSetWatches
from plimsoll.controllers.object_cache import Key, ObjectCache, role_of
from plimsoll.controllers.replicas_owner import replicas_set_by
from plimsoll.core.errors import ClusterError, ObjectRejected
from tests.apiserver import ROOT, ApiServer
from tests.controllers.conftest import ControllerHarness, OperatorParts
from tests.controllers.pod_groups import make_groups, pods_of, set_conditions

pytestmark = pytest.mark.api

Object = dict[str, Any]

CRD = ROOT / "e2e" / "lib" / "leaderworkersets-crd.yaml"
CHECK_SECONDS = 0.05
DEADLINE_SECONDS = 30
TIER: Object = {"nodes": 2, "gpus": 4, "minReplicas": 1, "maxReplicas": 3}


@pytest.fixture
def crd(cluster: ApiServer) -> Iterator[Path]:
    cluster.install_crds([CRD])
    yield CRD
    cluster.delete_crds([CRD])


async def is_served(world: ControllerHarness) -> bool:
    """Whether the kind can be listed: right after its definition the API server prepares to store it."""
    try:
        await world.kube.list(LEADERWORKERSETS, world.namespace)
    except ClusterError:
        return False
    return await world.kube.discover(labels.SET_API_VERSION, labels.SET_KIND) is not None


async def until_served(world: ControllerHarness) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await is_served(world):
            await asyncio.sleep(CHECK_SECONDS)


@pytest.fixture
async def served(world: ControllerHarness, crd: Path) -> ControllerHarness:
    """A namespace of a cluster that has the kind."""
    await until_served(world)
    return world


def create(world: ControllerHarness, **tier: Any) -> Any:
    return world.create(tiers={"serve": {**TIER, **tier}})


async def observe(world: ControllerHarness, parts: OperatorParts) -> Object:
    """One round after the operator has seen the pods; returns the status."""
    parts.store.replace("Pod", await pods_of(world.kube, world.namespace))
    await world.reconcile_once("chat", parts)
    status: Object = (await world.service())["status"]
    return status


def degraded(status: Object) -> Object | None:
    return next((one for one in status["conditions"] if one["type"] == "ServeDegraded"), None)


async def test_tier_of_two_nodes_is_a_leader_worker_set(served: ControllerHarness) -> None:
    service = await create(served, exclusiveTopology="example.com/rack")
    await served.reconcile_once("chat")
    found = await served.get("LeaderWorkerSet", "chat-serve")
    [owner] = found["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (service["metadata"]["uid"], True)
    assert found["metadata"]["annotations"][labels.SET_EXCLUSIVE_TOPOLOGY] == "example.com/rack"
    spec, template = found["spec"], found["spec"]["leaderWorkerTemplate"]
    assert (spec["replicas"], template["size"]) == (1, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 1, "maxUnavailable": 0, "partition": 0}
    assert await served.names("Deployment") == []
    budget = await served.kube.get(PODDISRUPTIONBUDGETS, served.namespace, "chat-serve")
    assert budget["spec"]["selector"]["matchLabels"] == {labels.SET_NAME: "chat-serve"}
    assert degraded((await served.service())["status"]) is None


async def test_change_of_engine_changes_both_templates(served: ControllerHarness) -> None:
    service = await create(served)
    parts = await served.reconcile_once("chat")
    service["spec"]["engine"] = {"args": ["--max-num-seqs", "8"]}
    await served.edit(service)
    await served.reconcile_once("chat", parts)
    template = (await served.get("LeaderWorkerSet", "chat-serve"))["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        [engine] = template[part]["spec"]["containers"]
        assert {"name": "PLIMSOLL_ARGS", "value": '["--max-num-seqs", "8"]'} in engine["env"]


async def test_stored_template_stays_while_a_group_has_it(served: ControllerHarness) -> None:
    """The status of the LeaderWorkerSet is that of the former spec, and does not say so."""
    service = await create(served)
    parts = await served.reconcile_once("chat")
    first = await make_groups(served.kube, served.namespace, "chat-serve")
    await set_conditions(served.kube, first[0], Ready="True")
    meta = {"namespace": served.namespace, "name": "chat-serve"}
    available = {"type": "Available", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "conditions": [available]}
    stale = {"apiVersion": labels.SET_API_VERSION, "kind": labels.SET_KIND, "metadata": meta, "status": status}
    await served.kube.apply(stale, "sets", subresource="status")
    service["spec"]["engine"] = {"args": ["--max-num-seqs", "8"]}
    await served.edit(service)
    await served.reconcile_once("chat", parts)
    await observe(served, parts)
    assert len(await served.names("ControllerRevision")) == 2
    for pod in first:
        await served.kube.delete(PODS, served.namespace, pod["metadata"]["name"], pod["metadata"]["uid"])
    second = await make_groups(served.kube, served.namespace, "chat-serve")
    await set_conditions(served.kube, second[0], Ready="True")
    await observe(served, parts)
    assert len(await served.names("ControllerRevision")) == 1


async def test_leader_alone_counts_as_engine(served: ControllerHarness) -> None:
    await create(served)
    parts = await served.reconcile_once("chat")
    leader, worker = await make_groups(served.kube, served.namespace, "chat-serve")
    assert [role_of(leader), role_of(worker)] == ["serve", ""]
    await set_conditions(served.kube, worker, Ready="True")
    assert (await observe(served, parts))["tiers"]["serve"]["summary"] == "0/1"
    await set_conditions(served.kube, leader, Ready="True")
    assert (await observe(served, parts))["tiers"]["serve"]["summary"] == "1/1"


async def test_worker_without_node_degrades_the_tier(served: ControllerHarness) -> None:
    await create(served)
    parts = await served.reconcile_once("chat")
    _, worker = await make_groups(served.kube, served.namespace, "chat-serve")
    await set_conditions(served.kube, worker, PodScheduled="False")
    found = degraded(await observe(served, parts))
    assert found is not None
    assert found["reason"] == "Unschedulable"
    assert "pod chat-serve-0-1 is unschedulable: 0/2 nodes fit" in found["message"]


async def test_replica_count_is_set_through_the_scale(served: ControllerHarness) -> None:
    service = await create(served)
    await served.reconcile_once("chat")
    service["spec"]["tiers"]["serve"]["minReplicas"] = 2
    await served.edit(service)
    await served.reconcile_once("chat")
    found = await served.get("LeaderWorkerSet", "chat-serve")
    assert found["spec"]["replicas"] == 2
    owners = {one["manager"]: one.get("subresource") for one in found["metadata"]["managedFields"]}
    assert owners[labels.SCALER_FIELD_MANAGER] == "scale"
    assert len(await make_groups(served.kube, served.namespace, "chat-serve")) == 4
    await served.reconcile_once("chat")
    assert (await served.get("LeaderWorkerSet", "chat-serve"))["spec"]["replicas"] == 2


async def test_set_at_zero_has_no_other_writer(served: ControllerHarness) -> None:
    slo = {"ttft": "2s"}
    await served.create(tiers={"serve": {**TIER, "minReplicas": 0}}, slo=slo)
    await served.reconcile_once("chat")
    for replicas in (1, 0):
        await served.kube.scale(LEADERWORKERSETS, served.namespace, "chat-serve", replicas, labels.SCALER_FIELD_MANAGER)
    found = await served.get("LeaderWorkerSet", "chat-serve")
    assert (found["spec"]["replicas"], replicas_set_by(found)) == (0, None)
    meta = {"namespace": served.namespace, "name": "chat-serve"}
    other = {"apiVersion": labels.SET_API_VERSION, "kind": labels.SET_KIND, "metadata": meta, "spec": {"replicas": 3}}
    assert replicas_set_by(await served.kube.apply(other, "person")) == "person"


async def test_absent_kind_is_a_condition_until_installed(world: ControllerHarness, cluster: ApiServer) -> None:
    await create(world)
    parts = await world.reconcile_once("chat")
    found = degraded((await world.service())["status"])
    assert found is not None
    assert found["reason"] == "LeaderWorkerSetsUnusable"
    assert "install the LeaderWorkerSet controller (https://lws.sigs.k8s.io)" in found["message"]
    assert await world.names("Service") == ["chat-serve"]
    cluster.install_crds([CRD])
    try:
        await until_served(world)
        await world.reconcile_once("chat", parts)
        assert degraded((await world.service())["status"]) is None
        assert (await world.get("LeaderWorkerSet", "chat-serve"))["spec"]["replicas"] == 1
    finally:
        cluster.delete_crds([CRD])


async def test_absent_kind_leaves_other_services_alone(world: ControllerHarness) -> None:
    await world.create(tiers={"serve": {"minReplicas": 1}})
    await world.reconcile_once("chat")
    assert degraded((await world.service())["status"]) is None
    assert await world.names("Deployment") == ["chat-serve"]


@pytest.mark.parametrize("nodes", [1, 3])
async def test_nodes_cannot_change(served: ControllerHarness, nodes: int) -> None:
    service = await create(served)
    service["spec"]["tiers"]["serve"]["nodes"] = nodes
    with pytest.raises(ObjectRejected, match=r"spec.tiers.serve.*nodes cannot change: delete the service"):
        await served.edit(service)


async def test_service_of_a_tier_selects_no_worker(served: ControllerHarness) -> None:
    """Gateways find engines in its EndpointSlices."""
    await create(served)
    await served.reconcile_once("chat")
    await make_groups(served.kube, served.namespace, "chat-serve")
    service = await served.kube.get(SERVICES, served.namespace, "chat-serve")
    selector = ",".join(f"{name}={value}" for name, value in service["spec"]["selector"].items())
    listed, _ = await served.kube.list(PODS, served.namespace, selector)
    assert [one["metadata"]["name"] for one in listed] == ["chat-serve-0"]


async def test_watch_follows_kind_and_objects(world: ControllerHarness, cluster: ApiServer) -> None:
    """The kind is absent, comes, has an object that changes, and goes; each time the service is reconciled again."""
    await create(world)
    cache, changed, key = ObjectCache(), asyncio.Queue[Key](), (world.namespace, "chat")
    cache.replace(labels.KIND, (await world.service(),))
    watches = LeaderWorkerSetWatches(world.kube, cache, (world.namespace,), changed.put_nowait, CHECK_SECONDS)
    assert not watches.is_synced
    [work] = watches.parts()
    running = asyncio.ensure_future(work())

    async def until(is_reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not is_reached():
                assert await changed.get() == key

    try:
        await until(lambda: watches.problem(world.namespace) == KIND_MISSING)
        assert watches.is_synced
        await asyncio.to_thread(cluster.install_crds, [CRD])
        await until(lambda: watches.problem(world.namespace) is None)
        await world.reconcile_once("chat")
        await until(lambda: cache.get(labels.SET_KIND, (world.namespace, "chat-serve")) is not None)
        cluster.delete_crds([CRD])
        await until(lambda: watches.problem(world.namespace) == KIND_MISSING)
        assert cache.get(labels.SET_KIND, (world.namespace, "chat-serve")) is None
    finally:
        cluster.delete_crds([CRD])
        running.cancel()
        await asyncio.wait({running})
