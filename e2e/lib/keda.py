"""KEDA in the local cluster: its own manifests and its operator, from its Go module.

The manifests are applied as they are, except for the image, which is one of the local registry, and the requests. Its
metrics server is left out: what it serves is read by HPAs alone, and it takes as long to build as the operator.
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
READY_S: Final = 300  # it makes its certificates first, and its pod waits for them
_METRICS_SERVER: Final = ("keda-metrics-apiserver", "v1beta1.external.metrics.k8s.io")  # its objects


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """KEDA's operator, ready; gone afterwards, its ScaledObjects first."""
    rendered = cluster.kubectl("kustomize", str(downloaded() / "config" / "minimal"))
    found: list[Object] = [one for one in yaml.safe_load_all(rendered) if one]
    objects = [one for one in found if one["metadata"]["name"] not in _METRICS_SERVER]
    for one in objects:
        if one["kind"] == "Deployment":
            _use_local_image(one)
    text = "---\n".join(json.dumps(one) + "\n" for one in objects)
    # Server-side: some of the definitions are too large for the annotation of a client-side apply.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    wait = ("wait", "--for=condition=Available", f"--timeout={READY_S}s", "deployment", "--all", "-n", NAMESPACE)
    cluster.kubectl(*wait, timeout_s=READY_S + 15)
    yield
    cluster.kubectl("delete", "scaledobjects.keda.sh", "--all", "--all-namespaces")  # KEDA's finalizer is on them
    cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def _use_local_image(deployment: Object) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = next(one.reference for one in IMAGES if one.name == "keda")
    container["imagePullPolicy"] = "Always"
    container["command"] = ["/keda-operator"]
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
