"""Flux's kustomize-controller in the local cluster, and revisions for it.

Its own manifests are applied, except for the image, the requests and the namespace. source-controller does not run:
each revision is an ExternalArtifact, whose archive is a blob of the local registry.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import httpx
import yaml

from e2e.cluster.docker import container
from e2e.cluster.flux import MODULE, SOURCES, downloaded
from e2e.cluster.images import reference
from e2e.cluster.settings import REGISTRY
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.stack import REGISTRY_URL

NAMESPACE: Final = "flux-system"
MANAGER: Final = "kustomize-controller"  # the field manager of what Flux applies
KUSTOMIZATIONS: Final = "kustomizations.kustomize.toolkit.fluxcd.io"
READY_S: Final = 240
_ARTIFACTS: Final = "externalartifacts.source.toolkit.fluxcd.io"
_SOURCE: Final = "fleet"
_BLOBS: Final = "/v2/plimsoll/fleet/blobs"


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """The controller, ready; gone afterwards, its Kustomizations first."""
    controller, sources = downloaded(MODULE) / "config", downloaded(SOURCES) / "config"
    rendered = [
        cluster.kubectl("kustomize", str(folder))
        for folder in (controller / "crd", sources / "crd", controller / "rbac", controller / "manager")
    ]
    namespace: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    objects = [namespace, *(one for text in rendered for one in yaml.safe_load_all(text) if one)]
    text = "---\n".join(json.dumps(_adapted(one)) + "\n" for one in objects)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    wait = ("wait", "--for=condition=Available", f"--timeout={READY_S}s", "deployment", "--all", "-n", NAMESPACE)
    cluster.kubectl(*wait, timeout_s=READY_S + 15)
    try:
        yield
    finally:
        cluster.kubectl("delete", KUSTOMIZATIONS, "--all", "-n", NAMESPACE)  # its finalizer prunes
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def deliver(cluster: Cluster, files: Mapping[str, str]) -> str:
    """Make these files, by path, the source's newest revision, which is returned."""
    archive = _archive(files)
    digest = f"sha256:{hashlib.sha256(archive).hexdigest()}"
    _push(archive, digest)
    address = (container(REGISTRY) or {})["NetworkSettings"]["Networks"]["kind"]["IPAddress"]
    revision, now = f"main@{digest}", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    artifact = {"digest": digest, "revision": revision, "size": len(archive), "lastUpdateTime": now}
    artifact |= {"path": digest, "url": f"http://{address}:5000{_BLOBS}/{digest}"}
    ready = {"type": "Ready", "status": "True", "reason": "Succeeded", "message": revision, "lastTransitionTime": now}
    source = {"apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "ExternalArtifact"}
    cluster.apply({**source, "metadata": {"name": _SOURCE, "namespace": NAMESPACE}, "spec": {}})
    status = json.dumps({"status": {"artifact": artifact, "conditions": [ready]}})
    patch = ("patch", _ARTIFACTS, _SOURCE, "-n", NAMESPACE, "--subresource=status", "--type=merge", "-p", status)
    cluster.kubectl(*patch)
    return revision


def with_source(kustomization: Object) -> Object:
    """A Kustomization of the same kind that takes its manifests from `deliver`."""
    source = {"kind": "ExternalArtifact", "name": _SOURCE}
    spec = {key: value for key, value in kustomization["spec"].items() if key != "dependsOn"}  # the chart is there
    return {**kustomization, "spec": {**spec, "sourceRef": source, "retryInterval": "10s"}}


def applied(cluster: Cluster, name: str, revision: str) -> bool:
    """Whether the Kustomization is Ready at this revision."""
    status = cluster.get_object(KUSTOMIZATIONS, name, NAMESPACE).get("status") or {}
    return status.get("lastAppliedRevision") == revision and ready(cluster, name).get("status") == "True"


def ready(cluster: Cluster, name: str) -> Object:
    """The condition Ready of a Kustomization."""
    return condition(cluster.get_object(KUSTOMIZATIONS, name, NAMESPACE), "Ready")


def request_reconciliation(cluster: Cluster, name: str, token: str) -> None:
    """As `flux reconcile` does; see `reconciled`."""
    note = f"reconcile.fluxcd.io/requestedAt={token}"
    cluster.kubectl("annotate", "--overwrite", KUSTOMIZATIONS, name, "-n", NAMESPACE, note)


def reconciled(cluster: Cluster, name: str, token: str) -> bool:
    """Whether a requested reconciliation is over."""
    status = cluster.get_object(KUSTOMIZATIONS, name, NAMESPACE)["status"]
    return status.get("lastHandledReconcileAt") == token and ready(cluster, name).get("status") == "True"


def _archive(files: Mapping[str, str]) -> bytes:
    """The same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(packed.getvalue(), mtime=0)


def _push(blob: bytes, digest: str) -> None:
    with httpx.Client(base_url=REGISTRY_URL, trust_env=False) as http:
        place = http.post(f"{_BLOBS}/uploads/").raise_for_status().headers["location"]
        url = httpx.URL(place).copy_merge_params({"digest": digest})
        http.put(url, content=blob, headers={"content-type": "application/octet-stream"}).raise_for_status()


def _adapted(one: Object) -> Object:
    """An object of the manifests in the namespace of this cluster, with the local image."""
    if one["kind"] in ("Deployment", "Role", "RoleBinding", "ServiceAccount"):
        one["metadata"]["namespace"] = NAMESPACE
    for subject in one.get("subjects", ()):
        subject["namespace"] = NAMESPACE
    if one["kind"] == "Deployment":
        [manager] = one["spec"]["template"]["spec"]["containers"]
        manager["image"] = reference("flux")
        manager |= {"imagePullPolicy": "Always", "command": ["/kustomize-controller"]}
        manager["args"].append("--feature-gates=ExternalArtifact=true")
        manager["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
    return one
