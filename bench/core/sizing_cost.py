"""`python -m bench.core.sizing_cost`: CPU microseconds per tier of sizing 1,000 tiers in one call.

The peer's queueing analyser takes 1,080 us for one. Cold: the search starts from the saturation rate of the replicas.
Warm: it starts from the last result, after every rate has moved by up to 5 %. The reduction of model and mix is printed
separately; it is cached while they stay the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from plimsoll.core.capacity.sizing import size_tiers
from plimsoll.core.capacity.tier_model import TierProfile, TierSpec, build_profile, stack_profiles
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples

TIERS = 1000
REPEATS = 7
TARGET_US = 50
SMALL_MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200, power-capped
COOL_MODEL = StepModel(4.920e-3, -1.67e-3, 1.915e-5, 1.74e-9, 1.115e-5, 3.533e-8)  # the same, at full clock
LARGE_MODEL = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2.0e-5, 4.6e-8)  # a 32B on two H100s, from a roofline
ENGINE_LIMITS = EngineLimits(1024, 919_824, 8192)


def chat_mix(rng: np.random.Generator) -> Workload:
    """Prompts of about 1,200 tokens and answers of about 220, lognormal."""
    prompts = np.ceil(1000 * np.exp(0.6 * rng.standard_normal(2000)))
    outputs = np.ceil(195 * np.exp(0.5 * rng.standard_normal(2000)))
    return from_samples(prompts, np.zeros(2000), outputs)


def tier_kinds() -> dict[str, TierSpec]:
    """One tier of each kind that binds in its own way."""
    mix = chat_mix(np.random.default_rng(1))
    slo = Slo(0.95, 0.5, 0.0, 0.05)
    return {
        "serve, step time binds": TierSpec(Role.SERVE, SMALL_MODEL, mix, ENGINE_LIMITS, slo),
        "serve, KV binds": TierSpec(
            Role.SERVE,
            LARGE_MODEL,
            from_samples([4000.0], [0.0], [1000.0]),
            EngineLimits(1024, 330_000, 8192),
            Slo(0.95, 3.0, 0.0, 0.1),
        ),
        "prefill": TierSpec(Role.PREFILL, SMALL_MODEL, mix, ENGINE_LIMITS, slo),
        "decode": TierSpec(Role.DECODE, COOL_MODEL, mix, ENGINE_LIMITS, slo, KvTransfer(32, 128), ttft_outside_s=0.3),
    }


def measure() -> dict[str, float]:
    """Microseconds a tier, best of a few: each kind cold and warm, all mixed, and the reduction."""
    rng = np.random.default_rng(2)
    results_us: dict[str, float] = {}
    reduced = {name: build_profile(tier) for name, tier in tier_kinds().items()}
    fleets = {name: stack_profiles([tier_fleet] * TIERS) for name, tier_fleet in reduced.items()}
    fleets["all kinds mixed"] = stack_profiles(
        [tier_fleet for tier_fleet in reduced.values() for _ in range(TIERS // len(reduced))]
    )
    for name, fleet in fleets.items():
        results_us |= _cold_and_warm(name, fleet, rng)
    tier = tier_kinds()["serve, step time binds"]
    results_us["reduction of one tier"] = _best_us(lambda: build_profile(tier)) * TIERS
    return results_us


def _cold_and_warm(name: str, fleet: TierProfile, rng: np.random.Generator) -> dict[str, float]:
    rates = fleet.saturation_rate_per_s(1) * rng.uniform(0.2, 40, TIERS)
    previous = size_tiers(fleet, rates).replicas
    changed_rates = rates * rng.uniform(0.95, 1.05, TIERS)
    return {
        f"{name}, cold": _best_us(lambda: size_tiers(fleet, rates)),
        f"{name}, warm": _best_us(lambda: size_tiers(fleet, changed_rates, start=previous)),
    }


def _best_us(call: Callable[[], object]) -> float:
    """CPU microseconds of the fastest of a few calls, over TIERS: on shared cores wall time measures the others."""
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return min(seconds) * 1e6 / TIERS


if __name__ == "__main__":
    print(f"CPU us a tier, {TIERS:,} tiers in one call (target: {TARGET_US})")
    for title, figure in measure().items():
        print(f"   {title}: {figure:.1f}")
