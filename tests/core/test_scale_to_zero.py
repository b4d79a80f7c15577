"""A service that may sleep, in virtual time: it goes to zero, stays there, comes back, and is never put to sleep."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.scale_to_zero import MAX_WAKE_S
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload
from tests.core.test_autoscaler import ABOUT, MIX, SLO, START_S

HORIZON_S = 10.0
TAKES_S = 2  # of a request, in an engine
STARTS_S = 8  # until a replica serves
LONG_S = 120  # of virtual time: twelve holds


class ScaleToZeroFleet:
    """One service that may go to zero. Each second so many requests come; what comes while nothing is ready is held."""

    def __init__(
        self, *roles: Role, miss_cost: float = 0.0, most: int = 4, workload: Workload | Unavailable = MIX
    ) -> None:
        self.roles = roles or (Role.SERVE,)
        policy = ScalingPolicy(dict.fromkeys(self.roles, TierPolicy(0, most)), slo=SLO, miss_cost=miss_cost)
        self.scaling_spec = ScalingSpec(policy, SLO, horizon_s=HORIZON_S)
        self.service, self.workload = ServiceState.for_roles(self.roles), workload
        self.now_s, self.held = START_S, 0.0
        self.counts = dict.fromkeys(self.roles, 1)
        self.ready_s = dict.fromkeys(self.roles, START_S)  # when all that are ordered serve
        self.in_flight: list[float] = [0.0] * TAKES_S
        self.history: list[int] = []

    @property
    def is_ready(self) -> bool:
        return all(self.counts[role] and self.now_s >= self.ready_s[role] for role in self.roles)

    @property
    def decision(self) -> TierDecision:
        assert self.service.last_decision is not None
        return self.service.last_decision.decision.tiers[self.roles[-1]]

    def second(self, came: float = 0.0, measured: LaggingSignals | None = None, **differing: Any) -> int:
        """One tick; differing: of what is heard. Returns the replicas of the answering tier."""
        self.now_s += 1.0
        let_in = came if self.is_ready else 0.0
        if self.is_ready:
            let_in, self.held = let_in + self.held, 0.0
        else:
            self.held += came
        self.in_flight = [*self.in_flight[1:], let_in]
        tiers = {
            role: TierMetrics(measured or LaggingSignals(), 1.0, 1.0, in_flight=sum(self.in_flight))
            for role in self.roles
        }
        line = self.service.tiers[self.roles[-1]].capacity
        metrics = ServiceMetrics(
            rate_per_s=came,
            has_new_rate=True,
            coverage=1.0,
            workload=self.workload,
            queued=self.held,
            queued_work_s=self.held * (line.request_gpu_s if isinstance(line, TierCapacity) else 0.5),
            reserved_work_s=0.0,
            in_flight=sum(self.in_flight),
            tiers=tiers,
        )
        there: dict[str, TierSnapshot] = {
            role: TierSnapshot(
                self.counts[role], self.counts[role] if self.now_s >= self.ready_s[role] else 0, (), ABOUT
            )
            for role in self.roles
        }
        observed = ServiceSnapshot(replace(metrics, **differing), there)
        found = decide_all({"one": (self.service, observed, self.scaling_spec)}, self.now_s)["one"]
        for role in self.roles:
            if not self.counts[role] and found.tiers[role].replicas:
                self.ready_s[role] = self.now_s + STARTS_S
            self.counts[role] = found.tiers[role].replicas
        self.history.append(self.counts[self.roles[-1]])
        return self.history[-1]

    def run(self, seconds: int, came: Callable[[int], float] = lambda t: 0.0, **differing: Any) -> list[int]:
        return [self.second(came(t), **differing) for t in range(seconds)]

    def asleep_after(self, most_s: int = 2000) -> int:
        """Seconds until nothing runs, while no request comes."""
        return next(t for t in range(1, most_s) if self.second() == 0)

    def wake_ups(self) -> int:
        return sum(before == 0 < after for before, after in pairwise(self.history))


def after_requests(sleeper: ScaleToZeroFleet, every_s: int = 60, requests: int = 5) -> ScaleToZeroFleet:
    """After some requests, the last of which has just come."""
    sleeper.run(every_s * (requests - 1) + 1, lambda t: float(t % every_s == 0))
    return sleeper


def need(sleeper: ScaleToZeroFleet) -> SizingResult:
    found = sleeper.service.sizings[sleeper.roles[-1]]
    assert isinstance(found, SizingResult), found
    return found


# To zero


def test_scale_to_zero_follows_one_startup_after_last_request() -> None:
    """However slowly the level fades: eight requests in a minute are a rate that asks for a replica for longer."""
    sleeper = ScaleToZeroFleet()
    after_requests(sleeper, every_s=8, requests=8)
    assert HORIZON_S <= sleeper.asleep_after() <= HORIZON_S + TAKES_S + 2
    assert need(sleeper).replicas == 1, "the forecast alone would keep it up"
    assert "chance of one within 10 s" in sleeper.decision.summary
    assert sleeper.run(LONG_S) == [0] * LONG_S


def test_scale_to_zero_higher_miss_cost_waits_longer() -> None:
    found = []
    for miss_cost in (0.0, 100.0, 1000.0):
        sleeper = after_requests(ScaleToZeroFleet(miss_cost=miss_cost), every_s=8)
        found.append(sleeper.asleep_after())
        cold_s = HORIZON_S + miss_cost * need(sleeper).request_gpu_s
        assert found[-1] <= 2.0 * cold_s + TAKES_S + 2, "ski rental"
    assert found[0] < found[1] < found[2]


def test_scale_to_zero_pair_goes_and_returns_together() -> None:
    sleeper = after_requests(ScaleToZeroFleet(Role.PREFILL, Role.DECODE, miss_cost=50.0), every_s=8)
    for second in range(600):
        sleeper.second(float(second == 500))
        assert len({count > 0 for count in sleeper.counts.values()}) == 1
    assert sleeper.wake_ups() == 1


def test_scale_to_zero_without_completed_request_repeats() -> None:
    sleeper = ScaleToZeroFleet(workload=Unavailable("no request has completed yet"))
    start_s = sleeper.service.tiers[Role.SERVE].startup_model.horizon_s  # as far as is known
    assert sleeper.asleep_after() <= start_s + 2
    sleeper.second(1.0)
    assert sleeper.counts[Role.SERVE] == 1
    sleeper.held = 0.0  # its client went away
    assert sleeper.asleep_after() <= 2.0 * start_s, "it has been away for longer than a start before"


# Never to zero


MISSING_METRICS = Unavailable("silent")
REQUEST_SIGNS = {Role.SERVE: TierMetrics(LaggingSignals(), 1.0, 1.0, in_flight=0.0)}


@pytest.mark.parametrize(
    "differing",
    [
        {"queued": 1.0, "queued_work_s": 0.5},
        {"queued": MISSING_METRICS},
        {"in_flight": 1.0},
        {"in_flight": MISSING_METRICS},
        {"reserved_work_s": 0.01},
        {"reserved_work_s": MISSING_METRICS},
        {"rate_per_s": MISSING_METRICS},
        {"coverage": 0.5},
        {"coverage": 0.0},
        {"tiers": {Role.SERVE: replace(REQUEST_SIGNS[Role.SERVE], in_flight=1.0)}},
        {"tiers": {Role.SERVE: replace(REQUEST_SIGNS[Role.SERVE], coverage=0.5)}},
        {"tiers": {}},
    ],
    ids=lambda differing: ", ".join(differing),
)
def test_scale_to_zero_waits_while_requests_may_exist(differing: dict[str, Any]) -> None:
    sleeper = after_requests(ScaleToZeroFleet(), every_s=5)
    assert min(sleeper.run(LONG_S, **differing)) >= 1
    assert sleeper.asleep_after() >= HORIZON_S, "the pause begins when it is known again"


@pytest.mark.parametrize("every_s", [2, 5, 7])
@pytest.mark.parametrize("miss_cost", [0.0, 25.0])
def test_scale_to_zero_requests_within_hold_keep_replica(every_s: int, miss_cost: float) -> None:
    sleeper = ScaleToZeroFleet(miss_cost=miss_cost)
    assert min(sleeper.run(LONG_S, lambda t: float(t % every_s == 0))) >= 1


def test_scale_to_zero_regular_caller_keeps_replica() -> None:
    sleeper = ScaleToZeroFleet(miss_cost=2000.0)
    sleeper.run(600, lambda t: float(t % 60 == 0))
    assert min(sleeper.run(600, lambda t: float(t % 60 == 0))) >= 1


@pytest.mark.parametrize("startup_s", [8, 60, 200])
def test_scale_to_zero_lets_start_finish_and_client_return(startup_s: int) -> None:
    """A rejected client leaves nothing behind, and comes back when the replica is ready: it finds one."""
    sleeper = ScaleToZeroFleet()
    after_requests(sleeper)
    sleeper.asleep_after()
    sleeper.run(300)
    assert sleeper.second(rate_per_s=1.0, queued=0.0, queued_work_s=0.0) == 1
    sleeper.ready_s = dict.fromkeys(sleeper.roles, sleeper.now_s + startup_s)
    assert sleeper.run(startup_s + 60, queued=0.0, queued_work_s=0.0) == [1] * (startup_s + 60)
    assert any("rejected clients may return" in step.reason for step in sleeper.decision.steps)
    assert sleeper.second(1.0) == 1
    assert sleeper.asleep_after() <= HORIZON_S + TAKES_S + 2


def test_scale_to_zero_gives_up_start_that_never_ends() -> None:
    sleeper = ScaleToZeroFleet()
    after_requests(sleeper)
    sleeper.asleep_after()
    assert sleeper.second(rate_per_s=1.0, queued=0.0, queued_work_s=0.0) == 1
    sleeper.ready_s = dict.fromkeys(sleeper.roles, math.inf)
    ordered_s = sleeper.now_s
    assert sleeper.second() == 1
    while sleeper.now_s < ordered_s + MAX_WAKE_S - 30.0:  # a decision every half minute: all it reads is the time
        sleeper.now_s += 29.0
        assert sleeper.second() == 1
    sleeper.asleep_after(100)
    assert MAX_WAKE_S <= sleeper.now_s - ordered_s <= MAX_WAKE_S + 10


def test_scale_to_zero_respects_minimum() -> None:
    sleeper = ScaleToZeroFleet()
    policy = ScalingPolicy({Role.SERVE: TierPolicy(1, 4)}, slo=SLO, miss_cost=0.0)
    sleeper.scaling_spec = replace(sleeper.scaling_spec, policy=policy)
    assert min(after_requests(sleeper, every_s=5).run(LONG_S)) == 1


# Back


@pytest.mark.parametrize(
    "observed",
    [{"queued": 1.0, "queued_work_s": 0.5}, {"rate_per_s": 1.0}, {"reserved_work_s": 0.01}, {"in_flight": 1.0}],
    ids=lambda observed: next(iter(observed)),
)
@pytest.mark.parametrize("coverage", [1.0, 0.5])
def test_scale_from_zero_on_first_sign_of_request(observed: dict[str, Any], coverage: float) -> None:
    sleeper = after_requests(ScaleToZeroFleet(), every_s=5)
    sleeper.asleep_after()
    sleeper.run(100)
    assert sleeper.second(0.0, coverage=coverage, **observed) == 1


def test_scale_from_zero_single_request_wakes_one_replica() -> None:
    sleeper = after_requests(ScaleToZeroFleet(), every_s=5)
    sleeper.asleep_after()
    sleeper.run(400, lambda t: float(t == 200))
    assert sleeper.wake_ups() == 1
    assert max(sleeper.history[-300:]) == 1
    assert sleeper.history[-1] == 0


def test_scale_from_zero_is_sized_by_queued_work() -> None:
    sleeper = after_requests(ScaleToZeroFleet(most=16), every_s=5)
    sleeper.asleep_after()
    many = 3.0 * HORIZON_S * need(sleeper).replica_work
    assert sleeper.second(0.0, queued=100.0, queued_work_s=many) >= 3


@pytest.mark.parametrize(
    "differing", [{"coverage": 0.0}, {"coverage": 0.5}, {"rate_per_s": MISSING_METRICS}, {"queued": MISSING_METRICS}]
)
def test_scale_from_zero_ignores_missing_metrics(differing: dict[str, Any]) -> None:
    sleeper = after_requests(ScaleToZeroFleet(), every_s=5)
    sleeper.asleep_after()
    assert max(sleeper.run(LONG_S, **differing)) == 0


@pytest.mark.parametrize("asleep", [True, False])
def test_scale_to_zero_after_restart_waits_full_hold(asleep: bool) -> None:
    sleeper = after_requests(ScaleToZeroFleet(), every_s=5)
    if asleep:
        sleeper.asleep_after()
    kept = json.loads(json.dumps(dump_service_state(sleeper.service), allow_nan=False))
    sleeper.service = ServiceState.for_roles(sleeper.roles)
    restore_service_state(sleeper.service, kept)
    if asleep:
        assert max(sleeper.run(LONG_S)) == 0
    else:
        assert sleeper.asleep_after() >= HORIZON_S


# What waited for a start is no evidence


def late(sleeper: ScaleToZeroFleet, seconds: int, ttft_s: float) -> None:
    """Requests that come now and then, and the last minute's percentile."""
    for t in range(seconds):
        sleeper.second(float(t % 5 == 0), LaggingSignals(ttft_s=ttft_s))


