"""Model names that change while requests flow: real Envoy, the real picker, simulated engines behind the middleware."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine_image.simulated.api_harness import make_harness, serve_engine
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

USERS = 4
ENOUGH = 25  # answers under a name


class Users:
    """Clients that ask without a pause, each for the `requested_names`; `failed` has what went wrong."""

    def __init__(self, stack: GatewayStack, *requested_names: str) -> None:
        self.requested_names = requested_names
        self.failed: list[tuple[str, int, Any]] = []
        self.answers: dict[str, int] = {}
        self._stack = stack
        self._stop = asyncio.Event()

    @asynccontextmanager
    async def flow(self) -> AsyncIterator[Users]:
        """Requests flow as long as the block runs."""
        users = [asyncio.create_task(self._ask(number)) for number in range(USERS)]
        try:
            yield self
        finally:
            self._stop.set()
            await asyncio.gather(*users)

    async def enough(self, *names: str) -> None:
        """Wait until each of these names has been answered often from now on."""
        expected = {name: self.answers.get(name, 0) + ENOUGH for name in names}
        await wait_until(
            lambda: all(self.answers.get(n, 0) >= count for n, count in expected.items()), f"answers: {expected}"
        )

    async def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            for name in self.requested_names:
                stream = number % 2 == 0
                async with self._stack.ask(name, max_tokens=3, stream=stream) as answer:
                    text = await answer.text()
                self._judge(name, answer.status, text, stream)

    def _judge(self, name: str, status: int, text: str, stream: bool) -> None:
        parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part] if stream else [text]
        ended = not stream or parts[-1] == "[DONE]"
        models = {json.loads(part).get("model") for part in parts if part != "[DONE]"}
        if (status, models, ended) == (200, {name}, True):
            self.answers[name] = self.answers.get(name, 0) + 1
        else:
            self.failed.append((name, status, text[:300]))


@pytest_asyncio.fixture(loop_scope="module")
async def engines(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """The address of one simulated engine of each service, which serves under its long name alone."""
    async with AsyncExitStack() as running:
        found = {}
        for name in ("chat", "small"):
            one = await running.enter_async_context(
                make_harness(tmp_path / name, "--served-model-name", f"team/{name}")
            )
            found[name] = await running.enter_async_context(serve_engine(one))
        yield found


async def listed(stack: GatewayStack) -> set[str]:
    """The names in the gateway's list of models."""
    async with stack.http.get(f"{stack.url}/v1/models") as answer:
        return {model["id"] for model in (await answer.json())["data"]}


async def lists(stack: GatewayStack, name: str) -> None:
    """Wait until the gateway lists a name."""

    async def is_listed() -> bool:
        return name in await listed(stack)

    await wait_until(is_listed, f"{name} is listed")


def service_named(model: str | None, *published: str, name: str = "chat") -> Object:
    """A service that was granted the name in its spec, and whose status still has the names before."""
    obj = service(name, model=model)
    return {**obj, "status": {**obj["status"], "modelNames": [*published, f"team/{name}"]}}


async def routable(stack: GatewayStack, address: str, key: str = "team/chat") -> None:
    """Wait until the gateway can send requests to an engine."""

    async def is_met() -> bool:
        return bool((await stack.endpoints(key)).get(address, {}).get("routable"))

    await wait_until(is_met, f"{address} is routable")


async def test_envoy_rename_under_load_loses_none(stack: GatewayStack, engines: dict[str, str]) -> None:
    pods = [pod(engines["chat"])]
    await stack.set_objects([service_named("old", "old")], pods)
    await routable(stack, engines["chat"])
    async with Users(stack, "old", "team/chat").flow() as users:
        await users.enough("old", "team/chat")
        stack.write_objects([service_named("new", "old")], pods)
        await lists(stack, "new")
        users.requested_names = ("new", "old", "team/chat")
        await users.enough("new", "old", "team/chat")
        stack.write_objects([service_named("new", "new", "old")], pods)
        await users.enough("new", "old", "team/chat")
    assert users.failed == []
    assert await listed(stack) == {"new"}


