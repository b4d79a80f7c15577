"""`keda-ttft`: the guide's formula and signal, and what can go wrong with them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from plimsoll.core.ports import EngineReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Observation, PolicyContext
from plimsoll.sim.policies.keda import KedaRules, SaturationSignal, desired_count, hpa_behavior
from tests.sim import sim_harness
from tests.sim.policies import observations


# By the guide's formula: n + ceil(n (s c / 0.55 - 1)) above 0.55 with c = r / n, n - floor(n (1 - s / 0.40)) below.
@pytest.mark.parametrize(
    ("saturation", "replicas", "ready", "desired"),
    [
        (0.56, 3, 3, 4),  # 3 + ceil(0.0545)
        (0.8, 3, 3, 5),  # 3 + ceil(1.36)
        (2.0, 3, 3, 11),  # 3 + ceil(7.91)
        (2.0, 8, 3, 11),  # 8 + ceil(8 (2 * 0.375 / 0.55 - 1) = 2.91)
        (1.1, 8, 4, 8),  # the half that is ready asks for what starts
        (0.6, 8, 4, 5),  # credited below its own threshold: 8 + ceil(-3.64)
        (2.0, 4, 0, 15),  # none ready is no credit: 4 + ceil(10.55)
        (0.55, 5, 5, 5),
        (0.45, 5, 5, 5),
        (0.40, 5, 5, 5),
        (0.39, 5, 5, 5),  # 5 - floor(0.125)
        (0.2, 5, 5, 3),  # 5 - floor(2.5)
        (0.2, 5, 2, 3),  # downward without credit
        (0.0, 5, 5, 0),
    ],
)
def test_desired_matches_guide_formula(saturation: float, replicas: int, ready: int, desired: int) -> None:
    assert desired_count(KedaRules(), saturation, replicas, ready) == desired


def _reading(pod: str, ttft: tuple[float, ...] | None, tpot: tuple[float, ...] | None = None) -> EngineReading:
    return replace(
        observations.engine_reading(pod),
        ttft_s=None if ttft is None else observations.buckets(*ttft),
        tpot_s=None if tpot is None else observations.buckets(*tpot),
    )


def _ttft_saturation() -> SaturationSignal:
    return SaturationSignal(KedaRules(), [(lambda engine: engine.ttft_s, 3.0)])


def test_saturation_percentile_covers_last_minute_of_all_engines() -> None:
    signal = _ttft_saturation()
    signal.add_scrape(0.0, [_reading("a", (100, 0, 0, 0)), _reading("b", (0, 0, 0, 0))])
    signal.add_scrape(5.0, [_reading("a", (100, 5, 0, 0)), _reading("b", (4, 0, 1, 0))])
    assert signal.record(5.0) == pytest.approx(2.0 / 3.0)  # 4, 5 and 1: nine of ten are within 2 s
    signal.add_scrape(70.0, [_reading("a", (100, 5, 0, 0)), _reading("b", (4, 0, 1, 0))])
    signal.add_scrape(75.0, [_reading("a", (110, 5, 0, 0)), _reading("b", (4, 0, 1, 0))])
    assert signal.record(75.0) == pytest.approx(0.9 / 3.0)  # ten below 1 s, and the older sample is forgotten


def test_saturation_is_capped_and_averaged_over_three_samples() -> None:
    signal = _ttft_saturation()
    signal.add_scrape(0.0, [_reading("a", (0, 0, 0, 0))])
    assert signal.record(0.0) == 0.0
    signal.add_scrape(15.0, [_reading("a", (0, 0, 0, 10))])
    assert signal.record(15.0) == pytest.approx((0.0 + 4.0 / 3.0) / 2.0)  # above the last edge is that edge
    assert signal.record(30.0) == pytest.approx(2.0 / 3.0 * 4.0 / 3.0)
    assert signal.record(45.0) == pytest.approx(4.0 / 3.0)
    steep = SaturationSignal(KedaRules(), [(lambda engine: engine.ttft_s, 0.1)])
    steep.add_scrape(0.0, [_reading("a", (0, 0, 0, 0))])
    steep.add_scrape(5.0, [_reading("a", (0, 0, 10, 0))])
    assert steep.record(5.0) == 2.0


def test_saturation_is_the_worse_of_ttft_and_tpot() -> None:
    signal = SaturationSignal(KedaRules(), [(lambda e: e.ttft_s, 4.0), (lambda e: e.tpot_s, 2.0)])
    signal.add_scrape(0.0, [_reading("a", (0, 0, 0, 0), (0, 0, 0, 0))])
    signal.add_scrape(5.0, [_reading("a", (10, 0, 0, 0), (10, 0, 0, 0))])
    assert signal.record(5.0) == pytest.approx(0.45)


def test_saturation_no_data_is_zero_and_new_engine_starts_fresh() -> None:
    signal = _ttft_saturation()
    assert signal.record(0.0) == 0.0
    signal.add_scrape(5.0, [_reading("a", None)])
    signal.add_scrape(10.0, [_reading("b", (0, 0, 50, 0))])
    assert signal.record(10.0) == 0.0


def test_saturation_keeps_removed_and_survives_reset_counters() -> None:
    signal = _ttft_saturation()
    signal.add_scrape(0.0, [_reading("a", (0, 0, 0, 0)), _reading("b", (50, 0, 0, 0))])
    signal.add_scrape(5.0, [_reading("a", (0, 10, 0, 0)), _reading("b", (0, 0, 0, 0))])
    signal.add_scrape(10.0, [_reading("b", (0, 0, 0, 0))])
    assert signal.record(10.0) == pytest.approx(1.9 / 3.0)


def _replicas_per_second(policy_text: str, saturated: range, until_s: int, start: int) -> list[int]:
    """Orders where requests take 4 s in a time and 0.5 s else, replicas ready at once."""
    policy, ordered, found, fast, slow = observations.policy(policy_text), start, [], 0.0, 0.0
    for second in range(until_s):
        fast, slow = (fast, slow + 1) if second in saturated else (fast + 1, slow)
        engine = _reading("a", (fast, 0, slow, 0))
        look = Observation(
            second, {Role.SERVE: ordered}, engine_readings={Role.SERVE: (engine,)}, ready={Role.SERVE: ordered}
        )
        ordered = policy.desired_replicas(look).get(Role.SERVE, ordered)
        found.append(ordered)
    return found


def test_keda_scales_up_after_window_and_down_one_per_period() -> None:
    rates = _replicas_per_second("keda-ttft", range(60, 120), 900, 3)
    assert rates[60] == 3
    first = next(second for second, count in enumerate(rates) if count > 3)
    assert 75 <= first <= 120  # a sample that tells, and thirty seconds in which all proposed more
    assert max(rates) == 8
    falls = [second for second in range(1, 900) if rates[second] < rates[second - 1]]
    assert all(rates[second - 1] - rates[second] == 1 for second in falls)
    assert all(later - earlier >= 120 for earlier, later in pairwise(falls))
    assert falls[0] >= 120 + 180


def test_keda_behaviour_matches_the_guide() -> None:
    rules = hpa_behavior()
    assert (rules.up_window_s, rules.down_window_s, rules.tolerance) == (30.0, 180.0, 0.1)
    assert [(one.value, one.period_s, one.percent) for one in (*rules.up_limits, *rules.down_limits)] == [
        (100.0, 60.0, True),
        (4.0, 60.0, False),
        (1.0, 120.0, False),
    ]


def test_keda_prefill_uses_ttft_and_decode_uses_tpot() -> None:
    policy = observations.policy("keda-ttft:up=0", observations.BOTH)
    desired = {}
    for second, count in ((0.0, 0.0), (15.0, 10.0)):
        prefill, decode = _reading("p", (0, 0, count, 0)), _reading("d", (0, 0, count, 0), (count, 0, 0, 0))
        look = Observation(
            second,
            {Role.PREFILL: 2, Role.DECODE: 2},
            engine_readings={Role.PREFILL: (prefill,), Role.DECODE: (decode,)},
            ready={Role.PREFILL: 2, Role.DECODE: 2},
        )
        desired = policy.desired_replicas(look)
    assert desired[Role.PREFILL] == 3  # P90 3.8 s of 3 s, meaned with silence: 0.633, 2 + ceil(0.3)
    assert desired[Role.DECODE] == 4  # P90 0.9 s of 0.1 s, cut at 2, meaned: 1.0, 2 + ceil(1.64)


@pytest.mark.parametrize(
    ("options", "slo", "said"),
    [
        ("up_at=0.3", observations.SLO, "down_at is at most up_at"),
        ("up_at=2", observations.SLO, "up_at below 2"),
        ("share=1.1", observations.SLO, "at most 1"),
        ("share=0", observations.SLO, "above 0"),
        ("", None, "no latency to go by"),
        ("target=3", observations.SLO, "unknown target"),
    ],
)
def test_keda_invalid_options_are_rejected(options: str, slo: Slo | None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        observations.policy(
            f"keda-ttft:{options}", PolicyContext(observations.SERVE.bounds, sim_harness.make_plant(), slo)
        )


def test_keda_decode_tier_without_tpot_target_is_rejected() -> None:
    with pytest.raises(BadInput, match="decode has no latency to go by"):
        observations.policy(
            "keda-ttft", PolicyContext(observations.BOTH.bounds, sim_harness.make_plant(), Slo(0.95, ttft_s=1.0))
        )
