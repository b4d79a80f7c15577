"""How restless a tier's work is: one number, the grain, in GPU-seconds.

Problem: a change of load and mere chance look alike, and how they differ depends on the load and on the tick.

Idea: if requests of work w come as a Poisson process, the mean of work over dt has the variance grain * level / dt with
grain = E[w^2] / E[w] (compound Poisson). So one number gives the noise at every level and tick; arrivals that bunch
make it larger. It is the sum of squared differences of successive samples over the sum of their levels (von Neumann
1941), which no slow change disturbs, at two time scales: ticks, and blocks long enough for arrivals that bunch. A leap
would count as much as an hour of noise, and hide the next one: what may be a leap waits until it is known to be none.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

BLOCK_S: Final = 5.0
MEMORY: Final = 3600.0  # differences, of a tick or a block
_FIRST_TICKS: Final = 4.0  # what the guess weighs against measured ticks
_FIRST_GRAINS: Final = 4.0  # the guess: so many grains in the first sample


class Sums(NamedTuple):
    """Over differences of successive samples: their squares, what lay in their middle, and how many there were."""

    spread: float = 0.0
    level: float = 0.0
    seen: float = 0.0


class Grain(NamedTuple):
    """Sums over differences at one time scale (discounted), and the last sample."""

    spread: float = 0.0
    level: float = 0.0
    seen: float = 0.0
    last_work: float = 0.0
    last_span_s: float = 0.0


class Noise(NamedTuple):
    """The grain of ticks and of blocks, the block that runs, and what is held of differences of ticks that may be a
    change of the load."""

    tick: Grain = Grain()
    block: Grain = Grain()
    block_gpu_s: float = 0.0
    block_s: float = 0.0
    held: Sums = Sums()


def grain_gpu_s(noise: Noise) -> float:
    """The grain: of ticks, or of blocks where those say more by two standard errors; 0 before any work."""
    tick, block = noise.tick, noise.block
    if tick.level <= 0.0:
        return 0.0
    found = tick.spread / tick.level
    if block.level > 0.0:
        # The variance of a mean of n squared successive differences is 3 / n of its square.
        found = max(found, block.spread / block.level / (1.0 + 2.0 * math.sqrt(3.0 / block.seen)))
    return found


def dispersion(noise: Noise, event_gpu_s: float) -> float:
    """By how much arrivals bunch: the variance of their count over its mean, which is that of Poisson arrivals, 1, at
    least. For a renewal process that is the squared coefficient of variation of the gaps (Cox 1962).

    event_gpu_s: of one arrival, where each is counted with the same work. Of either time scale what is two standard
    errors beyond chance: squared differences of n samples of m Poisson counts each have the relative variance
    (3 + 1 / (2 m)) / n. Bunching over longer times is a load that moves.
    """
    found = 1.0
    for grain in (noise.tick, noise.block):
        events = grain.level * grain.last_span_s / event_gpu_s
        if events > 0.0 and grain.seen > 0.0:
            chance = 2.0 * math.sqrt(3.0 / grain.seen + 0.5 / events)
            found = max(found, grain.spread / grain.level / event_gpu_s / (1.0 + chance))
    return found


def learn(noise: Noise, work: float, span_s: float, suspicious: bool, leapt: bool) -> Noise:
    """The noise with one more sample.

    suspicious: the load may just have changed, and the difference of ticks be the change itself: it is held until that
    is known. Where it has changed (leapt), what is held is no noise; where nothing is suspicious any more, it was.
    Blocks are not counted meanwhile: over their time also a load that only drifts, without a leap, differs by more
    than noise.
    """
    tick = noise.tick
    if tick.last_span_s == 0.0 and work > 0.0:
        guess = work * span_s / _FIRST_GRAINS
        tick = Grain(_FIRST_TICKS * guess * work, _FIRST_TICKS * work)
    if leapt:
        return Noise(Grain(*tick[:3], work, span_s), Grain(*noise.block[:3]))
    if suspicious:
        held = _added(noise.held, 1.0, _difference(tick, work, span_s))
        return Noise(Grain(*tick[:3], work, span_s), Grain(*noise.block[:3]), held=held)
    tick = _differ(Grain(*_added(Sums(*tick[:3]), 1.0, noise.held), *tick[3:]), work, span_s)
    gpu_s, covered_s = noise.block_gpu_s + work * span_s, noise.block_s + span_s
    if covered_s < BLOCK_S:
        return Noise(tick, noise.block, gpu_s, covered_s)
    return Noise(tick, _differ(noise.block, gpu_s / covered_s, covered_s))


def _differ(grain: Grain, work: float, span_s: float) -> Grain:
    sums = Sums(*grain[:3])
    if grain.last_span_s > 0.0:
        sums = _added(sums, 1.0 - 1.0 / MEMORY, _difference(grain, work, span_s))
    return Grain(*sums, work, span_s)


def _difference(grain: Grain, work: float, span_s: float) -> Sums:
    """Of a sample to the last one; nothing if there is none."""
    if grain.last_span_s == 0.0:
        return Sums()
    difference = work - grain.last_work
    spread = difference * difference / (1.0 / span_s + 1.0 / grain.last_span_s)
    return Sums(spread, 0.5 * (work + grain.last_work), 1.0)


def _added(sums: Sums, keep: float, more: Sums) -> Sums:
    return Sums(keep * sums.spread + more.spread, keep * sums.level + more.level, keep * sums.seen + more.seen)
