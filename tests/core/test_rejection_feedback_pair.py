"""Refusals of a service with two tiers: which of them they are held against."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.autoscaling.scaling_policy import TierPolicy
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.test_autoscaler import Fleet, mix, need, scaling_spec, service_metrics

PAIR = (Role.PREFILL, Role.DECODE)
LONG_OUTPUTS = mix(50, 800)  # work for decode alone
LONG_PROMPTS = mix(6000, 8)
SLO = Slo(0.95, ttft_s=4.0, tpot_s=0.05)


def make_metrics(rate: float, shed: float, lengths: object) -> ServiceMetrics:
    return replace(service_metrics(rate, *PAIR), workload=lengths, arrivals=60.0 * rate, rejected_share=shed)


def with_waiting(metrics: ServiceMetrics, role: Role, waiting: float) -> ServiceMetrics:
    """The metrics, with requests that wait at the engines of one tier."""
    tier = metrics.tiers[role]
    tiers = {**metrics.tiers, role: replace(tier, lagging=replace(tier.lagging, waiting=waiting))}
    return replace(metrics, tiers=tiers)


def fleet(rate: float, lengths: object, most: int) -> Fleet:
    """A pair that has grown to what it may have under this load."""
    tiers = {str(role): TierPolicy(1, most) for role in PAIR}
    made = Fleet(scaling_spec(slo=SLO, tiers=tiers))
    made.run(make_metrics(rate, 0.0, lengths), 120)
    return made


def test_correction_during_decode_startup_spares_prefill() -> None:
    """Prefill was whole all the time, and idle; the share of refusals is of a time in which decode was short."""
    pair = fleet(0.5, LONG_OUTPUTS, 50)
    before = dict(pair.replicas)
    pair.arrives = False
    while pair.tick(make_metrics(8.0, 0.0, LONG_OUTPUTS)).tiers["decode"].replicas == before["decode"]:
        pass
    ordered = pair.tick(make_metrics(8.0, 0.4, LONG_OUTPUTS)).tiers["decode"].replicas
    pair.replicas["decode"] = ordered
    starting = tuple(StartingPod(f"p{n}", pair.now_s) for n in range(ordered - before["decode"]))
    for _ in range(40):
        pair.tick(make_metrics(8.0, 0.4, LONG_OUTPUTS), decode=starting)
    pair.arrives = True
    for _ in range(30):  # of the last minute, some are still those that came while decode was short
        pair.tick(make_metrics(8.0, 0.2, LONG_OUTPUTS))
    for _ in range(30):  # and they are gone while load falls
        pair.tick(make_metrics(0.5, 0.2, LONG_OUTPUTS))
    assert pair.replicas["prefill"] == before["prefill"] == 1
    assert need(pair, "prefill").capacity_correction < 1.005


def test_correction_applies_to_the_fullest_tier() -> None:
    """Where each has one replica, it is not the first of them but the one that is near its line."""
    for lengths, full, idle in ((LONG_OUTPUTS, "decode", "prefill"), (LONG_PROMPTS, "prefill", "decode")):
        pair = fleet(0.5, lengths, 50)
        assert pair.replicas == {"prefill": 1, "decode": 1}
        line = need(pair, full)
        rate = 0.7 * line.replica_work / line.request_gpu_s
        pair = fleet(rate, lengths, 1)
        pair.scaling_spec = scaling_spec(slo=SLO, tiers={str(role): TierPolicy(1, 50) for role in PAIR})
        before = pair.run(make_metrics(rate, 0.0, lengths), 5)
        assert before.tiers[idle].replicas == 1
        pair.run(make_metrics(rate, 0.3, lengths), 90)
        assert need(pair, idle).capacity_correction < 1.005, idle
        assert need(pair, full).capacity_correction > 1.1, full
        assert pair.replicas[idle] == 1


def test_correction_applies_to_the_tier_where_requests_wait() -> None:
    """The model takes prefill for the fullest, but decode engines hold fewer sequences than they announce."""
    pair = fleet(0.5, LONG_PROMPTS, 50)
    line = need(pair, "prefill")
    rate = 0.7 * line.replica_work / line.request_gpu_s
    pair = fleet(rate, LONG_PROMPTS, 1)
    pair.scaling_spec = scaling_spec(slo=SLO, tiers={str(role): TierPolicy(1, 50) for role in PAIR})
    pair.run(make_metrics(rate, 0.0, LONG_PROMPTS), 5)
    pair.run(with_waiting(make_metrics(rate, 0.3, LONG_PROMPTS), Role.DECODE, 30.0), 90)
    assert need(pair, "prefill").capacity_correction < 1.005
    assert need(pair, "decode").capacity_correction > 1.1
    assert pair.replicas["decode"] == 2


def test_tier_with_occasional_waits_stays_the_short_one() -> None:
    """Admission keeps the engines' queues short: at times none waits, while the last minute has rejections."""
    pair = fleet(0.5, LONG_PROMPTS, 50)
    line = need(pair, "prefill")
    rate = 0.7 * line.replica_work / line.request_gpu_s
    pair = fleet(rate, LONG_PROMPTS, 1)
    pair.scaling_spec = scaling_spec(slo=SLO, tiers={"prefill": TierPolicy(1, 50), "decode": TierPolicy(1, 1)})
    pair.run(make_metrics(rate, 0.0, LONG_PROMPTS), 5)
    for _ in range(9):
        pair.run(with_waiting(make_metrics(rate, 0.3, LONG_PROMPTS), Role.DECODE, 30.0), 5)
        pair.run(make_metrics(rate, 0.3, LONG_PROMPTS), 15)
    assert need(pair, "prefill").capacity_correction < 1.005
    assert need(pair, "decode").capacity_correction > 1.1
