"""What the operator tells the gateways: written seldom, read whole or not at all, shared without being exceeded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.normalize import normalize
from plimsoll.core import codec
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.publication import AdmissionLimits, has_changed
from plimsoll.core.admission.share_controller import MIN_REBALANCE_INTERVAL_S, ShareController
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.ports import ServiceReading
from plimsoll.core.prompt_tokens import MediaKind
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

MODEL = StepModel(0.015, -0.001, 5e-5, 1e-9, 2e-5, 4e-8)
MIX = from_samples([200.0, 1000.0, 4000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])

LIMITS = EngineCostModel(
    base_s=0.015, prefill_step_s=-0.001, prefill_token_s=5e-5, prefill_pair_s=1e-9, sequence_s=2e-5,
    cached_token_s=4e-8, post_fixed_s=0.0, post_block_s=0.0, block_tokens=0, remote_base_s=0.015,
    remote_token_s=5e-5, remote_pair_s=0.0, token_budget=8192, kv_tokens=330_000, max_sequences=256, output_mean=200.0,
    output_variance=9000.0, batch=40,
    step_budget_s=(0.03, math.inf), tpot_s=(0.05, math.inf), full_utilization=0.6, max_spread_s=0.001, stall_s=0.05,
    idle_ttft_s=0.1, kv_transfer_token_s=3e-6, output_quantiles=(50.0, 150.0, 250.0, 400.0),
)  # fmt: skip
RATIOS = {"image": 0.26, "text": 1.1}
PUBLISHED = AdmissionLimits(("high", "low"), LIMITS, 1.8e9, 12.5, True, {"gw-a": 25, "gw-b": 15})
STAGGERED = replace(PUBLISHED, capacity_steps=((1.8e9, 5.0), (1.8e9 + 40.0, 12.5)))


def as_stored(limits: AdmissionLimits) -> Any:
    """The limits as a gateway reads them from the API server, where a null counts as absent."""
    text = json.dumps({"kind": "InferenceServiceAdmission", "limits": codec.encode(limits)}, allow_nan=False)
    return normalize(json.loads(text))["limits"]


def test_publication_round_trip_through_the_api_is_identity() -> None:
    unmeasured = replace(PUBLISHED, cost_model=replace(LIMITS, kv_transfer_token_s=None))
    unbounded = replace(PUBLISHED, cost_model=replace(LIMITS, max_spread_s=math.inf, tpot_s=(math.inf, 0.05)))
    for limits in (PUBLISHED, unmeasured, unbounded, STAGGERED, AdmissionLimits(("default",))):
        assert codec.decode(AdmissionLimits, as_stored(limits)) == limits
        assert as_stored(limits) == codec.encode(limits), (
            "a part that the API server drops would be written again and again"
        )


def test_publication_without_empty_parts_is_read() -> None:
    """A patch of the status can drop a map that is empty."""
    stored = {name: part for name, part in codec.encode(AdmissionLimits(("default",))).items() if part not in ({}, [])}
    assert codec.decode(AdmissionLimits, stored) == AdmissionLimits(("default",))


def test_publication_without_starts_is_read_as_older_version() -> None:
    """Gateways and the operator are not replaced in the same moment: either may be the older one."""
    older = codec.encode(STAGGERED)
    del older["capacitySteps"]
    assert older == {name: value for name, value in codec.encode(PUBLISHED).items() if name != "capacitySteps"}
    assert older.keys() == {"version", "classes", "costModel", "readyAt", "readyCapacity", "starting", "shares"}
    assert older["version"] == 4
    assert codec.decode(AdmissionLimits, older) == PUBLISHED
    assert PUBLISHED.announcement("gw-a", 2.0, -1.8e9) == CapacityAnnouncement(
        0.0, 25 / 40 * 12.5 - 2.0, arrival_rate=2.0
    )


def test_publication_without_output_lengths_is_accepted() -> None:
    older = codec.encode(PUBLISHED)
    del older["costModel"]["output_quantiles"]
    assert codec.decode(AdmissionLimits, older) == replace(PUBLISHED, cost_model=replace(LIMITS, output_quantiles=()))


def test_publication_length_shift_of_a_tenth_is_significant() -> None:
    def limits(*answers: float) -> AdmissionLimits:
        return replace(PUBLISHED, cost_model=replace(LIMITS, output_quantiles=answers))

    assert not has_changed(PUBLISHED, limits(60.0, 150.0, 250.0, 420.0))
    assert has_changed(PUBLISHED, limits(50.0, 150.0, 250.0, 500.0))
    assert has_changed(PUBLISHED, limits())
    assert has_changed(limits(), PUBLISHED)


@pytest.mark.parametrize("answers", [[3.0, 2.0], [-1.0, 2.0], [1.0, None], ["x"], 7])
def test_publication_invalid_output_lengths_raises(answers: object) -> None:
    stored = codec.encode(PUBLISHED)
    stored["costModel"]["output_quantiles"] = answers
    with pytest.raises(ValueError, match=r"output_quantiles|number|type"):
        codec.decode(AdmissionLimits, stored)


def test_capacity_announcement_splits_startups_by_gateway() -> None:
    assert STAGGERED.announcement("gw-a", 4.0, 5.0 - 1.8e9) == CapacityAnnouncement(
        5.0, 0.0, True, ((45.0, pytest.approx(25 / 40 * 12.5 - 4.0)),), arrival_rate=4.0
    ), "one replica leaves nothing to spare"
    assert replace(STAGGERED, cost_model=None).announcement("gw-a", 4.0, 0.0) == CapacityAnnouncement(
        None, arrival_rate=4.0
    )
    assert replace(PUBLISHED, ready_at_s=None, starting=False).announcement("gw-a", 4.0, 0.0) == CapacityAnnouncement(
        starting=False, arrival_rate=4.0
    )


@given(
    st.lists(st.tuples(st.integers(1, 99), st.floats(0.0, 20.0)), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 50.0), max_size=8),
)
def test_capacity_announcements_sum_to_ready_capacity(parts: list[tuple[int, float]], works: list[float]) -> None:
    batch = sum(units for units, _ in parts)
    shares = {f"gw-{k}": units for k, (units, _) in enumerate(parts)}
    starts = tuple((1.8e9 + 10.0 * k, work) for k, work in enumerate(sorted(works)))
    limits = replace(PUBLISHED, cost_model=replace(LIMITS, batch=batch), shares=shares, capacity_steps=starts)
    outlooks = [limits.announcement(f"gw-{k}", offered, 0.0) for k, (_, offered) in enumerate(parts)]
    steps = [((one.ready_at_s, one.spare_rate), *one.later_steps) for one in outlooks]
    for at, (at_s, work) in enumerate(starts or ((1.8e9, 12.5),)):
        assert {each[at][0] for each in steps} == {at_s}
        spare = sum(each[at][1] for each in steps)
        assert 0.0 <= spare <= work + 1e-9
        if all(each[at][1] > 0.0 for each in steps):
            assert spare == pytest.approx(work - sum(offered for _, offered in parts))


@pytest.mark.parametrize("gaps", [None, 0.05])
@pytest.mark.parametrize("role", [Role.SERVE, Role.DECODE])
@pytest.mark.parametrize("targets", [(2.0, None, None), (None, 0.05, None), (2.0, 0.05, None), (2.0, None, 20.0)])
def test_publication_limits_of_every_slo_kind_round_trip(
    targets: tuple[float | None, float | None, float | None], role: Role, gaps: float | None
) -> None:
    """A promise of the first token alone bounds no step: such figures are infinite, and no less known for it."""
    ttft_s, tpot_s, e2e_s = targets
    slo = Slo(0.95, ttft_s, 0.0, tpot_s, e2e_s=e2e_s, itl_s=gaps)
    tier = TierSpec(
        role, MODEL, MIX, EngineLimits(256, 330_000, 8192), slo, KvTransfer(32, 16) if role is Role.DECODE else None
    )
    limits = AdmissionLimits(("default",), engine_cost_model(tier, (ClassPolicy("default", 0, slo),)))
    stored = as_stored(limits)
    assert codec.encode(codec.decode(AdmissionLimits, stored)) == stored


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"classes": ["high"]},
        {"classes": None},
        {"costModel": {}},
        {"costModel": "none"},
        {"readyAt": "soon"},
        {"readyAt": math.nan},
        {"readyCapacity": True},
        {"shares": {"gw-a": -1}},
        {"shares": {"gw-a": 1.5}},
        {"shares": [1]},
        {"capacitySteps": [1.8e9]},
        {"capacitySteps": [[1.8e9, "much"]]},
        {"capacitySteps": 3},
    ],
)
def test_publication_invalid_field_raises(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        codec.decode(AdmissionLimits, codec.encode(PUBLISHED) | change)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("base_s", 0.0), ("kv_tokens", 0), ("kv_tokens", 1.5), ("base_s", "1"), ("tpot_s", [1.0])],
)
def test_publication_invalid_limits_raises(name: str, value: object) -> None:
    stored = codec.encode(PUBLISHED)
    stored["costModel"][name] = value
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        codec.decode(AdmissionLimits, stored)


@pytest.mark.parametrize("stored", [None, 3, "text", [], {}])
def test_publication_non_object_raises(stored: object) -> None:
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        codec.decode(AdmissionLimits, stored)


def test_publication_change_significant_only_if_large() -> None:
    assert has_changed(None, PUBLISHED)
    assert not has_changed(PUBLISHED, PUBLISHED)
    assert not has_changed(
        PUBLISHED,
        replace(PUBLISHED, cost_model=replace(LIMITS, base_s=0.0155), ready_at_s=1.8e9 + 2.0, ready_capacity=12.9),
    )
    for other in (
        replace(PUBLISHED, cost_model=replace(LIMITS, base_s=0.017)),
        replace(PUBLISHED, cost_model=replace(LIMITS, tpot_s=(0.06, math.inf))),
        replace(PUBLISHED, cost_model=replace(LIMITS, kv_transfer_token_s=None)),
        replace(PUBLISHED, cost_model=replace(LIMITS, tpot_s=(0.05, 0.2))),
        replace(PUBLISHED, cost_model=replace(LIMITS, post_fixed_s=1e-4)),
        replace(PUBLISHED, cost_model=None),
        replace(PUBLISHED, ready_at_s=None),
        replace(PUBLISHED, ready_at_s=1.8e9 + 5.0),
        replace(PUBLISHED, ready_capacity=20.0),
        replace(PUBLISHED, starting=False),
        STAGGERED,
        replace(PUBLISHED, shares={"gw-a": 24, "gw-b": 16}),
    ):
        assert has_changed(PUBLISHED, other), other
        assert has_changed(other, PUBLISHED), other
    assert not has_changed(STAGGERED, replace(STAGGERED, capacity_steps=((1.8e9 + 2.0, 5.2), (1.8e9 + 38.0, 12.5))))
    assert has_changed(STAGGERED, replace(STAGGERED, capacity_steps=((1.8e9, 5.0), (1.8e9 + 44.0, 12.5))))
    assert has_changed(STAGGERED, replace(STAGGERED, capacity_steps=((1.8e9, 6.0), (1.8e9 + 40.0, 12.5))))


def test_units_of_unknown_gateway_get_an_equal_share() -> None:
    assert (PUBLISHED.slot_limit("gw-a"), PUBLISHED.slot_limit("gw-c")) == (25, 13)
    assert replace(PUBLISHED, shares={}).slot_limit("gw-a") == 40
    assert replace(PUBLISHED, cost_model=None).slot_limit("gw-a") == 0
    new = replace(PUBLISHED, shares={"gw-a": 25, "gw-b": 15, "gw-c": 0})
    assert new.slot_limit("gw-c") == 13, "the others have not let go yet, and somebody waits here"


def reading(arrived: float, units: int, in_use: int, refused: int = 0) -> ServiceReading:
    outcomes = {"Admitted": arrived - refused, "ShedSaturated": float(refused)}
    return ServiceReading(
        arrived, None, 0.0, 0.0, 0.0, 0.0, {}, None, slot_limit=units, slots_in_use=in_use, outcomes=outcomes
    )


def observe_all(
    sharing: ShareController,
    at_s: float,
    rates: dict[str, float],
    shares: dict[str, int],
    in_use: int = 0,
    refused: int = 0,
) -> None:
    for name, rate in rates.items():
        gateway_reading = reading(math.floor(rate * at_s), shares.get(name, 0), in_use, refused)
        sharing.observe(name, "a", at_s, gateway_reading)


def test_shares_with_spare_capacity_stay_above_demand() -> None:
    sharing, both = ShareController(), ["gw-a", "gw-b"]
    shares = dict(sharing.allocate(256, both, 0.0))
    for second in range(1, 120):
        observe_all(sharing, second, {"gw-a": 4.0, "gw-b": 0.0}, shares, in_use=3)
        shares = dict(sharing.allocate(256, both, float(second)))
        assert min(shares.values()) > 100, second


def test_shares_early_random_demand_starves_no_gateway() -> None:
    sharing, both = ShareController(), ["gw-a", "gw-b"]
    shares = dict(sharing.allocate(40, both, 0.0))
    for second in range(1, 9):  # clients come at 4 a second, but not to gw-b in the first two
        for name, arrived in (("gw-a", 2 * second), ("gw-b", 2 * max(0, second - 2))):
            sharing.observe(name, "a", float(second), reading(arrived, shares[name], 1, refused=second))
        shares = dict(sharing.allocate(40 if second < 3 else 39, both, float(second)))
        assert min(shares.values()) >= 10, second


@pytest.mark.parametrize("full", ["used", "refused"])
def test_shares_under_scarcity_follow_demand_once_released(full: str) -> None:
    sharing, both = ShareController(), ["gw-a", "gw-b"]
    shares = dict(sharing.allocate(40, both, 0.0))
    assert shares == {"gw-a": 20, "gw-b": 20}
    for second in range(1, 120):
        for name, rate in (("gw-a", 9.0), ("gw-b", 1.0)):
            in_use = shares[name] if full == "used" else 1
            refused = second if full == "refused" else 0
            sharing.observe(name, "a", float(second), reading(rate * second, shares[name], in_use, refused))
        shares = dict(sharing.allocate(40, both, float(second)))
    assert shares["gw-a"] > 30
    assert sum(shares.values()) == 40


def test_shares_allocated_slots_stay_until_confirmed() -> None:
    sharing, both = ShareController(), ["gw-a", "gw-b"]
    shares = dict(sharing.allocate(40, both, 0.0))
    for second in range(1, 60):
        observe_all(sharing, second, {"gw-a": 9.0, "gw-b": 0.5}, {}, in_use=20)  # nobody has taken up anything
        shares = dict(sharing.allocate(40, both, float(second)))
    assert shares["gw-a"] == 20, "gw-b still has its twenty"
    assert shares["gw-b"] < 20, "and is told to use fewer"


def test_shares_small_demand_changes_are_ignored() -> None:
    sharing, both = ShareController(), ["gw-a", "gw-b"]
    first = sharing.allocate(40, both, 0.0)
    for second in range(1, 90):
        observe_all(sharing, second, {"gw-a": 5.5, "gw-b": 5.0} if second < 60 else {}, dict(first), in_use=20)
        assert sharing.allocate(40, both, float(second)) is first


def test_shares_survive_gateway_loss_and_operator_restart() -> None:
    sharing = ShareController({"gw-a": 30, "gw-b": 10})
    assert sharing.allocate(40, ["gw-a", "gw-b"], 0.0) == {"gw-a": 30, "gw-b": 10}
    assert sharing.allocate(40, ["gw-b"], 1.0) == {"gw-b": 40}
    assert sharing.allocate(40, [], 2.0) == {"gw-b": 40}, "a list of nobody says nothing"


@given(
    st.lists(
        st.tuples(
            st.integers(1, 60),  # cap
            st.sets(st.sampled_from(["a", "b", "c"])),
            st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(0.0, 50.0)),
            st.booleans(),  # whether gateways take up what they are told
        ),
        max_size=30,
    )
)
def test_shares_never_exceed_cap(
    steps: list[tuple[int, set[str], dict[str, float], bool]],
) -> None:
    sharing = ShareController()
    now_s, arrived, using, most = 0.0, dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0), 0
    for cap, present, rates, obey in steps:
        now_s += MIN_REBALANCE_INTERVAL_S
        most = max(most, cap)
        shares = sharing.allocate(cap, present, now_s)
        for name in present:
            arrived[name] += rates.get(name, 0.0)
            using[name] = shares[name] if obey else max(using[name], shares[name])
            sharing.observe(name, "x", now_s, reading(arrived[name], using[name], using[name]))
        assert sum(shares.values()) <= most
        assert all(units >= 0 for units in shares.values())


def test_token_ratios_by_kind_have_plain_keys() -> None:
    """orjson, which hashes what is published, takes no key of a subclass of str."""
    stored = codec.encode(replace(PUBLISHED, token_ratios={"text": 1.0, MediaKind.IMAGE: 1.2}))
    assert json.loads(orjson.dumps(stored))["tokenRatios"] == {"image": 1.2, "text": 1.0}


def test_token_ratios_are_published_when_they_move() -> None:
    limits = replace(PUBLISHED, token_ratios=RATIOS)
    assert codec.decode(AdmissionLimits, json.loads(json.dumps(codec.encode(limits)))).token_ratios == RATIOS
    assert codec.decode(AdmissionLimits, codec.encode(PUBLISHED)).token_ratios == {}
    assert has_changed(PUBLISHED, limits)
    assert not has_changed(limits, replace(limits, token_ratios=RATIOS | {"image": 0.3}))
    assert has_changed(limits, replace(limits, token_ratios=RATIOS | {"image": 0.4}))
    for bad in ({"image": 0.0}, {"image": 1e9}, {"image": "x"}, {"image": None}):
        with pytest.raises(ValueError, match=r"number|ratio"):
            codec.decode(AdmissionLimits, codec.encode(limits) | {"tokenRatios": bad})
