"""Tenants that share no KV blocks, through real Envoy and picker, at an engine simulator under its launcher."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from plimsoll.gateway.settings import TrustedHeaders
from tests.gateway.kube_objects import pod, service
from tests.gateway.simulated_engine import simulated_engine
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TENANT_HEADER = TrustedHeaders().tenant.decode()
PROMPT = "You are the assistant of a bank. " * 60


class Isolated:
    """A gateway with one engine, and what the engine counts."""

    def __init__(self, stack: GatewayStack, address: str) -> None:
        self.stack, self.address = stack, address

    async def hits(self, tenant: str, prompt: str, **fields: object) -> float:
        """Cached prompt tokens that a request of the tenant found."""
        before = await self._total("vllm:prefix_cache_hits_total")
        messages = [{"role": "user", "content": prompt}]
        sent = {TENANT_HEADER: tenant} if tenant else {}
        spoofed = {"x-plimsoll-cache-salt": "client"}
        async with self.stack.ask("chat", {**sent, **spoofed}, messages=messages, max_tokens=1, **fields) as answer:
            assert answer.status == 200, await answer.text()
        return await self._total("vllm:prefix_cache_hits_total") - before

    async def salted(self) -> float:
        return await self._total("plimsoll_engine_salted_requests_total")

    async def _total(self, metric: str) -> float:
        async with self.stack.http.get(f"http://{self.address}/metrics") as answer:
            found = re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
        return sum(map(float, found))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def isolated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Isolated]:
    root = tmp_path_factory.mktemp("tenants")
    stack = await GatewayStack(root / "gateway").start()
    (root / "engine").mkdir()
    made = service()
    made["spec"]["engine"] = {"prefixCache": "PerTenant"}
    async with simulated_engine(root / "engine", "team/chat", "generate") as address:
        await stack.set_objects([made], [pod(address)])

        async def is_routable() -> bool:
            return all(e["routable"] for e in (await stack.endpoints()).values())

        await wait_until(is_routable, "the engine is routable")
        yield Isolated(stack, address)
    await stack.shut_down()


async def test_tenant_finds_its_own_blocks_only(isolated: Isolated) -> None:
    assert await isolated.hits("a", PROMPT) == 0
    own = await isolated.hits("a", PROMPT)
    assert own > 0
    assert await isolated.hits("b", PROMPT) == 0
    assert await isolated.hits("", PROMPT) == 0
    assert await isolated.hits("b", PROMPT) == own
    assert await isolated.salted() == 5


async def test_client_cannot_name_the_salt_of_another(isolated: Isolated) -> None:
    prompt = f"Another prompt. {PROMPT}"
    assert await isolated.hits("a", prompt, cache_salt="mine") == 0
    assert await isolated.hits("a", prompt, cache_salt="mine") > 0
    assert await isolated.hits("b", prompt, cache_salt="mine") == 0
