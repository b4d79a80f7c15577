"""Serves gateways of the tree in which it runs until its input ends: `gateway_process.py KIND WORKERS ENGINE-PORT...`.

KIND is `alone` (models `plain` without and `chat` with an SLO), `keys` (the same, and each request needs the API key of
`bench`), or `two` (two gateways, and for each of them a model with an SLO that it owns). Prints one JSON object; of two
gateways the ports are those of the first. Trees without this file run its text, for `alone` only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from plimsoll.gateway.settings import PickerSettings
from tests.gateway import picker_harness
from tests.gateway.kube_objects import pod, service
from tests.gateway.stack import GatewayStack, wait_until

BATCH = 500


def prepare(directory: Path) -> dict[str, Any]:
    """Make gateways as the product's, unlike the tests': rare garbage collections, no headers of a trusted proxy."""
    (directory / "sitecustomize.py").write_text("import gc; gc.set_threshold(50_000, 20, 50)")
    os.environ["PYTHONPATH"] = f"{os.environ['PYTHONPATH']}:{directory}"
    # Engines that answer at once must not look overloaded: then requests would wait in the queue.
    parts = dataclasses.astuple(picker_harness.MODEL)
    picker_harness.MODEL = type(picker_harness.MODEL)(*(part / 1000 for part in parts))
    known = {field.name for field in dataclasses.fields(PickerSettings)}
    return {name: value for name, value in (("trust_identity_headers", False), ("poll_seconds", 2.0)) if name in known}


def pods(models: list[str], ports: list[str]) -> list[dict[str, Any]]:
    return [pod(f"127.0.0.1:{port}", service=model) for model in models for port in ports]


async def start_one(directory: Path, settings: dict[str, Any], ports: list[str], with_keys: bool) -> list[GatewayStack]:
    plain = service("plain")
    plain["spec"]["tiers"] = {"serve": {"maxReplicas": 8}}
    if with_keys:
        from plimsoll.gateway.settings import ApiKeyMode
        from tests.gateway.api_key_secrets import key_secret

        settings["api_keys"] = ApiKeyMode.REQUIRED
    stack = GatewayStack(directory, **settings)
    if with_keys:
        stack.write_secrets(key_secret("bench", tenant="team-a"))
    await stack.start([plain, picker_harness.service_with_slo("chat", batch=BATCH)], pods(["plain", "chat"], ports))
    return [stack]


async def start_two(
    directory: Path, settings: dict[str, Any], ports: list[str], models: list[str]
) -> list[GatewayStack]:
    from tests.gateway.kube_objects import gateway_pod
    from tests.ports import free_port

    secret, peer_port = directory / "secret", free_port()
    secret.write_bytes(b"a secret that both gateways share")
    stacks = []
    for number in range(2):
        own = directory / str(number)
        own.mkdir()
        peers = {"pod": f"gateway-{number}", "address": f"127.0.0.{number + 1}", "peer_port": peer_port}
        # A busy machine must not look like an owner that does not answer.
        stacks.append(GatewayStack(own, peer_secret=secret, owner_ack_seconds=5.0, **peers, **settings))
    known = [gateway_pod(stack.settings.pod, address=stack.settings.address) for stack in stacks]
    services = [picker_harness.service_with_slo(model, batch=BATCH) for model in models]
    for stack in stacks:
        stack.write_gateways(*known)
        await stack.start(services, pods(models, ports))

    async def is_connected() -> bool:
        async with stacks[0].http.get(f"{stacks[0].picker_url}/metrics") as page:
            found = re.search(r"^plimsoll_gateway_peers_connected (\S+)$", await page.text(), re.MULTILINE)
        return found is not None and float(found[1]) == 1.0

    await wait_until(is_connected, "the first gateway reaches the second")
    return stacks


async def run(kind: str, workers: int, ports: list[str], directory: Path) -> None:
    GatewayStack.envoy_workers = workers
    settings, models, stacks = prepare(directory), ["plain", "chat"], list[GatewayStack]()
    try:
        if kind == "two":
            from bench.gateway.owner_hop import NAMES, model_owned_by

            models = [model_owned_by(name) for name in NAMES]
            stacks = await start_two(directory, settings, ports, models)
        else:
            stacks = await start_one(directory, settings, ports, kind == "keys")
        pids = [process.pid for stack in stacks for process in (stack.envoy, stack.picker) if process is not None]
        ports_of = stacks[0].settings
        found = {"port": ports_of.port, "picker_port": ports_of.picker_port, "pids": pids, "models": models}
        print(json.dumps(found), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for stack in stacks:
            await stack.shut_down()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3:], Path(folder)))
