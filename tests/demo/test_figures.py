"""Figures of runs that were made by hand."""

from __future__ import annotations

import pytest

from e2e.demo import figures as f
from tests.demo.demo_records import make_request, make_sample, make_shed

TARGETS = f.Targets(ttft_s=1.0, tpot_s=0.05)


@pytest.mark.parametrize(
    ("more", "met"),
    [
        ({}, True),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 1.01}, False),
        ({"tpot_s": 0.051}, False),
        ({"tpot_s": None}, True),
        ({"ttft_s": None}, False),
        ({"outcome": "cut"}, False),
        ({"outcome": "timeout"}, False),
        ({"outcome": "refused", "status": 400}, False),
    ],
)
def test_targets_met_requires_ttft_tpot_and_success(more: dict[str, object], met: bool) -> None:
    assert TARGETS.met(make_request(**more)) is met  # type: ignore[arg-type]


def test_targets_ttft_allowance_grows_with_prompt() -> None:
    targets = f.Targets(1.0, 0.05, ttft_per_k_token_s=0.5)
    assert targets.met(make_request(prompt_tokens=2000, ttft_s=2.0))
    assert not targets.met(make_request(prompt_tokens=1999, ttft_s=2.0))


def test_attainment_rejections_lower_only_offered_share() -> None:
    counted = f.attainment(
        [make_request(), make_request(ttft_s=9.0), make_shed(1), make_shed(2), make_request(outcome="cut")], TARGETS
    )
    assert (counted.offered, counted.admitted, counted.met, counted.shed, counted.broken) == (5, 3, 1, 2, 1)
    assert counted.of_offered == pytest.approx(1 / 5)
    assert counted.of_admitted == pytest.approx(1 / 3)


def test_goodput_counts_only_requests_within_slo() -> None:
    assert f.goodput([make_request(), make_request(ttft_s=5.0), make_shed(1)], TARGETS, 10.0) == (0.1, 1.0)


def test_percentile_ignores_missing_values() -> None:
    values = [None, *map(float, range(1, 101))]
    assert (f.nearest_rank(values, 95), f.nearest_rank(values, 50), f.nearest_rank([None], 50)) == (95.0, 50.0, None)
    assert f.nearest_rank([7.0], 95) == 7.0


def test_replica_seconds_run_from_order_to_removal() -> None:
    looks = [
        make_sample(0, 1, 1),
        make_sample(10, 3, 1, 2),
        make_sample(30, 3, 3),
        make_sample(40, 1, 1, 0, 2),
        make_sample(45, 1, 1),
    ]
    assert f.replica_seconds(looks, 60) == {"decode": 10 * 1 + 20 * 3 + 10 * 3 + 5 * 3 + 15 * 1}
    assert f.replica_seconds([*looks, make_sample(0, 2, 2, tier="prefill")], 60)["prefill"] == 120
    assert f.replica_seconds(looks, 20) == {"decode": 10 + 30}


def test_changes_and_reversals_are_found() -> None:
    looks = [make_sample(t, n) for t, n in ((0, 1), (5, 3), (50, 3), (60, 2), (70, 4), (100, 3))]
    looks += [make_sample(t, n, tier="prefill") for t, n in ((0, 2), (58, 3), (90, 4))]
    found = f.replica_changes(looks)
    assert [(c.t_s, c.tier, c.before, c.after) for c in found][:2] == [(5, "decode", 1, 3), (58, "prefill", 2, 3)]
    assert [c.t_s for c in f.reversals(found, f.TimeSpan(0, 200))] == [60, 70, 100]
    assert [c.t_s for c in f.reversals(found, f.TimeSpan(55, 99))] == [70]
    assert f.reversals(found, f.TimeSpan(61, 99)) == []
    assert [c.t_s for c in f.isolated_changes(found, "prefill", 5)] == [90]
    assert [c.t_s for c in f.isolated_changes(found, "decode", 5)] == [5, 70, 100]


def test_excused_while_capacity_starts_or_is_at_maximum() -> None:
    looks = [
        make_sample(0),
        make_sample(20, 2, 1, 1),
        make_sample(40, 2, 2),
        make_sample(60, 3, 3),
        make_sample(80, 2, 2),
    ]
    spans = f.excused_spans(looks, {"decode": 3}, slack_s=5)
    assert [any(span.contains(t) for span in spans) for t in (10, 25, 44, 46, 70, 84, 86)] == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]


def test_worst_shed_share_excludes_excused_time() -> None:
    rows = [make_shed(t) if t in (30, 31, 70) else make_request(t) for t in range(100)]
    assert f.worst_shed_share(rows, [], 20, 10)[0] == pytest.approx(2 / 20)
    assert f.worst_shed_share(rows, [f.TimeSpan(25, 35)], 20, 10)[0] == pytest.approx(1 / 20)
    assert f.worst_shed_share(rows, [], 20, 50) == (0.0, 0.0)
    assert f.worst_shed_share([], [], 20, 1) == (0.0, 0.0)


def test_broken_by_scaling_excludes_streams_cut_by_a_kill() -> None:
    kill = f.TimeSpan(10, 15)
    before = make_request(1, ended_s=5.0, outcome="cut")
    through = make_request(8, ended_s=11.0, outcome="cut")
    after = make_request(20, ended_s=21.0, outcome="no_done")
    assert f.broken_by_scaling([before, through, after, make_request(9), make_shed(11)], [kill]) == [before, after]


def test_moments_look_back_over_their_window() -> None:
    rows = [make_request(t, ttft_s=0.1 * (1 + t)) for t in range(10)] + [make_shed(9.5)]
    first, last = f.window_series(rows, TARGETS, end_s=10, every_s=5, window_s=5)
    assert (first.t_s, first.offered_per_s, first.shed_share) == (5, 1.0, 0.0)
    assert last.offered_per_s == pytest.approx(6 / 5)
    assert last.shed_share == pytest.approx(1 / 6)
    assert last.ttft_s == pytest.approx(1.0)
    assert f.window_figures([], TARGETS, 5, 5).ttft_s is None
