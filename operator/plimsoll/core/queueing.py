"""Waiting: how likely, how long, and what a limited number of slots does to it.

Problem: a latency promise is about a tail, and near saturation the tail is many times the mean. The textbook sums for
it overflow from a few hundred servers on, and lose all digits near full load.

Idea: Erlang's loss formula as an integral of a log-concave function, which 72 Gauss-Legendre points give to full
precision for one server and for ten thousand; everything else follows from it by ratios of positive terms, kept as
logarithms. Engines that slow down as they fill are a birth-death chain whose weights are summed the same way. Overload
is a value: a wait of infinity, a probability of one.

Every function takes numbers or arrays, broadcasts them, and returns float64 arrays of the common shape. Arguments out
of range raise ValueError that names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(72)
_NEGLIGIBLE: Final = 28.0  # the integral stops where the integrand has fallen by e^-28, below 1e-12
_POISSON: Final = 1e22  # a shape from which on the negative binomial is Poisson to the last digit
_HEAVY_TRAFFIC: Final = 0.7  # utilisation from which the G/G/c reading of the exponent holds
_REGULAR: Final = 1e-9  # variability of arrivals and service that is taken for the least there is
_LEAST_PEAKED: Final = 0.1
_FADE_IN: Final = 0.2  # width below it over which a variability above one fades in


def checked(name: str, value: ArrayLike, *, least: float = 0.0, above: bool = False) -> Floats:
    """`value` as float64. ValueError that names it for NaN, infinity and what is under `least` (or at it: `above`)."""
    numbers = np.asarray(value, dtype=np.float64)
    low = numbers <= least if above else numbers < least
    if np.any(low) or not np.all(np.isfinite(numbers)):
        raise ValueError(f"{name} must be finite and {'above' if above else 'at least'} {least:g}, not {value!r}")
    return numbers


def _whole(name: str, value: ArrayLike, least: int) -> Floats:
    numbers = checked(name, value, least=least)
    if np.any(numbers != np.floor(numbers)):
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
        b = _NEGLIGIBLE * (n + 4 * r / 3)
        far = (b + np.sqrt(b * b + 8 * _NEGLIGIBLE * n * stiff)) / (2 * stiff)
        far = np.minimum(far, _NEGLIGIBLE / np.where(inside, 0.0, np.maximum(r - n * odds, 0.0)))
    near = np.minimum(peak, np.sqrt(2 * _NEGLIGIBLE * n / stiff))
    half = (near + far) / 2
    away = half[..., None] * (1 + _NODES) - near[..., None]
    fall = n[..., None] * np.log(1 - odds[..., None] * np.expm1(-away)) - r[..., None] * away
    return np.asarray(np.log((n + r) * half * np.vecdot(np.exp(fall), _WEIGHTS)) + height)


def log_inverse_erlang_b(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """log(1 / B), with B the share of Poisson arrivals lost by `servers` without a queue; infinity for no load.

    Erlang's weights a^n / n! are the limit of x^n (r)_n / n! for a large shape r and x = a / r; the integral is then
    that of e^-t (1 + t / a)^c (Jagerman 1974, "Some properties of the Erlang loss function").
    """
    a, c = np.broadcast_arrays(checked("offered_erlangs", offered_erlangs), _whole("servers", servers, 0))
    shape = _POISSON * np.maximum(1.0, a)
    found = _log_inverse_loss(shape, np.where(a > 0, a, 1.0) / shape, c)
    return np.where(a > 0, found, np.where(c > 0, np.inf, 0.0))


def erlang_b(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """Share of Poisson arrivals that find all of `servers` busy where nobody waits (Erlang 1917)."""
    return np.exp(-log_inverse_erlang_b(offered_erlangs, servers))


def log_erlang_c(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """log of the share that must wait in M/M/c; 0 in overload.

    1 / C = rho + (1 - rho) / B (Cooper 1981, "Introduction to Queueing Theory", section 3.5).
    """
    a, c = np.broadcast_arrays(checked("offered_erlangs", offered_erlangs), _whole("servers", servers, 1))
    idle = np.maximum(c - a, 0.0) / c
    with np.errstate(divide="ignore"):
        log_c = -np.logaddexp(np.log(a / c), np.log(idle) + log_inverse_erlang_b(a, c))
    return np.where(a >= c, 0.0, log_c)


def erlang_c(offered_erlangs: ArrayLike, servers: ArrayLike) -> Floats:
    """Share of Poisson arrivals that must wait for one of `servers`; 1 in overload."""
    return np.exp(log_erlang_c(offered_erlangs, servers))


def variability(rho: ArrayLike, ca2: ArrayLike, cs2: ArrayLike) -> Floats:
    """What divides the exponent of the wait's tail in G/G/c: (Ca2 + Cs2) / 2 from rho 0.7 up.

    The heavy-traffic limit (Kingman 1962; Kollerstrom 1974). Below, it fades to 1 (from above) or is held so that the
    exponent stays (from below): the tail is continuous and never falls when load rises.
    """
    load = checked("rho", rho)
    v = np.maximum((checked("ca2", ca2) + checked("cs2", cs2)) / 2, _REGULAR)
    bursty = 1 + (v - 1) * np.clip((load - _HEAVY_TRAFFIC) / _FADE_IN + 1, 0, 1)
    smooth = np.where(load < _HEAVY_TRAFFIC, np.minimum(1, v * (1 - load) / (1 - _HEAVY_TRAFFIC)), v)
    return np.asarray(np.where(v > 1, bursty, smooth))


def _drain_per_s(a: Floats, c: Floats, service_s: Floats, ca2: ArrayLike, cs2: ArrayLike) -> Floats:
    """The exponent of the wait's tail, (c mu - lambda) / variability, 1/s; 0 in overload."""
    return np.asarray(c * np.maximum(1 - a / c, 0.0) / service_s / variability(a / c, ca2, cs2))


