"""The ledger of start-up times: its law, its memory, what it says of pods that are starting, and its stored form."""

from __future__ import annotations

import json
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.autoscaling.startup_time import (
    MAX_PHASES,
    Backoff,
    Eta,
    Overdue,
    StartingPod,
    StartupModel,
    eta,
    extend_backoff,
    from_medians,
    record,
    record_restart,
    startup_prior,
)

GUESS = {"schedule": 1.0, "pull": 40.0, "load": 10.0, "compile": 15.0, "warmup": 4.0}  # 70 s


def model_after(*starts: float, guess: dict[str, float] | None = None) -> StartupModel:
    """A ledger after starts of one phase each."""
    ledger = from_medians(guess or {"start": 60.0})
    for seconds in starts:
        ledger = record(ledger, [("start", seconds)])
    return ledger


def total_s(ledger: StartupModel, share: float) -> float:
    return ledger.total.quantile_s(share)


def test_prior_is_bytes_over_bandwidth_plus_engine_time() -> None:
    small = startup_prior(10e9, 16e9, 16e9, 1e9, 2e9)
    medians = {name: quantiles.p50_s for name, quantiles in small.quantiles}
    assert medians["download"] == pytest.approx(16.0)
    assert medians["load"] == pytest.approx(8.0)
    assert medians["pull"] > 10.0
    assert medians["total"] == pytest.approx(sum(medians.values()) - medians["total"])
    large = startup_prior(10e9, 140e9, 140e9, 1e9, 2e9)
    assert total_s(large, 0.5) - total_s(small, 0.5) == pytest.approx(124.0 + 62.0)
    local = startup_prior(10e9, 0.0, 16e9, 1e9, 2e9)
    assert total_s(local, 0.5) == pytest.approx(total_s(small, 0.5) - 16.0)


def test_quantiles_cover_each_phase_and_the_total() -> None:
    eta_of = from_medians(GUESS).quantiles
    assert [name for name, _ in eta_of] == [*GUESS, "total"]
    for _, (p50_s, p90_s, p99_s) in eta_of:
        assert p50_s < p90_s < p99_s


def test_record_few_startups_override_wrong_guess() -> None:
    ledger = model_after(60.0, guess={"start": 175.0})
    assert total_s(ledger, 0.5) == pytest.approx(60.0, rel=0.1)
    assert total_s(model_after(60.0, 60.0, 60.0, guess={"start": 175.0}), 0.9) < 75.0


def test_record_learns_spread_of_startups() -> None:
    rng = np.random.default_rng(1)
    ledger = model_after(*(80.0 * np.exp(0.4 * rng.standard_normal(400))))
    for share in (0.5, 0.9):
        truth = 80.0 * math.exp(0.4 * NormalDist().inv_cdf(share))
        assert total_s(ledger, share) == pytest.approx(truth, rel=0.3)


def test_record_old_startups_decay() -> None:
    ledger = model_after(*(120.0,) * 40, *(60.0,) * 80)
    assert total_s(ledger, 0.5) == pytest.approx(60.0, rel=0.03)
    assert ledger.horizon_s < 75.0


def test_record_single_outlier_hardly_moves_median() -> None:
    calm = model_after(*(60.0,) * 20)
    assert total_s(record(calm, [("start", 5000.0)]), 0.5) < 1.06 * total_s(calm, 0.5)


def test_record_much_faster_start_is_believed_at_once() -> None:
    ledger = model_after(*(240.0,) * 20, 30.0)
    assert 30.0 < total_s(ledger, 0.5) < 60.0
    assert ledger.horizon_s < 75.0


def test_record_second_slow_start_in_a_row_is_believed() -> None:
    once = model_after(*(30.0,) * 20, 240.0)
    assert total_s(once, 0.5) < 35.0
    assert codec.decode(StartupModel, codec.encode(once)).slow_starts == 1
    twice = record(once, [("start", 240.0)])
    assert twice.slow_starts == 0
    assert total_s(twice, 0.5) > 120.0
    assert twice.overdue_s > 240.0


