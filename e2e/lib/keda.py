"""KEDA in the local cluster: its own manifests, operator and metrics server, from its Go module.

The manifests are applied as they are, except for the image, which is one of the local registry, and the requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import yaml

from e2e.cluster.go_modules import downloaded
from e2e.cluster.images import reference
from e2e.cluster.keda import MODULE
from e2e.lib import external_metrics
from e2e.lib.kube import Cluster, Object

NAMESPACE: Final = "keda"
READY_S: Final = 300  # it makes its certificates first, and its pod waits for them


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """KEDA, ready; gone afterwards, its ScaledObjects first."""
    rendered = cluster.kubectl("kustomize", str(downloaded(MODULE) / "config" / "minimal"))
    objects: list[Object] = [one for one in yaml.safe_load_all(rendered) if one]
    for one in objects:
        if one["kind"] == "Deployment":
            _use_local_image(one)
    text = "---\n".join(json.dumps(one) + "\n" for one in objects)
    # Server-side: some of the definitions are too large for the annotation of a client-side apply.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    wait = ("wait", "--for=condition=Available", f"--timeout={READY_S}s", "deployment", "--all", "-n", NAMESPACE)
    cluster.kubectl(*wait, timeout_s=READY_S + 15)
    external_metrics.wait_served(cluster)
    try:
        yield
    finally:
        for kind in ("scaledobjects.keda.sh", "triggerauthentications.keda.sh"):  # KEDA's finalizer is on them
            cluster.kubectl("delete", kind, "--all", "--all-namespaces")
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def _use_local_image(deployment: Object) -> None:
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    container["image"] = reference("keda")
    container["imagePullPolicy"] = "Always"
    if container["command"] == ["/keda"]:
        container["command"] = ["/keda-operator"]
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}
