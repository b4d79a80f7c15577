"""TLS of KEDA's external scaler, with a real gRPC server and client on 127.0.0.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from plimsoll.adapters.certificate_files import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, expiry_s
from plimsoll.adapters.grpc_credentials import ServerCredentials
from plimsoll.controllers import certificates
from plimsoll.controllers.keda_scaler import server
from plimsoll.resources.platform_config import KedaScalerSettings
from plimsoll.telemetry import operator_metrics
from tests.certificates import SecretVolume, make_certificate
from tests.controllers.test_keda_scaler import Client, service
from tests.ports import free_port

KNOWN = {("team", "chat"): service(serve=3)}


class Pair:
    """A self-signed certificate in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        home = folder / name
        home.mkdir()
        make_certificate(home, name)
        self.certificate, self.key = ((home / file).read_bytes() for file in (CERTIFICATE_FILE, KEY_FILE))

    def files(self, **more: bytes) -> dict[str, bytes]:
        return {CERTIFICATE_FILE: self.certificate, KEY_FILE: self.key, **more}


@asynccontextmanager
async def scaler(secret: SecretVolume, require_client_certificate: bool = False) -> AsyncIterator[str]:
    """The address of a scaler with the certificate of a mounted Secret."""
    files = ServerCredentials(secret.directory, require_client_certificate, check_s=0.0)
    credentials = await files.wait(interval_s=0.01)
    running, port = await server.KedaScaler(KNOWN.get).start("127.0.0.1:0", credentials)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await running.stop(0)


async def read_metric(address: str, trusted: Pair, client: Pair | None = None) -> int | str:
    """The replicas that a client reads over a new connection, or the code of the error."""
    own = (None, None) if client is None else (client.key, client.certificate)
    options = (("grpc.use_local_subchannel_pool", 1),)  # else a connection of before is used
    credentials = grpc.ssl_channel_credentials(trusted.certificate, *own)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        try:
            return await Client(channel).replicas(service="chat")
        except grpc.aio.AioRpcError as error:
            return error.code().name


@pytest.fixture
def secret(tmp_path: Path) -> SecretVolume:
    return SecretVolume(tmp_path / "secret")


async def test_scaler_answers_over_tls_only(tmp_path: Path, secret: SecretVolume) -> None:
    own, other = Pair(tmp_path, "own"), Pair(tmp_path, "other")
    secret.write(own.files())
    async with scaler(secret) as address:
        assert await read_metric(address, own) == 3
        assert await read_metric(address, other) == "UNAVAILABLE", "a client that trusts another authority"
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await Client(channel).error(service="chat"))[0] == "UNAVAILABLE"


async def test_client_needs_certificate_of_the_authority(tmp_path: Path, secret: SecretVolume) -> None:
    own, keda, other = (Pair(tmp_path, name) for name in ("own", "keda", "other"))
    secret.write(own.files(**{AUTHORITY_FILE: keda.certificate}))
    async with scaler(secret, require_client_certificate=True) as address:
        assert await read_metric(address, own, keda) == 3
        assert await read_metric(address, own) == "UNAVAILABLE"
        assert await read_metric(address, own, other) == "UNAVAILABLE"


async def test_rotation_needs_no_restart(tmp_path: Path, secret: SecretVolume) -> None:
    """New connections have the new certificate, a connection of before goes on, and a broken Secret changes nothing."""
    first, second = Pair(tmp_path, "first"), Pair(tmp_path, "second")
    secret.write(first.files())
    async with scaler(secret) as address:
        credentials = grpc.ssl_channel_credentials(first.certificate)
        async with grpc.aio.secure_channel(address, credentials) as channel:
            assert await Client(channel).replicas(service="chat") == 3
            secret.write(second.files())
            assert await read_metric(address, second) == 3
            assert await read_metric(address, first) == "UNAVAILABLE"
            secret.write({CERTIFICATE_FILE: first.certificate, KEY_FILE: second.key})
            assert await read_metric(address, second) == 3
            assert await Client(channel).replicas(service="chat") == 3


@pytest.mark.parametrize("authority", [None, b"no certificate"])
async def test_scaler_without_certificate_waits(tmp_path: Path, secret: SecretVolume, authority: bytes | None) -> None:
    """There is no listener, and so no plaintext, until the Secret has what is needed."""
    own = Pair(tmp_path, "own")
    if authority is not None:
        secret.write(own.files(**{AUTHORITY_FILE: authority}))
    export = partial(certificates.export, certificates.KEDA_SCALER)
    files = ServerCredentials(secret.directory, require_client_certificate=True, report=export)
    waiting = asyncio.create_task(files.wait(interval_s=0.01))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    assert operator_metrics.OPERATOR_CERTIFICATE_INVALID.labels(certificates.KEDA_SCALER)._value.get() == 1
    secret.write(own.files(**{AUTHORITY_FILE: own.certificate}))
    assert isinstance(await waiting, grpc.ServerCredentials)
    assert operator_metrics.OPERATOR_CERTIFICATE_INVALID.labels(certificates.KEDA_SCALER)._value.get() == 0
    ends_s = operator_metrics.OPERATOR_CERTIFICATE_EXPIRY.labels(certificates.KEDA_SCALER)._value.get()
    assert ends_s == expiry_s(own.certificate.decode())


async def test_metrics_follow_the_secret_without_connections(
    tmp_path: Path, secret: SecretVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEDA keeps its connection for months. A process that no longer serves KEDA has no series of the certificate."""
    monkeypatch.setattr(server, "ServerCredentials", partial(ServerCredentials, check_s=0.01))
    name = "plimsoll_operator_certificate_"
    labels = {"certificate": certificates.KEDA_SCALER}

    def shown() -> list[float | None]:
        names = f"{name}invalid", f"{name}expiry_seconds"
        return [operator_metrics.OPERATOR.get_sample_value(one, labels) for one in names]

    async def until(invalid: float, expires_s: float) -> None:
        async with asyncio.timeout(10.0):
            while shown() != [invalid, expires_s]:
                await asyncio.sleep(0.01)

    second = expiry_s(secret.rotate(days=90))
    settings = KedaScalerSettings(port=free_port(), certificateDirectory=str(secret.directory))
    serving = asyncio.create_task(server.serve(settings, KNOWN.get))
    await until(0, second)
    third = expiry_s(secret.rotate(days=100))
    await until(0, third)
    secret.write({CERTIFICATE_FILE: b"garbage", KEY_FILE: b"garbage"})
    await until(1, second)
    serving.cancel()
    await asyncio.wait((serving,))
    assert shown() == [None, None]
