"""A service that remembers nothing is given its past once; whatever goes wrong with that, it goes on without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from plimsoll.controllers.autoscale.history_backfill import HISTORY_SPAN_S, HistoryBackfill
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.backfill import replay_history, with_history
from plimsoll.core.demand.serialization import to_dict as forecast_to_dict
from plimsoll.core.errors import BackendUnavailable
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, World

KEY = ("team", "chat")
DAY_S = 86400.0


class FakeHistory:
    """A history of three days: ten times as much at day as at night. `fails`: it cannot tell."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.requested: list[tuple[str, float, float]] = []

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        self.requested.append((service, start_s, end_s))
        if self.fails:
            raise BackendUnavailable("Prometheus is away")
        first = end_s - 3 * DAY_S
        times = [first + 60.0 * n for n in range(3 * 1440)]
        return [(at_s, 40.0 if (at_s - NOW_S) % DAY_S < DAY_S / 2 else 4.0) for at_s in times]


def sized_service() -> ServiceState:
    """A service whose load line is known, after half a minute of load."""
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    world.load(KEY, 40.0, 30, NOW_S)
    return world.scaler._entries[KEY].service_state


async def settle(past: HistoryBackfill) -> None:
    if past._task is not None:
        await asyncio.wait([past._task])
        past._task.result()


def new_backfill(history: FakeHistory | None) -> HistoryBackfill:
    """One that has met a service of which nothing is remembered."""
    past = HistoryBackfill(history)
    past.track(KEY, ServiceState.for_roles(["serve"]))
    return past


async def test_backfill_is_queried_once_and_sets_seasonality() -> None:
    service, history = sized_service(), FakeHistory()
    past, before = new_backfill(history), service.tiers["serve"].forecast_state
    for _ in range(3):
        past.start_next({KEY: service}, NOW_S + 30.0)
        await settle(past)
    after = service.tiers["serve"].forecast_state
    assert history.requested == [("team/chat", NOW_S + 30.0 - HISTORY_SPAN_S, NOW_S + 30.0)]
    assert (after.estimate, after.last_sample_s) == (before.estimate, before.last_sample_s)
    assert len(forecast_to_dict(after)["season"][4][0]) > 0
    assert forecast_to_dict(after)["season"] != forecast_to_dict(before)["season"]


async def test_backfill_failure_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    service, history = sized_service(), FakeHistory(fails=True)
    past, before = new_backfill(history), service.tiers["serve"].forecast_state
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            past.start_next({KEY: service}, NOW_S + 30.0)
            await settle(past)
    assert service.tiers["serve"].forecast_state == before
    assert [record.message for record in caplog.records] == ["request history is not available"]
    assert len(history.requested) == 1


async def test_backfill_skips_unsized_deleted_and_restored_services() -> None:
    history = FakeHistory()
    past = new_backfill(history)
    past.start_next({KEY: ServiceState.for_roles(["serve"])}, NOW_S)
    past.start_next({}, NOW_S)
    past.start_next({KEY: sized_service()}, NOW_S)
    remembering = sized_service()
    tier = remembering.tiers["serve"]
    tier.forecast_state = with_history(tier.forecast_state, replay_history(history.request_rate("", 0.0, NOW_S), 1.0))
    history.requested.clear()
    past.track(KEY, remembering)
    past.start_next({KEY: remembering}, NOW_S)
    new_backfill(None).start_next({KEY: sized_service()}, NOW_S)
    await settle(past)
    assert history.requested == []
