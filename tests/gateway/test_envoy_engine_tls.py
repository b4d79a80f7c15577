"""Mutual TLS from real Envoy to real engines: who is refused, rotation under load, and engines of both kinds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from plimsoll.adapters.certificate_files import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, expiry_s
from plimsoll.api import labels
from plimsoll.api.contract import engine_tls_name, internal_tls_name
from tests.certificates import Authority, SecretVolume
from tests.gateway.conftest import make_directory
from tests.gateway.kube_objects import SYSTEM, Object, pod, service
from tests.gateway.simulated_engine import simulated_engine
from tests.gateway.stack import GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

NAME, RELEASE = engine_tls_name("team"), internal_tls_name(SYSTEM)
BODY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()
HEADERS = {"content-type": "application/json"}
CLIENTS, ROTATIONS = 3, 2


@dataclass
class SecureEngines:
    """A gateway with a client certificate, and one engine that requires it."""

    stack: GatewayStack
    authority: Authority
    folder: Path
    engine: Path
    client: SecretVolume
    server: SecretVolume
    address: str = ""

    async def post(self) -> tuple[int, str]:
        async with self.stack.http.post(
            f"{self.stack.url}/v1/chat/completions", data=BODY, headers=HEADERS
        ) as response:
            return response.status, await response.text()

    async def metric(self, name: str) -> float:
        """NaN without it, and while the picker has no certificate."""
        try:
            async with self.stack.http.get(f"{self.stack.picker_url}/metrics", **self.stack.picker_tls) as response:
                lines = (await response.text()).splitlines()
        except aiohttp.ClientError:
            return math.nan
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), math.nan)

    def connect(self, files: dict[str, bytes] | None, name: str = NAME) -> ssl.SSLContext:
        """The context of a client with these files; None for one without a certificate."""
        context = ssl.create_default_context(cadata=self.authority.pem.decode())
        if files is not None:
            for file, content in files.items():
                (self.folder / file).write_bytes(content)
            context.load_cert_chain(self.folder / CERTIFICATE_FILE, self.folder / KEY_FILE)
        return context

    async def answer(self, context: ssl.SSLContext | None, address: str = "") -> int | None:
        """The status of an engine's health for this client; None if the engine refuses it."""
        url = f"{'http' if context is None else 'https'}://{address or self.address}/health"
        tls = {} if context is None else {"ssl": context, "server_hostname": NAME}
        try:
            async with aiohttp.ClientSession() as http, http.get(url, **tls) as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return None


def secure_pod(address: str) -> Object:
    found = pod(address)
    found["metadata"]["labels"][labels.TLS] = labels.MUTUAL_TLS
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureEngines]:
    folder = make_directory(tmp_path_factory)
    authority = Authority(folder / "authority", "plimsoll")
    client, server = SecretVolume(folder / "client"), SecretVolume(folder / "server")
    client.write(authority.issue(RELEASE))
    server.write(authority.issue(NAME))
    (folder / "scratch").mkdir()
    (folder / "engine").mkdir()
    stack = GatewayStack(folder, internal_tls=client.directory)
    found = SecureEngines(stack, authority, folder / "scratch", folder / "engine", client, server)
    stack.picker_tls = {"ssl": found.connect(authority.issue(RELEASE)), "server_hostname": RELEASE}
    async with simulated_engine(folder / "engine", "team/chat", "generate", tls=server.directory) as found.address:
        try:
            await stack.start([service()], [secure_pod(found.address)])
            yield found
        finally:
            await stack.shut_down()
            print(stack.log.read_text()[-4000:])


async def serves(secure: SecureEngines) -> bool:
    return (await secure.post())[0] == 200


async def test_gateway_reaches_engine_that_requires_a_certificate(secure: SecureEngines) -> None:
    await wait_until(lambda: serves(secure), "the gateway reaches the engine")
    status, body = await secure.post()
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)


async def test_engine_refuses_clients_of_no_or_another_authority(secure: SecureEngines) -> None:
    other = Authority(secure.folder / "other", "other")
    assert await secure.answer(secure.connect(secure.authority.issue("peer"))) == 200
    assert await secure.answer(None) is None
    assert await secure.answer(secure.connect(None)) is None
    assert await secure.answer(secure.connect(other.issue(RELEASE))) is None
    assert await secure.answer(secure.connect(secure.authority.issue(RELEASE, days=-1))) is None


