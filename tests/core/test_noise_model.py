"""How arrivals bunch, as the noise of a forecast tells it."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.noise_model import arrival_dispersion
from tests.core.test_forecast import Floats, demand_after


def gamma_arrivals(cv2: float, rate: float, seconds: int, seed: int) -> Floats:
    """Arrivals of each second, of work 0.25, whose gaps are gamma."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.gamma(1.0 / cv2, cv2 / rate, round(1.3 * rate * seconds) + 50))
    return 0.25 * np.bincount(at_s[at_s < seconds].astype(np.intp), minlength=seconds).astype(np.float64)


@pytest.mark.parametrize("rate", [0.2, 2.0, 20.0])
def test_arrival_dispersion_follows_arrival_cv2(rate: float) -> None:
    def measured_dispersion(cv2: float, seed: int) -> float:
        return arrival_dispersion(demand_after(gamma_arrivals(cv2, rate, 3600, seed)).noise, 0.25)

    poisson = [measured_dispersion(1.0, seed) for seed in range(8)]
    assert np.median(poisson) == 1.0
    assert max(poisson) < 1.2
    bursts = [measured_dispersion(4.0, seed) for seed in range(4)]
    assert min(bursts) > (1.2 if rate < 1.0 else 2.0)
    assert max(bursts) < 5.0
    assert measured_dispersion(0.25, 1) == 1.0, "arrivals that are regular are not counted on to stay so"
    assert arrival_dispersion(DemandState().noise, 0.25) == 1.0
