"""Replicas of unlike speed: what is a fast engine must not be taken for cheap work."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.calibration.estimates import quantile_model
from plimsoll.core.engine_model.calibration.posterior_model import Posterior, initial_posterior, step_counts
from plimsoll.core.engine_model.calibration.posterior_update import update_all
from plimsoll.core.engine_model.calibration.replica_speed import REPLICA_EXPIRY_S, ReplicaSpeeds
from plimsoll.core.engine_model.step_time import StepModel

TRUTH = StepModel(4.7e-3, 0.0, 2.3e-5, 1e-9, 1.8e-5, 3.0e-8)
PRIOR = StepModel(5.2e-3, 0.0, 2.5e-5, 1e-9, 2.0e-5, 3.3e-8)
FLOOR = StepModel(3.0e-3, 0.0, 1.2e-5, 0.0, 1e-6, 2e-8)
PROMPT, OUTPUT = 2000.0, 250.0
REQUEST_S = (
    PROMPT * TRUTH.prefill_token_s
    + TRUTH.prefill_pair_s * PROMPT**2 / 2
    + OUTPUT * (TRUTH.sequence_s + TRUTH.cached_token_s * (PROMPT + OUTPUT / 2))
)
TICKS = 200
GREED = 3.0  # a picker by least work gives a faster engine more than its share


def window(name: str, end_s: float, rate: float, factor: float, noise: float) -> WindowSums:
    """A second of an engine that answers `rate` requests/s and whose steps take `factor` times the truth's."""
    rho = rate * REQUEST_S * factor
    steps = (1.0 - rho) / (TRUTH.base_s * factor)
    output = rate * OUTPUT
    return WindowSums(
        end_s=end_s,
        busy_s=1.0 + noise,
        steps=steps,
        computed_tokens=rate * PROMPT + output,
        output_tokens=output,
        prompt_tokens=rate * PROMPT,
        mean_running=output / steps,
        prefill_steps=steps * -math.expm1(-rate / steps),
        prefill_pairs=rate * PROMPT**2 / 2,
        cached_tokens_read=output * (PROMPT + OUTPUT / 2),
        replica=name,
    )


def fleet(factors: dict[str, float], seed: int, load: float = 6.0) -> Iterator[list[WindowSums]]:
    """Each tick a window of every engine; who is faster gets more, and load wavers by chance."""
    random = np.random.default_rng(seed)
    for tick in range(TICKS):
        rates = {name: load * max(0.2, random.normal(1.0, 0.3)) / factor**GREED for name, factor in factors.items()}
        yield [
            window(name, float(tick), rates[name], factor, random.normal(0.0, 0.01)) for name, factor in factors.items()
        ]


def request_s(posterior: Posterior) -> float:
    """What a request is taken to need."""
    one = window("", 0.0, 1.0, 1.0, 0.0)
    model = quantile_model(posterior, 0.5, one)
    work = step_counts(one)
    work[:2] = 0.0
    parts = (0.0, 0.0, model.prefill_token_s, model.prefill_pair_s, model.sequence_s, model.cached_token_s)
    return float(work @ np.array(parts))


def learned(factors: dict[str, float], seed: int, replicas: ReplicaSpeeds | None) -> float:
    posterior = initial_posterior(PRIOR, FLOOR)
    for windows in fleet(factors, seed):
        posterior = update_all(posterior, windows, replicas)
    return request_s(posterior)


@pytest.mark.parametrize("seed", range(4))
def test_replica_speed_unequal_replicas_keep_work_unbiased(seed: int) -> None:
    factors = {f"engine-{n}": factor for n, factor in enumerate(np.linspace(0.9, 1.1, 6).tolist())}
    assert learned(factors, seed, ReplicaSpeeds()) == pytest.approx(REQUEST_S, rel=0.03)
    assert learned(factors, seed, None) < 0.93 * REQUEST_S  # the paradox is there


def test_replica_speed_single_replica_is_unchanged() -> None:
    assert learned({"alone": 1.1}, 1, ReplicaSpeeds()) == learned({"alone": 1.1}, 1, None)


def test_replica_speed_level_is_geometric_mean() -> None:
    ratios, expected, weights = np.array([0.9, 1.1]), np.ones(2), np.full(2, 1e6)
    evened = ReplicaSpeeds().normalize(["fast", "slow"], [1.0, 1.0], ratios, expected, weights)
    assert evened == pytest.approx(math.sqrt(0.9 * 1.1), rel=1e-4)


def test_replica_speed_common_slowdown_is_kept() -> None:
    replicas, weights = ReplicaSpeeds(), np.ones(2)
    for second in range(100):
        replicas.normalize(["a", "b"], [second, second], np.ones(2), np.ones(2), weights)
    slow = np.array([1.18, 1.18])
    assert replicas.normalize(["a", "b"], [100.0, 100.0], slow, np.ones(2), weights) == pytest.approx(slow)


def test_replica_speed_departed_replica_is_forgotten() -> None:
    replicas, weights = ReplicaSpeeds(), np.array([1e6, 1e6])
    replicas.normalize(["stays", "goes"], [0.0, 0.0], np.array([1.0, 1.3]), np.ones(2), weights)
    alone = replicas.normalize(["stays"], [REPLICA_EXPIRY_S + 1.0], np.array([1.0]), np.ones(1), weights[:1])
    assert alone == pytest.approx(1.0)


def test_replica_speed_outlier_is_clipped() -> None:
    replicas, weights = ReplicaSpeeds(), np.ones(2)
    for second in range(50):
        replicas.normalize(["a", "b"], [second, second], np.ones(2), np.ones(2), weights)
    found = replicas.normalize(["a", "b"], [50.0, 50.0], np.array([1.0, 1e9]), np.ones(2), weights)
    assert found[0] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("ends_s", [[0.0, 100.0, 100.0], [1000.0, 900.0, 900.0], [900.0, 1000.0, 0.0]])
def test_replica_speed_mixed_window_times_stays_finite(ends_s: list[float]) -> None:
    replicas, names = ReplicaSpeeds(), ["a", "b", "c"]
    replicas.normalize(names[:2], [1000.0, 1000.0], np.ones(2), np.ones(2), np.ones(2))
    found = replicas.normalize(names, ends_s, np.full(3, 1.1), np.ones(3), np.ones(3))
    assert np.isfinite(found).all()


@pytest.mark.parametrize("expected", [-1.0, 0.0, 1e-300])
def test_replica_speed_invalid_expectation_stays_finite(expected: float) -> None:
    replicas, names = ReplicaSpeeds(), ["a", "b"]
    replicas.normalize(names, [1.0, 1.0], np.ones(2), np.full(2, expected), np.ones(2))
    assert np.isfinite(replicas.normalize(names, [2.0, 2.0], np.ones(2), np.ones(2), np.ones(2))).all()
