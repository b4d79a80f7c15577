"""Engines that accept and never answer cost their own service its signals, and other services nothing."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from itertools import pairwise

import pytest

from plimsoll.adapters.pod_http import TIMEOUT_S
from plimsoll.controllers.engine_poller import (
    BUSY_INTERVAL_S,
    IDLE_INTERVAL_S,
    MAX_FAILING_GROUP_POLLS,
    MAX_GROUP_POLLS,
    EnginePoller,
)
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.test_engines import parse
from tests.controllers.test_metrics_export import value
from tests.virtual_time import in_virtual_time

METRIC = "plimsoll_operator_engine_polls"
ANSWER_S = 0.02
HUNG, HEALTHY = 600, 30
RUN_S = 60.0
MAX_GAP_S = BUSY_INTERVAL_S + 2 * TIMEOUT_S  # a reading expires after 15 s


class Fleet:
    """Busy engines; those of which `hangs` is true let each poll run into its time limit."""

    def __init__(self, store: ObjectCache) -> None:
        loop = asyncio.get_running_loop()
        self.hanging: set[str] = set()
        self.hang_s = TIMEOUT_S
        self.readings: defaultdict[str, list[float]] = defaultdict(list)
        self.engines = EnginePoller(store, self.answer, self.record, parse, loop.time, loop.time)

    async def answer(self, address: str, port: int, path: str, tls_name: str = "") -> bytes:
        if address in self.hanging:
            await asyncio.sleep(self.hang_s)
            raise BackendUnavailable("did not answer")
        await asyncio.sleep(ANSWER_S)
        return address.encode() if path == "/about" else b"vllm:num_requests_running 1\n"

    def record(self, key: Key, role: Role, reading: EngineReading) -> None:
        self.readings[reading.pod].append(asyncio.get_running_loop().time())


def add_pods(store: ObjectCache, namespace: str, count: int, *, nodes: int, first: int, node: str) -> list[str]:
    addresses = []
    service = builders.service("chat", namespace)
    for number in range(first, first + count):
        address = f"10.{number >> 8}.0.{number & 255}"
        ready = [{"type": "Ready", "status": "True"}]
        obj = builders.pod(service, "decode", f"{namespace}-{number}", podIP=address, conditions=ready)
        obj["metadata"]["uid"] = f"uid-{number}"
        obj.setdefault("spec", {})["nodeName"] = f"{node}-{number % nodes}"
        store.put(obj)
        addresses.append(address)
    return addresses


async def worst_gap_s(fleet: Fleet, pods: int) -> float:
    """The longest time without a reading of a healthy engine, after the first of each."""
    task = asyncio.create_task(fleet.engines.run())
    await asyncio.sleep(RUN_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(fleet.readings) == pods
    return max(after - before for times in fleet.readings.values() for before, after in pairwise([*times, RUN_S]))


@in_virtual_time
async def test_hung_engines_leave_a_bounded_number_of_polls() -> None:
    store = ObjectCache()
    fleet = Fleet(store)
    fleet.hanging, put_off = set(add_pods(store, "hung", HUNG, nodes=4, first=1, node="node")), list[float]()
    running = asyncio.create_task(fleet.engines.run())
    for _ in range(60):
        await asyncio.sleep(1.0)
        put_off.append(sum(value(f"{METRIC}_put_off", pool=pool) or 0.0 for pool in ("answering", "failing")))
        assert len(asyncio.all_tasks()) < 4 * (MAX_GROUP_POLLS + MAX_FAILING_GROUP_POLLS) + 99
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert min(put_off[10:]) > HUNG / 2


@in_virtual_time
async def test_hung_engines_of_one_team_delay_no_other_team() -> None:
    store = ObjectCache()
    fleet = Fleet(store)
    fleet.hanging = set(add_pods(store, "hung", HUNG, nodes=20, first=1, node="node"))
    add_pods(store, "team", HEALTHY, nodes=20, first=2000, node="node")
    assert await worst_gap_s(fleet, HEALTHY) < MAX_GAP_S


@in_virtual_time
async def test_lost_zone_delays_no_engine_elsewhere() -> None:
    store = ObjectCache()
    fleet = Fleet(store)
    for number in range(10):
        namespace = f"team-{number}"
        fleet.hanging.update(add_pods(store, namespace, HUNG // 10, nodes=20, first=1 + 100 * number, node="lost"))
        add_pods(store, namespace, HEALTHY // 10, nodes=20, first=2000 + 100 * number, node="node")
    assert await worst_gap_s(fleet, HEALTHY) < MAX_GAP_S


@pytest.mark.parametrize("hanging", [1, HUNG])
@in_virtual_time
async def test_engine_that_answers_again_is_heard(hanging: int) -> None:
    store = ObjectCache()
    fleet = Fleet(store)
    fleet.hanging = set(add_pods(store, "hung", hanging, nodes=20, first=1, node="node"))
    back = add_pods(store, "team", 1, nodes=1, first=2000, node="node")
    fleet.hanging.update(back)
    task = asyncio.create_task(fleet.engines.run())
    await asyncio.sleep(30.0)
    assert not fleet.readings
    fleet.hanging.difference_update(back)
    await asyncio.sleep(2 * BUSY_INTERVAL_S + 2 * TIMEOUT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert list(fleet.readings) == ["team-2000"]


@in_virtual_time
async def test_large_team_on_one_node_is_heard_in_time() -> None:
    """As on a virtual node: many polls are due at once, and further ones wait for a place."""
    store = ObjectCache()
    fleet = Fleet(store)
    add_pods(store, "team", 1000, nodes=1, first=1, node="virtual")
    assert await worst_gap_s(fleet, 1000) < MAX_GAP_S
    assert max(times[0] for times in fleet.readings.values()) < MAX_GAP_S


@in_virtual_time
async def test_hung_engines_of_one_node_take_turns() -> None:
    store = ObjectCache()
    fleet = Fleet(store)
    addresses = add_pods(store, "hung", 56, nodes=1, first=1, node="node")
    fleet.hanging = set(addresses)
    task = asyncio.create_task(fleet.engines.run())
    await asyncio.sleep(60.0)
    for address in addresses[::5]:
        fleet.hanging.discard(address)
    await asyncio.sleep(len(addresses) * TIMEOUT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(fleet.readings) == sorted(f"hung-{number}" for number in range(1, 57, 5))


@in_virtual_time
async def test_full_node_that_answers_again_is_heard_soon() -> None:
    """Its engines have refused connections, which takes no time."""
    store = ObjectCache()
    fleet = Fleet(store)
    fleet.hanging, fleet.hang_s = set(add_pods(store, "team", 110, nodes=1, first=1, node="node")), 0.0
    task = asyncio.create_task(fleet.engines.run())
    await asyncio.sleep(60.0)
    fleet.hanging.clear()
    await asyncio.sleep(IDLE_INTERVAL_S + 2 * TIMEOUT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(fleet.readings) == 110


@in_virtual_time
async def test_restarted_poller_polls_every_engine_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an unexpected error: the polls that it was waiting for have ended without an answer."""
    store = ObjectCache()
    fleet = Fleet(store)
    fleet.hanging = set(add_pods(store, "team", 3 * MAX_GROUP_POLLS, nodes=1, first=1, node="node"))
    fleet.hang_s = math.inf
    task = asyncio.create_task(fleet.engines.run())
    await asyncio.sleep(BUSY_INTERVAL_S)
    with monkeypatch.context() as patch:
        patch.setattr(fleet.engines, "_relist", None)
        with pytest.raises(ExceptionGroup):
            await task
    fleet.hanging.clear()
    assert await worst_gap_s(fleet, 3 * MAX_GROUP_POLLS) < MAX_GAP_S + BUSY_INTERVAL_S
