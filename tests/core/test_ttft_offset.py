"""TTFT beyond the model, learned from the share of late first tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core import codec
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.autoscaling.capacity_state import CapacityState
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.tier_engines import TierEngines
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.autoscaling.ttft_feedback import TtftFeedback
from plimsoll.core.autoscaling.ttft_offset import LateSample, TtftOffset, late_shares, no_offset, update_offset
from plimsoll.core.capacity.tier_model import Constraint, TierProfile, TierSpec, build_profile
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.ports import BucketCounts, SloCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

TARGET_S, RATE_PER_S = 0.2, 10.0
TTFT_SLO = Slo(ttft_s=TARGET_S, tpot_s=0.05, share=0.95)
RNG = np.random.default_rng(7)


@pytest.fixture(scope="module")
def tier_spec() -> TierSpec:
    """A tier whose prompts of about 1,000 tokens take 20 ms on an idle replica."""
    prompts, outputs = (np.ceil(RNG.lognormal(mean, sigma, 2000)) for mean, sigma in ((6.9, 0.6), (5.3, 0.5)))
    workload = from_samples(prompts, np.zeros(2000), outputs)
    model = StepModel(0.005, 0.0, 1.7e-5, 1.3e-9, 1.4e-5, 2.8e-8)
    return TierSpec(Role.SERVE, model, workload, EngineLimits(256, 720_000, 8192), TTFT_SLO)


@pytest.fixture(scope="module")
def profile(tier_spec: TierSpec) -> TierProfile:
    return build_profile(tier_spec)


def late_counts(profile: TierProfile, offset_s: float, windows: int, rate_per_s: float = RATE_PER_S) -> Iterator[float]:
    """Late first tokens of 600 in each window, of engines whose first tokens take so much longer."""
    late = float(late_shares(profile, rate_per_s, 1.0, np.array([offset_s]))[0])
    yield from RNG.binomial(600, late, windows)


def learn(profile: TierProfile, offset: TtftOffset, offset_s: float, windows: int) -> TtftOffset:
    for late in late_counts(profile, offset_s, windows):
        offset = update_offset(offset, profile, 1, RATE_PER_S, late, 600.0)
    return offset


@pytest.mark.parametrize("true_s", [0.08, 0.107, 0.15])
def test_offset_is_found_within_three_minutes(profile: TierProfile, true_s: float) -> None:
    assert learn(profile, no_offset(TARGET_S), true_s, 3).seconds == pytest.approx(true_s, abs=0.05 * TARGET_S)


def test_engines_as_modelled_have_no_offset(profile: TierProfile) -> None:
    assert no_offset(TARGET_S).seconds == 0.0
    learned = learn(profile, no_offset(TARGET_S), 0.0, 30)
    assert learned.seconds == 0.0
    assert not learned.is_significant


def test_offset_beyond_the_target_leaves_no_slack(profile: TierProfile) -> None:
    assert learn(profile, no_offset(TARGET_S), 0.35, 5).seconds >= 0.95 * TARGET_S


def test_offset_that_is_gone_is_forgotten(profile: TierProfile) -> None:
    learned = learn(profile, no_offset(TARGET_S), 0.107, 30)
    assert learned.is_significant
    assert late_shares(profile, RATE_PER_S, 1.0, np.array([learned.seconds]))[0] > 0.03
    forgotten = learn(profile, learned, 0.0, 60).seconds
    assert late_shares(profile, RATE_PER_S, 1.0, np.array([forgotten]))[0] < 0.005, "what is left makes nothing late"


def test_few_late_requests_prove_nothing(profile: TierProfile) -> None:
    assert update_offset(no_offset(TARGET_S), profile, 1, RATE_PER_S, 2.0, 20.0).seconds == 0.0


def test_large_services_stay_within_the_checkpoint(profile: TierProfile) -> None:
    offset = no_offset(TARGET_S)
    for _ in range(100):
        offset = update_offset(offset, profile, 1, RATE_PER_S, 1e6, 1e7)
    assert codec.decode(TtftOffset, codec.encode(offset)).is_significant


def test_offset_survives_a_restart(profile: TierProfile) -> None:
    learned = learn(profile, no_offset(TARGET_S), 0.107, 3)
    assert codec.decode(TtftOffset, codec.encode(learned)).seconds == pytest.approx(learned.seconds, rel=1e-3)


def late_minute(
    tier_spec: TierSpec,
    feedback: TtftFeedback,
    spec: ScalingSpec,
    start_s: float,
    late: float,
    seconds: int = 61,
    ordered: int = 1,
    needed: int = 1,
    arrivals: float = 60.0 * RATE_PER_S,
    waiting: tuple[float, float] | None = None,
    last_per_s: float = RATE_PER_S,
) -> None:
    """Ticks of one minute, the end included, in which the gateways count so many late first tokens of 600.

    One replica is ready. ordered: replicas from its second half on. arrivals: of the minute. waiting: requests at the
    engines, first and then, without gateways. last_per_s: rate of the last sample.
    """
    state = TierState(TierEngines(Role.SERVE), capacity_state=CapacityState(tier_spec=tier_spec))
    metrics = ServiceMetrics(
        rate_per_s=last_per_s,
        arrivals=arrivals,
        is_measured_at_engines=waiting is not None,
        slo_counts=SloCounts(600.0, late, late, 0.0),
        ttft_histogram=BucketCounts((TARGET_S, 1.0), (600.0 - late, late, 0.0), 60.0),
    )
    sizings = {"serve": SizingResult(needed, needed, RATE_PER_S, 0.05, 1.0, Constraint.TTFT, 0.97, 0.6)}
    for second in range(seconds):
        if waiting is not None:
            queue = LaggingSignals(waiting=waiting[0] if second == 0 else waiting[1])
            metrics = replace(metrics, tiers={Role.SERVE: TierMetrics(lagging=queue)})
        snapshot = ServiceSnapshot(metrics, {"serve": TierSnapshot(1 if second < 30 else ordered, 1)})
        feedback.update(snapshot, spec, {"serve": state}, tier_spec.workload, sizings, start_s + second)


def spec_with(*class_ttft_s: float) -> ScalingSpec:
    classes = tuple(ClassPolicy(f"c{n}", n, replace(TTFT_SLO, ttft_s=ttft_s)) for n, ttft_s in enumerate(class_ttft_s))
    return ScalingSpec(ScalingPolicy({"serve": TierPolicy(1, 9)}, slo=TTFT_SLO), TTFT_SLO, classes=classes)


def test_late_minutes_of_settled_replicas_show_the_offset(tier_spec: TierSpec) -> None:
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(TARGET_S, TARGET_S), 0.0, 60.0)
    assert feedback.offset_s > 0.3 * TARGET_S


@pytest.mark.parametrize(("arrivals", "counts"), [(0.0, False), (299.0, False), (301.0, True)])
def test_late_responses_of_an_earlier_load_do_not_count(tier_spec: TierSpec, arrivals: float, counts: bool) -> None:
    """The rate of a minute without arrivals is 0: the demand over it would be infinitely many replicas."""
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(), 0.0, 60.0, arrivals=arrivals)
    late_minute(tier_spec, feedback, spec_with(), 61.0, 60.0, seconds=1, arrivals=arrivals)
    assert (feedback.carried_per_s < math.inf) == counts
    assert feedback.carried_per_s > 0.0


@pytest.mark.parametrize(("ordered", "needed", "counts"), [(2, 1, True), (2, 2, False)], ids=["standby", "short"])
def test_minute_counts_while_only_a_standby_replica_starts(
    tier_spec: TierSpec, ordered: int, needed: int, counts: bool
) -> None:
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(), 0.0, 60.0, ordered=ordered, needed=needed)
    assert (feedback.offset_s > 0.3 * TARGET_S) == counts


@pytest.mark.parametrize(
    ("waiting", "counts"), [((9.0, 9.0), False), ((0.0, 9.0), True), ((9.0, 0.0), True)], ids=["old", "new", "gone"]
)
def test_queue_from_before_is_not_taken_for_a_slow_host(
    tier_spec: TierSpec, waiting: tuple[float, float], counts: bool
) -> None:
    """Without a gateway nothing is rejected while replicas start: what waited then is late afterwards."""
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(), 0.0, 60.0, seconds=62, waiting=waiting)
    assert (feedback.offset_s > 0.3 * TARGET_S) == counts


@pytest.mark.parametrize(("last_per_s", "counts"), [(2.1 * RATE_PER_S, False), (1.9 * RATE_PER_S, True)])
def test_minute_in_which_the_load_jumped_shows_no_offset(tier_spec: TierSpec, last_per_s: float, counts: bool) -> None:
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(), 0.0, 60.0, waiting=(0.0, 9.0), last_per_s=last_per_s)
    assert (feedback.offset_s > 0.3 * TARGET_S) == counts


@pytest.mark.parametrize("class_ttft_s", [(0.05, TARGET_S), (0.05,)])
def test_targets_of_classes_are_no_offset(tier_spec: TierSpec, class_ttft_s: tuple[float, ...]) -> None:
    """Gateways count requests late by the target of their class: a tight one says nothing about the host."""
    feedback = TtftFeedback()
    late_minute(tier_spec, feedback, spec_with(*class_ttft_s), 0.0, 60.0)
    assert feedback.offset_s == 0.0


def test_minute_of_two_targets_is_not_settled(tier_spec: TierSpec) -> None:
    """The gateways counted most of its requests by the old target, which was tight."""
    feedback, spec = TtftFeedback(), spec_with()
    tight = replace(TTFT_SLO, ttft_s=0.001)
    before = replace(spec, slo=tight, policy=replace(spec.policy, slo=tight))
    late_minute(tier_spec, feedback, before, -20.0, 0.0)
    late_minute(tier_spec, feedback, spec, 42.0, 400.0, seconds=60)
    assert feedback.offset_s == 0.0


def test_missing_tier_does_not_forget_the_offset(tier_spec: TierSpec) -> None:
    feedback, spec = TtftFeedback(), spec_with()
    late_minute(tier_spec, feedback, spec, 0.0, 60.0)
    learned_s = feedback.offset_s
    tiers = {"serve": TierState(TierEngines(Role.SERVE), capacity_state=CapacityState(tier_spec=tier_spec))}
    feedback.update(ServiceSnapshot(ServiceMetrics(), {}), spec, tiers, tier_spec.workload, {}, 100.0)
    assert feedback.offset_s == learned_s > 0.0


def test_late_minute_counts_for_a_model_that_becomes_faster(tier_spec: TierSpec, profile: TierProfile) -> None:
    """While the model is pessimistic, a small offset explains the late requests; later it would explain few of them."""
    slow = build_profile(replace(tier_spec, model=StepModel(0.008, 0.0, 2.7e-5, 2.1e-9, 2.2e-5, 4.5e-8)))
    late = 600.0 * float(late_shares(profile, RATE_PER_S, 1.0, np.array([0.107]))[0])
    offset = no_offset(TARGET_S)
    for _ in range(3):
        offset = update_offset(offset, slow, 1, RATE_PER_S, late, 600.0)
    offset = update_offset(offset, profile, 1, 0.5 * RATE_PER_S, 0.0, 600.0)
    assert offset.seconds == pytest.approx(0.107, abs=0.05 * TARGET_S)


def test_samples_of_many_loads_are_bounded(profile: TierProfile) -> None:
    offset = no_offset(TARGET_S)
    for n in range(40):
        offset = update_offset(offset, profile, 1, 1.0 + n, 60.0, 600.0)
    assert len(offset.samples) == 12
    assert len(update_offset(offset, profile, 1, offset.samples[0].rate_per_s * 1.03, 60.0, 600.0).samples) == 12


def samples_of(*counts: tuple[float, float]) -> TtftOffset:
    """Of 600 responses at each load."""
    return no_offset(TARGET_S)._replace(samples=tuple(LateSample(rate, late, 600.0) for rate, late in counts))


@pytest.mark.parametrize(
    ("counts", "carried_per_s"),
    [
        ((), math.inf),
        (((10.0, 30.0),), math.inf),
        (((10.0, 31.0),), 9.0),
        (((10.0, 60.0), (12.0, 90.0), (5.0, 0.0)), 9.0),
        (((10.0, 60.0), (9.5, 12.0)), 9.5),
        (((10.0, 60.0), (12.0, 12.0)), 9.0),
    ],
    ids=["nothing", "in time", "late", "of several the least", "in time at nearly as much", "in time at more"],
)
def test_load_with_late_first_tokens_is_not_carried(
    counts: tuple[tuple[float, float], ...], carried_per_s: float
) -> None:
    assert samples_of(*counts).carried_per_s(0.95) == carried_per_s


def test_few_responses_show_no_load_that_is_late() -> None:
    few = no_offset(TARGET_S)._replace(samples=(LateSample(10.0, 50.0, 99.0),))
    assert few.carried_per_s(0.95) == math.inf
