"""A real kube-apiserver and etcd for tests: the schema, CEL, server-side apply and RBAC as a cluster has them.

Problem: an imitation of the API server accepts what the real one refuses. Idea: the two programs that answer API
requests, on free loopback ports, in a folder of their own, without the controllers and nodes that make a cluster slow.
They start in a few seconds and are stopped by process id.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from e2e.cluster.settings import BIN
from e2e.lib.definitions import wait_until_established
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
CRDS = sorted((ROOT / "crds").glob("plimsoll.dev_*.yaml"))
START_SECONDS = 60
STOP_SECONDS = 15
_ADMIN_TOKEN = "test-admin"  # good for this server only, which lives as long as its test


@dataclass
class ApiServer:
    """A running API server. `stop_api` and `start_api` make it go away and come back, with its objects."""

    folder: Path
    etcd_port: int
    port: int
    authorization: str
    audit_policy: Path | None = None
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where it answers, over TLS."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """One JSON event a line, where an audit policy was given."""
        return self.folder / "audit.log"

    @property
    def kubectl(self) -> Path:
        """A kubectl of the same version."""
        return BIN / "kubectl"

    def start_api(self) -> None:
        """Start kube-apiserver and wait until it is ready; raises RuntimeError with its last words."""
        self._start("kube-apiserver", *self._flags())
        self._wait_for("kube-apiserver", self._ready)

    def stop_api(self) -> None:
        """Stop kube-apiserver; etcd and so every object stays."""
        self._stop("kube-apiserver")

    def start(self) -> None:
        """Start both, and write the kubeconfig."""
        (self.folder / "tokens.csv").write_text(f'{_ADMIN_TOKEN},admin,admin,"system:masters"\n')
        key = [
            "openssl",
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            str(self.folder / "accounts.key"),
        ]
        subprocess.run(key, check=True, capture_output=True)
        etcd, peer = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        )  # fmt: skip
        self.start_api()
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()))

    def stop(self) -> None:
        """Stop both."""
        for name in ("kube-apiserver", "etcd"):
            self._stop(name)

    def _flags(self) -> list[str]:
        audit = (
            [f"--audit-policy-file={self.audit_policy}", f"--audit-log-path={self.audit_log}"]
            if self.audit_policy
            else []
        )
        return [
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--authorization-mode={self.authorization}",
            f"--service-account-signing-key-file={self.folder / 'accounts.key'}",
            f"--service-account-key-file={self.folder / 'accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",  # nobody here would make the accounts it waits for
            "--endpoint-reconciler-type=none",
            "--profiling=false",
            *audit,
        ]

    def install_crds(self, paths: Iterable[Path] = CRDS) -> None:
        """Install CRDs, by default ours, and wait until they are served."""
        files = [f"-f={path}" for path in paths]
        self._run("apply", "--server-side", *files)
        wait_until_established(self._run, *files)

    def delete_crds(self, paths: Iterable[Path]) -> None:
        """Delete CRDs with their objects; those that do not exist are skipped."""
        self._run("delete", "--ignore-not-found", *(f"-f={path}" for path in paths))

    def _run(self, *argv: str) -> str:
        command = [self.kubectl, f"--kubeconfig={self.kubeconfig}", *argv]
        return subprocess.run(command, check=True, timeout=30, stdout=subprocess.PIPE, text=True).stdout

    def _kubeconfig(self) -> dict[str, object]:
        authority = base64.b64encode((self.folder / "apiserver.crt").read_bytes()).decode()
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": "admin", "user": {"token": _ADMIN_TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }

    def _ready(self) -> bool:
        certificate = self.folder / "apiserver.crt"
        if not certificate.exists():
            return False
        request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {_ADMIN_TOKEN}"})
        try:
            trust = ssl.create_default_context(cafile=str(certificate))
            with urllib.request.urlopen(request, timeout=2, context=trust) as reply:
                return bool(reply.status == 200)
        except (OSError, ssl.SSLError):  # an HTTP error status is an OSError too
            return False

    def _start(self, name: str, *flags: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(BIN / name), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                last = "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-20:])
                raise RuntimeError(f"{name} did not start:\n{last}")
            time.sleep(0.1)


@contextmanager
def api_server(authorization: str = "RBAC", audit_policy: Path | None = None) -> Iterator[ApiServer]:
    """A fresh API server. authorization: `RBAC` or `AlwaysAllow`. Raises FileNotFoundError where it was never built."""
    for name in ("kube-apiserver", "etcd", "kubectl"):
        if not (BIN / name).exists():
            raise FileNotFoundError(f"{name} is missing: run e2e/cluster/binaries kube-apiserver etcd kubectl")
    with TemporaryDirectory(prefix="plimsoll-api-") as folder:
        server = ApiServer(Path(folder), free_port(), free_port(), authorization, audit_policy)
        try:
            server.start()
            yield server
        finally:
            server.stop()
