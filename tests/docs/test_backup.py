"""The commands of the backup page, on a real API server: everything is deleted, restored, and as before."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from plimsoll.adapters.kube_client import (
    CONFIGMAPS,
    DEPLOYMENTS,
    INFERENCESERVICECHECKPOINTS,
    INFERENCESERVICES,
    SECRETS,
    KubeClient,
    Resource,
)
from plimsoll.api import labels
from tests import builders
from tests.apiserver import ApiServer, api_server
from tests.chart.rendering import NAMESPACE, ROOT, helm
from tests.docs.test_snippets import blocks
from tests.ports import free_port

Object = dict[str, Any]

pytestmark = pytest.mark.api

TEAM = "team"
TRIES, PAUSE_S = 300, 0.1
SAVE, RESTORE = [block.text for block in blocks(ROOT / "docs/tasks/backup.md") if block.language == "bash"]
# What a garbage collector deletes with the services, which runs in no test.
DELETE = f"""
helm uninstall plimsoll --namespace {NAMESPACE}
kubectl delete inferenceservices.plimsoll.dev,inferenceservicecheckpoints.plimsoll.dev --all --all-namespaces
kubectl delete inferenceserviceadmissions.plimsoll.dev,deployments,services --all -n {TEAM}
kubectl delete configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets,controllerrevisions --all -n {TEAM}
kubectl delete secrets,configmaps --all --namespace {NAMESPACE}
kubectl delete leases --all --all-namespaces
kubectl delete crd --all
"""
KEY: Object = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "help-desk", "namespace": NAMESPACE, "labels": {labels.API_KEY: "true"}},
    "stringData": {"hash": "sha256:" + "2c" * 32, "tenant": "support", "models": "chat"},
}
SPEC: Object = {
    "model": {"name": "chat", "uri": "hf://org/model"},
    "slo": {"ttft": "2s", "tpot": "50ms"},
    "tiers": {"serve": {"minReplicas": 1}},
    "adapters": [{"name": "law", "uri": "hf://org/law"}],
}
OPERATOR = f"""
import asyncio, sys
from plimsoll.adapters.lease import LeaseTimes
from plimsoll.controllers.operator import run
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.telemetry import json_logging
from tests.builders import PLATFORM

json_logging.configure("INFO")
config = OperatorConfig(PLATFORM, "{NAMESPACE}", "operator", int(sys.argv[1]), int(sys.argv[2]))
asyncio.run(run(config, LeaseTimes(duration=4, renew_deadline=3, retry_period=1, call_timeout=1)))
"""


class Shell:
    """A shell in a folder of its own, with kubectl and helm of one cluster."""

    def __init__(self, folder: Path, server: ApiServer) -> None:
        commands = folder / "bin"
        commands.mkdir()
        for name, program in (("kubectl", str(server.kubectl)), ("helm", helm()), ("jq", shutil.which("jq"))):
            assert program, f"{name} is missing"
            (commands / name).symlink_to(program)
        (folder / "charts").symlink_to(ROOT / "charts")
        path = os.pathsep.join([str(commands), os.environ["PATH"]])
        self._environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PATH": path}
        self._folder = folder

    def run(self, script: str) -> None:
        command = ["bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as running:
        yield running


@asynccontextmanager
async def operator(server: ApiServer, log: Path) -> AsyncIterator[None]:
    """The operator as a process of its own, which knows only what the API server has."""
    environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path)}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            OPERATOR,
            str(free_port()),
            str(free_port()),
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            yield
        finally:
            process.terminate()
            await process.wait()
            print(await asyncio.to_thread(log.read_text))


class Cluster:
    """What is in the API server."""

    def __init__(self, kube: KubeClient) -> None:
        self.kube = kube

    async def objects(self, resource: Resource, namespace: str = TEAM) -> dict[str, Object]:
        items, _ = await self.kube.list(resource, namespace)
        return {item["metadata"]["name"]: item for item in items}

    async def names(self) -> dict[str, Object]:
        """What each service says of its names: its grants, and the names that clients may use."""
        fields = ("nameClaim", "modelNames")
        statuses = {name: one.get("status") or {} for name, one in (await self.objects(INFERENCESERVICES)).items()}
        return {
            name: {field: status.get(field) for field in fields}
            | {"adapters": [(one["name"], one.get("since")) for one in status.get("adapters", ())]}
            for name, status in statuses.items()
        }

    async def learned(self) -> dict[str, Object]:
        """The learned state of each service."""
        found = await self.objects(INFERENCESERVICECHECKPOINTS)
        return {
            name: orjson.loads(zlib.decompress(base64.b64decode(one["state"]["zlib"]))) for name, one in found.items()
        }

    async def are_reconciled(self, count: int) -> bool:
        """Whether the operator has written status, Deployment and checkpoint of so many services."""
        services, owned = await self.objects(INFERENCESERVICES), list[str]()
        for resource in (DEPLOYMENTS, INFERENCESERVICECHECKPOINTS):
            for item in (await self.objects(resource)).values():
                owned += [owner["uid"] for owner in item["metadata"].get("ownerReferences", ())]
        seen = [one for one in services.values() if "observedGeneration" in (one.get("status") or {})]
        uids = [one["metadata"]["uid"] for one in services.values()]
        return len(seen) == count and sorted(owned) == sorted([*uids, *uids])


async def until(is_reached: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(TRIES):
        if await is_reached():
            return
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("the operator did not get there")


async def test_restore_keeps_names_keys_and_learned_state(server: ApiServer, tmp_path: Path) -> None:
    """The service that loses the name is the first in the alphabet, and so is restored first."""
    shell = Shell(tmp_path, server)
    install = (
        f"helm install plimsoll charts/plimsoll -n {NAMESPACE} --create-namespace && kubectl create namespace {TEAM}"
    )
    await asyncio.to_thread(shell.run, install)
    cluster = Cluster(await KubeClient.connect(str(server.kubeconfig)))
    await cluster.kube.create(KEY)
    async with operator(server, tmp_path / "before.log"):
        for count, name in enumerate(("second", "first"), start=1):
            service = builders.service(name, TEAM, **SPEC)
            await cluster.kube.create({**service, "metadata": {"name": name, "namespace": TEAM}})
            await until(lambda count=count: cluster.are_reconciled(count))  # type: ignore[misc]
    names, learned = await cluster.names(), await cluster.learned()
    keys = await cluster.objects(SECRETS, NAMESPACE)
    deployments = await cluster.objects(DEPLOYMENTS)
    namespaces = await cluster.objects(CONFIGMAPS, NAMESPACE)
    assert names["second"]["nameClaim"].startswith("chat since ")
    assert names["first"]["nameClaim"] is None
    assert [bool(names[name]["adapters"][0][1]) for name in ("first", "second")] == [False, True]

    await asyncio.to_thread(shell.run, SAVE + DELETE)
    await asyncio.to_thread(shell.run, RESTORE)
    async with operator(server, tmp_path / "after.log"):
        await until(lambda: cluster.are_reconciled(2))

    assert await cluster.names() == names
    assert await cluster.learned() == learned
    assert (await cluster.objects(DEPLOYMENTS)).keys() == deployments.keys()
    assert (await cluster.objects(SECRETS, NAMESPACE))["help-desk"]["data"] == keys["help-desk"]["data"]
    listed, restored = "plimsoll-service-namespaces", await cluster.objects(CONFIGMAPS, NAMESPACE)
    assert restored[listed]["data"] == namespaces[listed]["data"]
    await cluster.kube.close()
