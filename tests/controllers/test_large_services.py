"""Services near the size limit of the API server, which an operator of 256 MiB must survive."""

from __future__ import annotations

import tracemalloc

import pytest

from plimsoll.adapters.kube_client import INFERENCESERVICES
from tests.controllers.conftest import ControllerHarness

EXPRESSION = {"key": "zone", "operator": "In", "values": [f"{number}{'x' * 1000}" for number in range(60)]}
TERMS = {"nodeSelectorTerms": [{"matchExpressions": [EXPRESSION] * 20}]}
NODE_AFFINITY = {"requiredDuringSchedulingIgnoredDuringExecution": TERMS}
LARGE = {"serve": {"minReplicas": 1, "pod": {"affinity": {"nodeAffinity": NODE_AFFINITY}}}}
SERVICES = 20


@pytest.mark.api
@pytest.mark.filterwarnings("ignore:Sending a large body")
async def test_large_services_say_so_and_take_no_memory(world: ControllerHarness) -> None:
    for number in range(SERVICES):
        await world.create(f"large-{number:02}", tiers=LARGE)
    await world.create("small")
    tracemalloc.start()
    operator = world.operator()
    await world.sync(operator.store)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2_000_000
    assert peak < 20_000_000
    for name in ("large-00", "small"):
        await world.reconcile_once(name, operator)
    status = (await world.service("large-00"))["status"]
    stalled = next(one for one in status["conditions"] if one["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "InvalidSpec")
    assert "the object has 11" in stalled["message"]
    assert "most of it is spec.tiers.serve.pod.affinity" in stalled["message"]
    assert await world.events() == ["InvalidSpec"]
    assert await world.names("Deployment") == ["small-decode", "small-prefill"]
    for item in (await world.kube.list(INFERENCESERVICES, world.namespace))[0]:
        meta = item["metadata"]
        await world.kube.delete(INFERENCESERVICES, world.namespace, meta["name"], meta["uid"])
