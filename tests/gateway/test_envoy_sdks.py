"""Clients that nobody here wrote meet a service that refuses: real SDKs, real Envoy, the real picker.

What is said of them in docs/concepts/clients.md is what these tests see. Each client is a process of its own with a
service of its own; all of them go through the same refusals at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from e2e.lib import sdks
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import Object, pod
from tests.gateway.picker_harness import START_UNIX_S, service_with_slo
from tests.gateway.recording_relay import CLIENTS, ClientProcess, RecordedAttempt, RecordingRelay
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

USERS = 3
EARLY_S = 0.05  # by which a timer may fire too soon
# A picker that has no engine yet ignores a time that has passed, and then names 10 to 30 s as the time to retry.
CAPACITY_IN_S = 4.0
ROUTER = "litellm-router"
ATTEMPTS = {"openai-python": 3, "openai-node": 3, "litellm": 5, ROUTER: 3}
ATTEMPTS_WITHOUT_RETRY = {"openai-python": 1, "openai-node": 1, "litellm": 3, ROUTER: 3}  # two of the four do not look


class Clients:
    """All that there are, and the wire that they talk over."""

    def __init__(self, wire: RecordingRelay, stack: GatewayStack) -> None:
        self.wire = wire
        self.processes: dict[str, ClientProcess] = {}
        self._stack = stack

    async def ask_of(self, name: str, said: str, *, stream: bool = False) -> list[str]:
        """One client's users ask its own service at once; what each user got in the end."""
        return await self.processes[name].ask(name, [f"{said}, user {n}" for n in range(USERS)], stream=stream)

    async def ask(self, said: str) -> dict[str, list[str]]:
        """The same of all clients at once."""
        found = await asyncio.gather(*(self.ask_of(name, said) for name in self.processes))
        return dict(zip(self.processes, found, strict=True))

    def attempts(self) -> dict[str, list[int]]:
        """How often each user of each client was seen on the wire."""
        return {name: [len(tries) for tries in self.wire.users(name)] for name in self.processes}

    async def demand(self) -> dict[str, tuple[int, int]]:
        """First attempts and retries, as /signals counts them."""
        services = (await self._stack.signals())["services"]
        counts = {name: services[f"team/{name}"]["requests"] for name in self.processes}
        return {name: (found["arrived"], found["retried"]) for name, found in counts.items()}

    def each(self, count: Callable[[str], Any]) -> dict[str, Any]:
        return {name: count(name) for name in self.processes}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(shared: GatewayStack) -> AsyncIterator[Clients]:
    wire = await RecordingRelay(shared.url).start()
    clients = Clients(wire, shared)
    try:
        clients.processes.update(await _start(wire.url))
        for client in clients.processes.values():
            await client.ready()
        yield clients
    finally:
        for client in clients.processes.values():
            await client.stop()
        await wire.stop()


async def _start(url: str) -> dict[str, ClientProcess]:
    for package in ("openai", "litellm"):
        sdks.require_package(package)
    script = shutil.copy2(CLIENTS / "openai_node.mjs", sdks.node_folder())  # Node looks for packages beside the script
    python, lite = str(CLIENTS / "openai_python.py"), str(CLIENTS / "lite_llm.py")
    return {
        "openai-python": await ClientProcess.start(sys.executable, python, url),
        "openai-node": await ClientProcess.start("node", str(script), url),
        "litellm": await ClientProcess.start(sys.executable, lite, url, "completion"),
        ROUTER: await ClientProcess.start(sys.executable, lite, url, "router"),
    }


@pytest_asyncio.fixture(loop_scope="module")
async def clients(processes: Clients, stack: GatewayStack) -> Clients:
    processes.wire.attempts.clear()
    return processes


async def _engines(stack: GatewayStack, clients: Clients, made: Callable[[str], Object]) -> dict[str, FakeEngine]:
    """A service for each client, with one engine."""
    engines = {name: await stack.engine() for name in clients.processes}
    await stack.set_objects(map(made, engines), [pod(e.address, service=name) for name, e in engines.items()])
    for name, engine in engines.items():
        await stack.wait_routable(engine, service=f"team/{name}")
    return engines


def _service_with_short_retry(name: str) -> Object:
    """A service with USERS slots that expects more capacity soon, so that Retry-After is at most CAPACITY_IN_S."""
    ready_at_s = time.time() - START_UNIX_S + CAPACITY_IN_S
    return service_with_slo(name, {"whenFull": "Shed"}, batch=USERS, ready_at_s=ready_at_s, ready_work=1e3)


@contextlib.asynccontextmanager
async def _saturated(stack: GatewayStack, name: str, engine: FakeEngine) -> AsyncIterator[None]:
    """All places of a service are taken."""
    room = engine.behaviour.release_event = asyncio.Event()
    running = [asyncio.create_task(stack.ask_fully(name)) for _ in range(USERS)]
    try:
        await wait_until(lambda: engine.open == USERS, "all places are taken")
        yield
    finally:
        room.set()
        await asyncio.gather(*running)


def _retry_after_and_waits(tries: list[RecordedAttempt]) -> list[tuple[float, float]]:
    """Of each attempt but the last: the seconds told, and those until the next one."""
    return [
        (float(now.retry_after or 0), after.received_s - now.responded_s) for now, after in itertools.pairwise(tries)
    ]


