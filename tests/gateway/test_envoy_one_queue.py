"""Several whole gateways, each with a real Envoy and its picker's process, are one queue."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import Object, gateway_pod, pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, stop, wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TENANT = {"x-gateway-inference-fairness-id": "jobs"}


class Installation:
    """Gateways over the same services and one engine."""

    def __init__(self, factory: object, count: int) -> None:
        directory = make_directory(factory)
        secret = directory / "secret"
        secret.write_bytes(b"a secret that all gateways share")
        peer_port = free_port()
        self.gateways = [
            GatewayStack(
                make_directory(factory),
                pod=f"gateway-{number}",
                address=f"127.0.0.{number + 1}",
                peer_secret=secret,
                peer_port=peer_port,
                owner_ack_seconds=5.0,  # a busy machine must not look like an owner that does not answer
            )
            for number in range(count)
        ]
        self.engine: FakeEngine

    async def start(self, service: Object) -> None:
        self.engine = await self.gateways[0].engine()
        for gateway in self.gateways:
            gateway.write_gateways(*map(self.pod_of, self.gateways))
        for gateway in self.gateways:
            await gateway.start([service], [pod(self.engine.address)])
        for gateway in self.gateways:
            await gateway.wait_routable(self.engine)
        await self.connected(*self.gateways)

    @staticmethod
    def pod_of(gateway: GatewayStack) -> Object:
        return gateway_pod(gateway.settings.pod, address=gateway.settings.address)

    def publish(self, *gateways: GatewayStack) -> None:
        """The API server says that these gateways are ready."""
        for gateway in self.gateways:
            gateway.write_gateways(*map(self.pod_of, gateways))

    async def connected(self, *gateways: GatewayStack) -> None:
        for gateway in gateways:
            await wait_until(lambda gateway=gateway: _has_peers(gateway, len(gateways) - 1), "it reaches the others")  # type: ignore[misc]

    async def owner(self) -> GatewayStack:
        owners = await _owners(self.gateways)
        assert len(owners) == 1
        return owners[0]


async def _owners(gateways: list[GatewayStack]) -> list[GatewayStack]:
    return [gateway for gateway in gateways if await metric(gateway, "plimsoll_gateway_owned_services") == 1]


async def _have_owner(gateways: list[GatewayStack]) -> bool:
    return len(await _owners(gateways)) == 1


async def _has_peers(gateway: GatewayStack, count: int) -> bool:
    return await metric(gateway, "plimsoll_gateway_peers_connected") == count


async def metric(gateway: GatewayStack, name: str) -> float:
    """The sum of a metric's series at one gateway."""
    async with gateway.http.get(f"{gateway.picker_url}/metrics") as page:
        text = await page.text()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@asynccontextmanager
async def installation(factory: object, count: int, service: Object) -> AsyncIterator[Installation]:
    made = Installation(factory, count)
    try:
        await made.start(service)
        yield made
    finally:
        for gateway in made.gateways:
            await gateway.shut_down()
            print(gateway.log.read_text()[-3000:])


async def statuses(gateways: list[GatewayStack], count: int, sent: dict[str, str] | None = None) -> list[int]:
    """The statuses of requests by turns, all at once."""

    async def status(number: int) -> int:
        content = [{"role": "user", "content": f"request {number}"}]
        async with gateways[number % len(gateways)].ask(sent=sent, messages=content) as answer:
            await answer.read()
            return int(answer.status)

    return list(await asyncio.gather(*(status(number) for number in range(count))))