def test_record_slow_starts_between_usual_ones_are_outliers() -> None:
    ledger = model_after(*(30.0,) * 20, 5000.0, 30.0, 5000.0, 30.0)
    assert ledger.slow_starts == 0
    assert total_s(ledger, 0.5) < 36.0


def test_record_starts_of_two_kinds_widen_the_spread() -> None:
    """As of cached and pulled images by turns: neither kind becomes overdue or the only one that is expected."""
    ledger = model_after(*(240.0, 30.0) * 10)
    assert 50.0 < total_s(ledger, 0.5) < 150.0
    assert ledger.overdue_s > 240.0


def test_record_change_of_starts_keeps_restarts() -> None:
    usual = record_restart(model_after(*(240.0,) * 20), [("restart", 9.0)])
    assert record(usual, [("start", 30.0)]).restart == usual.restart


def test_horizon_is_p90_and_overdue_max_of_p99_and_twice_p50() -> None:
    sure = model_after(*(60.0,) * 20)
    assert sure.horizon_s == total_s(sure, 0.9)
    assert sure.overdue_s == 2.0 * total_s(sure, 0.5)
    unsure = from_medians({"start": 60.0})
    assert unsure.overdue_s == total_s(unsure, 0.99) > 2.0 * total_s(unsure, 0.5)


# Pods that are starting


def eta_of(ledger: StartupModel, pod: StartingPod, now_s: float) -> Eta:
    found = eta(ledger, pod, now_s)
    assert isinstance(found, Eta)
    return found


def test_eta_falls_with_each_phase_and_is_not_negative() -> None:
    ledger = from_medians(GUESS)
    etas = [
        eta_of(ledger, StartingPod("a", 0.0, phase, begun_s), begun_s)
        for phase, begun_s in (("schedule", 0.0), ("pull", 1.0), ("load", 41.0), ("compile", 51.0), ("warmup", 66.0))
    ]
    likely = [one.likely_s for one in etas]
    assert likely == sorted(likely, reverse=True)
    assert likely[0] == pytest.approx(70.0)
    assert likely[-1] == pytest.approx(4.0)
    assert all(one.likely_s >= 0.0 for one in etas)


def test_eta_long_running_phase_is_expected_to_continue() -> None:
    ledger = from_medians(GUESS)
    early = eta_of(ledger, StartingPod("a", 0.0, "pull", 1.0), 2.0)
    late = eta_of(ledger, StartingPod("a", 0.0, "pull", 1.0), 80.0)
    assert late.likely_s > 29.0  # what comes after the pull alone
    assert late.likely_s < early.likely_s


def test_eta_without_phase_uses_rest_of_total() -> None:
    ledger = from_medians(GUESS)
    for phase in (None, "unheard-of"):
        assert eta_of(ledger, StartingPod("a", 0.0, phase, 5.0), 0.0).likely_s == pytest.approx(70.0)
        assert 0.0 < eta_of(ledger, StartingPod("a", 0.0, phase, 5.0), 60.0).likely_s < 40.0


def test_eta_pod_created_in_future_has_just_begun() -> None:
    assert eta_of(from_medians(GUESS), StartingPod("a", 100.0), 50.0).likely_s == pytest.approx(70.0)


def test_eta_long_startup_is_overdue_in_any_phase() -> None:
    ledger = model_after(*(60.0,) * 20)
    assert isinstance(eta(ledger, StartingPod("a", 0.0), 0.99 * ledger.overdue_s), Eta)
    for phase in (None, "start"):
        assert eta(ledger, StartingPod("a", 0.0, phase), 200.0) == Overdue(200.0, ledger.overdue_s)


def test_eta_pod_on_silent_node_is_overdue_at_once() -> None:
    lost = StartingPod("a", 100.0, silent_node="n")
    assert eta(from_medians(GUESS), lost, 101.0) == Overdue(1.0, 0.0)


def test_eta_unschedulable_pod_is_not_overdue() -> None:
    ledger = from_medians(GUESS)
    assert eta_of(ledger, StartingPod("a", 0.0, unschedulable_reason="no room"), 1e5).likely_s == pytest.approx(70.0)


