"""Manifests as an OCI artifact in the local registry, as `flux push artifact` stores them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping

import httpx

from e2e.cluster.docker import container
from e2e.cluster.settings import REGISTRY
from e2e.lib.stack import REGISTRY_URL

_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.cncf.flux.config.v1+json"
_CONTENT_TYPE = "application/vnd.cncf.flux.content.v1.tar+gzip"


def registry_address() -> str:
    """Host and port of the local registry for pods, which do not know it as localhost."""
    found = container(REGISTRY)
    assert found is not None, "the cluster has a registry"
    return f"{found['NetworkSettings']['Networks']['kind']['IPAddress']}:5000"


def push(repository: str, tag: str, files: Mapping[str, str]) -> str:
    """Store files by name as one artifact, and give it the tag. Returns its digest; equal files have equal digests."""
    with httpx.Client(base_url=f"{REGISTRY_URL}/v2/{repository}", trust_env=False) as registry:
        config = _push_blob(registry, b"{}") | {"mediaType": _CONFIG_TYPE}
        layer = _push_blob(registry, _archive(files)) | {"mediaType": _CONTENT_TYPE}
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST_TYPE, "config": config, "layers": [layer]}
        body = json.dumps(manifest).encode()
        headers = {"content-type": _MANIFEST_TYPE}
        registry.put(f"/manifests/{tag}", content=body, headers=headers).raise_for_status()
    return _digest(body)


def _push_blob(registry: httpx.Client, content: bytes) -> dict[str, str | int]:
    digest = _digest(content)
    started = registry.post("/blobs/uploads/").raise_for_status()
    target = httpx.URL(started.headers["location"]).copy_merge_params({"digest": digest})
    registry.put(target, content=content).raise_for_status()
    return {"digest": digest, "size": len(content)}


def _archive(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(packed.getvalue(), mtime=0)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
