"""How the scoreboard judges: means over seeds, and what a row asks of Plimsoll."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scoreboard import scoring, target_checks
from bench.scoreboard.rows import BOARD_ROWS, RAISED_ROWS, RowTargets
from tests.bench.score_builders import (
    MANY_FOLLOWERS,
    NO_RETRY_AFTER,
    failed_checks,
    make_board_figures,
    make_run,
    make_score,
    retry_after_counts,
    seeds_of,
)

STEP = BOARD_ROWS["step-60"]
CONSTANT = replace(STEP, targets=RowTargets(reversals=1, max_extra_replicas=0.2))
GOOD = {"windows": {"n": 100, "passed": 99}}


def test_mean_has_student_t_interval() -> None:
    found = scoring.mean_with_error([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half_width == pytest.approx(4.303 / 3**0.5)
    assert scoring.mean_with_error([0.5]) == (0.5, None)


def test_checks_offered_admitted_and_gpu_hours() -> None:
    good = make_score("plimsoll", 0.96, 1.2)
    dear = make_score("follower", 1.0, 2.0)
    assert all(
        failed_checks(target_checks.check_targets(STEP, good, [good, dear, *MANY_FOLLOWERS], nominal=True)).values()
    )
    worse = make_score("plimsoll", 0.94, 1.4, attainment_admitted=0.98)
    found = failed_checks(target_checks.check_targets(STEP, worse, [worse, dear, *MANY_FOLLOWERS], nominal=True))
    assert [name for name, passed in found.items() if not passed] == ["offered", "admitted", "GPU-hours"]


def test_checks_fail_for_better_baseline_at_equal_cost_only() -> None:
    own = make_score("plimsoll", 0.96, 1.2)
    better, dearer = make_score("follower:margin=0.8", 0.975, 1.2), make_score("follower:margin=0.5", 1.0, 1.3)
    assert failed_checks(target_checks.check_targets(STEP, own, [own, dearer, *MANY_FOLLOWERS], nominal=True))[
        "followers"
    ]
    assert not failed_checks(
        target_checks.check_targets(STEP, own, [own, better, dearer, *MANY_FOLLOWERS], nominal=True)
    )["followers"]


def test_checks_other_plant_compare_only_with_baselines() -> None:
    own, better = make_score("plimsoll", 0.70, 1.6), make_score("follower:margin=0.8", 0.73, 1.5)
    assert failed_checks(target_checks.check_targets(STEP, own, [own], nominal=False)) == {"followers": False}, (
        "nobody was played"
    )
    few = [own, *MANY_FOLLOWERS[:5]]
    assert failed_checks(target_checks.check_targets(STEP, own, few, nominal=False)) == {"followers": False}, (
        "too few to be a frontier"
    )
    assert failed_checks(target_checks.check_targets(STEP, own, [own, *MANY_FOLLOWERS], nominal=False)) == {
        "followers": True
    }
    assert failed_checks(target_checks.check_targets(STEP, own, [own, better, *MANY_FOLLOWERS], nominal=False)) == {
        "followers": False
    }
    trace = replace(STEP, targets=RowTargets(windows=0.99, max_cost_ratio=1.10))
    assert failed_checks(target_checks.check_targets(trace, own, [own, *MANY_FOLLOWERS], nominal=False)) == {
        "followers": True
    }
    assert failed_checks(target_checks.check_targets(CONSTANT, own, [own], nominal=False))["reversals"]


def test_checks_cost_against_cheapest_equal_without_foresight() -> None:
    row = replace(STEP, targets=RowTargets(max_cost_ratio=1.10))
    own, bad = make_score("plimsoll", 0.96, 1.2), make_score("follower:spare=0", 0.90, 0.8)
    knowing = make_score("clairvoyant:plan=0@1", 1.0, 0.7)
    others = [own, bad, knowing, make_score("plimsoll:sloMissCost=80", 0.99, 0.9), *MANY_FOLLOWERS]
    assert failed_checks(target_checks.check_targets(row, own, others, nominal=True))["cost"]
    for word in ("follower:spare=1", "static:1", "hpa-queue"):
        assert not failed_checks(
            target_checks.check_targets(row, own, [*others, make_score(word, 0.96, 1.0)], nominal=True)
        )["cost"], word


def test_checks_trace_counts_passed_windows_as_equal() -> None:
    row = replace(STEP, targets=RowTargets(windows=0.99, max_cost_ratio=1.10))
    own = make_score("plimsoll", 0.96, 1.2, windows={"n": 100, "passed": 100})
    bad = make_score("hpa-queue", 0.99, 0.7, windows={"n": 100, "passed": 98})
    assert failed_checks(target_checks.check_targets(row, own, [own, bad, *MANY_FOLLOWERS], nominal=True))["cost"]
    good = make_score("static:2", 0.94, 1.0, **GOOD)
    assert not failed_checks(target_checks.check_targets(row, own, [own, bad, good, *MANY_FOLLOWERS], nominal=True))[
        "cost"
    ]


def test_checks_constant_rate_against_least_static_fleet() -> None:
    two, one = make_score("static:2", 0.97, 12.0, **GOOD), make_score("static:1", 0.5, 6.0)
    for later, settled, requested in ((2.1, 2.0, (True, True)), (2.3, 2.0, (False, True)), (2.3, 2.3, (False, False))):
        own = make_score("plimsoll", 0.97, 12.0, board=make_board_figures(later, settled=settled))
        found = failed_checks(target_checks.check_targets(CONSTANT, own, [own, one, two], nominal=True))
        assert found.pop("reversals")
        assert tuple(found.values()) == requested
        assert list(found) == ["mean replicas over 2 after an hour", "mean replicas over 2 after two"]


def test_least_fleet_requires_failure_of_smaller_one() -> None:
    three, two, one = (make_score(f"static:{k}", 0.97, 6.0 * k, **GOOD) for k in (3, 2, 1))
    behind_a_gate = make_score("static:2,gated=1", 0.97, 12.0, **GOOD)
    bad = make_score("static:2", 0.5, 12.0)
    assert target_checks.min_constant_fleet([three, behind_a_gate]) is None
    assert target_checks.min_constant_fleet([three, bad, behind_a_gate]) == 3
    assert target_checks.min_constant_fleet([three, two]) is None
    assert target_checks.min_constant_fleet([three, two, one]) == 1
    own = make_score("plimsoll", 0.97, 12.0, board=make_board_figures(2.0))
    failed = failed_checks(target_checks.check_targets(CONSTANT, own, [own, three], nominal=True))
    assert failed["mean replicas over the least fleet"] is False


def test_checks_allow_one_replica_more_just_below_capacity() -> None:
    two, one = make_score("static:2", 0.97, 12.0, **GOOD), make_score("static:1", 0.5, 6.0)
    own = make_score("plimsoll", 0.97, 12.0, board=make_board_figures(2.9))
    found = {
        boundary: failed_checks(
            target_checks.check_targets(CONSTANT, own, [own, one, two], nominal=True, boundary=boundary)
        )
        for boundary in (False, True)
    }
    assert not found[False]["mean replicas over 2 after an hour"]
    assert found[True]["mean replicas over 2 after an hour"]


def test_raised_row_has_five_percent_more_load() -> None:
    row, raised = BOARD_ROWS["constant-4-poisson"], RAISED_ROWS["constant-4-poisson"]
    assert raised.load == replace(row.load, rate=4.2)
    assert raised.name not in BOARD_ROWS


def test_checks_baseline_is_compared_on_same_seeds() -> None:
    """Plimsoll's first seed was a good one, in which the follower was less good, and all others cost more."""
    own = seeds_of("plimsoll", (0.98, 1.0), (0.90, 1.4), (0.90, 1.4))
    once = seeds_of("follower:margin=0.8", (0.96, 1.0))
    found = failed_checks(target_checks.check_targets(STEP, own, [own, once, *MANY_FOLLOWERS], nominal=True))
    assert found["followers"], "by the means of all seeds it would be 3 points better"
    thrice = seeds_of("follower:margin=0.8", (0.96, 1.0), (0.96, 1.3), (0.96, 1.3))
    assert not failed_checks(target_checks.check_targets(STEP, own, [own, thrice, *MANY_FOLLOWERS], nominal=True))[
        "followers"
    ]
    elsewhere = scoring.score_policy("follower:margin=0.8", [make_run(1.0, 0.5, seed=9)])
    assert target_checks.best_follower(own, [elsewhere], 1.0) is None, "no seed in common"


