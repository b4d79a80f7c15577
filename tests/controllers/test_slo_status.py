"""What a status says of a promise: the condition never contradicts the figures, and the unknown is no kept promise."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.v1alpha1 import SloStatus
from plimsoll.controllers.autoscale import slo_status
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import BucketCounts, SloCounts
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.units import parse_duration

EDGES_S = (0.01, 0.025, 0.05, 0.075, math.inf)
TTFT_TPOT_SLO = Slo(0.95, 0.5, tpot_s=0.05)
TTFT_E2E_SLO = Slo(0.95, 0.5, e2e_s=20.0)
Object = dict[str, Any]


def snapshot_of(late: float = 0.0, slow: float | None = 0.0, **other: Any) -> ServiceSnapshot:
    """1,000 answers, such shares of which were late with the first token, or slow; slow: None where it is unknown."""
    paces = None if slow is None else _tpots(slow)
    tpot_s = Unavailable("the engines do not tell") if slow is None else 0.03
    tier = TierMetrics(
        LaggingSignals(tpot_s=tpot_s, itl_s=other.pop("itl_s", Unavailable("not condition_of"))),
        1.0,
        tpot_histogram=paces,
    )
    slo_counts = SloCounts(1000.0, 1000.0 * late, 1000.0 * late, 0.0)
    metrics = ServiceMetrics(
        5.0, slo_counts=slo_counts, ttft_s=0.4, e2e_s=9.0, rejected_share=0.0, tiers={Role.SERVE: tier}
    )
    return ServiceSnapshot(replace(metrics, **other), {})


def _tpots(slow: float) -> BucketCounts:
    return BucketCounts(EDGES_S, (0.0, 1e3 * (1 - slow), 0.0, 1e3 * slow, 0.0), 20.0 + 40.0 * slow)


def condition_of(
    now: ServiceSnapshot, slo: Slo = TTFT_TPOT_SLO, before: Condition | None = None, *classes: Slo
) -> Condition:
    figures = slo_status.slo_figures(now, slo, classes or (slo,), {})
    return slo_status.slo_condition(now, slo, classes or (slo,), figures, before)


def test_slo_lower_bound_above_share_is_met() -> None:
    found = condition_of(snapshot_of(0.02, 0.03))
    assert (found.holds, found.reason) == (True, ConditionReason.SLO_MET)
    assert found.message == (
        "TTFT 98% within 500 ms (p95 400 ms), TPOT 97% within 50 ms (p95 30 ms);"
        " SLO 95%, at least 95% within all targets"
    )


@pytest.mark.parametrize(("late", "slow"), [(0.06, 0.0), (0.0, 0.06), (0.06, 0.06), (0.06, None)])
def test_slo_one_missed_target_is_violated(late: float, slow: float | None) -> None:
    assert condition_of(snapshot_of(late, slow)).reason is ConditionReason.SLO_VIOLATED


def test_slo_gateway_request_counts_are_never_undetermined() -> None:
    """3 % late with the first token and 4 % with the last, nobody with both: 93 % kept all of it, and that is known."""
    slo_counts = SloCounts(100.0, 7.0, 3.0, 4.0)
    found = condition_of(snapshot_of(slo_counts=slo_counts), TTFT_E2E_SLO)
    assert found.reason is ConditionReason.SLO_VIOLATED
    assert found.message.endswith("; SLO 95%, 93% within all targets")
    assert (
        condition_of(snapshot_of(slo_counts=slo_counts._replace(missed=5.0)), TTFT_E2E_SLO).reason
        is ConditionReason.SLO_MET
    )


def test_slo_between_bounds_is_undetermined() -> None:
    found = condition_of(snapshot_of(0.03, 0.04))
    assert (found.holds, found.reason) == (None, ConditionReason.SLO_UNDETERMINED)
    assert found.message.endswith("; SLO 95%, at least 93% within all targets")


def test_slo_tpot_not_measured_is_not_met() -> None:
    found = condition_of(snapshot_of(0.0, None))
    assert (found.holds, found.reason) == (None, ConditionReason.NOT_MEASURED)
    assert found.message == "TPOT is not known: the engines do not tell"
    assert condition_of(snapshot_of(0.0, None), Slo(0.95, 0.5)).reason is ConditionReason.SLO_MET  # nobody promised it


def test_slo_itl_is_assessed_besides_attainment() -> None:
    slo = replace(TTFT_TPOT_SLO, itl_s=0.04)
    assert condition_of(snapshot_of(itl_s=0.03), slo).reason is ConditionReason.SLO_MET
    assert condition_of(snapshot_of(itl_s=0.05), slo).reason is ConditionReason.SLO_VIOLATED
    assert condition_of(snapshot_of(), slo).message == "itl is not known: not condition_of"
    assert condition_of(snapshot_of(0.5), slo).reason is ConditionReason.SLO_VIOLATED


def test_slo_violated_is_met_again_only_with_margin() -> None:
    broken = condition_of(snapshot_of(0.08))
    assert "met again" not in broken.message
    recovering = condition_of(snapshot_of(0.045), TTFT_TPOT_SLO, broken)
    assert recovering.holds is False
    assert recovering.message.endswith("; SLO 95%, 95% within all targets; met again from 96%")
    assert condition_of(snapshot_of(0.039), TTFT_TPOT_SLO, broken).holds is True
    gaps = replace(TTFT_TPOT_SLO, itl_s=0.04)
    long = condition_of(snapshot_of(itl_s=0.05), gaps)
    near = condition_of(snapshot_of(itl_s=0.039), gaps, long)
    assert near.holds is False
    assert near.message.endswith("; met again from itl 36 ms")
    assert condition_of(snapshot_of(itl_s=0.035), gaps, long).holds is True


def test_slo_undetermined_has_hysteresis() -> None:
    before, turns = condition_of(snapshot_of(0.03, 0.03)), 0
    for late in (0.019, 0.021) * 10:
        now = condition_of(snapshot_of(late, 0.03), TTFT_TPOT_SLO, before)
        turns += now.reason is not before.reason
        before = now
    assert turns == 0
    assert condition_of(snapshot_of(0.005, 0.03), TTFT_TPOT_SLO, before).reason is ConditionReason.SLO_MET


def test_slo_message_changes_only_with_figures_or_targets() -> None:
    first = condition_of(snapshot_of(0.01, 0.01))
    assert condition_of(snapshot_of(0.01, 0.01), TTFT_TPOT_SLO, first) == first
    assert "TTFT 96% within" in condition_of(snapshot_of(0.035, 0.01), TTFT_TPOT_SLO, first).message
    figures = slo_status.slo_figures(snapshot_of(), TTFT_TPOT_SLO, (TTFT_TPOT_SLO,), {"ttft": "410ms"})
    near = slo_status.slo_condition(snapshot_of(), TTFT_TPOT_SLO, (TTFT_TPOT_SLO,), figures, first)
    assert "(p95 410 ms)" in near.message
    other = condition_of(snapshot_of(0.01, 0.01), Slo(0.95, 0.5, tpot_s=0.06), first)
    assert "within 60 ms" in other.message
    assert condition_of(snapshot_of(0.01, 0.01), Slo(0.9, 0.5, tpot_s=0.05), first).message != first.message


SHARES = st.floats(0.0, 1.0)


@given(late=SHARES, slow=st.none() | SHARES, percentile=st.integers(1, 99), shed=SHARES)
def test_slo_condition_never_contradicts_figures(late: float, slow: float | None, percentile: int, shed: float) -> None:
    now, slo = snapshot_of(late, slow, rejected_share=shed), Slo(percentile / 100, 0.5, tpot_s=0.05)
    found, figures = condition_of(now, slo), slo_status.slo_figures(now, slo, (slo,), {})
    shares = [int(share) for share in re.findall(r"(\d+)% within \d", found.message)]
    if found.holds is True:
        assert int(figures["attainment"][:-1]) >= percentile
    if found.holds is False:
        assert min(shares) < percentile
    if "attainment" in figures:
        assert int(figures["attainment"][:-1]) <= min(shares)
        if "attainmentIncludingRejected" in figures:
            assert int(figures["attainmentIncludingRejected"][:-1]) < int(figures["attainment"][:-1])
        assert "unavailableReason" not in figures
    else:
        assert (slow, found.holds is True) == (None, False)
        assert figures["unavailableReason"].startswith("TPOT is not known")
    SloStatus.model_validate(figures)


@given(
    late=st.sampled_from((0.0, 0.04, 0.05, 0.06, 0.5)),
    slow=st.sampled_from((0.0, 0.05, 0.06, 1.0)),
    seconds=st.floats(0.001, 2.0),
    previous=st.none() | st.sampled_from(("40ms", "50ms", "53ms", "480ms", "500ms", "550ms", "2s")),
)
def test_slo_percentile_and_share_agree_on_the_target(
    late: float, slow: float, seconds: float, previous: str | None
) -> None:
    """The percentile is interpolated, rounded and kept while it moves little; the share of requests is counted."""
    slo = replace(TTFT_TPOT_SLO, itl_s=0.053)
    tier = TierMetrics(LaggingSignals(tpot_s=seconds, itl_s=seconds), 1.0, tpot_histogram=_tpots(slow))
    now = snapshot_of(late, ttft_s=seconds, tiers={Role.SERVE: tier})
    found = slo_status.slo_figures(now, slo, (slo,), {name: previous for name in ("ttft", "tpot", "itl") if previous})
    for name, target_s, is_met in (("ttft", 0.5, late <= 0.05), ("itl", 0.053, seconds <= 0.053)):
        assert parse_duration(found[name]) <= target_s if is_met else parse_duration(found[name]) >= target_s
    if slow <= 0.05:
        assert parse_duration(found["tpot"]) <= 0.05


def test_slo_class_targets_are_listed_with_tpot_bound() -> None:
    """Of 1,000 answers 600 were promised 50 ms, and 40 of all were slower: perhaps all of these were among the 600."""
    classes = TTFT_TPOT_SLO, Slo(0.95, 60.0, 0.1)
    now = snapshot_of(0.01, 0.04, by_tpot_target={0.05: 600.0})
    found = condition_of(now, TTFT_TPOT_SLO, None, *classes)
    assert (found.holds, found.reason) == (True, ConditionReason.SLO_MET)
    assert found.message == (
        "TTFT 99% within 500 ms to 60 s + 100 ms per 1k tokens by class (p95 400 ms),"
        " TPOT at least 96% within 50 ms by class (p95 30 ms); SLO 95%, at least 95% within all targets"
    )
    loose = condition_of(snapshot_of(0.01, 0.9, by_tpot_target={}), TTFT_TPOT_SLO, None, *classes)
    assert "TPOT at least 100% within 50 ms by class" in loose.message


def test_slo_share_just_below_target_is_not_rounded_up() -> None:
    figures = slo_status.slo_figures(snapshot_of(0.0501, 0.0), TTFT_TPOT_SLO, (TTFT_TPOT_SLO,), {})
    assert figures["attainment"] == "94%"
    assert slo_status.slo_figures(snapshot_of(0.05, 0.0), TTFT_TPOT_SLO, (TTFT_TPOT_SLO,), {})["attainment"] == "95%"


def test_slo_idle_service_has_no_figures() -> None:
    no_response = Unavailable("no response in the last minute")
    none = LaggingSignals(tpot_s=no_response, itl_s=no_response)
    metrics = ServiceMetrics(
        0.0, slo_counts=None, ttft_s=no_response, e2e_s=no_response, tiers={Role.SERVE: TierMetrics(none, 1.0)}
    )
    assert slo_status.slo_figures(ServiceSnapshot(metrics, {}), TTFT_TPOT_SLO, (TTFT_TPOT_SLO,), {}) == {}
    found = condition_of(ServiceSnapshot(metrics, {}))
    assert (found.type, found.holds, found.reason) == (ConditionType.SLO_MET, None, ConditionReason.NOT_MEASURED)
    assert found.message == "TTFT is not known: no response in the last minute"
