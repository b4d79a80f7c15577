"""The admission webhook behind a real API server, under the chart's own webhook configuration."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from plimsoll.adapters.kube_client import INFERENCESERVICES, KubeClient
from plimsoll.api import labels
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.webhook import server
from plimsoll.resources.platform_config import WebhookSettings
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.apiserver import ApiServer, api_server
from tests.certificates import make_certificate
from tests.chart.rendering import CHART, NAMESPACE, find, helm, render
from tests.ports import free_port

pytestmark = pytest.mark.api

Object = dict[str, Any]

SINCE = "2026-02-01T10:00:00.000001Z"
TRIES, PAUSE_S = 150, 0.2
VALUES = "webhook.enabled=true,crds.install=false"
RENEW_AFTER = "plimsoll.dev/renew-after"
PROGRAM = """
import asyncio, sys
from plimsoll.adapters.lease import LeaseTimes
from plimsoll.controllers.operator import run
from plimsoll.api import labels
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.resources.platform_config import WebhookSettings
from plimsoll.telemetry import json_logging
from tests.builders import PLATFORM

json_logging.configure("INFO")
namespace, identity, probes, metrics, port, folder = sys.argv[1:]
webhook = WebhookSettings(port=int(port), certificateDirectory=folder)
platform = PLATFORM.model_copy(update={"webhook": webhook, "watch_namespaces": (namespace,)})
config = OperatorConfig(platform, namespace, identity, int(probes), int(metrics))
asyncio.run(run(config, LeaseTimes(duration=4, renew_deadline=3, retry_period=1, call_timeout=1)))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ApiServer]:
    """An API server that no other test's services reach."""
    with api_server() as running:
        running.install_crds()
        yield running


@dataclass
class User:
    """kubectl of a person, and what it prints."""

    cluster: ApiServer
    namespace: str

    async def kubectl(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        command = [self.cluster.kubectl, f"--kubeconfig={self.cluster.kubeconfig}", "-n", self.namespace, *arguments]
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr

    async def apply(self, manifest: Object, *flags: str) -> tuple[int, str]:
        """The exit status, and what kubectl prints on stderr."""
        code, _, error = await self.kubectl("apply", *flags, "-f", "-", stdin=json.dumps(manifest))
        return code, error

    def manifest(self, name: str, model: str | None = None, fallback: str | None = None, **spec: Any) -> Object:
        found = builders.service(name, self.namespace, **spec)
        found["metadata"] = {"name": name, "namespace": self.namespace}
        if model is not None:
            found["spec"]["model"]["name"] = model
        if fallback is not None:
            found["spec"]["slo"] = {"ttft": "1s"}
            found["spec"]["admission"] = {"whenFull": "Downgrade", "fallback": {"name": fallback}}
        return found


@asynccontextmanager
async def webhook(kube: KubeClient, folder: Path, port: int) -> AsyncIterator[None]:
    """The webhook as an operator replica runs it, leader or not."""
    settings = WebhookSettings(port=port, certificateDirectory=str(folder))
    config = OperatorConfig(builders.PLATFORM, "plimsoll-system", "me")
    task = asyncio.create_task(server.run(kube, config, settings))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def configuration(pem: str, port: int) -> Object:
    """The chart's webhook configuration, but for the address: here is no network of Services."""
    found = find(render({"webhook": {"enabled": True}}), "ValidatingWebhookConfiguration")
    url = f"https://127.0.0.1:{port}{server.PATH}"
    found["webhooks"][0]["clientConfig"] = {"url": url, "caBundle": base64.b64encode(pem.encode()).decode()}
    return found


async def create_namespace(user: User) -> None:
    code, _, error = await user.kubectl("create", "namespace", user.namespace)
    assert code == 0, error


def failed_reviews() -> float:
    return float(operator_metrics.OPERATOR_ADMISSION_REVIEWS.labels("failed")._value.get())


@pytest.fixture
async def kube(cluster: ApiServer) -> AsyncIterator[KubeClient]:
    connected = await KubeClient.connect(str(cluster.kubeconfig))
    yield connected
    await connected.close()


async def until_refused(user: User) -> None:
    """Wait until the API server asks the webhook, and the webhook knows the services."""
    for _ in range(TRIES):
        code, _ = await user.apply(user.manifest("probe", "taken"), "--dry-run=server")
        if code != 0:
            return
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("the webhook refuses nothing")


async def review_at(port: int, pem: str, obj: Object) -> Object:
    """The answer of one replica to a review of a new object, once it listens."""
    trust = ssl.create_default_context(cadata=pem)
    resource = {"group": labels.GROUP, "version": labels.VERSION, "resource": labels.PLURAL}
    request = {"uid": "u", "operation": "CREATE", "resource": resource, "namespace": "n", "name": "n", "object": obj}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        for _ in range(TRIES):
            try:
                async with session.post(f"https://127.0.0.1:{port}{server.PATH}", json={"request": request}) as reply:
                    return dict((await reply.json())["response"])
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(PAUSE_S)
    raise AssertionError("the replica does not listen")


async def test_leader_and_standby_both_review(cluster: ApiServer, tmp_path: Path) -> None:
    pem, user = make_certificate(tmp_path), User(cluster, "replicas")
    await create_namespace(user)
    await user.apply(user.manifest("holder", "replicated"))
    claim = builders.service("late", "replicas", model={"uri": "file:///models/tiny", "name": "replicated"})
    claim["metadata"]["creationTimestamp"] = "2099-01-01T00:00:00Z"
    ports, processes = [free_port(), free_port()], []
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    for number, port in enumerate(ports):
        arguments = (user.namespace, f"op-{number}", free_port(), free_port(), port, tmp_path)
        with (tmp_path / f"{number}.log").open("wb") as log:
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-c", PROGRAM, *map(str, arguments), env=environment, stdout=log, stderr=log
                )
            )
    try:
        for port in ports:
            for _ in range(TRIES):
                response = await review_at(port, pem, claim)
                if not response["allowed"]:
                    break
                await asyncio.sleep(PAUSE_S)
            assert "service replicas/holder" in response["status"]["message"]
        logs = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
        assert sum("this replica leads" in log for log in logs) == 1
        for process in processes:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TRIES * PAUSE_S):
            assert [await process.wait() for process in processes] == [0, 0]
    finally:
        for number, process in enumerate(processes):
            if process.returncode is None:
                process.kill()
                await process.wait()
            print((tmp_path / f"{number}.log").read_text()[-3000:])


