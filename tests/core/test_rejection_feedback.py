"""Refusals with all ready show the model to be short, by how much, and for how long that is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import NormalDist

import pytest

from plimsoll.core.autoscaling.cadence import snapshot_counts
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, TierDemand
from plimsoll.core.autoscaling.rejection_feedback import (
    CORRECTION_MEMORY_S,
    MAX_CORRECTION,
    REJECTION_WINDOW_S,
    CapacityCorrection,
    RejectionSample,
)
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceTick
from plimsoll.core.autoscaling.sizing_batch import SizingRequest, size_batch
from plimsoll.core.autoscaling.sizing_requests import sizing_requests
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.tier_demand import ObservedService, service_demand
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.types import Role, Unavailable
from tests.core.test_autoscaler import SLO, Fleet, need, scaling_spec, service_metrics


def correction_after(
    short: CapacityCorrection,
    seconds: float,
    refused: float,
    whole: bool = True,
    desired: float = 4,
    ready: int = 4,
    arrivals: float = 3600.0,
    in_flight: float = 0.0,
    arrival_cv2: float = 1.0,
) -> float:
    start = 0.0 if short._at_s is None else short._at_s
    for second in range(1, int(seconds) + 1):
        refusals = RejectionSample(refused, arrivals, 0.05, in_flight, arrival_cv2)
        short.update(desired, ready, whole, refusals, start + second)
    return short.factor


def test_correction_waits_for_replicas_that_became_ready() -> None:
    short = CapacityCorrection()
    correction_after(short, REJECTION_WINDOW_S - 5, 0.5, desired=8, ready=4)
    assert correction_after(short, REJECTION_WINDOW_S - 5, 0.5, desired=8, ready=8) == 1.0


def test_correction_is_demand_over_admitted_share() -> None:
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.2) == pytest.approx(1.25)
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.2, desired=2, ready=4) == pytest.approx(2.5)


def test_correction_needs_full_window_and_ready_fleet() -> None:
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.05) == 1.0
    assert correction_after(CapacityCorrection(), REJECTION_WINDOW_S - 1, 0.5) == 1.0
    assert correction_after(CapacityCorrection(), 5 * REJECTION_WINDOW_S, 0.5, whole=False) == 1.0
    mixed = CapacityCorrection()
    correction_after(mixed, REJECTION_WINDOW_S - 5, 0.5)
    correction_after(mixed, 1, 0.5, whole=False)
    assert correction_after(mixed, REJECTION_WINDOW_S - 5, 0.5) == 1.0, (
        "the share is still of the time in which they came"
    )


def test_correction_share_within_chance_is_ignored() -> None:
    assert correction_after(CapacityCorrection(), 1.5 * REJECTION_WINDOW_S, 0.1, arrivals=84.0) == 1.0
    assert correction_after(CapacityCorrection(), 1.5 * REJECTION_WINDOW_S, 0.1, arrivals=840.0) == pytest.approx(
        1.0 / 0.9
    )
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.5, arrivals=84.0) == pytest.approx(2.0)
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.5, arrivals=0.0) == 1.0


def test_correction_clustered_rejections_need_larger_share() -> None:
    """160 in a minute with 100 in flight, as one engine with answers of 40 s has them."""
    assert correction_after(CapacityCorrection(), REJECTION_WINDOW_S + 5, 0.15, arrivals=160.0) > 1.0, (
        "as if each were refused by himself"
    )
    assert correction_after(CapacityCorrection(), REJECTION_WINDOW_S + 5, 0.15, arrivals=160.0, in_flight=100.0) == 1.0
    assert correction_after(CapacityCorrection(), REJECTION_WINDOW_S + 5, 0.2, arrivals=160.0, in_flight=100.0) == 1.0
    assert correction_after(CapacityCorrection(), REJECTION_WINDOW_S + 5, 0.25, arrivals=160.0, in_flight=100.0) > 1.0
    assert (
        correction_after(
            CapacityCorrection(), REJECTION_WINDOW_S + 5, 0.25, arrivals=160.0, in_flight=100.0, arrival_cv2=4.0
        )
        == 1.0
    ), "they come in rows"


def test_correction_uses_demand_at_time_of_rejection() -> None:
    """Load that has ended asks for next to nothing while its refusals are still in the minute's share."""
    short = CapacityCorrection()
    assert correction_after(short, 2 * REJECTION_WINDOW_S, 0.05) == 1.0
    assert correction_after(short, 20, 0.3, desired=4, ready=4) == pytest.approx(1.0 / 0.7)
    assert correction_after(short, REJECTION_WINDOW_S - 1, 0.3, desired=0.5, ready=4) == pytest.approx(1.0 / 0.7)


