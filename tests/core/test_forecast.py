"""The forecast's parts, its quantile's steering, and the worth of spare."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from plimsoll.core.demand import growth_prior, growth_stats, noise_model, seasonality
from plimsoll.core.demand.demand_state import DemandState, observe, rescale
from plimsoll.core.demand.forecasting import Forecast, forecast
from plimsoll.core.demand.serialization import from_dict, to_dict
from plimsoll.core.demand.standby_value import (
    GrowthDistribution,
    growth_distribution,
    standby_cost_benefit,
    standby_replicas,
)
from plimsoll.core.types import Unavailable

REQUEST_GPU_S = 0.08
SIGMA = 0.6  # of the lognormal sizes
Floats = NDArray[np.float64]


def demand(rates: Floats, tick_s: float, seed: int, sigma: float = SIGMA) -> Floats:
    """Work per tick of Poisson requests with lognormal sizes at the given rates."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rates * tick_s)
    sizes = rng.lognormal(math.log(REQUEST_GPU_S) - sigma**2 / 2, sigma, counts.sum())
    work = np.zeros(len(rates))
    np.add.at(work, np.repeat(np.arange(len(rates)), counts), sizes)
    return work / tick_s


def demand_after(
    works: Floats, tick_s: float = 1.0, state: DemandState | None = None, start_s: float = 0.0
) -> DemandState:
    state = state or DemandState()
    for number, work in enumerate(works, start=1):
        state = observe(state, start_s + number * tick_s, float(work))
    return state


def forecast_of(
    state: DemandState,
    horizon_s: float = 120.0,
    quantile: float = 0.95,
    later_s: float = 0.0,
    retries_due: bool = False,
) -> Forecast:
    assert state.last_sample_s is not None
    found = forecast(state, state.last_sample_s + later_s, horizon_s, quantile, retries_due)
    assert isinstance(found, Forecast)
    return found


def constant(rate: float, seconds: int, seed: int = 1, tick_s: float = 1.0) -> DemandState:
    return demand_after(demand(np.full(int(seconds / tick_s), rate), tick_s, seed), tick_s)


# Level, noise and change


def test_forecast_parts_sum_to_work_in_order() -> None:
    found = forecast_of(constant(6.0, 900))
    assert [name for name, _ in found.parts] == ["level", "trend", "season", "burst", "uncertainty"]
    assert found.work == pytest.approx(sum(amount for _, amount in found.parts))
    assert found.level == pytest.approx(6 * REQUEST_GPU_S, rel=0.05)


@pytest.mark.parametrize("tick_s", [1.0, 15.0])
def test_index_of_dispersion_matches_compound_poisson(tick_s: float) -> None:
    state = constant(6.0, int(2 * 3600 * math.sqrt(tick_s)), tick_s=tick_s)
    expected = REQUEST_GPU_S * math.exp(SIGMA**2)  # E[w^2] / E[w] of a lognormal
    assert noise_model.dispersion_gpu_s(state.noise) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_forecast_constant_load_is_constant(rate: float) -> None:
    tick_s = 5.0
    works = demand(np.full(4 * 720, rate), tick_s, seed=2)
    state, answers = demand_after(works[:720], tick_s), []
    for number, work in enumerate(works[720:], start=721):
        state = observe(state, number * tick_s, float(work))
        answers.append(forecast_of(state).work)
    mean = rate * REQUEST_GPU_S
    spread = (max(answers) - min(answers)) / mean
    print(
        f"{rate} req/s, hours 2 to 4: answers within {spread:.3f} of the mean work, mean {np.mean(answers) / mean:.3f}"
    )
    assert spread < (0.12 if rate == 2.0 else 0.04)
    assert 1.0 <= float(np.mean(answers)) / mean < 1.05


@pytest.mark.parametrize(("tick_s", "days"), [(1.0, 0.5), (15.0, 3)])
def test_change_detection_constant_load_rarely_alarms(tick_s: float, days: float) -> None:
    works = demand(np.full(int(86400 * days / tick_s), 3.0), tick_s, seed=4)
    state, alarms = demand_after(works[:100], tick_s), set()
    for number, work in enumerate(works[100:].tolist(), start=101):
        state = observe(state, number * tick_s, work)
        alarms.add(state.level_shift_s)
    print(f"{len(alarms) - 1} false alarms in {days} days at {tick_s} s")
    assert len(alarms) - 1 <= math.ceil(days)


