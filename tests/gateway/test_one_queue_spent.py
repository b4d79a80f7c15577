"""A quota and a key's limits are those of the installation, also when a gateway comes or goes.

All limits here are in tokens per minute: one request of many tokens exhausts them for longer than a test can take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.core.admission.token_bucket import Spent
from plimsoll.gateway.identity import Authenticator, Identity
from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.one_queue.spent_limits import SpentLimits
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.one_queue_harness import Gateways, eventually, is_admitted
from tests.gateway.picker_harness import PickerHarness, engine_names, rejection_of, service_with_slo

CHANGES = [((0, 1), (0, 1, 2)), ((0, 1, 2), (0, 1))]  # gateways that are ready
NAMES = ("gateway-0", "gateway-1", "gateway-2")
MANY = "word " * 4000
TENANT = TrustedHeaders().tenant.decode()
QUOTA = {"tenants": [{"name": "jobs", "tokensPerMinute": 60}]}


def moving(owner_of: Callable[[Ownership, str], str], form: str) -> str:
    """A name whose owner is the second gateway of two, and the third one of three."""
    two, three = Ownership(NAMES[0]), Ownership(NAMES[0])
    two.set_candidates(NAMES[:2])
    three.set_candidates(NAMES)
    names = (form.format(n) for n in range(200))
    return next(name for name in names if owner_of(two, name) == NAMES[1] and owner_of(three, name) == NAMES[2])


MODEL = moving(lambda table, name: table.owner_of(f"team/{name}"), "chat-{}")
KEY = moving(lambda table, name: table.owner_of_key(name), "key-{}")


def keys() -> Authenticator:
    made = Authenticator(ApiKeyMode.REQUIRED)
    made.keys.apply(WatchEvent("SYNC", objects=(key_secret(KEY, tokens_per_minute=60),)))
    return made


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=["comes", "goes"])
async def test_quota_spent_is_spent_at_the_next_owner(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    service = service_with_slo(MODEL, QUOTA, batch=100)
    async with Gateways(tmp_path, 3, service, pods=engine_names(1, service=MODEL)) as gateways:
        jobs = {"headers": {TENANT: "jobs"}, "model": MODEL}
        await gateways.set_ready(*(gateways.all[n] for n in before))
        assert is_admitted(await gateways.all[0].ask(MANY, **jobs))
        await gateways.set_ready(*(gateways.all[n] for n in after))
        owner = gateways.owner(f"team/{MODEL}")
        buckets = owner.picker.admission.services[f"team/{MODEL}"].controller.quotas
        await eventually(lambda: len(buckets) == 1, "the new owner knows what was spent")
        for n in after:
            assert rejection_of(await gateways.all[n].ask("hi", **jobs)).error["code"] == "quota_exceeded"
        assert is_admitted(await gateways.all[0].ask("hi", MODEL, headers={TENANT: "others"}))


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=["comes", "goes"])
async def test_key_limit_spent_is_spent_at_the_next_owner(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    service = service_with_slo(batch=100)
    async with Gateways(tmp_path, 3, service, pods=engine_names(1), authenticator=keys()) as gateways:
        await gateways.set_ready(*(gateways.all[n] for n in before))
        assert is_admitted(await gateways.all[0].ask(MANY, headers=bearer(KEY)))
        await gateways.set_ready(*(gateways.all[n] for n in after))
        limits = gateways.all[after[-1]].picker.key_limits
        await eventually(lambda: KEY in limits._buckets, "the new owner knows what was spent")
        for n in after:
            reply = rejection_of(await gateways.all[n].ask("hi", headers=bearer(KEY)))
            assert reply.error["code"] == "rate_limit_exceeded"


async def test_quota_comes_back_with_its_service(tmp_path: Path) -> None:
    """The next owner was never reached."""
    service = service_with_slo(MODEL, QUOTA, batch=100)
    async with Gateways(tmp_path, 3, service, pods=engine_names(1, service=MODEL)) as gateways:
        jobs = {"headers": {TENANT: "jobs"}, "model": MODEL}
        await gateways.set_ready(*gateways.all[:2])
        gateways.kill(gateways.all[2])
        assert is_admitted(await gateways.all[0].ask(MANY, **jobs))
        gateways.publish(*gateways.all)
        await gateways.set_ready(*gateways.all[:2])
        assert rejection_of(await gateways.all[0].ask("hi", **jobs)).error["code"] == "quota_exceeded"


async def test_spent_limits_without_a_quota_here_change_nothing(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, service_with_slo(admission=QUOTA, batch=100), pods=engine_names(1)) as gateways:
        for gateway in gateways.all:
            (link,) = gateway.queue._links.values()
            unknown = messages.SpentLimit("jobs", 5.0, 1e9, service="team/unknown")
            without_quota = messages.SpentLimit("others", 5.0, 1e9, service="team/chat")
            link.send(messages.SpentLimits([unknown, without_quota]))
        for gateway, tenant in ((gateways.all[0], "jobs"), *((gateway, "others") for gateway in gateways.all)):
            assert is_admitted(await gateway.ask("hi", headers={TENANT: tenant}))


async def test_gateway_of_an_earlier_release_gets_no_spent_limits(tmp_path: Path) -> None:
    """What it does not know would end the connection."""
    async with Gateways(tmp_path, 2, service_with_slo(admission=QUOTA, batch=100), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        (link,) = other.queue._links.values()
        link.takes_spent_limits = False
        other.picker.admission.spend_quota("team/chat", "jobs", Spent(0.0, 1e9), 0.0)
        other.queue._on_link_ready(link)
        assert is_admitted(await other.ask("hi", headers={TENANT: "jobs"}))
        assert len(owner.picker.admission.services["team/chat"].controller.quotas) == 1


@pytest.mark.parametrize("amount", [math.nan, math.inf, -1.0, 1e16])
def test_spent_amount_out_of_bounds_is_invalid(amount: float) -> None:
    sent = messages.encode(messages.SpentLimits([messages.SpentLimit("jobs", amount, 0.0)]))
    with pytest.raises(msgspec.ValidationError):
        messages.decode_to_owner(sent)


class ReadyLink:
    """A connection to the next owner."""

    name, is_ready, takes_spent_limits, instance = NAMES[1], True, True, b""

    def __init__(self) -> None:
        self.sent: list[messages.SpentLimit] = []

    def send(self, message: messages.SpentLimits) -> None:
        self.sent += message.spent


@pytest.mark.parametrize(("waited_s", "left"), [(0.0, (20.0, 90.0)), (2.0, (16.0, 60.0)), (4.0, (12.0, 30.0))])
async def test_what_waits_for_an_owner_is_refilled_as_a_bucket_is(waited_s: float, left: tuple[float, float]) -> None:
    """A quota of 10 s, and limits of a minute."""
    quota = {"tenants": [{"name": "jobs", "requestsPerSecond": 2}]}
    world = PickerHarness(service_with_slo(MODEL, quota, batch=100), pods=engine_names(1, service=MODEL))
    picker, ownership, link = world.picker, Ownership(NAMES[0]), ReadyLink()
    picker.admission.spend_quota(f"team/{MODEL}", "jobs", Spent(20.0, 0.0), 0.0)
    picker.key_limits.spend(Identity(KEY, tokens_per_minute=900), Spent(0.0, 90.0), 0.0)
    ownership.set_candidates(NAMES[:2])
    waiting = SpentLimits(picker, ownership, {})
    waiting.collect(0.0)
    waiting.hand_over(link, waited_s)  # type: ignore[arg-type]
    found = {one.service or one.name: (one.requests, one.tokens) for one in link.sent}
    assert found == {f"team/{MODEL}": (left[0], 0.0), KEY: (0.0, left[1])}


async def test_what_is_refilled_meanwhile_is_not_handed_over() -> None:
    world = PickerHarness(service_with_slo(MODEL, batch=100), pods=engine_names(1, service=MODEL))
    ownership, link = Ownership(NAMES[0]), ReadyLink()
    world.picker.key_limits.spend(Identity(KEY, tokens_per_minute=900), Spent(0.0, 90.0), 0.0)
    ownership.set_candidates(NAMES[:2])
    waiting = SpentLimits(world.picker, ownership, {})
    waiting.collect(0.0)
    waiting.hand_over(link, 6.0)  # type: ignore[arg-type]
    assert link.sent == []
