"""`kpa`, held against the figures of Knative's own tests and against what its documents say."""

from __future__ import annotations

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Observation
from plimsoll.sim.policies.knative import Kpa, KpaRules, KpaWindow
from tests.sim.policies import observations

# As the autoscaler's tests set it up (knative/serving, pkg/autoscaler/scaling/autoscaler_test.go).
TEN = KpaRules(target=10.0, max_up_rate=10.0, max_down_rate=10.0)
ONE = KpaRules(target=1.0, max_up_rate=10.0, max_down_rate=10.0)


@pytest.mark.parametrize(
    ("rules", "ready", "stable", "panic", "desired"),
    [
        (TEN, 1, 0.0, 0.0, 0),
        (KpaRules(target=181.0, max_up_rate=10.0, max_down_rate=10.0), 1, 21.0, 26.0, 1),
        (TEN, 1, 50.0, 49.0, 5),
        (TEN, 5, 50.0, 50.0, 5),
        (KpaRules(target=1.0, max_up_rate=1.1, max_down_rate=10.0), 2, 3.0, 3.1, 3),
        (KpaRules(target=10.0, max_up_rate=10.0, max_down_rate=1.1), 100, 1.0, 1.0, 90),
        (TEN, 1, 50.0, 100.0, 10),
        (TEN, 0, 1000.0, 888.0, 10),
    ],
)
def test_kpa_single_decision_matches_knative_counts(
    rules: KpaRules, ready: int, stable: float, panic: float, desired: int
) -> None:
    assert Kpa(rules, 0.0, 0).scale(0.0, stable, panic, ready) == desired


@pytest.mark.parametrize(("stable", "panic", "desired"), [(50.0, 30.0, 50), (20.0, 30.0, 30)])
def test_kpa_panic_uses_larger_of_both_means(stable: float, panic: float, desired: int) -> None:
    assert Kpa(ONE, -5.0, 5).scale(0.0, stable, panic, 5) == desired


def test_kpa_panic_ends_one_stable_window_after_last_breach() -> None:
    kpa = Kpa(ONE, 0.0, 0)
    assert kpa.scale(0.0, 11.0, 25.0, 10) == 25
    assert kpa.panic_since_s == 0.0
    assert kpa.scale(30.0, 30.0, 41.0, 40) == 41
    assert kpa.panic_since_s == 0.0
    assert kpa.scale(62.0, 50.0, 56.0, 55) == 50
    assert kpa.panic_since_s is None


def test_kpa_further_breach_prolongs_panic() -> None:
    kpa = Kpa(ONE, 0.0, 0)
    kpa.scale(0.0, 11.0, 25.0, 10)
    assert kpa.scale(30.0, 30.0, 80.0, 40) == 80
    assert kpa.panic_since_s == 30.0


def test_kpa_panic_never_scales_down() -> None:
    kpa = Kpa(TEN, 0.0, 0)
    assert kpa.scale(0.0, 100.0, 100.0, 1) == 10
    assert kpa.scale(2.0, 100.0, 1000.0, 10) == 100
    assert kpa.scale(32.0, 1.0, 1.0, 10) == 100
    assert kpa.scale(63.0, 1.0, 1.0, 10) == 1


def test_kpa_multiplying_load_is_followed_stepwise() -> None:
    kpa, ready = Kpa(ONE, 0.0, 0), 1
    for second, load in enumerate((6.0, 36.0, 216.0, 1296.0)):
        ready = kpa.scale(float(second), load, load, ready)
        assert ready == load
    assert kpa.scale(5.0, 1296.0, 1296.0, ready) == 1296


def test_kpa_rate_limits_apply_in_both_directions() -> None:
    kpa = Kpa(TEN, 0.0, 0)
    assert [kpa.scale(0.0, 1000.0, 1001.0, ready) for ready in (1, 10)] == [10, 100]
    kpa = Kpa(TEN, 0.0, 0)
    assert [kpa.scale(0.0, 1.0, 1.0, ready) for ready in (100, 10)] == [10, 1]


