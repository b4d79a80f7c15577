"""What must not fool the forecast: gaps, zeros, clocks, foreign states, means in place of maxima, lone requests."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.forecast import (
    Forecast,
    RiskControl,
    State,
    Unknown,
    forecast,
    from_dict,
    observe,
    odds,
    risk,
    spare_replicas,
    spare_worth,
    to_dict,
)

LOST = Unknown("no answer")


def steady(
    seconds: int, work: float = 2.0, tick_s: float = 1.0, state: State | None = None, start_s: float = 0.0
) -> State:
    """Work that scatters by a few percent around a level."""
    rng = np.random.default_rng(11)
    state = state or State()
    for number in range(1, int(seconds / tick_s) + 1):
        state = observe(state, start_s + number * tick_s, work * float(rng.gamma(200.0) / 200.0))
    return state


def told(state: State, now_s: float, horizon_s: float = 60.0, quantile: float = 0.95) -> Forecast:
    found = forecast(state, now_s, horizon_s, quantile)
    assert isinstance(found, Forecast)
    return found


# Missing samples


@pytest.mark.parametrize("lost", [LOST, math.nan, -1.0, math.inf, -math.inf], ids=str)
def test_a_lost_sample_is_not_a_zero(lost: float | Unknown) -> None:
    state = steady(600)
    before = told(state, 600.0)
    for second in range(601, 661):
        state = observe(state, float(second), lost)
    after = told(state, 660.0)
    assert after.level == before.level
    assert after.age_s == 60.0
    state = steady(60, state=state, start_s=660.0)
    assert told(state, 720.0).work == pytest.approx(before.work, rel=0.03)


def test_every_second_sample_lost_changes_nothing() -> None:
    rng = np.random.default_rng(2)
    whole, holed = State(), State()
    for second in range(1, 1800):
        work = 2.0 * float(rng.gamma(200.0) / 200.0)
        whole = observe(whole, float(second), work)
        holed = observe(holed, float(second), work if second % 2 else LOST)
    assert told(holed, 1800.0).work == pytest.approx(told(whole, 1800.0).work, rel=0.02)


def test_a_gap_without_calls_is_not_a_zero_and_not_growth() -> None:
    state = steady(600)
    state = steady(600, state=state, start_s=1000.0)
    assert told(state, 1600.0).level == pytest.approx(2.0, rel=0.03)
    assert told(state, 1600.0).burst == 0.0


def test_metrics_that_vanish_in_a_burst_do_not_bring_the_forecast_down() -> None:
    state = steady(120, work=8.0, state=steady(600), start_s=600.0)
    for second in range(720, 1020):
        state = observe(state, float(second), LOST)
    assert told(state, 1020.0).work >= 8.0
    gone = forecast(state, 720.0 + 601.0, 60.0, 0.95)
    assert isinstance(gone, Unknown)
    assert "old" in gone.why


def test_only_lost_samples_are_nothing_to_say() -> None:
    state = State()
    for second in range(100):
        state = observe(state, float(second), math.nan)
    assert isinstance(forecast(state, 100.0, 60.0, 0.95), Unknown)


def test_a_window_is_not_filled_with_zeros_beforehand() -> None:
    state = observe(State(), 1.0, 3.0)
    assert told(state, 1.0).level == 3.0
    assert told(observe(state, 2.0, 3.0), 2.0).level == pytest.approx(3.0)


def test_the_first_sample_tells_of_no_growth() -> None:
    state = steady(300)
    found = told(state, 300.0, 600.0, 0.999)
    assert (found.trend, found.burst) == (0.0, 0.0)


# Zeros


def test_idle_load_forecasts_zero_and_divides_by_nothing() -> None:
    state = State()
    for second in range(1, 4000):
        state = observe(state, float(second), 0.0)
    found = told(state, 4000.0, 600.0, 0.999)
    assert (found.work, found.level, found.burst) == (0.0, 0.0, 0.0)
    assert spare_replicas(odds(state, 600.0), found.ordinary, 1.0, 0, 8) == 0
    assert not spare_worth(odds(state, 600.0), found.ordinary, 1.0, 0).worth


def test_load_that_ends_goes_to_zero_and_stays_there() -> None:
    state, answers = steady(1800), []
    for second in range(1801, 5400):
        state = observe(state, float(second), 0.0)
        answers.append(told(state, float(second)).work)
    assert answers[120] < 0.2
    assert answers[-1] == 0.0
    assert all(after <= before + 1e-12 for before, after in pairwise(answers[60:]))


def test_load_from_zero_is_seen_at_once() -> None:
    state = State()
    for second in range(1, 600):
        state = observe(state, float(second), 0.0)
    state = observe(state, 600.0, 4.0)
    assert told(state, 600.0).work >= 4.0
    assert told(state, 600.0).changed_s_ago == 0.0


def test_a_lone_request_does_not_hold_the_level_up() -> None:
    state = observe(State(), 1.0, 0.0)
    state = observe(state, 2.0, 0.1)
    for second in range(3, 300):
        state = observe(state, float(second), 0.0)
    assert told(state, 300.0).work < 0.002
    for second in range(300, 4000, 5):
        state = observe(state, float(second), 0.0)
    assert told(state, 4000.0, 10.0).work == 0.0


def test_sparse_requests_do_not_flap() -> None:
    rng, state, changes = np.random.default_rng(3), State(), set()
    for second in range(1, 6 * 3600, 5):
        state = observe(state, float(second), 0.02 * int(rng.poisson(0.05)))
        changes.add(state.changed_s)
    assert len(changes) <= 6
    assert told(state, 6 * 3600.0).level == pytest.approx(0.001, rel=0.6)


# Maxima and means


def test_the_maximum_of_the_horizon_is_told_and_not_its_mean() -> None:
    state, tick_s = State(), 5.0
    works = np.full(6 * 720, 1.0)
    for start in range(100, len(works), 120):
        works[start : start + 12] = 5.0  # one minute of every ten
    for number, work in enumerate(works.tolist(), start=1):
        state = observe(state, number * tick_s, work)
    found = told(state, len(works) * tick_s, 600.0, 0.9)
    assert works.mean() == pytest.approx(1.4, rel=0.05)
    assert found.work > 3.0


def test_means_over_long_ticks_count_as_their_time() -> None:
    """One long tick and many short ones are the same evidence about the level."""
    fine, coarse = State(), State()
    for second in range(1, 1201):
        fine = observe(fine, float(second), 1.0 if second <= 600 else 1.05)
    for second in range(15, 1201, 15):
        coarse = observe(coarse, float(second), 1.0 if second <= 600 else 1.05)
    assert told(coarse, 1200.0).level == pytest.approx(told(fine, 1200.0).level, rel=0.02)


def test_irregular_ticks_weigh_by_their_time() -> None:
    rng, state, now_s = np.random.default_rng(4), State(), 0.0
    for _ in range(2000):
        span_s = float(rng.choice([0.2, 1.0, 5.0, 14.0]))
        now_s += span_s
        state = observe(state, now_s, 0.1 * int(rng.poisson(20.0 * span_s)) / span_s)
    assert told(state, now_s).level == pytest.approx(2.0, rel=0.03)


def test_one_burst_in_half_an_hour_is_not_yet_a_percentile() -> None:
    state = steady(180, work=10.0, state=steady(900), start_s=900.0)
    state = steady(720, state=state, start_s=1080.0)
    assert told(state, 1800.0, 120.0, 0.95).burst == 0.0


def test_one_huge_request_is_no_change_of_the_rate() -> None:
    rng, state = np.random.default_rng(5), State()
    for second in range(1, 901):
        state = observe(state, float(second), 0.08 * int(rng.poisson(6.0)))
    before = told(state, 900.0)
    hit = observe(state, 901.0, 0.48 + 4.0)
    assert hit.changed_s == state.changed_s
    assert told(hit, 901.0).work < 1.15 * before.work


def test_a_level_that_is_new_carries_little_doubt() -> None:
    state = observe(steady(600), 601.0, 20.0)
    state = observe(state, 602.0, 20.0)
    assert told(state, 602.0, 60.0, 0.999).doubt <= 0.1 * told(state, 602.0).level + 1e-12


# Clocks


def test_a_sample_twice_or_out_of_order_counts_once() -> None:
    state = steady(300)
    assert observe(state, 300.0, 50.0) is state
    assert observe(state, 299.0, 50.0) is state


def test_a_clock_set_back_does_not_stop_the_forecast() -> None:
    state = steady(1800, start_s=100_000.0)
    level = told(state, 101_800.0).level
    back = steady(600, state=state, start_s=5_000.0)
    assert told(back, 5_600.0).level == pytest.approx(level, rel=0.05)
    assert told(back, 5_600.0).age_s == 0.0


def test_a_clock_set_forward_is_a_gap() -> None:
    state = steady(600, state=steady(900), start_s=1e7)
    assert told(state, 1e7 + 600.0).level == pytest.approx(2.0, rel=0.03)


def test_a_forecast_before_the_last_sample_has_no_negative_age() -> None:
    assert told(steady(60), 50.0).age_s == 0.0


@pytest.mark.parametrize("now_s", [math.nan, math.inf])
def test_times_that_are_none_are_refused(now_s: float) -> None:
    with pytest.raises(ValueError, match="time"):
        observe(State(), now_s, 1.0)
    with pytest.raises(ValueError, match="no forecast"):
        forecast(State(), now_s, 60.0, 0.95)


@pytest.mark.parametrize(
    ("horizon_s", "quantile"), [(-1.0, 0.5), (math.nan, 0.5), (60.0, 0.0), (60.0, 1.0), (60.0, math.nan)]
)
def test_arguments_out_of_range_are_refused(horizon_s: float, quantile: float) -> None:
    with pytest.raises(ValueError, match="no forecast"):
        forecast(State(), 0.0, horizon_s, quantile)


def test_refused_arguments_of_control_and_spare() -> None:
    for budget in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="budget"):
            risk.begin(budget)
    for loss in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="loss"):
            risk.feed(risk.begin(0.05), loss)
    with pytest.raises(ValueError, match="score"):
        RiskControl(0.05, 9.0)
    with pytest.raises(ValueError, match="budget"):
        RiskControl(0.0, 1.0)
    with pytest.raises(ValueError, match="horizon"):
        odds(State(), math.inf)
    for arguments in ((-1.0, 1.0, 1, 1.0), (1.0, 0.0, 1, 1.0), (1.0, 1.0, -1, 1.0), (1.0, 1.0, 1, math.nan)):
        with pytest.raises(ValueError, match="worth"):
            spare_worth(odds(State(), 60.0), *arguments)


def test_control_says_when_more_quantile_is_no_help() -> None:
    control = risk.begin(0.05)
    for _ in range(20):
        control = risk.feed(control, 1.0)
    assert control.exhausted
    assert control.quantile == risk.MOST
    assert not risk.feed(control, 0.0).exhausted  # no wind-up: it comes down at once


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
        {"explained": [math.nan, None]},
        {"explained": 3},
    ],
    ids=str,
)
def test_a_foreign_state_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a forecast's state"):
        from_dict(GOOD | change)


def test_a_state_from_before_differences_were_held_is_read() -> None:
    older = GOOD | {"tests": GOOD["tests"][:3], "noise": GOOD["noise"][:4]}
    assert from_dict(older) == from_dict(GOOD)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_state_with_a_part_missing_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a forecast's state"):
        from_dict({name: part for name, part in GOOD.items() if name != key})


def test_what_is_no_mapping_is_refused() -> None:
    for foreign in ([], None, "state", 3):
        with pytest.raises(ValueError, match="not a forecast's state"):
            from_dict(foreign)  # type: ignore[arg-type]


def test_the_empty_state_can_be_stored() -> None:
    assert to_dict(from_dict(json.loads(json.dumps(to_dict(State()))))) == to_dict(State())


SAMPLES = st.lists(
    st.tuples(st.floats(-100.0, 4000.0), st.one_of(st.just(math.nan), st.just(0.0), st.floats(0.0, 1e6))), max_size=60
)


@given(SAMPLES, st.floats(0.0, 1e5), st.floats(0.001, 0.999))
@settings(max_examples=150)
def test_whatever_comes_the_answer_is_a_finite_number_or_unknown(
    samples: list[tuple[float, float]], horizon_s: float, quantile: float
) -> None:
    state, now_s = State(), 0.0
    for passed_s, work in samples:
        now_s += passed_s
        state = observe(state, now_s, work)
        found = forecast(state, now_s, horizon_s, quantile)
        if isinstance(found, Unknown):
            continue
        assert all(math.isfinite(amount) and amount >= 0.0 for _, amount in found.parts)
        assert found.work >= found.level
        assert 0.0 <= found.history < 1.0
    assert to_dict(from_dict(json.loads(json.dumps(to_dict(state), allow_nan=False)))) == to_dict(state)