@pytest.mark.parametrize("count", [2, 3])
async def test_nine_slots_are_used_by_all_gateways(tmp_path_factory: object, count: int) -> None:
    shed = service_with_slo(batch=9, admission={"whenFull": "Shed"})
    async with installation(tmp_path_factory, count, shed) as made:
        hold = made.engine.behaviour.release_event = asyncio.Event()
        for round_number in range(3):
            requests = asyncio.create_task(statuses(made.gateways, 30))
            await wait_until(lambda: made.engine.open == 9, "all slots are in use")
            await wait_until(lambda: _rejected(made, 21 * (round_number + 1)), "all others are rejected")  # noqa: B023
            assert made.engine.open == 9
            hold.set()
            assert sorted(await requests) == [200] * 9 + [429] * 21
            hold.clear()
            owner = await made.owner()
            await wait_until(lambda: _is_free(owner), "the owner knows that all have ended")  # noqa: B023
        fallbacks = [await metric(g, "plimsoll_gateway_owner_fallbacks_total") for g in made.gateways]
        assert fallbacks == [0.0] * count
        assert sum([await metric(g, "plimsoll_gateway_owner_answers_total") for g in made.gateways]) >= 45


async def _rejected(made: Installation, count: int) -> bool:
    return sum([await metric(g, "plimsoll_gateway_requests_rejected_total") for g in made.gateways]) == count


async def _is_free(owner: GatewayStack) -> bool:
    return bool((await owner.admission())["in_use"] == 0)


async def test_tenant_quota_is_exact_through_envoy(tmp_path_factory: object) -> None:
    limited = {"tenants": [{"name": "jobs", "requestsPerSecond": "0.5"}]}
    async with installation(tmp_path_factory, 3, service_with_slo(batch=50, admission=limited)) as made:
        found = await statuses(made.gateways, 24, TENANT)
        assert found.count(200) in (5, 6)  # a burst of ten seconds, and what a slow machine refills meanwhile
        assert set(found) == {200, 429}


async def test_restarted_owner_grants_no_quota_again(tmp_path_factory: object) -> None:
    """The owner's picker is killed and starts again under the same name and address. Its own client was served."""
    limited = {"tenants": [{"name": "jobs", "tokensPerMinute": 60}]}
    async with installation(tmp_path_factory, 2, service_with_slo(batch=50, admission=limited)) as made:
        owner = await made.owner()
        (other,) = (gateway for gateway in made.gateways if gateway is not owner)
        async with owner.ask(sent=TENANT, messages=[{"role": "user", "content": "word " * 8000}]) as answer:
            assert answer.status == 200
        assert set(await statuses([other], 3, TENANT)) == {429}
        assert owner.picker is not None
        stop(owner.picker)
        await wait_until(lambda: _has_peers(other, 0), "the other gateway has lost the owner")
        owner.start_picker()
        await owner.ready()
        await made.connected(*made.gateways)
        await owner.wait_routable(made.engine)
        assert set(await statuses(made.gateways, 6, TENANT)) == {429}
        assert set(await statuses(made.gateways, 6)) == {200}


async def test_killed_owner_costs_no_request_through_envoy(tmp_path_factory: object) -> None:
    """Requests come all the time to the gateways that stay; the owner's picker process is killed among them."""
    async with installation(tmp_path_factory, 3, service_with_slo(batch=60)) as made:
        owner = await made.owner()
        others = [gateway for gateway in made.gateways if gateway is not owner]
        found: list[int] = []
        is_over = asyncio.Event()

        async def load(gateway: GatewayStack) -> None:
            while not is_over.is_set():
                found.extend(await statuses([gateway], 3))

        clients = [asyncio.create_task(load(gateway)) for gateway in others]
        await wait_until(lambda: len(found) >= 30, "requests are served")
        assert owner.picker is not None
        stop(owner.picker)
        seen = len(found)
        await wait_until(lambda: len(found) >= seen + 30, "requests are served without the owner")
        made.publish(*others)
        await wait_until(lambda: _have_owner(others), "one of the others owns the service")
        seen = len(found)
        await wait_until(lambda: len(found) >= seen + 30, "requests are served by the next owner")
        is_over.set()
        await asyncio.gather(*clients)
        assert set(found) == {200}
        assert sum([await metric(g, "plimsoll_gateway_owner_fallbacks_total") for g in others]) > 0
        made.gateways.remove(owner)
        await owner.shut_down()
        assert await made.owner() in others
