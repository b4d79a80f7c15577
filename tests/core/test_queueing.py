"""Waiting formulas against high-precision sums, theory and simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest

from plimsoll.core.capacity import queueing

RELATIVE_TOLERANCE = 1e-9


def inverse_loss(growth: Callable[[int], mpmath.mpf], slots: int) -> mpmath.mpf:
    """(w_0 + ... + w_N) / w_N for w_n = w_(n-1) growth(n), summed in 30 digits."""
    total = mpmath.mpf(1)
    for n in range(1, slots + 1):
        total = 1 + total / growth(n)
    return total


def off_by(log_found: float, exact: mpmath.mpf) -> float:
    """Relative error of e^log_found."""
    return abs(float(mpmath.expm1(mpmath.mpf(float(log_found)) - mpmath.log(exact))))


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 30, 100, 316, 1000, 3162, 10_000])
def test_erlang_formulas_are_exact_to_nine_digits(servers: int) -> None:
    with mpmath.workdps(30):
        for rho in (1e-6, 0.3, 0.7, 0.95, 0.9999):
            a = servers * rho
            inverse = inverse_loss(lambda n, a=a: mpmath.mpf(a) / n, servers)  # type: ignore[misc]
            waiting = 1 / (mpmath.mpf(a) / servers + (1 - mpmath.mpf(a) / servers) * inverse)
            assert off_by(float(queueing.log_inverse_erlang_b(a, servers)), inverse) < RELATIVE_TOLERANCE
            assert off_by(float(queueing.log_erlang_c(a, servers)), waiting) < RELATIVE_TOLERANCE


@pytest.mark.parametrize("slots", [1, 66, 250])
@pytest.mark.parametrize("replicas", [1, 9])
def test_slot_queue_is_exact_to_nine_digits(slots: int, replicas: int) -> None:
    steps, base = 220, 0.005
    with mpmath.workdps(30):
        for per_sequence in (0.0, 1e-9, 5.8e-5, 4e-3):
            capacity = replicas * slots / (steps * (base + per_sequence * slots))
            for rho in (0.05, 0.7, 0.9999):
                rate, s = capacity * rho, mpmath.mpf(per_sequence)

                def growth(n: int, rate: float = rate, s: mpmath.mpf = s) -> mpmath.mpf:
                    return mpmath.mpf(rate) * steps * (mpmath.mpf(base) + s * n / replicas) / n

                found = queueing.slot_queue(rate, steps, base, per_sequence, slots, replicas)
                assert off_by(float(found.log_inverse), inverse_loss(growth, slots * replicas)) < RELATIVE_TOLERANCE


def test_erlang_known_values() -> None:
    assert queueing.log_inverse_erlang_b(1.0, 1) == pytest.approx(math.log(2.0))
    assert queueing.log_inverse_erlang_b(0.0, 3) == math.inf
    assert queueing.log_inverse_erlang_b(3.0, 0) == pytest.approx(0.0)
    assert queueing.erlang_c(0.3, 1) == pytest.approx(0.3)  # M/M/1: rho


def test_queueing_overload_gives_infinite_wait() -> None:
    for rate in (10.0, 10.5, 1e7):
        assert queueing.erlang_c(rate, 10) == 1
        found = queueing.slot_queue(rate, 10, 0.1, 0.001, 10)
        assert (found.delayed_share, found.drain_per_s) == (1, 0)
        assert queueing.resident_distribution(rate, 10, 0.1, 0.001, 10)[-1] == 1


def test_resident_distribution_unlimited_mean_matches_step_law() -> None:
    rate, steps, base, s = 20.0, 220, 4.9e-3, 5.8e-5
    shares = queueing.resident_distribution(rate, steps, base, s, 2000)
    step = (base + s) / (1 - rate * steps * s)  # base / (1 - rho), the request itself counted
    assert shares @ np.arange(2001) == pytest.approx(rate * steps * step, rel=1e-9)


def test_slot_queue_full_engine_matches_chain() -> None:
    found = queueing.slot_queue(1.3, 1000, 0.0132, 2.27e-4, 66, 1, 0.222)
    shares = queueing.resident_distribution(1.3, 1000, 0.0132, 2.27e-4, 66, 0.222)
    assert found.delayed_share == pytest.approx(shares[-1], rel=1e-9)
    assert found.full_per_s == pytest.approx(66 * (1 - 1.3 * 0.222) / (1000 * (0.0132 + 66 * 2.27e-4)))


def test_admitted_shares_without_slack_equals_erlang_b() -> None:
    rate, full, one = np.array(9.0), np.array(10.0), np.array(1.0)
    log_inverse = queueing.log_inverse_erlang_b(9.0, 10)
    let_in = queueing.admitted_shares(log_inverse, rate, full, one, np.array([0.0]), np.array([1.0]))
    assert let_in[0] == pytest.approx(1 - math.exp(-float(log_inverse)), rel=1e-9)
    patient = queueing.admitted_shares(
        log_inverse, rate, full, one, np.array([1.0, np.inf]), np.array([1e-9, 1.0 - 1e-9])
    )
    assert patient[0] == pytest.approx(1 - float(queueing.erlang_c(9.0, 10)) * math.exp(-1.0), rel=1e-6)
    assert patient[1] == 1


def wait_or_leave(rate: float, slack: np.ndarray, weights: np.ndarray, seed: int) -> np.ndarray:
    """M/M/1 where only those are let in who will wait no longer than their slack: share let in, by class."""
    rng = np.random.default_rng(seed)
    count = 60_000
    gaps, work = rng.exponential(1 / rate, count), rng.exponential(1.0, count)
    classes = rng.choice(len(slack), count, p=weights)
    backlog, let_in = 0.0, np.zeros(len(slack))
    for gap, own, k in zip(gaps, work, classes, strict=True):
        backlog = max(0.0, backlog - gap)
        if backlog <= slack[k]:
            let_in[k] += 1
            backlog += own
    return np.asarray(let_in / np.bincount(classes))


@pytest.mark.parametrize("rate", [0.7, 1.3])
def test_admitted_shares_matches_simulation(rate: float) -> None:
    slack, weights = np.array([0.5, 3.0]), np.array([0.4, 0.6])
    log_inverse = queueing.log_inverse_erlang_b(rate, 1)
    found = queueing.admitted_shares(log_inverse, np.array(rate), np.array(1.0), np.array(1.0), slack, weights)
    assert found == pytest.approx(wait_or_leave(rate, slack, weights, seed=7), abs=0.015)


def test_admitted_shares_overload_serves_full_capacity() -> None:
    log_inverse = queueing.log_inverse_erlang_b(30.0, 10)
    found = queueing.admitted_shares(
        log_inverse, np.array(30.0), np.array(10.0), np.array(0.5), np.array([50.0]), np.array([1.0])
    )
    assert 30 * found[0] == pytest.approx(10, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_queueing_invalid_argument_raises_naming_it(bad: float) -> None:
    with pytest.raises(ValueError, match="offered_erlangs"):
        queueing.erlang_c(bad, 2)
    with pytest.raises(ValueError, match="arrival_per_s"):
        queueing.slot_queue(bad, 10, 0.1, 0.001, 5)
    with pytest.raises(ValueError, match="servers"):
        queueing.erlang_c(1.0, bad)
    with pytest.raises(ValueError, match="per_sequence_s"):
        queueing.slot_queue(1.0, 10, 0.1, bad, 5)
    with pytest.raises(ValueError, match="cs2"):
        queueing.variability(0.5, 1.0, bad)


def test_queueing_fractional_or_no_servers_raise() -> None:
    with pytest.raises(ValueError, match="whole number"):
        queueing.erlang_c(1.0, 1.5)
    with pytest.raises(ValueError, match="servers"):
        queueing.erlang_c(1.0, 0)


def test_queueing_single_precision_input_is_widened() -> None:
    rho = np.float32(0.9999)
    wide = queueing.log_erlang_c(np.float64(rho) * 1000, 1000)
    assert queueing.log_erlang_c(rho * np.float32(1000), 1000).dtype == np.float64
    assert queueing.log_erlang_c(np.array(rho, dtype=np.float32) * 1000, 1000) == pytest.approx(float(wide), rel=1e-3)


@pytest.mark.parametrize("rho_p", [0.0, 0.1, 0.4, 0.8, 1.0])
def test_prompts_of_one_queue_meet_less_often(rho_p: float) -> None:
    """Never less often than exactly in M/M/c where each knows the work of all; a step that is not known is random."""
    load, replicas = np.full(5, rho_p), np.array([1.0, 2.0, 4.0, 16.0, math.inf])
    known = queueing.prompt_meeting_share(load, np.zeros(5), np.ones(5), replicas)
    assert known[0] == 1.0
    assert np.all(np.diff(known) <= 0.0)
    exact = np.array([float(queueing.erlang_c(c * rho_p, c)) for c in (1, 2, 4, 16)])
    assert np.all(known[:4] * rho_p >= 0.9 * exact - 1e-12)
    half_known = queueing.prompt_meeting_share(load, np.full(5, 2 / 3), np.ones(5), replicas)
    assert half_known == pytest.approx(0.5 + 0.5 * known)
