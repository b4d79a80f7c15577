"""InferenceObjectives of a real API server: with the chart's rights, without them, and before the kind exists."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.gateway.objectives import ObjectiveStore
from plimsoll.telemetry.gateway_metrics import GATEWAY
from tests.apiserver import ROOT, ApiServer
from tests.chart.rendering import Object, find, render
from tests.gateway.stack import wait_until

pytestmark = pytest.mark.api

CRD = ROOT / "e2e" / "lib" / "inferenceobjectives-crd.yaml"
NAMESPACE, ACCOUNT = "objectives", "gateway"
WATCHED = "plimsoll_gateway_inference_objectives_watched"
CHECK_SECONDS = 0.1
VALUES: Object = {"gateway": {"endpointPicker": {"enabled": True, "inferenceObjectives": True}}}


def kubectl(cluster: ApiServer, *arguments: str, stdin: str | None = None) -> str:
    command = [str(cluster.kubectl), f"--kubeconfig={cluster.kubeconfig}", *arguments]
    return subprocess.run(command, input=stdin, check=True, capture_output=True, text=True, timeout=60).stdout


def apply(cluster: ApiServer, *objects: Object) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    kubectl(cluster, "apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(listed))


def objective(name: str, priority: int) -> Object:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"priority": priority, "poolRef": {"name": "chat"}},
    }


def grant(cluster: ApiServer, values: Object) -> None:
    """Give the account the rights of the gateway's role in the release's namespace."""
    rules = find(render(values), "Role", "plimsoll-gateway-own")["rules"]
    meta, group = {"name": ACCOUNT, "namespace": NAMESPACE}, "rbac.authorization.k8s.io"
    reference = {"apiGroup": group, "kind": "Role", "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", **meta}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules}
    binding = {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    del binding["rules"]
    apply(cluster, role, binding)


@pytest.fixture(scope="module")
def gateway_config(cluster: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kubeconfig of an account without rights."""
    kubectl(cluster, "create", "namespace", NAMESPACE)
    kubectl(cluster, "create", "serviceaccount", ACCOUNT, "-n", NAMESPACE)
    token = kubectl(cluster, "create", "token", ACCOUNT, "-n", NAMESPACE).strip()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = tmp_path_factory.mktemp("account") / "kubeconfig"
    path.write_text(json.dumps(config))
    yield str(path)
    kubectl(cluster, "delete", "-f", str(CRD), "--ignore-not-found")


@pytest.fixture
async def store(gateway_config: str) -> AsyncIterator[ObjectiveStore]:
    """What the gateway's account reads, running."""
    kube = await KubeClient.connect(gateway_config)
    store = ObjectiveStore(NAMESPACE, CHECK_SECONDS)
    running = asyncio.create_task(store.follow(kube, lambda: None))
    yield store
    running.cancel()
    await asyncio.wait({running})
    await kube.close()


def logged(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], bool]:
    return lambda: any(text in record.getMessage() for record in caplog.records)


async def test_objectives_are_followed_once_the_gateway_may_read_them(
    cluster: ApiServer, store: ObjectiveStore, caplog: pytest.LogCaptureFixture
) -> None:
    await wait_until(logged(caplog, "the gateway may not list InferenceObjectives in namespace objectives"), "refused")
    await wait_until(lambda: store.synced, "requests go on without objectives")
    assert GATEWAY.get_sample_value(WATCHED) == 0
    await asyncio.to_thread(grant, cluster, VALUES)
    text = "no kind InferenceObjective of inference.networking.x-k8s.io/v1alpha2: install the CRDs"
    await wait_until(logged(caplog, text), "the kind is missing")
    await asyncio.to_thread(cluster.install_crds, [CRD])
    await wait_until(lambda: GATEWAY.get_sample_value(WATCHED) == 1, "the kind is served")
    await asyncio.to_thread(apply, cluster, objective("urgent", 7))
    await wait_until(lambda: store.by_service() == {f"{NAMESPACE}/chat": {"urgent": 7}}, "the objective is known")
    await asyncio.to_thread(kubectl, cluster, "delete", "inferenceobjectives", "urgent", "-n", NAMESPACE)
    await wait_until(lambda: store.by_service() == {}, "the objective is gone")