def test_correction_persistent_excess_accumulates() -> None:
    few = {"arrivals": 160.0, "in_flight": 100.0}
    assert correction_after(CapacityCorrection(), 15 * REJECTION_WINDOW_S, 0.15, **few) == pytest.approx(1.0 / 0.85)
    broken = CapacityCorrection()
    for _ in range(5):
        correction_after(broken, 1.2 * REJECTION_WINDOW_S, 0.15, **few)
        assert correction_after(broken, 1, 0.05, **few) == 1.0


def test_correction_repeated_evidence_adds_nothing_and_decays() -> None:
    short = CapacityCorrection()
    once = correction_after(short, 2 * REJECTION_WINDOW_S, 0.2)
    assert correction_after(short, 10 * REJECTION_WINDOW_S, 0.2) == pytest.approx(once)
    assert correction_after(short, CORRECTION_MEMORY_S, 0.0) == pytest.approx(1.0 + (once - 1.0) / math.e, rel=1e-3)
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 0.99) == MAX_CORRECTION
    assert correction_after(CapacityCorrection(), 2 * REJECTION_WINDOW_S, 1.0) == 1.0, (
        "with nobody let in nothing is measured"
    )


def test_fleet_with_rejections_grows_and_explains() -> None:
    policy = ScalingPolicy({"serve": TierPolicy(1, 50)}, slo=SLO, miss_cost=0.0)  # no reserve
    fleet = Fleet(replace(scaling_spec(), policy=policy))
    fleet.run(service_metrics(60.0, Role.SERVE), 600)
    before, requested = fleet.replicas["serve"], need(fleet).replicas
    refusing = replace(service_metrics(60.0, Role.SERVE), arrivals=3600.0, rejected_share=0.3)
    fleet.run(refusing, 10)
    after = fleet.replicas["serve"]
    assert after >= math.ceil(before / 0.7 - 1e-9) > before
    found = need(fleet)
    assert found.capacity_correction == pytest.approx(before / 0.7 / requested, rel=0.1)
    words = [step.reason for step in fleet.service.decisions[-1].decision.tiers["serve"].steps]
    assert any("rejected" in word for word in words)
    counts = [fleet.tick(service_metrics(60.0, Role.SERVE)).tiers["serve"].replicas for _ in range(60)]
    kept = [
        requested * (1 + (found.capacity_correction - 1) * math.exp(-(second + 1) / CORRECTION_MEMORY_S))
        for second in range(60)
    ]
    assert all(have >= least - 1 for have, least in zip(counts, kept, strict=True)), "not at once back to what refused"
    assert all(later <= earlier for earlier, later in pairwise([after, *counts]))


STEADY_METRICS = replace(service_metrics(60.0, Role.SERVE), in_flight=300.0, reserved_work_s=0.0)


@cache
def _settled() -> Fleet:
    fleet = Fleet(scaling_spec())
    fleet.run(STEADY_METRICS, 900)
    return fleet


def settled() -> Fleet:
    """A fleet of its own for each who asks, after a quarter of an hour at a steady load."""
    return deepcopy(_settled())


def backlog_gpu_s(gpu_s: float, starting: bool) -> float:
    """GPU-seconds for which a fleet at a steady load has capacity added when so many are told to come back."""
    fleet = settled()
    late = StartingPod("x", fleet.now_s - 5.0, "load", fleet.now_s - 5.0)
    before = requested_replicas(fleet, STEADY_METRICS, (late,) if starting else ())
    return (
        requested_replicas(fleet, replace(STEADY_METRICS, reserved_work_s=gpu_s), (late,) if starting else ()) - before
    )


