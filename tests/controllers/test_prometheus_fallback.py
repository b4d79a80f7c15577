"""Engines that do not answer the operator, and a store that scrapes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from plimsoll.controllers.autoscale.prometheus_fallback import PrometheusFallback
from plimsoll.controllers.engine_poller import BUSY_INTERVAL_S, IDLE_INTERVAL_S
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import EngineReading
from plimsoll.engines.engine import MetricMap
from tests.controllers.test_engines import KEY, World, gaps

LOST_S = 2 * IDLE_INTERVAL_S  # after which an idle engine has not answered twice


class Store:
    """Scrapes every pod; `at_s` is when it last did."""

    def __init__(self) -> None:
        self.at_s = 1.8e9
        self.running = 0.0
        self.away = False
        self.requested: list[tuple[str, tuple[str, ...]]] = []

    def engine_readings(self, namespace: str, pods: Mapping[str, MetricMap]) -> Sequence[EngineReading]:
        self.requested.append((namespace, tuple(pods)))
        if self.away:
            raise BackendUnavailable("Prometheus at http://p: refused")
        return [EngineReading(pod, self.at_s, "born", running=self.running) for pod in (*pods, "somebody-else")]


class Fleet(World):
    """Two engines, and the store beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = Store()
        self.second = PrometheusFallback(self.reported, self.engines.unreachable, self.engines.accept_external)
        for number in (1, 2):
            self.pod(number)

    def readings(self, pod: str) -> list[float]:
        """When each word of an engine was of, whoever told it."""
        return [reading.at_s for _, _, reading in self.received if reading.pod == pod]


@pytest.fixture
async def fleet() -> Fleet:
    found = Fleet()
    await found.until(LOST_S)
    return found


async def test_prometheus_fallback_is_unused_while_all_engines_answer(fleet: Fleet) -> None:
    await fleet.second.query()
    assert fleet.reported.requested == []
    assert fleet.second.tiers(KEY) == ()


async def test_prometheus_fallback_queries_only_unreachable_engines(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before = len(fleet.received)
    fleet.reported.running = 3.0
    await fleet.second.query()
    assert fleet.reported.requested == [("team", ("pod-1",))]
    assert fleet.second.tiers(KEY) == ("decode",)
    ((key, role, reading),) = fleet.received[before:]
    assert (key, role, reading.pod, reading.running) == (KEY, "decode", "pod-1", 3.0)
    assert fleet.engines.running_requests("team", "pod-1") == 3.0


async def test_prometheus_fallback_ignores_single_missed_poll(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    requested = len(fleet.times(1))
    while len(fleet.times(1)) == requested:
        await fleet.until(0.25)
    await fleet.second.query()
    assert fleet.reported.requested == []


async def test_prometheus_fallback_same_scrape_is_ingested_once(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before = fleet.readings("pod-1")
    for at_s in (1.8e9, 1.8e9, 1.8e9 + 5.0):
        fleet.reported.at_s = at_s
        await fleet.second.query()
    assert fleet.readings("pod-1") == [*before, 1.8e9, 1.8e9 + 5.0]


async def test_prometheus_fallback_busy_engine_speeds_up_its_tier(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    fleet.reported.running = 3.0
    await fleet.second.query()
    await fleet.until(4 * BUSY_INTERVAL_S)
    assert gaps(fleet.times(2)[-3:]) == {BUSY_INTERVAL_S}


async def test_prometheus_fallback_stops_when_engine_answers_again(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    await fleet.second.query()
    fleet.down.clear()
    await fleet.until(LOST_S)
    requested = len(fleet.reported.requested)
    await fleet.second.query()
    assert len(fleet.reported.requested) == requested
    assert fleet.second.tiers(KEY) == ()
    before = len(fleet.received)
    fleet.engines.accept_external("team", EngineReading("pod-1", 1.9e9, "born", running=9.0))
    assert len(fleet.received) == before


async def test_prometheus_fallback_outage_is_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    fleet.reported.away = True
    with caplog.at_level(logging.WARNING):
        for away in (True, True, False, True):
            fleet.reported.away = away
            await fleet.second.query()
            assert fleet.second.tiers(KEY) == (() if away else ("decode",))
    assert [record.getMessage() for record in caplog.records] == [
        "metrics store does not answer; unreachable engines stay unknown"
    ] * 2


async def test_prometheus_fallback_without_prometheus_is_never_used(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before, alone = (
        len(fleet.received),
        PrometheusFallback(None, fleet.engines.unreachable, fleet.engines.accept_external),
    )
    await alone.run()
    assert fleet.engines.unreachable()
    assert (len(fleet.received), alone.tiers(KEY)) == (before, ())
