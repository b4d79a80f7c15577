"""Gateways that know different lists of gateways: no two hand out the same slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.gateway.one_queue import connection, messages, peer_views
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.one_queue.peer_views import PeerViews
from tests.gateway.one_queue_harness import Gateway, Gateways, eventually, is_admitted
from tests.gateway.picker_harness import engine_names, service_with_slo

SLOTS = 8
SHED = {"whenFull": "Shed"}


async def admitted(*gateways: Gateway) -> int:
    """How many of more requests than there are slots are admitted at each of these gateways, in all."""
    replies = [await gateway.ask(f"{gateway.name} {n}") for gateway in gateways for n in range(SLOTS + 2)]
    return sum(map(is_admitted, replies))


async def test_two_owners_share_the_slots_until_views_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gateway's watch is broken: it takes itself for the only one."""
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    monkeypatch.setattr(peer_views, "SETTLE_SECONDS", 0.05)
    service = service_with_slo(batch=SLOTS, admission=SHED)
    async with Gateways(tmp_path, 2, service, pods=engine_names(1)) as gateways:
        owner, (stale,) = gateways.owner(), gateways.others()
        stale.queue.set_pods({stale.name: stale.address}, [g.name for g in gateways.all])
        assert owner.queue.owner_of("team/chat") == owner.name
        assert stale.queue.owner_of("team/chat") == stale.name
        for gateway in gateways.all:
            await eventually(lambda gateway=gateway: gateway.queue._views.differ, "the views differ")  # type: ignore[misc]
        assert await admitted(owner, stale) == SLOTS
        gateways.publish(*gateways.all)
        for gateway in gateways.all:
            await eventually(lambda gateway=gateway: not gateway.queue._views.differ, "they agree")  # type: ignore[misc]


async def test_agreeing_gateways_leave_all_slots_to_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_views, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    service = service_with_slo(batch=SLOTS, admission=SHED)
    async with Gateways(tmp_path, 3, service, pods=engine_names(1)) as gateways:
        await eventually(lambda: not any(g.queue._views.differ for g in gateways.all), "the views agree")
        assert await admitted(gateways.others()[0]) == SLOTS


def views(monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[Ownership, PeerViews, list[float]]:
    """The views of gateway a, and the times of their changes, on a clock that `test_...` turns."""
    ownership, changes = Ownership("a"), []
    ownership.set_candidates(names)
    made = PeerViews(ownership, lambda: changes.append(peer_views.time.monotonic()))
    return ownership, made, changes


def view_of(*names: str, **fallbacks: str) -> bytes:
    other = Ownership("x")
    other.set_candidates(names)
    other.set_fallbacks(fallbacks)
    return other.view


def test_short_difference_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(peer_views.time, "monotonic", lambda: now_s)
    ownership, made, changes = views(monkeypatch, "a", "b")
    made.record("b", view_of("a", "b", "c"))
    now_s += 0.9
    made.check()
    ownership.set_candidates(("a", "b", "c"))
    made.check()
    now_s += 60.0
    made.record("b", view_of("a", "b", "c"))
    assert (made.differ, changes) == (False, [])


def test_lasting_difference_shares_among_all_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(peer_views.time, "monotonic", lambda: now_s)
    _, made, changes = views(monkeypatch, "a")
    made.record("b", view_of("a", "b"))
    made.record("c", view_of("a"))
    now_s += 1.0
    made.record("b", view_of("a", "b"))
    assert (made.differ, made.gateways, changes) == (True, 2, [101.0])
    made.drop("b")
    assert (made.differ, changes) == (False, [101.0, 101.0])


def test_gateway_of_an_earlier_release_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(peer_views.time, "monotonic", lambda: now_s)
    _, made, _ = views(monkeypatch, "a", "b")
    for _ in range(3):
        made.record("b", messages.Ping().view)
        now_s += 10.0
    assert not made.differ


def test_view_has_pods_and_fallbacks_in_any_order() -> None:
    assert view_of("a", "b") == view_of("b", "a") != view_of("a")
    assert view_of("a", x="y", z="y") == view_of("a", z="y", x="y") != view_of("a", x="y")
