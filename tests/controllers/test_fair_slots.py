"""Slots go to who has the fewest, by namespace and by node."""

from __future__ import annotations

import asyncio

from plimsoll.controllers.fair_slots import FairSlots, Group
from tests.virtual_time import in_virtual_time


async def hold(slots: FairSlots, group: Group, seconds: float, granted: list[Group]) -> None:
    async with slots.of(group):
        granted.append(group)
        await asyncio.sleep(seconds)


async def order(size: int, *groups: Group) -> list[Group]:
    """The order in which these get a slot for a second each."""
    slots, granted = FairSlots(size), list[Group]()
    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            tasks.create_task(hold(slots, group, 1.0, granted))
    assert slots.waiting == 0
    return granted


@in_virtual_time
async def test_namespace_with_fewest_slots_is_next() -> None:
    many, one = Group("many", "n1"), Group("one", "n1")
    assert (await order(2, *[many] * 6, one))[:3] == [many, many, one]


@in_virtual_time
async def test_node_with_fewest_slots_is_next() -> None:
    lost, other = Group("team", "lost"), Group("team", "other")
    assert (await order(2, *[lost] * 6, other))[:3] == [lost, lost, other]


@in_virtual_time
async def test_namespaces_with_more_work_than_slots_take_turns() -> None:
    """A namespace that always waits leaves the others their turn."""
    groups = [Group(f"team{number}", f"n{node}") for number in range(4) for node in range(3)]
    granted = await order(2, *groups * 4)
    assert {one.namespace for one in granted[:6]} == {"team0", "team1", "team2", "team3"}
    assert {*granted[:18]} == {*groups}


@in_virtual_time
async def test_nodes_with_more_work_than_slots_take_turns() -> None:
    nodes = [Group("team", f"n{node}") for node in range(4)]
    assert {*(await order(2, *nodes * 4))[:6]} == {*nodes}


@in_virtual_time
async def test_group_that_waits_alone_gets_all_slots() -> None:
    started = asyncio.get_running_loop().time()
    await order(4, *[Group("many", "n1")] * 8)
    assert asyncio.get_running_loop().time() - started == 2.0


@in_virtual_time
async def test_cancelled_holders_give_their_slots_back() -> None:
    slots, granted, group = FairSlots(1), list[Group](), Group("team", "n1")
    tasks = [asyncio.create_task(hold(slots, group, 1.0, granted)) for _ in range(4)]
    await asyncio.sleep(0.5)
    tasks[1].cancel()  # waits
    await asyncio.sleep(0.5)
    tasks[2].cancel()  # has been granted a slot in this instant, or waits for it
    await asyncio.gather(*tasks, return_exceptions=True)
    await order(1, group)
    assert (slots.waiting, granted[-1]) == (0, group)
    async with asyncio.timeout(1.0), slots.of(group):
        pass
