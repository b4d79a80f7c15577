"""What the operator tells the gateways: written seldom, read whole or not at all, shared without being exceeded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.admission import Outlook
from plimsoll.core.admission.limits import ClassPolicy, Limits, limits
from plimsoll.core.admission.published import Published, from_dict, moved, to_dict
from plimsoll.core.admission.sharing import LEAST_S, Sharing
from plimsoll.core.knee import Tier
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import ServiceReading
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

MODEL = StepModel(0.015, -0.001, 5e-5, 1e-9, 2e-5, 4e-8)
MIX = from_samples([200.0, 1000.0, 4000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])

LIMITS = Limits(
    base_s=0.015, any_stall_s=-0.001, prefill_token_s=5e-5, prefill_pair_s=1e-9, sequence_s=2e-5, cached_token_s=4e-8,
    post_fixed_s=0.0, post_piece_s=0.0, block_tokens=0, leg_base_s=0.015, leg_token_s=5e-5, leg_pair_s=0.0,
    token_budget=8192, kv_tokens=330_000, max_sequences=256, output_mean=200.0, output_variance=9000.0, batch=40,
    step_budget_s=(0.03, math.inf), tpot_s=(0.05, math.inf), rho=0.6, most_spread_s=0.001, stall_s=0.05, alone_s=0.1,
    move_token_s=3e-6, answers=(50.0, 150.0, 250.0, 400.0),
)  # fmt: skip
TOLD = Published(("high", "low"), LIMITS, 1.8e9, 12.5, True, {"gw-a": 25, "gw-b": 15})
IN_TURN = replace(TOLD, starts=((1.8e9, 5.0), (1.8e9 + 40.0, 12.5)))


def test_what_is_told_comes_back_through_json() -> None:
    assert from_dict(json.loads(json.dumps(to_dict(TOLD)))) == TOLD
    unmeasured = replace(TOLD, limits=replace(LIMITS, move_token_s=None))
    assert from_dict(json.loads(json.dumps(to_dict(unmeasured)))) == unmeasured
    assert from_dict(json.loads(json.dumps(to_dict(IN_TURN)))) == IN_TURN
    bare = Published(("default",))
    assert from_dict(json.loads(json.dumps(to_dict(bare)))) == bare


def test_what_a_release_knows_that_tells_of_the_next_start_alone_is_told_and_read_as_by_it() -> None:
    """Gateways and the operator are not replaced in the same moment: either may be the older one."""
    older = to_dict(IN_TURN)
    del older["starts"]
    assert older == {name: value for name, value in to_dict(TOLD).items() if name != "starts"}
    assert older.keys() == {"version", "classes", "limits", "readyAt", "readyWork", "starting", "shares"}
    assert older["version"] == 3
    assert from_dict(older) == TOLD
    assert TOLD.outlook("gw-a", 2.0, -1.8e9) == Outlook(0.0, 25 / 40 * 12.5 - 2.0)


def test_how_long_answers_are_is_not_missed_where_an_older_operator_tells_their_mean_alone() -> None:
    older = to_dict(TOLD)
    del older["limits"]["answers"]
    assert from_dict(older) == replace(TOLD, limits=replace(LIMITS, answers=()))


def test_how_long_answers_are_is_told_anew_when_a_tenth_of_their_tokens_lies_elsewhere() -> None:
    def told(*answers: float) -> Published:
        return replace(TOLD, limits=replace(LIMITS, answers=answers))

    assert not moved(TOLD, told(60.0, 150.0, 250.0, 420.0))
    assert moved(TOLD, told(50.0, 150.0, 250.0, 500.0))
    assert moved(TOLD, told())
    assert moved(told(), TOLD)


@pytest.mark.parametrize("answers", [[3.0, 2.0], [-1.0, 2.0], [1.0, None], ["x"], 7])
def test_answers_that_cannot_be_are_refused(answers: object) -> None:
    stored = to_dict(TOLD)
    stored["limits"]["answers"] = answers
    with pytest.raises(ValueError, match=r"answers|number|kind"):
        from_dict(stored)


def test_each_gateway_reckons_with_its_part_of_each_start_and_with_its_own_newcomers() -> None:
    assert IN_TURN.outlook("gw-a", 4.0, 5.0 - 1.8e9) == Outlook(
        5.0, 0.0, True, ((45.0, pytest.approx(25 / 40 * 12.5 - 4.0)),)
    ), "one replica leaves nothing to spare"
    assert replace(IN_TURN, limits=None).outlook("gw-a", 4.0, 0.0) == Outlook(None)
    assert replace(TOLD, ready_at_s=None, starting=False).outlook("gw-a", 4.0, 0.0) == Outlook(starting=False)


@given(
    st.lists(st.tuples(st.integers(1, 99), st.floats(0.0, 20.0)), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 50.0), max_size=8),
)
def test_gateways_together_promise_no_more_than_what_will_be_there(
    parts: list[tuple[int, float]], works: list[float]
) -> None:
    batch = sum(units for units, _ in parts)
    shares = {f"gw-{k}": units for k, (units, _) in enumerate(parts)}
    starts = tuple((1.8e9 + 10.0 * k, work) for k, work in enumerate(sorted(works)))
    told = replace(TOLD, limits=replace(LIMITS, batch=batch), shares=shares, starts=starts)
    outlooks = [told.outlook(f"gw-{k}", offered, 0.0) for k, (_, offered) in enumerate(parts)]
    steps = [((one.ready_at_s, one.spare), *one.later) for one in outlooks]
    for at, (at_s, work) in enumerate(starts or ((1.8e9, 12.5),)):
        assert {each[at][0] for each in steps} == {at_s}
        spare = sum(each[at][1] for each in steps)
        assert 0.0 <= spare <= work + 1e-9
        if all(each[at][1] > 0.0 for each in steps):
            assert spare == pytest.approx(work - sum(offered for _, offered in parts))


@pytest.mark.parametrize("gaps", [None, 0.05])
@pytest.mark.parametrize("role", [Role.SERVE, Role.DECODE])
@pytest.mark.parametrize("targets", [(2.0, None, None), (None, 0.05, None), (2.0, 0.05, None), (2.0, None, 20.0)])
def test_the_limits_of_every_kind_of_promise_come_back(
    targets: tuple[float | None, float | None, float | None], role: Role, gaps: float | None
) -> None:
    """A promise of the first token alone bounds no step: such figures are infinite, and no less known for it."""
    ttft_s, tpot_s, e2e_s = targets
    slo = Slo(0.95, ttft_s, 0.0, tpot_s, e2e_s=e2e_s, itl_s=gaps)
    tier = Tier(
        role, MODEL, MIX, EngineLimits(256, 330_000, 8192), slo, KvTransfer(32, 16) if role is Role.DECODE else None
    )
    told = Published(("default",), limits(tier, (ClassPolicy("default", 0, slo),)))
    stored = json.loads(json.dumps(to_dict(told), allow_nan=False))
    assert to_dict(from_dict(stored)) == stored


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"classes": ["high"]},
        {"classes": None},
        {"limits": {}},
        {"limits": "none"},
        {"readyAt": "soon"},
        {"readyAt": math.nan},
        {"readyWork": True},
        {"shares": {"gw-a": -1}},
        {"shares": {"gw-a": 1.5}},
        {"shares": [1]},
        {"starts": [1.8e9]},
        {"starts": [[1.8e9, "much"]]},
        {"starts": 3},
    ],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        from_dict(to_dict(TOLD) | change)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("base_s", 0.0), ("kv_tokens", 0), ("kv_tokens", 1.5), ("base_s", "1"), ("tpot_s", [1.0])],
)
def test_limits_that_no_engine_has_are_refused(name: str, value: object) -> None:
    stored = to_dict(TOLD)
    stored["limits"][name] = value
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        from_dict(stored)


@pytest.mark.parametrize("stored", [None, 3, "text", [], {}])
def test_no_object_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match=r"no |not |missing|at least"):
        from_dict(stored)


def test_small_moves_are_not_told_and_large_ones_are() -> None:
    assert moved(None, TOLD)
    assert not moved(TOLD, TOLD)
    assert not moved(
        TOLD, replace(TOLD, limits=replace(LIMITS, base_s=0.0155), ready_at_s=1.8e9 + 2.0, ready_work=12.9)
    )
    for other in (
        replace(TOLD, limits=replace(LIMITS, base_s=0.017)),
        replace(TOLD, limits=replace(LIMITS, tpot_s=(0.06, math.inf))),
        replace(TOLD, limits=replace(LIMITS, move_token_s=None)),
        replace(TOLD, limits=replace(LIMITS, tpot_s=(0.05, 0.2))),
        replace(TOLD, limits=replace(LIMITS, post_fixed_s=1e-4)),
        replace(TOLD, limits=None),
        replace(TOLD, ready_at_s=None),
        replace(TOLD, ready_at_s=1.8e9 + 5.0),
        replace(TOLD, ready_work=20.0),
        replace(TOLD, starting=False),
        IN_TURN,
        replace(TOLD, shares={"gw-a": 24, "gw-b": 16}),
    ):
        assert moved(TOLD, other), other
        assert moved(other, TOLD), other
    assert not moved(IN_TURN, replace(IN_TURN, starts=((1.8e9 + 2.0, 5.2), (1.8e9 + 38.0, 12.5))))
    assert moved(IN_TURN, replace(IN_TURN, starts=((1.8e9, 5.0), (1.8e9 + 44.0, 12.5))))
    assert moved(IN_TURN, replace(IN_TURN, starts=((1.8e9, 6.0), (1.8e9 + 40.0, 12.5))))


def test_a_gateway_that_nobody_knows_yet_takes_a_share_like_one_more() -> None:
    assert (TOLD.units("gw-a"), TOLD.units("gw-c")) == (25, 13)
    assert replace(TOLD, shares={}).units("gw-a") == 40
    assert replace(TOLD, limits=None).units("gw-a") == 0
    new = replace(TOLD, shares={"gw-a": 25, "gw-b": 15, "gw-c": 0})
    assert new.units("gw-c") == 13, "the others have not let go yet, and somebody waits here"


def reading(arrived: float, units: int, in_use: int, refused: int = 0) -> ServiceReading:
    outcomes = {"Admitted": arrived - refused, "ShedSaturated": float(refused)}
    return ServiceReading(arrived, None, 0.0, 0.0, 0.0, 0.0, {}, None, units=units, in_use=in_use, outcomes=outcomes)


def hear(
    sharing: Sharing, at_s: float, rates: dict[str, float], shares: dict[str, int], in_use: int = 0, refused: int = 0
) -> None:
    for name, rate in rates.items():
        told = reading(math.floor(rate * at_s), shares.get(name, 0), in_use, refused)
        sharing.hear(name, "a", at_s, told)


def test_where_there_is_room_each_has_it_whoever_clients_came_to() -> None:
    sharing, both = Sharing(), ["gw-a", "gw-b"]
    shares = dict(sharing.units(256, both, 0.0))
    for second in range(1, 120):
        hear(sharing, second, {"gw-a": 4.0, "gw-b": 0.0}, shares, in_use=3)
        shares = dict(sharing.units(256, both, float(second)))
        assert min(shares.values()) > 100, second


def test_nobody_is_left_without_by_the_chance_of_the_first_second() -> None:
    sharing, both = Sharing(), ["gw-a", "gw-b"]
    shares = dict(sharing.units(40, both, 0.0))
    for second in range(1, 9):  # clients come at 4 a second, but not to gw-b in the first two
        for name, arrived in (("gw-a", 2 * second), ("gw-b", 2 * max(0, second - 2))):
            sharing.hear(name, "a", float(second), reading(arrived, shares[name], 1, refused=second))
        shares = dict(sharing.units(40 if second < 3 else 39, both, float(second)))
        assert min(shares.values()) >= 10, second


@pytest.mark.parametrize("full", ["used", "refused"])
def test_where_it_is_short_shares_follow_demand_once_their_holders_have_let_go(full: str) -> None:
    sharing, both = Sharing(), ["gw-a", "gw-b"]
    shares = dict(sharing.units(40, both, 0.0))
    assert shares == {"gw-a": 20, "gw-b": 20}
    for second in range(1, 120):
        for name, rate in (("gw-a", 9.0), ("gw-b", 1.0)):
            in_use = shares[name] if full == "used" else 1
            refused = second if full == "refused" else 0
            sharing.hear(name, "a", float(second), reading(rate * second, shares[name], in_use, refused))
        shares = dict(sharing.units(40, both, float(second)))
    assert shares["gw-a"] > 30
    assert sum(shares.values()) == 40


def test_a_unit_is_not_given_away_before_its_holder_has_said_so() -> None:
    sharing, both = Sharing(), ["gw-a", "gw-b"]
    shares = dict(sharing.units(40, both, 0.0))
    for second in range(1, 60):
        hear(sharing, second, {"gw-a": 9.0, "gw-b": 0.5}, {}, in_use=20)  # nobody has taken up anything
        shares = dict(sharing.units(40, both, float(second)))
    assert shares["gw-a"] == 20, "gw-b still has its twenty"
    assert shares["gw-b"] < 20, "and is told to use fewer"


def test_small_moves_of_demand_and_a_quiet_time_change_nothing() -> None:
    sharing, both = Sharing(), ["gw-a", "gw-b"]
    first = sharing.units(40, both, 0.0)
    for second in range(1, 90):
        hear(sharing, second, {"gw-a": 5.5, "gw-b": 5.0} if second < 60 else {}, dict(first), in_use=20)
        assert sharing.units(40, both, float(second)) is first


def test_one_that_dies_leaves_its_share_and_a_new_process_goes_on_from_what_was_told() -> None:
    sharing = Sharing({"gw-a": 30, "gw-b": 10})
    assert sharing.units(40, ["gw-a", "gw-b"], 0.0) == {"gw-a": 30, "gw-b": 10}
    assert sharing.units(40, ["gw-b"], 1.0) == {"gw-b": 40}
    assert sharing.units(40, [], 2.0) == {"gw-b": 40}, "a list of nobody says nothing"


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
def test_shares_never_exceed_the_cap_whatever_happens(
    steps: list[tuple[int, set[str], dict[str, float], bool]],
) -> None:
    sharing = Sharing()
    now_s, arrived, using, most = 0.0, dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0), 0
    for cap, present, rates, obey in steps:
        now_s += LEAST_S
        most = max(most, cap)
        shares = sharing.units(cap, present, now_s)
        for name in present:
            arrived[name] += rates.get(name, 0.0)
            using[name] = shares[name] if obey else max(using[name], shares[name])
            sharing.hear(name, "x", now_s, reading(arrived[name], using[name], using[name]))
        assert sum(shares.values()) <= most
        assert all(units >= 0 for units in shares.values())
