"""What is left in a picker's admission when all requests are over."""

from __future__ import annotations

from tests.gateway.picker_harness import (
    PickerHarness,
)

ONE = "10.0.0.1:8000"


def is_empty(world: PickerHarness) -> bool:
    """Nothing is held, running or counted anywhere, and no timer runs."""
    picker = world.picker
    guards = picker.admission.services.values()
    return (
        len(picker.queue) == len(picker.inflight) == len(picker.admission) == 0
        and all(load.inflight == 0 for load in picker.inflight.loads.values())
        and all(guard.controller.queued == len(guard.queued) == len(guard.controller.pool) == 0 for guard in guards)
        and all(guard.controller.queued_work_s == 0.0 for guard in guards)
    )
