"""An admission controller, and what must hold of it at any time."""

from __future__ import annotations

import math

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
MIX = from_samples([500.0, 1000.0, 2000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
TIER = TierSpec(Role.SERVE, HOT, MIX, EngineLimits(1024, 200_000, 8192), SLO)
CLASSES = (ClassPolicy("high", 1, SLO), ClassPolicy("low", 0, SLO, max_utilization=0.9, guaranteed_share=0.1))
NUMBERS = engine_cost_model(TIER, CLASSES)


def gate(
    replicas: int = 1,
    announcement: CapacityAnnouncement = CapacityAnnouncement(30.0, 1.0),  # noqa: B008 - a value
) -> AdmissionController:
    made = AdmissionController(CLASSES, NUMBERS, {"limited": TenantPolicy(requests_per_s=5.0)})
    made.tick(0.0, announcement)
    made.set_replicas({str(k): NUMBERS.batch for k in range(replicas)}, 0.0)
    return made


def make_request(id: str, now: float = 0.0, **other: object) -> AdmissionRequest:
    return AdmissionRequest(
        **({"id": id, "request_class": "high", "tenant": "t", "arrived_s": now, "prompt_tokens": 1000} | other)
    )  # type: ignore[arg-type]


def full(controller: AdmissionController, now: float = 0.0) -> float:
    """Fills it with requests f0, f1, ...; returns the time."""
    for k in range(2000):
        if controller.submit(make_request(f"f{k}", now), now).outcome is not AdmissionOutcome.ADMITTED:
            controller.cancel(f"f{k}", now)
            return now
        now += 0.04
    raise AssertionError("it never fills")


def check(controller: AdmissionController) -> None:
    """Nothing is below zero, and what is counted twice agrees."""
    held = running = 0
    for replica in controller.pool.replicas.values():
        sums = (replica.sequences, replica.sequence_tokens, replica.kv_mean_tokens, replica.step_s)
        assert all(0 <= value < math.inf for value in sums)
        assert min(replica.running_per_class) >= 0
        assert sum(replica.running_per_class) == len(replica.running)
        assert replica.sequences == sum(r.cost.sequences for r in replica.running.values())
        assert 0.5 <= replica.step_time_ratio <= 4.0
        running += len(replica.running)
    held = controller.queued
    assert running == len(controller.pool)
    assert 0 <= controller.queued_work_s < math.inf
    assert (controller.queued_work_s == 0) == (held == 0)
    assert 0 <= controller.reservations.work_s < math.inf
    assert 0 <= controller.reservations.pending_work_s < math.inf
    assert all(count >= 0 for count in controller.outcomes.values())
