"""Queueing formulas: the probability of a wait, its variability, and the effect of a limited number of slots.

Problem: a latency SLO is about a tail, and near saturation the tail is many times the mean. The textbook sums overflow
from a few hundred servers on, and lose all digits near full load.

Idea: Erlang's loss formula as the integral of a log-concave function. 72 Gauss-Legendre points give it to full
precision for one server and for ten thousand. The other results follow by ratios of positive terms, kept as logarithms.
Engines that slow down as they fill are a birth-death chain, whose weights are summed the same way. Overload is a value:
a probability of one.

Every function takes numbers or arrays, broadcasts them, and returns float64 arrays of the common shape. Arguments out
of range raise a ValueError that names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.units import format_number

Floats = NDArray[np.float64]

_LEGENDRE_NODES, _LEGENDRE_WEIGHTS = np.polynomial.legendre.leggauss(72)
_NEGLIGIBLE_EXPONENT: Final = 28.0  # the integral stops where the integrand has fallen by e^-28, below 1e-12
_POISSON_SHAPE: Final = 1e22  # from this shape on, the negative binomial equals Poisson to the last digit
_HEAVY_TRAFFIC_RHO: Final = 0.7  # utilisation from which the heavy-traffic exponent of G/G/c holds
_MIN_VARIABILITY: Final = 1e-9  # lower bound of the variability of arrivals and service
_MIN_PEAKEDNESS: Final = 0.1
_FADE_IN_WIDTH: Final = 0.2  # width below it over which a variability above one fades in


def validate_number(name: str, value: ArrayLike, *, least: float = 0.0, above: bool = False) -> Floats:
    """Return `value` as float64. Raises a ValueError naming it for NaN, infinity, or a value below `least` (or equal:
    `above`).
    """
    numbers = np.asarray(value, dtype=np.float64)
    valid = numbers > least if above else numbers >= least  # NaN is neither
    if not (valid & np.isfinite(numbers)).all():
        raise ValueError(
            f"{name} must be finite and {'above' if above else 'at least'} {format_number(least)}, not {value!r}"
        )
    return numbers


def _validate_integer(name: str, value: ArrayLike, least: int) -> Floats:
    numbers = validate_number(name, value, least=least)
    if (numbers != np.floor(numbers)).any():
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return numbers


def _log_inverse_loss(shape: Floats, x: Floats, slots: Floats) -> Floats:
    """log(sum of w_n over n <= slots, over w_slots) for the weights w_n = x^n (shape)_n / n!, with 0 < x < 1.

    The sum is an incomplete beta function (DLMF 8.17.24, for any r): the ratio is (N + r) times the integral over
    z > 0 of e^(-r z) ((1 - p e^-z) / x)^N, p = 1 - x. With t = p e^-z the integrand has one peak, at t = r / (N + r),
    or at z = 0 if that is beyond p. Its flanks fall at least as fast as the bounds below: the points cover what counts.
    """
    r, n, p = shape, slots, 1 - x
    with np.errstate(divide="ignore"):
        middle = np.log1p(-x) + np.log1p(n / r)
        inside = middle > 0
        peak = np.maximum(middle, 0.0)
        odds = np.where(inside, r / n, p / x)  # t / (1 - t) at the peak
        height = np.where(inside, n * np.log(np.maximum(n, 1) / (n + r) / x), 0.0) - r * peak
        stiff = r * (n + r)
        b = _NEGLIGIBLE_EXPONENT * (n + 4 * r / 3)
        far = (b + np.sqrt(b * b + 8 * _NEGLIGIBLE_EXPONENT * n * stiff)) / (2 * stiff)
        far = np.minimum(far, _NEGLIGIBLE_EXPONENT / np.where(inside, 0.0, np.maximum(r - n * odds, 0.0)))
    near = np.minimum(peak, np.sqrt(2 * _NEGLIGIBLE_EXPONENT * n / stiff))
    half = (near + far) / 2
    away = half[..., None] * (1 + _LEGENDRE_NODES) - near[..., None]
    fall = n[..., None] * np.log(1 - odds[..., None] * np.expm1(-away)) - r[..., None] * away
    return np.asarray(np.log((n + r) * half * np.vecdot(np.exp(fall), _LEGENDRE_WEIGHTS)) + height)


def log_inverse_erlang_b(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """log(1 / B), with B the share of Poisson arrivals lost by `servers` without a queue; infinity for no load.

    Erlang's weights a^n / n! are the limit of x^n (r)_n / n! for a large shape r and x = a / r; the integral is then
    that of e^-t (1 + t / a)^c (Jagerman 1974, "Some properties of the Erlang loss function").
    """
    a, c = np.broadcast_arrays(
        validate_number("offered_erlangs", offered_erlangs), _validate_integer("servers", servers, 0)
    )
    shape = _POISSON_SHAPE * np.maximum(1.0, a)
    log_inverse = _log_inverse_loss(shape, np.where(a > 0, a, 1.0) / shape, c)
    return np.where(a > 0, log_inverse, np.where(c > 0, np.inf, 0.0))


def log_erlang_c(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """log of the share that must wait in M/M/c; 0 in overload.

    1 / C = rho + (1 - rho) / B (Cooper 1981, "Introduction to Queueing Theory", section 3.5).
    """
    a, c = np.broadcast_arrays(
        validate_number("offered_erlangs", offered_erlangs), _validate_integer("servers", servers, 1)
    )
    idle = np.maximum(c - a, 0.0) / c
    with np.errstate(divide="ignore"):
        log_c = -np.logaddexp(np.log(a / c), np.log(idle) + log_inverse_erlang_b(a, c))
    return np.where(a >= c, 0.0, log_c)


def erlang_c(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """Share of Poisson arrivals that must wait for one of `servers`; 1 in overload."""
    return np.exp(log_erlang_c(offered_erlangs, servers))


def variability(rho: ArrayLike, ca2: ArrayLike, cs2: ArrayLike) -> Floats:
    """Divisor of the exponent of the wait's tail in G/G/c: (Ca2 + Cs2) / 2 from rho 0.7 on.

    This is the heavy-traffic limit (Kingman 1962; Kollerstrom 1974). Below rho 0.7, a variability above 1 fades to 1,
    and one below 1 is adjusted so that the exponent stays constant. The tail is therefore continuous, and never falls
    when load rises.
    """
    load = validate_number("rho", rho)
    v = np.maximum((validate_number("ca2", ca2) + validate_number("cs2", cs2)) / 2, _MIN_VARIABILITY)
    bursty = 1 + (v - 1) * np.clip((load - _HEAVY_TRAFFIC_RHO) / _FADE_IN_WIDTH + 1, 0, 1)
    smooth = np.where(load < _HEAVY_TRAFFIC_RHO, np.minimum(1, v * (1 - load) / (1 - _HEAVY_TRAFFIC_RHO)), v)
    return np.asarray(np.where(v > 1, bursty, smooth))


def arrival_peakedness(arrival_cv2: float, overlap: float) -> float:
    """Variance over mean of the number of arrivals in progress, with slots for all; 1 for Poisson arrivals.

    arrival_cv2: squared coefficient of variation of their gaps. overlap: E[min(S, S')] / E[S] of two service times.
    Exact for batch arrivals, and for service times that are long against the gaps (Eckberg 1983, "Generalized
    peakedness of teletraffic processes"). No stream counts as entirely regular.
    """
    return max(1.0 + (arrival_cv2 - 1.0) * overlap, _MIN_PEAKEDNESS)


@dataclass(frozen=True)
class SlotQueue:
    """One queue in front of the slots of engines that slow down as they fill.

    log_inverse: log of the weight of all states up to full slots over that of the full one, the counterpart of 1 / B.
    full_per_s: departures per second while all slots are in use. delayed_share: share of arrivals that wait for a slot.
    drain_per_s: rate of their exponential wait; 0 in overload, where delayed_share is 1.
    """

    log_inverse: Floats
    full_per_s: Floats
    delayed_share: Floats
    drain_per_s: Floats


def slot_queue(
    arrival_per_s: ArrayLike,
    steps: ArrayLike,
    base_s: ArrayLike,
    per_sequence_s: ArrayLike,
    slots: ArrayLike,
    replicas: ArrayLike = 1,
    other_work_s: ArrayLike = 0.0,
    peakedness: ArrayLike = 1.0,
) -> SlotQueue:
    """Birth-death chain of `replicas` engines with `slots` each, and one queue in front of all of them.

    A request stays for `steps` steps. With n residents on an engine a step lasts (base + per_sequence n) / (1 - load of
    the other work), other_work_s per request: mu(n) = n (1 - lambda w / c) / (O (base + s n / c)). The stationary
    weights are negative binomial with shape 1 + c base / s, and Poisson for s = 0. Beyond the slots the queue is that
    of M/M/c: departures at a constant rate, so waits are exponential.

    peakedness: variance over mean of the number in progress if there were slots for all; 1 for Poisson arrivals. The
    slots fill as those of a group smaller by this factor: engines, slots and arrivals alike, down to one slot
    (Hayward's approximation: Fredericks 1980, "Congestion in blocking systems - a simple approximation technique").
    """
    rate, c = validate_number("arrival_per_s", arrival_per_s), _validate_integer("replicas", replicas, 1)
    o = validate_number("steps", steps, above=True)
    base, s = validate_number("base_s", base_s, above=True), validate_number("per_sequence_s", per_sequence_s)
    n = _validate_integer("slots", slots, 1)
    free = 1 - rate * validate_number("other_work_s", other_work_s) / c
    z = validate_number("peaked", peakedness, above=True)
    rate, c, o, base, s, n, free, z = np.broadcast_arrays(rate, c, o, base, s, n, free, z)
    z = np.minimum(z, c * n)
    full_per_s = np.maximum(free, 0) * c * n / (o * (base + s * n))
    # In overload, the loss ratio is that of the load which just fills the slots.
    s = np.maximum(s, base / _POISSON_SHAPE)
    carried_rate = np.minimum(rate / np.where(free > 0, free, 1.0), c * n / (o * (base + s * n)))
    positive_rate = np.where(carried_rate > 0, carried_rate, 1e-3 / (o * (base + s)))
    x = np.minimum(positive_rate * o * s / c, 1 - 1e-12)
    log_inverse = _log_inverse_loss(1 + c / z * base / s, x, c * n / z)
    log_inverse = np.where(carried_rate > 0, log_inverse, np.inf)
    idle_share = np.where(full_per_s > 0, np.maximum(1 - rate / np.where(full_per_s > 0, full_per_s, 1.0), 0.0), 0.0)
    with np.errstate(divide="ignore"):
        log_delayed = -np.logaddexp(
            np.log1p(-idle_share), np.log(idle_share) + np.where(idle_share > 0, log_inverse, 0.0)
        )
    return SlotQueue(
        log_inverse, full_per_s, np.where(idle_share > 0, np.exp(log_delayed), 1.0), full_per_s * idle_share
    )


def resident_distribution(
    arrival_per_s: float,
    steps: float,
    base_s: float,
    per_sequence_s: float,
    slots: int,
    other_work_s: float = 0.0,
) -> Floats:
    """P(n resident) on one engine for n = 0 .. slots: slots + 1 shares. All states with a queue count as full.

    Weights w_n = w_(n-1) lambda O (base + s n) / ((1 - lambda w) n), summed directly. In overload the engine is always
    full.
    """
    queue = slot_queue(arrival_per_s, steps, base_s, per_sequence_s, slots, 1, other_work_s)
    n = np.arange(1, slots + 1)
    if arrival_per_s == 0 or queue.drain_per_s == 0:
        shares = np.zeros(slots + 1)
        shares[0 if arrival_per_s == 0 else slots] = 1.0
        return shares
    growth = arrival_per_s * steps * (base_s + per_sequence_s * n) / ((1 - arrival_per_s * other_work_s) * n)
    logs = np.concatenate(([0.0], np.cumsum(np.log(growth))))
    logs[-1] += np.log(queue.full_per_s / queue.drain_per_s)  # and all states with a queue behind full slots
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def step_wait_s(
    rate_per_s: Floats,
    step_s: Floats,
    base_s: Floats,
    stall_s: Floats,
    stall_square_s2: Floats,
    arrival_cv2: Floats,
    replicas: ArrayLike = 1.0,
) -> tuple[Floats, Floats]:
    """Wait of a prompt besides its own prefill: the constant part and the mean of an exponential part, seconds.

    rate_per_s: of one replica. step_s, base_s: mean time of all steps, and of empty ones. stall_s, stall_square_s2:
    moments of a prompt's prefill time. vLLM keeps two steps in flight: an arrival waits for the rest of the running
    step M and all of the next step T. It is prefilled in the step after that, with whatever else arrived during M. A
    step lasts D plus the prefills that arrived during an earlier one, so var T = v = lambda E[p^2] E[T] / (1 -
    rho_p^2). An arrival finds M in proportion to its length: for a gamma distribution E[M] = E[T] + v / E[T] and E[M^2]
    = E[M] (E[T] + 2 v / E[T]). The wait is (U + rho_p) M + T + D - base and the noise of the prefills in it, U uniform;
    its mean and variance give the two parts. Against vLLM on an H200, p95 of TTFT is within 15 % at rho 0.65 to 0.86.
    This holds while prefill seldom fills the token budget. With prompts of up to 8,000 tokens, 512 per step are too few
    for it (96 % within the SLO where 71 % were measured; from 1,024 on within 3 points).

    Bursty arrivals bring (Ca2 - 1) / 2 others before each in the mean. Their prefill, and what arrives meanwhile, take
    that many E[p] / (1 - rho_p): what M^X/G/1 adds to the wait of M/G/1, taken as exponential (Burke 1975, "Delays in
    single-server queues with batch input").

    Of several replicas the gateway chooses one with little prefill. So an arrival finds a replica as if prompts reached
    it at a lower rate, `prompt_meeting_share` times as high, in mean and variance.
    """
    rho_p = np.minimum(rate_per_s * stall_s, 1.0)
    burst_wait_s = np.maximum(arrival_cv2 - 1.0, 0.0) / 2.0 * stall_s / np.maximum(1 - rho_p, 1e-12)
    met_share = prompt_meeting_share(rho_p, step_s, stall_s, replicas)
    step_s = step_s * np.maximum(1 - rho_p, 1e-12) / np.maximum(1 - met_share * rho_p, 1e-12)
    rate_per_s, rho_p = met_share * rate_per_s, met_share * rho_p
    variance = rate_per_s * stall_square_s2 * step_s / np.maximum(1 - rho_p**2, 1e-12)
    excess = variance / np.maximum(step_s, 1e-300)
    running_step_s, running_step_square = step_s + excess, (step_s + excess) * (step_s + 2 * excess)
    mean = (0.5 + rho_p) * running_step_s + step_s + step_s * (1 - rho_p) - base_s
    noise = rate_per_s * stall_square_s2 * running_step_s + variance
    wait_variance = (1 / 3 + rho_p + rho_p**2) * running_step_square - ((0.5 + rho_p) * running_step_s) ** 2 + noise
    mean = mean + burst_wait_s
    random_wait_s = np.minimum(np.sqrt(wait_variance + burst_wait_s**2), mean)
    return mean - random_wait_s, random_wait_s


def prompt_meeting_share(rho_p: Floats, step_s: Floats, stall_s: Floats, replicas: ArrayLike) -> Floats:
    """How often a prompt meets others at its replica, over how often it would if replicas were chosen at random, (n,).

    rho_p: share of a replica's time that prefill takes. Joining the least work is one queue for all c replicas. There
    the share that waits is about rho^(sqrt(2 (c + 1)) - 1), rho on one replica (Sakasegawa 1977, "An approximation
    formula L_q = alpha rho^beta / (1 - rho)"). But the gateway takes a prefill to begin at once, and it begins after
    the rest of the running step and all of the next, 3/2 E[T] in the mean. So it avoids another for E[p] of 3/2 E[T] +
    E[p] only, and for the rest it chooses as if at random.
    """
    all_busy = rho_p ** (np.sqrt(2.0 * np.asarray(replicas, dtype=np.float64) + 2.0) - 2.0)
    unseen_s = 1.5 * step_s
    return np.asarray((unseen_s + all_busy * stall_s) / np.maximum(unseen_s + stall_s, 1e-300))


def admitted_shares(
    log_inverse: Floats,
    arrival_per_s: Floats,
    full_per_s: Floats,
    spread: Floats,
    slack_s: Floats,
    weights: Floats,
) -> Floats:
    """P(a request of class k is admitted), where admission requires that the wait does not exceed the request's slack.

    log_inverse: log(1 / B) of the stage; full_per_s: its departures when full; spread: its `variability`, 1 if Markov.
    slack_s, weights: (..., K), slack ascending and at least 0 (infinity: never rejected), weights the classes' shares
    of arrivals, summing to 1. Returns (..., K), the same classes. Any load.

    The wait that an arrival would have has, above 0, the density full / v e^(integral of (lambda F(s) - full) / v), F
    the share of classes with more slack than s (Baccelli and Hebuterne 1981, "On queues with impatient customers";
    exact for v = 1).
    """
    rate, full, v = arrival_per_s[..., None], full_per_s[..., None], spread[..., None]
    remaining_share = np.concatenate((np.ones_like(weights[..., :1]), 1 - np.cumsum(weights, axis=-1)), axis=-1)
    decay = (
        full - rate * np.maximum(remaining_share, 0.0)
    ) / v  # of the density, between one slack and the next; K + 1 pieces
    never_rejected = np.isinf(slack_s)
    decay[..., -1:] = (full - rate * np.where(never_rejected, weights, 0.0).sum(axis=-1, keepdims=True)) / v
    finite = np.where(never_rejected, np.where(never_rejected, 0.0, slack_s).max(axis=-1, keepdims=True), slack_s)
    length = np.diff(finite, axis=-1, prepend=0.0)
    height = np.concatenate((np.zeros_like(length[..., :1]), -np.cumsum(decay[..., :-1] * length, axis=-1)), axis=-1)
    top = np.maximum(height.max(axis=-1), log_inverse)[..., None]
    top = np.where(np.isfinite(top), top, 0.0)
    abs_decay = np.maximum(np.abs(decay[..., :-1]), 1e-300)
    inner = np.exp(np.maximum(height[..., :-1], height[..., 1:]) - top) * -np.expm1(-abs_decay * length) / abs_decay
    with np.errstate(divide="ignore"):
        last = np.exp(height[..., -1:] - top) / np.maximum(decay[..., -1:], 0.0)
    pieces = np.concatenate((inner, last), axis=-1) * full / v
    above = np.cumsum(pieces[..., ::-1], axis=-1)[..., ::-1]
    idle = np.exp(log_inverse[..., None] - top) - np.exp(-top)
    with np.errstate(invalid="ignore"):
        late_share = above[..., 1:] / (idle + above[..., :1])
    return np.where(never_rejected, 1.0, 1 - np.nan_to_num(late_share, nan=1.0))
