"""Noise of a tier's work: the index of dispersion, in GPU-seconds.

Problem: a change of load and random variation look alike. How they differ depends on the load and on the tick.

Idea: if requests of work w arrive as a Poisson process, the mean work over dt has the variance dispersion * level / dt,
with dispersion = E[w^2] / E[w] (compound Poisson). One number therefore gives the noise at every level and tick; bursty
arrivals increase it. It is the sum of squared differences of successive samples over the sum of their levels (von
Neumann 1941), which a slow change does not disturb. It is measured at two time scales: ticks, and blocks long enough
for bursts. A level shift would count as much as an hour of noise, and hide the next one. Differences that may be a
level shift are therefore pending until it is known that they are not.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from plimsoll.core.codec import Amount

BLOCK_S: Final = 5.0
DIFFERENCE_MEMORY: Final = 3600.0  # number of differences, of ticks or blocks
_PRIOR_TICKS: Final = 4.0  # weight of the prior, in measured ticks
_PRIOR_EVENTS: Final = 4.0  # the prior: this many events in the first sample


class DifferenceSums(NamedTuple):
    """Sums over differences of successive samples: of their squares, of the levels between them, and their number."""

    spread: Amount = 0.0
    level: Amount = 0.0
    samples: Amount = 0.0


class DispersionSums(NamedTuple):
    """Discounted sums over differences at one time scale, and the last sample."""

    spread: Amount = 0.0
    level: Amount = 0.0
    samples: Amount = 0.0
    last_work: Amount = 0.0
    last_span_s: Amount = 0.0


class NoiseSums(NamedTuple):
    """Dispersion sums of ticks and of blocks, the current block, and pending tick differences that may be a load
    change.
    """

    tick: DispersionSums = DispersionSums()
    block: DispersionSums = DispersionSums()
    block_gpu_s: Amount = 0.0
    block_s: Amount = 0.0
    pending: DifferenceSums = DifferenceSums()


def dispersion_gpu_s(noise: NoiseSums) -> float:
    """Index of dispersion in GPU-seconds; 0 before any work.

    It is that of ticks, or that of blocks where blocks give more by two standard errors.
    """
    tick, block = noise.tick, noise.block
    if tick.level <= 0.0:
        return 0.0
    index = tick.spread / tick.level
    if block.level > 0.0:
        # The variance of a mean of n squared successive differences is 3 / n of its square.
        index = max(index, block.spread / block.level / (1.0 + 2.0 * math.sqrt(3.0 / block.samples)))
    return index


def arrival_dispersion(noise: NoiseSums, event_gpu_s: float) -> float:
    """Index of dispersion of arrivals: the variance of their count over its mean, at least the 1 of Poisson arrivals.

    For a renewal process it equals the squared coefficient of variation of the gaps (Cox 1962). event_gpu_s: work of
    one arrival, where each counts with the same work. Of each time scale, only what exceeds random variation by two
    standard errors counts. Squared differences of n samples of m Poisson counts each have the relative variance (3 + 1
    / (2 m)) / n. Burstiness over longer times is a change of load.
    """
    index = 1.0
    for sums in (noise.tick, noise.block):
        events = sums.level * sums.last_span_s / event_gpu_s
        if events > 0.0 and sums.samples > 0.0:
            sampling_error = 2.0 * math.sqrt(3.0 / sums.samples + 0.5 / events)
            index = max(index, sums.spread / sums.level / event_gpu_s / (1.0 + sampling_error))
    return index


def update_noise(noise: NoiseSums, work: float, span_s: float, suspicious: bool, shifted: bool) -> NoiseSums:
    """Return the noise with one more sample.

    suspicious: the load may just have changed. The tick difference may then be the change itself, and is pending until
    this is known. shifted: the load has changed, and the pending differences are dropped. Once nothing is suspicious,
    they count as noise. Blocks are not counted meanwhile, because even a slow drift differs by more than noise over the
    time of a block.
    """
    tick = noise.tick
    if tick.last_span_s == 0.0 and work > 0.0:
        guess = work * span_s / _PRIOR_EVENTS
        tick = DispersionSums(_PRIOR_TICKS * guess * work, _PRIOR_TICKS * work)
    if shifted:
        return NoiseSums(DispersionSums(*tick[:3], work, span_s), DispersionSums(*noise.block[:3]))
    if suspicious:
        pending = _merge(noise.pending, 1.0, _difference(tick, work, span_s))
        return NoiseSums(DispersionSums(*tick[:3], work, span_s), DispersionSums(*noise.block[:3]), pending=pending)
    tick = _add_sample(DispersionSums(*_merge(DifferenceSums(*tick[:3]), 1.0, noise.pending), *tick[3:]), work, span_s)
    gpu_s, covered_s = noise.block_gpu_s + work * span_s, noise.block_s + span_s
    if covered_s < BLOCK_S:
        return NoiseSums(tick, noise.block, gpu_s, covered_s)
    return NoiseSums(tick, _add_sample(noise.block, gpu_s / covered_s, covered_s))


def _add_sample(sums: DispersionSums, work: float, span_s: float) -> DispersionSums:
    differences = DifferenceSums(*sums[:3])
    if sums.last_span_s > 0.0:
        differences = _merge(differences, 1.0 - 1.0 / DIFFERENCE_MEMORY, _difference(sums, work, span_s))
    return DispersionSums(*differences, work, span_s)


def _difference(sums: DispersionSums, work: float, span_s: float) -> DifferenceSums:
    """Difference of a sample from the last one; zero sums if there is none."""
    if sums.last_span_s == 0.0:
        return DifferenceSums()
    difference = work - sums.last_work
    spread = difference * difference / (1.0 / span_s + 1.0 / sums.last_span_s)
    return DifferenceSums(spread, 0.5 * (work + sums.last_work), 1.0)


def _merge(sums: DifferenceSums, keep: float, more: DifferenceSums) -> DifferenceSums:
    return DifferenceSums(
        keep * sums.spread + more.spread, keep * sums.level + more.level, keep * sums.samples + more.samples
    )
