"""What newcomers bring to a gate: known within seconds of a leap, and steady enough to say what is spare."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.core.admission.arrival_estimator import ArrivalEstimator

WORK_S = 0.07  # of a mean request


def arrival_work(rate: float, seconds: int, rng: np.random.Generator) -> list[float]:
    """Work of the requests of each second: Poisson arrivals, lengths of CV 0.5."""
    return [float(rng.gamma(4.0, WORK_S / 4.0, rng.poisson(rate)).sum()) for _ in range(seconds)]


def estimates(works: list[float], since_s: int = 0) -> list[float]:
    """What is found after each second from then on."""
    estimator, total, found = ArrivalEstimator(0.0), 0.0, []
    for second, work in enumerate(works, start=1):
        total += work
        estimator.update(total, float(second))
        found.append(estimator.work_rate)
    return found[since_s:]


@pytest.mark.parametrize("gateways", [1, 3])
def test_arrival_estimate_after_level_shift_is_within_10_percent(gateways: int) -> None:
    """A tenth is what is spare where the load nearly fills what will be ready."""
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        works = [
            arrival_work(6.0 / gateways, 300, rng) + arrival_work(20.0 / gateways, 60, rng) for _ in range(gateways)
        ]
        whole = np.sum([estimates(each, since_s=312) for each in works], axis=0)
        errors.append(np.abs(whole / (20.0 * WORK_S) - 1.0))
    assert np.mean(np.array(errors) > 0.1) < 0.1


def test_arrival_estimate_steady_load_error_shrinks() -> None:
    errors = [
        np.abs(np.array(estimates(arrival_work(20.0, 300, np.random.default_rng(seed)))) / (20.0 * WORK_S) - 1.0)
        for seed in range(20)
    ]
    first, last = np.mean([each[10:40] for each in errors]), np.mean([each[-30:] for each in errors])
    assert last < 0.5 * first
    assert last < 0.02


def test_arrival_estimate_after_load_ends_is_zero() -> None:
    works = arrival_work(20.0, 120, np.random.default_rng(1)) + [0.0] * 30
    assert estimates(works)[-1] == 0.0
    assert estimates([0.0] * 10) == [0.0] * 10


def test_arrival_estimate_repeated_time_changes_nothing() -> None:
    estimator = ArrivalEstimator(5.0)
    for now in (5.0, 4.0, float("nan")):
        estimator.update(1.0, now)
        assert estimator.work_rate == 0.0
    estimator.update(1.0, 6.0)
    assert estimator.work_rate == pytest.approx(1.0)
