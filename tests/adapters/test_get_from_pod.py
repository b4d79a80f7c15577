"""A pod asked through a real API server: its answer, its errors, and those of the server on the way."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.controllers.http_server import HttpEndpoints, build_app
from plimsoll.core.errors import BackendUnavailable, Forbidden, NotFound, ObjectRejected
from tests.apiserver import ApiServer
from tests.ports import free_port

pytestmark = pytest.mark.api

NAMESPACE = "ask-pod"
DOCUMENT = {"version": 1, "service": "team/chat"}


def kubectl(server: ApiServer, *words: str) -> None:
    subprocess.run([server.kubectl, f"--kubeconfig={server.kubeconfig}", *words], check=True)


@pytest.fixture(scope="module")
def cluster(apiserver: ApiServer) -> ApiServer:
    """The shared API server with a namespace for these tests."""
    kubectl(apiserver, "create", "namespace", NAMESPACE)
    return apiserver


@pytest.fixture
async def kube(cluster: ApiServer) -> AsyncIterator[KubeClient]:
    made = await KubeClient.connect(str(cluster.kubeconfig))
    yield made
    await made.close()


def own_address() -> str | None:
    """An address of this machine that the API server agrees to forward to, which 127.0.0.1 is not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only looks up the road
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


async def pod(kube: KubeClient, name: str, address: str | None) -> None:
    """A pod that is taken to run at an address."""
    spec = {"containers": [{"name": "operator", "image": "example.com/operator:1"}]}
    made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}}
    await kube.apply({**made, "spec": spec}, "test")
    if address is not None:
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        await kube.apply({**made, "status": status}, "test", subresource="status")


def grant(server: ApiServer, user: str) -> None:
    """The right to ask pods, for one user."""
    kubectl(server, "-n", NAMESPACE, "create", "role", "explain", "--verb=get", "--resource=pods/proxy")
    kubectl(server, "-n", NAMESPACE, "create", "rolebinding", "explain", "--role=explain", f"--user={user}")


@asynccontextmanager
async def serving(answers: HttpEndpoints, address: str) -> AsyncIterator[int]:
    """The operator's own server at an address; its port."""
    runner = web.AppRunner(build_app(answers))
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, address, port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


@pytest.fixture
def address() -> str:
    found = own_address()
    if found is None:
        pytest.skip("this machine has no address but 127.0.0.1")
    return found


async def test_get_from_pod_returns_response_and_maps_errors(kube: KubeClient, address: str) -> None:
    answers = HttpEndpoints({("team", "chat"): DOCUMENT}.get)
    await pod(kube, "leader", address)
    async with serving(answers, address) as port:
        assert await kube.get_from_pod(NAMESPACE, "leader", port, "explain/team/chat") == DOCUMENT
        with pytest.raises(NotFound, match="does not scale InferenceService team/absent"):
            await kube.get_from_pod(NAMESPACE, "leader", port, "explain/team/absent")
        with pytest.raises(NotFound, match=r"^404: Not Found"):
            await kube.get_from_pod(NAMESPACE, "leader", port, "unheard-of")
        with pytest.raises(BackendUnavailable, match="/healthz"):  # it answers, but not in JSON
            await kube.get_from_pod(NAMESPACE, "leader", port, "healthz")
        answers.explain = None
        with pytest.raises(BackendUnavailable, match="does not lead"):
            await kube.get_from_pod(NAMESPACE, "leader", port, "explain/team/chat")
    with pytest.raises(BackendUnavailable, match="trying to reach"):
        await kube.get_from_pod(NAMESPACE, "leader", port, "explain/team/chat")


async def test_get_from_pod_missing_or_without_address_raises(kube: KubeClient) -> None:
    with pytest.raises(NotFound, match=r'^pods "absent" not found'):
        await kube.get_from_pod(NAMESPACE, "absent", 8081, "explain/team/chat")
    await pod(kube, "waiting", None)
    with pytest.raises((ObjectRejected, BackendUnavailable)):
        await kube.get_from_pod(NAMESPACE, "waiting", 8081, "explain/team/chat")


async def test_get_from_pod_without_permission_names_missing_rbac_rule(cluster: ApiServer, kube: KubeClient) -> None:
    kube._api.default_headers["Impersonate-User"] = "jane"
    with pytest.raises(Forbidden, match=r'cannot get resource "pods/proxy".*in the namespace "ask-pod"'):
        await kube.get_from_pod(NAMESPACE, "leader", 8081, "explain/team/chat")
    await asyncio.to_thread(grant, cluster, "jane")
    with pytest.raises(NotFound):
        await kube.get_from_pod(NAMESPACE, "absent", 8081, "explain/team/chat")