def test_first_replica_startup_waits_cause_no_scale_up() -> None:
    sleeper = ScaleToZeroFleet(workload=Unavailable("no request has completed yet"))
    sleeper.asleep_after()
    sleeper.run(STARTS_S, lambda t: 1.0)
    late(sleeper, 60, ttft_s=16.0)
    assert max(sleeper.history) == 1
    late(sleeper, 60, ttft_s=16.0)
    assert max(sleeper.history) > 1, "by now they came when it was ready"


# Who was told to come back


def test_retry_backlog_counts_once_in_every_tier() -> None:
    sleeper = ScaleToZeroFleet(Role.PREFILL, Role.DECODE, most=50)
    sleeper.scaling_spec = replace(sleeper.scaling_spec, slo=Slo(0.95, ttft_s=4.0, tpot_s=0.05))
    sleeper.run(120, lambda t: 4.0)
    before = {role: found for role, found in sleeper.service.sizings.items() if isinstance(found, SizingResult)}
    horizon_s = {role: sleeper.service.horizon_s(role, sleeper.scaling_spec) for role in before}
    sleeper.second(4.0, reserved_work_s=4.0 * before[Role.DECODE].request_gpu_s * horizon_s[Role.DECODE])
    for role, found in before.items():
        after = sleeper.service.sizings[role]
        assert isinstance(after, SizingResult)
        more = 4.0 * horizon_s[Role.DECODE] / horizon_s[Role(role)]
        assert after.rate_per_s == pytest.approx(found.rate_per_s + more, rel=0.05)
    sleeper.second(4.0)
    now = sleeper.service.sizings[Role.DECODE]
    assert isinstance(now, SizingResult)
    assert now.rate_per_s == pytest.approx(before[Role.DECODE].rate_per_s, rel=0.05), "they are in no sample"


def test_scale_from_zero_recommendation_is_brief() -> None:
    """Who only recommends has nothing held, so that the advice lasts as long as the refused request is heard of."""
    sleeper = after_requests(ScaleToZeroFleet())
    sleeper.asleep_after()
    sleeper.scaling_spec = replace(
        sleeper.scaling_spec, policy=replace(sleeper.scaling_spec.policy, mode=ScalingMode.RECOMMEND)
    )
    advice = []
    for came in (0.0, 1.0, 0.0, 0.0):
        sleeper.second(came, queued=0.0, queued_work_s=0.0, in_flight=0.0)
        advice.append(sleeper.decision.recommended)
    assert advice == [0, 1, 0, 0]
    assert sleeper.history[-4:] == [0, 0, 0, 0]
