"""The jump prior: what the table must be like, and the script that makes it."""

from __future__ import annotations

import gzip
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.forecast import growth_prior as prior_fit
from plimsoll.core.demand import growth_prior
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.standby_value import growth_distribution
from tests.core.test_forecast import demand, demand_after


def test_growth_prior_table_matches_script_axes() -> None:
    assert len(growth_prior.PRIOR_EXCEEDANCE) == len(growth_prior.GROWTH_HORIZONS_S) == len(growth_prior.PRIOR_WEIGHT_S)
    assert all(len(row) == len(growth_prior.GROWTH_FACTORS) for row in growth_prior.PRIOR_EXCEEDANCE)
    assert growth_prior.GROWTH_FACTORS == prior_fit.GROWTH_FACTORS
    assert tuple(60.0 * minutes for minutes in prior_fit.HORIZONS_MIN) == growth_prior.GROWTH_HORIZONS_S


def test_growth_prior_is_monotone_in_factor_and_horizon() -> None:
    for row in growth_prior.PRIOR_EXCEEDANCE:
        assert all(rarer < share for share, rarer in pairwise(row))
        assert 0.0 < row[-1] <= row[0] < 1.0
    for shorter, longer in pairwise(growth_prior.PRIOR_EXCEEDANCE):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))
    for at_one_factor in zip(*growth_prior.PRIOR_WEIGHT_S, strict=True):
        assert list(at_one_factor) == sorted(at_one_factor)
    assert all(600.0 < weight_s < 8 * 3600.0 for row in growth_prior.PRIOR_WEIGHT_S for weight_s in row)
    assert all(len(row) == len(growth_prior.GROWTH_FACTORS) for row in growth_prior.PRIOR_WEIGHT_S)


def test_growth_prior_docstring_names_sources() -> None:
    text = growth_prior.__doc__ or ""
    for word in ("Office 365", "BurstGPT", "MIT", "CC-BY-4.0", "bench/forecast/growth_prior.py"):
        assert word in text


@pytest.mark.parametrize("horizon_s", [60.0, 120.0, 240.0, 600.0])
def test_growth_odds_without_history_equal_prior(horizon_s: float) -> None:
    row = growth_prior.PRIOR_EXCEEDANCE[growth_prior.GROWTH_HORIZONS_S.index(horizon_s)]
    assert growth_distribution(DemandState(), horizon_s).exceedance == pytest.approx(row)


def test_growth_odds_interpolate_between_horizons() -> None:
    horizons_s = (0.0, 1.0, 10.0, 30.0, 60.0, 61.0, 90.0, 120.0, 200.0, 240.0, 400.0, 600.0, 3600.0)
    found = [growth_distribution(DemandState(), horizon_s).exceedance for horizon_s in horizons_s]
    assert set(found[0]) == {0.0}
    for shorter, longer in pairwise(found):
        assert all(a <= b + 1e-12 for a, b in zip(shorter, longer, strict=True))
    assert found[2][5] == pytest.approx(1 - (1 - growth_prior.PRIOR_EXCEEDANCE[0][5]) ** (1 / 6))


def test_growth_uses_largest_minute_over_previous_five() -> None:
    series = np.full(100, 10.0)
    series[50] = 40.0
    within = prior_fit.growth_ratios(series, 4)
    assert len(within) == 100 - 5 - 4 + 1
    assert np.sum(within == 4.0) == 4  # the four minutes from which it lies ahead
    assert np.sum(within > 1.0) == 4


def test_growth_ignores_idle_minutes() -> None:
    series = np.concatenate([np.zeros(50), np.full(50, 10.0)])
    assert len(prior_fit.growth_ratios(series, 1)) == 49
    assert math.isfinite(prior_fit.growth_ratios(series, 1).max())


def test_growth_prior_weight_rises_with_agreement() -> None:
    at = prior_fit.GROWTH_FACTORS.index
    shares = np.full((3, len(growth_prior.GROWTH_FACTORS)), 0.3)
    shares[:, at(2.0)], shares[:, at(2.5)], shares[:, at(3.0)] = (0.09, 0.10, 0.11), (0.02, 0.25, 0.03), 0.0
    shares[:, at(4.0) :] = 0.0
    weights = prior_fit.prior_weight_s(shares, 4)
    assert weights[at(2.0)] > 10 * weights[at(2.5)] > 0.0
    assert set(weights[: at(2.0)]) == {weights[at(2.0)]}
    assert set(weights[at(3.0) :]) == {weights[at(2.5)]}, "where nothing was seen"


def test_growth_odds_after_level_shift_spare_larger_shifts() -> None:
    """Services differ in how often load doubles; that it grows tenfold is rare in all of them."""
    shifted = demand_after(demand(np.concatenate([np.full(300, 6.0), np.full(900, 38.0)]), 1.0, seed=1))
    at, prior, now = (
        growth_prior.GROWTH_FACTORS.index,
        growth_distribution(DemandState(), 120.0),
        growth_distribution(shifted, 120.0),
    )
    assert now.exceedance[at(4.0)] > 0.05
    assert prior.exceedance[at(6.0)] < now.exceedance[at(6.0)] < 0.35 * now.exceedance[at(4.0)]
    assert list(now.exceedance) == sorted(now.exceedance, reverse=True)


def test_growth_prior_script_writes_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    names = [tmp_path / "a.csv.gz", tmp_path / "d.csv.gz", tmp_path / "b.csv"]
    for path in names:
        rows = "".join(f"{minute},{work:.0f}\n" for minute, work in enumerate(rng.lognormal(5, 0.8, 2000)))
        text = f"minute,tokens\n{rows}".encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    assert prior_fit.main([str(path) for path in names]) == 0
    space: dict[str, object] = {}
    exec(capsys.readouterr().out, space)
    assert space["GROWTH_FACTORS"] == prior_fit.GROWTH_FACTORS
    assert space["__doc__"] == growth_prior.__doc__
