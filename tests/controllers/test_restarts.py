"""The operator, or operator and gateway together, start again: nothing that matters is lost, or said twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from tests.controllers.single_service import DELETE, KEY, SingleService

Object = dict[str, Any]

SLO: Object = {"ttft": "2s", "tpot": "50ms"}
TIERS: Object = {"serve": {"maxReplicas": 9}}
HORIZON_S = 5
WINDOW_S = round(LATENCY_WINDOW_S)
SPEC: Object = {"slo": SLO, "scaling": {"horizon": f"{HORIZON_S}s"}, "tiers": TIERS}
STARTUP_S = 260  # more than the start-up time that is assumed before any start


@pytest.fixture
async def start() -> AsyncIterator[Callable[[float], SingleService]]:
    """Starts the service at a rate, in requests per second."""
    started: list[SingleService] = []

    def make(rate: float) -> SingleService:
        started.append(SingleService(rate, **SPEC))
        return started[-1]

    yield make
    for service in started:
        await service.delete()


@pytest.fixture
async def idle(start: Callable[[float], SingleService]) -> SingleService:
    """A service above its minimum. Its operator and its gateway have just started, and no request has ended since."""
    service = start(0.0)
    await service.run(5)
    service.scale("serve", 5)
    service.restart_gateway()
    service.start_operator()
    return service


async def test_idle_service_after_both_restart_shrinks(idle: SingleService) -> None:
    service = idle
    await service.run(WINDOW_S - 5)
    assert service.replicas() == {"serve": 5}, "not before the gateway has watched for a full window"
    await service.run(STARTUP_S)
    assert service.replicas() == {"serve": 1}
    assert "ScalingInactive" not in service.conditions
    [event] = [one for one in service.kube.events if one["reason"] == "ScaledDown"]
    assert "no request for" in event["message"]
    assert "deleted first" in event["message"], "the same drain as after any other decision"


async def test_restarted_operator_knows_its_engine_model(start: Callable[[float], SingleService]) -> None:
    service = start(0.0)
    await service.run(20)
    service.start_operator()
    await service.run(1)
    explained = service.scaler.explain(KEY)
    assert explained is not None
    assert explained["tiers"]["serve"]["capacity"] == {
        "unknown": "no completed request has shown the lengths of prompts and outputs yet"
    }


async def test_reason_of_unknown_demand_follows_requests(start: Callable[[float], SingleService]) -> None:
    """A reason that no longer holds is replaced at once, not with the figures of the next minute."""
    service = start(0.04)
    await service.run(80)
    assert "fewer than 5 completed requests since the operator started" in service.message("ScalingInactive")
    service.rate = 5.0
    await service.run(20)
    assert "completed requests" not in service.message("ScalingInactive")


@pytest.mark.parametrize("rate", [0.0, 0.2, 40.0], ids=["idle", "few requests", "load"])
async def test_request_lengths_outlast_the_process(rate: float, start: Callable[[float], SingleService]) -> None:
    """So they outlast a lost lease, and the next leader has them too: each begins a process of its own."""
    service = start(40.0)
    await service.run(30)
    replicas = service.replicas()
    service.rate = rate
    for _ in range(2):
        service.start_operator()
        for _ in range(40):
            await service.run(1)
            assert "completed request" not in service.message("ScalingInactive")
        explained = service.scaler.explain(KEY)
        assert explained is not None
        assert "unknown" not in explained["tiers"]["serve"]["capacity"]
    assert service.replicas()["serve"] <= replicas["serve"]


async def test_condition_never_says_frozen_of_a_count_that_changes(idle: SingleService) -> None:
    service = idle
    for _ in range(2 * (WINDOW_S + STARTUP_S)):
        await service.run(1)
        explained = service.scaler.explain(KEY)
        assert explained is not None
        frozen = explained["decisions"][0]["tiers"]["serve"]["frozen"]
        assert frozen or "ScalingInactive" not in service.conditions
    assert not frozen


async def test_idle_service_with_silent_gateway_keeps_replicas(idle: SingleService) -> None:
    service = idle
    service.gateways = (*service.gateways, "gw-silent")
    await service.run(WINDOW_S + STARTUP_S)
    assert service.replicas() == {"serve": 5}
    assert service.conditions["ScalingInactive"] == ("True", "DemandUnknown")


async def test_busy_engines_behind_idle_gateway_keep_replicas(idle: SingleService) -> None:
    service = idle
    service.bypassing = 2.0
    await service.run(WINDOW_S + STARTUP_S)
    assert service.replicas() == {"serve": 5}
    assert service.conditions["ScalingInactive"] == ("True", "DemandUnknown")


async def test_gateway_restarts_within_window_keep_replicas(idle: SingleService) -> None:
    service = idle
    for _ in range(6):
        await service.run(WINDOW_S - 10)
        service.restart_gateway()
    assert service.replicas() == {"serve": 5}


async def test_operator_restart_keeps_conditions_and_events(start: Callable[[float], SingleService]) -> None:
    service = start(40.0)
    await service.run(30)
    before, events, status = service.conditions, len(service.kube.events), service.status
    service.start_operator()
    for _ in range(30):
        await service.run(1)
        assert service.conditions.keys() == before.keys()
    assert len(service.kube.events) == events
    kept = [one for one in service.status["conditions"] if one["type"] == "Ready"]
    assert kept == [one for one in status["conditions"] if one["type"] == "Ready"]


@pytest.mark.parametrize("edited", ["before", "after"])
async def test_slo_removed_around_restart_is_followed_at_once(
    edited: str, start: Callable[[float], SingleService]
) -> None:
    service = start(40.0)
    await service.run(30)
    assert service.replicas()["serve"] > 1
    if edited == "before":
        service.edit("slo", DELETE)
    service.start_operator()
    if edited == "after":
        await service.run(1)
        service.edit("slo", DELETE)
    await service.run(2)
    assert service.replicas() == {"serve": 1}
    assert service.conditions["ScalingInactive"] == ("True", "NoSLO")
    assert not {"SLOMet", "SLOInfeasible", "ScalingLimited", "Shedding"} & service.conditions.keys()
    assert service.limits is None
    assert not {"slo", "limitedBy"} & service.status.keys()
    assert service.policy is None


async def test_slo_removed_and_restarted_writes_no_event_again(start: Callable[[float], SingleService]) -> None:
    service = start(40.0)
    await service.run(30)
    service.edit("slo", DELETE)
    await service.run(10)
    events = len(service.kube.events)
    for _ in range(3):
        service.start_operator()
        await service.run(10)
    assert len(service.kube.events) == events
    assert service.replicas() == {"serve": 1}


async def test_demand_unknown_for_a_moment_is_no_condition(idle: SingleService) -> None:
    """Without an arrival, a minute must pass until it is certain that there is no demand."""
    for _ in range(WINDOW_S + STARTUP_S):
        await idle.run(1)
        assert "ScalingInactive" not in idle.conditions
