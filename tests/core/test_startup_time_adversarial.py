"""The ledger of start-up times against pods that lie, hang, restart or never come, and against what hands have written.

Whatever it is fed: its times are finite, it can be stored and read back, and no pod that hangs passes for one that is
about to be there.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.autoscaling.startup_time import (
    Backoff,
    Eta,
    Overdue,
    PhaseEstimate,
    StartingPod,
    StartupModel,
    eta,
    extend_backoff,
    from_medians,
    record,
    startup_prior,
)

GUESS = {"schedule": 1.0, "pull": 40.0, "load": 10.0, "compile": 15.0, "warmup": 4.0}  # 70 s
DAY_S = 86_400.0


def model_after(starts: list[list[tuple[str, float]]]) -> StartupModel:
    model = from_medians(GUESS)
    for took_s in starts:
        model = record(model, took_s)
    return model


def assert_sound(model: StartupModel) -> None:
    """Finite times in order, and the same after a restart."""
    for _, (p50_s, p90_s, p99_s) in model.quantiles:
        assert 0.0 < p50_s < p90_s < p99_s < math.inf
    assert model.horizon_s <= model.overdue_s
    back = codec.decode(StartupModel, json.loads(json.dumps(codec.encode(model), allow_nan=False)))
    assert back.horizon_s == pytest.approx(model.horizon_s, rel=1e-3)


# What is fed


STARTS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from([*GUESS, "verify", "", "total"]),
            st.one_of(st.floats(0, 600), st.sampled_from([0.0, 5e-324, DAY_S, 1e9, 1e17, 1e308])),
        ),
        min_size=1,
        max_size=6,
    ),
    max_size=30,
)


@given(STARTS)
def test_startup_model_any_durations_stay_finite_and_storable(
    starts: list[list[tuple[str, float]]],
) -> None:
    assert_sound(model_after(starts))


@given(st.floats(1e-3, 1e12), st.floats(0, 1e15))
def test_prior_any_disk_bandwidth_is_storable(bytes_per_s: float, weights: float) -> None:
    assert_sound(startup_prior(1e10, 0.0, weights, 1e9, bytes_per_s))


def test_eta_instant_startups_is_small_but_positive() -> None:
    model = model_after([[("engine", 0.0)]] * 50)
    assert_sound(model)
    assert model.horizon_s < 1.0
    found = eta(model, StartingPod("a", 100.0), 100.0)
    assert isinstance(found, Eta)
    assert 0.0 < found.likely_s < 1.0
    assert isinstance(eta(model, StartingPod("a", 100.0), 102.0), Overdue)


def test_horizon_of_alternating_durations_is_between() -> None:
    model = model_after([[("engine", (0.0, DAY_S)[n % 2])] for n in range(200)])
    assert_sound(model)
    assert 0.1 <= model.total.quantile_s(0.5) <= DAY_S
    assert model.horizon_s < 100.0 * DAY_S


def test_record_repeated_phase_adds_durations() -> None:
    """As of a container that was started again."""
    model = model_after([[("pull", 10.0), ("load", 5.0), ("pull", 20.0), ("load", 15.0)]] * 30)
    medians = {name: times.p50_s for name, times in model.quantiles}
    assert list(medians) == ["pull", "load", "total"]
    assert medians["pull"] == pytest.approx(30.0, rel=0.05)
    assert medians["load"] == pytest.approx(20.0, rel=0.05)
    assert medians["total"] == pytest.approx(medians["pull"] + medians["load"], rel=0.05)


# Pods that hang


def remaining_s(learned: PhaseEstimate, elapsed_s: float, share: float) -> float:
    """What is left to one that has taken so long, by bisection in the law's tail: S(e + t) = (1 - share) S(e)."""
    law = learned.distribution

    def survival(at_s: float) -> float:
        return 0.5 * math.erfc((math.log(at_s) - law.mean) / law.stdev / math.sqrt(2.0))

    desired = (1.0 - share) * survival(elapsed_s)
    low, high = elapsed_s, 1e6 * elapsed_s
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if survival(middle) > desired else (low, middle)
    return low - elapsed_s


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("elapsed_s", [0.5, 3.0, 10.0, 60.0, 150.0, 400.0])
def test_remaining_time_matches_distribution_in_tail(elapsed_s: float, share: float) -> None:
    for learned in (PhaseEstimate(3.0), PhaseEstimate(10.0, 5.0, math.log(8.0), 0.2)):
        assert learned.remaining_s(elapsed_s, share) == pytest.approx(remaining_s(learned, elapsed_s, share), rel=1e-6)


