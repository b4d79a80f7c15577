"""KEDA and Flux in the local cluster: their own manifests and programs, from their Go modules.

Problem: neither project's images nor releases are to be had everywhere. Idea: a module has its manifests too. They are
applied as they are, except for the image, which is one of the local registry, and the requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from e2e.cluster.images import IMAGES
from e2e.cluster.settings import HERE
from e2e.cluster.shell import output
from e2e.lib.kube import Cluster, Object

FLUX: Final = "flux-system"
READY_S: Final = 300.0  # KEDA makes its certificates first, and its pods wait for them
_PROGRAMS: Final = {
    "keda-operator": "/keda-operator",
    "keda-metrics-apiserver": "/keda-adapter",
    "source-controller": "/source-controller",
    "kustomize-controller": "/kustomize-controller",
}
_NAMESPACED: Final = ("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding")


@contextmanager
def keda(cluster: Cluster) -> Iterator[None]:
    """KEDA's operator and metrics server in namespace `keda`, ready; gone afterwards, its ScaledObjects first."""
    folder = _folder("keda", "github.com/kedacore/keda/v2")
    objects = _manifests(cluster, folder / "config/minimal")
    _install(cluster, "keda", "keda", objects)
    cluster.kubectl("wait", "--for=condition=Available", "apiservice/v1beta1.external.metrics.k8s.io", _patience())
    yield
    _remove(cluster, objects, "scaledobjects.keda.sh")


@contextmanager
def flux(cluster: Cluster) -> Iterator[None]:
    """Flux's source and kustomize controllers in namespace `flux-system`, ready; gone afterwards."""
    objects: list[Object] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": FLUX}}]
    for name in ("source-controller", "kustomize-controller"):
        folder = _folder("flux", f"github.com/fluxcd/{name}")
        for part in ("crd", "rbac", "manager"):
            objects += _manifests(cluster, folder / "config" / part)
    for one in objects:
        if one["kind"] in _NAMESPACED:
            one["metadata"]["namespace"] = FLUX
        for subject in one.get("subjects", ()):
            subject["namespace"] = FLUX
    _install(cluster, FLUX, "flux", objects)
    yield
    _remove(cluster, objects, "kustomizations.kustomize.toolkit.fluxcd.io", "ocirepositories.source.toolkit.fluxcd.io")


def _folder(modules: str, module: str) -> Path:
    """Where Go has unpacked a module."""
    return Path(output("go", "list", "-m", "-f", "{{.Dir}}", module, cwd=HERE / modules).strip())


def _manifests(cluster: Cluster, folder: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(cluster.kubectl("kustomize", str(folder))) if one]


def _install(cluster: Cluster, namespace: str, image: str, objects: list[Object]) -> None:
    for one in objects:
        if one["kind"] == "Deployment":
            _use_local_image(one, image)
    # Server-side: some of the definitions are too large for the annotation of a client-side apply.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=_text(objects))
    ready = ("wait", "--for=condition=Available", "deployment", "--all", "-n", namespace, _patience())
    cluster.kubectl(*ready, timeout_s=READY_S + 15)


def _remove(cluster: Cluster, objects: list[Object], *kinds: str) -> None:
    """Remove the objects of the controllers' own kinds, which have finalizers, then all else."""
    for kind in kinds:
        cluster.kubectl("delete", kind, "--all", "--all-namespaces")
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=_text(objects))


def _text(objects: list[Object]) -> str:
    return "---\n".join(json.dumps(one) + "\n" for one in objects)


def _use_local_image(deployment: Object, image: str) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = next(one.reference for one in IMAGES if one.name == image)
    container["imagePullPolicy"] = "Always"
    container["command"] = [_PROGRAMS[deployment["metadata"]["name"]]]
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}


def _patience() -> str:
    return f"--timeout={READY_S:.0f}s"
