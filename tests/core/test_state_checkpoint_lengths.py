"""Request lengths in the checkpoint: kept, bounded, and nothing else is accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.state_checkpoint import MAX_LENGTHS, dump_service_state, restore_service_state
from plimsoll.core.types import Unavailable
from plimsoll.core.workload import Workload, from_samples

SAMPLES = np.linspace(10.0, 4000.0, 3000)


def restored(lengths: Any) -> Workload | Unavailable:
    service = ServiceState.for_roles(["serve"])
    restore_service_state(service, {"version": 1, "lengths": lengths})
    return service.workload


def dumped(workload: Workload) -> Any:
    service = ServiceState.for_roles(["serve"])
    service.workload = workload
    return dump_service_state(service)["lengths"]


def test_lengths_are_restored() -> None:
    workload = from_samples(SAMPLES[:50], SAMPLES[:50] / 3.0, SAMPLES[:50] / 10.0)
    found = restored(dumped(workload))
    assert isinstance(found, Workload)
    for name in ("uncached_tokens", "cached_tokens", "output_tokens", "weights"):
        assert getattr(found, name) == pytest.approx(getattr(workload, name), rel=1e-3)


def test_many_lengths_are_bounded() -> None:
    stored = dumped(from_samples(SAMPLES, SAMPLES / 3.0, SAMPLES / 10.0))
    assert {len(column) for column in stored.values()} == {MAX_LENGTHS}
    assert isinstance(restored(stored), Workload)


GOOD = {"uncached_tokens": [10.0], "cached_tokens": [0.0], "output_tokens": [5.0], "weights": [1.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [0.0]},
        {"weights": [-1.0]},
        {"weights": [True]},
        {"weights": [1.0, 1.0]},
        {"output_tokens": [float("nan")]},
        {"output_tokens": [1e30]},
        {"output_tokens": ["5"]},
        {"cached_tokens": None},
        {"uncached_tokens": [1.0] * (MAX_LENGTHS + 1)},
    ],
    ids=str,
)
def test_unreadable_lengths_are_ignored(change: Any) -> None:
    assert isinstance(restored(GOOD), Workload)
    assert isinstance(restored(GOOD | change), Unavailable)
    assert isinstance(restored(None), Unavailable)
