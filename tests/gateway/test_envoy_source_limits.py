"""One source address cannot take the connections of all others: a real Envoy, sources of 127.0.0.0/8."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.settings import PickerSettings
from tests.gateway.kube_objects import pod, service
from tests.gateway.stack import TIMEOUT_S, GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

GREEDY = "127.0.0.2"
OTHERS = tuple(f"127.0.0.{last}" for last in range(3, 19))
PER_SOURCE = 40
REQUEST = b"GET /healthz HTTP/1.1\r\nhost: gateway\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module", autouse=True)
def file_limit() -> Iterator[None]:
    """Raise the limit of this process and its children for the module."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayStack]:
    fields = {"connections_per_source": PER_SOURCE, "headers_timeout_seconds": 600.0}
    stack = GatewayStack(tmp_path_factory.mktemp("gw"), envoy_memory_bytes=256 << 20, **fields)
    try:
        engine = await stack.engine()
        await stack.start([service()], [pod(engine.address)])
        await stack.wait_routable(engine)
        yield stack
    finally:
        await stack.shut_down()


async def connect(stack: GatewayStack, source: str) -> Connection:
    return await asyncio.open_connection("127.0.0.1", stack.settings.port, local_addr=(source, 0))


async def answer(connection: Connection) -> bytes:
    """Send a request and return the first line of the response; empty if the gateway closed the connection."""
    reader, writer = connection
    try:
        writer.write(REQUEST)
        return await asyncio.wait_for(reader.readline(), TIMEOUT_S)
    except ConnectionError:
        return b""


async def served(stack: GatewayStack, sources: tuple[str, ...]) -> int:
    """Returns how many of the sources get an answer over a new connection."""
    count = 0
    for source in sources:
        connection = await connect(stack, source)
        count += (await answer(connection)).startswith(b"HTTP/1.1 200")
        connection[1].close()
    return count


async def test_one_source_leaves_connections_to_others(gateway: GatewayStack) -> None:
    opened = [await connect(gateway, GREEDY) for _ in range(PER_SOURCE + 20)]
    try:
        answers = [await answer(connection) for connection in opened]
        assert [line.startswith(b"HTTP/1.1 200") for line in answers] == [True] * PER_SOURCE + [False] * 20
        assert set(answers[PER_SOURCE:]) == {b""}
        # One group of sixteen is full. The addresses and the pod's name decide who shares it, not chance.
        assert await served(gateway, OTHERS) >= len(OTHERS) - 3

        async def is_counted() -> bool:
            return (await gateway.admin.stats()).reached[GatewayLimit.SOURCE_CONNECTIONS] >= 20

        await wait_until(is_counted, "the refused connections are counted")
    finally:
        for _, writer in opened:
            writer.close()

    async def is_free() -> bool:
        return await served(gateway, (GREEDY,)) == 1

    await wait_until(is_free, "the closed connections are free again")


async def test_silent_sockets_leave_connections_to_others(gateway: GatewayStack) -> None:
    """Silent sockets: five times what the gateway takes of one source by default, none of them timed out."""
    silent = []
    default = PickerSettings(envoy_memory_bytes=gateway.settings.envoy_memory_bytes)
    count = 5 * default.max_connections_per_source
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            silent.append(stack.enter_context(socket.socket()))
            silent[-1].bind((GREEDY, 0))
            silent[-1].connect(("127.0.0.1", gateway.settings.port))

        async def are_open() -> bool:
            return (await gateway.admin.stats()).connections >= count

        await wait_until(are_open, "Envoy has the silent sockets")
        assert await served(gateway, OTHERS) == len(OTHERS)
        assert (await gateway.admin.stats()).reached[GatewayLimit.CONNECTIONS] == 0


async def test_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        PickerSettings.from_environment({"PLIMSOLL_CONNECTIONS_PER_SOURCE": "-1"})