def test_eta_pod_stuck_in_short_phase_increases() -> None:
    """It is not overdue yet, since all of its start may take so long; but what hangs for long goes on hanging."""
    model = from_medians(GUESS)
    likely = []
    for hangs_s in range(10, int(model.overdue_s) - 20, 10):
        found = eta(model, StartingPod("a", 0.0, "warmup", 20.0), 20.0 + hangs_s)
        assert isinstance(found, Eta)
        likely.append(found.likely_s)
    assert len(likely) > 10
    assert all(after > before for before, after in pairwise(likely))
    assert likely[-1] > 10.0


def test_eta_pod_that_never_starts_stays_overdue() -> None:
    model = model_after([[("pull", 30.0), ("load", 10.0)]] * 20)
    pod, was_late = StartingPod("a", 0.0, "pull", 1.0), False
    for now_s in (*range(600), 1e6, 1e12, math.inf):
        late = isinstance(eta(model, pod, now_s), Overdue)
        assert late or not was_late
        was_late = late
    assert was_late


@given(
    since_s=st.floats(-1e9, 1e9),
    phase_since_s=st.one_of(st.none(), st.floats(-1e9, 1e9)),
    now_s=st.one_of(st.floats(-1e9, 1e9), st.just(math.inf)),
    phase=st.sampled_from([*GUESS, None, "unheard-of"]),
)
def test_eta_any_clock_is_bounded_or_overdue(
    since_s: float, phase_since_s: float | None, now_s: float, phase: str | None
) -> None:
    """Nodes, API server and operator have a clock each, any of which may be set."""
    model = from_medians(GUESS)
    found = eta(model, StartingPod("a", since_s, phase, phase_since_s), now_s)
    if isinstance(found, Overdue):
        assert found.elapsed_s == now_s - since_s > found.limit_s == model.overdue_s
    else:
        assert 0.0 <= found.likely_s < math.inf


# The back-off


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=200))
def test_backoff_any_clock_ends_within_half_an_hour(passed_s: list[float]) -> None:
    backoff, now_s = Backoff(), 0.0
    for seconds in passed_s:
        now_s += seconds
        after = extend_backoff(backoff, now_s)
        assert now_s < after.until_s <= now_s + 1800.0
        assert backoff.tries <= after.tries <= 16
        backoff = after


def test_backoff_full_cluster_is_tried_about_50_times_a_day() -> None:
    backoff, requested = Backoff(), 0
    for second in range(int(DAY_S)):
        after = extend_backoff(backoff, float(second))
        requested += after != backoff
        backoff = after
    assert 40 <= requested <= 60


# What hands have written


def test_from_dict_impossible_statistics_raise() -> None:
    """The spread that they tell of would make the horizon a number that cannot be written."""
    good = codec.encode(from_medians(GUESS))
    rng = np.random.default_rng(1)
    for _ in range(2000):
        figures = [float(10.0 ** rng.uniform(-12, 9) * rng.choice([-1, 0, 1, 1])) for _ in range(4)]
        try:
            model = codec.decode(StartupModel, good | {"total": figures})
        except ValueError:
            continue
        assert_sound(model)
    with pytest.raises(ValueError, match="start-up statistics"):
        codec.decode(StartupModel, good | {"total": [60.0, 1.0, 4.0, 9.9e8]})