def test_forecast_ramp_is_anticipated() -> None:
    times = np.arange(900)
    rates = 5 + 31 * np.sin(np.pi * times / 1800)
    works = demand(rates, 1.0, seed=1)
    for now in (240, 360, 480, 600):
        found = forecast_of(demand_after(works[:now]), quantile=0.5)
        due = rates[now : now + 120].max() * REQUEST_GPU_S
        assert found.trend > 0.0
        assert found.work == pytest.approx(due, rel=0.12)


@pytest.mark.parametrize("top", ["round", "flat"])
def test_level_after_ramp_ends_does_not_overshoot(top: str) -> None:
    times = np.arange(1500)
    rates = 5 + 31 * np.sin(np.pi * times / 1800) if top == "round" else np.minimum(36.0, 6 + times / 30)
    off = []
    for seed in range(6):
        state = DemandState()
        for second, work in enumerate(demand(rates, 1.0, seed), start=1):
            state = observe(state, float(second), float(work))
            if second >= 600:
                off.append(state.estimate.level / (rates[second - 1] * REQUEST_GPU_S) - 1)
    spread = np.sqrt(np.mean(np.square(off)))
    print(f"{top} top: the level is {min(off):+.3f} to {max(off):+.3f} off, {spread:.3f} r.m.s.")
    assert max(off) < 0.12


def test_trend_extrapolates_no_longer_than_observed() -> None:
    found = demand_after(demand(np.linspace(5.0, 35.0, 600), 1.0, seed=1))
    soon, late, later = (forecast_of(found, horizon_s).trend for horizon_s in (10.0, 300.0, 600.0))
    assert soon == pytest.approx(10 * found.estimate.slope_per_s, rel=0.05)
    assert 0.9 * 120 * found.estimate.slope_per_s < late < later < 120 * found.estimate.slope_per_s


def test_forecast_falling_load_has_no_trend() -> None:
    rates = np.linspace(40.0, 10.0, 900)
    found = forecast_of(demand_after(demand(rates, 1.0, seed=1)))
    assert found.trend == 0.0
    assert found.level == pytest.approx(10 * REQUEST_GPU_S, rel=0.15)


# Season


def daily(days: float, tick_s: float = 60.0) -> Floats:
    times = np.arange(int(days * 86400 / tick_s)) * tick_s
    return 1.0 + np.where((times % 86400 >= 9 * 3600) & (times % 86400 < 18 * 3600), 3.0, 0.0)


def shaped(days: float) -> seasonality.SeasonState:
    found = seasonality.SeasonState()
    for number, work in enumerate(daily(days).tolist(), start=1):
        found = seasonality.add(found, number * 60.0 - 30.0, work, 60.0)
    return found


def test_daily_season_counts_from_third_day() -> None:
    before_nine = 8 * 3600 + 45 * 60
    assert seasonality.predicted_growth(shaped(1 + 8.75 / 24), 86400 + before_nine, 600.0) == 0.0
    rise = seasonality.predicted_growth(shaped(3 + 8.75 / 24), 3 * 86400 + before_nine, 600.0)
    assert 0.3 < rise <= 3.0
    assert seasonality.predicted_growth(shaped(3 + 14 / 24), 3 * 86400 + 14 * 3600, 600.0) == 0.0


def test_forecast_includes_daily_rise() -> None:
    ended = 3 + 8.75 / 24
    state = demand_after(daily(ended), 60.0)
    assert forecast_of(state, 600.0).season > 0.3
    assert forecast_of(demand_after(daily(1.4), 60.0), 600.0).season == 0.0


def weekly(hours: int) -> seasonality.SeasonState:
    """Hours of a week whose first five days are working days, and whose other two are quiet."""
    found = seasonality.SeasonState()
    for number in range(12 * hours):
        at_s = 300.0 * number
        works = at_s % (7 * 86400) < 5 * 86400 and 9 * 3600 <= at_s % 86400 < 18 * 3600
        found = seasonality.add(found, at_s + 150.0, 4.0 if works else 1.0, 300.0)
    return found


