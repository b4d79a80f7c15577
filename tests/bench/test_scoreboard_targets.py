"""How the scoreboard judges: means over seeds, and what a row asks of Plimsoll."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scoreboard import judge, reach
from bench.scoreboard.rows import RAISED, ROWS, Reach
from tests.bench.scores import MANY, NO_TICKETS, a_board, a_run, a_score, reached, seeds_of, tickets

STEP = ROWS["step-60"]
CONSTANT = replace(STEP, reach=Reach(reversals=1, above_least=0.2))
GOOD = {"windows": {"n": 100, "passed": 99}}


def test_mean_has_student_t_interval() -> None:
    found = judge.mean([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert judge.mean([0.5]) == (0.5, None)


def test_checks_offered_admitted_and_gpu_hours() -> None:
    good = a_score("plimsoll", 0.96, 1.2)
    dear = a_score("follower", 1.0, 2.0)
    assert all(reached(reach.checks(STEP, good, [good, dear, *MANY], nominal=True)).values())
    worse = a_score("plimsoll", 0.94, 1.4, attainment_admitted=0.98)
    found = reached(reach.checks(STEP, worse, [worse, dear, *MANY], nominal=True))
    assert [name for name, passed in found.items() if not passed] == ["offered", "admitted", "GPU-hours"]


def test_checks_fail_for_better_baseline_at_equal_cost_only() -> None:
    own = a_score("plimsoll", 0.96, 1.2)
    better, dearer = a_score("follower:margin=0.8", 0.975, 1.2), a_score("follower:margin=0.5", 1.0, 1.3)
    assert reached(reach.checks(STEP, own, [own, dearer, *MANY], nominal=True))["followers"]
    assert not reached(reach.checks(STEP, own, [own, better, dearer, *MANY], nominal=True))["followers"]


def test_checks_other_plant_compare_only_with_baselines() -> None:
    own, better = a_score("plimsoll", 0.70, 1.6), a_score("follower:margin=0.8", 0.73, 1.5)
    assert reached(reach.checks(STEP, own, [own], nominal=False)) == {"followers": False}, "nobody was played"
    few = [own, *MANY[:5]]
    assert reached(reach.checks(STEP, own, few, nominal=False)) == {"followers": False}, "too few to be a frontier"
    assert reached(reach.checks(STEP, own, [own, *MANY], nominal=False)) == {"followers": True}
    assert reached(reach.checks(STEP, own, [own, better, *MANY], nominal=False)) == {"followers": False}
    trace = replace(STEP, reach=Reach(windows=0.99, times_best=1.10))
    assert reached(reach.checks(trace, own, [own, *MANY], nominal=False)) == {"followers": True}
    assert reached(reach.checks(CONSTANT, own, [own], nominal=False))["reversals"]


def test_checks_cost_against_cheapest_equal_without_foresight() -> None:
    row = replace(STEP, reach=Reach(times_best=1.10))
    own, bad = a_score("plimsoll", 0.96, 1.2), a_score("follower:spare=0", 0.90, 0.8)
    knowing = a_score("clairvoyant:plan=0@1", 1.0, 0.7)
    others = [own, bad, knowing, a_score("plimsoll:missCost=80", 0.99, 0.9), *MANY]
    assert reached(reach.checks(row, own, others, nominal=True))["cost"]
    for word in ("follower:spare=1", "static:1", "hpa-queue"):
        assert not reached(reach.checks(row, own, [*others, a_score(word, 0.96, 1.0)], nominal=True))["cost"], word


def test_checks_trace_counts_passed_windows_as_equal() -> None:
    row = replace(STEP, reach=Reach(windows=0.99, times_best=1.10))
    own = a_score("plimsoll", 0.96, 1.2, windows={"n": 100, "passed": 100})
    bad = a_score("hpa-queue", 0.99, 0.7, windows={"n": 100, "passed": 98})
    assert reached(reach.checks(row, own, [own, bad, *MANY], nominal=True))["cost"]
    good = a_score("static:2", 0.94, 1.0, **GOOD)
    assert not reached(reach.checks(row, own, [own, bad, good, *MANY], nominal=True))["cost"]


def test_checks_constant_rate_against_least_static_fleet() -> None:
    two, one = a_score("static:2", 0.97, 12.0, **GOOD), a_score("static:1", 0.5, 6.0)
    for later, settled, asked in ((2.1, 2.0, (True, True)), (2.3, 2.0, (False, True)), (2.3, 2.3, (False, False))):
        own = a_score("plimsoll", 0.97, 12.0, board=a_board(later, settled=settled))
        found = reached(reach.checks(CONSTANT, own, [own, one, two], nominal=True))
        assert found.pop("reversals")
        assert tuple(found.values()) == asked
        assert list(found) == ["mean replicas over 2 after an hour", "mean replicas over 2 after two"]


def test_least_fleet_requires_failure_of_smaller_one() -> None:
    three, two, one = (a_score(f"static:{k}", 0.97, 6.0 * k, **GOOD) for k in (3, 2, 1))
    behind_a_gate = a_score("static:2,gated=1", 0.97, 12.0, **GOOD)
    bad = a_score("static:2", 0.5, 12.0)
    assert reach.least_fleet([three, behind_a_gate]) is None
    assert reach.least_fleet([three, bad, behind_a_gate]) == 3
    assert reach.least_fleet([three, two]) is None
    assert reach.least_fleet([three, two, one]) == 1
    own = a_score("plimsoll", 0.97, 12.0, board=a_board(2.0))
    nobody = reached(reach.checks(CONSTANT, own, [own, three], nominal=True))
    assert nobody["mean replicas over the least fleet"] is False


def test_checks_allow_one_replica_more_just_below_capacity() -> None:
    two, one = a_score("static:2", 0.97, 12.0, **GOOD), a_score("static:1", 0.5, 6.0)
    own = a_score("plimsoll", 0.97, 12.0, board=a_board(2.9))
    found = {
        boundary: reached(reach.checks(CONSTANT, own, [own, one, two], nominal=True, boundary=boundary))
        for boundary in (False, True)
    }
    assert not found[False]["mean replicas over 2 after an hour"]
    assert found[True]["mean replicas over 2 after an hour"]


def test_raised_row_has_five_percent_more_load() -> None:
    row, raised = ROWS["constant-4-poisson"], RAISED["constant-4-poisson"]
    assert raised.load == replace(row.load, rate=4.2)
    assert raised.name not in ROWS


def test_checks_baseline_is_compared_on_same_seeds() -> None:
    """Plimsoll's first seed was a good one, in which the follower was less good, and all others cost more."""
    own = seeds_of("plimsoll", (0.98, 1.0), (0.90, 1.4), (0.90, 1.4))
    once = seeds_of("follower:margin=0.8", (0.96, 1.0))
    found = reached(reach.checks(STEP, own, [own, once, *MANY], nominal=True))
    assert found["followers"], "by the means of all seeds it would be 3 points better"
    thrice = seeds_of("follower:margin=0.8", (0.96, 1.0), (0.96, 1.3), (0.96, 1.3))
    assert not reached(reach.checks(STEP, own, [own, thrice, *MANY], nominal=True))["followers"]
    elsewhere = judge.score("follower:margin=0.8", [a_run(1.0, 0.5, seed=9)])
    assert reach.best_rival(own, [elsewhere], 1.0) is None, "no seed in common"


