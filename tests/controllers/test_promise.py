"""What a status says of a promise: the condition never contradicts the figures, and the unknown is no kept promise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.api.conditions import Condition, Reason, Type
from plimsoll.api.v1alpha1 import SloStatus
from plimsoll.controllers import promise
from plimsoll.core.autoscaler import Seen
from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, Judged
from plimsoll.core.scaling.observation import Measured
from plimsoll.core.signals import Heard, TierHeard
from plimsoll.core.slo import Slo

EDGES_S = (0.01, 0.025, 0.05, 0.075, math.inf)
BOTH = Slo(0.95, 0.5, tpot_s=0.05)
GATEWAY = Slo(0.95, 0.5, e2e_s=20.0)
Object = dict[str, Any]


def seen(late: float = 0.0, slow: float | None = 0.0, **other: Any) -> Seen:
    """1,000 answers, such shares of which were late with the first token, or slow; slow: None where it is unknown."""
    paces = (
        None if slow is None else Buckets(EDGES_S, (0.0, 1e3 * (1 - slow), 0.0, 1e3 * slow, 0.0), 20.0 + 40.0 * slow)
    )
    tpot_s = Unknown("the engines do not tell") if slow is None else 0.03
    tier = TierHeard(Measured(tpot_s=tpot_s, itl_s=other.pop("itl_s", Unknown("not told"))), 1.0, paces=paces)
    judged = Judged(1000.0, 1000.0 * late, 1000.0 * late, 0.0)
    heard = Heard(5.0, judged=judged, ttft_s=0.4, e2e_s=9.0, shed_share=0.0, tiers={Role.SERVE: tier})
    return Seen(replace(heard, **other), {})


def told(now: Seen, slo: Slo = BOTH, before: Condition | None = None) -> Condition:
    return promise.condition(now, slo, (slo,), before)


def test_a_promise_whose_bound_is_within_it_is_kept() -> None:
    found = told(seen(0.02, 0.03))
    assert (found.holds, found.reason) == (True, Reason.PROMISE_KEPT)
    assert found.message == (
        "TTFT 98% within 500ms (p95 400ms), TPOT 97% within 50ms (p95 30ms); 95% promised,"
        " at least 95% within all of a request"
    )


@pytest.mark.parametrize(("late", "slow"), [(0.06, 0.0), (0.0, 0.06), (0.06, 0.06), (0.06, None)])
def test_one_target_that_is_missed_too_often_breaks_the_promise(late: float, slow: float | None) -> None:
    assert told(seen(late, slow)).reason is Reason.PROMISE_BROKEN


def test_what_the_gateway_counts_by_request_is_never_undecided() -> None:
    """3 % late with the first token and 4 % with the last, nobody with both: 93 % kept all of it, and that is known."""
    judged = Judged(100.0, 7.0, 3.0, 4.0)
    found = told(seen(judged=judged), GATEWAY)
    assert found.reason is Reason.PROMISE_BROKEN
    assert found.message.endswith("; 95% promised, 93% within all of a request")
    assert told(seen(judged=judged._replace(missed=5.0)), GATEWAY).reason is Reason.PROMISE_KEPT


def test_between_its_bounds_a_promise_is_neither_kept_nor_broken() -> None:
    found = told(seen(0.03, 0.04))
    assert (found.holds, found.reason) == (None, Reason.PROMISE_UNDECIDED)
    assert found.message.endswith("; 95% promised, at least 93% within all of a request")


def test_a_pace_that_is_not_known_is_no_promise_kept() -> None:
    found = told(seen(0.0, None))
    assert (found.holds, found.reason) == (None, Reason.NOT_MEASURED)
    assert found.message == "TPOT is not known: the engines do not tell"
    assert told(seen(0.0, None), Slo(0.95, 0.5)).reason is Reason.PROMISE_KEPT  # nobody promised it


def test_gaps_are_judged_beside_the_shares() -> None:
    slo = replace(BOTH, itl_s=0.04)
    assert told(seen(itl_s=0.03), slo).reason is Reason.PROMISE_KEPT
    assert told(seen(itl_s=0.05), slo).reason is Reason.PROMISE_BROKEN
    assert told(seen(), slo).message == "itl is not known: not told"
    assert told(seen(0.5), slo).reason is Reason.PROMISE_BROKEN


def test_a_broken_promise_is_kept_again_only_with_something_to_spare() -> None:
    broken = told(seen(0.08))
    assert told(seen(0.045), BOTH, broken).holds is False
    assert told(seen(0.039), BOTH, broken).holds is True
    gaps = replace(BOTH, itl_s=0.04)
    long = told(seen(itl_s=0.05), gaps)
    assert told(seen(itl_s=0.039), gaps, long).holds is False
    assert told(seen(itl_s=0.035), gaps, long).holds is True


def test_an_undecided_promise_does_not_turn_at_every_report() -> None:
    before, turns = told(seen(0.03, 0.03)), 0
    for late in (0.019, 0.021) * 10:
        now = told(seen(late, 0.03), BOTH, before)
        turns += now.reason is not before.reason
        before = now
    assert turns == 0
    assert told(seen(0.005, 0.03), BOTH, before).reason is Reason.PROMISE_KEPT


def test_words_stay_while_only_figures_move_and_change_with_the_promise() -> None:
    first = told(seen(0.01, 0.01))
    assert told(seen(0.015, 0.01), BOTH, first) is first
    other = told(seen(0.01, 0.01), Slo(0.95, 0.5, tpot_s=0.06), first)
    assert "within 60ms" in other.message
    assert told(seen(0.01, 0.01), Slo(0.9, 0.5, tpot_s=0.05), first).message != first.message


SHARES = st.floats(0.0, 1.0)


@given(late=SHARES, slow=st.none() | SHARES, percentile=st.integers(1, 99), shed=SHARES)
def test_the_condition_and_the_figures_never_contradict_each_other(
    late: float, slow: float | None, percentile: int, shed: float
) -> None:
    now, slo = seen(late, slow, shed_share=shed), Slo(percentile / 100, 0.5, tpot_s=0.05)
    found, figures = told(now, slo), promise.figures(now, slo, (slo,), {})
    shares = {name: int(share[:-1]) for name, share in figures["met"].items()}
    if found.holds is True:
        assert int(figures["attainment"][:-1]) >= percentile
    if found.holds is False:
        assert min(shares.values()) < percentile
    if "attainment" in figures:
        assert int(figures["attainment"][:-1]) <= min(shares.values())
        assert int(figures["attainmentOffered"][:-1]) <= int(figures["attainment"][:-1])
        assert "notKnown" not in figures
    else:
        assert (slow, found.holds is True) == (None, False)
        assert figures["notKnown"].startswith("TPOT is not known")
    SloStatus.model_validate(figures)


def test_targets_of_classes_are_told_from_the_tightest_to_the_loosest_and_the_pace_as_a_bound() -> None:
    """Of 1,000 answers 600 were promised 50 ms, and 40 of all were slower: perhaps all of these were among the 600."""
    classes = BOTH, Slo(0.95, 60.0, 0.1)
    now = seen(0.01, 0.04, paced={0.05: 600.0})
    found = promise.condition(now, BOTH, classes, None)
    assert (found.holds, found.reason) == (True, Reason.PROMISE_KEPT)
    assert found.message == (
        "TTFT 99% within 500ms to 60s + 100ms per 1k tokens by class (p95 400ms),"
        " TPOT at least 96% within 50ms by class (p95 30ms); 95% promised, at least 95% within all of a request"
    )
    assert promise.figures(now, BOTH, classes, {})["met"] == {"ttft": "99%", "tpot": "96%"}
    assert promise.condition(seen(0.01, 0.04, paced={}), BOTH, classes, found) is found  # figures move, words stay
    loose = promise.condition(seen(0.01, 0.9, paced={}), BOTH, classes, None)
    assert "TPOT at least 100% within 50ms by class" in loose.message


def test_a_share_that_is_short_by_a_hair_is_not_rounded_up() -> None:
    figures = promise.figures(seen(0.0501, 0.0), BOTH, (BOTH,), {})
    assert figures["met"] == {"ttft": "94%", "tpot": "100%"}
    assert figures["attainment"] == "94%"
    assert promise.figures(seen(0.05, 0.0), BOTH, (BOTH,), {})["attainment"] == "95%"


def test_an_idle_service_has_no_figures() -> None:
    nobody = Unknown("nobody was answered in the last minute")
    none = Measured(tpot_s=nobody, itl_s=nobody)
    heard = Heard(0.0, judged=None, ttft_s=nobody, e2e_s=nobody, tiers={Role.SERVE: TierHeard(none, 1.0)})
    assert promise.figures(Seen(heard, {}), BOTH, (BOTH,), {}) == {}
    found = told(Seen(heard, {}))
    assert (found.type, found.holds, found.reason) == (Type.SLO_MET, None, Reason.NOT_MEASURED)
    assert found.message == "TTFT is not known: nobody was answered in the last minute"
