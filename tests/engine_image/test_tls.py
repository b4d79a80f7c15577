"""Mutual TLS of an engine: its files, a Secret that is missing, broken or renewed, and calls of prefill engines."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from launcher.client import EngineClient, Response
from launcher.contract import IMAGE_ROOT, load
from launcher.engine_probe import EngineProbe, Health
from launcher.health import EngineStatus, HealthServer, render_metrics
from launcher.remote_prefill import RemotePrefillClient
from launcher.settings import SettingsError, TlsSettings
from launcher.startup_phases import StartupPhases
from launcher.tls import AUTHORITY, CERTIFICATE, FILES, KEY, EngineTls, InvalidSecret
from plimsoll.adapters.certificate_files import expiry_s
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.contract import engine_tls_name, internal_tls_name
from plimsoll.controllers.reconcile.pod_diagnosis import pod_problem
from tests.certificates import Authority, SecretVolume
from tests.engine_image.simulated.test_process import engine as process_engine
from tests.engine_image.simulated.test_process import stream

NAME, RELEASE = engine_tls_name("team"), internal_tls_name("plimsoll-system")
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1]}


def engine_tls(folder: Path, authority: Authority, name: str = NAME) -> tuple[EngineTls, SecretVolume]:
    volume = SecretVolume(folder / "secret")
    volume.write(authority.issue(name))
    return EngineTls(TlsSettings("team/engine-tls", NAME, RELEASE), volume.directory, folder / "state"), volume


def test_renewed_secret_is_written_in_place(tmp_path: Path) -> None:
    """A replaced file would end vLLM's watch of it."""
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, volume = engine_tls(tmp_path, authority)
    tls.prepare()
    inodes = [(tls.target / name).stat().st_ino for name in FILES]
    for _ in range(2):
        renewed = authority.issue(NAME)
        volume.write(renewed)
        tls.update()
        assert {name: (tls.target / name).read_bytes() for name in FILES} == renewed
    assert [(tls.target / name).stat().st_ino for name in FILES] == inodes
    assert {(tls.target / name).stat().st_mode & 0o777 for name in FILES} == {0o600}


async def test_launchers_port_tells_the_release_from_others(tmp_path: Path) -> None:
    """Each connection has the certificate of its moment, also while another client keeps one open."""
    authority, contract = Authority(tmp_path / "ca", "plimsoll"), load()
    tls, volume = engine_tls(tmp_path, authority)
    tls.prepare()

    async def scrape() -> bytes:
        return b"# of the engine"

    health = HealthServer(contract, EngineStatus(), StartupPhases((), 0.0), scrape, lambda: b"{}", tls=tls)
    async with await health.start(0) as server:
        port = next(one.getsockname()[1] for one in server.sockets if one.family is socket.AF_INET)

        async def answer(path: str, files: dict[str, bytes] | None) -> tuple[int, str] | None:
            """Status, and end of the server's certificate; None for a client that is refused."""
            context = ssl.create_default_context(cadata=authority.pem.decode())
            for file, content in (files or {}).items():
                (tmp_path / file).write_bytes(content)
            if files is not None:
                context.load_cert_chain(tmp_path / CERTIFICATE, tmp_path / KEY)
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
                end = writer.get_extra_info("peercert")["notAfter"]
                writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
                head = await reader.read()
                writer.close()
            except OSError:
                return None
            return (int(head.split()[1]), end) if head else None

        async def status(path: str, files: dict[str, bytes] | None) -> int | None:
            found = await answer(path, files)
            return None if found is None else found[0]

        release, engine = authority.issue(RELEASE), authority.issue(NAME)
        pages = contract.paths["about"], contract.paths["metrics"]
        assert [await status(page, release) for page in pages] == [200, 200]
        assert [await status(page, engine) for page in pages] == [403, 200]
        assert [await status(page, None) for page in pages] == [403, 200]
        assert await status(pages[1], authority.issue(RELEASE, days=-1)) is None
        assert await status(pages[1], Authority(tmp_path / "other", "other").issue(RELEASE)) is None
        before = await answer(pages[1], release)
        volume.write(authority.issue(NAME, days=60))
        tls.update()
        renewed = await answer(pages[1], release)
        assert before is not None
        assert renewed is not None
        assert before[1] != renewed[1]


