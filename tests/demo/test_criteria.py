"""Each criterion fails where what it forbids happened, and only there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from e2e.demo import figures as f
from e2e.demo.criteria import Criterion, Facts, assess
from e2e.demo.reactive_baseline import Pair, Setting
from e2e.demo.records import ReplicaSample, RequestLine
from tests.demo.demo_records import make_request, make_sample, make_shed

ONE = Setting(0.7, 0, 0, 15, None)
FACTS = Facts(f.Targets(1.0, 0.05), {"decode": 4, "prefill": 4}, 300.0, f.TimeSpan(200, 300), (f.TimeSpan(150, 160),))
GOOD = [make_request(t) for t in range(300)]
MOVES = [
    *(make_sample(t, n, n) for t, n in ((0, 1), (50, 2), (220, 1))),
    *(make_sample(t, n, n, tier="prefill") for t, n in ((0, 1), (90, 2), (250, 1))),
]


def failing(
    requests: Sequence[RequestLine], replicas: Sequence[ReplicaSample] = MOVES, best: Pair | None = None
) -> list[int]:
    """Places of the criteria that do not hold."""
    found: list[Criterion] = assess(requests, replicas, FACTS, best)
    assert all(one.found for one in found)
    return [place for place, one in enumerate(found) if not one.holds]


def changed(*rows: RequestLine) -> list[RequestLine]:
    """The good run with these rows in the places of those sent at the same time."""
    moments = {row.sent_s for row in rows}
    return sorted([row for row in GOOD if row.sent_s not in moments] + list(rows), key=lambda row: row.sent_s)


def test_criteria_good_run_passes() -> None:
    assert failing(GOOD) == []
    assert failing(GOOD, best=Pair(ONE, ONE, 1.0, 100.0)) == []


def test_criteria_late_responses_fail_admitted_attainment() -> None:
    assert failing(changed(*(make_request(t, ttft_s=2.0) for t in range(10)))) == [0]


@pytest.mark.parametrize(("late", "fails"), [(5, []), (7, [1])])
def test_criteria_baseline_may_be_two_points_better(late: int, fails: list[int]) -> None:
    rows = changed(*(make_request(t, ttft_s=2.0) for t in range(late)))
    assert failing(rows, best=Pair(ONE, ONE, 1.0, 1.0)) == fails


def test_criteria_rejections_require_starting_capacity() -> None:
    rows = changed(*(make_shed(t) for t in range(100, 104)))
    assert failing(rows) == [2]
    starts = [*MOVES, make_sample(98, 3, 2, 1), make_sample(110, 2, 2)]
    assert failing(rows, starts) == []
    assert failing(changed(*(make_shed(t) for t in (100, 101, 102)))) == []


def test_criteria_reversals_under_constant_load_fail() -> None:
    assert failing(GOOD, [*MOVES, make_sample(260, 2, 2)]) == [3]


def test_criteria_tiers_moving_only_together_fail() -> None:
    together = [
        make_sample(t, n, n, tier=tier) for tier in ("decode", "prefill") for t, n in ((0, 1), (50, 2), (220, 1))
    ]
    assert failing(GOOD, together) == [4]
    assert failing(GOOD, [*together, make_sample(150, 3, 3)]) == []


def test_criteria_tier_that_never_moves_fails() -> None:
    assert failing(
        GOOD, [*MOVES[:3], make_sample(0, 1, 1, tier="prefill"), make_sample(250, 1, 1, tier="prefill")]
    ) == [4]


def test_criteria_broken_stream_without_kill_fails() -> None:
    assert failing(changed(make_request(155, ended_s=156.0, outcome="cut"))) == []
    assert failing(changed(make_request(222, ended_s=223.0, outcome="cut"))) == [5]
