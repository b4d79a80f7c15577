"""A rotated secret of the gateways: no restart, no gateway alone while nodes get it, and an end for the former one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plimsoll.gateway.one_queue import connection, peer_secret
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from plimsoll.telemetry import gateway_metrics
from tests.gateway.one_queue_harness import SECRET, Gateway, Gateways, eventually, is_admitted
from tests.gateway.picker_harness import engine_names, service_with_slo


def rotate(gateway: Gateway, secret: bytes) -> None:
    """The kubelet of this gateway's node has written another secret."""
    gateway.queue._secret.take(secret)


NEW_SECRET = b"the secret of the next months"


async def test_rotated_secret_reaches_gateways_one_after_another(tmp_path: Path) -> None:
    """Whichever gateway has it first, they stay connected, and connect again after a loss."""
    async with Gateways(tmp_path, 2, service_with_slo(batch=20), pods=engine_names(1)) as gateways:
        first, second = gateways.all
        before = [link._connection for gateway in gateways.all for link in gateway.queue._links.values()]
        rotate(first, NEW_SECRET)
        assert [link._connection for gateway in gateways.all for link in gateway.queue._links.values()] == before
        for link in (*first.queue._links.values(), *second.queue._links.values()):
            assert link._connection is not None
            link._connection.close()
        await eventually(lambda: not any(link.is_ready for link in first.queue._links.values()), "the link is lost")
        await gateways.connected(*gateways.all)
        rotate(second, NEW_SECRET)
        assert first.picker.digest_seed == second.picker.digest_seed
        for gateway in gateways.all:
            assert is_admitted(await gateway.ask("hi"))
        assert gateways.owner().admits == 2


async def test_former_secret_is_valid_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that it opened end with it, and the gateways connect with the new one."""
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    async with Gateways(tmp_path, 2, service_with_slo(batch=20), pods=engine_names(1)) as gateways:
        links = [link for gateway in gateways.all for link in gateway.queue._links.values()]
        before = [link._connection for link in links]
        for gateway in gateways.all:
            rotate(gateway, NEW_SECRET)
            assert gateway.queue._secret.accepted == (NEW_SECRET, SECRET)
        for gateway in gateways.all:
            gateway.queue._secret._former_until_s = 0.0
            assert gateway.queue._secret.accepted == (NEW_SECRET,)
        await eventually(lambda: all(link._connection not in before for link in links), "the connections have ended")
        await gateways.connected(*gateways.all)
        assert {link._connection._session.proved_secret for link in links if link._connection} == {NEW_SECRET}


async def test_secret_file_is_followed_and_a_broken_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_secret, "READ_SECONDS", 0.01)
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    seen: list[bytes] = []
    secret = PeerSecret(path, seen.append)
    task = asyncio.create_task(secret.follow())
    path.write_bytes(b"short")
    await eventually(lambda: gateway_metrics.GATEWAY_PEER_SECRET_INVALID._value.get() == 1.0, "the metric says it")
    assert secret.accepted == (SECRET,)
    assert "must have at least 16 bytes, not 5" in caplog.text
    path.unlink()
    await eventually(lambda: "No such file" in caplog.text, "the log says it")
    path.write_bytes(NEW_SECRET + b"\n")
    await eventually(lambda: seen == [NEW_SECRET], "the new secret is used")
    await eventually(lambda: gateway_metrics.GATEWAY_PEER_SECRET_INVALID._value.get() == 0.0, "the metric says it")
    task.cancel()
