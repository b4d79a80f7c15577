"""`python -m bench.core.tick`: what one scaling tick of 1,000 services of two tiers costs, in CPU milliseconds.

Busy: each service has its own rate and a new sample at each tick, scattered as requests that come by chance. Idle: each
has a new sample as well, of nothing, since one that rests altogether costs no tick. All services begin with the line
that their engines' ladder gives, and the ticks of the first minute and a half are left out; told are the median and
the dearest of the minute after it, within which the minutes of all services are over at the same second.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from plimsoll.cli import garbage
from plimsoll.core.autoscaler import Seen, Service, TierSeen, Wish, decide_all
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About, Ladder
from plimsoll.core.scaling import Line, Measured, Policy, TierPolicy
from plimsoll.core.scaling.sized import Rungs
from plimsoll.core.signals import Heard, TierHeard
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload, from_samples

SERVICES = 1000
WARM_UP, TICKS = 90, 60
TARGET_MS = 100
START_S = 1.8e9
ROLES = (Role.PREFILL, Role.DECODE)
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)
LADDER = Ladder(
    prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
    decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
)
ABOUT = About("vllm", "0", "some GPU", 1, 128, 400_000, 8192, 16, ladder=LADDER)
WISH = Wish(Policy({role: TierPolicy(1, 50) for role in ROLES}, slo=SLO), SLO)
HEARD = TierHeard(Measured(), 1.0, 1.0)


def main() -> None:
    garbage.look_seldom()  # as the operator does
    rng = np.random.default_rng(0)
    mix = from_samples(rng.lognormal(6.7, 0.4, 256), np.zeros(256), rng.lognormal(5.3, 0.4, 256))
    for name, rates in (("busy", rng.uniform(1, 20, SERVICES)), ("idle", np.zeros(SERVICES))):
        times = ticks(mix, rates, rng)
        median = statistics.median(times)
        print(
            f"{SERVICES} {name} services, {len(ROLES)} tiers: {median:.0f} ms a tick, {max(times):.0f} at most "
            f"(target {TARGET_MS}), {1e3 * median / SERVICES / len(ROLES):.0f} us a tier"
        )


def ticks(mix: Workload, rates: NDArray[np.float64], rng: np.random.Generator) -> list[float]:
    """CPU milliseconds of each tick; what is decided is there at the next one."""
    services = fleet(mix, SERVICES)
    counts: dict[int, dict[str, int]] = {n: dict.fromkeys(ROLES, 1) for n in services}
    times = []
    for tick in range(WARM_UP + TICKS):
        came = rng.poisson(rates)
        asked = {n: (service, seen(mix, float(came[n]), counts[n]), WISH) for n, service in services.items()}
        began = time.process_time()
        decided = decide_all(asked, START_S + tick)
        times.append(1e3 * (time.process_time() - began))
        counts = {n: {role: tier.replicas for role, tier in found.tiers.items()} for n, found in decided.items()}
    return times[WARM_UP:]


def fleet(mix: Workload, size: int) -> dict[int, Service]:
    """Services whose lines are made; a thousand pairs of lines would take minutes, and nobody measures them here."""
    pattern = Service.of(ROLES)
    decide_all({0: (pattern, seen(mix, 1.0, dict.fromkeys(ROLES, 1)), WISH)}, START_S - 60.0)
    services = {n: Service.of(ROLES) for n in range(size)}
    for n, service in services.items():
        for role, tier in service.tiers.items():
            known = pattern.tiers[role]
            assert isinstance(known.line, Line)  # the ladder gives one at once
            own = replace(known.line, rungs=Rungs())
            service.tiers[role] = replace(known, line=own, demand=tier.demand, looked_s=START_S - 5.0 * n / size)
    return services


def seen(mix: Workload, rate: float, counts: dict[str, int]) -> Seen:
    """One service at one moment, all of it ready."""
    tiers = dict.fromkeys(ROLES, HEARD)
    heard = Heard(rate, True, 1.0, workload=mix, held=0.0, returning_s=0.0, in_flight=0.0, tiers=tiers)
    return Seen(heard, {role: TierSeen(count, count, (), ABOUT) for role, count in counts.items()})


if __name__ == "__main__":
    main()
