"""What a killed owner had counted of quotas and of keys' limits is known to the gateway that counts next.

All limits here are in tokens per minute: one request of many tokens exhausts them for longer than a test can take.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.core.admission.token_bucket import Spent
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.one_queue import messages, spent_limits
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.one_queue.spent_limits import WAIT_SECONDS, SpentLimits
from plimsoll.gateway.service_catalog import EMPTY_CATALOG
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.kube_objects import Object
from tests.gateway.one_queue_harness import Gateway, Gateways, eventually, is_admitted
from tests.gateway.picker_harness import PickerHarness, engine_names, rejection_of, service_with_slo

CHAT = "team/chat"
MANY = "word " * 4000
NAMES = ("gateway-0", "gateway-1")
QUOTA = {"tenants": [{"name": "jobs", "tokensPerMinute": 60}]}
TENANT = TrustedHeaders().tenant.decode()
JOBS = {TENANT: "jobs"}


def chat() -> Object:
    return service_with_slo(admission=QUOTA, batch=100)


def keys() -> Authenticator:
    made = Authenticator(ApiKeyMode.REQUIRED)
    made.keys.apply(WatchEvent("SYNC", objects=(key_secret("app", tokens_per_minute=60),)))
    return made


def used(gateway: Gateway) -> float:
    """The tokens of the quota that a gateway counts."""
    admission = gateway.picker.admission.services.get(CHAT)
    bucket = None if admission is None else admission.controller.quotas._buckets.get("jobs")
    return 0.0 if bucket is None else bucket.spent(0.0).tokens


def copied(owner: Gateway, *gateways: Gateway) -> float:
    """The tokens of all limits in the copies that these gateways have from this one."""
    copies = [gateway.queue._spent._copies.get(owner.name) for gateway in gateways]
    return sum(copy.spent.tokens for one in copies if one for copy in one.by_limit.values())


async def is_exhausted(gateway: Gateway, code: str, **headers: str) -> bool:
    reply = await gateway.ask("hi", headers=headers or JOBS)
    return not is_admitted(reply) and rejection_of(reply).error["code"] == code


@pytest.mark.parametrize("asking", ["owner", "other"])
async def test_quota_of_a_restarted_owner_stays_spent(tmp_path: Path, asking: str) -> None:
    """Its next process has its name and address, and at first knows no services."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        assert is_admitted(await (owner if asking == "owner" else other).ask(MANY, headers=JOBS))
        spent = used(owner)
        await eventually(lambda: copied(owner, other) == pytest.approx(spent, rel=0.01), "the next owner has a copy")
        gateways.kill(owner)
        await eventually(lambda: not other.queue._links[owner.name].is_ready, "the other gateway has lost the owner")
        again = await gateways.start_again(owner)
        await gateways.connected(*gateways.all)
        await eventually(lambda: again.queue._spent.is_waiting, "it has the copies before it knows the service")
        gateways.set_objects(chat(), pods=engine_names(1))
        await eventually(lambda: used(again) == pytest.approx(spent, rel=0.01), "what was spent is counted once")
        for gateway in (again, other):
            assert await is_exhausted(gateway, "quota_exceeded")


async def test_key_limit_of_a_restarted_owner_stays_spent(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1), authenticator=keys()) as gateways:
        owner = next(one for one in gateways.all if one.name == one.queue._ownership.owner_of_key("app"))
        (other,) = (one for one in gateways.all if one is not owner)
        assert is_admitted(await owner.ask(MANY, headers=bearer("app")))
        await eventually(lambda: copied(owner, other) > 0, "the next owner has a copy")
        gateways.kill(owner)
        await eventually(lambda: not other.queue._links[owner.name].is_ready, "the other gateway has lost the owner")
        again = await gateways.start_again(owner)
        gateways.set_objects(chat(), pods=engine_names(1))
        await eventually(lambda: bool(again.picker.key_limits.names), "it has the copies")
        for gateway in (again, other):
            assert await is_exhausted(gateway, "rate_limit_exceeded", **bearer("app"))


