"""Nothing grows: what an hour of ticks, and of requests, leaves behind is what the hour before it left."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable
from itertools import count

import numpy as np
import pytest

from bench.core.memory_growth import FILLED_S, HOUR_S, FleetSimulation, collect_garbage
from plimsoll.core.admission import fairness
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.serialization import from_dict, to_dict
from plimsoll.core.engine_model.calibration import replica_speed
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

STEP_S = 30.0
NOISE = 120  # blocks of memory: decisions that are remembered have more words or fewer


def allocated_bytes() -> int:
    collect_garbage()
    return sys.getallocatedblocks()


# The scaling tick


@pytest.fixture(scope="module")
def life() -> FleetSimulation:
    """Two services whose replicas are replaced every two minutes, an hour after all that is kept for one is full."""
    made = FleetSimulation(2, samples=64)
    made.advance(FILLED_S + HOUR_S, STEP_S)
    return made


def test_operator_ticks_for_an_hour_leak_no_memory(life: FleetSimulation) -> None:
    before = allocated_bytes()
    life.advance(HOUR_S, STEP_S)
    assert abs(allocated_bytes() - before) < NOISE


def test_operator_leak_of_departed_replicas_is_detected(life: FleetSimulation, monkeypatch: pytest.MonkeyPatch) -> None:
    before = allocated_bytes()
    monkeypatch.setattr(replica_speed, "REPLICA_EXPIRY_S", math.inf)
    life.advance(HOUR_S, STEP_S)
    assert allocated_bytes() - before > NOISE


def test_demand_state_size_is_constant_from_start() -> None:
    def size(state: DemandState) -> tuple[int, ...]:
        past, shape = state.closed_growth, state.closed_season
        return len(state.packed), len(past.minutes), len(shape.day.bins), len(shape.week.bins)

    state = DemandState()
    empty = size(observe(state, 0.0, 1.0))
    for minute in range(1, 3 * 24 * 60):
        state = observe(state, 60.0 * minute, 1.0 + minute % 7)
    assert size(state) == size(from_dict(to_dict(state))) == empty


# The gate

SECONDS, QUIET_S = 200, 130  # of requests, and longer than a tenant or a ticket is remembered
STAY_S = 6.0  # of a request
SLO = Slo(0.95, 0.5, 0.0, 0.05)
CLASSES = (ClassPolicy("high", 1, SLO, guaranteed_share=0.2), ClassPolicy("low", 0, SLO))
MIX = from_samples([512.0, 1024.0, 2048.0], [0.0, 0.0, 0.0], [50.0, 100.0, 200.0])
MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
SERVE = TierSpec(Role.SERVE, MODEL, MIX, EngineLimits(64, 30_000, 8192), SLO)


class AdmissionLoad:
    """A gate at three times its load, to which every tenant, conversation and replica comes under a new name."""

    def __init__(self) -> None:
        self.gate = AdmissionController(
            CLASSES, engine_cost_model(SERVE, CLASSES), {"known": TenantPolicy(2.0, requests_per_s=2.0)}
        )
        self.running: deque[tuple[str, float]] = deque()  # with the end of each
        self.numbers = count()
        self.now = 0.0
        self.rng = np.random.default_rng(2)

    def last(self, seconds: int) -> None:
        """Requests for so long, and then none until nobody runs, waits or is to come back."""
        for second in range(seconds + QUIET_S):
            if second % 20 == 0:
                caps = {f"engine-{self.now:.0f}-{n}": 32 for n in range(2)}
                self.gate.set_replicas(caps, self.now, frozenset({f"prefill-{self.now:.0f}"}))
                self.running = deque(one for one in self.running if one[0] in self.gate.pool)
            self.gate.tick(self.now, CapacityAnnouncement(self.now + 5.0, 1.0))
            for _ in range(20):
                self.now += 1.0 / 20.0
                if second < seconds:
                    self._offer()
                while self.running and self.running[0][1] <= self.now:
                    self.gate.complete(self.running.popleft()[0], self.now, 100, 0.1)
                self._run(self.gate.release(self.now))

    def _run(self, decisions: Iterable[AdmissionDecision]) -> None:
        self.running += [
            (one.request_id, self.now + STAY_S) for one in decisions if one.outcome is AdmissionOutcome.ADMITTED
        ]

    def _offer(self) -> None:
        number = next(self.numbers)
        beginning = tuple(range(number % 3 + 1))
        requests = AdmissionRequest(
            f"r{number}", CLASSES[number % 2].name, "known" if number % 5 == 0 else f"tenant-{number}", self.now,
            int(self.rng.choice([512, 1024, 2048])), max_tokens=200, body_hash=number,
            block_hashes=(*beginning, *range(1000 * number + 10, 1000 * number + 13)),
        )  # fmt: skip
        decision = self.gate.submit(requests, self.now)
        if decision.outcome is AdmissionOutcome.QUEUED and number % 7 == 0:
            self.gate.cancel(requests.id, self.now)
        self._run((decision,))


@pytest.fixture(scope="module")
def load() -> AdmissionLoad:
    made = AdmissionLoad()
    made.last(SECONDS)
    return made


def test_admission_requests_for_minutes_leak_no_memory(load: AdmissionLoad) -> None:
    before, outcomes = allocated_bytes(), dict(load.gate.outcomes)
    load.last(SECONDS)
    decided = {outcome for outcome, observed in load.gate.outcomes.items() if observed > outcomes[outcome]}
    assert decided >= {
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.QUEUED,
        AdmissionOutcome.SHED_SATURATED,
        AdmissionOutcome.SHED_QUOTA,
    }
    assert abs(allocated_bytes() - before) < NOISE


def test_admission_leak_of_departed_tenants_is_detected(load: AdmissionLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    before = allocated_bytes()
    monkeypatch.setattr(fairness, "IDLE_TENANT_TTL_S", math.inf)
    load.last(SECONDS)
    assert allocated_bytes() - before > NOISE