def test_kpa_scale_down_delay_holds_largest_count() -> None:
    rules = KpaRules(target=10.0, max_up_rate=10.0, max_down_rate=10.0, panic_threshold=100.0, delay_s=300.0)
    kpa = Kpa(rules, 0.0, 0)
    rates = {2.0: 40.0, 300.0: 0.0, 302.0: 0.0, 540.0: 40.0, 600.0: 30.0, 660.0: 0.0, 840.0: 0.0, 900.0: 0.0}
    assert [kpa.scale(at_s, load, load, 1) for at_s, load in rates.items()] == [4, 4, 0, 4, 4, 4, 3, 0]


def test_kpa_several_initial_replicas_start_in_panic() -> None:
    kpa = Kpa(TEN, 0.0, 6)
    assert kpa.scale(0.0, 0.0, 0.0, 6) == 6
    assert kpa.scale(60.0, 0.0, 0.0, 6) == 6
    assert kpa.scale(62.0, 0.0, 0.0, 6) == 0


def test_kpa_window_is_mean_over_its_own_seconds() -> None:
    window = KpaWindow(6.0)
    assert window.mean(0.0) is None
    for second, value in enumerate((2.0, 4.0, 6.0)):
        window.record(second, value)
    assert window.mean(2.0) == 4.0  # three seconds old: over three
    assert window.mean(4.0) == 4.0  # nothing since: over those that were told
    window.record(5.0, 12.0)
    assert window.mean(5.0) == 4.0  # two seconds without a value are zero, over six
    window.record(8.0, 0.0)
    assert window.mean(8.0) == round(12.0 / 6.0, 6)  # seconds 3 to 8
    assert window.mean(14.0) == 0.0
    assert window.mean(15.0) is None
    window.record(20.0, 3.0)
    assert window.mean(20.0) == 3.0  # a whole window of silence: it begins anew


def test_kpa_default_target_is_seventy_percent_of_soft_limit() -> None:
    rates = observations.drive_policy(observations.policy("kpa"), {0: 69.0, 10: 71.0}, 200)
    assert rates[9] == 1
    assert rates[-1] == 2
    rates = observations.drive_policy(observations.policy("kpa:target=10"), {0: 6.9, 10: 7.1}, 200)
    assert (rates[9], rates[-1]) == (1, 2)


def test_kpa_burst_scales_up_in_seconds_and_down_after_panic() -> None:
    rates = observations.drive_policy(observations.policy("kpa:target=10"), {0: 5.0, 100: 42.0, 130: 5.0}, 400)
    assert rates[99] == 1
    assert rates[106] >= 5
    assert min(rates[110:160]) == max(rates[100:160])
    assert rates[-1] == 1


def test_kpa_bounds_hold_and_no_ready_replica_holds_count() -> None:
    assert max(observations.drive_policy(observations.policy("kpa:target=1"), {0: 1000.0}, 60)) == 8
    policy = observations.policy("kpa")
    for second in range(80):
        assert policy.desired_replicas(observations.observe(second, 3, [], starting=3)).get(Role.SERVE, 3) == 3


def test_kpa_scales_each_tier_independently() -> None:
    look = Observation(
        0.0,
        {Role.PREFILL: 1, Role.DECODE: 1},
        engine_readings={
            Role.PREFILL: observations.engine_readings([(1.0, 20.0)]),
            Role.DECODE: observations.engine_readings([(5.0, 0.0)]),
        },
        ready={Role.PREFILL: 1, Role.DECODE: 1},
    )
    assert observations.policy("kpa:target=10", observations.BOTH).desired_replicas(look) == {
        Role.PREFILL: 3,
        Role.DECODE: 1,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("target=0", "above 0"),
        ("utilization=1.5", "at most 1"),
        ("up=1", "rates above 1"),
        ("down=0.5", "rates above 1"),
        ("panic_window=200", "at most 100"),
        ("window=x", "window is a number"),
        ("delay=-1", "at least 0"),
        ("metric=rps", "unknown metric"),
    ],
)
def test_kpa_invalid_options_are_rejected(options: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        observations.policy(f"kpa:{options}")
