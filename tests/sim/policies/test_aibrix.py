"""`apa`, held against the figures of AIBrix's own tests and against what its code does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.aibrix import Apa, ApaRules, guard_recommendation, recommend
from tests.sim.policies import observations

THIRTY = ApaRules(target=30.0)


# As in vllm-project/aibrix, pkg/controller/podautoscaler/algorithm/apa_test.go.
@pytest.mark.parametrize(
    ("rules", "replicas", "value", "expected"),
    [
        (THIRTY, 2, 45.0, 3),
        (THIRTY, 2, 35.0, 3),
        (THIRTY, 2, 90.0, 4),
        (replace(THIRTY, max_up_rate=2.5), 2, 90.0, 5),
        (THIRTY, 6, 20.0, 4),
        (THIRTY, 6, 18.0, 4),
        (THIRTY, 6, 10.0, 3),
        (replace(THIRTY, max_down_rate=2.5), 6, 5.0, 2),
        (THIRTY, 2, 33.0, 2),
        (THIRTY, 2, 27.0, 2),
    ],
)
def test_apa_recommendation_matches_aibrix_figures(rules: ApaRules, replicas: int, value: float, expected: int) -> None:
    assert recommend(rules, value, replicas) == expected


@pytest.mark.parametrize(
    ("value", "replicas", "ready", "expected", "found"),
    [
        (60.0, 4, 2, 8, 4),  # half of them at twice the target: enough when the others are there
        (90.0, 4, 2, 8, 6),  # 4 * (90 / 2) / 30
        (60.0, 4, 4, 8, 8),
        (15.0, 4, 2, 2, 3),  # 4 * ((30 + 60) / 4) / 30
        (0.0, 4, 1, 2, 3),
        (30.0, 4, 1, 4, 4),
        (300.0, 4, 3, 8, 8),  # never above what was recommended
        (60.0, 4, 9, 8, 8),
    ],
)
def test_apa_guarded_counts_starting_replicas(
    value: float, replicas: int, ready: int, expected: int, found: int
) -> None:
    assert guard_recommendation(THIRTY, value, replicas, ready, expected) == found


def test_apa_metric_averages_engines_over_three_minutes() -> None:
    apa = Apa(ApaRules(target=0.5), (1, 20))
    assert apa.sync(0.0, [0.2, 0.8], 2, 2) == 2
    for step in range(1, 19):
        assert apa.sync(10.0 * step, [0.5, 0.5], 2, 2) == 2
    assert apa.sync(190.0, [1.0, 1.0], 2, 2) == 2  # 0.5 + 0.5 / 19 is within the tolerance
    assert apa.sync(200.0, [1.0, 1.0], 2, 2) == 3  # 0.5526 is not


def test_apa_cooldown_falls_to_window_minimum() -> None:
    """As it is written there: an old, low recommendation drags a small fall down with it."""
    rules = ApaRules(target=10.0, mean_window_s=5.0)
    apa = Apa(rules, (1, 20))
    assert apa.sync(0.0, [10.0], 1, 1) == 1
    assert apa.sync(10.0, [20.0], 1, 1) == 2
    assert apa.sync(20.0, [20.0], 2, 2) == 4
    assert apa.sync(30.0, [20.0], 4, 4) == 8
    assert apa.sync(40.0, [8.5], 8, 8) == 1  # 7 is recommended now, 1 was at the beginning
    without = Apa(replace(rules, down_window_s=0.0), (1, 20))
    assert without.sync(0.0, [10.0], 1, 1) == 1
    assert without.sync(40.0, [8.5], 8, 8) == 7


def test_apa_rise_window_takes_largest_recommendation() -> None:
    apa = Apa(ApaRules(target=10.0, mean_window_s=5.0, up_window_s=60.0), (1, 20))
    assert apa.sync(0.0, [20.0], 4, 4) == 8
    assert apa.sync(10.0, [12.0], 4, 4) == 8


def test_apa_out_of_bounds_or_no_metrics_clamps_and_holds() -> None:
    apa = Apa(ApaRules(), (2, 4))
    assert apa.sync(0.0, [], 3, 0) == 3
    assert apa.sync(10.0, [], 9, 0) == 4
    assert apa.sync(20.0, [], 0, 0) == 2
    assert apa.sync(30.0, [1.0] * 4, 4, 4) == 4
    assert Apa(ApaRules(down_window_s=0.0), (2, 4)).sync(0.0, [0.0] * 4, 4, 4) == 2


def test_apa_default_metric_is_kv_cache_share_of_one_half() -> None:
    full = [observations.engine_reading(name, kv=0.9) for name in "ab"]
    assert observations.policy("apa").desired_replicas(observations.observe_readings(0.0, 2, full)) == {Role.SERVE: 4}
    waiting = [observations.engine_reading(name, waiting=9.0, kv=0.0) for name in "ab"]
    assert observations.policy("apa:metric=waiting,target=6").desired_replicas(
        observations.observe_readings(0.0, 2, waiting)
    ) == {Role.SERVE: 3}
    assert observations.policy("apa:metric=running,target=6").desired_replicas(
        observations.observe_readings(0.0, 2, waiting)
    ) == {Role.SERVE: 1}


def test_apa_policy_polls_every_ten_seconds_and_skips_silent() -> None:
    policy = observations.policy("apa")
    readings = [observations.engine_reading("a", kv=None), observations.engine_reading("b", kv=0.7)]
    found = [policy.desired_replicas(observations.observe_readings(second, 2, readings)) for second in range(21)]
    assert [second for second, expected in enumerate(found) if expected] == [0, 10, 20]
    assert found[0] == {Role.SERVE: 3}


def test_apa_starting_replicas_ordered_again_unless_guarded() -> None:
    full = [observations.engine_reading("a", kv=0.8)]
    assert observations.policy("apa").desired_replicas(observations.observe_readings(0.0, 4, full, starting=3)) == {
        Role.SERVE: 7
    }
    assert observations.policy("apa:guard=1").desired_replicas(
        observations.observe_readings(0.0, 4, full, starting=3)
    ) == {Role.SERVE: 4}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("target=0", "above 0"),
        ("metric=ttft", "metric is kv or waiting or running"),
        ("up=1", "rates above 1"),
        ("guard=yes", "guard is 0 or 1"),
        ("cooldown=-5", "at least 0"),
        ("panic=2", "unknown panic"),
    ],
)
def test_apa_invalid_options_are_rejected(options: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        observations.policy(f"apa:{options}")
