"""A large fleet, of which only what may move is decided anew, comes to what the same fleet decided whole comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.serialization import to_dict as forecast_to_dict
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload, from_samples

START_S = 1.8e9
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)
LADDER = SelfBenchmark(
    prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
    decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
)
ABOUT = EngineInfo("vllm", "0", "some GPU", 1, 128, 400_000, 8192, 16, self_benchmark=LADDER)
PAIR = (Role.PREFILL, Role.DECODE)
FULL_SWEEP = 1 << 30
SECONDS = 80  # of which the last ten come after all that happens


def mix() -> Workload:
    rng = np.random.default_rng(0)
    return from_samples(rng.lognormal(6.7, 0.4, 64), np.zeros(64), rng.lognormal(5.3, 0.4, 64))


MIX = mix()


def policies() -> Iterator[ScalingPolicy]:
    usual = TierPolicy(1, 50)
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO)
    yield ScalingPolicy({Role.SERVE: usual}, slo=SLO)
    yield ScalingPolicy(dict.fromkeys(PAIR, TierPolicy(0, 50)), slo=SLO)
    yield ScalingPolicy({Role.SERVE: TierPolicy(0, 3)}, slo=SLO)
    yield ScalingPolicy({Role.SERVE: replace(usual, warm_replicas=2)}, slo=SLO)
    yield ScalingPolicy({Role.SERVE: replace(usual, scale_down_limit=ReplicaRateLimit(1, 20.0))}, slo=SLO)
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO, prefill_per_decode=(0.5, 2.0))
    yield ScalingPolicy(dict.fromkeys(PAIR, usual), slo=SLO, miss_cost=200.0)


POLICIES = list(policies())


class Fleet:
    """Services with one line for each role, so that none takes its time to be made."""

    def __init__(self, services: int) -> None:
        self.services: dict[int, ServiceState] = {}
        made: dict[tuple[str, ...], ServiceState] = {}
        self.wishes = {n: ScalingSpec(POLICIES[n % len(POLICIES)], SLO) for n in range(services)}
        self.counts = {n: dict.fromkeys(wish.policy.tiers, 1) for n, wish in self.wishes.items()}
        for n, wish in self.wishes.items():
            roles = tuple(wish.policy.tiers)
            if roles not in made:
                made[roles] = ServiceState.for_roles(roles)
                seen = self.seen(n, 1.0, {})
                decide_all({n: (made[roles], seen, wish)}, START_S - 60.0)
            self.services[n] = ServiceState.for_roles(roles)
            for role in roles:
                known = made[roles].tiers[role]
                assert isinstance(known.capacity, TierCapacity)
                fresh = replace(known.capacity, replica_cache=type(known.capacity.replica_cache)())
                self.services[n].tiers[role] = replace(
                    known, forecast_state=DemandState(), checked_s=START_S + n % 5, capacity=fresh
                )

    def seen(
        self, n: int, rate: float | Unavailable, starting: dict[str, tuple[StartingPod, ...]], tpot_s: float = 0.02
    ) -> ServiceSnapshot:
        tiers = {
            Role(role): TierMetrics(LaggingSignals(tpot_s=tpot_s, waiting=0.0), 1.0, 1.0) for role in self.counts[n]
        }
        said = ServiceMetrics(
            rate,
            True,
            1.0,
            workload=MIX,
            queued=0.0,
            queued_work_s=0.0,
            reserved_work_s=0.0,
            in_flight=0.0,
            tiers=tiers,
        )
        there = {
            role: TierSnapshot(count, max(0, count - len(starting.get(role, ()))), starting.get(role, ()), ABOUT)
            for role, count in self.counts[n].items()
        }
        return ServiceSnapshot(said, there)

    def tick(self, now_s: float, seen: dict[int, ServiceSnapshot], decided_a_tick: int) -> None:
        asked = {n: (self.services[n], seen[n], self.wishes[n]) for n in self.services}
        found = decide_all(asked, now_s, decided_a_tick)
        assert found.keys() == self.services.keys()
        for n, decision in found.items():
            self.counts[n] = {name: tier.replicas for name, tier in decision.tiers.items()}


def rates(rng: np.random.Generator, means: NDArray[np.float64], second: int) -> list[float | Unavailable]:
    """Steady, leaping, falling to nothing, from nothing, none at all, now and then not known, and in bursts."""
    kinds = np.arange(len(means)) // len(POLICIES) % 7
    found = rng.poisson(means).astype(float)
    found[(kinds == 1) & (second > 60)] *= 4.0
    found[(kinds == 2) & (second > 70)] = 0.0
    found[(kinds == 3) & (second < 50)] = 0.0
    found[kinds == 4] = 0.0
    found[(kinds == 6) & (second % 30 < 15)] *= 6.0
    lost = (kinds == 5) & (rng.random(len(means)) < 0.2)
    return [Unavailable("silent") if gone else float(rate) for rate, gone in zip(found, lost, strict=True)]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=1)  # some ten seconds
def test_unchanged_services_match_full_evaluation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    services = 7 * len(POLICIES)
    means, whole, partly = rng.uniform(0.5, 20.0, services), Fleet(services), Fleet(services)
    stood = 0
    for second in range(SECONDS):
        now_s = START_S + second
        drawn, tpots = rates(rng, means, second), rng.uniform(0.016, 0.03, services)
        late = (StartingPod("p", now_s - 5.0),) if second in (40, 41) else ()
        for fleet, decided_a_tick in ((whole, FULL_SWEEP), (partly, 3)):
            seen = {
                n: fleet.seen(n, rate, {Role.SERVE: late} if n % 7 == 0 else {}, float(tpots[n]))
                for n, rate in enumerate(drawn)
            }
            fleet.tick(now_s, seen, decided_a_tick)
        assert whole.counts == partly.counts, second
        stood += sum(
            service.last_decision is not None and service.last_decision.at_s < now_s
            for service in partly.services.values()
        )
    tried = [
        tier.downscale_regret for service in whole.services.values() for tier in service.decision_state.tiers.values()
    ]
    assert any(known.trials or known.idle for known in tried), "whether needs return is learned meanwhile"
    for n, service in whole.services.items():
        assert service.decision_state == partly.services[n].decision_state
        assert {name: forecast_to_dict(tier.forecast_state) for name, tier in service.tiers.items()} == {
            name: forecast_to_dict(tier.forecast_state) for name, tier in partly.services[n].tiers.items()
        }
    assert stood > 0.2 * SECONDS * services, "hardly any decision stood: nothing was tried"


@pytest.mark.parametrize("known", [True, False])
def test_queued_work_wakes_both_tiers_of_a_pair(known: bool) -> None:
    fleet = Fleet(3)
    now_s = START_S
    if known:  # arrivals have been seen, and have ended long ago
        for rate in (5.0,) * 20 + (0.0,) * 400:
            now_s += 1.0
            fleet.tick(now_s, {n: fleet.seen(n, rate, {}) for n in range(3)}, FULL_SWEEP)
    fleet.counts[2] = dict.fromkeys(PAIR, 0)
    now_s += 1.0
    seen = {n: fleet.seen(n, 0.0, {}) for n in range(3)}
    line = fleet.services[2].tiers[Role.DECODE].capacity
    work_s = 400.0 * (line.request_gpu_s if known and isinstance(line, TierCapacity) else 1.0)
    seen[2] = replace(seen[2], metrics=replace(seen[2].metrics, queued=400.0, queued_work_s=work_s))
    fleet.tick(now_s, seen, FULL_SWEEP)
    assert all(count >= 1 for count in fleet.counts[2].values()), fleet.counts[2]
    if known:
        decode = fleet.services[2].sizings[Role.DECODE]
        assert isinstance(decode, SizingResult)
        horizon_s = fleet.services[2].horizon_s(Role.DECODE, fleet.wishes[2])
        assert decode.rate_per_s == pytest.approx(400.0 / horizon_s), "cleared within one start-up"


def test_newly_ready_replica_is_noticed_without_other_changes() -> None:
    """Percentiles of those that waited for it are no evidence for a minute from then on."""
    fleet = Fleet(2)
    for second in range(60):
        now_s = START_S + second
        late = {Role.SERVE: (StartingPod("p", START_S),)} if 45 <= second < 50 else {}
        fleet.tick(now_s, {0: fleet.seen(0, 5.0, {}), 1: fleet.seen(1, 5.0, late)}, 0 if second > 45 else FULL_SWEEP)
    assert fleet.services[1].decision_state.tiers[Role.SERVE].ready_increased_s == START_S + 50
