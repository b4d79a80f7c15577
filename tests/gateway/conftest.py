"""Gateways: one for a whole module, reset after each test, and one for a test that breaks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.gateway.engine import Engine
from tests.gateway.objects import pod, service
from tests.gateway.stack import Stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: object) -> AsyncIterator[Stack]:
    gateway = Stack(_directory(tmp_path_factory))
    try:
        yield await gateway.up()
    finally:
        await gateway.down()
        print(gateway.log.read_text()[-4000:])


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    """The module's gateway, without any service; a test that uses it must run in the module's loop."""
    yield shared
    await shared.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def lone(tmp_path_factory: object) -> AsyncIterator[Stack]:
    """A gateway of the test's own, not up yet."""
    gateway = Stack(_directory(tmp_path_factory))
    try:
        yield gateway
    finally:
        await gateway.down()
        print(gateway.log.read_text()[-4000:])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: object) -> AsyncIterator[tuple[Stack, Engine]]:
    """A gateway that is impatient with slow requests, and its one engine."""
    gateway = Stack(_directory(tmp_path_factory), headers_timeout_seconds=0.5, body_timeout_seconds=0.8)
    try:
        engine = await gateway.engine()
        await gateway.up([service()], [pod(engine.address)])
        await gateway.routable(engine)
        yield gateway, engine
    finally:
        await gateway.down()
        print(gateway.log.read_text()[-4000:])


def _directory(factory: object) -> Path:
    directory: Path = factory.mktemp("gw")  # type: ignore[attr-defined]
    assert len(str(directory)) < 80, "a unix socket's path has at most 107 bytes"
    return directory
