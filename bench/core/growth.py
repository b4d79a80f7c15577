"""`python -m bench.core.growth`: what hours of scaling ticks, one a second of virtual time, leave in memory.

A few services of two tiers under load that comes by chance, with a ramp up and down twice an hour, so that replicas
come and go; all of them are replaced every two minutes besides, each under a name that never was before, and their
engines tell how fast they are. The autoscaler remembers an hour: that is gone through first, in longer steps. Told are
the bytes held after 10 minutes of ticks and after each of two hours, by `tracemalloc`, after a look for garbage and
without CPython's cache of attributes: in that the names lie that numpy makes anew at each call, some thousands of them
in a process however many services there are. The last six decisions that changed a count are as long as what they say:
they are told, and left out of what has grown.
"""

from __future__ import annotations

import gc
import math
import sys
import tracemalloc
from dataclasses import replace

import numpy as np

from bench.core import tick
from plimsoll.core.autoscaler import Seen, Service, Tier, decide_all
from plimsoll.core.calibration.belief import coefficients, counted
from plimsoll.core.calibration.window import WindowSums, filled, lengths_of
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.signals import TierHeard
from plimsoll.core.workload import Workload, from_samples

SERVICES = 2
DECIDED_A_TICK = 1
STEP_S = 15.0
FILLED_S, HOUR_S = 7200.0, 3600.0
TOLD_S = (600.0, HOUR_S, 2 * HOUR_S)
LIFE_S, WINDOW_S = 120.0, 5.0  # of a replica, and between two words of its engine
MEAN_RATE, SWING, RAMPS_S = 8.0, 6.0, 1800.0  # requests/s of a service


class Life:
    """Services over time; each hour is like every other, by chance as well."""

    def __init__(self, services: int, samples: int = 256) -> None:
        """samples: requests that the mix is made of."""
        rng = np.random.default_rng(0)
        outputs, cached = rng.lognormal(5.3, 0.4, samples), np.zeros(samples)
        self.mix: Workload = from_samples(rng.lognormal(6.7, 0.4, samples), cached, outputs)
        self.services = tick.fleet(self.mix, services)
        self.counts: dict[int, dict[str, int]] = {n: dict.fromkeys(tick.ROLES, 1) for n in self.services}
        self.now_s = tick.START_S
        self._rng = rng

    def last(self, seconds: float, step_s: float) -> None:
        """Go on for so long, with a tick each step."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            before_s, self.now_s = self.now_s, self.now_s + step_s
            if before_s // HOUR_S != self.now_s // HOUR_S:
                self._rng = np.random.default_rng(1)
            mean = MEAN_RATE - SWING * math.cos(2.0 * math.pi * self.now_s / RAMPS_S)
            rates = (self._rng.poisson(mean * step_s, len(self.services)) / step_s).tolist()
            told = before_s // WINDOW_S != self.now_s // WINDOW_S
            asked = {n: (one, self._seen(n, one, rates[n], told), tick.WISH) for n, one in self.services.items()}
            found = decide_all(asked, self.now_s, DECIDED_A_TICK)
            self.counts = {n: {role: t.replicas for role, t in one.tiers.items()} for n, one in found.items()}

    def _seen(self, n: int, service: Service, rate: float, told: bool) -> Seen:
        seen = tick.seen(self.mix, rate, self.counts[n])
        if not told:
            return seen
        tiers = {Role(role): self._heard(role, tier, self.counts[n][role]) for role, tier in service.tiers.items()}
        return replace(seen, heard=replace(seen.heard, tiers=tiers))

    def _heard(self, role: str, tier: Tier, replicas: int) -> TierHeard:
        """A word of each replica, some of which are faster than others."""
        if tier.posterior is None:
            return tick.HEARD
        life, windows = self.now_s // LIFE_S, []
        for replica in range(replicas):
            steps, running = 200.0, 2.0 + self._rng.poisson(6.0)
            output = 0.0 if role == Role.PREFILL else steps * running
            name, prompts = f"{role}-{life:.0f}-{replica}", 3.0 * steps
            window = filled(
                WindowSums(self.now_s, WINDOW_S, steps, prompts + output, output, prompts, running, replica=name),
                lengths_of(self.mix, tick.ABOUT.token_budget or 0),
            )
            took_s = float(counted(window) @ coefficients(tier.posterior.prior))
            windows.append(replace(window, busy_s=took_s * (0.97 + 0.03 * (replica % 3))))
        return replace(tick.HEARD, windows=tuple(windows))


def clean() -> None:
    """Leave in memory what is held, and nothing else."""
    gc.collect()
    sys._clear_type_cache()


def main() -> None:
    life = Life(SERVICES)
    tracemalloc.start()
    life.last(FILLED_S, STEP_S)
    whole: list[float] = []
    rest: list[float] = []
    passed_s = 0.0
    for until_s in TOLD_S:
        life.last(until_s - passed_s, 1.0)
        passed_s = until_s
        whole.append(_held())
        for service in life.services.values():
            service.decisions.clear()
        rest.append(_held())
    words = ", ".join(
        f"{all_of_it / 1e3:.1f} ({held / 1e3:.1f}) after {at_s / 60:.0f}"
        for at_s, all_of_it, held in zip(TOLD_S, whole, rest, strict=True)
    )
    print(f"{SERVICES} services, 1 tick a second: kB a service (without its last decisions): {words} minutes")
    print(f"bytes a service: {rest[1] - rest[0]:+.0f} from minute 10 to 60, {rest[2] - rest[1]:+.0f} in the hour after")


def _held() -> float:
    """Bytes a service."""
    clean()
    return tracemalloc.get_traced_memory()[0] / SERVICES


if __name__ == "__main__":
    main()
