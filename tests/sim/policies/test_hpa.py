"""Kubernetes' autoscaler, held against the figures of its own tests and against what its documents say."""

from __future__ import annotations

from itertools import pairwise

import pytest

from plimsoll.sim.policies.hpa import Hpa, HpaBehavior, HpaRateLimit, propose_from_pods, propose_from_total

BOUNDS = (1, 100)
STILL = HpaBehavior(up_window_s=0.0, down_window_s=0.0)


# Values, target, replicas and outcome as in the replica calculator's tests of metrics of pods (kubernetes/kubernetes,
# pkg/controller/podautoscaler), which has them in thousandths.
@pytest.mark.parametrize(
    ("values", "target", "current", "desired"),
    [
        ([20, 10, 30], 15, 3, 4),
        ([50, 10, 30], 15, 3, 6),
        ([50, 15, 30], 15, 3, 7),
        ([12, 12, 12, 12, 12], 20, 5, 3),
        ([20, 21, 21], 20, 3, 3),
        ([8.6], 4.4, 1, 2),
    ],
)
def test_by_pods_mean_matches_kubernetes_counts(values: list[float], target: float, current: int, desired: int) -> None:
    assert propose_from_pods(values, 0, target, current) == desired


@pytest.mark.parametrize(
    ("usage", "target", "current", "desired"),
    [(20, 5, 3, 4), (8.6, 2.15, 3, 4), (6, 2, 5, 3), (8.6, 2.867, 5, 3), (8.6, 2.9, 3, 3), (0, 1, 4, 0), (7, 1, 0, 7)],
)
def test_by_total_matches_kubernetes_counts(usage: float, target: float, current: int, desired: int) -> None:
    assert propose_from_total(usage, target, current) == desired


@pytest.mark.parametrize(
    ("values", "missing", "current", "desired"),
    [
        ([10], 1, 2, 2),  # at target: nothing to do, whatever the other one has
        ([19], 1, 2, 2),  # 1.9 with an idle one beside it is 0.95
        ([6], 1, 2, 2),  # 0.6 with one at target beside it is 0.8, of two 1.6
        ([30], 1, 2, 3),  # 1.5 of two
        ([30, 30], 6, 8, 8),  # 3 with six idle ones is 0.75: never the other direction
        ([0, 0, 0], 1, 4, 1),  # 0.25 of four
        ([0, 0], 6, 4, 4),  # 0.75 of eight would be 6: more than there are
        ([40, 40], 2, 6, 8),  # 2 of four, which is more than there are
    ],
)
def test_by_pods_missing_metrics_never_reverse_direction(
    values: list[float], missing: int, current: int, desired: int
) -> None:
    assert propose_from_pods(values, missing, 10.0, current) == desired


def test_by_pods_no_metric_proposes_nothing() -> None:
    assert propose_from_pods([], 3, 10.0, 3) is None
    assert Hpa(STILL, BOUNDS).sync(0.0, 3, None) == 3


def test_by_pods_tolerance_includes_both_edges() -> None:
    assert [propose_from_pods([value], 0, 10.0, 1) for value in (9.0, 11.0)] == [1, 1]
    assert propose_from_pods([11.001], 0, 10.0, 1) == 2
    assert propose_from_pods([8.999] * 10, 0, 10.0, 10) == 9
    assert propose_from_pods([10.5] * 4, 0, 10.0, 4, tolerance=0.0) == 5


def test_by_pods_mean_is_rounded_down_to_thousandths() -> None:
    """0.0019 and 0 mean 0.001 (2 // 2 thousandths), at a target of 0.001 exactly right."""
    assert propose_from_pods([0.0019, 0.0], 0, 0.001, 2) == 2


def test_hpa_scale_up_at_most_doubles_or_adds_four_per_period() -> None:
    hpa = Hpa(HpaBehavior(), BOUNDS)
    counts = [1]
    for step in range(5):
        counts.append(hpa.sync(15.0 * step, counts[-1], 90))
    assert counts == [1, 5, 10, 20, 40, 80]


def test_hpa_syncs_within_a_period_share_its_limit() -> None:
    hpa = Hpa(HpaBehavior(), BOUNDS)
    assert hpa.sync(0.0, 10, 14) == 14
    assert hpa.sync(5.0, 14, 90) == 20
    assert hpa.sync(10.0, 20, 90) == 20
    assert hpa.sync(15.0, 20, 90) == 28  # the first change has just left its period: it began with 14


def test_hpa_removed_replicas_count_against_added_ones() -> None:
    hpa = Hpa(HpaBehavior(0.0, 0.0, (HpaRateLimit(2.0, 60.0, percent=False),), (HpaRateLimit(100.0, 15.0),)), BOUNDS)
    assert hpa.sync(0.0, 10, 6) == 6
    assert hpa.sync(15.0, 6, 20) == 12  # ten at the period's start, and two


def test_hpa_scale_down_waits_for_stabilization_window() -> None:
    hpa, current, rates = Hpa(HpaBehavior(), BOUNDS), 8, {}
    for step in range(30):
        now_s = 15.0 * step
        current = hpa.sync(now_s, current, 8 if now_s == 0.0 else 2)
        rates[now_s] = current
    assert rates[285.0] == 8
    assert rates[300.0] == 2


def test_hpa_scale_down_goes_to_window_maximum() -> None:
    hpa, current, rates = Hpa(HpaBehavior(), BOUNDS), 8, {}
    for step in range(42):
        now_s = 15.0 * step
        current = hpa.sync(now_s, current, 5 if now_s == 150.0 else 2)
        rates[now_s] = current
    assert rates[300.0] == 5
    assert rates[435.0] == 5
    assert rates[450.0] == 2


def test_hpa_scale_up_window_takes_window_minimum() -> None:
    hpa = Hpa(HpaBehavior(up_window_s=30.0), BOUNDS)
    found = [hpa.sync(15.0 * step, 4, proposed) for step, proposed in enumerate((4, 9, 7, 8, 8))]
    assert found == [4, 4, 7, 7, 8]


def test_hpa_scale_down_one_per_two_minutes() -> None:
    rules = HpaBehavior(0.0, 0.0, down_limits=(HpaRateLimit(1.0, 120.0, percent=False),))
    hpa, counts = Hpa(rules, BOUNDS), [6]
    for step in range(25):
        counts.append(hpa.sync(15.0 * step, counts[-1], 1))
    falls = [step * 15 for step, (before, after) in enumerate(pairwise(counts)) if after < before]
    assert falls == [0, 120, 240, 360]
    assert counts[-1] == 2


def test_hpa_proposals_are_clamped_to_bounds() -> None:
    hpa = Hpa(STILL, (2, 8))
    assert hpa.sync(0.0, 4, 0) == 2
    assert hpa.sync(60.0, 8, 90) == 8
    assert hpa.sync(120.0, 12, 90) == 8
    assert hpa.sync(180.0, 0, None) == 2


def test_hpa_flapping_metric_never_scales_down() -> None:
    hpa, current, found = Hpa(HpaBehavior(), BOUNDS), 2, []
    for step in range(60):
        current = hpa.sync(15.0 * step, current, 12 if step % 2 else 2)
        found.append(current)
    assert all(after >= before for before, after in pairwise(found))
    assert current == 12