def test_weekly_season_distinguishes_days_from_third_week() -> None:
    """From the third week on; before, the shape of the day takes the sixth one for a day like the others."""

    def rise(day: int) -> float:
        return seasonality.predicted_growth(weekly(24 * day + 9), day * 86400.0 + 8.75 * 3600.0, 600.0)

    assert rise(5) > 0.2
    for week in (2, 3):
        assert rise(7 * week + 5) < 0.1 * rise(7 * week + 1)
        assert rise(7 * week + 1) > 0.3


def test_season_of_noise_is_flat() -> None:
    rng = np.random.default_rng(8)
    found = seasonality.SeasonState()
    for number, work in enumerate(rng.gamma(20.0, 0.05, 6 * 288), start=1):
        found = seasonality.add(found, number * 300.0 - 1.0, float(work), 300.0)
    worst = max(seasonality.predicted_growth(found, 6 * 86400.0 + hour * 3600, 600.0) for hour in range(24))
    assert worst < 0.05


# Quantile


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, 30.0]), st.booleans())
@settings(max_examples=25)
def test_forecast_is_monotone_in_quantile_horizon_and_work(seed: int, rate: float, bursty: bool) -> None:
    rng = np.random.default_rng(seed)
    rates = np.full(180, rate) * (np.where(rng.random(180) < 0.1, 4.0, 1.0) if bursty else 1.0)
    works = demand(rates, 15.0, seed)
    state, double = demand_after(works, 15.0), demand_after(2 * works, 15.0)
    by_quantile = [forecast_of(state, 120.0, q).work for q in (0.01, 0.5, 0.8, 0.95, 0.99, 0.999)]
    by_horizon = [forecast_of(state, h).work for h in (0.0, 10.0, 60.0, 100.0, 240.0, 600.0, 5000.0)]
    assert by_quantile == sorted(by_quantile)
    assert by_horizon == sorted(by_horizon)
    for due in (False, True):
        whole = forecast_of(state, retries_due=due)
        assert forecast_of(double, retries_due=due).work == pytest.approx(2 * whole.work, rel=1e-6)


def test_forecast_counts_level_error_only_while_retries_are_due() -> None:
    state = constant(6.0, 300)
    alone, due = forecast_of(state), forecast_of(state, retries_due=True)
    assert alone.uncertainty == 0.0
    assert due.uncertainty == pytest.approx(1.6449 * due.level_error, rel=1e-3)


def test_forecast_burst_uses_own_history() -> None:
    rates = np.full(6 * 720, 5.0)
    for start in range(300, len(rates), 240):
        rates[start : start + 36] = 15.0  # every twenty minutes, for three
    state = demand_after(demand(rates, 5.0, seed=6), 5.0)
    quiet, sure = forecast_of(state, 240.0, 0.5), forecast_of(state, 240.0, 0.99)
    assert quiet.burst == 0.0
    assert sure.work > 2.0 * quiet.level
    assert growth_stats.quantile_growth_factor(state.growth, 240.0, 0.99) < 3.5


def test_forecast_burst_growth_is_not_added_to_peak() -> None:
    square = np.where(np.arange(1800) % 120 < 60, 10.0, 70.0)
    peak_gpu = 70.0 * REQUEST_GPU_S
    trough, peak = (
        forecast_of(demand_after(demand(square[:seconds], 1.0, seed=6)), 66.0, 0.9) for seconds in (1720, 1800)
    )
    assert 0.9 * peak_gpu < trough.work < 1.3 * peak_gpu
    assert 0.9 * peak_gpu < peak.work < 1.3 * peak_gpu


def exceeded_shares(rates: Floats, budget: float) -> list[float]:
    """Share of the work of each horizon of 120 s that was above its forecast."""
    tick_s, ticks = 10.0, 12
    works = demand(rates, tick_s, seed=9).tolist()
    state, found = DemandState(), []
    for number in range(1, len(works) - ticks + 1):
        state = observe(state, number * tick_s, works[number - 1])
        if number % ticks or number == ticks:
            continue
        due = rates[number : number + ticks] * REQUEST_GPU_S
        missed = np.maximum(0.0, due - forecast_of(state, 120.0, 1.0 - budget).work)
        found.append(float(missed.sum() / due.sum()))
    return found


