"""Gateways: one for a whole module, reset after each test, and one for a test that breaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from plimsoll.gateway.envoy import jwt
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod, service
from tests.gateway.stack import GatewayStack


@pytest.fixture(scope="module")
def quick_keys() -> Iterator[None]:
    """Envoy fetches the keys of token issuers each second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jwt, "REFRESH_SECONDS", 6)  # Envoy refreshes 5 s before the end
        patch.setattr(jwt, "RETRY_SECONDS", 1)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: object) -> AsyncIterator[GatewayStack]:
    gateway = GatewayStack(make_directory(tmp_path_factory))
    try:
        yield await gateway.start()
    finally:
        await gateway.shut_down()
        print(gateway.log.read_text()[-4000:])


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: GatewayStack) -> AsyncIterator[GatewayStack]:
    """The module's gateway, without any service; a test that uses it must run in the module's loop."""
    yield shared
    await shared.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def lone(tmp_path_factory: object) -> AsyncIterator[GatewayStack]:
    """A gateway of the test's own, not up yet."""
    gateway = GatewayStack(make_directory(tmp_path_factory))
    try:
        yield gateway
    finally:
        await gateway.shut_down()
        print(gateway.log.read_text()[-4000:])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway_and_engine(tmp_path_factory: object) -> AsyncIterator[tuple[GatewayStack, FakeEngine]]:
    """A gateway that is impatient with slow requests, and its one engine."""
    gateway = GatewayStack(make_directory(tmp_path_factory), headers_timeout_seconds=0.5, body_timeout_seconds=0.8)
    try:
        engine = await gateway.engine()
        await gateway.start([service()], [pod(engine.address)])
        await gateway.wait_routable(engine)
        yield gateway, engine
    finally:
        await gateway.shut_down()
        print(gateway.log.read_text()[-4000:])


def make_directory(factory: object) -> Path:
    directory: Path = factory.mktemp("gw")  # type: ignore[attr-defined]
    assert len(str(directory)) < 80, "a unix socket's path has at most 107 bytes"
    return directory
