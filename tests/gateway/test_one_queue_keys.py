"""Limits of an API key are those of the installation, whatever the number of gateways."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.settings import ApiKeyMode
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.kube_objects import service
from tests.gateway.one_queue_harness import Gateways, eventually, is_admitted
from tests.gateway.picker_harness import engine_names, rejection_of, response_headers, service_with_slo


def authenticator(**limits: int) -> Authenticator:
    made = Authenticator(ApiKeyMode.REQUIRED)
    made.keys.apply(WatchEvent("SYNC", objects=(key_secret("ci", **limits),)))
    return made


@pytest.mark.parametrize("has_slo", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_request_limit_is_exact(tmp_path: Path, count: int, has_slo: bool) -> None:
    known = service_with_slo(batch=100) if has_slo else service()
    keys = authenticator(requests_per_minute=7)
    async with Gateways(tmp_path, count, known, pods=engine_names(1), authenticator=keys) as gateways:
        requests = [gateways.all[n % count].ask(f"request {n}", headers=bearer("ci")) for n in range(20)]
        replies = await asyncio.gather(*requests)
        assert sum(map(is_admitted, replies)) == 7
        rejected = [rejection_of(reply) for reply in replies if not is_admitted(reply)]
        assert {reply.error["code"] for reply in rejected} == {"rate_limit_exceeded"}
        assert all(5 <= int(reply.headers["retry-after"]) <= 9 for reply in rejected)
        assert {reply.headers["x-ratelimit-limit-requests"] for reply in rejected} == {"7"}


async def test_skewed_clients_get_the_whole_limit(tmp_path: Path) -> None:
    """All requests of the key come to one gateway of three."""
    keys = authenticator(requests_per_minute=9)
    async with Gateways(tmp_path, 3, service_with_slo(batch=100), pods=engine_names(1), authenticator=keys) as gateways:
        for gateway in gateways.all:
            replies = [await gateway.ask(f"{gateway.name} {n}", headers=bearer("ci")) for n in range(3)]
            assert all(map(is_admitted, replies))
        assert not is_admitted(await gateways.all[0].ask("more", headers=bearer("ci")))


async def test_headers_tell_what_is_left_of_all(tmp_path: Path) -> None:
    keys = authenticator(requests_per_minute=10, tokens_per_minute=100_000)
    async with Gateways(tmp_path, 3, service_with_slo(batch=100), pods=engine_names(1), authenticator=keys) as gateways:
        left = []
        for gateway in (*gateways.all, *gateways.all):
            sent = response_headers(await gateway.ask("hi", headers=bearer("ci")))
            left.append(int(sent["x-ratelimit-remaining-requests"]))
            assert sent["x-ratelimit-limit-tokens"] == "100000"
        assert left == [9, 8, 7, 6, 5, 4]


async def test_request_that_needs_no_engine_time_is_charged_too(tmp_path: Path) -> None:
    from plimsoll.gateway.api_routes import ROUTES

    keys = authenticator(requests_per_minute=4)
    known = service_with_slo(batch=100)
    async with Gateways(tmp_path, 3, known, pods=engine_names(1), authenticator=keys) as gateways:
        found = []
        for number in range(9):
            picker = gateways.all[number % 3].picker
            headers = {name.encode(): value.encode() for name, value in bearer("ci").items()}
            body = b'{"model": "chat", "prompt": "hi"}'
            reply = picker.check(body, headers, 0.0, ROUTES["/tokenize"])
            found.append(reply if isinstance(reply, bytes) else await reply)
        assert sum(map(is_admitted, found)) == 4


async def test_revoked_key_ends_requests_at_the_owner(tmp_path: Path) -> None:
    keys = authenticator()
    async with Gateways(tmp_path, 2, service_with_slo(batch=1), pods=engine_names(1), authenticator=keys) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        running = await other.ask("running", headers=bearer("ci"))
        assert is_admitted(running)
        queued = other.send("queued", headers=bearer("ci"))
        await eventually(lambda: len(owner.picker.queue) == 1, "the owner queues it")
        keys.keys.apply(WatchEvent("SYNC"))
        other.picker.tick()
        reply = rejection_of(await asyncio.wait_for(queued, 30.0))
        assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        await eventually(lambda: len(owner.picker.queue) == 0, "the owner knows that it has ended")
