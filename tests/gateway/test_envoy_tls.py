"""TLS through real Envoy: versions and protocols, plain HTTP, rotation under load, and Secrets that are broken."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import httpx
import pytest
import pytest_asyncio

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, KEY_FILE, load_pair
from plimsoll.gateway.settings import Plaintext, TlsVersion
from tests.certificates import SecretVolume
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod, service
from tests.gateway.malformed_requests import GOOD_BODY
from tests.gateway.stack import TIMEOUT_S, GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

CLIENTS, ROTATIONS = 4, 3
HEADERS = {"content-type": "application/json"}


class SecureGateway:
    """A gateway with TLS, its engine, and the volume of its Secret."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.volume = SecretVolume(directory / "tls")
        self.stack = GatewayStack(directory, tls_directory=self.volume.directory, **settings)
        self.engine: FakeEngine

    async def start(self) -> SecureGateway:
        self.engine = await self.stack.engine()
        await self.stack.start([service()], [pod(self.engine.address)])
        await self.stack.wait_routable(self.engine)
        return self

    async def served(self, **options: int) -> str:
        """The certificate that a new connection gets, in PEM."""
        context = unverified()
        for name, value in options.items():
            setattr(context, name, value)
        _, writer = await asyncio.open_connection("127.0.0.1", self.stack.settings.port, ssl=context)
        try:
            found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return ssl.DER_cert_to_PEM_cert(found)
        finally:
            writer.transport.abort()

    async def wait_served(self, pem: str) -> None:
        async def is_met() -> bool:
            try:
                return await self.served() == pem
            except ConnectionError:  # Envoy opens its port once it has a certificate
                return False

        await wait_until(is_met, "Envoy serves the new certificate")

    async def metric(self, name: str) -> float:
        async with self.stack.http.get(f"{self.stack.picker_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    async def wait_invalid(self, value: float) -> None:
        async def is_met() -> bool:
            return await self.metric('plimsoll_gateway_certificate_invalid{certificate="listener"}') == value

        await wait_until(is_met, f"plimsoll_gateway_certificate_invalid is {value}")

    async def reason(self) -> str:
        """Why the gateway is not ready, "" while its picker does not answer."""
        try:
            async with self.stack.http.get(f"{self.stack.picker_url}/readyz") as answer:
                return await answer.text()
        except aiohttp.ClientError:
            return ""


def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def trusting(*certificates: str) -> ssl.SSLContext:
    return ssl.create_default_context(cadata="".join(certificates))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(tmp_path_factory: object) -> AsyncIterator[SecureGateway]:
    gateway = SecureGateway(make_directory(tmp_path_factory), headers_timeout_seconds=2.0)
    gateway.volume.rotate("first")
    try:
        yield await gateway.start()
    finally:
        await gateway.stack.shut_down()
        print(gateway.stack.log.read_text()[-4000:])


@pytest.mark.parametrize(("http2", "version"), [(True, "HTTP/2"), (False, "HTTP/1.1")])
async def test_https_serves_both_http_versions(secure: SecureGateway, http2: bool, version: str) -> None:
    pem = await secure.served()
    async with httpx.AsyncClient(http2=http2, verify=trusting(pem)) as client:
        answer = await client.post(f"{secure.stack.url}/v1/chat/completions", content=GOOD_BODY, headers=HEADERS)
    assert (answer.status_code, answer.http_version) == (200, version)
    assert secure.engine.received[-1].headers[b"x-forwarded-proto"] == b"https"


async def test_plain_http_gets_an_error_that_names_https(secure: SecureGateway) -> None:
    seen, url = len(secure.engine.received), secure.stack.url.replace("https", "http")
    for path in ("/v1/chat/completions", "/v1/messages", "/healthz"):
        async with secure.stack.http.post(f"{url}{path}", data=GOOD_BODY + b" " * 100_000) as answer:
            body = await answer.json()
            assert (answer.status, answer.headers["x-plimsoll-reason"]) == (400, "tls_required")
            assert answer.headers["x-should-retry"] == "false"
            assert "https://" in body["error"]["message"]
            assert ("code" in body["error"]) == (path != "/v1/messages")
    assert len(secure.engine.received) == seen


async def test_silent_handshake_is_closed(secure: SecureGateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", secure.stack.settings.port)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = unverified().wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    writer.write(outgoing.read())
    async with asyncio.timeout(TIMEOUT_S):  # the gateway's hello, then nothing, then the end
        while await reader.read(1 << 16):
            pass
    writer.close()
    await secure.stack.ready()

    async def is_counted() -> bool:
        return await secure.metric('plimsoll_gateway_limit_reached_total{limit="first_byte_time"}') >= 1

    await wait_until(is_counted, "the timeout is counted")


async def test_rotation_under_load_fails_no_request(secure: SecureGateway) -> None:
    """Clients with kept and with new connections trust every certificate of the test; a stream outlives them all."""
    assert secure.stack.envoy is not None
    envoy, stop = secure.stack.envoy.pid, asyncio.Event()
    statuses: list[int] = []

    async def client(force_close: bool) -> None:
        connector = aiohttp.TCPConnector(ssl=unverified(), force_close=force_close)
        async with aiohttp.ClientSession(connector=connector) as http:
            while not stop.is_set():
                async with http.post(
                    f"{secure.stack.url}/v1/chat/completions", data=GOOD_BODY, headers=HEADERS
                ) as answer:
                    await answer.read()
                    statuses.append(answer.status)
                await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(client(bool(i % 2))) for i in range(CLIENTS)]
    for number in range(ROTATIONS):
        pem, before = secure.volume.rotate(f"rotation-{number}", days=40 + number), len(statuses)
        await secure.wait_served(pem)
        await wait_until(lambda before=before: len(statuses) > before + 10, "requests go on")  # type: ignore[misc]
    stop.set()
    await asyncio.gather(*tasks)
    assert set(statuses) == {200}
    assert (secure.stack.envoy.pid, secure.stack.envoy.poll()) == (envoy, None)
    expiry_s = load_pair(secure.volume.directory).expires_s
    assert await secure.metric('plimsoll_gateway_certificate_expiry_seconds{certificate="listener"}') == expiry_s
    async with httpx.AsyncClient(verify=trusting(pem)) as checked:
        assert (await checked.get(f"{secure.stack.url}/v1/models")).status_code == 200


async def test_broken_secret_keeps_the_certificate(secure: SecureGateway) -> None:
    before = await secure.served()
    files = {name: (secure.volume.directory / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE)}
    secure.volume.rotate("other")
    other_key = (secure.volume.directory / KEY_FILE).read_bytes()
    await secure.wait_served((secure.volume.directory / CERTIFICATE_FILE).read_text())
    secure.volume.write(files)
    await secure.wait_served(before)
    for broken in ({**files, KEY_FILE: other_key}, {**files, CERTIFICATE_FILE: b"garbage"}, {**files, KEY_FILE: b""}):
        secure.volume.write(broken)
        await secure.wait_invalid(1)
        assert await secure.served() == before
        assert (await secure.reason()).strip() == "ok"
        secure.volume.write(files)
        await secure.wait_invalid(0)
    log = secure.stack.log.read_text()
    assert "cannot be used together: key values mismatch" in log
    assert "tls.crt holds no X.509 certificate in PEM" in log
    assert "tls.key is empty" in log


async def test_key_that_envoy_rejects_keeps_the_certificate(secure: SecureGateway) -> None:
    before = await secure.served()
    files = {name: (secure.volume.directory / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE)}
    secure.volume.rotate("small", algorithm=("rsa:1024",))
    await secure.wait_invalid(1)
    assert await secure.served() == before
    assert (await secure.reason()).strip() == "ok"
    secure.volume.write(files)
    await secure.wait_invalid(0)


async def test_restarts_with_broken_secret(secure: SecureGateway) -> None:
    """Envoy keeps its certificate over a new picker; a new Envoy has none, and the gateway says why."""
    before = await secure.served()
    secure.volume.write({CERTIFICATE_FILE: b"garbage", KEY_FILE: b"garbage"})
    assert secure.stack.picker is not None
    assert secure.stack.envoy is not None
    secure.stack.picker.send_signal(signal.SIGKILL)
    secure.stack.picker.wait()
    assert await secure.served() == before
    secure.stack.start_picker()
    await secure.stack.ready()
    assert await secure.served() == before
    secure.stack.envoy.kill()
    secure.stack.envoy.wait()
    secure.stack.start_envoy()

    async def is_reported() -> bool:
        return "tls.crt holds no X.509 certificate in PEM" in await secure.reason()

    await wait_until(is_reported, "readiness names the Secret's error")
    await secure.wait_served(secure.volume.rotate("repaired"))
    await secure.stack.ready()
    assert b"PRIVATE" not in secure.stack.settings.bootstrap.read_bytes()
    assert "PRIVATE" not in secure.stack.log.read_text()


async def test_first_start_with_broken_secret_is_alive_and_unready(tmp_path_factory: object) -> None:
    """Envoy's liveness probe connects to its port. A certificate that comes later needs no restart."""
    gateway = SecureGateway(make_directory(tmp_path_factory))
    stack = gateway.stack
    gateway.volume.write({CERTIFICATE_FILE: b"garbage", KEY_FILE: b"garbage"})

    async def is_open() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
        except ConnectionError:
            return False
        writer.transport.abort()
        return True

    async def is_reported() -> bool:
        return "tls.crt holds no X.509 certificate in PEM" in await gateway.reason()

    start = asyncio.create_task(gateway.start())
    try:
        await wait_until(is_open, "Envoy opens its port")
        await wait_until(is_reported, "readiness names the Secret's error")
        assert not start.done()
        pem = gateway.volume.rotate()
        await start
        assert await gateway.served() == pem
    finally:
        start.cancel()
        await stack.shut_down()


async def test_plaintext_allowed_and_tls_1_3_required(tmp_path_factory: object) -> None:
    gateway = SecureGateway(
        make_directory(tmp_path_factory), plaintext=Plaintext.ALLOW, tls_min_version=TlsVersion.TLS_1_3
    )
    pem = gateway.volume.rotate()
    try:
        await gateway.start()
        for url in (gateway.stack.url, gateway.stack.url.replace("https", "http")):
            async with gateway.stack.http.post(
                f"{url}/v1/chat/completions", data=GOOD_BODY, headers=HEADERS, ssl=trusting(pem)
            ) as answer:
                assert answer.status == 200
        assert await gateway.served(minimum_version=ssl.TLSVersion.TLSv1_3) == pem
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await gateway.served(maximum_version=ssl.TLSVersion.TLSv1_2)
    finally:
        await gateway.stack.shut_down()
