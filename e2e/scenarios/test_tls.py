"""HTTPS at the gateways: a renewed Secret is served under load, without a failed request and without a restart."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from e2e.lib import stack
from e2e.lib.background import BackgroundThread
from e2e.lib.kube import Cluster
from e2e.lib.wait import wait_until
from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, KEY_FILE
from tests.certificates import make_certificate

GATEWAYS = 2
SECRET = "e2e-gateway-tls"
CONNECTIONS = 8  # new ones: each gateway gets some
REQUEST_INTERVAL_S = 0.1
RENEWED_S = 180.0  # the kubelet writes a changed Secret within two minutes
ADDRESS = urlsplit(stack.GATEWAY_URL)
URL = stack.GATEWAY_URL.replace("http://", "https://")


def _write_secret(cluster: Cluster, folder: Path, name: str) -> str:
    """Write a new certificate into the Secret; returns it in PEM."""
    pem = make_certificate(folder, name)
    files = (f"--cert={folder / CERTIFICATE_FILE}", f"--key={folder / KEY_FILE}")
    cluster.kubectl("delete", "secret", SECRET, "-n", stack.SYSTEM, "--ignore-not-found")
    cluster.kubectl("create", "secret", "tls", SECRET, "-n", stack.SYSTEM, *files)
    return pem


def _served() -> set[str]:
    """The certificates that the gateways serve to new connections; "" for one without TLS."""
    return {_certificate() for _ in range(CONNECTIONS)}


def _certificate() -> str:
    try:
        return ssl.get_server_certificate((str(ADDRESS.hostname), int(ADDRESS.port or 443)))
    except OSError:  # a gateway of before, which is being replaced
        return ""


@pytest.fixture(scope="module")
def first_certificate(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two gateways with TLS, which also serve plain HTTP for the prober; afterwards as before."""
    pem = _write_secret(cluster, tmp_path_factory.mktemp("tls"), "first")
    tls = f"gateway.tls.secretName={SECRET},gateway.tls.plaintext=Allow"
    stack.install(cluster, "--set", f"{tls},gateway.replicas={GATEWAYS}")
    stack.wait_for_gateways(cluster, GATEWAYS)
    yield pem
    stack.install(cluster)
    cluster.kubectl("delete", "secret", SECRET, "-n", stack.SYSTEM)


class _Load(BackgroundThread):
    """Requests over new connections that trust any certificate, one after the other, during the block."""

    def __init__(self) -> None:
        super().__init__(self._run)
        self.outcomes: list[int | str] = []

    def _run(self) -> None:
        while not self._stop.wait(REQUEST_INTERVAL_S):
            try:
                reply = httpx.get(f"{URL}/v1/models", verify=False, timeout=10, trust_env=False)
                self.outcomes.append(reply.status_code)
            except httpx.HTTPError as error:
                self.outcomes.append(repr(error))


def test_renewed_certificate_is_served_under_load(cluster: Cluster, first_certificate: str, tmp_path: Path) -> None:
    wait_until("every gateway serves the certificate", lambda: _served() == {first_certificate}, RENEWED_S, 1.0)
    pods = {pod["metadata"]["uid"] for pod in stack.gateway_pods(cluster)}
    with _Load() as load:
        second = _write_secret(cluster, tmp_path, "second")
        wait_until("every gateway serves the new certificate", lambda: _served() == {second}, RENEWED_S, 1.0)
    assert set(load.outcomes) == {200}
    assert {pod["metadata"]["uid"] for pod in stack.gateway_pods(cluster)} == pods
    trusted = ssl.create_default_context(cadata=second)
    assert httpx.get(f"{URL}/v1/models", verify=trusted, timeout=10, trust_env=False).status_code == 200
