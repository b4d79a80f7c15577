"""Flux's source-controller and kustomize-controller in the local cluster, and revisions for them.

Their own manifests are applied, except for the image, the requests and the namespace. Each revision is an OCI artifact
in the local registry.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import httpx
import yaml

from e2e.cluster.docker import container
from e2e.cluster.flux import KUSTOMIZE, SOURCES, downloaded
from e2e.cluster.images import reference
from e2e.cluster.settings import REGISTRY
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.stack import REGISTRY_URL

NAMESPACE: Final = "flux-system"
MANAGER: Final = "kustomize-controller"  # the field manager of what Flux applies
KUSTOMIZATIONS: Final = "kustomizations.kustomize.toolkit.fluxcd.io"
READY_S: Final = 240
_SOURCES: Final = "ocirepositories.source.toolkit.fluxcd.io"
_SOURCE: Final = "fleet"
_REPOSITORY: Final = "plimsoll/fleet"  # of the local registry
_TAG: Final = "main"
_CONFIG_TYPE: Final = "application/vnd.cncf.flux.config.v1+json"  # as `flux push artifact` writes
_CONTENT_TYPE: Final = "application/vnd.cncf.flux.content.v1.tar+gzip"
_MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """The controllers, ready; gone afterwards, what they deliver first."""
    rendered = [
        cluster.kubectl("kustomize", str(downloaded(module) / "config" / folder))
        for module in (SOURCES, KUSTOMIZE)
        for folder in ("crd", "rbac", "manager")
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
        for kind in (KUSTOMIZATIONS, _SOURCES):  # whose finalizers need the controllers
            cluster.kubectl("delete", kind, "--all", "-n", NAMESPACE)
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def deliver(cluster: Cluster, files: Mapping[str, str]) -> str:
    """Make these files, by path, the source's newest revision, which is returned."""
    digest = _push_artifact(_archive(files))
    registry = (container(REGISTRY) or {})["NetworkSettings"]["Networks"]["kind"]["IPAddress"]
    spec = {"interval": "10m", "insecure": True, "url": f"oci://{registry}:5000/{_REPOSITORY}", "ref": {"tag": _TAG}}
    source = {"apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "OCIRepository"}
    cluster.apply({**source, "metadata": {"name": _SOURCE, "namespace": NAMESPACE}, "spec": spec})
    _annotate(cluster, _SOURCES, _SOURCE, digest)
    return f"{_TAG}@{digest}"


def with_source(kustomization: Object) -> Object:
    """A Kustomization of the same kind that takes its manifests from `deliver`."""
    source = {"kind": "OCIRepository", "name": _SOURCE}
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
    _annotate(cluster, KUSTOMIZATIONS, name, token)


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


def _annotate(cluster: Cluster, kind: str, name: str, token: str) -> None:
    note = f"reconcile.fluxcd.io/requestedAt={token}"
    cluster.kubectl("annotate", "--overwrite", kind, name, "-n", NAMESPACE, note)


def _push_artifact(archive: bytes) -> str:
    """Push the artifact as `flux push artifact` does. Returns the digest of its manifest."""
    with httpx.Client(base_url=f"{REGISTRY_URL}/v2/{_REPOSITORY}/", trust_env=False) as http:
        parts = [_push_blob(http, b"{}", _CONFIG_TYPE), _push_blob(http, archive, _CONTENT_TYPE)]
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST_TYPE, "config": parts[0], "layers": parts[1:]}
        pushed = http.put(f"manifests/{_TAG}", json=manifest, headers={"content-type": _MANIFEST_TYPE})
        return str(pushed.raise_for_status().headers["docker-content-digest"])


def _push_blob(http: httpx.Client, blob: bytes, media_type: str) -> Object:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    place = http.post("blobs/uploads/").raise_for_status().headers["location"]
    url = httpx.URL(place).copy_merge_params({"digest": digest})
    http.put(url, content=blob, headers={"content-type": "application/octet-stream"}).raise_for_status()
    return {"mediaType": media_type, "digest": digest, "size": len(blob)}


def _adapted(one: Object) -> Object:
    """An object of the manifests in the namespace of this cluster, with the local image."""
    if one["kind"] in ("Deployment", "Role", "RoleBinding", "Service", "ServiceAccount"):
        one["metadata"]["namespace"] = NAMESPACE
    for subject in one.get("subjects", ()):
        subject["namespace"] = NAMESPACE
    if one["kind"] == "Deployment":
        [manager] = one["spec"]["template"]["spec"]["containers"]
        manager["image"] = reference("flux")
        manager |= {"imagePullPolicy": "Always", "command": [f"/{one['metadata']['name']}"]}
        manager["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
    return one