async def test_upgrade_keeps_certificate_until_its_renewal(cluster: ApiServer) -> None:
    """Helm reads the Secret of the release from the API server; each rendering alone would make another one."""
    user = User(cluster, NAMESPACE)
    await create_namespace(user)

    async def get(kind: str, *path: str) -> str:
        code, found, error = await user.kubectl("get", kind, *path)
        assert code == 0, error
        return found

    async def upgrade() -> tuple[Object, str]:
        await helm_verb(cluster, "upgrade", "--install", "plimsoll", str(CHART), "--set", VALUES, "--force-conflicts")
        secret = json.loads(await get("secret", "plimsoll-webhook", "-o", "json"))
        configured = json.loads(await get("validatingwebhookconfiguration", f"plimsoll.{NAMESPACE}", "-o", "json"))
        return secret, base64.b64decode(configured["webhooks"][0]["clientConfig"]["caBundle"]).decode()

    first, bundle = await upgrade()
    second, same_bundle = await upgrade()
    assert second["data"] == first["data"]
    assert second["metadata"]["annotations"] == first["metadata"]["annotations"]
    assert same_bundle == bundle
    past = f"{RENEW_AFTER}=1700000000"
    code, _, error = await user.kubectl("annotate", "secret", "plimsoll-webhook", past, "--overwrite")
    assert code == 0, error
    third, both = await upgrade()
    assert third["data"]["tls.crt"] != first["data"]["tls.crt"]
    assert third["metadata"]["annotations"][RENEW_AFTER] != "1700000000"
    authorities = [base64.b64decode(one["data"]["ca.crt"]).decode() for one in (third, first)]
    assert both == "".join(authorities), "pods serve the old certificate until they have read the new one"
    await helm_verb(cluster, "uninstall", "plimsoll")
    kinds = "secrets,services,validatingwebhookconfigurations"
    assert "webhook" not in await get(kinds, "-o", "name")


async def helm_verb(cluster: ApiServer, *arguments: str) -> None:
    command = [helm(), *arguments, "--namespace", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_apply_is_answered_by_the_webhook(cluster: ApiServer, kube: KubeClient, tmp_path: Path) -> None:
    pem, port = make_certificate(tmp_path), free_port()
    user, other = User(cluster, "team"), User(cluster, "other")
    for one in (user, other):
        await create_namespace(one)
    await other.apply(other.manifest("holder", "taken"))
    await kube.apply(
        {
            "apiVersion": "plimsoll.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"namespace": "other", "name": "holder"},
            "status": {"nameClaim": f"taken since {SINCE}", "modelNames": ["taken"]},
        },
        "plimsoll",
        subresource="status",
    )
    code, error = await user.apply(configuration(pem, port))
    assert code == 0, error
    code, error = await user.apply(user.manifest("down", "taken"))
    assert (code, error) == (0, ""), "a webhook that is down refuses nothing"
    failed = failed_reviews()

    async with webhook(kube, tmp_path, port):
        await until_refused(user)
        code, error = await user.apply(user.manifest("late", "taken"))
        assert code != 0
        assert 'admission webhook "inferenceservices.plimsoll.dev" denied the request' in error
        assert (
            "spec.model.name taken: service other/holder holds the name since 2026-02-01T10:00:00Z; change"
            " spec.model.name" in error
        )
        code, error = await user.apply(user.manifest("down", "taken", scaling={"mode": "Off"}))
        assert (code, error) == (0, ""), "an update that keeps its name is not refused"

        code, error = await user.apply(user.manifest("a", fallback="b"))
        assert code == 0
        assert "Warning: spec.admission.fallback.name: team/b does not exist" in error
        for name, fallback in (("b", "c"), ("c", "d")):
            assert (await user.apply(user.manifest(name, fallback=fallback)))[0] == 0
        for _ in range(TRIES):  # until the webhook has heard of b and c
            code, error = await user.apply(user.manifest("c", fallback="a"), "--dry-run=server")
            if code != 0:
                break
            await asyncio.sleep(PAUSE_S)
        assert "cycle: team/c -> team/a -> team/b -> team/c" in error

        tier = {"serve": {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}}
        fast = user.manifest("fast", model=None, tiers=tier, slo={"tpot": "1ms"})
        fast["spec"]["model"] = {"uri": "hf://Qwen/Qwen3-8B"}
        code, error = await user.apply(fast)
        assert code == 0
        assert "Warning: spec.slo.tpot: tier serve cannot meet 1 ms" in error

        code, _, error = await user.kubectl("label", "inferenceservice", "a", "team=ml")
        assert (code, error) == (0, "")
        code, _, error = await user.kubectl("delete", "inferenceservice", "a", "--wait=false")
        assert (code, error) == (0, "")
        assert {one["metadata"]["name"] for one in (await kube.list(INFERENCESERVICES, "team"))[0]} >= {"b", "c"}
    assert failed_reviews() == failed

    code, error = await user.apply(user.manifest("late", "taken"))
    assert (code, error) == (0, ""), "the webhook is down again"
