"""KEDA in the local cluster: its own manifests and programs, from its Go module.

The manifests are applied as they are, except for the image, which is one of the local registry, and the requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import yaml

from e2e.cluster.images import IMAGES
from e2e.cluster.keda import downloaded
from e2e.lib.kube import Cluster, Object

NAMESPACE: Final = "keda"
READY_S: Final = 300  # it makes its certificates first, and its pods wait for them
_PROGRAMS: Final = {"keda-operator": "/keda-operator", "keda-metrics-apiserver": "/keda-adapter"}


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """KEDA's operator and metrics server, ready; gone afterwards, its ScaledObjects first."""
    rendered = cluster.kubectl("kustomize", str(downloaded() / "config" / "minimal"))
    objects: list[Object] = [one for one in yaml.safe_load_all(rendered) if one]
    for one in objects:
        if one["kind"] == "Deployment":
            _use_local_image(one)
    text = "---\n".join(json.dumps(one) + "\n" for one in objects)
    # Server-side: some of the definitions are too large for the annotation of a client-side apply.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    _wait_available(cluster, "deployment", "--all", "-n", NAMESPACE)
    _wait_available(cluster, "apiservice/v1beta1.external.metrics.k8s.io")
    yield
    cluster.kubectl("delete", "scaledobjects.keda.sh", "--all", "--all-namespaces")  # KEDA's finalizer is on them
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def _wait_available(cluster: Cluster, *what: str) -> None:
    argv = ("wait", "--for=condition=Available", f"--timeout={READY_S}s", *what)
    cluster.kubectl(*argv, timeout_s=READY_S + 15)


def _use_local_image(deployment: Object) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = next(one.reference for one in IMAGES if one.name == "keda")
    container["imagePullPolicy"] = "Always"
    container["command"] = [_PROGRAMS[deployment["metadata"]["name"]]]
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
