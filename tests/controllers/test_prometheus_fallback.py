"""Engines that do not answer the operator, and a store that scrapes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from plimsoll.controllers.engines import BUSY_S, IDLE_S
from plimsoll.controllers.secondhand import SecondHand
from plimsoll.core.errors import Unavailable
from plimsoll.core.ports import EngineReading
from tests.controllers.test_engines import KEY, World, gaps

LOST_S = 2 * IDLE_S  # after which an idle engine has not answered twice


class Store:
    """Scrapes every pod; `at_s` is when it last did."""

    def __init__(self) -> None:
        self.at_s = 1.8e9
        self.running = 0.0
        self.away = False
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def engines(self, namespace: str, pods: Sequence[str]) -> Sequence[EngineReading]:
        self.asked.append((namespace, tuple(pods)))
        if self.away:
            raise Unavailable("Prometheus at http://p: refused")
        return [EngineReading(pod, self.at_s, "born", running=self.running) for pod in (*pods, "somebody-else")]


class Fleet(World):
    """Two engines, and the store beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Store()
        self.second = SecondHand(self.told, self.engines.unheard, self.engines.take)
        for number in (1, 2):
            self.pod(number)

    def readings(self, pod: str) -> list[float]:
        """When each word of an engine was of, whoever told it."""
        return [reading.at_s for _, _, reading in self.heard if reading.pod == pod]


@pytest.fixture
async def fleet() -> Fleet:
    found = Fleet()
    await found.until(LOST_S)
    return found


async def test_prometheus_fallback_is_unused_while_all_engines_answer(fleet: Fleet) -> None:
    await fleet.second.ask()
    assert fleet.told.asked == []
    assert fleet.second.tiers(KEY) == ()


async def test_prometheus_fallback_queries_only_unreachable_engines(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before = len(fleet.heard)
    fleet.told.running = 3.0
    await fleet.second.ask()
    assert fleet.told.asked == [("team", ("pod-1",))]
    assert fleet.second.tiers(KEY) == ("decode",)
    ((key, role, reading),) = fleet.heard[before:]
    assert (key, role, reading.pod, reading.running) == (KEY, "decode", "pod-1", 3.0)
    assert fleet.engines.running("pod-1") == 3.0


async def test_prometheus_fallback_ignores_single_missed_poll(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    asked = len(fleet.times(1))
    while len(fleet.times(1)) == asked:
        await fleet.until(0.25)
    await fleet.second.ask()
    assert fleet.told.asked == []


async def test_prometheus_fallback_same_scrape_is_ingested_once(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before = fleet.readings("pod-1")
    for at_s in (1.8e9, 1.8e9, 1.8e9 + 5.0):
        fleet.told.at_s = at_s
        await fleet.second.ask()
    assert fleet.readings("pod-1") == [*before, 1.8e9, 1.8e9 + 5.0]


async def test_prometheus_fallback_busy_engine_speeds_up_its_tier(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    fleet.told.running = 3.0
    await fleet.second.ask()
    await fleet.until(4 * BUSY_S)
    assert gaps(fleet.times(2)[-3:]) == {BUSY_S}


async def test_prometheus_fallback_stops_when_engine_answers_again(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    await fleet.second.ask()
    fleet.down.clear()
    await fleet.until(LOST_S)
    asked = len(fleet.told.asked)
    await fleet.second.ask()
    assert len(fleet.told.asked) == asked
    assert fleet.second.tiers(KEY) == ()
    before = len(fleet.heard)
    fleet.engines.take(EngineReading("pod-1", 1.9e9, "born", running=9.0))  # an answer that was on its way
    assert len(fleet.heard) == before


async def test_prometheus_fallback_outage_is_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    fleet.told.away = True
    with caplog.at_level(logging.WARNING):
        for away in (True, True, False, True):
            fleet.told.away = away
            await fleet.second.ask()
            assert fleet.second.tiers(KEY) == (() if away else ("decode",))
    assert [record.getMessage() for record in caplog.records] == ["engines that do not answer are not known"] * 2


async def test_prometheus_fallback_without_prometheus_is_never_used(fleet: Fleet) -> None:
    fleet.down.add("10.0.0.1")
    await fleet.until(LOST_S)
    before, alone = len(fleet.heard), SecondHand(None, fleet.engines.unheard, fleet.engines.take)
    await alone.run()
    assert fleet.engines.unheard()
    assert (len(fleet.heard), alone.tiers(KEY)) == (before, ())
