"""InferencePools against a real API server: made, put back, left to others, and reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from plimsoll.adapters.kube_client import INFERENCEPOOLS, INFERENCESERVICES, KubeClient
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.core.errors import BackendUnavailable, ClusterError, Conflict, Forbidden, LeaseLost, ObjectRejected
from plimsoll.resources.platform_config import InferencePoolSettings
from tests.apiserver import ROOT, ApiServer
from tests.controllers.conftest import ControllerHarness

pytestmark = pytest.mark.api

Object = dict[str, Any]

CRD = ROOT / "e2e" / "lib" / "inferencepools-crd.yaml"
SETTINGS = InferencePoolSettings(picker_service="plimsoll-endpoint-picker")
CHECK_SECONDS = 0.05
DEADLINE_SECONDS = 30


class RefusingKube(KubeClient):
    """A connection whose account may not do something with pools."""

    listing: Exception | None = None
    applying: Exception | None = None

    async def list(self, resource: Any, *arguments: Any, **options: Any) -> Any:
        if resource == INFERENCEPOOLS and self.listing is not None:
            raise self.listing
        return await super().list(resource, *arguments, **options)

    async def apply(self, obj: Object, *arguments: Any, **options: Any) -> Object:
        if obj["kind"] == labels.POOL_KIND and self.applying is not None:
            raise self.applying
        return await super().apply(obj, *arguments, **options)


@pytest.fixture
def crd(cluster: ApiServer) -> Iterator[Path]:
    cluster.install_crds([CRD])
    yield CRD
    cluster.delete_crds([CRD])


@pytest.fixture
def own(world: ControllerHarness) -> ControllerHarness:
    """The namespace, as that of a release with pools."""
    gateway = world.platform.gateway.model_copy(update={"namespace": world.namespace})
    world.platform = world.platform.model_copy(update={"gateway": gateway, "inference_pools": SETTINGS})
    return world


@pytest.fixture
async def served(own: ControllerHarness, crd: Path) -> ControllerHarness:
    """A namespace of a release with pools, in a cluster that has the kind."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await own.kube.discover(labels.POOL_API_VERSION, labels.POOL_KIND) is None:
            await asyncio.sleep(CHECK_SECONDS)
    return own


async def condition(world: ControllerHarness, name: str = "chat") -> Object | None:
    found = (await world.service(name))["status"]["conditions"]
    return next((one for one in found if one["type"] == "InferencePoolUnusable"), None)


async def reason(world: ControllerHarness) -> str | None:
    return None if (found := await condition(world)) is None else str(found["reason"])


