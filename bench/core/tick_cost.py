"""`python -m bench.core.tick_cost`: CPU time of one scaling tick of 1,000 and of 100 services with two tiers each.

Busy: each service has its own rate and a new sample with Poisson noise at each tick, in a large fleet at every second
one as in the operator (`cadence.has_turn`). Idle: each has such a sample of no request. (The operator decides about an
idle service every four seconds.) All services begin with the SLO capacity of their engines' self-benchmark, and the
ticks of the first minute and a half are excluded. The mean is the share of a core, because there is one tick per
second. The most expensive tick of the minute is one in which the minutes of all services close.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.cli import gc_tuning
from plimsoll.core.autoscaling import cadence
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples

TARGETS = {1000: 15.0, 100: 4.0}  # per cent of a core, by number of services
WARM_UP, TICKS = 90, 60
START_S = 1.8e9
ROLES = (Role.PREFILL, Role.DECODE)
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)
SELF_BENCHMARK = SelfBenchmark(
    prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
    decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
)
ENGINE_INFO = EngineInfo("vllm", "0", "some GPU", 1, 128, 400_000, 8192, 16, self_benchmark=SELF_BENCHMARK)
SPEC = ScalingSpec(ScalingPolicy({role: TierPolicy(1, 50) for role in ROLES}, slo=SLO), SLO)
METRICS = TierMetrics(LaggingSignals(), 1.0, 1.0)


def main() -> None:
    gc_tuning.reduce_full_collections()  # as the operator does
    rng = np.random.default_rng(0)
    mix = from_samples(rng.lognormal(6.7, 0.4, 256), np.zeros(256), rng.lognormal(5.3, 0.4, 256))
    for size, target in TARGETS.items():
        for name, rates in (("busy", rng.uniform(1, 20, size)), ("idle", np.zeros(size))):
            times = time_ticks(mix, rates, rng)
            mean = statistics.mean(times)
            print(
                f"{size} {name} services: {mean / 10:.1f} % of a core (target {target:.0f} %); a tick takes "
                f"{statistics.median(times):.0f} ms in the median, {max(times):.0f} ms at most",
                flush=True,
            )


def time_ticks(mix: Workload, rates: NDArray[np.float64], rng: np.random.Generator) -> list[float]:
    """Return the CPU milliseconds of each tick. rates: requests/s of each service.

    What one tick decides is ready at the next one.
    """
    services = make_services(mix, len(rates))
    interval_s = 2.0 if len(rates) > cadence.LARGE_FLEET else 1.0  # of a sample
    counts: dict[int, dict[str, int]] = {index: dict.fromkeys(ROLES, 1) for index in services}
    times = []
    for tick in range(WARM_UP + TICKS):
        arrivals = rng.poisson(rates * interval_s) / interval_s
        requests = {
            index: (service, make_snapshot(mix, float(arrivals[index]), counts[index]), SPEC)
            for index, service in services.items()
            if cadence.has_turn(str(index), tick, len(services))
        }
        started = time.process_time()
        decisions = decide_all(requests, START_S + tick)
        times.append(1e3 * (time.process_time() - started))
        counts |= {
            index: {role: tier.replicas for role, tier in decision.tiers.items()}
            for index, decision in decisions.items()
        }
    return times[WARM_UP:]


def make_services(mix: Workload, size: int) -> dict[int, ServiceState]:
    """Services whose lines are made; a thousand pairs of lines would take minutes, and nobody measures them here."""
    pattern = ServiceState.for_roles(ROLES)
    decide_all({0: (pattern, make_snapshot(mix, 1.0, dict.fromkeys(ROLES, 1)), SPEC)}, START_S - 60.0)
    services = {index: ServiceState.for_roles(ROLES) for index in range(size)}
    for index, service in services.items():
        for role, tier in service.tiers.items():
            capacities = pattern.tiers[role]
            assert isinstance(capacities.capacity, TierCapacity)  # the ladder gives one at once
            service.tiers[role] = replace(
                capacities,
                engines=replace(capacities.engines),
                capacity_state=replace(capacities.capacity_state, checked_s=START_S - 5.0 * index / size),
                forecast_state=tier.forecast_state,
            )
    return services


def make_snapshot(mix: Workload, rate: float, counts: dict[str, int]) -> ServiceSnapshot:
    """One service at one moment, all of it ready."""
    tiers = dict.fromkeys(ROLES, METRICS)
    metrics = ServiceMetrics(rate, True, 1.0, workload=mix, queued=0.0, reserved_work_s=0.0, in_flight=0.0, tiers=tiers)
    return ServiceSnapshot(
        metrics, {role: TierSnapshot(count, count, (), ENGINE_INFO) for role, count in counts.items()}
    )


if __name__ == "__main__":
    main()
