"""A service that remembers nothing is given its past once; whatever goes wrong with that, it goes on without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from plimsoll.controllers.past import PAST_S, Past
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.errors import Unavailable
from plimsoll.core.forecast.past import replay, with_past
from plimsoll.core.forecast.stored import to_dict as forecast_to_dict
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, World, ready

KEY = ("team", "chat")
DAY_S = 86400.0


class Told:
    """A history of three days: ten times as much at day as at night. `fails`: it cannot tell."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[tuple[str, float, float]] = []

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        self.asked.append((service, start_s, end_s))
        if self.fails:
            raise Unavailable("Prometheus is away")
        first = end_s - 3 * DAY_S
        times = [first + 60.0 * n for n in range(3 * 1440)]
        return [(at_s, 40.0 if (at_s - NOW_S) % DAY_S < DAY_S / 2 else 4.0) for at_s in times]


def sized() -> Service:
    """A service whose load line is known, after half a minute of load."""
    parent = builders.service(**PROMISED)
    world = World(parent)
    world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
    world.store.put(ready(parent, "serve"))
    world.load(KEY, 40.0, 30, NOW_S)
    return world.scaler._known[KEY].service


async def settle(past: Past) -> None:
    if past._asking is not None:
        await asyncio.wait([past._asking])
        past._asking.result()


def new(history: Told | None) -> Past:
    """One that has met a service of which nothing is remembered."""
    past = Past(history)
    past.meet(KEY, Service.of(["serve"]))
    return past


async def test_the_past_is_asked_for_once_and_its_shape_is_known() -> None:
    service, history = sized(), Told()
    past, before = new(history), service.tiers["serve"].demand
    for _ in range(3):
        past.look({KEY: service}, NOW_S + 30.0)
        await settle(past)
    after = service.tiers["serve"].demand
    assert history.asked == [("team/chat", NOW_S + 30.0 - PAST_S, NOW_S + 30.0)]
    assert (after.now, after.at_s) == (before.now, before.at_s)
    assert len(forecast_to_dict(after)["season"][4][0]) > 0
    assert forecast_to_dict(after)["season"] != forecast_to_dict(before)["season"]


async def test_a_store_that_cannot_tell_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    service, history = sized(), Told(fails=True)
    past, before = new(history), service.tiers["serve"].demand
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            past.look({KEY: service}, NOW_S + 30.0)
            await settle(past)
    assert service.tiers["serve"].demand == before
    assert [record.message for record in caplog.records] == ["the past is not known"]
    assert len(history.asked) == 1


async def test_nobody_is_asked_before_a_request_has_a_cost_nor_for_what_is_gone_or_remembered() -> None:
    history = Told()
    past = new(history)
    past.look({KEY: Service.of(["serve"])}, NOW_S)
    past.look({}, NOW_S)
    past.look({KEY: sized()}, NOW_S)
    remembering = sized()
    tier = remembering.tiers["serve"]
    tier.demand = with_past(tier.demand, replay(history.request_rate("", 0.0, NOW_S), 1.0))
    history.asked.clear()
    past.meet(KEY, remembering)
    past.look({KEY: remembering}, NOW_S)
    new(None).look({KEY: sized()}, NOW_S)
    await settle(past)
    assert history.asked == []