def demand_of(fleet: Fleet, observed: ServiceSnapshot) -> Mapping[str, TierDemand | Unavailable]:
    tick = ServiceTick(fleet.service, observed, fleet.scaling_spec, fleet.now_s)
    return service_demand(ObservedService(tick)).tiers


def sizing_request(
    fleet: Fleet, said: ServiceMetrics, starting: tuple[StartingPod, ...], more: int = 0
) -> SizingRequest:
    """What the tier is sized for with so many replicas more ordered."""
    count = fleet.replicas["serve"] + more
    observed = ServiceSnapshot(said, {"serve": TierSnapshot(count, count - len(starting), starting, fleet.about)})
    demand = demand_of(fleet, observed)
    return sizing_requests(
        fleet.service.tiers, fleet.service.sizings, observed, fleet.scaling_spec, demand, fleet.now_s
    )["serve"]


def requested_replicas(fleet: Fleet, said: ServiceMetrics, starting: tuple[StartingPod, ...], more: int = 0) -> float:
    """Retry work for which capacity is added, GPU-seconds, with so many replicas more ordered."""
    return sizing_request(fleet, said, starting, more).retry_gpu_s


def test_retry_backlog_sizes_for_full_uncertainty() -> None:
    fleet = settled()
    without_backlog, with_backlog = (replace(STEADY_METRICS, reserved_work_s=gpu_s) for gpu_s in (0.0, 5.0))
    tiers = {"serve": TierSnapshot(fleet.replicas["serve"], fleet.replicas["serve"], (), fleet.about)}
    found = [demand_of(fleet, ServiceSnapshot(said, tiers))["serve"] for said in (without_backlog, with_backlog)]
    alone, due = (one.forecast for one in found if isinstance(one, TierDemand))
    assert due.uncertainty == pytest.approx(NormalDist().inv_cdf(SLO.share) * due.level_error)
    assert alone.uncertainty == 0.0


@pytest.mark.parametrize(("more_than_ready", "is_due"), [(0, False), (1, True)])
def test_queue_beyond_one_request_each_sizes_for_uncertainty(more_than_ready: int, is_due: bool) -> None:
    fleet = settled()
    count = fleet.replicas["serve"]
    queue = TierMetrics(lagging=LaggingSignals(waiting=float(count + more_than_ready)))
    said = replace(STEADY_METRICS, tiers={Role.SERVE: queue}, is_measured_at_engines=True)
    observed = ServiceSnapshot(said, {"serve": TierSnapshot(count, count, (), fleet.about)})
    found = demand_of(fleet, observed)["serve"]
    assert isinstance(found, TierDemand)
    assert (found.forecast.uncertainty > 0.0) is is_due
    basis = fleet.service.basis
    assert basis is not None
    due = basis._replace(spec=fleet.scaling_spec, due_s=math.inf, counts=snapshot_counts(observed.tiers), carried={})
    assert due.is_due(fleet.service.tiers, observed, fleet.scaling_spec, False, fleet.now_s) is is_due


def test_queue_at_the_engines_is_work_where_no_gateway_rejects() -> None:
    fleet, queue = settled(), LaggingSignals(waiting=9000.0)
    gateway = replace(STEADY_METRICS, tiers={Role.SERVE: TierMetrics(lagging=queue)})
    capacity = fleet.service.tiers["serve"].capacity
    assert not isinstance(capacity, Unavailable)
    at_engines = replace(gateway, is_measured_at_engines=True)
    assert requested_replicas(fleet, gateway, ()) == requested_replicas(fleet, STEADY_METRICS, ())
    assert requested_replicas(fleet, at_engines, ()) == pytest.approx(9000.0 * capacity.request_gpu_s, rel=0.2)


