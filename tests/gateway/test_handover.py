"""The last engine of a tier leaves only when another one is ready."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.gateway.service_catalog import CatalogBuilder, build_catalog
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.stack import GatewayStack, wait_until

DELETED = {"deletionTimestamp": "2026-06-01T00:00:00Z"}
LEAVING = "10.0.0.1:8000"


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
    assert serving(pod(LEAVING, **DELETED), *others) == [LEAVING]


def test_engines_of_a_pair_are_each_the_last_of_their_role() -> None:
    pods = [pod("10.0.0.1:8000", role="prefill", **DELETED), pod("10.0.0.2:8000", role="decode")]
    found = build_catalog([service()], pods).services["team/chat"]
    assert {endpoint.address: endpoint.available for endpoint in found.endpoints} == {
        "10.0.0.1:8000": True,
        "10.0.0.2:8000": True,
    }


@pytest.mark.parametrize(
    "others",
    [(pod("10.0.0.2:8000"),), (unplaced(),)],
    ids=["another is ready", "the replacement waits for room"],
)
def test_leaving_engine_is_let_go(others: tuple[Object, ...]) -> None:
    assert LEAVING not in serving(pod(LEAVING, **DELETED), *others)


def test_unready_leaving_engine_serves_nobody() -> None:
    assert serving(pod(LEAVING, ready=False, **DELETED)) == []


def test_service_without_replicas_lets_its_engine_go() -> None:
    stopped = service()
    stopped["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "ScaledToZero"}]
    assert serving(pod(LEAVING, **DELETED), obj=stopped) == []


def test_deleted_namespace_lets_its_engines_go() -> None:
    """Kubernetes deletes the pods before the service, which is ready until the last of them ends."""
    doomed = service()
    degraded = {"type": "ServeDegraded", "status": "True", "reason": "NamespaceTerminating"}
    doomed["status"]["conditions"] = [{"type": "Ready", "status": "True", "reason": "Serving"}, degraded]
    assert serving(pod(LEAVING, **DELETED), obj=doomed) == []


def test_placed_replacement_keeps_the_last_engine_again() -> None:
    builder, waits = CatalogBuilder(), unplaced()
    leaving = pod(LEAVING, **DELETED)
    name = f"team/{waits['metadata']['name']}"
    pods = {"team/leaving": leaving, name: waits}
    found = builder.update({"team/chat": service()}, pods, {})
    assert found.services["team/chat"].serving_endpoints == ()
    found = builder.update({}, {name: pod("10.0.0.9:8000", ready=False)}, {})
    assert [e.address for e in found.services["team/chat"].serving_endpoints] == [LEAVING]
    found = builder.update({"team/chat": None}, {name: None, "team/leaving": None}, {})
    assert found.services == {}


@pytest.mark.envoy
@pytest.mark.asyncio(loop_scope="module")
async def test_gateway_tells_the_last_engine_and_sends_to_it(stack: GatewayStack) -> None:
    leaving, successor = await stack.engine(), await stack.engine()
    await stack.set_objects([service()], [pod(leaving.address)])
    await stack.wait_routable(leaving)
    await stack.set_objects([service()], [pod(leaving.address, **DELETED), pod(successor.address, ready=False)])
    await wait_until(lambda: b"/plimsoll/handover" in [seen.path for seen in leaving.received], "the engine is told")
    status, _, headers = await stack.ask_fully()
    assert (status, headers["x-engine"]) == (200, leaving.address)
    await stack.set_objects([service()], [pod(leaving.address, **DELETED), pod(successor.address)])
    await stack.wait_routable(successor)
    for _ in range(5):
        status, _, headers = await stack.ask_fully()
        assert (status, headers["x-engine"]) == (200, successor.address)