def test_checks_cheapest_is_compared_on_same_seeds() -> None:
    own = seeds_of("plimsoll", (0.96, 1.0), (0.96, 1.6))
    once = seeds_of("follower:spare=1", (0.97, 1.0))
    best = reach.cheapest_rival(STEP, own, [once])
    assert best is not None
    assert best.own.gpu_hours == best.its.gpu_hours


def test_checks_rejecting_large_requests_is_detected() -> None:
    own = a_score("plimsoll", 0.96, 1.2, shed_work_ratio=1.3)
    assert not reached(reach.checks(STEP, own, [own], nominal=True))["work of what was shed"]


def test_checks_reservations_are_summed_over_seeds() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0), a_run(0.9, 1.0)])
    assert own.tickets == (20, 18, 16, 14, 8, 6)
    found = reached(reach.checks(row, own, [own], nominal=True))
    assert found == {
        "refusals that carry a ticket": True,
        "in at the first retry, to 60 s": False,
        "in by the second, 60 to 120 s": False,
    }


def test_checks_late_reservations_may_take_two_retries() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=tickets(given=10, soon=(6, 6, 0), later=(4, 1, 3)))])
    assert all(reached(reach.checks(row, own, [own], nominal=True)).values())


def test_checks_rejections_form_at_most_one_wave() -> None:
    row = replace(STEP, reach=Reach(), clients="ignore")
    for shed, waves in (((0, 0, 0), 0), ((0, 9, 4, 0), 1), ((9, 0, 4, 0), 2)):
        own = judge.score("plimsoll", [a_run(0.9, 1.0), a_run(0.9, 1.0, board=a_board(shed=shed))])
        assert own.waves == waves
        assert reached(reach.checks(row, own, [own], nominal=True)) == {"waves of refusals": waves <= 1}
        assert not reach.checks(replace(row, clients="none"), own, [own], nominal=True)


def test_checks_reservation_row_without_any_fails() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=NO_TICKETS)])
    assert reached(reach.checks(row, own, [own], nominal=True)) == {"refusals that carry a ticket": False}


def test_checks_reservations_are_required_without_honouring() -> None:
    row = replace(STEP, reach=Reach(tickets=0.95))
    for given, refused, passed in ((9, 10, True), (8, 10, False), (0, 0, False)):
        told = {**tickets(given, (0, 0, 0), (0, 0, 0)), "refused": refused}
        own = judge.score("plimsoll", [a_run(0.9, 1.0, tickets=told)])
        assert reached(reach.checks(row, own, [own], nominal=True)) == {"refusals that carry a ticket": passed}