def test_checks_cheapest_is_compared_on_same_seeds() -> None:
    own = seeds_of("plimsoll", (0.96, 1.0), (0.96, 1.6))
    once = seeds_of("follower:spare=1", (0.97, 1.0))
    best = target_checks.cheapest_equivalent(STEP, own, [once])
    assert best is not None
    assert best.own.gpu_hours == best.other.gpu_hours


def test_checks_rejecting_large_requests_is_detected() -> None:
    own = make_score("plimsoll", 0.96, 1.2, shed_work_ratio=1.3)
    assert not failed_checks(target_checks.check_targets(STEP, own, [own], nominal=True))["work of what was shed"]


def test_checks_reservations_are_summed_over_seeds() -> None:
    row = replace(STEP, targets=RowTargets(honoured_retry_after=0.95))
    own = scoring.score_policy("plimsoll", [make_run(0.9, 1.0), make_run(0.9, 1.0)])
    assert own.retry_reservations == (20, 18, 16, 14, 8, 6)
    found = failed_checks(target_checks.check_targets(row, own, [own], nominal=True))
    assert found == {
        "rejections with a retry reservation": True,
        "in at the first retry, to 60 s": False,
        "in by the second, 60 to 120 s": False,
    }


def test_checks_late_reservations_may_take_two_retries() -> None:
    row = replace(STEP, targets=RowTargets(honoured_retry_after=0.95))
    reported = retry_after_counts(given=10, within_60_s=(6, 6, 0), within_120_s=(4, 1, 3))
    own = scoring.score_policy("plimsoll", [make_run(0.9, 1.0, retry_reservations=reported)])
    assert all(failed_checks(target_checks.check_targets(row, own, [own], nominal=True)).values())


