"""What must not fool the forecast: gaps, zeros, clocks, foreign states, means in place of maxima, lone requests."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.forecasting import Forecast, forecast
from plimsoll.core.demand.serialization import from_dict, to_dict
from plimsoll.core.demand.standby_value import growth_distribution, standby_cost_benefit, standby_replicas
from plimsoll.core.types import Unavailable

MISSING_SAMPLE = Unavailable("no answer")


def steady(
    seconds: int, work: float = 2.0, tick_s: float = 1.0, state: DemandState | None = None, start_s: float = 0.0
) -> DemandState:
    """Work that scatters by a few percent around a level."""
    rng = np.random.default_rng(11)
    state = state or DemandState()
    for number in range(1, int(seconds / tick_s) + 1):
        state = observe(state, start_s + number * tick_s, work * float(rng.gamma(200.0) / 200.0))
    return state


def forecast_of(state: DemandState, now_s: float, horizon_s: float = 60.0, quantile: float = 0.95) -> Forecast:
    found = forecast(state, now_s, horizon_s, quantile)
    assert isinstance(found, Forecast)
    return found


# Missing samples


@pytest.mark.parametrize("lost", [MISSING_SAMPLE, math.nan, -1.0, math.inf, -math.inf], ids=str)
def test_observe_missing_sample_is_not_zero(lost: float | Unavailable) -> None:
    state = steady(600)
    before = forecast_of(state, 600.0)
    for second in range(601, 661):
        state = observe(state, float(second), lost)
    after = forecast_of(state, 660.0)
    assert after.level == before.level
    assert after.age_s == 60.0
    state = steady(60, state=state, start_s=660.0)
    assert forecast_of(state, 720.0).work == pytest.approx(before.work, rel=0.03)


def test_observe_half_of_samples_missing_keeps_forecast() -> None:
    rng = np.random.default_rng(2)
    whole, holed = DemandState(), DemandState()
    for second in range(1, 1800):
        work = 2.0 * float(rng.gamma(200.0) / 200.0)
        whole = observe(whole, float(second), work)
        holed = observe(holed, float(second), work if second % 2 else MISSING_SAMPLE)
    assert forecast_of(holed, 1800.0).work == pytest.approx(forecast_of(whole, 1800.0).work, rel=0.02)


def test_observe_gap_is_neither_zero_nor_growth() -> None:
    state = steady(600)
    state = steady(600, state=state, start_s=1000.0)
    assert forecast_of(state, 1600.0).level == pytest.approx(2.0, rel=0.03)
    assert forecast_of(state, 1600.0).burst == 0.0


def test_forecast_missing_metrics_in_burst_does_not_drop() -> None:
    state = steady(120, work=8.0, state=steady(600), start_s=600.0)
    for second in range(720, 1020):
        state = observe(state, float(second), MISSING_SAMPLE)
    assert forecast_of(state, 1020.0).work >= 8.0
    gone = forecast(state, 720.0 + 601.0, 60.0, 0.95)
    assert isinstance(gone, Unavailable)
    assert "old" in gone.reason


def test_forecast_only_missing_samples_is_unavailable() -> None:
    state = DemandState()
    for second in range(100):
        state = observe(state, float(second), math.nan)
    assert isinstance(forecast(state, 100.0, 60.0, 0.95), Unavailable)


def test_observe_first_sample_sets_level() -> None:
    state = observe(DemandState(), 1.0, 3.0)
    assert forecast_of(state, 1.0).level == 3.0
    assert forecast_of(observe(state, 2.0, 3.0), 2.0).level == pytest.approx(3.0)


def test_forecast_first_sample_has_no_growth() -> None:
    state = steady(300)
    found = forecast_of(state, 300.0, 600.0, 0.999)
    assert (found.trend, found.burst) == (0.0, 0.0)


# Zeros


def test_forecast_idle_load_is_zero() -> None:
    state = DemandState()
    for second in range(1, 4000):
        state = observe(state, float(second), 0.0)
    found = forecast_of(state, 4000.0, 600.0, 0.999)
    assert (found.work, found.level, found.burst) == (0.0, 0.0, 0.0)
    assert standby_replicas(growth_distribution(state, 600.0), found.baseline, 1.0, 0, 8) == 0
    assert not standby_cost_benefit(growth_distribution(state, 600.0), found.baseline, 1.0, 0).pays_off


def test_forecast_after_load_ends_decays_to_zero() -> None:
    state, answers = steady(1800), []
    for second in range(1801, 5400):
        state = observe(state, float(second), 0.0)
        answers.append(forecast_of(state, float(second)).work)
    assert answers[120] < 0.2
    assert answers[-1] == 0.0
    assert all(after <= before + 1e-12 for before, after in pairwise(answers[60:]))


def test_forecast_load_from_zero_rises_at_once() -> None:
    state = DemandState()
    for second in range(1, 600):
        state = observe(state, float(second), 0.0)
    state = observe(state, 600.0, 4.0)
    assert forecast_of(state, 600.0).work >= 4.0
    assert forecast_of(state, 600.0).level_shift_age_s == 0.0


def test_forecast_single_request_decays() -> None:
    state = observe(DemandState(), 1.0, 0.0)
    state = observe(state, 2.0, 0.1)
    for second in range(3, 300):
        state = observe(state, float(second), 0.0)
    assert forecast_of(state, 300.0).work < 0.002
    for second in range(300, 4000, 5):
        state = observe(state, float(second), 0.0)
    assert forecast_of(state, 4000.0, 10.0).work == 0.0


def test_observe_sparse_requests_rarely_shift_level() -> None:
    rng, state, changes = np.random.default_rng(3), DemandState(), set()
    for second in range(1, 6 * 3600, 5):
        state = observe(state, float(second), 0.02 * int(rng.poisson(0.05)))
        changes.add(state.level_shift_s)
    assert len(changes) <= 6
    assert forecast_of(state, 6 * 3600.0).level == pytest.approx(0.001, rel=0.6)


# Maxima and means


def test_forecast_uses_maximum_over_horizon_not_mean() -> None:
    state, tick_s = DemandState(), 5.0
    works = np.full(6 * 720, 1.0)
    for start in range(100, len(works), 120):
        works[start : start + 12] = 5.0  # one minute of every ten
    for number, work in enumerate(works.tolist(), start=1):
        state = observe(state, number * tick_s, work)
    found = forecast_of(state, len(works) * tick_s, 600.0, 0.9)
    assert works.mean() == pytest.approx(1.4, rel=0.05)
    assert found.work > 3.0


def test_observe_long_tick_equals_many_short_ticks() -> None:
    """One long tick and many short ones are the same evidence about the level."""
    fine, coarse = DemandState(), DemandState()
    for second in range(1, 1201):
        fine = observe(fine, float(second), 1.0 if second <= 600 else 1.05)
    for second in range(15, 1201, 15):
        coarse = observe(coarse, float(second), 1.0 if second <= 600 else 1.05)
    assert forecast_of(coarse, 1200.0).level == pytest.approx(forecast_of(fine, 1200.0).level, rel=0.02)


def test_observe_irregular_ticks_are_weighted_by_time() -> None:
    rng, state, now_s = np.random.default_rng(4), DemandState(), 0.0
    for _ in range(2000):
        span_s = float(rng.choice([0.2, 1.0, 5.0, 14.0]))
        now_s += span_s
        state = observe(state, now_s, 0.1 * int(rng.poisson(20.0 * span_s)) / span_s)
    assert forecast_of(state, now_s).level == pytest.approx(2.0, rel=0.03)


def test_forecast_single_burst_does_not_reach_quantile() -> None:
    state = steady(180, work=10.0, state=steady(900), start_s=900.0)
    state = steady(720, state=state, start_s=1080.0)
    assert forecast_of(state, 1800.0, 120.0, 0.95).burst == 0.0


def test_observe_single_huge_request_is_no_level_shift() -> None:
    rng, state = np.random.default_rng(5), DemandState()
    for second in range(1, 901):
        state = observe(state, float(second), 0.08 * int(rng.poisson(6.0)))
    before = forecast_of(state, 900.0)
    hit = observe(state, 901.0, 0.48 + 4.0)
    assert hit.level_shift_s == state.level_shift_s
    assert forecast_of(hit, 901.0).work < 1.15 * before.work


def test_forecast_new_level_has_little_uncertainty() -> None:
    state = observe(steady(600), 601.0, 20.0)
    state = observe(state, 602.0, 20.0)
    found = forecast(state, 602.0, 60.0, 0.999, retries_due=True)
    assert isinstance(found, Forecast)
    assert 0.0 < found.uncertainty <= 0.1 * found.level + 1e-12


# Clocks


def test_observe_repeated_or_old_sample_is_ignored() -> None:
    state = steady(300)
    assert observe(state, 300.0, 50.0) is state
    assert observe(state, 299.0, 50.0) is state


def test_observe_clock_set_back_continues() -> None:
    state = steady(1800, start_s=100_000.0)
    level = forecast_of(state, 101_800.0).level
    back = steady(600, state=state, start_s=5_000.0)
    assert forecast_of(back, 5_600.0).level == pytest.approx(level, rel=0.05)
    assert forecast_of(back, 5_600.0).age_s == 0.0


def test_observe_clock_set_forward_is_a_gap() -> None:
    state = steady(600, state=steady(900), start_s=1e7)
    assert forecast_of(state, 1e7 + 600.0).level == pytest.approx(2.0, rel=0.03)


def test_forecast_before_last_sample_has_zero_age() -> None:
    assert forecast_of(steady(60), 50.0).age_s == 0.0


@pytest.mark.parametrize("now_s", [math.nan, math.inf])
def test_observe_and_forecast_invalid_time_raises(now_s: float) -> None:
    with pytest.raises(ValueError, match="time"):
        observe(DemandState(), now_s, 1.0)
    with pytest.raises(ValueError, match="no forecast"):
        forecast(DemandState(), now_s, 60.0, 0.95)


@pytest.mark.parametrize(
    ("horizon_s", "quantile"), [(-1.0, 0.5), (math.nan, 0.5), (60.0, 0.0), (60.0, 1.0), (60.0, math.nan)]
)
def test_forecast_arguments_out_of_range_raise(horizon_s: float, quantile: float) -> None:
    with pytest.raises(ValueError, match="no forecast"):
        forecast(DemandState(), 0.0, horizon_s, quantile)


def test_standby_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match="horizon"):
        growth_distribution(DemandState(), math.inf)
    for arguments in ((-1.0, 1.0, 1, 1.0), (1.0, 0.0, 1, 1.0), (1.0, 1.0, -1, 1.0), (1.0, 1.0, 1, math.nan)):
        with pytest.raises(ValueError, match="worth"):
            standby_cost_benefit(growth_distribution(DemandState(), 60.0), *arguments)


# Foreign states


GOOD = to_dict(steady(200))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"times": [1.0, 2.0]},
        {"times": ["1", 2.0, None]},
        {"mean": [1.0]},
        {"mean": [1.0, None]},
        {"mean": "ab"},
        {"mean": [-1.0, 0.0]},
        {"lines": [[0.0] * 8]},
        {"lines": None},
        {"tests": [[0.0] * 3] * 2},
        {"tests": [[0.0] * 3] * 5},
        {"noise": [[0.0] * 5, [0.0] * 5, 0.0]},
        {"noise": [[0.0] * 5, [0.0] * 4, 0.0, 0.0]},
        {"noise": [[0.0] * 5, [0.0] * 5, 0.0, 0.0, [0.0] * 2]},
        {"noise": [[0.0] * 5, [0.0] * 5, 0.0, 0.0, [0.0] * 3, 0.0]},
        {"growth": [0, 0.0, 0.0, [[0.0, 0.0, 0.0]] * 99, [0.0] * 4, [[0.0] * 11] * 4]},
        {"growth": [0, 0.0, 0.0, [], [0.0] * 4, [[0.0] * 9] * 4]},
        {"growth": [0, 0.0, 0.0, [], [0.0] * 3, [[0.0] * 11] * 4]},
        {"season": [0, 0.0, 0.0, None, [[], 0, 0.0, 0.0], [[1.0], 0, 0.0, 0.0]]},
        {"season": [0, 0.0, True, None, [[], 0, 0.0, 0.0], [[], 0, 0.0, 0.0]]},
        {"annotations": [math.nan, None]},
        {"annotations": 3},
    ],
    ids=str,
)
def test_from_dict_invalid_state_raises(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a forecast's state"):
        from_dict(GOOD | change)


def test_from_dict_older_state_is_accepted() -> None:
    older = GOOD | {"tests": GOOD["tests"][:3], "noise": GOOD["noise"][:4]}
    assert from_dict(older) == from_dict(GOOD)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_from_dict_missing_part_raises(key: str) -> None:
    with pytest.raises(ValueError, match="not a forecast's state"):
        from_dict({name: part for name, part in GOOD.items() if name != key})


def test_from_dict_non_mapping_raises() -> None:
    for foreign in ([], None, "state", 3):
        with pytest.raises(ValueError, match="not a forecast's state"):
            from_dict(foreign)  # type: ignore[arg-type]


def test_empty_state_round_trip_is_identity() -> None:
    assert to_dict(from_dict(json.loads(json.dumps(to_dict(DemandState()))))) == to_dict(DemandState())


SAMPLES = st.lists(
    st.tuples(st.floats(-100.0, 4000.0), st.one_of(st.just(math.nan), st.just(0.0), st.floats(0.0, 1e6))), max_size=60
)


@given(SAMPLES, st.floats(0.0, 1e5), st.floats(0.001, 0.999))
@settings(max_examples=150)
def test_forecast_any_samples_is_finite_or_unavailable(
    samples: list[tuple[float, float]], horizon_s: float, quantile: float
) -> None:
    state, now_s = DemandState(), 0.0
    for passed_s, work in samples:
        now_s += passed_s
        state = observe(state, now_s, work)
        found = forecast(state, now_s, horizon_s, quantile)
        if isinstance(found, Unavailable):
            continue
        assert all(math.isfinite(amount) and amount >= 0.0 for _, amount in found.parts)
        assert found.work >= found.level
        assert 0.0 <= found.own_history_share < 1.0
    assert to_dict(from_dict(json.loads(json.dumps(to_dict(state), allow_nan=False)))) == to_dict(state)