def load(kind: str) -> Floats:
    rng = np.random.default_rng(5)
    ticks = 8640 * 5 // 4
    times = np.arange(ticks) * 10.0
    if kind == "daily":
        return np.asarray(10 * (1.3 + np.sin(2 * np.pi * times / 86400)))
    if kind == "steps":
        return rng.lognormal(2.0, 0.6, ticks // 360 + 1)[np.arange(ticks) // 360]
    if kind == "bursts":
        rates = np.full(ticks, 5.0)
        for start in np.cumsum(rng.exponential(240, 60)).astype(int):
            rates[start : start + int(rng.exponential(30)) + 1] = 5.0 * rng.uniform(2, 5)
        return rates
    keep, noise_now, rates = math.exp(-10 / 600), 0.0, np.empty(ticks)
    for index, shock in enumerate(rng.normal(size=ticks) * math.sqrt(1 - keep**2)):
        noise_now = keep * noise_now + shock
        rates[index] = 10 * math.exp(0.3 * noise_now)
    return rates


@pytest.mark.parametrize("kind", ["autoregressive", "bursts", "steps", "daily"])
def test_forecast_realised_misses_meet_budget(kind: str) -> None:
    found = exceeded_shares(load(kind), 0.05)
    assert np.mean(found[len(found) // 4 :]) < 0.05


# Spare


def test_growth_odds_shift_from_prior_to_history() -> None:
    assert growth_distribution(DemandState(), 240.0).own_history_share == 0.0
    new, hours = (
        growth_distribution(DemandState(), 240.0),
        growth_distribution(constant(6.0, 3 * 3600, tick_s=5.0), 240.0),
    )
    assert hours.own_history_share > 0.85
    worths_s = growth_prior.PRIOR_WEIGHT_S[growth_prior.GROWTH_HORIZONS_S.index(240.0)]
    for own, prior, worth_s in list(zip(hours.exceedance, new.exceedance, worths_s, strict=True))[5:]:
        assert own == pytest.approx(prior * worth_s / (worth_s + 3 * 3600), rel=0.05), "none of it was seen"


@given(
    st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.sampled_from([0.0, 10.0, 60.0, 150.0, 900.0])
)
def test_growth_odds_integral_is_additive_and_bounded(a: float, b: float, c: float, horizon_s: float) -> None:
    low, middle, high = sorted((a, b, c))
    chances = growth_distribution(DemandState(), horizon_s)
    assert 0.0 <= chances.between(low, high) <= high - low + 1e-9
    both = chances.between(low, middle) + chances.between(middle, high)
    assert both == pytest.approx(chances.between(low, high), abs=1e-9)


def test_growth_odds_integral_matches_numeric_integration() -> None:
    chances = GrowthDistribution(60.0, (1.5, 2.0, 4.0), (0.4, 0.2, 0.1), 0.0)
    grid = np.linspace(0.5, 5.0, 450_001)
    heights = np.interp(grid, [1.0, 1.5, 2.0, 4.0], [1.0, 0.4, 0.2, 0.1], left=1.0, right=0.0)
    assert chances.between(0.5, 5.0) == pytest.approx(heights.mean() * 4.5, rel=1e-4)


def test_standby_replicas_increase_with_startup_time() -> None:
    state = constant(6.0, 450)
    counts = [
        standby_replicas(growth_distribution(state, horizon_s), forecast_of(state).baseline, 0.96, 1, 8)
        for horizon_s in (10.0, 60.0, 120.0, 240.0, 600.0)
    ]
    assert counts == sorted(counts)
    assert (counts[0], counts[3]) == (0, 1)
    worths = [standby_cost_benefit(growth_distribution(state, h), 0.48, 0.96, 1) for h in (60.0, 120.0, 240.0, 600.0)]
    ratios = [worth.saving_gpu_s / worth.cost_gpu_s for worth in worths]
    assert ratios == sorted(ratios)


def test_standby_from_prior_ends_after_two_constant_hours() -> None:
    state = constant(6.0, 7200, tick_s=5.0)
    assert standby_replicas(growth_distribution(state, 240.0), forecast_of(state).baseline, 0.96, 1, 8) == 0


def test_standby_after_level_shift_is_zero() -> None:
    rates = np.concatenate([np.full(450, 6.0), np.full(300, 36.0)])
    state = demand_after(demand(rates, 1.0, seed=1))
    assert forecast_of(state).level > 5 * forecast_of(state).baseline
    assert standby_replicas(growth_distribution(state, 240.0), forecast_of(state).baseline, 0.96, 3, 8) == 0


def test_forecast_memory_fills_and_resets_on_level_shift() -> None:
    steady = forecast_of(constant(6.0, 900)).memory_fill
    assert steady == pytest.approx(-math.expm1(-900 / 1800), rel=0.01)
    assert forecast_of(constant(6.0, 4 * 3600, tick_s=5.0)).memory_fill == pytest.approx(1.0, abs=0.01)
    shifted = forecast_of(demand_after(demand(np.concatenate([np.full(900, 6.0), np.full(60, 36.0)]), 1.0, seed=1)))
    assert shifted.memory_fill == pytest.approx(60 / 1800, rel=0.15)


def test_standby_value_needs_observed_level_shifts() -> None:
    rates = np.full(6 * 720, 5.0)
    for start in range(300, len(rates), 240):
        rates[start : start + 36] = 20.0
    leaping = growth_distribution(demand_after(demand(rates, 5.0, seed=6), 5.0), 120.0)
    assert standby_cost_benefit(leaping, 0.4, 0.8, 1).pays_off
    assert not standby_cost_benefit(
        growth_distribution(constant(5.0, 6 * 3600, tick_s=5.0), 120.0), 0.4, 0.8, 1
    ).pays_off


@given(st.floats(0.0, 50.0), st.floats(0.1, 5.0), st.integers(0, 20), st.floats(0.0, 200.0))
def test_standby_value_rises_with_miss_cost_falls_with_count(
    work: float, replica_work: float, replicas: int, miss_cost: float
) -> None:
    chances = growth_distribution(DemandState(), 120.0)
    here = standby_cost_benefit(chances, work, replica_work, replicas, miss_cost)
    assert here.saving_gpu_s <= standby_cost_benefit(chances, work, replica_work, replicas, miss_cost + 1).saving_gpu_s
    further = standby_cost_benefit(chances, work, replica_work, replicas + 1, miss_cost).saving_gpu_s
    assert further <= here.saving_gpu_s * (1 + 1e-6) + 1e-6


# Storing


def test_demand_state_json_round_trip_is_exact() -> None:
    works = demand(np.full(3 * 1440, 4.0), 60.0, seed=3)
    state = demand_after(works, 60.0)
    state = observe(state, 3 * 86400.0 + 4000.0, 0.3, rate_per_s=4.0, tokens_per_s=900.0)  # after a gap
    again = from_dict(json.loads(json.dumps(to_dict(state), allow_nan=False)))
    assert to_dict(again) == to_dict(state)
    assert forecast_of(again, 240.0) == forecast_of(state, 240.0)
    assert forecast_of(again).rate_per_s == 4.0


def test_demand_state_size_is_bounded() -> None:
    state = demand_after(demand(np.full(8 * 1440, 4.0), 60.0, 3), 60.0)  # every half hour of the week seen
    assert len(json.dumps(to_dict(state))) < 20_000


def test_forecast_without_samples_is_unavailable() -> None:
    assert forecast(DemandState(), 0.0, 60.0, 0.95) == Unavailable("no sample yet")


@given(st.integers(0, 1000), st.floats(0.2, 5.0))
@settings(max_examples=6)
def test_rescale_state_equals_state_of_scaled_load(seed: int, factor: float) -> None:
    rates = np.concatenate([np.full(1900, 5.0), np.full(200, 15.0), np.full(1900, 8.0)])
    works = demand(rates, 1.0, seed)
    there, here = demand_after(works * factor), rescale(demand_after(works), factor)
    assert_near(to_dict(there), to_dict(here))
    for kept in ("lowest", "highest"):  # which are not stored
        assert getattr(there.closed_growth, kept) == pytest.approx(getattr(here.closed_growth, kept))


def assert_near(one: object, other: object) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_near(one[key], other[key])
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_near(a, b)
    elif isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9, nan_ok=True)
    else:
        assert one == other


def test_rescale_state_moves_level_without_level_shift() -> None:
    state = constant(5.0, 900)
    longer = rescale(state, 1.5)
    assert longer.estimate.level == pytest.approx(1.5 * state.estimate.level)
    after = demand_after(1.5 * demand(np.full(60, 5.0), 1.0, 3), state=longer, start_s=900.0)
    assert after.level_shift_s == state.level_shift_s