async def page_status(secure: SecureEngines, page: str, files: dict[str, bytes] | None) -> int | None:
    """The status of a page of the picker for a client with these files, None if it gets none."""
    tls = {"ssl": secure.connect(files), "server_hostname": RELEASE}
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{secure.stack.picker_url}{page}", **tls) as response:
            return response.status
    except (aiohttp.ClientError, OSError):
        return None


async def test_pages_are_for_the_release_and_scrapes(secure: SecureEngines) -> None:
    other, issue = Authority(secure.folder / "another", "another"), secure.authority.issue
    assert [await page_status(secure, page, issue(RELEASE)) for page in ("/signals", "/metrics")] == [200, 200]
    assert [await page_status(secure, page, None) for page in ("/signals", "/metrics", "/readyz")] == [403, 200, 200]
    assert await page_status(secure, "/signals", issue(NAME)) == 403, "an engine is not the operator"
    assert await page_status(secure, "/metrics", issue(RELEASE, days=-1)) is None
    assert await page_status(secure, "/metrics", other.issue(RELEASE)) is None
    settings = secure.stack.settings
    with pytest.raises(aiohttp.ClientError):
        await secure.stack.http.get(f"http://127.0.0.1:{settings.picker_port}/metrics")
    async with secure.stack.http.get(f"http://127.0.0.1:{settings.probe_port}/signals") as response:
        assert response.status == 403


async def test_plain_and_secure_engine_serve_one_service(secure: SecureEngines) -> None:
    """During a rollout. Each engine is reached in its own way."""
    plain = await secure.stack.engine()
    await secure.stack.set_objects([service()], [secure_pod(secure.address), pod(plain.address)])

    async def are_routable() -> bool:
        return {address for address, one in (await secure.stack.endpoints()).items() if one["routable"]} == {
            secure.address,
            plain.address,
        }

    await wait_until(are_routable, "both are routable")
    by_plain = list[bool]()
    while len(set(by_plain)) < 2:
        received = len(plain.received)
        status, _ = await secure.post()
        assert status == 200
        by_plain.append(len(plain.received) > received)
    await secure.stack.set_objects([service()], [secure_pod(secure.address)])


async def test_rotation_of_both_sides_under_load_fails_no_request(secure: SecureEngines) -> None:
    assert secure.stack.envoy is not None
    envoy, stop, statuses = secure.stack.envoy.pid, asyncio.Event(), list[int]()

    async def client() -> None:
        while not stop.is_set():
            statuses.append((await secure.post())[0])

    tasks = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    for number in range(ROTATIONS):
        files = secure.authority.issue(RELEASE, days=40 + number)
        secure.client.write(files)
        served = secure.authority.issue(NAME, days=50 + number)
        secure.server.write(served)
        expected = ssl.PEM_cert_to_DER_cert(served[CERTIFICATE_FILE].decode())

        async def is_served(expected: bytes = expected) -> bool:
            return await served_certificate(secure) == expected

        await wait_until(is_served, "the engine has the new certificate")
        before = len(statuses)
        await wait_until(lambda files=files: has_expiry(secure, files), "Envoy uses it")  # type: ignore[misc]
        await wait_until(lambda before=before: len(statuses) > before + 10, "requests go on")  # type: ignore[misc]
    stop.set()
    await asyncio.gather(*tasks)
    assert set(statuses) == {200}
    assert (secure.stack.envoy.pid, secure.stack.envoy.poll()) == (envoy, None)


async def has_expiry(secure: SecureEngines, files: dict[str, bytes]) -> bool:
    """Whether Envoy has taken this certificate."""
    exported = await secure.metric('plimsoll_gateway_certificate_expiry_seconds{certificate="internal"}')
    return exported == expiry_s(files[CERTIFICATE_FILE].decode())