async def test_sdk_retry_after_is_obeyed_and_request_succeeds(stack: GatewayStack, clients: Clients) -> None:
    engines = await _engines(stack, clients, _service_with_short_retry)

    async def at_first_full(name: str) -> list[str]:
        async with _saturated(stack, name, engines[name]):
            pending = asyncio.create_task(clients.ask_of(name, "full at first"))

            def all_rejected() -> bool:
                users = clients.wire.users(name)
                return len(users) == USERS and all(tries[0].responded_s for tries in users)

            await wait_until(all_rejected, "each user was told to come back")
        return await pending

    found = await asyncio.gather(*map(at_first_full, clients.processes))
    assert found == [["succeeded"] * USERS for _ in found]
    for name in clients.processes:
        for tries in clients.wire.users(name):
            *refused, last = [one.status for one in tries]
            assert last == 200
            assert refused == [429] * len(refused)
            assert all(waited >= hint_s - EARLY_S for hint_s, waited in _retry_after_and_waits(tries)), (name, tries)
    expected = {name: (2 * USERS, sum(counts) - USERS) for name, counts in clients.attempts().items()}
    assert await clients.demand() == expected


async def test_sdk_rejected_until_exhaustion_counts_one_demand(stack: GatewayStack, clients: Clients) -> None:
    engines = await _engines(stack, clients, _service_with_short_retry)
    async with contextlib.AsyncExitStack() as full:
        for name, engine in engines.items():
            await full.enter_async_context(_saturated(stack, name, engine))
        got = await clients.ask("full to the end")
        demand = await clients.demand()
    assert all(one.startswith("429") for found in got.values() for one in found), got
    assert clients.attempts() == clients.each(lambda name: [ATTEMPTS[name]] * USERS)
    for name in clients.processes:
        for tries in clients.wire.users(name):
            waits = _retry_after_and_waits(tries)[:2]  # LiteLLM's own two come at once
            assert all(hint_s >= 1 and waited >= hint_s - EARLY_S for hint_s, waited in waits), (name, tries)
    assert demand == clients.each(lambda name: (2 * USERS, USERS * (ATTEMPTS[name] - 1)))


async def test_sdk_should_not_retry_is_obeyed_or_counted_once(stack: GatewayStack, clients: Clients) -> None:
    ready_at_s = time.time() - START_UNIX_S + 600
    await stack.set_objects(
        [service_with_slo(name, ready_at_s=ready_at_s, ready_work=1e3) for name in clients.processes], []
    )
    got = await clients.ask("ten minutes from ready")
    assert all(one.startswith("503") for found in got.values() for one in found), got
    tries = [one for name in clients.processes for user in clients.wire.users(name) for one in user]
    assert {(one.status, one.should_retry) for one in tries} == {(503, "false")}
    assert all(500 < int(one.retry_after or 0) <= 600 for one in tries), "for clients that can wait that long"
    assert clients.attempts() == clients.each(lambda name: [ATTEMPTS_WITHOUT_RETRY[name]] * USERS)
    expected = clients.each(lambda name: (USERS, USERS * (ATTEMPTS_WITHOUT_RETRY[name] - 1)))
    assert await clients.demand() == expected


async def test_sdk_retry_of_draining_engine_is_one_demand_if_marked(stack: GatewayStack, clients: Clients) -> None:
    engines = await _engines(stack, clients, service_with_slo)
    for engine in engines.values():
        engine.behaviour.error_marker = "draining"
    got = await clients.ask("all engines drain")
    assert all(one.startswith("503") for found in got.values() for one in found), got
    assert clients.attempts() == clients.each(lambda name: [ATTEMPTS[name]] * USERS)
    for name in clients.processes:
        for tries in clients.wire.users(name):
            waits = _retry_after_and_waits(tries)[:2]
            assert all(hint_s == 1 and waited >= hint_s - EARLY_S for hint_s, waited in waits), (name, tries)
    said = {"openai-python": 2, "openai-node": 2, "litellm": 2, ROUTER: 0}  # attempts that tell of one before
    expected = clients.each(lambda name: (USERS * (ATTEMPTS[name] - said[name]), USERS * said[name]))
    assert await clients.demand() == expected


async def test_sdk_unknown_model_gets_404(stack: GatewayStack, clients: Clients) -> None:
    """The Router, which then has no model left to ask for a while, has no part in this."""
    for name, often in (("openai-python", 1), ("openai-node", 1), ("litellm", 3)):
        got = await clients.ask_of(name, "nobody has this")
        assert all(one.startswith("404") for one in got), got
        assert clients.attempts()[name] == [often] * USERS


async def test_sdk_cut_stream_is_error_without_retry(stack: GatewayStack, clients: Clients) -> None:
    """The Router, which asks anew as long as it is cut, has no part in this."""
    engines = await _engines(stack, clients, service_with_slo)
    for name in ("openai-python", "openai-node", "litellm"):
        engines[name].behaviour.die_after = 2
        got = await clients.ask_of(name, "cut", stream=True)
        assert "succeeded" not in got
        assert clients.attempts()[name] == [1] * USERS
