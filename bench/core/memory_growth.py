"""`python -m bench.core.memory_growth`: memory growth of the core over hours of scaling ticks, one per second of
virtual time.

A few services of two tiers have Poisson load with a ramp up and down twice an hour, so that replicas come and go. In
addition, all services are replaced every two minutes under new names, and their engines report their speed. The
autoscaler remembers an hour, which is simulated first, in longer steps. The result is the bytes held after 10 minutes
of ticks and after each of two hours, by `tracemalloc`, after a garbage collection and without CPython's attribute
cache, which holds thousands of names that numpy creates per process for any number of services. The last six decisions
that changed a count have texts of varying length: they are printed, and excluded from the growth.
"""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
from dataclasses import replace

import numpy as np

from bench.core import tick_cost
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.service_metrics import TierMetrics
from plimsoll.core.engine_model.calibration.counter_window import WindowSums, context_lengths, fill_missing
from plimsoll.core.engine_model.calibration.posterior_model import coefficients, step_counts
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples

SERVICES = 2
STEP_S = 15.0
FILLED_S, HOUR_S = 7200.0, 3600.0
REPORT_AT_S = (600.0, HOUR_S, 2 * HOUR_S)
REPLICA_LIFE_S, WINDOW_S = 120.0, 5.0  # of a replica, and between two words of its engine
MEAN_RATE, RATE_AMPLITUDE, RAMPS_S = 8.0, 6.0, 1800.0  # requests/s of a service


class FleetSimulation:
    """Services over time; each hour is like every other, by chance as well."""

    def __init__(self, services: int, samples: int = 256) -> None:
        """samples: requests that the mix is made of."""
        rng = np.random.default_rng(0)
        outputs, cached = rng.lognormal(5.3, 0.4, samples), np.zeros(samples)
        self.mix: Workload = from_samples(rng.lognormal(6.7, 0.4, samples), cached, outputs)
        self.services = tick_cost.make_services(self.mix, services)
        self.counts: dict[int, dict[str, int]] = {n: dict.fromkeys(tick_cost.ROLES, 1) for n in self.services}
        self.now_s = tick_cost.START_S
        self._rng = rng

    def advance(self, seconds: float, step_s: float) -> None:
        """Go on for so long, with a tick each step."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            before_s, self.now_s = self.now_s, self.now_s + step_s
            if before_s // HOUR_S != self.now_s // HOUR_S:
                self._rng = np.random.default_rng(1)
            mean = MEAN_RATE - RATE_AMPLITUDE * math.cos(2.0 * math.pi * self.now_s / RAMPS_S)
            rates = (self._rng.poisson(mean * step_s, len(self.services)) / step_s).tolist()
            metrics = before_s // WINDOW_S != self.now_s // WINDOW_S
            requests = {
                index: (one, self._snapshot(index, one, rates[index], metrics), tick_cost.SPEC)
                for index, one in self.services.items()
            }
            decisions = decide_all(requests, self.now_s)
            self.counts = {
                index: {role: tick_s.replicas for role, tick_s in one.tiers.items()} for index, one in decisions.items()
            }

    def _snapshot(self, n: int, service: ServiceState, rate: float, metrics: bool) -> ServiceSnapshot:
        snapshots = tick_cost.make_snapshot(self.mix, rate, self.counts[n])
        if not metrics:
            return snapshots
        tiers = {Role(role): self._metrics(role, tier, self.counts[n][role]) for role, tier in service.tiers.items()}
        return replace(snapshots, metrics=replace(snapshots.metrics, tiers=tiers))

    def _metrics(self, role: str, tier: TierState, replicas: int) -> TierMetrics:
        """A word of each replica, some of which are faster than others."""
        if tier.engines.posterior is None:
            return tick_cost.METRICS
        generation, windows = self.now_s // REPLICA_LIFE_S, []
        for replica in range(replicas):
            steps, running = 200.0, 2.0 + self._rng.poisson(6.0)
            output = 0.0 if role == Role.PREFILL else steps * running
            name, prompts = f"{role}-{generation:.0f}-{replica}", 3.0 * steps
            window = fill_missing(
                WindowSums(self.now_s, WINDOW_S, steps, prompts + output, output, prompts, running, replica=name),
                context_lengths(self.mix, tick_cost.ENGINE_INFO.token_budget or 0),
            )
            step_s = float(step_counts(window) @ coefficients(tier.engines.posterior.prior))
            windows.append(replace(window, busy_s=step_s * (0.97 + 0.03 * (replica % 3))))
        return replace(tick_cost.METRICS, windows=tuple(windows))


def collect_garbage() -> None:
    """Leave in memory what is held, and nothing else."""
    gc.collect()
    sys._clear_type_cache()


def main() -> None:
    simulation = FleetSimulation(SERVICES)
    tracemalloc.start()
    simulation.advance(FILLED_S, STEP_S)
    whole_hours: list[float] = []
    remainder: list[float] = []
    passed_s = 0.0
    for until_s in REPORT_AT_S:
        simulation.advance(until_s - passed_s, 1.0)
        passed_s = until_s
        whole_hours.append(_bytes_per_service())
        for service in simulation.services.values():
            service.decisions.clear()
        remainder.append(_bytes_per_service())
    report = ", ".join(
        f"{total_bytes / 1e3:.1f} ({service_bytes / 1e3:.1f}) after {at_s / 60:.0f}"
        for at_s, total_bytes, service_bytes in zip(REPORT_AT_S, whole_hours, remainder, strict=True)
    )
    print(f"{SERVICES} services, 1 tick a second: kB a service (without its last decisions): {report} minutes")
    print(
        f"bytes a service: {remainder[1] - remainder[0]:+.0f} from minute 10 to 60, "
        f"{remainder[2] - remainder[1]:+.0f} in the hour after"
    )


def _bytes_per_service() -> float:
    """Bytes a service."""
    collect_garbage()
    return tracemalloc.get_traced_memory()[0] / SERVICES


if __name__ == "__main__":
    main()
