"""A whole gateway on loopback: real Envoy, the real picker in its own process, small engines, objects from a file."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.admin import EnvoyAdminClient
from plimsoll.gateway.envoy.bootstrap import write_files
from plimsoll.gateway.envoy.listener import MODEL_CLUSTER_PREFIX
from plimsoll.gateway.settings import PickerSettings
from tests.gateway.envoy_binary import ENVOY
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import GATEWAY_SELECTOR, SYSTEM, Object, published, split
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENDS = ("succeeded", "rejected_by_engine", "failed", "cancelled")  # of requests at an engine, in /signals
TIMEOUT_S = 90.0  # seconds; the machine may be busy, a hang may not pass


async def wait_until(true: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a state of the world that other processes bring about."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        result = true()
        if result if isinstance(result, bool) else await result:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not come about in {TIMEOUT_S:.0f} s: {what}")


class GatewayStack:
    """One gateway. Start with `up`, end with `down`; both processes can be killed and started again between."""

    picker_program = ROOT / "tests/gateway/picker_process.py"
    envoy_workers = 2

    def __init__(self, directory: Path, **settings: Any) -> None:
        fields = {
            "address": "127.0.0.1",
            "port": free_port(),
            "picker_port": free_port(),
            "probe_port": free_port(),
            "poll_seconds": 0.2,
            "drain_quiet_seconds": 1.0,
            "drain_idle_seconds": 2.0,
            "successor_seconds": 1.0,
            "namespace": SYSTEM,
            "pod_selector": GATEWAY_SELECTOR,
            "trust_identity_headers": True,  # the tests are the proxy
        }
        self.settings = PickerSettings(**{"directory": directory / "run", "pod": "gateway-0", **fields, **settings})
        self.objects_file = directory / "objects.json"
        self.log = directory / "processes.log"
        self.engines: list[FakeEngine] = []
        self._objects: dict[str, list[Object]] = {
            name: []
            for name in ("inferenceservices", "inferenceserviceadmissions", "endpointslices", "pods", "secrets")
        }
        self.picker: subprocess.Popen[bytes] | None = None
        self.envoy: subprocess.Popen[bytes] | None = None
        self.http: aiohttp.ClientSession
        self.picker_tls: dict[str, Any] = {}  # of a client of the picker with internal TLS
        self.admin = EnvoyAdminClient(self.settings.admin_socket)

    @property
    def url(self) -> str:
        scheme = "http" if self.settings.tls_directory is None else "https"
        return f"{scheme}://{self.settings.address}:{self.settings.port}"

    @property
    def picker_url(self) -> str:
        scheme = "http" if self.settings.internal_tls is None else "https"
        return f"{scheme}://{self.settings.address}:{self.settings.picker_port}"

    async def start(self, objects: Iterable[Object] = (), pods: Iterable[Object] = ()) -> GatewayStack:
        """Start both processes with these objects and wait until the gateway is ready."""
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self.settings.directory.mkdir(parents=True)
        write_files(self.settings)
        self.start_envoy()
        self.start_picker()
        self.write_objects(objects, pods)
        await self.ready()
        return self

    async def shut_down(self) -> None:
        for process in (self.picker, self.envoy):
            if process is not None:
                stop(process)
        for engine in self.engines:
            engine.kill()
        await self.http.close()

    async def reset(self) -> None:
        """Back to no service and no engine; counts start anew with the next service."""
        for engine in self.engines:
            engine.kill()
        self.engines.clear()
        await self.set_objects([], [])

    async def set_objects(self, objects: Iterable[Object], pods: Iterable[Object]) -> None:
        """These are the objects, and the picker and Envoy have taken them up."""
        services, engines = list(objects), list(pods)
        self.write_objects(services, engines)
        expected = {f"{s['metadata']['namespace']}/{s['metadata']['name']}" for s in services}
        addresses = sorted(f"{p['status']['podIP']}:{_port(p)}" for p in engines)

        async def is_published() -> bool:
            known = (await self.signals())["services"]
            return known.keys() == expected and addresses == sorted(
                endpoint["address"] for found in known.values() for endpoint in found["endpoints"]
            )

        await wait_until(is_published, "the picker has the objects")
        await self.ready()

    def start_envoy(self) -> None:
        command = [ENVOY, "-c", str(self.settings.bootstrap), "--concurrency", str(self.envoy_workers)]
        command += ["--disable-hot-restart", "--file-flush-interval-msec", "20", "-l", "warning"]
        with self.log.open("ab") as log:
            self.envoy = subprocess.Popen(command, stdout=log, stderr=log)

    def start_picker(self) -> None:
        fields = dataclasses.asdict(self.settings)
        fields |= {name: str(path) for name, path in fields.items() if isinstance(path, Path)}
        paths = os.pathsep.join((str(ROOT / "operator"), str(ROOT), os.environ.get("PYTHONPATH", "")))
        command = [sys.executable, str(self.picker_program), json.dumps(fields)]
        with self.log.open("ab") as log:
            self.picker = subprocess.Popen(
                [*command, str(self.objects_file)], stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": paths}
            )

    def write_objects(self, objects: Iterable[Object], pods: Iterable[Object]) -> None:
        """From now on these are the API server's services and engine pods."""
        services, admissions = split(objects)
        slices, admissions = published(services, pods, admissions)
        self._write({"inferenceservices": services, "inferenceserviceadmissions": admissions, "endpointslices": slices})

    def write_gateways(self, *gateways: Object) -> None:
        """From now on these are the API server's gateway pods."""
        self._write({"pods": list(gateways)})

    def write_secrets(self, *secrets: Object) -> None:
        """From now on these are the API server's Secrets."""
        self._write({"secrets": list(secrets)})

    def _write(self, changed: dict[str, list[Object]]) -> None:
        self._objects |= changed
        write_if_changed(self.objects_file, json.dumps(self._objects).encode())

    async def engine(self, host: str = "127.0.0.1") -> FakeEngine:
        self.engines.append(await FakeEngine(host).start())
        return self.engines[-1]

    async def ready(self) -> None:
        async def is_ready() -> bool:
            try:
                async with self.http.get(f"http://{self.settings.address}:{self.settings.probe_port}/readyz") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await wait_until(is_ready, "the gateway is ready")

    async def signals(self) -> dict[str, Any]:
        async with self.http.get(f"{self.picker_url}/signals", **self.picker_tls) as answer:
            return dict(await answer.json())

    async def endpoints(self, service: str = "team/chat") -> dict[str, dict[str, Any]]:
        """The service's part of /signals by address; empty if it is not there."""
        found = (await self.signals())["services"].get(service, {"endpoints": []})
        return {endpoint["address"]: endpoint for endpoint in found["endpoints"]}

    async def admission(self, service: str = "team/chat") -> dict[str, Any]:
        """What /signals says of the service's gate."""
        found: dict[str, Any] = (await self.signals())["services"][service]["admission"]
        return found

    async def wait_queued(self, count: int) -> None:
        """Wait until so many requests are held."""

        async def is_met() -> bool:
            return bool((await self.admission())["queued"] == count)

        await wait_until(is_met, f"{count} held")

    async def wait_routable(self, *engines: FakeEngine, service: str = "team/chat") -> None:
        """Wait until exactly these engines are routable."""
        expected = {engine.address for engine in engines}

        async def are() -> bool:
            return {a for a, e in (await self.endpoints(service)).items() if e["routable"]} == expected

        await wait_until(are, f"routable: {expected}")

    async def wait_model_clusters(self, *names: str) -> None:
        """Wait until Envoy has the clusters by which it routes these names while the picker is away."""

        async def has_all() -> bool:
            connector = aiohttp.UnixConnector(str(self.settings.admin_socket))
            async with aiohttp.ClientSession(connector=connector) as admin, admin.get("http://envoy/clusters") as page:
                text = await page.text()
            return all(f"{MODEL_CLUSTER_PREFIX}{name}::" in text for name in names)

        await wait_until(has_all, f"Envoy has the clusters of {names}")

    async def wait_inflight(self, engine: FakeEngine, count: int) -> None:
        """Wait until the picker counts so many requests at an engine."""

        async def is_met() -> bool:
            return (await self.endpoints()).get(engine.address, {}).get("inflight") == count

        await wait_until(is_met, f"{count} in flight at {engine.address}")

    async def wait_completed(self, count: int, service: str = "team/chat") -> dict[str, Any]:
        """Wait until the access log has reported the end of so many requests. Returns the service's part of /signals.

        A request that is no longer in flight may be without its record: Envoy's own count says so earlier.
        """
        found: dict[str, Any] = {}

        async def is_met() -> bool:
            found.update((await self.signals())["services"][service])
            requests = found["requests"]
            return sum(requests[end] for end in ENDS) == count

        await wait_until(is_met, f"{count} requests of {service} completed")
        return found

    def ask(self, model: str | None = "chat", sent: Mapping[str, str] | None = None, **fields: Any) -> Any:
        """A chat completion, or a completion of a prompt, with these headers sent, as an aiohttp request context."""
        is_chat = "prompt" not in fields
        question = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {}
        body, path = {"model": model, **question, **fields}, "/v1/chat/completions" if is_chat else "/v1/completions"
        data = io.BytesIO(json.dumps(body).encode())
        headers = {"content-type": "application/json", **(sent or {})}
        return self.http.post(f"{self.url}{path}", data=data, headers=headers)

    async def ask_fully(self, model: str | None = "chat", **fields: Any) -> tuple[int, dict[str, Any], Any]:
        """Status, error body or answer, and headers of a chat completion that is not streamed."""
        async with self.ask(model, **fields) as answer:
            return answer.status, await answer.json(), answer.headers


def _port(pod: Object) -> int:
    return int(pod["spec"]["containers"][0]["ports"][0]["containerPort"])


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
