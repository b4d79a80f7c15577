"""LoRA adapters through real Envoy and the real picker, at engine simulators under their launchers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.kube_objects import Object, pod, service, with_adapters
from tests.gateway.simulated_engine import simulated_engine
from tests.gateway.stack import GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FAILING = ("--failing-adapters", "/adapters/bad")


def desire(folder: Path, *names: str) -> None:
    """What the kubelet would mount."""
    folder.mkdir(exist_ok=True)
    entries = [
        {"name": n, "scheme": "file", "location": f"/adapters/{n}", "revision": "", "pinned": True} for n in names
    ]
    (folder / "adapters.json").write_text(json.dumps({"adapters": entries}))


class Fleet:
    """Two engines: the first has the adapters sql and bad (which fails), the second sql, law and bad."""

    def __init__(self, stack: GatewayStack, folders: list[Path], addresses: list[str]) -> None:
        self.stack, self.folders, self.addresses = stack, folders, addresses

    @property
    def pods(self) -> list[Object]:
        return [pod(address) for address in self.addresses]

    async def serve(self, *names: str) -> None:
        await self.stack.set_objects([with_adapters(service(), *names)], self.pods)

        async def ready() -> bool:
            is_routable = all(e["routable"] for e in (await self.stack.endpoints()).values())
            return is_routable and await self.models() == sorted(["chat", *names])

        await wait_until(ready, "both engines are routable under these names")

    async def models(self) -> list[str]:
        async with self.stack.http.get(f"{self.stack.url}/v1/models") as answer:
            return [card["id"] for card in (await answer.json())["data"]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    root = tmp_path_factory.mktemp("adapters")
    stack = await GatewayStack(root / "gateway").start()
    async with AsyncExitStack() as engines:
        folders, addresses = [], []
        for number, names in enumerate((("sql", "bad"), ("sql", "law", "bad"))):
            folder = root / str(number)
            folder.mkdir()
            folders.append(folder / "desired")
            desire(folders[-1], *names)
            engine = simulated_engine(folder, "team/chat", "generate", folders[-1], FAILING)
            addresses.append(await engines.enter_async_context(engine))
        yield Fleet(stack, folders, addresses)
    await stack.shut_down()


async def send_request(fleet: Fleet, model: str) -> tuple[int, dict[str, Any], Any]:
    found: tuple[int, dict[str, Any], Any] = await fleet.stack.ask_fully(model, max_tokens=2)
    return found


async def test_adapter_is_a_model_of_its_own(fleet: Fleet) -> None:
    await fleet.serve("sql", "law")
    for name in ("sql", "team/chat/sql", "law", "chat", "team/chat"):
        status, body, _ = await send_request(fleet, name)
        assert (status, body.get("model")) == (200, name)


async def test_request_finds_the_engine_that_has_the_adapter(fleet: Fleet) -> None:
    """Only one engine has `law`, and the gateway does not know which one."""
    await fleet.serve("sql", "law")
    for _ in range(6):
        status, body, _ = await send_request(fleet, "law")
        assert (status, body.get("model")) == (200, "law")


async def test_failed_adapter_says_why_and_others_go_on(fleet: Fleet) -> None:
    await fleet.serve("sql", "bad")
    status, body, headers = await send_request(fleet, "bad")
    assert (status, body["error"]["code"]) == (503, "adapter_failed")
    assert body["error"]["message"].endswith("No adapter found for /adapters/bad")
    assert headers["retry-after"] == "1"
    assert [(await send_request(fleet, name))[0] for name in ("sql", "chat")] == [200, 200]


async def test_removed_adapter_is_no_model(fleet: Fleet) -> None:
    await fleet.serve("law")
    status, body, _ = await send_request(fleet, "sql")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_added_adapter_is_served_without_a_restart(fleet: Fleet) -> None:
    await fleet.serve("sql", "tax")
    status, body, _ = await send_request(fleet, "tax")
    assert (status, body["error"]["code"]) == (503, "model_starting")
    for folder in fleet.folders:
        desire(folder, "sql", "law", "tax")

    async def served() -> bool:
        return (await send_request(fleet, "tax"))[0] == 200

    await wait_until(served, "the new adapter is served")


async def test_adapter_requests_are_counted(fleet: Fleet) -> None:
    await fleet.serve("sql")
    await send_request(fleet, "sql")

    async def metrics() -> str:
        async with fleet.stack.http.get(f"{fleet.stack.picker_url}/metrics") as answer:
            return str(await answer.text())

    assert 'plimsoll_gateway_adapter_requests_total{adapter="sql",service="team/chat"}' in await metrics()
    await fleet.serve("law")
    assert 'adapter="sql"' not in await metrics()


async def test_adapter_is_not_taken_for_the_model_without_picker(fleet: Fleet) -> None:
    """Envoy routes by names while the picker is away. An engine without an adapter answers nothing in its place."""
    await fleet.serve("sql", "law", "none")
    for name in ("sql", "chat"):
        assert (await send_request(fleet, name))[0] == 200
    await fleet.stack.wait_model_clusters("sql", "law", "none", "chat")
    picker = fleet.stack.picker
    assert picker is not None
    stop(picker)
    try:
        for name, expected in (("sql", 200), ("chat", 200), ("none", 503)):
            async with fleet.stack.ask(name, max_tokens=2) as answer:
                assert (name, answer.status) == (name, expected), await answer.text()
    finally:
        fleet.stack.start_picker()
        await fleet.stack.ready()
