"""The platform's rollout of engines on a real API server, by an operator that is new at every reconcile."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.core.errors import BackendUnavailable
from plimsoll.resources.platform_config import EngineRolloutSettings
from tests import builders
from tests.controllers.conftest import ControllerHarness

pytestmark = pytest.mark.api

Object = dict[str, Any]

SLO = {"ttft": "2s", "tpot": "80ms"}
FLEET: dict[str, Object] = {"first": {}, "second": {"slo": SLO, "scaling": {"sloMissCost": 1}}, "third": {"slo": SLO}}
OLD, NEW = "example.com/engine:1", "example.com/engine:2"


def configure(world: ControllerHarness, generation: int, image: str) -> None:
    rollout = EngineRolloutSettings(generation=generation, min_ready_seconds=0)
    engine = builders.PLATFORM.engine.model_copy(update={"image": image, "rollout": rollout})
    world.platform = builders.PLATFORM.model_copy(update={"engine": engine})


async def start_fleet(world: ControllerHarness) -> None:
    world.view = GatewayView(1, 1, {(world.namespace, name): 1 for name in FLEET})
    for name, spec in FLEET.items():
        await world.create(name, tiers={"serve": {"minReplicas": 1}}, **spec)
    await reconcile_all(world)
    for name in FLEET:
        await replace_pods(world, name)
    configure(world, 1, NEW)


async def reconcile_all(world: ControllerHarness) -> None:
    """Twice, in the order that is against the rollout's."""
    for name in [*reversed(FLEET)] * 2:
        await world.reconcile_once(name)


async def replace_pods(world: ControllerHarness, name: str) -> None:
    """As the Deployment controller does it."""
    live = await world.get("Deployment", f"{name}-serve")
    progressing = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
    times = dict.fromkeys(("lastUpdateTime", "lastTransitionTime"), "2026-01-01T00:00:00Z")
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), 1)
    body = {
        **{field: live[field] for field in ("apiVersion", "kind")},
        "metadata": {field: live["metadata"][field] for field in ("name", "namespace")},
        "status": {
            "observedGeneration": live["metadata"]["generation"],
            **counts,
            "conditions": [{**progressing, **times, "message": ""}],
        },
    }
    await world.kube.apply(body, "deployment-controller", subresource="status")


async def violate_slo(world: ControllerHarness, name: str) -> None:
    live = await world.service(name)
    violated = {"type": "SLOMet", "status": "False", "reason": "SLOViolated", "message": "p95 of TTFT is 9 s"}
    others = [one for one in live["status"]["conditions"] if one["type"] != "SLOMet"]
    status = {**live["status"], "conditions": [*others, {**violated, "lastTransitionTime": "2099-01-01T00:00:00Z"}]}
    body = {**{field: live[field] for field in ("apiVersion", "kind")}, "metadata": {"name": name}, "status": status}
    body["metadata"]["namespace"] = world.namespace
    await world.kube.apply(body, labels.FIELD_MANAGER, subresource="status")


async def images(world: ControllerHarness) -> list[str]:
    """The image of each service's engines, in the order of the fleet."""
    found = [await world.get("Deployment", f"{name}-serve") for name in FLEET]
    return [one["spec"]["template"]["spec"]["containers"][0]["image"] for one in found]


async def reasons(world: ControllerHarness) -> list[str | None]:
    """The reason of each service's condition about the rollout."""
    found = [(await world.service(name))["status"]["conditions"] for name in FLEET]
    return [next((c["reason"] for c in one if c["type"] == "EngineRolloutPending"), None) for one in found]


async def test_rollout_goes_on_one_by_one_through_restarts(world: ControllerHarness) -> None:
    await start_fleet(world)
    for done in range(3):
        for _ in range(2):
            await reconcile_all(world)
            assert await images(world) == [NEW] * (done + 1) + [OLD] * (2 - done)
            assert await reasons(world) == [None] * done + ["RollingOut"] + ["RolloutWaiting"] * (2 - done)
        await replace_pods(world, list(FLEET)[done])
    await reconcile_all(world)
    assert await reasons(world) == [None, None, None]
    events = await world.events()
    assert (events.count("EngineRolloutStarted"), events.count("EngineRolloutCompleted")) == (3, 3)
    operator = world.operator()
    for name in [*FLEET, *FLEET]:
        await world.reconcile_once(name, operator)
    writes = world.kube.writes
    for name in FLEET:
        await world.reconcile_once(name, operator)
    assert (world.kube.writes, await images(world)) == (writes, [NEW] * 3)


async def test_rollout_stops_at_violated_slo_and_is_undone(world: ControllerHarness) -> None:
    await start_fleet(world)
    template = (await world.get("Deployment", "second-serve"))["spec"]["template"]
    await reconcile_all(world)
    await replace_pods(world, "first")
    await reconcile_all(world)
    await violate_slo(world, "second")
    await replace_pods(world, "second")
    await reconcile_all(world)
    assert await images(world) == [NEW, NEW, OLD]
    assert await reasons(world) == [None, "RolloutFailed", "RolloutStopped"]
    assert (await world.events()).count("EngineRolloutStopped") == 1
    configure(world, 0, OLD)
    await reconcile_all(world)
    assert (await world.get("Deployment", "second-serve"))["spec"]["template"] == template
    assert await images(world) == [OLD] * 3
    assert await reasons(world) == [None] * 3


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
async def test_rollout_killed_at_any_write_gives_no_second_turn(world: ControllerHarness, after: bool) -> None:
    await start_fleet(world)
    killed = 0
    for write in range(1, 8):
        world.kube.break_at(write, after=after)
        try:
            await world.reconcile_once("first")
        except BackendUnavailable:
            killed += 1
        world.kube.writes_until_fault = None
        await world.reconcile_once("third")
        assert (await images(world))[2] == OLD
    await world.reconcile_once("first")
    assert killed >= 3
    assert await images(world) == [NEW, OLD, OLD]