async def apply_foreign(world: ControllerHarness, **changes: Any) -> Object:
    """A pool of a person, which differs from the operator's in `changes` of its spec."""
    spec = {
        "selector": {"matchLabels": {labels.SERVICE: "chat", labels.ROLE: "decode"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "plimsoll-endpoint-picker", "port": {"number": 9002}},
    }
    meta = {"name": "chat", "namespace": world.namespace}
    pool = {"apiVersion": labels.POOL_API_VERSION, "kind": labels.POOL_KIND, "metadata": meta, "spec": spec | changes}
    return await world.kube.apply(pool, "team-gitops")


async def set_parents(world: ControllerHarness, *parents: Object) -> None:
    meta = {"name": "chat", "namespace": world.namespace}
    pool = {"apiVersion": labels.POOL_API_VERSION, "kind": labels.POOL_KIND, "metadata": meta}
    await world.kube.apply({**pool, "status": {"parents": list(parents)}}, "gateway", subresource="status")


def parent(kind: str, status: str, cause: str, generation: int = 1) -> Object:
    stated = {
        "type": kind,
        "status": status,
        "reason": cause,
        "message": "the gateway has spoken",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": generation,
    }
    return {"parentRef": {"name": "front", "namespace": "gateways"}, "conditions": [stated]}


async def test_pool_names_decode_engines_and_picker(served: ControllerHarness) -> None:
    service = await served.create()
    await served.reconcile_once("chat")
    pool = await served.get("InferencePool", "chat")
    assert pool["spec"] == {
        "selector": {"matchLabels": {labels.SERVICE: "chat", labels.ROLE: "decode"}},
        "targetPorts": [{"number": 8000}],
        "appProtocol": "http",  # a default of the kind
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": "plimsoll-endpoint-picker",
            "port": {"number": 9002},
            "failureMode": "FailClose",
        },
    }
    assert {one["manager"] for one in pool["metadata"]["managedFields"]} == {labels.FIELD_MANAGER}
    [owner] = pool["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (labels.KIND, service["metadata"]["uid"], True)
    assert await condition(served) is None


async def test_pool_second_round_writes_nothing(served: ControllerHarness) -> None:
    await served.create()
    operator = await served.reconcile_once("chat")
    await served.reconcile_once("chat", operator)
    writes = served.kube.writes
    await served.reconcile_once("chat", operator)
    assert served.kube.writes == writes


async def test_pool_drift_is_repaired(served: ControllerHarness) -> None:
    await served.create()
    operator = await served.reconcile_once("chat")
    before = await served.get("InferencePool", "chat")
    await served.kube.apply({**_bare(before), "spec": _opened(before["spec"])}, "person")
    assert (await served.get("InferencePool", "chat"))["spec"] != before["spec"]
    await served.reconcile_once("chat", operator)
    assert (await served.get("InferencePool", "chat"))["spec"] == before["spec"]


async def test_pool_deleted_is_made_again(served: ControllerHarness) -> None:
    await served.create()
    operator = await served.reconcile_once("chat")
    uid = (await served.get("InferencePool", "chat"))["metadata"]["uid"]
    await served.kube.delete(INFERENCEPOOLS, served.namespace, "chat", uid)
    await served.reconcile_once("chat", operator)
    assert (await served.get("InferencePool", "chat"))["metadata"]["uid"] != uid


async def test_pool_of_deleted_service_is_not_made(served: ControllerHarness) -> None:
    service = await served.create()
    operator = await served.reconcile_once("chat")
    pool = await served.get("InferencePool", "chat")
    await served.kube.delete(INFERENCESERVICES, served.namespace, "chat", service["metadata"]["uid"])
    await served.kube.delete(INFERENCEPOOLS, served.namespace, "chat", pool["metadata"]["uid"])
    await served.reconcile_once("chat", operator)
    assert await served.names("InferencePool") == []


async def test_foreign_pool_that_differs_is_left_alone(served: ControllerHarness) -> None:
    other = {"name": "other-picker", "port": {"number": 9002}}
    before = await apply_foreign(served, endpointPickerRef=other)
    await served.create()
    operator = await served.reconcile_once("chat")
    assert await served.get("InferencePool", "chat") == before
    found = await condition(served)
    assert found is not None
    assert (found["status"], found["reason"]) == ("True", "PoolTaken")
    assert "field manager team-gitops" in found["message"]
    assert "endpointPickerRef must be Service plimsoll-endpoint-picker port 9002" in found["message"]
    assert "selector" not in found["message"]
    assert "InferencePoolUnusable" in await served.events()

    await served.kube.delete(INFERENCEPOOLS, served.namespace, "chat", before["metadata"]["uid"])
    await served.reconcile_once("chat", operator)
    assert labels.FIELD_MANAGER in str((await served.get("InferencePool", "chat"))["metadata"]["managedFields"])
    assert await condition(served) is None
    assert "Recovered" in await served.events()


async def test_foreign_pool_with_our_picker_is_used(served: ControllerHarness) -> None:
    before = await apply_foreign(served)
    await served.create()
    operator = await served.reconcile_once("chat")
    assert await served.get("InferencePool", "chat") == before
    assert await condition(served) is None
    await set_parents(served, parent("Accepted", "False", "HTTPRouteNotAccepted"))
    await served.reconcile_once("chat", operator)
    assert await reason(served) == "PoolNotAccepted"


async def test_pool_refused_by_a_gateway_is_reported(served: ControllerHarness) -> None:
    await served.create()
    operator = await served.reconcile_once("chat")
    accepted = parent("Accepted", "True", "Accepted")
    await set_parents(served, accepted, parent("ResolvedRefs", "False", "InvalidExtensionRef"))
    await served.reconcile_once("chat", operator)
    found = await condition(served)
    assert found is not None
    assert found["reason"] == "PoolNotAccepted"
    assert "Gateway gateways/front" in found["message"]
    assert "InvalidExtensionRef: the gateway has spoken" in found["message"]
    await set_parents(served, accepted)
    await served.reconcile_once("chat", operator)
    assert await condition(served) is None


@pytest.mark.parametrize("stated", [parent("Accepted", "Unknown", "Pending"), parent("Accepted", "False", "Old", 0)])
async def test_pool_not_judged_yet_is_no_problem(served: ControllerHarness, stated: Object) -> None:
    await served.create()
    operator = await served.reconcile_once("chat")
    await set_parents(served, stated)
    await served.reconcile_once("chat", operator)
    assert await condition(served) is None


async def test_pool_in_other_namespace_is_not_made(served: ControllerHarness) -> None:
    gateway = served.platform.gateway.model_copy(update={"namespace": "default"})
    served.platform = served.platform.model_copy(update={"gateway": gateway})
    await served.create()
    await served.reconcile_once("chat")
    assert await served.names("InferencePool") == []
    assert await condition(served) is None


@pytest.mark.parametrize(
    "error", [ObjectRejected("no such field", 422), BackendUnavailable("no such field", 503)], ids=["rejected", "away"]
)
async def test_pool_rejected_leaves_engines_alone(served: ControllerHarness, error: ClusterError) -> None:
    refusing = RefusingKube(served.kube._api)
    refusing.applying = error
    await served.create()
    await replace(served, kube=refusing).reconcile_once("chat")
    found = await condition(served)
    assert found is not None
    assert (found["reason"], found["message"]) == ("PoolRejected", "InferencePool chat: no such field")
    assert await served.names("Deployment") == ["chat-decode", "chat-prefill"]


async def test_pools_without_rights_are_reported(served: ControllerHarness) -> None:
    refusing = RefusingKube(served.kube._api)
    refusing.listing = Forbidden("inferencepools is forbidden", 403)
    await served.create()
    await replace(served, kube=refusing).reconcile_once("chat")
    assert await reason(served) == "PoolRejected"


async def test_missing_kind_is_reported_until_it_comes(own: ControllerHarness, cluster: ApiServer) -> None:
    await own.create()
    operator = await own.reconcile_once("chat")
    assert await reason(own) == "PoolKindMissing"
    assert (await own.service())["status"]["tiers"].keys() == {"prefill", "decode"}
    try:
        await asyncio.to_thread(cluster.install_crds, [CRD])
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await own.kube.discover(labels.POOL_API_VERSION, labels.POOL_KIND) is None:
                await asyncio.sleep(CHECK_SECONDS)
        await own.reconcile_once("chat", operator)
        assert await own.names("InferencePool") == ["chat"]
        assert await condition(own) is None
    finally:
        await asyncio.to_thread(cluster.delete_crds, [CRD])


@pytest.mark.parametrize("error", [Conflict("changed meanwhile", 409), LeaseLost("another leads")])
async def test_pool_conflict_and_lost_lease_end_the_reconcile(served: ControllerHarness, error: ClusterError) -> None:
    refusing = RefusingKube(served.kube._api)
    refusing.applying = error
    await served.create()
    with pytest.raises(type(error)):
        await replace(served, kube=refusing).reconcile_once("chat")


async def test_watch_reports_pools_that_cannot_be_listed(served: ControllerHarness) -> None:
    """The first failure is known at once, and goes with the first list."""
    failing = RefusingKube(served.kube._api)
    failing.listing = BackendUnavailable("no answer", 503)
    cache, changed = ObjectCache(), asyncio.Queue[Key]()
    await served.create()
    cache.replace(labels.KIND, (await served.service(),))
    watch = PoolWatch(failing, cache, served.namespace, changed.put_nowait, CHECK_SECONDS, CHECK_SECONDS)
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await changed.get() == (served.namespace, "chat")
            assert watch.problem is not None
            assert watch.problem.message == "cannot list InferencePools: no answer"
            failing.listing = None
            while watch.problem is not None:
                await changed.get()
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
async def watched(own: ControllerHarness) -> AsyncIterator[tuple[PoolWatch, ObjectCache, asyncio.Queue[Key]]]:
    """A running watch, and the services that it says have changed."""
    await own.create()
    cache, changed = ObjectCache(), asyncio.Queue[Key]()
    cache.replace(labels.KIND, (await own.service(),))
    watch = PoolWatch(own.kube, cache, own.namespace, changed.put_nowait, CHECK_SECONDS)
    running = asyncio.create_task(watch.run())
    yield watch, cache, changed
    running.cancel()
    await asyncio.wait({running})


async def test_watch_follows_kind_and_pools(
    own: ControllerHarness, cluster: ApiServer, watched: tuple[PoolWatch, ObjectCache, asyncio.Queue[Key]]
) -> None:
    watch, cache, changed = watched
    key = (own.namespace, "chat")

    async def next_change() -> Key:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await changed.get()

    assert await next_change() == key
    assert watch.is_synced
    assert watch.problem is not None
    assert watch.problem.reason is ConditionReason.POOL_KIND_MISSING
    try:
        await asyncio.to_thread(cluster.install_crds, [CRD])
        while watch.problem is not None:
            assert await next_change() == key
        await apply_foreign(own)
        while cache.get(labels.POOL_KIND, key) is None:
            assert await next_change() == key
        await asyncio.to_thread(cluster.delete_crds, [CRD])
        while watch.problem is None:
            assert await next_change() == key
        assert cache.get(labels.POOL_KIND, key) is None
    finally:
        await asyncio.to_thread(cluster.delete_crds, [CRD])


async def until_reconciled(world: ControllerHarness) -> None:
    """Run a whole operator until the service has conditions, which a reconcile writes last."""

    async def watch_services(*_: Any) -> None:
        await asyncio.Event().wait()

    platform = world.platform.model_copy(update={"watch_namespaces": (world.namespace,)})
    config = OperatorConfig(platform, world.namespace, "operator-1")
    async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE_SECONDS):
        running = asyncio.create_task(OperatorProcess(world.kube, config, session, watch_services).run())
        try:
            while "conditions" not in (await world.service()).get("status", {}):
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            running.cancel()
            await asyncio.wait({running})


async def test_operator_makes_pools(served: ControllerHarness) -> None:
    await served.create()
    await until_reconciled(served)
    assert await served.names("InferencePool") == ["chat"]


async def test_operator_works_while_pools_cannot_be_listed(served: ControllerHarness) -> None:
    failing = RefusingKube(served.kube._api)
    failing.listing = BackendUnavailable("no answer", 503)
    await served.create()
    await until_reconciled(replace(served, kube=failing))
    assert await served.names("Deployment") == ["chat-decode", "chat-prefill"]


async def test_operator_works_without_the_kind(own: ControllerHarness) -> None:
    await own.create()
    await until_reconciled(own)
    assert await reason(own) == "PoolKindMissing"
    assert await own.names("Deployment") == ["chat-decode", "chat-prefill"]


def _bare(obj: Object) -> Object:
    return {**obj, "metadata": {name: obj["metadata"][name] for name in ("name", "namespace")}}


def _opened(spec: Object) -> Object:
    return {**spec, "endpointPickerRef": {**spec["endpointPickerRef"], "failureMode": "FailOpen"}}
