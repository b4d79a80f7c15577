"""`python -m bench.core.growth`: what an hour of scaling ticks, one a second of virtual time, leaves in memory.

A few services of two tiers under load that comes by chance, with a ramp up and down in each hour. The autoscaler
remembers an hour, so that hour is gone through first, in longer steps. Told are the bytes held after 10 and after 60
minutes of ticks, by `tracemalloc`.
"""

from __future__ import annotations

import gc
import math
import tracemalloc

import numpy as np

from bench.core import tick
from plimsoll.core.autoscaler import decide_all
from plimsoll.core.workload import from_samples

SERVICES = 4
DECIDED_A_TICK = 1
STEP_S = 15.0
FILLED_S, FIRST_S, LAST_S = 3900.0, 600.0, 3600.0


def main() -> None:
    rng = np.random.default_rng(0)
    mix = from_samples(rng.lognormal(6.7, 0.4, 256), np.zeros(256), rng.lognormal(5.3, 0.4, 256))
    services = tick.fleet(mix, SERVICES)
    counts: dict[int, dict[str, int]] = {n: dict.fromkeys(tick.ROLES, 1) for n in services}
    tracemalloc.start()
    now_s = tick.START_S
    told: list[int] = []
    for until_s, step_s in ((FILLED_S, STEP_S), (FILLED_S + FIRST_S, 1.0), (FILLED_S + LAST_S, 1.0)):
        while now_s < tick.START_S + until_s:
            now_s += step_s
            mean = 8.0 + 4.0 * math.sin(2.0 * math.pi * now_s / 3600.0)
            rates = rng.poisson(mean * step_s, SERVICES) / step_s
            asked = {n: (one, tick.seen(mix, float(rates[n]), counts[n]), tick.WISH) for n, one in services.items()}
            found = decide_all(asked, now_s, DECIDED_A_TICK)
            counts = {n: {role: tier.replicas for role, tier in one.tiers.items()} for n, one in found.items()}
        gc.collect()
        told.append(tracemalloc.get_traced_memory()[0])
    _, first, last = told
    print(
        f"{SERVICES} services, 1 tick a second: {first / 1e3:.1f} kB held after {FIRST_S / 60:.0f} minutes, "
        f"{last / 1e3:.1f} kB after {LAST_S / 60:.0f}: {(last - first) / SERVICES:+.0f} bytes a service"
    )


if __name__ == "__main__":
    main()
