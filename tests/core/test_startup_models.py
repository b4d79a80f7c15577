"""Start-up times by what replicas are made of: a change starts anew, a roll-back finds what was known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import lifecycle
from plimsoll.core.lifecycle import expecting, record
from plimsoll.core.variants import MOST_KEPT, UNKNOWN, Ledgers, Variant, becomes, from_dict, started, to_dict

FIRST = expecting({"pull": 60.0, "load": 60.0})
ONE = Variant("Qwen/Qwen3-8B", "engine:1", "1 nvidia.com/gpu")
TWO = ONE._replace(image="engine:2")
OTHER_MODEL = Variant("meta/Llama-70B", "engine:1", "4 nvidia.com/gpu")


def after_startups(*starts: tuple[Variant, float], after: Ledgers | None = None) -> Ledgers:
    """Starts of so many seconds, each of the variant that was present then."""
    ledgers = after or Ledgers(FIRST)
    for variant, seconds in starts:
        ledgers = started(becomes(ledgers, variant), variant, [("load", seconds)])
    return ledgers


def p50_s(ledgers: Ledgers) -> float:
    return ledgers.ledger.whole.quantile_s(0.5)


def test_new_variant_starts_at_old_medians_with_prior_spread() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    after = becomes(before, TWO)
    assert after.ledger.whole.starts == 0.0
    assert p50_s(after) == pytest.approx(p50_s(before))
    assert after.ledger.horizon_s > 1.5 * before.ledger.horizon_s
    assert p50_s(after_startups((TWO, 90.0), after=after)) == pytest.approx(90.0, rel=0.15)  # one start outweighs it


def test_variant_differs_by_image_gpus_and_model() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    for name in Variant._fields:
        assert becomes(before, ONE._replace(**{name: "other"})).ledger.whole.starts == 0.0
    assert becomes(before, ONE) is before


def test_variant_of_other_model_starts_from_prior() -> None:
    """Its weights take another time to load: half a minute of a small one would have it overdue when it is not."""
    assert becomes(after_startups(*[(ONE, 30.0)] * 8), OTHER_MODEL).ledger == FIRST


def test_measured_requires_startup_of_same_model() -> None:
    """Clients are told to come back by what was measured, also while a new image replaces the old one."""
    seen = after_startups((ONE, 30.0))
    assert [Ledgers(FIRST).measured, seen.measured] == [False, True]
    assert [becomes(seen, TWO).measured, becomes(seen, OTHER_MODEL).measured] == [True, False]


def test_rolled_back_variant_finds_its_startup_model() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    forth = after_startups((TWO, 90.0), (TWO, 90.0), after=before)
    assert p50_s(forth) == pytest.approx(90.0, rel=0.15)
    assert becomes(forth, ONE).ledger == before.ledger


def test_late_startup_of_old_variant_updates_old_model() -> None:
    """While a rollout is under way pods of both become ready."""
    before = becomes(after_startups(*[(ONE, 30.0)] * 8), TWO)
    after = started(before, ONE, [("load", 33.0)])
    assert after.ledger == before.ledger
    assert after.of(ONE).whole.starts > before.of(ONE).whole.starts
    assert after.present == TWO


def test_startups_without_variant_belong_to_first_variant() -> None:
    """Of a release that kept one ledger a tier, and of callers that know of no variants."""
    plain = started(Ledgers(FIRST), UNKNOWN, [("load", 30.0)])
    assert becomes(plain, ONE).ledger == plain.ledger
    assert becomes(plain, UNKNOWN) is plain
    old = from_dict(json.loads(json.dumps(lifecycle.to_dict(record(FIRST, [("load", 30.0)])))), FIRST)
    assert becomes(old, ONE).ledger.whole.starts == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1.0, 600.0)), max_size=40))
def test_recent_variants_are_kept_and_round_trip(
    starts: list[tuple[int, float]],
) -> None:
    ledgers = after_startups(*[(ONE._replace(image=f"engine:{n}"), seconds) for n, seconds in starts])
    assert len(ledgers.known) <= MOST_KEPT
    recent = list(dict.fromkeys(reversed([f"engine:{n}" for n, _ in starts])))[:MOST_KEPT]
    assert {variant.image for variant, _ in ledgers.known} == set(recent)
    again = from_dict(json.loads(json.dumps(to_dict(ledgers))), FIRST)
    assert again.present == ledgers.present
    assert again.ledger.horizon_s == pytest.approx(ledgers.ledger.horizon_s, rel=1e-4)
    assert [variant for variant, _ in again.known] == [variant for variant, _ in ledgers.known]


def test_current_variant_is_never_evicted() -> None:
    ledgers = becomes(Ledgers(FIRST), ONE)
    for n in range(9):
        ledgers = started(ledgers, ONE._replace(image=f"other:{n}"), [("load", 30.0)])
    assert len(ledgers.known) == MOST_KEPT
    assert ONE in dict(ledgers.known)


GOOD = to_dict(after_startups((ONE, 30.0)))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"version": 3},
        GOOD | {"known": None},
        GOOD | {"known": GOOD["known"] * 5},
        GOOD | {"known": [[list(ONE)]]},
        GOOD | {"known": [[["a", "b"], GOOD["known"][0][1]]]},
        GOOD | {"known": [[["a", "b", 3], GOOD["known"][0][1]]]},
        GOOD | {"known": [[list(ONE), {"version": 9}]]},
        GOOD | {"known": [7]},
        GOOD | {"present": "x"},
        GOOD | {"present": ["x" * 2000, "", ""]},
    ],
)
def test_from_dict_invalid_startup_models_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"variant|ledger"):
        from_dict(bad, FIRST)