async def test_quota_of_a_killed_owner_is_spent_at_the_next_one(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(), pods=engine_names(1)) as gateways:
        owner, others = gateways.owner(), gateways.others()
        assert is_admitted(await owner.ask(MANY, headers=JOBS))
        spent = used(owner)
        await eventually(lambda: copied(owner, *others) > 0, "the next owner has a copy")
        gateways.kill(owner)
        await gateways.set_ready(*others)
        assert used(gateways.owner()) == pytest.approx(spent, rel=0.01)
        for gateway in others:
            assert await is_exhausted(gateway, "quota_exceeded")


async def test_owner_that_leaves_the_list_is_not_counted_twice(tmp_path: Path) -> None:
    """It hands over what the next owner has a copy of."""
    async with Gateways(tmp_path, 3, chat(), pods=engine_names(1)) as gateways:
        owner, others = gateways.owner(), gateways.others()
        assert is_admitted(await others[0].ask(MANY, headers=JOBS))
        spent = used(owner)
        await eventually(lambda: copied(owner, *others) > 0, "the next owner has a copy")
        await gateways.set_ready(*others)
        await eventually(lambda: copied(owner, *others) == 0, "the former owner has handed over")
        assert used(gateways.owner()) == pytest.approx(spent, rel=0.01)


async def test_lost_connection_to_the_same_process_tells_nothing(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        assert is_admitted(await other.ask(MANY, headers=JOBS))
        spent = used(owner)
        await eventually(lambda: copied(owner, other) > 0, "the next owner has a copy")
        connection = other.queue._links[owner.name]._connection
        assert connection is not None
        connection.close()
        await eventually(lambda: not other.queue._links[owner.name].is_ready, "the connection is lost")
        await gateways.connected(*gateways.all)
        assert is_admitted(await other.ask("hi", headers={TENANT: "others"}))
        assert used(owner) == pytest.approx(spent, rel=0.01)


async def test_gateway_of_an_earlier_release_gets_no_copies(tmp_path: Path) -> None:
    """What it does not know would end the connection."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        link = owner.queue._links[other.name]
        sent: list[messages.Message] = []
        link.instance, link.send = b"", sent.append  # type: ignore[assignment, method-assign]
        owner.picker.admission.spend_quota(CHAT, "jobs", Spent(0.0, 1e9), 0.0)
        owner.queue._spent.on_link_ready(link, 0.0)
        link.instance = b"this release"
        owner.queue._spent.on_link_ready(link, 0.0)
        assert [type(message) for message in sent] == [messages.SpentCopies]


class Next:
    """The gateway that owns next, without a network."""

    def __init__(self) -> None:
        self.picker = PickerHarness(chat(), pods=engine_names(1)).picker
        self.ownership = Ownership(NAMES[0])
        self.ownership.set_candidates(NAMES)
        self.spent = SpentLimits(self.picker, self.ownership, {})

    def name(self, owner_of: Callable[[Ownership, str], str]) -> str:
        """A name that the other gateway owns."""
        return next(name for n in range(200) if owner_of(self.ownership, name := f"key-{n}") == NAMES[1])

    def copy(self, instance: bytes, now: float, *names: str) -> None:
        spent = [messages.SpentLimit(name, 0.0, 90.0, None, None, 60) for name in names]
        self.spent.keep_copies(NAMES[1], messages.SpentCopies(instance, spent), now)

    def counted(self, name: str, now: float) -> float:
        return sum(spent.tokens for _, spent in self.picker.key_limits.spent([name], now))


async def test_copies_of_a_former_process_wait_for_the_next_one() -> None:
    """The next process sends copies before it has the former ones, and is then killed too."""
    after = Next()
    name = after.name(Ownership.owner_of_key)
    after.copy(b"first", 0.0, name)
    after.copy(b"second", 10.0, name)
    after.ownership.set_candidates(NAMES[:1])
    after.spent.collect(10.0)
    assert after.counted(name, 10.0) == 90.0 - 10.0 + 90.0


@pytest.mark.parametrize(("after_s", "left"), [(61.0, 29.0), (90.0, 0.0)])
async def test_copies_are_refilled_and_forgotten_as_buckets_are(after_s: float, left: float) -> None:
    """One long request may take more than the burst of a minute, which is refilled for longer."""
    after = Next()
    name = after.name(Ownership.owner_of_key)
    after.copy(b"first", 0.0, name)
    after.spent.collect(after_s)
    assert bool(after.spent._copies) == bool(left)
    after.ownership.set_candidates(NAMES[:1])
    after.spent.collect(after_s)
    assert after.counted(name, after_s) == left


async def test_limits_of_an_unknown_service_are_forgotten() -> None:
    after = Next()
    spent = [messages.SpentLimit("jobs", 0.0, 90.0, "team/unknown")]
    after.spent.count(NAMES[1], spent, 0.0)
    after.spent.keep_copies(NAMES[1], messages.SpentCopies(b"first", spent), 0.0)
    after.spent.collect(WAIT_SECONDS)
    assert not after.spent.is_waiting
    assert not after.spent._copies


async def test_owner_that_comes_back_in_time_is_copied_again() -> None:
    """It was not ready for a moment, and has got what was counted meanwhile."""
    after = Next()
    name = after.name(Ownership.owner_of_key)
    after.copy(b"first", 0.0, name)
    for candidates in (NAMES[:1], NAMES):
        after.ownership.set_candidates(candidates)
        after.spent.collect(0.0)
    after.spent._waiting.clear()
    after.copy(b"first", 1.0, name)
    after.ownership.set_candidates(NAMES[:1])
    after.spent.collect(1.0)
    assert after.counted(name, 1.0) == 90.0


async def test_copies_and_waiting_limits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent_limits, "MAX_COPIES", 10)
    after = Next()
    after.copy(b"first", 0.0, *(f"key-{n}" for n in range(25)))
    assert [name for _, name in after.spent._copies[NAMES[1]].by_limit] == [f"key-{n}" for n in range(15, 25)]
    for n in range(25):
        after.spent.count(NAMES[1], [messages.SpentLimit(f"{n}", 1.0, 1.0, service="team/unknown")], 0.0)
    assert [spent.name for _, spent in after.spent._waiting] == [f"{n}" for n in range(15, 25)]


async def test_use_is_copied_to_the_next_owner_alone(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(), pods=engine_names(1)) as gateways:
        owner, others = gateways.owner(), gateways.others()
        assert is_admitted(await others[0].ask(MANY, headers=JOBS))
        await eventually(lambda: copied(owner, *others) > 0, "the next owner has a copy")
        holders = [one.name for one in gateways.all if copied(owner, one) > 0]
        assert holders == [owner.queue._ownership.next_owner_of(CHAT)]


async def test_process_that_knows_no_gateways_counts_no_copies() -> None:
    """It has just started, its services come before the gateways, and the owner runs on."""
    after = Next()
    name = after.name(Ownership.owner_of_key)
    after.copy(b"first", 0.0, name)
    after.ownership.set_candidates([])
    after.spent.collect(0.0)
    after.ownership.set_candidates(NAMES)
    after.spent.collect(0.0)
    assert not after.spent.is_waiting, "the owner would get what it has counted itself"


async def test_gateway_that_owns_no_longer_next_has_no_copies() -> None:
    """Its successor as the next owner has copies too: a new process of the owner would get both."""
    after, others = Next(), (*NAMES, "gateway-2")
    names = [f"key-{n}" for n in range(200)]
    after.ownership.set_candidates(others)
    moved = next(
        name
        for name in names
        if (after.ownership.owner_of_key(name), after.ownership.next_owner_of_key(name)) == others[1:]
    )
    after.ownership.set_candidates(NAMES)
    after.copy(b"first", 0.0, moved)
    after.ownership.set_candidates(others)
    after.spent.collect(0.0)
    after.copy(b"second", 0.0)
    assert not after.spent.is_waiting


async def test_copies_of_an_unknown_service_wait_for_it() -> None:
    """The owner is gone before this gateway knows the service."""
    after = Next()
    after.picker.set_catalog(EMPTY_CATALOG)
    service = next(key for n in range(200) if after.ownership.owner_of(key := f"team/{n}") == NAMES[1])
    spent = [messages.SpentLimit("jobs", 0.0, 90.0, service)]
    after.spent.keep_copies(NAMES[1], messages.SpentCopies(b"first", spent), 0.0)
    after.ownership.set_candidates(NAMES[:1])
    after.spent.collect(0.0)
    assert after.spent.is_waiting
