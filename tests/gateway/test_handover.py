"""The last engine of a tier leaves only when another one is ready."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from aiohttp import web

from plimsoll.api import labels
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.types import Role
from plimsoll.gateway.handover import Handover
from plimsoll.gateway.service_catalog import RoutableCatalog
from tests.gateway.kube_objects import CatalogOfPods, Object, build_catalog, pod, service
from tests.gateway.stack import GatewayStack, wait_until

DELETED = {"deletionTimestamp": "2026-06-01T00:00:00Z"}
LEAVING = "10.0.0.1:8000"


def going(address: str = LEAVING, reason: str = "", **fields: Any) -> Object:
    """An engine pod that is being deleted, for `reason` of its condition DisruptionTarget."""
    made = pod(address, **fields, **DELETED)
    if reason:
        made["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": reason})
    return made


def unplaced(role: str = "serve", **changes: Any) -> Object:
    """A pod that the scheduler has found no node for."""
    made = pod("10.0.0.9:8000", role=role, ready=False, **changes)
    del made["status"]["podIP"]
    made["status"] |= {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}
    return made


def serving(*pods: Object, obj: Object | None = None) -> list[str]:
    found = build_catalog([obj or service()], pods).services["team/chat"]
    return [endpoint.address for endpoint in found.serving_endpoints]


@pytest.mark.parametrize(
    "others",
    [(), (pod("10.0.0.2:8000", ready=False),), (unplaced("prefill"),), (unplaced(**DELETED),)],
    ids=["none", "starts", "other role waits", "goes too"],
)
def test_last_engine_serves_until_another_is_ready(others: tuple[Object, ...]) -> None:
    assert serving(going(), *others) == [LEAVING]


def test_engines_of_a_pair_are_each_the_last_of_their_role() -> None:
    pods = [going("10.0.0.1:8000", role="prefill"), pod("10.0.0.2:8000", role="decode")]
    found = build_catalog([service()], pods).services["team/chat"]
    assert all(endpoint.available for endpoint in found.endpoints)


def test_prefill_engine_of_another_revision_is_let_go() -> None:
    pods = [going("10.0.0.1:8000", role="prefill"), pod("10.0.0.2:8000", role="decode", revision="r2")]
    found = build_catalog([service()], pods).services["team/chat"]
    assert [e.address for e in found.endpoints if e.available] == ["10.0.0.2:8000"]


@pytest.mark.parametrize(
    "others",
    [(pod("10.0.0.2:8000"),), (pod("10.0.0.2:8000", role="decode"),), (unplaced(),)],
    ids=["another is ready", "a pair is ready", "the replacement waits for room"],
)
def test_leaving_engine_is_let_go(others: tuple[Object, ...]) -> None:
    assert LEAVING not in serving(going(), *others)


def test_engine_on_drained_node_gives_no_room_to_its_replacement() -> None:
    assert serving(going(reason="EvictionByEvictionAPI"), unplaced()) == [LEAVING]


def test_preempted_engine_is_let_go() -> None:
    assert serving(going(reason="PreemptionByScheduler")) == []


def test_unready_leaving_engine_serves_nobody() -> None:
    assert serving(going(ready=False)) == []


def test_engine_with_a_short_grace_period_is_let_go() -> None:
    hurried = going(deletionGracePeriodSeconds=30)
    hurried["spec"]["terminationGracePeriodSeconds"] = 625
    assert serving(hurried) == []
    hurried["metadata"]["deletionGracePeriodSeconds"] = 625
    assert serving(hurried) == [LEAVING]


def test_leader_of_several_pods_is_let_go() -> None:
    """Its replacement has its name, so it starts only afterwards."""
    leader = going()
    leader["metadata"]["labels"][labels.SET_NAME] = "chat-serve"
    assert serving(leader) == []


def test_engine_without_launcher_is_let_go() -> None:
    other = going()
    other["metadata"]["labels"][labels.ENGINE] = "llama-cpp"
    assert serving(other) == []


@pytest.mark.parametrize("summary", ["1/0", "0/0"])
def test_tier_that_is_to_have_no_replica_lets_its_engine_go(summary: str) -> None:
    obj = service()
    obj["status"]["tiers"] = {"serve": {"summary": summary}}
    assert serving(going(), obj=obj) == []


def test_deleted_namespace_lets_its_engines_go() -> None:
    """Kubernetes deletes the pods before the service, which is ready until the last of them ends."""
    doomed = service()
    degraded = {"type": "ServeDegraded", "status": "True", "reason": "NamespaceTerminating"}
    doomed["status"]["conditions"] = [{"type": "Ready", "status": "True", "reason": "Serving"}, degraded]
    assert serving(going(), obj=doomed) == []


def test_placed_replacement_keeps_the_last_engine_again() -> None:
    catalog, waits = CatalogOfPods(), unplaced()
    assert catalog.set([service()], [going(), waits]).services["team/chat"].serving_endpoints == ()
    found = catalog.set([service()], [going(), pod("10.0.0.9:8000", ready=False)])
    assert [e.address for e in found.services["team/chat"].serving_endpoints] == [LEAVING]
    assert catalog.set([]).services == {}


def test_refusing_engine_is_let_go_until_its_address_is_reused() -> None:
    """As one of an earlier image, which rejects requests while its pod is still ready."""
    catalog, ended = CatalogOfPods(), going()
    assert catalog.set([service()], [going()]).services["team/chat"].serving_endpoints
    catalog.builder.mark_refusing(LEAVING)
    assert not catalog.builder.update({}, {}, {}).services["team/chat"].serving_endpoints
    ended["status"]["phase"] = "Failed"  # Kubernetes may keep such a pod for long, but not in a slice
    catalog.set([service()], [ended])
    assert catalog.set([service()], [going(uid="another")]).services["team/chat"].serving_endpoints


def test_late_answer_of_a_gone_engine_marks_no_other() -> None:
    catalog = CatalogOfPods()
    catalog.set([service()], [going()])
    catalog.set([service()], [])
    catalog.builder.mark_refusing(LEAVING)
    assert catalog.set([service()], [going(uid="another")]).services["team/chat"].serving_endpoints


def test_last_engine_is_routable_until_envoy_knows_its_successor() -> None:
    known = build_catalog([service()], [going(), pod("10.0.0.2:8000")])
    routable = RoutableCatalog()

    def routed(*addresses: str) -> list[str]:
        found = routable.update(known, {"team/chat": frozenset(addresses)}).services["team/chat"]
        return [e.address for e in found.endpoints if e.routable]

    assert routed(LEAVING) == [LEAVING]
    assert routed("10.0.0.2:8000") == ["10.0.0.2:8000"]
    assert routed() == []


def last(address: str) -> Endpoint:
    return Endpoint(address, address, Role.SERVE, "r1", ready=True, leaving=Leaving.HANDS_OVER, last=True)


async def test_hostile_and_silent_engines_disturb_no_other(unused_tcp_port_factory: Any) -> None:
    """One never answers, one redirects to a name that cannot be encoded, one refuses, one goes on."""
    notified, refused, release = 0, [], asyncio.Event()
    enough = asyncio.Event()

    async def good(_: web.Request) -> web.Response:
        nonlocal notified
        notified += 1
        if notified >= 3:
            enough.set()
        return web.Response(text="{}")

    async def silent(_: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    async def hostile(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": f"http://{'a' * 64}.x/"})

    async def full(_: web.Request) -> web.Response:
        return web.Response(status=503)

    async with contextlib.AsyncExitStack() as stack:
        endpoints = []
        for answer in (good, silent, hostile, full):
            app, port = web.Application(), unused_tcp_port_factory()
            app.router.add_post("/plimsoll/handover", answer)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", port).start()
            endpoints.append(last(f"127.0.0.1:{port}"))
        running = asyncio.create_task(Handover(lambda: endpoints, refused.append).run())
        async with asyncio.timeout(60):
            await enough.wait()
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        release.set()
    assert {endpoints[2].address, endpoints[3].address} <= set(refused)
    assert not {endpoints[0].address, endpoints[1].address} & set(refused)


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_gateway_tells_the_last_engine_and_sends_to_it(stack: GatewayStack) -> None:
    leaving_engine, successor = await stack.engine(), await stack.engine()
    await stack.set_objects([service()], [pod(leaving_engine.address)])
    await stack.wait_routable(leaving_engine)
    gone = going(leaving_engine.address)
    await stack.set_objects([service()], [gone, pod(successor.address, ready=False)])
    await wait_until(
        lambda: b"/plimsoll/handover" in [seen.path for seen in leaving_engine.received], "the engine is notified"
    )
    status, _, headers = await stack.ask_fully()
    assert (status, headers["x-engine"]) == (200, leaving_engine.address)
    await stack.set_objects([service()], [gone, pod(successor.address)])
    for _ in range(20):  # no request fails while Envoy learns of the successor
        status, _, headers = await stack.ask_fully()
        assert status == 200
    await stack.wait_routable(successor)
    status, _, headers = await stack.ask_fully()
    assert headers["x-engine"] == successor.address
