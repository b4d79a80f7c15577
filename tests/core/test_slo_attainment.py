"""What share of the answers bounds a promise: bounds that hold whoever missed what, and no claim of the unknown."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import buckets
from plimsoll.core.autoscaler.attained import Attained, attained
from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading, Judged, ServiceReading
from plimsoll.core.scaling.observation import Measured
from plimsoll.core.signals import Heard, Listener, TierHeard
from plimsoll.core.signals.intervals import answered, is_answer
from plimsoll.core.slo import Slo

NOW_S = 1.8e9
EDGES_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, math.inf)
BOTH = Slo(0.95, 0.5, tpot_s=0.05)
ALL_TARGETS = Slo(0.95, 0.5, tpot_s=0.05, e2e_s=20.0)
TTFT_ONLY = Slo(0.95, 0.5)
TPOT_ONLY = Slo(0.95, tpot_s=0.05)


def tpot_histogram(fast: float, slow: float) -> Buckets:
    """Of 20 and 60 ms."""
    return Buckets(EDGES_S, (0.0, fast, 0.0, slow, 0.0, 0.0, 0.0), 0.02 * fast + 0.06 * slow)


def make_metrics(judged: Judged | None, told: Buckets | None, role: Role = Role.SERVE, **other: Any) -> Heard:
    tier = TierHeard(
        Measured(tpot_s=Unknown("silence")), 1.0, paces=told, ended=0.0 if told is None else sum(told.counts)
    )
    return replace(Heard(judged=judged, shed_share=0.0, tiers={role: tier}), **other)


def available(share: float | Unknown) -> float:
    assert not isinstance(share, Unknown), share
    return share


def test_attainment_reports_share_per_target_and_bounds() -> None:
    found = attained(make_metrics(Judged(100.0, 5.0, 3.0, 2.0), tpot_histogram(96.0, 4.0)), ALL_TARGETS)
    assert {name: round(available(share), 9) for name, share in found.met.items()} == {
        "TTFT": 0.97,
        "TPOT": 0.96,
        "e2e": 0.98,
    }
    assert available(found.least) == pytest.approx(0.91)  # 5 late at the gateway, 4 slow, perhaps nobody both
    assert found.most == pytest.approx(0.95)  # perhaps the slow ones were late too
    assert found.missed == pytest.approx(0.09)
    assert found.unknown is None


def test_attainment_gateway_targets_have_exact_share() -> None:
    found = attained(make_metrics(Judged(100.0, 4.0, 3.0, 3.0), None), Slo(0.95, 0.5, e2e_s=20.0))
    assert available(found.least) == found.most == pytest.approx(0.96)  # two missed both
    assert list(found.met) == ["TTFT", "e2e"]


@pytest.mark.parametrize("told", [None, tpot_histogram(1.0, 99.0)])
def test_attainment_ttft_only_slo_needs_no_engine(told: Buckets | None) -> None:
    found = attained(make_metrics(Judged(50.0, 5.0, 5.0, 0.0), told), TTFT_ONLY)
    assert (found.met, found.least, found.most) == ({"TTFT": 0.9}, 0.9, 0.9)


@pytest.mark.parametrize("role", [Role.SERVE, Role.DECODE])
def test_attainment_tpot_only_slo_uses_engine_histogram(role: Role) -> None:
    found = attained(make_metrics(Judged(100.0, 0.0, 0.0, 0.0), tpot_histogram(90.0, 10.0), role), TPOT_ONLY)
    assert list(found.met) == ["TPOT"]
    assert available(found.least) == found.most == pytest.approx(0.9)


def test_attainment_tpot_only_slo_needs_no_gateway() -> None:
    found = attained(make_metrics(None, tpot_histogram(90.0, 10.0), ttft_s=Unknown("no gateway")), TPOT_ONLY)
    assert available(found.least) == pytest.approx(0.9)
    assert found.unknown is None


def test_attainment_rejections_lower_offered_share_only() -> None:
    found = attained(make_metrics(Judged(90.0, 9.0, 9.0, 0.0), tpot_histogram(90.0, 0.0), shed_share=0.1), BOTH)
    assert available(found.least) == pytest.approx(0.9)
    assert available(found.offered) == pytest.approx(0.81)
    assert found.missed == pytest.approx(0.19)


def test_attainment_bounds_are_clamped_to_zero() -> None:
    found = attained(make_metrics(Judged(100.0, 70.0, 70.0, 0.0), tpot_histogram(20.0, 80.0)), BOTH)
    assert (found.least, found.missed) == (0.0, 1.0)
    assert found.most == pytest.approx(0.2)


@given(
    requests=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=200),
    single=st.integers(0, 50),
)
def test_attainment_true_share_lies_within_bounds(requests: list[tuple[bool, bool, bool]], single: int) -> None:
    """Requests by what they missed: first token, last token, pace; and some of one token, which keep all."""
    first, last, slow = np.array(requests, dtype=bool).T
    size = len(requests) + single
    judged = Judged(float(size), float((first | last).sum()), float(first.sum()), float(last.sum()))
    told = make_metrics(judged, tpot_histogram(float((~slow).sum()), float(slow.sum())))
    told = replace(told, tiers={Role.SERVE: replace(told.tiers[Role.SERVE], ended=float(size))})
    found = attained(told, ALL_TARGETS)
    true = 1.0 - (first | last | slow).sum() / size
    assert available(found.least) - 1e-9 <= true <= (found.most or 0.0) + 1e-9
    assert 1.0 - true <= (found.missed or 0.0) + 1e-9


# ---------------------------------------------------------------- classes with tpot_histogram of their own

FAST, SLOW, ANY = Slo(0.95, tpot_s=0.05), Slo(0.95, tpot_s=0.1), Slo(0.95, 60.0)


def mixed_metrics(fast: float, slow: float, none: float, told: Buckets) -> Heard:
    """So many answers that were promised 50 ms, 100 ms and no pace; told: what engines saw of all of them."""
    judged = Judged(fast + slow + none, 0.0, 0.0, 0.0)
    return replace(make_metrics(judged, told), paced={0.05: fast, 0.1: slow})


def bounds(found: Attained) -> tuple[float, float]:
    """At least and at most."""
    assert found.most is not None
    return round(available(found.least), 9), round(found.most, 9)


def test_attainment_class_without_tpot_target_cannot_miss() -> None:
    """A batch class at night, when nobody else is there: slow as it is, its engines break no promise."""
    found = attained(mixed_metrics(0.0, 0.0, 100.0, tpot_histogram(0.0, 100.0)), FAST, ANY)
    assert (bounds(found), found.met["TPOT"], found.unknown) == ((1.0, 1.0), 1.0, None)
    assert bounds(attained(mixed_metrics(10.0, 0.0, 90.0, tpot_histogram(0.0, 100.0)), FAST, ANY)) == (
        0.9,
        0.9,
    )  # those ten for sure
    assert bounds(attained(mixed_metrics(10.0, 0.0, 90.0, tpot_histogram(50.0, 50.0)), FAST, ANY)) == (0.9, 1.0)
    assert bounds(attained(mixed_metrics(60.0, 0.0, 40.0, tpot_histogram(95.0, 5.0)), FAST, ANY)) == (0.95, 1.0)


def test_attainment_class_uses_its_own_tpot_target() -> None:
    found = attained(
        mixed_metrics(20.0, 80.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW
    )  # 60 ms: too slow for some, not for others
    assert bounds(found) == (0.8, 1.0)
    assert bounds(attained(mixed_metrics(0.0, 100.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW)) == (1.0, 1.0)
    assert bounds(attained(mixed_metrics(100.0, 0.0, 0.0, tpot_histogram(30.0, 70.0)), FAST, SLOW)) == (0.3, 0.3)


def test_attainment_classes_with_equal_tpot_are_merged() -> None:
    alike = attained(make_metrics(None, tpot_histogram(90.0, 10.0), ttft_s=Unknown("no gateway")), FAST, FAST)
    assert bounds(alike) == (0.9, 0.9)


def test_attainment_class_only_tpot_is_reported_as_target() -> None:
    found = attained(
        mixed_metrics(50.0, 0.0, 50.0, tpot_histogram(0.0, 100.0)), Slo(0.95, 0.5, tpot_s=0.05), Slo(0.95, 60.0)
    )
    assert list(found.met) == ["TTFT", "TPOT"]
    assert bounds(found) == (0.5, 0.5)


CLASS = st.sampled_from([0.05, 0.1, 0.15, math.inf])
PACE_S = st.sampled_from([0.02, 0.06, 0.12, 0.2])


@given(st.lists(st.tuples(CLASS, PACE_S), min_size=1, max_size=60))
def test_attainment_mixed_tpot_targets_bounds_are_tight(answers: list[tuple[float, float]]) -> None:
    """And no tighter bound holds for all that look alike: tpot_histogram could be dealt out so that either is true."""
    edges = (0.05, 0.1, 0.15, 1.0, math.inf)
    counts = [float(sum(low < pace <= high for _, pace in answers)) for low, high in pairwise((0.0, *edges))]
    told = make_metrics(
        Judged(float(len(answers)), 0.0, 0.0, 0.0), Buckets(edges, tuple(counts), sum(p for _, p in answers))
    )
    targets = sorted(target for target, _ in answers)
    paced = {target: float(targets.count(target)) for target in targets if target < math.inf}
    promised = [Slo(0.95, 60.0) if target == math.inf else Slo(0.95, 60.0, tpot_s=target) for target in set(targets)]
    found = attained(replace(told, paced=paced), *promised)
    assert available(found.least) - 1e-9 <= sum(p <= t for t, p in answers) / len(answers) <= (found.most or 0.0) + 1e-9
    paces_s = sorted(pace for _, pace in answers)
    assert found.most == pytest.approx(_paired(paces_s, targets) / len(answers))
    assert available(found.least) == pytest.approx(1.0 - _paired([t + 1e-9 for t in targets], paces_s) / len(answers))


def _paired(low: list[float], high: list[float]) -> int:
    """How many pairs of one of each list there can be whose first is not above its second; both ascending."""
    found = 0
    for value in high:
        found += low[found] <= value
    return found


@pytest.mark.parametrize(
    ("differing", "why"),
    [
        ({"judged": None}, "the gateways do not tell"),
        ({"paced": None}, "the gateways do not tell"),
        ({"judged": Judged(0.0, 0.0, 0.0, 0.0)}, "no answer of the last minute can be held against it"),
    ],
    ids=["silent gateways", "gateways of an older release", "nobody answered"],
)
def test_attainment_mixed_tpot_without_gateway_is_unavailable(differing: dict[str, Any], why: str) -> None:
    told = replace(mixed_metrics(50.0, 50.0, 0.0, tpot_histogram(90.0, 10.0)), ttft_s=0.1, **differing)
    assert unknown(attained(told, FAST, SLOW)) == ("TPOT", why)


# ---------------------------------------------------------------- what is not available


def unknown(found: Attained) -> tuple[str, str]:
    assert isinstance(found.least, Unknown)
    assert isinstance(found.offered, Unknown)
    assert found.unknown is not None
    return found.unknown[0], found.unknown[1].why


@pytest.mark.parametrize(
    ("judged", "told", "of", "why"),
    [
        (None, tpot_histogram(9.0, 1.0), "TTFT", "the gateways do not tell"),
        (
            Judged(0.0, 0.0, 0.0, 0.0),
            tpot_histogram(9.0, 1.0),
            "TTFT",
            "no answer of the last minute can be held against it",
        ),
        (Judged(10.0, 0.0, 0.0, 0.0), None, "TPOT", "silence"),
        (
            Judged(10.0, 0.0, 0.0, 0.0),
            tpot_histogram(0.0, 0.0),
            "TPOT",
            "no answer of the last minute can be held against it",
        ),
    ],
    ids=["old gateways", "nobody answered", "engines without a histogram", "nobody ended"],
)
def test_attainment_unmeasured_target_is_unavailable(
    judged: Judged | None, told: Buckets | None, of: str, why: str
) -> None:
    assert unknown(attained(make_metrics(judged, told, ttft_s=0.2), BOTH)) == (of, why)


def test_attainment_unknown_target_keeps_other_shares() -> None:
    found = attained(make_metrics(Judged(100.0, 2.0, 2.0, 0.0), None, shed_share=0.5), BOTH)
    assert unknown(found)[0] == "TPOT"
    assert found.met["TTFT"] == pytest.approx(0.98)
    assert found.most == pytest.approx(0.98)
    assert found.missed == pytest.approx(0.51)


def test_attainment_all_rejected_counts_as_missed() -> None:
    nothing = make_metrics(None, None, ttft_s=Unknown("nobody was answered in the last minute"))
    assert attained(replace(nothing, shed_share=1.0), BOTH).missed == 1.0
    silent = attained(replace(nothing, shed_share=Unknown("nothing arrived")), BOTH)
    assert (silent.missed, silent.most) == (None, None)
    assert unknown(silent) == ("TTFT", "nobody was answered in the last minute")


def test_attainment_missing_decode_tier_is_unavailable() -> None:
    prefill = TierHeard(Measured(tpot_s=Unknown("a prefill engine decodes nothing")), 1.0, paces=None)
    told = Heard(judged=Judged(5.0, 0.0, 0.0, 0.0), shed_share=0.0, tiers={Role.PREFILL: prefill})
    assert unknown(attained(told, BOTH)) == ("TPOT", "the engines do not tell")


# ---------------------------------------------------------------- histograms


def test_attainment_single_token_outputs_meet_tpot() -> None:
    told = make_metrics(Judged(10.0, 0.0, 0.0, 0.0), tpot_histogram(0.0, 0.0))
    told = replace(told, tiers={Role.SERVE: replace(told.tiers[Role.SERVE], ended=10.0)})
    assert attained(told, BOTH).least == 1.0
    half = make_metrics(Judged(20.0, 0.0, 0.0, 0.0), tpot_histogram(8.0, 2.0))
    half = replace(half, tiers={Role.SERVE: replace(half.tiers[Role.SERVE], ended=20.0)})
    assert available(attained(half, BOTH).least) == pytest.approx(0.9)


def test_attainment_target_beyond_last_bucket_is_unknown() -> None:
    slo = Slo(0.95, tpot_s=0.4)
    below = make_metrics(Judged(10.0, 0.0, 0.0, 0.0), tpot_histogram(5.0, 5.0))
    assert attained(below, slo).least == 1.0
    some = Buckets(EDGES_S, (0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 1.0), 0.5)
    of, why = unknown(attained(make_metrics(Judged(10.0, 0.0, 0.0, 0.0), some), slo))
    assert (of, why) == ("TPOT", "some tpot_histogram lie beyond the engines' last bucket, 0.15 s, and the target too")
    assert available(attained(make_metrics(Judged(10.0, 0.0, 0.0, 0.0), some), TPOT_ONLY).least) == pytest.approx(0.9)


def test_attainment_histogram_without_edges_is_unavailable() -> None:
    blind = Buckets((math.inf,), (7.0,), 0.3)
    assert unknown(attained(make_metrics(Judged(7.0, 0.0, 0.0, 0.0), blind), TPOT_ONLY))[0] == "TPOT"


@pytest.mark.parametrize("counts", [(math.nan, 1.0), (1.0, math.nan), (-1.0, 2.0), (math.inf, 1.0)])
def test_engine_reading_invalid_tpot_buckets_are_dropped(counts: tuple[float, float]) -> None:
    reading = EngineReading("p", NOW_S, "a", tpot_s=Buckets((0.05, math.inf), counts, 1.0))
    assert answered(reading).tpot_s is None


@pytest.mark.parametrize("broken", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("field", Judged._fields)
def test_gateway_reading_invalid_slo_counts_is_rejected(field: str, broken: float) -> None:
    judged = Judged(9.0, 3.0, 2.0, 1.0)._replace(**{field: broken})
    assert not is_answer(gateway(9.0, judged))


# ---------------------------------------------------------------- over time


def gateway(answers: float, judged: Judged | None) -> ServiceReading:
    first = buckets.from_sparse(buckets.LATENCY_EDGES_S, {60: answers}, 0.2 * answers)
    return ServiceReading(answers, 100.0 * answers, 0.0, answers, 0.0, 0.0, {}, first, judged=judged)


def engine(at_s: float, born: str, told: Buckets | None) -> EngineReading:
    return EngineReading("p", at_s, born, running=1.0, waiting=0.0, tpot_s=told)


def attainment_of(listener: Listener, now_s: float) -> Attained:
    return attained(listener.heard(now_s, {Role.SERVE: ["p"]}, ["g"], 0.95), BOTH)


def test_attainment_uses_last_minute_only() -> None:
    listener = Listener([Role.SERVE])
    for t in range(200):
        n, missed = float(t), float(min(t, 100))  # all are late, and from 100 s on none
        listener.hear_gateway("g", "1", NOW_S + t, gateway(n, Judged(n, missed, missed, 0.0)))
        if t % 5 == 0:
            listener.hear_engine(Role.SERVE, engine(NOW_S + t, "1", tpot_histogram(n, 0.0)))
        found = attainment_of(listener, NOW_S + t)
        if t == 90:
            assert found.least == 0.0
    assert found.least == 1.0


def test_attainment_counter_reset_drops_the_interval() -> None:
    listener = Listener([Role.SERVE])
    for t in range(60):
        n = float(t if t < 30 else t - 30)  # both start anew, the gateway under another name of its start
        born = "1" if t < 30 else "2"
        listener.hear_gateway("g", born, NOW_S + t, gateway(n, Judged(n, 0.1 * n, 0.1 * n, 0.0)))
        if t % 5 == 0:
            listener.hear_engine(Role.SERVE, engine(NOW_S + t, "", tpot_histogram(0.9 * n, 0.1 * n)))
        found = attainment_of(listener, NOW_S + t)
        if t > 6:
            assert found.met["TTFT"] == pytest.approx(0.9)
            assert found.met["TPOT"] == pytest.approx(0.9)
            assert found.least == pytest.approx(0.8)


def test_slo_counts_of_several_gateways_are_summed_by_target() -> None:
    listener = Listener([Role.SERVE])
    for t in range(20):
        for name, paced in (("g", {0.05: 4.0 * t}), ("h", {0.05: 1.0 * t, 0.1: 2.0 * max(0, t - 9)})):
            told = replace(gateway(9.0 * t, Judged(9.0 * t, 0.0, 0.0, 0.0)), paced=paced)
            listener.hear_gateway(name, "1", NOW_S + t, told)
    found = listener.heard(NOW_S + 20.0, {}, ["g", "h"], 0.95)
    assert found.judged is not None
    assert (found.judged.answers, found.paced) == (2 * 9.0 * 19, {0.05: 5.0 * 19, 0.1: 20.0})


def test_slo_counts_of_mixed_releases_use_newer_gateway() -> None:
    listener = Listener([Role.SERVE])
    for t in range(20):
        listener.hear_gateway("g", "1", NOW_S + t, gateway(5.0 * t, Judged(5.0 * t, 1.0 * t, 1.0 * t, 0.0)))
        listener.hear_gateway("old", "1", NOW_S + t, gateway(50.0 * t, None))
    found = attained(listener.heard(NOW_S + 20.0, {}, ["g", "old"], 0.95), TTFT_ONLY)
    assert available(found.least) == pytest.approx(0.8)


def test_slo_counts_of_older_gateways_only_is_unavailable() -> None:
    listener = Listener([Role.SERVE])
    for t in range(20):
        listener.hear_gateway("g", "1", NOW_S + t, gateway(5.0 * t, None))
    assert unknown(attainment_of(listener, NOW_S + 20.0)) == ("TTFT", "the gateways do not tell")


def test_attainment_silent_engines_make_tpot_unavailable() -> None:
    listener = Listener([Role.SERVE])
    for t in range(60):
        listener.hear_gateway("g", "1", NOW_S + t, gateway(5.0 * t, Judged(5.0 * t, 0.0, 0.0, 0.0)))
        if t % 5 == 0 and t < 30:
            listener.hear_engine(Role.SERVE, engine(NOW_S + t, "1", tpot_histogram(5.0 * t, 0.0)))
        found = attainment_of(listener, NOW_S + t)
    assert unknown(found) == ("TPOT", "none of 1 pods has answered for 15 s")