def test_checks_rejections_form_at_most_one_wave() -> None:
    row = replace(STEP, targets=RowTargets(), clients="ignore")
    for shed, waves in (((0, 0, 0), 0), ((0, 9, 4, 0), 1), ((9, 0, 4, 0), 2)):
        own = scoring.score_policy(
            "plimsoll", [make_run(0.9, 1.0), make_run(0.9, 1.0, board=make_board_figures(shed=shed))]
        )
        assert own.waves == waves
        assert failed_checks(target_checks.check_targets(row, own, [own], nominal=True)) == {
            "waves of refusals": waves <= 1
        }
        assert not target_checks.check_targets(replace(row, clients="none"), own, [own], nominal=True)


def test_checks_reservation_row_without_any_fails() -> None:
    row = replace(STEP, targets=RowTargets(honoured_retry_after=0.95))
    own = scoring.score_policy("plimsoll", [make_run(0.9, 1.0, retry_reservations=NO_RETRY_AFTER)])
    assert failed_checks(target_checks.check_targets(row, own, [own], nominal=True)) == {
        "rejections with a retry reservation": False
    }


def test_checks_reservations_are_required_without_honouring() -> None:
    row = replace(STEP, targets=RowTargets(honoured_retry_after=0.95))
    for given, refused, passed in ((9, 10, True), (8, 10, False), (0, 0, False)):
        reported = {**retry_after_counts(given, (0, 0, 0), (0, 0, 0)), "refused": refused}
        own = scoring.score_policy("plimsoll", [make_run(0.9, 1.0, retry_reservations=reported)])
        assert failed_checks(target_checks.check_targets(row, own, [own], nominal=True)) == {
            "rejections with a retry reservation": passed
        }
