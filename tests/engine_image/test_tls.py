"""Mutual TLS of an engine: its files, a Secret that is missing, broken or renewed, and calls of prefill engines."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from pathlib import Path

import pytest
from aiohttp import web

from launcher.contract import IMAGE_ROOT
from launcher.remote_prefill import RemotePrefillClient
from launcher.settings import SettingsError, TlsSettings
from launcher.tls import FILES, EngineTls, InvalidSecret
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.contract import engine_tls_name
from plimsoll.controllers.reconcile.pod_diagnosis import pod_problem
from tests.certificates import Authority, SecretVolume

NAME = engine_tls_name("team")
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [1]}


def engine_tls(folder: Path, authority: Authority, name: str = NAME) -> tuple[EngineTls, SecretVolume]:
    volume = SecretVolume(folder / "secret")
    volume.write(authority.issue(name))
    return EngineTls(TlsSettings("team/engine-tls", NAME), volume.directory, folder / "state"), volume


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
        "PLIMSOLL_TLS": json.dumps({"secret": "team/engine-tls", "name": NAME}),
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
