"""External metrics of the local cluster, as an HPA reads them, whichever adapter serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from e2e.lib.kube import Cluster
from plimsoll.core.units import parse_quantity

GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
SERVED_S: Final = 120


def wait_served(cluster: Cluster) -> None:
    """Wait until the API server reaches the adapter."""
    wait = ("wait", "--for=condition=Available", f"--timeout={SERVED_S}s", "apiservice", f"{VERSION}.{GROUP}")
    cluster.kubectl(*wait, timeout_s=SERVED_S + 15)


def read(cluster: Cluster, namespace: str, name: str, labels: Mapping[str, str]) -> list[float]:
    """The values of a metric in a namespace for a selector; none while the adapter does not know it.

    Raises httpx.HTTPStatusError, for example if the adapter cannot answer.
    """
    selector = quote(",".join(f"{label}={value}" for label, value in labels.items()))
    answer = cluster.raw(f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{name}?labelSelector={selector}")
    if answer.status_code == 404:
        return []
    return [float(parse_quantity(one["value"])) for one in answer.raise_for_status().json()["items"]]