async def served_certificate(secure: SecureEngines) -> bytes:
    host, _, port = secure.address.rpartition(":")
    context = secure.connect(secure.authority.issue("peer"))
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=NAME)
    try:
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return found
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("broken", [{KEY_FILE: b""}, {AUTHORITY_FILE: b"garbage"}], ids=["key", "authority"])
async def test_broken_secrets_keep_the_certificates(secure: SecureEngines, broken: dict[str, bytes]) -> None:
    before, log = await served_certificate(secure), secure.engine / "log"
    reported = log.read_text().count("the certificate before stays")
    secure.client.write(secure.authority.issue(RELEASE) | broken)
    secure.server.write(secure.authority.issue(NAME) | broken)
    await wait_until(lambda: is_invalid(secure), "the metric says so")
    await wait_until(
        lambda: log.read_text().count("the certificate before stays") > reported, "the engine has read the Secret"
    )
    assert (await secure.post())[0] == 200
    assert await served_certificate(secure) == before
    await renew(secure)


async def test_restarted_picker_serves_with_envoys_identity(secure: SecureEngines) -> None:
    """Its Secret is broken, and Envoy has that of the picker before."""
    assert secure.stack.picker is not None
    stop(secure.stack.picker)
    secure.client.write(secure.authority.issue(RELEASE) | {KEY_FILE: b""})
    secure.stack.start_picker()
    await secure.stack.ready()
    assert await page_status(secure, "/metrics", secure.authority.issue(RELEASE)) is None, "it has no certificate"
    assert (await secure.post())[0] == 200
    await renew(secure)


async def renew(secure: SecureEngines) -> None:
    """Write good Secrets, and wait until gateway and engine use them."""
    files, served = secure.authority.issue(RELEASE, days=70), secure.authority.issue(NAME)
    secure.client.write(files)
    secure.server.write(served)
    expected = ssl.PEM_cert_to_DER_cert(served[CERTIFICATE_FILE].decode())

    async def is_served() -> bool:
        return await served_certificate(secure) == expected

    await wait_until(is_served, "the engine has the new certificate")
    await wait_until(lambda: has_expiry(secure, files), "Envoy has the new certificate")
    await wait_until(lambda: is_valid(secure), "the metric recovers")


async def is_invalid(secure: SecureEngines) -> bool:
    return await secure.metric('plimsoll_gateway_certificate_invalid{certificate="internal"}') == 1


async def is_valid(secure: SecureEngines) -> bool:
    return await secure.metric('plimsoll_gateway_certificate_invalid{certificate="internal"}') == 0


@pytest.mark.parametrize("fault", ["other namespace", "other authority", "expired", "none"])
async def test_gateway_refuses_engine_of_wrong_certificate(secure: SecureEngines, fault: str) -> None:
    """No prompt reaches an engine that cannot prove that it belongs to the service's namespace."""
    folder = secure.folder / fault.replace(" ", "-")
    folder.mkdir()
    files = {
        "other namespace": lambda: secure.authority.issue(engine_tls_name("other")),
        "other authority": lambda: Authority(folder / "ca", "other").issue(NAME),
        "expired": lambda: secure.authority.issue(NAME, days=-1),
        "none": lambda: secure.authority.issue(NAME),
    }[fault]()
    impostor = Impostor(folder, files)
    async with await asyncio.start_server(impostor.serve, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()
        await secure.stack.set_objects([service()], [secure_pod(f"{host}:{port}")])
        await wait_until(lambda: is_routable(secure, f"{host}:{port}"), "the gateway may use it")
        status, body = await secure.post()
    assert status == 503, body
    assert impostor.connections > 0
    assert (b"hello" in impostor.received) == (fault == "none")
    assert bool(impostor.received) == (fault == "none")
    await secure.stack.set_objects([service()], [secure_pod(secure.address)])
    await wait_until(lambda: serves(secure), "the engine serves again")


async def is_routable(secure: SecureEngines, address: str) -> bool:
    return bool((await secure.stack.endpoints()).get(address, {}).get("routable"))


class Impostor:
    """A server with these files that records what it gets, and answers nothing."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
        self.connections, self.received = 0, b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError):
            await writer.start_tls(self._context)
            self.received += await reader.read(1 << 16)
        writer.close()


async def test_picker_tells_last_engine_over_tls(secure: SecureEngines) -> None:
    """An engine that leaves serves on while its gateway says that it has no other one."""
    needed = secure.engine / "state" / "needed"
    assert not needed.exists()
    leaving = secure_pod(secure.address)
    leaving["metadata"]["deletionTimestamp"] = "2026-06-01T00:00:00Z"
    await secure.stack.set_objects([service()], [leaving])
    await wait_until(needed.exists, "the engine has been told")
    await secure.stack.set_objects([service()], [secure_pod(secure.address)])