async def test_envoy_name_added_and_removed_loses_none(stack: GatewayStack, engines: dict[str, str]) -> None:
    pods = [pod(engines["chat"])]
    await stack.set_objects([service_named(None, "chat")], pods)
    await routable(stack, engines["chat"])
    async with Users(stack, "chat").flow() as users:
        stack.write_objects([service_named("added", "chat")], pods)
        await lists(stack, "added")
        users.requested_names = ("chat", "added")
        await users.enough("chat", "added")
        stack.write_objects([service_named(None, "added", "chat")], pods)
        await lists(stack, "chat")
        await users.enough("chat", "added")
    assert users.failed == []


async def test_envoy_name_off_the_status_is_not_found(stack: GatewayStack, engines: dict[str, str]) -> None:
    pods = [pod(engines["chat"])]
    await stack.set_objects([service_named("new", "new", "old")], pods)
    await routable(stack, engines["chat"])
    assert (await stack.ask_fully("old", max_tokens=1))[0] == 200
    stack.write_objects([service_named("new", "new")], pods)

    async def is_gone() -> bool:
        status, body, _ = await stack.ask_fully("old", max_tokens=1)
        return (status, body.get("error", {}).get("code")) == (404, "model_not_found")

    await wait_until(is_gone, "the dropped name is not answered any more")
    assert (await stack.ask_fully("new", max_tokens=1))[0] == 200


async def test_envoy_fallback_renamed_answers_as_new_name(stack: GatewayStack, engines: dict[str, str]) -> None:
    big = await stack.engine()
    hold = big.behaviour.release_event = asyncio.Event()
    down = {
        "whenFull": "Downgrade",
        "fallback": {"name": "small"},
        "classes": [{"name": "default", "maxQueueTime": "0s"}],
    }
    full = service_with_slo(admission=down, batch=1, slo={"tpot": "50ms"})
    pods = [pod(big.address), pod(engines["small"], service="small")]
    await stack.set_objects([full, service_named("lesser", "lesser", name="small")], pods)
    await stack.wait_routable(big)
    await routable(stack, engines["small"], "team/small")
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(big, 1)
    before = await stack.ask_fully(max_tokens=1)
    stack.write_objects([full, service_named("least", "lesser", name="small")], pods)
    await lists(stack, "least")
    after = await stack.ask_fully(max_tokens=1)
    hold.set()
    assert (await running)[0] == 200
    assert [(status, body["model"]) for status, body, _ in (before, after)] == [(200, "lesser"), (200, "least")]


async def test_envoy_no_picker_serves_every_name(lone: GatewayStack, engines: dict[str, str]) -> None:
    await lone.start([service_named("new", "old")], [pod(engines["chat"])])
    await routable(lone, engines["chat"])
    assert lone.picker is not None
    lone.picker.kill()
    lone.picker.wait()
    for name in ("new", "old", "team/chat"):
        status, body, _ = await lone.ask_fully(name, max_tokens=1)
        assert (status, body["model"]) == (200, name)
    assert (await lone.admin.stats()).failed_open > 0


async def test_envoy_engine_of_before_is_sent_its_long_name(stack: GatewayStack) -> None:
    engine = await stack.engine()
    await stack.set_objects([service_named("new", "old")], [pod(engine.address)])
    await stack.wait_routable(engine)
    for name in ("new", "old", "team/chat"):
        assert (await stack.ask_fully(name))[0] == 200
        assert engine.header("x-plimsoll-model") == "team/chat"


async def test_envoy_address_of_other_service_is_refused(stack: GatewayStack, engines: dict[str, str]) -> None:
    await stack.set_objects([service("other")], [pod(engines["chat"], service="other")])
    await routable(stack, engines["chat"], "team/other")
    status, body, _ = await stack.ask_fully("other", max_tokens=1)
    assert (status, body["error"]["code"]) == (503, "wrong_engine")