async def test_metrics_say_when_the_certificate_in_use_expires(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, volume = engine_tls(tmp_path, authority)
    tls.prepare()
    following = asyncio.create_task(tls.follow(0.01))

    def shown(name: str) -> float | None:
        page = render_metrics(load(), EngineStatus(), StartupPhases((), 0.0), None, tls.status)
        found = [line for line in page.splitlines() if line.startswith(f"plimsoll_engine_certificate_{name} ")]
        return float(found[0].split()[1]) if found else None

    async with asyncio.timeout(30):
        while not shown("expiry_seconds"):
            await asyncio.sleep(0.01)
        expected = expiry_s((volume.directory / CERTIFICATE).read_text())
        assert (shown("expiry_seconds"), shown("invalid")) == (expected, 0.0)
        volume.write({**authority.issue(NAME), KEY: b"garbage"})
        while not shown("invalid"):
            await asyncio.sleep(0.01)
        assert shown("expiry_seconds") == expected
    following.cancel()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_broken_secret_keeps_files_and_names_the_secret(tmp_path: Path, name: str, content: bytes | None) -> None:
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, volume = engine_tls(tmp_path, authority)
    tls.prepare()
    before = {file: (tls.target / file).read_bytes() for file in FILES}
    broken = {**authority.issue(NAME), **({} if content is None else {name: content})}
    if content is None:
        del broken[name]
    volume.write(broken)
    with pytest.raises(InvalidSecret, match=name.replace(".", "[.]")):
        tls.update()
    assert {file: (tls.target / file).read_bytes() for file in FILES} == before
    with pytest.raises(SettingsError, match="Secret team/engine-tls has no usable certificate"):
        tls.prepare()


UNSUITABLE = {
    "other name": (lambda ca, folder: ca.issue(engine_tls_name("other")), "for a server: Hostname mismatch"),
    "expired": (lambda ca, folder: ca.issue(NAME, days=-1), "for a server: certificate has expired"),
    "other authority": (
        lambda ca, folder: {**Authority(folder / "other", "other").issue(NAME), AUTHORITY: ca.pem},
        "for a server: unable to get local issuer certificate",
    ),
    "server only": (lambda ca, folder: ca.issue(NAME, usages="serverAuth"), "for a client: unsuit.* purpose"),
    "client only": (lambda ca, folder: ca.issue(NAME, usages="clientAuth"), "for a server: unsuit.* purpose"),
}


@pytest.mark.parametrize("fault", UNSUITABLE)
def test_certificate_that_peers_would_refuse_is_not_used(tmp_path: Path, fault: str) -> None:
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, volume = engine_tls(tmp_path, authority)
    tls.prepare()
    before = {file: (tls.target / file).read_bytes() for file in FILES}
    make, reason = UNSUITABLE[fault]
    volume.write(make(authority, tmp_path))
    with pytest.raises(InvalidSecret, match=f"tls[.]crt is not valid {reason}"):
        tls.update()
    assert {file: (tls.target / file).read_bytes() for file in FILES} == before
    with pytest.raises(SettingsError, match=f"Secret team/engine-tls has no usable certificate: .*{reason}"):
        tls.prepare()


def test_bundle_of_old_and_new_authority_is_used(tmp_path: Path) -> None:
    """The order of a change of the authority: trust both, then renew the certificates."""
    old, new = Authority(tmp_path / "old", "old"), Authority(tmp_path / "new", "new")
    tls, volume = engine_tls(tmp_path, old)
    tls.prepare()
    for authority in (old, new):
        volume.write({**authority.issue(NAME), AUTHORITY: old.pem + new.pem})
        tls.update()


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    tls, _ = engine_tls(tmp_path, Authority(tmp_path / "ca", "plimsoll"))
    tls.target.write_bytes(b"")
    with pytest.raises(SettingsError, match=r"Secret team/engine-tls cannot be written to .*/state: File exists"):
        tls.prepare()


async def test_follow_survives_any_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name is no host name, so the handshake raises what no Secret can cause."""
    tls, _ = engine_tls(tmp_path, Authority(tmp_path / "ca", "plimsoll"))
    tls.prepare()
    following = asyncio.create_task(replace(tls, settings=TlsSettings("team/engine-tls", ".", RELEASE)).follow(0.01))
    async with asyncio.timeout(30):
        while not (following.done() or "Secret team/engine-tls" in caplog.text):
            await asyncio.sleep(0.01)
    assert not following.done()
    assert "UnicodeError" in caplog.text
    following.cancel()


async def test_launcher_reaches_its_engine_whatever_its_certificate(tmp_path: Path) -> None:
    """The peer on loopback is the engine, so its name, authority and expiry are of no concern."""
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, _ = engine_tls(tmp_path, authority)
    tls.prepare()
    files = Authority(tmp_path / "other", "other").issue(engine_tls_name("other"), days=-1)
    async with tls_server(tmp_path, files, authority) as port:
        assert (await EngineClient(port, tls.loopback).request("/health")).status == 200


async def test_engine_that_refuses_its_launcher_makes_progress(tmp_path: Path) -> None:
    """It answers the handshake, so it does not hang; an engine without TLS's answer still may."""
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, _ = engine_tls(tmp_path, authority)
    tls.prepare()
    async with tls_server(tmp_path, authority.issue(NAME), Authority(tmp_path / "other", "other")) as port:
        probe = EngineProbe(EngineClient(port, tls.loopback), load())
        assert await probe.step_seconds() == 0.0
        assert await probe.health() is Health.UNKNOWN
        assert await probe.metrics() == b""
    assert await probe.step_seconds() is None


async def test_expired_certificate_does_not_end_a_warm_engine(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, volume = engine_tls(tmp_path, authority)
    (tmp_path / "engine").mkdir()
    limits = {"poll_seconds": 0.2, "answer_seconds": 0.4, "unready_seconds": 3.0, "restart_seconds": 4.0}
    limits["step_multiple"] = 0.0  # a busy machine does not stretch them, and seldom keeps a probe waiting for so long
    async with process_engine(tmp_path / "engine", progress=limits, tls=volume.directory) as one:
        assert [(await one.get(page)).status for page in ("/metrics", "/about")] == [200, 403]
        target = tmp_path / "engine" / "state" / "tls"
        tls = replace(tls, target=target)
        async with stream(one.api, 24_000, tls.client()[0]) as content:
            expired = authority.issue(NAME, days=-1)
            volume.write(expired)
            await one.until("Secret team/engine-tls: tls.crt is not valid for a server: certificate has expired")
            for name in (KEY, CERTIFICATE):  # as if time had passed: the launcher never writes it
                (target / name).write_bytes(expired[name])
            await one.until("the engine refuses the launcher's certificate")
            rest = asyncio.create_task(content.read())
            refused_s, answers = asyncio.get_running_loop().time(), set()
            while not rest.done():
                answers.add(await one.get("/readyz"))
                await asyncio.sleep(0.1)
            assert (await rest).endswith(b"data: [DONE]\n\n")
            assert asyncio.get_running_loop().time() - refused_s > limits["restart_seconds"], "the stream is too short"
        assert answers == {Response(200, b"ready")}
        volume.write(authority.issue(NAME))
        await one.until("Secret team/engine-tls: a new certificate is used")


@asynccontextmanager
async def tls_server(folder: Path, files: dict[str, bytes], trusted: Authority) -> AsyncIterator[int]:
    """A server with these files that answers 200 to clients of an authority; gives its port."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.load_verify_locations(cadata=trusted.pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


async def test_missing_secret_is_named_in_the_condition(tmp_path: Path) -> None:
    """The launcher's last words are the container's termination message."""
    document = json.loads((IMAGE_ROOT / "contract.json").read_text())
    document["paths"].update(state=str(tmp_path / "state"), tls=str(tmp_path / "absent"))
    (tmp_path / "contract.json").write_text(json.dumps(document))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(IMAGE_ROOT),
        "PLIMSOLL_CONTRACT": str(tmp_path / "contract.json"),
        "PLIMSOLL_MODEL": "m",
        "PLIMSOLL_TLS": json.dumps({"secret": "team/engine-tls", "name": NAME, "release": RELEASE}),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "launcher", env=environment, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, log = await process.communicate()
    assert process.returncode == 2
    state = {"terminated": {"exitCode": 2, "reason": "Error", "message": log.decode()}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    container = {"name": "engine", "ready": False, "restartCount": 3, "state": waiting, "lastState": state}
    problem = pod_problem({"metadata": {"name": "chat-0"}, "status": {"containerStatuses": [container]}})
    assert problem is not None
    assert problem.reason is ConditionReason.ENGINE_FAILING
    assert "Secret team/engine-tls has no usable certificate: tls.crt: No such file or directory" in problem.message


@pytest.mark.parametrize(
    ("server_name", "outcome"), [(NAME, "remote"), (engine_tls_name("other"), "unreachable"), (None, "unreachable")]
)
async def test_decode_engine_calls_prefill_engine_of_its_namespace(
    tmp_path: Path, server_name: str | None, outcome: str
) -> None:
    """server_name: in the prefill engine's certificate; None for one of another authority."""
    authority = Authority(tmp_path / "ca", "plimsoll")
    tls, _ = engine_tls(tmp_path, authority)
    tls.prepare()
    files = (authority if server_name else Authority(tmp_path / "other", "other")).issue(server_name or NAME)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    context.load_verify_locations(cadata=authority.pem.decode())
    context.verify_mode = ssl.CERT_REQUIRED

    async def prefill(request: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": PARAMS})

    application = web.Application()
    application.router.add_post("/v1/completions", prefill)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[0][1]
    client = RemotePrefillClient(10.0, "x-plimsoll-remote-prefill", tls)
    found = await client.run(f"127.0.0.1:{port}", "/v1/completions", b"{}", {})
    assert (found.outcome, found.params) == (outcome, PARAMS if outcome == "remote" else None)
    await client.close()
    await runner.cleanup()