def _stage(arrival_per_s: ArrayLike, service_s: ArrayLike, servers: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """Offered erlangs, servers, service time."""
    service = checked("service_s", service_s, above=True)
    offered = checked("arrival_per_s * service_s", checked("arrival_per_s", arrival_per_s) * service)
    return offered, _whole("servers", servers, 1), service


def wait_tail(
    t_s: ArrayLike,
    arrival_per_s: ArrayLike,
    service_s: ArrayLike,
    servers: ArrayLike,
    ca2: ArrayLike = 1.0,
    cs2: ArrayLike = 1.0,
) -> Floats:
    """P(wait > t) of one queue before `servers`, first come first served; 1 in overload.

    C(c, a) e^(-(c mu - lambda) t) is exact for M/M/c; ca2 and cs2, the squared coefficients of variation of the gaps
    between arrivals (over the time scale of the wait) and of the service time, scale the exponent.
    """
    t = checked("t_s", t_s)
    a, c, service = _stage(arrival_per_s, service_s, servers)
    drain = _drain_per_s(a, c, service, ca2, cs2)
    return np.exp(log_erlang_c(a, c) - drain * t)


def wait_quantile_s(
    share: ArrayLike,
    arrival_per_s: ArrayLike,
    service_s: ArrayLike,
    servers: ArrayLike,
    ca2: ArrayLike = 1.0,
    cs2: ArrayLike = 1.0,
) -> Floats:
    """The wait that `share` (0 to below 1) of requests do not exceed, s: `wait_tail` inverted, infinity in overload."""
    kept = checked("share", share)
    if np.any(kept >= 1):
        raise ValueError(f"share must be below 1, not {share!r}")
    a, c, service = _stage(arrival_per_s, service_s, servers)
    above = log_erlang_c(a, c) - np.log1p(-kept)
    with np.errstate(divide="ignore", invalid="ignore"):
        wait = above / _drain_per_s(a, c, service, ca2, cs2)
    return np.where(a >= c, np.inf, np.where(above > 0, wait, 0.0))


def wait_mean_s(
    arrival_per_s: ArrayLike,
    service_s: ArrayLike,
    servers: ArrayLike,
    ca2: ArrayLike = 1.0,
    cs2: ArrayLike = 1.0,
) -> Floats:
    """Mean wait in G/G/c, s: that of M/M/c times (Ca2 + Cs2) / 2 (Allen and Cunneen 1978); infinity in overload."""
    a, c, service = _stage(arrival_per_s, service_s, servers)
    v = (checked("ca2", ca2) + checked("cs2", cs2)) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = erlang_c(a, c) * service / (c - a) * v
    return np.where(a >= c, np.inf, mean)


@dataclass(frozen=True)
class FiniteQueue:
    """M/M/c with room for a limited number: shares of all arrivals, mean wait of those let in."""

    refused: Floats
    delayed: Floats  # let in, but not served at once
    wait_mean_s: Floats


def finite_queue(
    arrival_per_s: ArrayLike, service_s: ArrayLike, servers: ArrayLike, waiting_places: ArrayLike
) -> FiniteQueue:
    """M/M/c/K with K = servers + waiting_places; any load, since what finds no place is refused.

    p_(c+j) = p_c rho^j, and B, the loss of the c servers alone, gives p_c = B / (1 + B (rho + ... + rho^m)) (Gross and
    Harris 1998, section 2.5). The sums run over the m places, so none cancels at rho = 1.
    """
    a, c, service = _stage(arrival_per_s, service_s, servers)
    places = _whole("waiting_places", waiting_places, 0)
    a, c, service, places = np.broadcast_arrays(a, c, service, places)
    load = np.where(a > 0, a, 1.0)
    j = np.arange(int(places.max(initial=0)) + 1)
    weights = j * np.log(load / c)[..., None]  # log rho^j
    weights = np.where(j <= places[..., None], weights, -np.inf)
    log_inverse = log_inverse_erlang_b(load, c)
    top = np.maximum(weights.max(axis=-1), log_inverse)
    scaled = np.exp(weights - top[..., None])
    full = np.where(j < places[..., None], scaled, 0.0)
    let_in = np.exp(log_inverse - top) - np.exp(-top) + full.sum(axis=-1)  # states under c: 1 / B - 1 in units of p_c
    last = np.take_along_axis(scaled, places[..., None].astype(np.intp), axis=-1)[..., 0]
    wait = (full * (j + 1)).sum(axis=-1) * service / c
    some = np.where(a > 0, 1.0, 0.0)
    return FiniteQueue(
        refused=some * last / (let_in + last),
        delayed=some * full.sum(axis=-1) / (let_in + last),
        wait_mean_s=some * wait / let_in,
    )


def arrival_peakedness(arrival_cv2: float, overlap: float) -> float:
    """Variance over mean of how many arrivals would be under way at once with room for all; 1 if they are Poisson.

    arrival_cv2: of their gaps. overlap: E[min(S, S')] / E[S] of two stays. Exact for arrivals in batches, and for stays
    that are long beside the gaps (Eckberg 1983, "Generalized peakedness of teletraffic processes"); no stream is taken
    for quite regular.
    """
    return max(1.0 + (arrival_cv2 - 1.0) * overlap, _LEAST_PEAKED)


@dataclass(frozen=True)
class SlotQueue:
    """One queue before the slots of engines that slow down as they fill.

    log_inverse: log of all states up to full slots over the full one, the counterpart of 1 / B. full_per_s: departures
    per second while all slots are taken. delayed: share of arrivals that wait for a slot. drain_per_s: their wait is
    exponential with this rate; 0 in overload, where delayed is 1.
    """

    log_inverse: Floats
    full_per_s: Floats
    delayed: Floats
    drain_per_s: Floats


def slot_queue(
    arrival_per_s: ArrayLike,
    steps: ArrayLike,
    base_s: ArrayLike,
    per_sequence_s: ArrayLike,
    slots: ArrayLike,
    replicas: ArrayLike = 1,
    other_work_s: ArrayLike = 0.0,
    peaked: ArrayLike = 1.0,
) -> SlotQueue:
    """Birth-death chain of `replicas` engines with `slots` each, one queue before all of them.

    A request stays for `steps` steps; with n resident on an engine a step lasts (base + per_sequence n) / (1 - load of
    the other work), other_work_s per request: mu(n) = n (1 - lambda w / c) / (O (base + s n / c)). The stationary
    weights are negative binomial with shape 1 + c base / s, and Poisson for s = 0. Beyond the slots the queue is that
    of M/M/c: departures at a constant rate, so waits are exponential.

    peaked: variance over mean of how many would be under way if there were slots for all; 1 for Poisson arrivals. The
    slots fill as a group would that is so many times smaller, engines, slots and arrivals alike, down to one slot
    (Hayward's approximation: Fredericks 1980, "Congestion in blocking systems - a simple approximation technique").
    """
    rate, c = checked("arrival_per_s", arrival_per_s), _whole("replicas", replicas, 1)
    o = checked("steps", steps, above=True)
    base, s = checked("base_s", base_s, above=True), checked("per_sequence_s", per_sequence_s)
    n = _whole("slots", slots, 1)
    free = 1 - rate * checked("other_work_s", other_work_s) / c
    z = checked("peaked", peaked, above=True)
    rate, c, o, base, s, n, free, z = np.broadcast_arrays(rate, c, o, base, s, n, free, z)
    z = np.minimum(z, c * n)
    full = np.maximum(free, 0) * c * n / (o * (base + s * n))
    # The loss ratio is wanted in overload too; there it is that of the load which just fills the slots.
    s = np.maximum(s, base / _POISSON)
    fits = np.minimum(rate / np.where(free > 0, free, 1.0), c * n / (o * (base + s * n)))
    some = np.where(fits > 0, fits, 1e-3 / (o * (base + s)))
    x = np.minimum(some * o * s / c, 1 - 1e-12)
    log_inverse = _log_inverse_loss(1 + c / z * base / s, x, c * n / z)
    log_inverse = np.where(fits > 0, log_inverse, np.inf)
    spare = np.where(full > 0, np.maximum(1 - rate / np.where(full > 0, full, 1.0), 0.0), 0.0)
    with np.errstate(divide="ignore"):
        log_delayed = -np.logaddexp(np.log1p(-spare), np.log(spare) + np.where(spare > 0, log_inverse, 0.0))
    return SlotQueue(log_inverse, full, np.where(spare > 0, np.exp(log_delayed), 1.0), full * spare)


def residents(
    arrival_per_s: float,
    steps: float,
    base_s: float,
    per_sequence_s: float,
    slots: int,
    other_work_s: float = 0.0,
) -> Floats:
    """P(n resident) on one engine, for n = 0 .. slots: slots + 1 shares, all states with a queue counted as full.

    Weights w_n = w_(n-1) lambda O (base + s n) / ((1 - lambda w) n), summed as they stand. All full in overload.
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
) -> tuple[Floats, Floats]:
    """What a prompt waits for beside its own prefill: the certain part and the mean of an exponential part, s.

    step_s, base_s: mean of all steps, and of empty ones. stall_s, stall_square_s2: moments of a prompt's prefill.
    vLLM keeps two steps in flight: an arrival waits for the rest of the running step M and all of the next T, and is
    prefilled in the one after, with whatever else arrived during M. A step lasts D plus the prefills that arrived
    during an earlier one, so var T = v = lambda E[p^2] E[T] / (1 - rho_p^2). M is met in proportion to its length: for
    a gamma law E[M] = E[T] + v / E[T] and E[M^2] = E[M] (E[T] + 2 v / E[T]). The wait is (U + rho_p) M + T + D - base
    and the noise of the prefills in it, U uniform; its mean and variance give the two parts. Against vLLM on an H200
    p95 of TTFT is within 15 % at rho 0.65 to 0.86. It holds while prefill seldom fills the token budget: with prompts
    of up to 8,000 tokens 512 a step are too few for it (96 % in promise for 71 % seen; from 1,024 on within 3 points).

    Arrivals that bunch bring (Ca2 - 1) / 2 others before each in the mean, whose prefill and what comes meanwhile take
    that many E[p] / (1 - rho_p): what M^X/G/1 adds to the wait of M/G/1, taken as exponential (Burke 1975, "Delays in
    single-server queues with batch input").
    """
    rho_p = np.minimum(rate_per_s * stall_s, 1.0)
    variance = rate_per_s * stall_square_s2 * step_s / np.maximum(1 - rho_p**2, 1e-12)
    excess = variance / np.maximum(step_s, 1e-300)
    met, met_square = step_s + excess, (step_s + excess) * (step_s + 2 * excess)
    mean = (0.5 + rho_p) * met + step_s + step_s * (1 - rho_p) - base_s
    noise = rate_per_s * stall_square_s2 * met + variance
    whole = (1 / 3 + rho_p + rho_p**2) * met_square - ((0.5 + rho_p) * met) ** 2 + noise
    bunched = np.maximum(arrival_cv2 - 1.0, 0.0) / 2.0 * stall_s / np.maximum(1 - rho_p, 1e-12)
    mean = mean + bunched
    spread = np.minimum(np.sqrt(whole + bunched**2), mean)
    return mean - spread, spread


def in_time(
    log_inverse: Floats,
    arrival_per_s: Floats,
    full_per_s: Floats,
    spread: Floats,
    slack_s: Floats,
    weights: Floats,
) -> Floats:
    """P(a request of class k is let in), where only those are let in whose wait will not exceed their slack.

    log_inverse: log(1 / B) of the stage; full_per_s: its departures when full; spread: its `variability`, 1 if Markov.
    slack_s, weights: (..., K), slack ascending and at least 0 (infinity: never refused), weights the classes' shares of
    arrivals, summing to 1. Returns (..., K), the same classes. Any load.

    The wait that an arrival would have has, above 0, the density full / v e^(integral of (lambda F(s) - full) / v), F
    the share of classes with more slack than s (Baccelli and Hebuterne 1981, "On queues with impatient customers";
    exact for v = 1).
    """
    rate, full, v = arrival_per_s[..., None], full_per_s[..., None], spread[..., None]
    still = np.concatenate((np.ones_like(weights[..., :1]), 1 - np.cumsum(weights, axis=-1)), axis=-1)
    fall = (full - rate * np.maximum(still, 0.0)) / v  # of the density, between one slack and the next; K + 1 pieces
    patient = np.isinf(slack_s)
    fall[..., -1:] = (full - rate * np.where(patient, weights, 0.0).sum(axis=-1, keepdims=True)) / v
    finite = np.where(patient, np.where(patient, 0.0, slack_s).max(axis=-1, keepdims=True), slack_s)
    length = np.diff(finite, axis=-1, prepend=0.0)
    height = np.concatenate((np.zeros_like(length[..., :1]), -np.cumsum(fall[..., :-1] * length, axis=-1)), axis=-1)
    top = np.maximum(height.max(axis=-1), log_inverse)[..., None]
    top = np.where(np.isfinite(top), top, 0.0)
    steep = np.maximum(np.abs(fall[..., :-1]), 1e-300)
    inner = np.exp(np.maximum(height[..., :-1], height[..., 1:]) - top) * -np.expm1(-steep * length) / steep
    with np.errstate(divide="ignore"):
        last = np.exp(height[..., -1:] - top) / np.maximum(fall[..., -1:], 0.0)
    pieces = np.concatenate((inner, last), axis=-1) * full / v
    above = np.cumsum(pieces[..., ::-1], axis=-1)[..., ::-1]
    idle = np.exp(log_inverse[..., None] - top) - np.exp(-top)
    with np.errstate(invalid="ignore"):
        late = above[..., 1:] / (idle + above[..., :1])
    return np.where(patient, 1.0, 1 - np.nan_to_num(late, nan=1.0))