@given(elapsed=st.floats(0, 1000), later=st.floats(0, 100), seconds=st.floats(0.2, 500))
def test_eta_is_never_in_the_past(elapsed: float, later: float, seconds: float) -> None:
    ledger = model_after(seconds)
    for now_s in (elapsed, elapsed + later):
        found = eta(ledger, StartingPod("a", 0.0), now_s)
        assert isinstance(found, Overdue) or 0.0 <= found.likely_s < math.inf


# Restarts in the pod


RESTART = [("restart", 1.0), ("load", 5.0), ("compile", 6.0), ("warmup", 3.0)]  # 15 s, with what the first start cached


def test_unmeasured_restart_has_the_phases_of_a_container() -> None:
    restart = from_medians(GUESS).restart
    assert [name for name, _ in restart.phases] == ["restart", "load", "compile", "warmup"]
    assert restart.total.quantile_s(0.5) == pytest.approx(30.0)
    assert restart.restart == restart


def test_restart_is_learned_beside_the_starts() -> None:
    ledger = record(from_medians(GUESS), list(GUESS.items()))
    learned = record_restart(record_restart(ledger, RESTART), RESTART)
    assert (learned.phases, learned.total) == (ledger.phases, ledger.total)
    assert learned.restart.total.startups > 1.0
    assert learned.restart.total.quantile_s(0.5) == pytest.approx(15.0, rel=0.1)
    assert record(learned, list(GUESS.items())).restart == learned.restart
    assert codec.decode(StartupModel, codec.encode(ledger)).restart_total is None
    back = codec.decode(StartupModel, json.loads(json.dumps(codec.encode(learned))))
    assert back.restart.total.quantile_s(0.5) == pytest.approx(learned.restart.total.quantile_s(0.5), rel=1e-3)


def test_eta_of_restart_is_what_is_left_of_it() -> None:
    """The phases of a restart, or the rest of a whole one, while a new pod has all phases before it."""
    ledger = from_medians(GUESS)
    for _ in range(8):
        ledger = record_restart(record(ledger, list(GUESS.items())), RESTART)
    expected = {("restart", 100.0): 15.0, ("load", 101.0): 14.0, ("warmup", 112.0): 3.0}
    for (phase, since_s), left_s in expected.items():
        pod = StartingPod("a", 100.0, phase, since_s, restart_since_s=100.0)
        assert eta_of(ledger, pod, since_s).likely_s == pytest.approx(left_s, rel=0.1)
    mute = StartingPod("a", 90.0, "unheard-of", 101.0, restart_since_s=100.0)
    assert eta_of(ledger, mute, 100.0).likely_s == pytest.approx(15.0, rel=0.1)
    assert eta_of(ledger, StartingPod("b", 100.0), 100.0).likely_s == pytest.approx(70.0, rel=0.1)


def test_restart_is_overdue_after_the_limit_of_a_start() -> None:
    """Since the pod became unready: an engine that ends again and again begins each restart, but comes never."""
    ledger = record_restart(from_medians(GUESS), RESTART)
    late_s = ledger.overdue_s + 1.0
    pod = StartingPod("a", 0.0, "restart", late_s - 2.0, restart_since_s=late_s - 2.0)
    assert isinstance(eta(ledger, pod, late_s - 2.0), Eta)
    assert eta(ledger, pod, late_s) == Overdue(late_s, ledger.overdue_s)


# Phases


def test_record_replaces_guessed_phases_by_observed_order() -> None:
    ledger = record(from_medians(GUESS), [("schedule", 1.0), ("pull", 30.0), ("verify", 3.0), ("load", 9.0)])
    assert [name for name, _ in ledger.phases] == ["schedule", "pull", "verify", "load"]
    assert eta_of(ledger, StartingPod("a", 0.0, "verify", 31.0), 31.0).likely_s == pytest.approx(12.0, rel=0.1)


def test_record_skipped_phase_keeps_its_position() -> None:
    ledger = from_medians(GUESS)
    for took_s in ([("schedule", 1.0), ("pull", 30.0), ("load", 9.0)], [("schedule", 1.0), ("load", 9.0)]):
        ledger = record(ledger, took_s)
    assert [name for name, _ in ledger.phases] == ["schedule", "pull", "load"]


