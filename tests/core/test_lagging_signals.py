"""One signal of the engines and nothing else, from raw readings to replicas: the tier that it speaks of moves, up.

Gateways are silent throughout, engines export one metric each, and no request has ever been measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.signal_readings import NOW_S, TTFT_EDGES_S, sample_histogram
from tests.core.test_autoscaler import ABOUT
from tests.core.test_signals import TPOT_EDGES_S

SLO = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
READY = 3
SECONDS = 60
PAIR, ALONE = (Role.PREFILL, Role.DECODE), (Role.SERVE,)
Signal = Mapping[str, Any]


def tpot(seconds: float) -> Signal:
    """Twenty requests a second end, each with this time for an output token."""
    return {"tpot_s": (TPOT_EDGES_S, seconds)}


def ttft(seconds: float) -> Signal:
    return {"ttft_s": (TTFT_EDGES_S, seconds)}


def reading(pod: str, after_s: float, signal: Signal) -> EngineReading:
    """An engine that exports one metric: a gauge as it is, `preemptions` so many a second, a histogram as above."""
    values: dict[str, Any] = {}
    for name, value in signal.items():
        if isinstance(value, tuple):
            values[name] = sample_histogram(*value, 20.0 * after_s)
        else:
            values[name] = value * after_s if name == "preemptions" else value
    return EngineReading(pod, NOW_S + after_s, "1", **values)


def run(
    roles: tuple[Role, ...], tier: Role, signal: Signal, silent_gateways: tuple[str, ...] = ("g",)
) -> ScalingDecision:
    """The last decision of a minute in which only this tier's engines were heard, and only with this."""
    listener, service = MetricsAggregator(roles), ServiceState.for_roles(roles)
    scaling_spec = ScalingSpec(ScalingPolicy({role: TierPolicy(1, 50) for role in roles}, slo=SLO), SLO)
    pods = {role: [f"{role}-{n}" for n in range(READY)] for role in roles}
    tiers = {role: TierSnapshot(READY, READY, (), ABOUT) for role in roles}
    for second in range(SECONDS + 1):
        if second % 5 == 0:
            for pod in pods[tier]:
                listener.observe_engine(tier, reading(pod, float(second), signal))
        metrics = listener.collect(NOW_S + second, pods, silent_gateways, SLO.share)
        decided = decide_all({"one": (service, ServiceSnapshot(metrics, tiers), scaling_spec)}, NOW_S + second)
    return decided["one"]


def counts(found: ScalingDecision) -> dict[str, int]:
    return {str(name): tier.replicas for name, tier in found.tiers.items()}


BAD = [
    (PAIR, Role.PREFILL, {"waiting": 4.0}, "12 waiting requests"),
    (PAIR, Role.PREFILL, ttft(0.9), "p95 TTFT"),
    (PAIR, Role.PREFILL, {"kv_used": 0.95}, "KV cache 95% full"),
    (PAIR, Role.DECODE, {"waiting": 4.0}, "12 waiting requests"),
    (PAIR, Role.DECODE, tpot(0.09), "p95 TPOT"),
    (PAIR, Role.DECODE, {"kv_used": 0.95}, "KV cache 95% full"),
    (PAIR, Role.DECODE, {"preemptions": 0.2}, "preemptions/s"),
    (ALONE, Role.SERVE, {"waiting": 4.0}, "12 waiting requests"),
    (ALONE, Role.SERVE, tpot(0.09), "p95 TPOT"),
    (ALONE, Role.SERVE, {"kv_used": 0.95}, "KV cache 95% full"),
    (ALONE, Role.SERVE, {"preemptions": 0.2}, "preemptions/s"),
]
GOOD = [
    (PAIR, Role.PREFILL, {"waiting": 0.0}),
    (PAIR, Role.PREFILL, ttft(0.1)),
    (PAIR, Role.DECODE, tpot(0.02)),
    (PAIR, Role.DECODE, {"kv_used": 0.1}),
    (ALONE, Role.SERVE, {"waiting": 0.0}),
    (ALONE, Role.SERVE, tpot(0.02)),
]


@pytest.mark.parametrize(("roles", "tier", "signal", "words"), BAD)
def test_lagging_signal_bad_value_scales_its_own_tier(
    roles: tuple[Role, ...], tier: Role, signal: Signal, words: str
) -> None:
    found = run(roles, tier, signal)
    after = counts(found)
    assert READY < after.pop(tier) <= 2 * READY
    assert all(count == READY for count in after.values())
    assert words in found.tiers[tier].summary
    assert found.tiers[tier].is_held


@pytest.mark.parametrize(("roles", "tier", "signal"), GOOD)
def test_lagging_signal_good_value_removes_nothing(roles: tuple[Role, ...], tier: Role, signal: Signal) -> None:
    found = run(roles, tier, signal)
    assert set(counts(found).values()) == {READY}
    assert all(decided.is_held for decided in found.tiers.values())


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("name", ["waiting", "kv_used", "preemptions"])
def test_lagging_signal_invalid_value_changes_nothing(name: str, bad: float) -> None:
    assert counts(run(PAIR, Role.DECODE, {name: bad})) == {"prefill": READY, "decode": READY}


def test_lagging_signal_queue_scales_only_its_own_tier() -> None:
    for tier, other in (PAIR, PAIR[::-1]):
        after = counts(run(PAIR, tier, {"waiting": 50.0}))
        assert after == {str(tier): 2 * READY, str(other): READY}


def test_lagging_signal_empty_histogram_changes_nothing() -> None:
    nothing = BucketCounts(TPOT_EDGES_S, (0.0,) * len(TPOT_EDGES_S), 0.0)
    listener = MetricsAggregator(PAIR)
    for after_s in (0.0, 5.0):
        listener.observe_engine(Role.DECODE, EngineReading("d", NOW_S + after_s, "1", tpot_s=nothing))
    metrics = listener.collect(NOW_S + 5.0, {Role.DECODE: ["d"]}, (), SLO.share)
    observed = ServiceSnapshot(metrics, {role: TierSnapshot(READY, READY, (), ABOUT) for role in PAIR})
    scaling_spec = ScalingSpec(ScalingPolicy({role: TierPolicy(1, 50) for role in PAIR}, slo=SLO), SLO)
    decided = decide_all({"one": (ServiceState.for_roles(PAIR), observed, scaling_spec)}, NOW_S + 5.0)["one"]
    assert set(counts(decided).values()) == {READY}
