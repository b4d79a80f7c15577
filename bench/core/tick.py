"""`python -m bench.core.tick`: what one scaling tick of 1,000 services of two tiers costs, in CPU milliseconds.

Every service has its own rate and gets a new sample at each tick; none rests. The first ticks, in which load lines are
made, are left out.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from plimsoll.core.autoscaler import Seen, Service, TierSeen, Wish, decide_all
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About, Ladder
from plimsoll.core.scaling import Line, Measured, Policy, TierPolicy
from plimsoll.core.signals import Heard, TierHeard
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

SERVICES = 1000
TICKS = 20
TARGET_MS = 100
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)
LADDER = Ladder(
    prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
    decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
)
ABOUT = About("vllm", "0", "some GPU", 1, 128, 400_000, 8192, 16, ladder=LADDER)


def main() -> None:
    rng = np.random.default_rng(0)
    mix = from_samples(rng.lognormal(6.7, 0.4, 256), np.zeros(256), rng.lognormal(5.3, 0.4, 256))
    roles = (Role.PREFILL, Role.DECODE)
    heard = TierHeard(Measured(), 1.0, 1.0)
    wish = Wish(Policy({role: TierPolicy(1, 50) for role in roles}, slo=SLO), SLO)
    asked = {}
    for n in range(SERVICES):
        said = Heard(float(rng.uniform(1, 20)), True, 1.0, workload=mix, tiers=dict.fromkeys(roles, heard))
        asked[n] = (Service.of(roles), Seen(said, {role: TierSeen(3, 3, (), ABOUT) for role in roles}), wish)
    now_s = 1.8e9
    while not all(isinstance(tier.line, Line) for service, _, _ in asked.values() for tier in service.tiers.values()):
        now_s += 1.0
        decide_all(asked, now_s)
    times = []
    for _ in range(TICKS):
        now_s += 1.0
        began = time.process_time()
        decide_all(asked, now_s)
        times.append(1e3 * (time.process_time() - began))
    print(f"{SERVICES} services, {len(roles)} tiers: {statistics.median(times):.0f} ms a tick (target {TARGET_MS})")


if __name__ == "__main__":
    main()