def test_record_many_phase_names_stays_bounded() -> None:
    ledger = from_medians(GUESS)
    for number in range(200):
        ledger = record(ledger, [(f"phase-{number}-{k}", 1.0 + k) for k in range(30)])
    assert len(ledger.phases) <= MAX_PHASES
    assert len(json.dumps(codec.encode(ledger))) < 1100
    assert total_s(ledger, 0.5) == pytest.approx(sum(1.0 + k for k in range(30)), rel=0.05)


# Stored


@given(st.lists(st.tuples(st.sampled_from(sorted(GUESS)), st.floats(0, 2000)), min_size=1, max_size=8))
def test_startup_model_round_trip_keeps_estimates(took_s: list[tuple[str, float]]) -> None:
    ledger = record(from_medians(GUESS), took_s)
    stored = json.loads(json.dumps(codec.encode(ledger)))
    back = codec.decode(StartupModel, stored)
    assert codec.encode(back) == stored
    assert back.horizon_s == pytest.approx(ledger.horizon_s, rel=1e-3)
    assert [name for name, _ in back.phases] == [name for name, _ in ledger.phases]


GOOD = codec.encode(record(from_medians(GUESS), [("pull", 30.0), ("load", 8.0)]))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        {},
        GOOD | {"version": 2},
        GOOD | {"phases": []},
        GOOD | {"phases": [["pull", 30.0, 1.0, 3.0, 0.0]] * 2},
        GOOD | {"phases": [["pull", 30.0, 1.0, 3.0, 0.0]] * 50},
        GOOD | {"phases": [[30.0, 1.0, 3.0, 0.0]]},
        GOOD | {"phases": ["pull"]},
        GOOD | {"total": None},
        GOOD | {"total": [60.0, 1.0, 4.0]},
        GOOD | {"total": [60.0, 1.0, math.nan, 0.0]},
        GOOD | {"total": [60.0, True, 4.0, 0.0]},
        GOOD | {"total": [60.0, 1.0, 4.0, -1.0]},
        GOOD | {"total": [0.0, 1.0, 4.0, 0.0]},
        GOOD | {"total": [60.0, 1e6, 4.0, 0.0]},
        GOOD | {"total": [60.0, 1.0, 400.0, 0.0]},
        GOOD | {"restart_total": [60.0, 1.0, 4.0, 0.0]},
        GOOD | {"restart_phases": [["load", 30.0, 1.0, 3.0, 0.0]]},
        GOOD | {"restart_phases": [["load", 30.0, 1.0, 3.0, 0.0]] * 2, "restart_total": [60.0, 1.0, 4.0, 0.0]},
        GOOD | {"restart_phases": 3, "restart_total": [60.0, 1.0, 4.0, 0.0]},
    ],
)
def test_from_dict_invalid_startup_model_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"start-up|phase|number"):
        codec.decode(StartupModel, bad)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_record_invalid_durations_raise(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        record(from_medians(GUESS), [("pull", seconds)])
    with pytest.raises(ValueError, match="finite"):
        from_medians({"pull": seconds})
    with pytest.raises(ValueError, match="image_bytes"):
        startup_prior(seconds, 0.0, 1e9, 1e9, 1e9)
    with pytest.raises(ValueError, match="disk_bytes_per_s"):
        startup_prior(1e9, 0.0, 1e9, 1e9, seconds)
    with pytest.raises(ValueError, match="phases"):
        record(from_medians(GUESS), [])


# Back-off


def test_backoff_doubles_up_to_half_an_hour() -> None:
    backoff, waits, now_s = Backoff(), [], 0.0
    for _ in range(40):
        backoff = extend_backoff(backoff, now_s)
        waits.append(backoff.until_s - now_s)
        assert extend_backoff(backoff, now_s + 0.5 * waits[-1]) == backoff
        now_s = backoff.until_s
    assert waits[:4] == [30.0, 60.0, 120.0, 240.0]
    assert max(waits) == waits[-1] == 1800.0


def test_backoff_after_clock_set_back_is_bounded() -> None:
    assert extend_backoff(Backoff(1, 1e9), 1000.0).until_s <= 1000.0 + 1800.0
