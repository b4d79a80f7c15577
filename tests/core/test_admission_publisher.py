"""What a service's gateways are told over time: made with the load line, changed seldom, never forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.admission import ClassPolicy, Gate, Request
from plimsoll.core.admission.published import MOST_STARTS
from plimsoll.core.autoscaler import Seen, TierSeen
from plimsoll.core.autoscaler.gatekeeper import LEAST_S, Gatekeeper
from plimsoll.core.lifecycle import Starting
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Mode, TierPolicy
from plimsoll.core.signals import Heard
from plimsoll.core.transfer import LEAST_TOKENS, MEMORY_S, Moved
from plimsoll.core.variants import Variant, becomes
from tests.core.test_autoscaler import ABOUT, SLO, Fleet, heard, wish

CLASSES = (ClassPolicy("default", 0, SLO),)
GATEWAYS = ("gw-a", "gw-b")


def busy_fleet(mode: Mode = Mode.AUTO) -> Fleet:
    fleet = Fleet(replace(wish(mode=mode), classes=CLASSES))
    fleet.run(heard(20.0, Role.SERVE), 30)
    return fleet


def snapshot(fleet: Fleet, starting: tuple[Starting, ...] = ()) -> Seen:
    count = fleet.replicas["serve"]
    return Seen(heard(20.0, Role.SERVE), {"serve": TierSeen(count, count - len(starting), starting, ABOUT)})


def test_publish_unchanged_inputs_keeps_publication() -> None:
    fleet, keeper = busy_fleet(), Gatekeeper()
    assert keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s)
    told = keeper.told
    assert told is not None
    assert told.limits is not None
    assert told.limits.tpot_s == (SLO.tpot_s,)
    assert sum(told.shares.values()) == told.limits.batch
    for second in range(20):
        assert not keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s + second)
    assert keeper.told is told


def test_publish_without_slo_is_none_without_engine_permissive() -> None:
    fleet, keeper = Fleet(replace(wish(), classes=CLASSES), about=None), Gatekeeper()
    fleet.tick(heard(20.0, Role.SERVE))
    keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.limits is None
    assert keeper.tell(fleet.service, snapshot(fleet), replace(fleet.wish, classes=()), GATEWAYS, fleet.now_s)
    assert keeper.told is None


def test_restore_keeps_limits_until_new_engine_info() -> None:
    fleet, keeper = busy_fleet(), Gatekeeper()
    keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s)
    fresh, after = Fleet(fleet.wish, about=None), Gatekeeper.after(keeper.told)
    fresh.tick(heard(20.0, Role.SERVE))
    after.tell(fresh.service, snapshot(fresh), fresh.wish, GATEWAYS, fresh.now_s)
    assert keeper.told is not None
    assert after.told is not None
    assert after.told.limits == keeper.told.limits
    assert after.told.shares == keeper.told.shares


def test_publish_starting_replicas_have_ready_time_and_work() -> None:
    fleet, keeper = busy_fleet(), Gatekeeper()
    fleet.service.started("serve", [("load", 30.0), ("whole", 30.0)])
    fleet.arrives = False
    keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s)
    before = keeper.told
    fleet.replicas["serve"] += 2
    new = tuple(Starting(f"p{n}", fleet.now_s) for n in range(2))
    fleet.tick(heard(20.0, Role.SERVE), serve=new)
    later_s = fleet.now_s + LEAST_S
    assert keeper.tell(fleet.service, snapshot(fleet, new), fleet.wish, GATEWAYS, later_s)
    assert before is not None
    assert keeper.told is not None
    assert keeper.told.ready_at_s is not None
    assert keeper.told.ready_at_s > later_s
    assert keeper.told.ready_work > before.ready_work
    assert before.ready_at_s is None


def test_publish_startup_time_depends_on_same_model() -> None:
    for after, told in ((Variant("m", "engine:2"), True), (Variant("other", "engine:1"), False)):
        fleet, keeper = busy_fleet(), Gatekeeper()
        fleet.service.tiers["serve"].starts = becomes(fleet.service.tiers["serve"].starts, Variant("m", "engine:1"))
        fleet.service.started("serve", [("load", 30.0)])
        fleet.service.tiers["serve"].starts = becomes(fleet.service.tiers["serve"].starts, after)
        fleet.arrives = False
        fleet.replicas["serve"] += 1
        new = (Starting("p", fleet.now_s),)
        fleet.tick(heard(20.0, Role.SERVE), serve=new)
        keeper.tell(fleet.service, snapshot(fleet, new), fleet.wish, GATEWAYS, fleet.now_s)
        assert keeper.told is not None
        assert (keeper.told.ready_at_s is not None) is told


@pytest.mark.parametrize("new", [1, 2, 8, 30])
def test_publish_staggered_startups_have_cumulative_work(new: int) -> None:
    fleet, keeper = busy_fleet(), Gatekeeper()
    fleet.service.started("serve", [("load", 30.0), ("whole", 30.0)])
    fleet.arrives = False
    ready = fleet.replicas["serve"]
    fleet.replicas["serve"] += new
    starting = tuple(Starting(f"p{n}", fleet.now_s - n) for n in range(new))
    fleet.tick(heard(20.0, Role.SERVE), serve=starting)
    assert keeper.tell(fleet.service, snapshot(fleet, starting), fleet.wish, GATEWAYS, fleet.now_s)
    told = keeper.told
    assert told is not None
    assert told.ready_at_s is not None
    if new == 1:
        assert told.starts == ()
        return
    assert len(told.starts) == min(new, MOST_STARTS)
    assert told.starts[0][0] == told.ready_at_s
    assert told.starts[-1][1] == told.ready_work
    times, works = zip(*told.starts, strict=True)
    assert list(times) == sorted(times)
    each = told.ready_work / (ready + new)
    assert works[0] == pytest.approx((ready + 1) * each)
    for at_s, work in told.starts:  # who starts a second later is there a second later
        assert work == pytest.approx((ready + 1 + at_s - told.ready_at_s) * each)


def test_publish_recommend_mode_announces_no_replica() -> None:
    fleet, keeper = busy_fleet(Mode.RECOMMEND), Gatekeeper()
    keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert not keeper.told.starting
    assert keeper.told.ready_at_s is None


def test_publish_without_engine_drops_stale_limits() -> None:
    fleet, keeper = Fleet(replace(wish(), classes=CLASSES), about=None), Gatekeeper()
    fleet.tick(heard(0.0, Role.SERVE))
    asleep = Seen(heard(0.0, Role.SERVE), {"serve": TierSeen(0, 0)})
    assert keeper.tell(fleet.service, asleep, fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.limits is not None
    assert keeper.tell(fleet.service, snapshot(fleet), fleet.wish, GATEWAYS, fleet.now_s + LEAST_S)
    assert keeper.told.limits is None


def test_publish_unmeasured_startup_has_no_ready_time() -> None:
    fleet, keeper = busy_fleet(), Gatekeeper()
    fleet.arrives = False
    fleet.replicas["serve"] += 1
    new = (Starting("p", fleet.now_s),)
    fleet.tick(heard(20.0, Role.SERVE), serve=new)
    keeper.tell(fleet.service, snapshot(fleet, new), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.ready_at_s is None
    assert keeper.told.starting


def test_publish_remote_prefill_cost_uses_prefill_model() -> None:
    """Engines that decode never show how fast others prefill."""
    tiers = {"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}
    fleet, keeper = Fleet(replace(wish(tiers=tiers), classes=CLASSES)), Gatekeeper()
    said = heard(5.0, Role.PREFILL, Role.DECODE)
    fleet.run(said, 30)
    there = {name: TierSeen(count, count, (), ABOUT) for name, count in fleet.replicas.items()}
    prefill = fleet.service.tiers["prefill"]
    assert prefill.sized is not None
    slower = replace(prefill.sized.model, prefill_token_s=3.0 * prefill.sized.model.prefill_token_s)
    keeper.tell(fleet.service, Seen(said, there), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.limits is not None
    before = keeper.told.limits
    assert before.leg_token_s == prefill.sized.model.prefill_token_s
    prefill.sized = replace(prefill.sized, model=slower)
    assert keeper.tell(fleet.service, Seen(said, there), fleet.wish, GATEWAYS, fleet.now_s + LEAST_S)
    after = keeper.told.limits
    assert after is not None
    assert after.leg_token_s == slower.prefill_token_s
    assert after.prefill_token_s == before.prefill_token_s


PAIR = {"prefill": TierPolicy(1, 8), "decode": TierPolicy(1, 8)}


def with_transfers(tokens: float, token_s: float) -> Heard:
    """So many tokens with_transfers, each so long on its way beside half as long a posting."""
    return replace(
        heard(20.0, Role.PREFILL, Role.DECODE), moved=Moved(tokens, 1.5 * token_s * tokens, 0.5 * token_s * tokens)
    )


def published_move_s(keeper: Gatekeeper, fleet: Fleet, said: Heard) -> float | None:
    """What a with_transfers token is told to take, seconds."""
    fleet.tick(said)
    tiers = {name: TierSeen(count, count, (), ABOUT) for name, count in fleet.replicas.items()}
    keeper.tell(fleet.service, Seen(said, tiers), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.limits is not None
    return keeper.told.limits.move_token_s


def pair() -> Fleet:
    fleet = Fleet(replace(wish(tiers=PAIR), classes=CLASSES))
    fleet.run(heard(20.0, Role.PREFILL, Role.DECODE), 30)
    return fleet


def test_publish_kv_transfer_time_once_measured() -> None:
    fleet, keeper = pair(), Gatekeeper()
    assert published_move_s(keeper, fleet, with_transfers(LEAST_TOKENS - 1.0, 3e-4)) is None
    fleet.now_s += LEAST_S
    assert published_move_s(keeper, fleet, with_transfers(LEAST_TOKENS, 3e-4)) == pytest.approx(3e-4)
    for wavering_s in (2.6e-4, 3.4e-4):
        fleet.now_s += LEAST_S
        assert published_move_s(keeper, fleet, with_transfers(1e5, wavering_s)) == pytest.approx(3e-4)
    fleet.now_s += LEAST_S
    assert published_move_s(keeper, fleet, with_transfers(1e5, 2e-6)) == pytest.approx(2e-6)
    fleet.now_s += LEAST_S
    assert published_move_s(keeper, fleet, with_transfers(1e5, 1.2e-6)) == pytest.approx(2e-6), (
        "less than a microsecond is no news"
    )


def test_publish_kv_transfer_time_expires_after_idle() -> None:
    fleet, keeper = pair(), Gatekeeper()
    published_move_s(keeper, fleet, with_transfers(LEAST_TOKENS, 3e-4))
    after = Gatekeeper.after(keeper.told)
    for one in (keeper, after):
        fleet.now_s += LEAST_S
        assert published_move_s(one, fleet, with_transfers(0.0, 0.0)) == pytest.approx(3e-4)
    fleet.now_s += MEMORY_S + LEAST_S
    for one in (keeper, after):
        assert published_move_s(one, fleet, with_transfers(0.0, 0.0)) is None


def test_publish_permissive_limits_use_remote_prefill() -> None:
    fleet, keeper = Fleet(replace(wish(tiers=PAIR), classes=CLASSES), about=None), Gatekeeper()
    said = heard(20.0, Role.PREFILL, Role.DECODE)
    fleet.tick(said)
    tiers = {name: TierSeen(1, 0) for name in PAIR}
    keeper.tell(fleet.service, Seen(said, tiers), fleet.wish, GATEWAYS, fleet.now_s)
    assert keeper.told is not None
    assert keeper.told.limits is not None
    door = Gate(CLASSES, keeper.told.limits, {})
    door.set_replicas({"d": 50}, 0.0, frozenset({"p"}))
    found = [door.offer(Request(str(k), "default", "t", 0.0, 8000), 0.0) for k in range(20)]
    assert {one.prefill for one in found} == {"p"}
    assert door.fleet.prefills["p"].free_s < 1e-3
