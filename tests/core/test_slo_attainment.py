"""What share of the answers kept a promise: kept that hold whoever missed what, and no claim of the unknown."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import histogram
from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.autoscaling.slo_attainment import SloAttainment, slo_attainment
from plimsoll.core.demand.counter_delta import is_valid_reading, sanitize
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import BucketCounts, EngineReading, ServiceReading, SloCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable

NOW_S = 1.8e9
EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, math.inf)
BOTH = Slo(0.95, 0.5, tpot_s=0.05)
ALL_TARGETS = Slo(0.95, 0.5, tpot_s=0.05, e2e_s=20.0)
TTFT_ONLY = Slo(0.95, 0.5)
TPOT_ONLY = Slo(0.95, tpot_s=0.05)


def tpot_histogram(fast: float, slow: float) -> BucketCounts:
    """Of 20 and 60 ms."""
    return BucketCounts(EDGES_S, (0.0, fast, 0.0, slow, 0.0, 0.0, 0.0), 0.02 * fast + 0.06 * slow)


def make_metrics(
    slo_counts: SloCounts | None, histograms: BucketCounts | None, role: Role = Role.SERVE, **other: Any
) -> ServiceMetrics:
    tier = TierMetrics(
        LaggingSignals(tpot_s=Unavailable("silence")),
        1.0,
        tpot_histogram=histograms,
        completed=0.0 if histograms is None else sum(histograms.counts),
    )
    return replace(ServiceMetrics(slo_counts=slo_counts, rejected_share=0.0, tiers={role: tier}), **other)


def available(share: float | Unavailable) -> float:
    assert not isinstance(share, Unavailable), share
    return share


def test_attainment_reports_share_per_target_and_bounds() -> None:
    found = slo_attainment(make_metrics(SloCounts(100.0, 5.0, 3.0, 2.0), tpot_histogram(96.0, 4.0)), ALL_TARGETS)
    assert {name: round(available(share), 9) for name, share in found.by_target.items()} == {
        "TTFT": 0.97,
        "TPOT": 0.96,
        "e2e": 0.98,
    }
    assert available(found.lower_bound) == pytest.approx(0.91)  # 5 late at the gateway, 4 slow, perhaps nobody both
    assert found.upper_bound == pytest.approx(0.95)  # perhaps the slow ones were late too
    assert found.missed_upper_bound == pytest.approx(0.09)
    assert found.unmeasured_target is None


def test_attainment_gateway_targets_have_exact_share() -> None:
    found = slo_attainment(make_metrics(SloCounts(100.0, 4.0, 3.0, 3.0), None), Slo(0.95, 0.5, e2e_s=20.0))
    assert available(found.lower_bound) == found.upper_bound == pytest.approx(0.96)  # two missed both
    assert list(found.by_target) == ["TTFT", "e2e"]


@pytest.mark.parametrize("histograms", [None, tpot_histogram(1.0, 99.0)])
def test_attainment_ttft_only_slo_needs_no_engine(histograms: BucketCounts | None) -> None:
    found = slo_attainment(make_metrics(SloCounts(50.0, 5.0, 5.0, 0.0), histograms), TTFT_ONLY)
    assert (found.by_target, found.lower_bound, found.upper_bound) == ({"TTFT": 0.9}, 0.9, 0.9)


@pytest.mark.parametrize("role", [Role.SERVE, Role.DECODE])
def test_attainment_tpot_only_slo_uses_engine_histogram(role: Role) -> None:
    found = slo_attainment(make_metrics(SloCounts(100.0, 0.0, 0.0, 0.0), tpot_histogram(90.0, 10.0), role), TPOT_ONLY)
    assert list(found.by_target) == ["TPOT"]
    assert available(found.lower_bound) == found.upper_bound == pytest.approx(0.9)


def test_attainment_tpot_only_slo_needs_no_gateway() -> None:
    found = slo_attainment(make_metrics(None, tpot_histogram(90.0, 10.0), ttft_s=Unavailable("no gateway")), TPOT_ONLY)
    assert available(found.lower_bound) == pytest.approx(0.9)
    assert found.unmeasured_target is None


def test_attainment_rejections_lower_offered_share_only() -> None:
    found = slo_attainment(
        make_metrics(SloCounts(90.0, 9.0, 9.0, 0.0), tpot_histogram(90.0, 0.0), rejected_share=0.1), BOTH
    )
    assert available(found.lower_bound) == pytest.approx(0.9)
    assert available(found.including_rejected) == pytest.approx(0.81)
    assert found.missed_upper_bound == pytest.approx(0.19)


def test_attainment_bounds_are_clamped_to_zero() -> None:
    found = slo_attainment(make_metrics(SloCounts(100.0, 70.0, 70.0, 0.0), tpot_histogram(20.0, 80.0)), BOTH)
    assert (found.lower_bound, found.missed_upper_bound) == (0.0, 1.0)
    assert found.upper_bound == pytest.approx(0.2)


@given(
    requests=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=200),
    single=st.integers(0, 50),
)
def test_attainment_true_share_lies_within_bounds(requests: list[tuple[bool, bool, bool]], single: int) -> None:
    """Requests by what they missed: first token, last token, pace; and some of one token, which keep all."""
    first, last, slow = np.array(requests, dtype=bool).T
    size = len(requests) + single
    slo_counts = SloCounts(float(size), float((first | last).sum()), float(first.sum()), float(last.sum()))
    metrics = make_metrics(slo_counts, tpot_histogram(float((~slow).sum()), float(slow.sum())))
    metrics = replace(metrics, tiers={Role.SERVE: replace(metrics.tiers[Role.SERVE], completed=float(size))})
    found = slo_attainment(metrics, ALL_TARGETS)
    true = 1.0 - (first | last | slow).sum() / size
    assert available(found.lower_bound) - 1e-9 <= true <= (found.upper_bound or 0.0) + 1e-9
    assert 1.0 - true <= (found.missed_upper_bound or 0.0) + 1e-9


# ---------------------------------------------------------------- classes with paces of their own

FAST, SLOW, ANY = Slo(0.95, tpot_s=0.05), Slo(0.95, tpot_s=0.1), Slo(0.95, 60.0)


def mixed_metrics(fast: float, slow: float, none: float, histograms: BucketCounts) -> ServiceMetrics:
    """So many answers that were promised 50 ms, 100 ms and no pace; histograms: what engines saw of all of them."""
    slo_counts = SloCounts(fast + slow + none, 0.0, 0.0, 0.0)
    return replace(make_metrics(slo_counts, histograms), by_tpot_target={0.05: fast, 0.1: slow})


def bounds(found: SloAttainment) -> tuple[float, float]:
    """At least and at most."""
    assert found.upper_bound is not None
    return round(available(found.lower_bound), 9), round(found.upper_bound, 9)


def test_attainment_class_without_tpot_target_cannot_miss() -> None:
    """A batch class at night, when nobody else is there: slow as it is, its engines break no promise."""
    found = slo_attainment(mixed_metrics(0.0, 0.0, 100.0, tpot_histogram(0.0, 100.0)), FAST, ANY)
    assert (bounds(found), found.by_target["TPOT"], found.unmeasured_target) == ((1.0, 1.0), 1.0, None)
    assert bounds(slo_attainment(mixed_metrics(10.0, 0.0, 90.0, tpot_histogram(0.0, 100.0)), FAST, ANY)) == (
        0.9,
        0.9,
    )  # those ten for sure
    assert bounds(slo_attainment(mixed_metrics(10.0, 0.0, 90.0, tpot_histogram(50.0, 50.0)), FAST, ANY)) == (0.9, 1.0)
    assert bounds(slo_attainment(mixed_metrics(60.0, 0.0, 40.0, tpot_histogram(95.0, 5.0)), FAST, ANY)) == (0.95, 1.0)


def test_attainment_class_uses_its_own_tpot_target() -> None:
    found = slo_attainment(
        mixed_metrics(20.0, 80.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW
    )  # 60 ms: too slow for some, not for others
    assert bounds(found) == (0.8, 1.0)
    assert bounds(slo_attainment(mixed_metrics(0.0, 100.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW)) == (1.0, 1.0)
    assert bounds(slo_attainment(mixed_metrics(100.0, 0.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW)) == (0.3, 0.3)


def test_attainment_classes_with_equal_tpot_are_merged() -> None:
    alike = slo_attainment(make_metrics(None, tpot_histogram(90.0, 10.0), ttft_s=Unavailable("no gateway")), FAST, FAST)
    assert bounds(alike) == (0.9, 0.9)


def test_attainment_class_only_tpot_is_reported_as_target() -> None:
    found = slo_attainment(
        mixed_metrics(50.0, 0.0, 50.0, tpot_histogram(0.0, 100.0)), Slo(0.95, 0.5, tpot_s=0.05), Slo(0.95, 60.0)
    )
    assert list(found.by_target) == ["TTFT", "TPOT"]
    assert bounds(found) == (0.5, 0.5)


CLASS = st.sampled_from([0.05, 0.1, 0.15, math.inf])
PACE_S = st.sampled_from([0.02, 0.06, 0.12, 0.2])


@given(st.lists(st.tuples(CLASS, PACE_S), min_size=1, max_size=60))
def test_attainment_mixed_tpot_targets_bounds_are_tight(answers: list[tuple[float, float]]) -> None:
    """And no tighter bound holds for all that look alike: paces could be dealt out so that either is true."""
    edges = (0.05, 0.1, 0.15, 1.0, math.inf)
    counts = [float(sum(low < pace <= high for _, pace in answers)) for low, high in pairwise((0.0, *edges))]
    metrics = make_metrics(
        SloCounts(float(len(answers)), 0.0, 0.0, 0.0), BucketCounts(edges, tuple(counts), sum(p for _, p in answers))
    )
    targets = sorted(target for target, _ in answers)
    paced = {target: float(targets.count(target)) for target in targets if target < math.inf}
    promised = [Slo(0.95, 60.0) if target == math.inf else Slo(0.95, 60.0, tpot_s=target) for target in set(targets)]
    found = slo_attainment(replace(metrics, by_tpot_target=paced), *promised)
    assert (
        available(found.lower_bound) - 1e-9
        <= sum(p <= t for t, p in answers) / len(answers)
        <= (found.upper_bound or 0.0) + 1e-9
    )
    paces_s = sorted(pace for _, pace in answers)
    assert found.upper_bound == pytest.approx(_paired(paces_s, targets) / len(answers))
    assert available(found.lower_bound) == pytest.approx(
        1.0 - _paired([t + 1e-9 for t in targets], paces_s) / len(answers)
    )


def _paired(low: list[float], high: list[float]) -> int:
    """How many pairs of one of each list there can be whose first is not above its second; both ascending."""
    found = 0
    for value in high:
        found += low[found] <= value
    return found


@pytest.mark.parametrize(
    ("differing", "why"),
    [
        ({"slo_counts": None}, "no gateway reports it"),
        ({"by_tpot_target": None}, "no gateway reports it"),
        ({"slo_counts": SloCounts(0.0, 0.0, 0.0, 0.0)}, "no response of the last minute counts for the target"),
    ],
    ids=["silent gateways", "gateways of an older release", "nobody answered"],
)
def test_attainment_mixed_tpot_without_gateway_is_unavailable(differing: dict[str, Any], why: str) -> None:
    metrics = replace(mixed_metrics(50.0, 50.0, 0.0, tpot_histogram(90.0, 10.0)), ttft_s=0.1, **differing)
    assert unknown(slo_attainment(metrics, FAST, SLOW)) == ("TPOT", why)


# ---------------------------------------------------------------- what is not known


def unknown(found: SloAttainment) -> tuple[str, str]:
    assert isinstance(found.lower_bound, Unavailable)
    assert isinstance(found.including_rejected, Unavailable)
    assert found.unmeasured_target is not None
    return found.unmeasured_target[0], found.unmeasured_target[1].reason


@pytest.mark.parametrize(
    ("slo_counts", "histograms", "of", "why"),
    [
        (None, tpot_histogram(9.0, 1.0), "TTFT", "no gateway reports it"),
        (
            SloCounts(0.0, 0.0, 0.0, 0.0),
            tpot_histogram(9.0, 1.0),
            "TTFT",
            "no response of the last minute counts for the target",
        ),
        (SloCounts(10.0, 0.0, 0.0, 0.0), None, "TPOT", "silence"),
        (
            SloCounts(10.0, 0.0, 0.0, 0.0),
            tpot_histogram(0.0, 0.0),
            "TPOT",
            "no response of the last minute counts for the target",
        ),
    ],
    ids=["old gateways", "nobody answered", "engines without a histogram", "nobody ended"],
)
def test_attainment_unmeasured_target_is_unavailable(
    slo_counts: SloCounts | None, histograms: BucketCounts | None, of: str, why: str
) -> None:
    assert unknown(slo_attainment(make_metrics(slo_counts, histograms, ttft_s=0.2), BOTH)) == (of, why)


def test_attainment_unknown_target_keeps_other_shares() -> None:
    found = slo_attainment(make_metrics(SloCounts(100.0, 2.0, 2.0, 0.0), None, rejected_share=0.5), BOTH)
    assert unknown(found)[0] == "TPOT"
    assert found.by_target["TTFT"] == pytest.approx(0.98)
    assert found.upper_bound == pytest.approx(0.98)
    assert found.missed_upper_bound == pytest.approx(0.51)


def test_attainment_all_rejected_counts_as_missed() -> None:
    nothing = make_metrics(None, None, ttft_s=Unavailable("no response in the last minute"))
    assert slo_attainment(replace(nothing, rejected_share=1.0), BOTH).missed_upper_bound == 1.0
    silent = slo_attainment(replace(nothing, rejected_share=Unavailable("nothing arrived")), BOTH)
    assert (silent.missed_upper_bound, silent.upper_bound) == (None, None)
    assert unknown(silent) == ("TTFT", "no response in the last minute")


def test_attainment_missing_decode_tier_is_unavailable() -> None:
    prefill = TierMetrics(
        LaggingSignals(tpot_s=Unavailable("a prefill engine decodes nothing")), 1.0, tpot_histogram=None
    )
    metrics = ServiceMetrics(
        slo_counts=SloCounts(5.0, 0.0, 0.0, 0.0), rejected_share=0.0, tiers={Role.PREFILL: prefill}
    )
    assert unknown(slo_attainment(metrics, BOTH)) == ("TPOT", "no engine reports it")


# ---------------------------------------------------------------- histograms


def test_attainment_single_token_outputs_meet_tpot() -> None:
    metrics = make_metrics(SloCounts(10.0, 0.0, 0.0, 0.0), tpot_histogram(0.0, 0.0))
    metrics = replace(metrics, tiers={Role.SERVE: replace(metrics.tiers[Role.SERVE], completed=10.0)})
    assert slo_attainment(metrics, BOTH).lower_bound == 1.0
    half = make_metrics(SloCounts(20.0, 0.0, 0.0, 0.0), tpot_histogram(8.0, 2.0))
    half = replace(half, tiers={Role.SERVE: replace(half.tiers[Role.SERVE], completed=20.0)})
    assert available(slo_attainment(half, BOTH).lower_bound) == pytest.approx(0.9)


def test_attainment_target_beyond_last_bucket_is_unknown() -> None:
    slo = Slo(0.95, tpot_s=0.4)
    below = make_metrics(SloCounts(10.0, 0.0, 0.0, 0.0), tpot_histogram(5.0, 5.0))
    assert slo_attainment(below, slo).lower_bound == 1.0
    some = BucketCounts(EDGES_S, (0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 1.0), 0.5)
    of, why = unknown(slo_attainment(make_metrics(SloCounts(10.0, 0.0, 0.0, 0.0), some), slo))
    assert (of, why) == ("TPOT", "TPOT values and the target exceed the engines' last histogram bucket, 150 ms")
    assert available(
        slo_attainment(make_metrics(SloCounts(10.0, 0.0, 0.0, 0.0), some), TPOT_ONLY).lower_bound
    ) == pytest.approx(0.9)


def test_attainment_histogram_without_edges_is_unavailable() -> None:
    blind = BucketCounts((math.inf,), (7.0,), 0.3)
    assert unknown(slo_attainment(make_metrics(SloCounts(7.0, 0.0, 0.0, 0.0), blind), TPOT_ONLY))[0] == "TPOT"


@pytest.mark.parametrize("counts", [(math.nan, 1.0), (1.0, math.nan), (-1.0, 2.0), (math.inf, 1.0)])
def test_engine_reading_invalid_tpot_buckets_are_dropped(counts: tuple[float, float]) -> None:
    reading = EngineReading("p", NOW_S, "a", tpot_s=BucketCounts((0.05, math.inf), counts, 1.0))
    assert sanitize(reading).tpot_s is None


@pytest.mark.parametrize("broken", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("field", SloCounts._fields)
def test_gateway_reading_invalid_slo_counts_is_rejected(field: str, broken: float) -> None:
    slo_counts = SloCounts(9.0, 3.0, 2.0, 1.0)._replace(**{field: broken})
    assert not is_valid_reading(gateway(9.0, slo_counts))


# ---------------------------------------------------------------- over time


def gateway(answers: float, slo_counts: SloCounts | None) -> ServiceReading:
    first = histogram.from_sparse(histogram.LATENCY_EDGES_S, {60: answers}, 0.2 * answers)
    return ServiceReading(answers, 100.0 * answers, 0.0, answers, 0.0, 0.0, {}, first, slo_counts=slo_counts)


def engine(at_s: float, instance_id: str, histograms: BucketCounts | None) -> EngineReading:
    return EngineReading("p", at_s, instance_id, running=1.0, waiting=0.0, tpot_s=histograms)


def attainment_of(listener: MetricsAggregator, now_s: float) -> SloAttainment:
    return slo_attainment(listener.collect(now_s, {Role.SERVE: ["p"]}, ["g"], 0.95), BOTH)


def test_attainment_uses_last_minute_only() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(200):
        n, missed = float(t), float(min(t, 100))  # all are late, and from 100 s on none
        listener.observe_gateway("g", "1", NOW_S + t, gateway(n, SloCounts(n, missed, missed, 0.0)))
        if t % 5 == 0:
            listener.observe_engine(Role.SERVE, engine(NOW_S + t, "1", tpot_histogram(n, 0.0)))
        found = attainment_of(listener, NOW_S + t)
        if t == 90:
            assert found.lower_bound == 0.0
    assert found.lower_bound == 1.0


def test_attainment_counter_reset_drops_the_interval() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(60):
        n = float(t if t < 30 else t - 30)  # both start anew, the gateway under another name of its start
        instance_id = "1" if t < 30 else "2"
        listener.observe_gateway("g", instance_id, NOW_S + t, gateway(n, SloCounts(n, 0.1 * n, 0.1 * n, 0.0)))
        if t % 5 == 0:
            listener.observe_engine(Role.SERVE, engine(NOW_S + t, "", tpot_histogram(0.9 * n, 0.1 * n)))
        found = attainment_of(listener, NOW_S + t)
        if t > 6:
            assert found.by_target["TTFT"] == pytest.approx(0.9)
            assert found.by_target["TPOT"] == pytest.approx(0.9)
            assert found.lower_bound == pytest.approx(0.8)


def test_slo_counts_of_several_gateways_are_summed_by_target() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(20):
        for name, paced in (("g", {0.05: 4.0 * t}), ("h", {0.05: 1.0 * t, 0.1: 2.0 * max(0, t - 9)})):
            reading = replace(gateway(9.0 * t, SloCounts(9.0 * t, 0.0, 0.0, 0.0)), by_tpot_target=paced)
            listener.observe_gateway(name, "1", NOW_S + t, reading)
    found = listener.collect(NOW_S + 20.0, {}, ["g", "h"], 0.95)
    assert found.slo_counts is not None
    assert (found.slo_counts.responses, found.by_tpot_target) == (2 * 9.0 * 19, {0.05: 5.0 * 19, 0.1: 20.0})


def test_slo_counts_of_mixed_releases_use_newer_gateway() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(20):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t, SloCounts(5.0 * t, 1.0 * t, 1.0 * t, 0.0)))
        listener.observe_gateway("old", "1", NOW_S + t, gateway(50.0 * t, None))
    found = slo_attainment(listener.collect(NOW_S + 20.0, {}, ["g", "old"], 0.95), TTFT_ONLY)
    assert available(found.lower_bound) == pytest.approx(0.8)


def test_slo_counts_of_older_gateways_only_is_unavailable() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(20):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t, None))
    assert unknown(attainment_of(listener, NOW_S + 20.0)) == ("TTFT", "no gateway reports it")


def test_attainment_silent_engines_make_tpot_unavailable() -> None:
    listener = MetricsAggregator([Role.SERVE])
    for t in range(60):
        listener.observe_gateway("g", "1", NOW_S + t, gateway(5.0 * t, SloCounts(5.0 * t, 0.0, 0.0, 0.0)))
        if t % 5 == 0 and t < 30:
            listener.observe_engine(Role.SERVE, engine(NOW_S + t, "1", tpot_histogram(5.0 * t, 0.0)))
        found = attainment_of(listener, NOW_S + t)
    assert unknown(found) == ("TPOT", "none of 1 pods has answered for 15 s")


def at_engines(within: float, late: float) -> ServiceMetrics:
    """TTFT of 20 and 60 ms, counted by engines whose requests pass no gateway."""
    found = make_metrics(None, tpot_histogram(96.0, 4.0), ttft_s=0.06, ttft_histogram=tpot_histogram(within, late))
    return replace(found, is_measured_at_engines=True)


def test_attainment_without_gateway_uses_engines_ttft() -> None:
    found = slo_attainment(at_engines(97.0, 3.0), Slo(0.95, 0.05, tpot_s=0.05))
    assert available(found.by_target["TTFT"]) == pytest.approx(0.97)
    assert available(found.lower_bound) == pytest.approx(0.93)
    assert found.unmeasured_target is None
    tpot_only = slo_attainment(at_engines(97.0, 3.0), TPOT_ONLY)
    assert available(tpot_only.lower_bound) == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (Slo(0.95, 0.05, e2e_s=20.0), ("e2e", "it cannot be measured at engines")),
        (Slo(0.95, 0.05, ttft_per_1k_tokens_s=0.1), ("TTFT", "its target depends on each prompt, and")),
        (Slo(0.95, 9.0), ("TTFT", "TTFT values and the target exceed the engines' last histogram bucket, 150 ms")),
    ],
)
def test_attainment_without_gateway_says_what_is_unknown(slo: Slo, expected: tuple[str, str]) -> None:
    beyond = tpot_histogram(97.0, 0.0)._replace(counts=(0.0, 97.0, 0.0, 0.0, 0.0, 0.0, 3.0))
    metrics = replace(at_engines(97.0, 3.0), ttft_histogram=beyond)
    name, why = unknown(slo_attainment(metrics, slo))
    assert (name, why[: len(expected[1])]) == expected
