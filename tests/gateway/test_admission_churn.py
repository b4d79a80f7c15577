"""A gateway whose engines, limits and clients all change at once: outcomes add up."""

from __future__ import annotations

import asyncio
from typing import Any

from plimsoll.core.admission.request import AdmissionOutcome
from tests.gateway.admission_state import ONE, is_empty
from tests.gateway.picker_harness import (
    PickerHarness,
    engine_names,
    service_with_slo,
)


class Churn:
    """Requests of which some end, some leave, and the rest go on."""

    def __init__(self, world: PickerHarness) -> None:
        self.world = world
        self.running: list[bytes] = []
        self.waiting: list[asyncio.Future[bytes]] = []

    async def come(self, step: int) -> None:
        reply = self.world.send(stream=step % 2 == 0)
        if isinstance(reply, asyncio.Future):
            self.waiting.append(reply)
        else:
            self._go(reply)  # type: ignore[arg-type]
        await self.settle()

    async def leave(self) -> None:
        if self.waiting:
            self.waiting[0].cancel()
        await self.settle()

    async def end(self) -> None:
        if self.running:
            self.world.complete(self.running.pop(0), ttft_us=50_000, sent_bytes=1000)
        await self.settle()

    async def settle(self) -> None:
        await asyncio.sleep(0)
        for future in [future for future in self.waiting if future.done()]:
            self.waiting.remove(future)
            if not future.cancelled():
                self._go(future.result())

    def _go(self, reply: bytes) -> None:
        if b"x-plimsoll-endpoint" in reply:
            self.running.append(reply)


async def test_outcomes_add_up_under_churn() -> None:
    few: dict[str, Any] = {"admission": {"maxQueued": 20}}
    world = PickerHarness(service_with_slo(**few), pods=engine_names(2))
    crowd = Churn(world)
    for step in range(400):
        await crowd.come(step)
        if step % 3 == 0:
            await crowd.end()
        if step % 7 == 0:
            await crowd.leave()
        if step % 40 == 20:
            world.set_objects(service_with_slo(**few), pods=engine_names(2), unreachable=(ONE,))
        if step % 40 == 35:
            world.set_objects(service_with_slo(**few, batch=2 + step % 2), pods=engine_names(2))
        world.advance(0.3)
        await crowd.settle()
    outcomes = world.outcomes()
    assert (
        sum(count for name, count in outcomes.items() if name != AdmissionOutcome.QUEUED) + len(world.picker.queue)
        == 400
    )
    assert min(outcomes.values()) > 20
    while crowd.running or crowd.waiting:
        await crowd.leave()
        await crowd.end()
    assert is_empty(world)
