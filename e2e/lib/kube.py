"""The cluster as scenarios see it.

Problem: scenarios read a lot (states, metrics, logs) and change a little, and starting kubectl for every read would
eat the two cores that the engines need. Idea: one `kubectl proxy` on loopback for the session, read over one HTTP
connection; kubectl itself only where a person would use it (apply, patch, delete, exec, logs).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import httpx

Object = dict[str, Any]

_ROOTS = {
    "pods": "/api/v1",
    "services": "/api/v1",
    "configmaps": "/api/v1",
    "serviceaccounts": "/api/v1",
    "events": "/api/v1",
    "nodes": "/api/v1",
    "namespaces": "/api/v1",
    "deployments": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1",
    "controllerrevisions": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "endpointslices": "/apis/discovery.k8s.io/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "jobs": "/apis/batch/v1",
    "inferenceservices": "/apis/plimsoll.dev/v1alpha1",
    "inferenceserviceadmissions": "/apis/plimsoll.dev/v1alpha1",
    "inferenceservicecheckpoints": "/apis/plimsoll.dev/v1alpha1",
}


class KubectlError(Exception):
    """A kubectl or helm command said no; the message is what it printed."""


class Cluster:
    """Access to one cluster by its kubeconfig; `bin_dir` is where kubectl and helm are looked for first."""

    def __init__(self, kubeconfig: Path, bin_dir: Path) -> None:
        self._env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": f"{bin_dir}:{os.environ['PATH']}"}
        self._proxy: subprocess.Popen[str] | None = None
        self._http: httpx.Client | None = None

    def __enter__(self) -> Self:
        argv = ["kubectl", "proxy", "--address=127.0.0.1", "--port=0"]
        self._proxy = subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, text=True)
        assert self._proxy.stdout
        first_line = self._proxy.stdout.readline()
        if "127.0.0.1:" not in first_line:
            raise KubectlError(f"kubectl proxy did not start: {first_line!r}")
        url = f"http://{first_line.split()[-1]}"
        self._http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._http:
            self._http.close()
        if self._proxy:
            self._proxy.terminate()
            self._proxy.wait(10)
            if self._proxy.stdout:
                self._proxy.stdout.close()

    # Reading, over the proxy.

    def raw(self, path: str) -> httpx.Response:
        """GET of an API path; the caller judges the status."""
        assert self._http, "use the cluster as a context manager"
        return self._http.get(path)

    def call(self, path: str, body: Object, timeout_s: float = 60) -> Object:
        """POST of JSON to an API path (a pod behind the API server's proxy); raises httpx.HTTPStatusError."""
        assert self._http, "use the cluster as a context manager"
        response = self._http.post(path, json=body, timeout=timeout_s)
        response.raise_for_status()
        return dict(response.json())

    def get(self, plural: str, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None if there is none."""
        response = self.raw(f"{_collection(plural, namespace)}/{name}")
        if response.status_code == 404:
            return None
        response.raise_for_status()
        return dict(response.json())

    def list(self, plural: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        """All objects of a kind, in one namespace or in all."""
        query = f"?labelSelector={selector}" if selector else ""
        response = self.raw(_collection(plural, namespace) + query)
        if response.status_code == 404:
            return []
        response.raise_for_status()
        return list(response.json()["items"])

    def get_object(self, resource: str, name: str, namespace: str) -> Object:
        """An object of any kind, with its managed fields. resource: with its group; raises KubectlError."""
        argv = ("get", resource, name, "-n", namespace, "-o", "json", "--show-managed-fields")
        return dict(json.loads(self.kubectl(*argv)))

    def in_pod(self, namespace: str, pod: str, port: int, path: str) -> str:
        """GET inside a pod, through the API server's pod proxy; raises httpx.HTTPStatusError."""
        response = self.raw(f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}")
        response.raise_for_status()
        return response.text

    # Changing, as a person would.

    def run(self, *argv: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """A command with this cluster's KUBECONFIG; raises KubectlError with its words."""
        done = subprocess.run(
            argv, env=self._env, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            raise KubectlError(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}".strip())
        return done.stdout

    def kubectl(self, *argv: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        return self.run("kubectl", *argv, stdin=stdin, timeout_s=timeout_s)

    def helm(self, *argv: str, timeout_s: float = 300) -> str:
        return self.run("helm", *argv, timeout_s=timeout_s)

    def apply(self, *manifests: Object, namespace: str | None = None) -> None:
        where = ["-n", namespace] if namespace else []
        self.kubectl("apply", *where, "-f", "-", stdin="---\n".join(json.dumps(m) + "\n" for m in manifests))

    def apply_dry(self, manifest: Object, namespace: str) -> str:
        """What kubectl and the API server say to a manifest, without keeping it; raises KubectlError."""
        return self.kubectl("apply", "-n", namespace, "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))

    def patch(self, plural: str, name: str, namespace: str, patch: Object) -> None:
        """A merge patch."""
        self.kubectl("patch", plural, name, "-n", namespace, "--type=merge", "-p", json.dumps(patch))

    def delete(
        self, plural: str, *names: str, namespace: str | None = None, wait: bool = True, timeout_s: float = 180
    ) -> None:
        where = ["-n", namespace] if namespace else []
        argv = [
            "delete",
            plural,
            *names,
            *where,
            "--ignore-not-found",
            f"--wait={str(wait).lower()}",
            f"--timeout={timeout_s:.0f}s",
        ]
        self.kubectl(*argv, timeout_s=timeout_s + 15)

    def execute(self, namespace: str, pod: str, container: str, *argv: str, timeout_s: float = 60) -> str:
        return self.kubectl("exec", "-n", namespace, pod, "-c", container, "--", *argv, timeout_s=timeout_s)

    def logs(self, namespace: str, pod: str, container: str, tail: int = 40, previous: bool = False) -> str:
        extra = ["--previous"] if previous else []
        return self.kubectl("logs", "-n", namespace, pod, "-c", container, f"--tail={tail}", *extra)


def _collection(plural: str, namespace: str | None) -> str:
    return f"{_ROOTS[plural]}/namespaces/{namespace}/{plural}" if namespace else f"{_ROOTS[plural]}/{plural}"


def condition(obj: Object | None, kind: str) -> Object:
    """The condition of that type, or an empty object."""
    conditions: Iterable[Object] = ((obj or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == kind), {})


def is_true(obj: Object | None, kind: str) -> bool:
    return bool(condition(obj, kind).get("status") == "True")


def uids(objects: Iterable[Object]) -> dict[str, str]:
    """Names to UIDs."""
    return {o["metadata"]["name"]: o["metadata"]["uid"] for o in objects}