def test_retry_backlog_within_chance_adds_no_load() -> None:
    """Of 60 requests a second some hundreds are within chance in a start-up; what they take is of the order of 50 s."""
    assert backlog_gpu_s(2.0, starting=False) == 0.0
    assert backlog_gpu_s(4000.0, starting=False) == pytest.approx(4000.0)
    assert 0.0 < backlog_gpu_s(4000.0, starting=True) < 4000.0, "but for what the others serve until it is there"


def test_retry_backlog_is_reduced_by_starting_replicas() -> None:
    """What is left for that one is what they do not serve in a start-up, beside what comes anyway."""
    fleet = settled()
    found, metrics = need(fleet), replace(STEADY_METRICS, reserved_work_s=4000.0)
    horizon_s = fleet.service.horizon_s("serve", fleet.scaling_spec)
    spare = 0.9 * found.replica_work * fleet.replicas["serve"] - found.rate_per_s * found.request_gpu_s

    def requested_with(ages_s: list[float], **differing: str) -> float:
        pods = tuple(StartingPod(f"{n}", fleet.now_s - age_s, **differing) for n, age_s in enumerate(ages_s))
        return requested_replicas(fleet, metrics, pods, more=len(pods))

    one, more, sooner, far = (
        requested_with([0.0]),
        requested_with([0.0] * 8),
        requested_with([0.9 * horizon_s] * 8),
        requested_with([0.0], unschedulable_reason="no room"),
    )
    assert far == pytest.approx(4000.0 - max(0.0, spare) * horizon_s, rel=0.02), "who fits nowhere serves nobody"
    assert sooner < more <= one <= far
    assert sooner == pytest.approx(far - 0.9 * found.replica_work * 8 * 0.9 * horizon_s, rel=0.3)
    assert (
        requested_replicas(fleet, replace(metrics, reserved_work_s=1.0), (StartingPod("x", fleet.now_s),), more=8)
        == 0.0
    )


def test_start_for_retries_is_kept_beside_free_capacity() -> None:
    """The ready ones' free capacity carries a part of the retries. It is in the whole count already."""
    fleet, ready = settled(), 4  # beyond those that the load needs
    found, horizon_s = need(fleet), fleet.service.horizon_s("serve", fleet.scaling_spec)
    short_of = fleet.replicas["serve"] + ready + 0.5 - found.rate_per_s * found.request_gpu_s / found.replica_work
    metrics = replace(STEADY_METRICS, reserved_work_s=short_of * found.replica_work * horizon_s)
    (before,) = size_batch([sizing_request(fleet, metrics, (), ready)])
    assert not isinstance(before, Unavailable)
    pods = tuple(StartingPod(f"{n}", fleet.now_s) for n in range(before.replicas - fleet.replicas["serve"] - ready))
    assert pods
    (after,) = size_batch([sizing_request(fleet, metrics, pods, ready + len(pods))])
    assert not isinstance(after, Unavailable)
    assert after.replicas <= before.replicas <= after.scale_down_replicas


@pytest.mark.parametrize("many", [3.0, 6.0, 10.0])
def test_retry_backlog_keeps_starting_replicas(many: float) -> None:
    """Else it goes, is missed at the next tick, and is ordered anew: its start begins again each time."""
    fleet = Fleet(replace(scaling_spec(), policy=replace(scaling_spec().policy, miss_cost=0.0)))  # nothing in reserve
    fleet.run(STEADY_METRICS, 300)
    before, horizon_s = fleet.replicas["serve"], fleet.service.horizon_s("serve", fleet.scaling_spec)
    correction_after = replace(STEADY_METRICS, reserved_work_s=many * need(fleet).replica_work * horizon_s)
    pods: tuple[StartingPod, ...] = ()
    counts = []
    for second in range(int(0.9 * horizon_s)):
        counts.append(fleet.tick(correction_after, serve=pods).tiers["serve"].replicas)
        pods += tuple(StartingPod(f"{second}-{n}", fleet.now_s) for n in range(counts[-1] - before - len(pods)))
    assert set(counts) == {before + many}
    assert fleet.run(STEADY_METRICS, 300).tiers["serve"].replicas == before, "once nobody is left to come back"
