"""Start-up times by what replicas are made of: a change starts anew, a roll-back finds what was known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.autoscaling.startup_models import (
    MAX_VARIANTS,
    UNKNOWN_VARIANT,
    StartupModels,
    Variant,
    decode_models,
    record_startup,
    select_variant,
)
from plimsoll.core.autoscaling.startup_time import from_medians, record

FIRST = from_medians({"pull": 60.0, "load": 60.0})
ONE = Variant("Qwen/Qwen3-8B", "engine:1", "1 nvidia.com/gpu")
TWO = ONE._replace(image="engine:2")
OTHER_MODEL = Variant("meta/Llama-70B", "engine:1", "4 nvidia.com/gpu")


def after_startups(*starts: tuple[Variant, float], after: StartupModels | None = None) -> StartupModels:
    """Starts of so many seconds, each of the variant that was present then."""
    ledgers = after or StartupModels(FIRST)
    for variant, seconds in starts:
        ledgers = record_startup(select_variant(ledgers, variant), variant, [("load", seconds)])
    return ledgers


def p50_s(ledgers: StartupModels) -> float:
    return ledgers.current_model.total.quantile_s(0.5)


def test_new_variant_starts_at_old_medians_with_prior_spread() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    after = select_variant(before, TWO)
    assert after.current_model.total.startups == 0.0
    assert p50_s(after) == pytest.approx(p50_s(before))
    assert after.current_model.horizon_s > 1.5 * before.current_model.horizon_s
    assert p50_s(after_startups((TWO, 90.0), after=after)) == pytest.approx(90.0, rel=0.15)  # one start outweighs it


def test_variant_differs_by_image_gpus_and_model() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    for name in Variant._fields:
        assert select_variant(before, ONE._replace(**{name: "other"})).current_model.total.startups == 0.0
    assert select_variant(before, ONE) is before


def test_variant_of_other_model_starts_from_prior() -> None:
    """Its weights take another time to load: half a minute of a small one would have it overdue when it is not."""
    assert select_variant(after_startups(*[(ONE, 30.0)] * 8), OTHER_MODEL).current_model == FIRST


def test_measured_requires_startup_of_same_model() -> None:
    """Clients are told to come back by what was measured, also while a new image replaces the old one."""
    observed = after_startups((ONE, 30.0))
    assert [StartupModels(FIRST).has_startups, observed.has_startups] == [False, True]
    assert [select_variant(observed, TWO).has_startups, select_variant(observed, OTHER_MODEL).has_startups] == [
        True,
        False,
    ]


def test_rolled_back_variant_finds_its_startup_model() -> None:
    before = after_startups(*[(ONE, 30.0)] * 8)
    forth = after_startups((TWO, 90.0), (TWO, 90.0), after=before)
    assert p50_s(forth) == pytest.approx(90.0, rel=0.15)
    assert select_variant(forth, ONE).current_model == before.current_model


def test_new_variant_restarts_at_old_medians_with_prior_spread() -> None:
    before = after_startups((ONE, 90.0))
    for _ in range(4):
        before = record_startup(before, ONE, [("restart", 1.0), ("load", 29.0)], is_restart=True)
    assert before.current_model.total.startups == 1.0
    after = select_variant(before, TWO).current_model
    assert after.restart.total.startups == 0.0
    assert after.restart.total.quantile_s(0.5) == pytest.approx(30.0, rel=0.1)
    assert select_variant(before, OTHER_MODEL).current_model.restart_total is None


def test_late_startup_of_old_variant_updates_old_model() -> None:
    """While a rollout is under way pods of both become ready."""
    before = select_variant(after_startups(*[(ONE, 30.0)] * 8), TWO)
    after = record_startup(before, ONE, [("load", 33.0)])
    assert after.current_model == before.current_model
    assert after.model_for(ONE).total.startups > before.model_for(ONE).total.startups
    assert after.current == TWO


def test_startups_without_variant_belong_to_first_variant() -> None:
    """Of a release that kept one ledger a tier, and of callers that know of no variants."""
    plain = record_startup(StartupModels(FIRST), UNKNOWN_VARIANT, [("load", 30.0)])
    assert select_variant(plain, ONE).current_model == plain.current_model
    assert select_variant(plain, UNKNOWN_VARIANT) is plain
    old = decode_models(json.loads(json.dumps(codec.encode(record(FIRST, [("load", 30.0)])))), FIRST)
    assert select_variant(old, ONE).current_model.total.startups == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(1.0, 600.0)), max_size=40))
def test_recent_variants_are_kept_and_round_trip(
    starts: list[tuple[int, float]],
) -> None:
    ledgers = after_startups(*[(ONE._replace(image=f"engine:{n}"), seconds) for n, seconds in starts])
    assert len(ledgers.by_variant) <= MAX_VARIANTS
    recent = list(dict.fromkeys(reversed([f"engine:{n}" for n, _ in starts])))[:MAX_VARIANTS]
    assert {variant.image for variant, _ in ledgers.by_variant} == set(recent)
    again = decode_models(json.loads(json.dumps(codec.encode(ledgers))), FIRST)
    assert again.current == ledgers.current
    assert again.current_model.horizon_s == pytest.approx(ledgers.current_model.horizon_s, rel=1e-4)
    assert [variant for variant, _ in again.by_variant] == [variant for variant, _ in ledgers.by_variant]


def test_current_variant_is_never_evicted() -> None:
    ledgers = select_variant(StartupModels(FIRST), ONE)
    for n in range(9):
        ledgers = record_startup(ledgers, ONE._replace(image=f"other:{n}"), [("load", 30.0)])
    assert len(ledgers.by_variant) == MAX_VARIANTS
    assert ONE in dict(ledgers.by_variant)


GOOD = codec.encode(after_startups((ONE, 30.0)))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        {},
        {"version": 3},
        GOOD | {"variants": None},
        GOOD | {"variants": GOOD["variants"] * 5},
        GOOD | {"variants": [[list(ONE)]]},
        GOOD | {"variants": [[["a", "b"], GOOD["variants"][0][1]]]},
        GOOD | {"variants": [[["a", "b", 3], GOOD["variants"][0][1]]]},
        GOOD | {"variants": [[list(ONE), {"version": 9}]]},
        GOOD | {"variants": [7]},
        GOOD | {"current": "x"},
        GOOD | {"current": ["x" * 2000, "", ""]},
    ],
)
def test_from_dict_invalid_startup_models_raises(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"variant|start-up model"):
        decode_models(bad, FIRST)
