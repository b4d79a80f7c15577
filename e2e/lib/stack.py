"""From nothing to an installed Plimsoll: cluster, images, chart. Every step is quick when there is nothing to do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from e2e.cluster.settings import BIN, GATEWAY_PORT, KUBECONFIG, REGISTRY_PORT, ROOT
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.wait import wait_until
from plimsoll.api import labels

RELEASE = "plimsoll"
SYSTEM = "plimsoll-system"
CHART = ROOT / "charts" / "plimsoll"
VALUES = CHART / "ci" / "local-values.yaml"
GATEWAY_URL = f"http://127.0.0.1:{GATEWAY_PORT}"
REGISTRY_URL = f"http://127.0.0.1:{REGISTRY_PORT}"
DRAIN_S = 120.0  # more than idle engines need to end
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}

_MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)


def cluster_verb(verb: str) -> None:
    """One of the verbs of e2e.cluster (`up`, `images`); raises CalledProcessError, its words are on the terminal."""
    subprocess.run([sys.executable, "-m", "e2e.cluster", verb], cwd=ROOT, check=True)


def connect_cluster() -> Cluster:
    """Access to the local cluster; a context manager."""
    return Cluster(KUBECONFIG, BIN)


def make_namespace(cluster: Cluster, name: str) -> None:
    """A namespace that enforces the restricted pod security standard; an earlier one of that name must have gone."""
    wait_until(f"no namespace {name} is going", lambda: not _is_terminating(cluster, name), DRAIN_S)
    metadata: Object = {"name": name, "labels": RESTRICTED}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})


def _is_terminating(cluster: Cluster, name: str) -> bool:
    return "deletionTimestamp" in (cluster.get("namespaces", name) or {"metadata": {}})["metadata"]


def drop_namespace(cluster: Cluster, name: str) -> None:
    """Removes a namespace, its services first; does not wait for its end, which comes seconds after that of its pods.

    Left to itself the namespace controller deletes the pods and then looks again after half of their grace, which is
    five minutes for engines that may finish their streams, though they are gone after seconds.
    """
    if cluster.list("inferenceservices", name):  # empty, too, once the definition is gone
        cluster.delete("inferenceservices", "--all", namespace=name)
    wait_until(f"the pods of {name} are gone", lambda: not cluster.list("pods", name, labels.ROLE), 2 * DRAIN_S)
    cluster.delete("namespace", name, wait=False)


def install(cluster: Cluster, *extra: str, chart: Path = CHART) -> None:
    """Installs or upgrades the chart with the local values and waits until everything in it is available.

    What was changed by hand meanwhile, such as a scale, is again as the chart has it. `extra`: further arguments of
    `helm upgrade --install`. Raises KubectlError with helm's words.
    """
    make_namespace(cluster, SYSTEM)
    values = ["--values", str(VALUES), "--force-conflicts"]
    cluster.helm(
        "upgrade", "--install", RELEASE, str(chart), "-n", SYSTEM, *values, "--wait", "--timeout", "240s", *extra
    )
    _restart_stale(cluster)
    wait_until("the gateway answers", lambda: gateway_answers(), 60)


def uninstall(cluster: Cluster) -> None:
    """Uninstalls the chart and waits until its pods are gone; what the chart keeps stays."""
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait", "--timeout", "120s")
    wait_until("no pod of Plimsoll is left", lambda: not cluster.list("pods", SYSTEM), 120)


def installed(cluster: Cluster) -> bool:
    return RELEASE in cluster.helm("list", "-n", SYSTEM, "-q").split()


def gateway_pods(cluster: Cluster) -> list[Object]:
    """The gateway pods, without those that are being deleted."""
    found = cluster.list("pods", SYSTEM, "app.kubernetes.io/component=gateway")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def scale_gateways(cluster: Cluster, replicas: int) -> None:
    """Sets the number of gateways, and waits until so many are ready."""
    cluster.kubectl("scale", f"deployment/{RELEASE}-gateway", "-n", SYSTEM, f"--replicas={replicas}")
    wait_for_gateways(cluster, replicas)


def wait_for_gateways(cluster: Cluster, replicas: int) -> None:
    """Waits until so many gateways exist, all of them ready."""

    def all_ready() -> bool:
        pods = gateway_pods(cluster)
        return len(pods) == replicas and all(is_true(pod, "Ready") for pod in pods)

    wait_until(f"there are {replicas} gateways", all_ready, 120)


def wait_endpoint_removed(cluster: Cluster, pod_ip: str) -> None:
    """Waits until no new connection to the gateway's Service is meant for this address."""

    def is_removed() -> bool:
        slices = cluster.list("endpointslices", SYSTEM, f"kubernetes.io/service-name={RELEASE}-gateway")
        return not any(pod_ip in one["addresses"] for found in slices for one in found.get("endpoints") or ())

    wait_until(f"{pod_ip} is no endpoint of the gateway", is_removed, 120, every_s=0.2)


def gateway_answers() -> bool:
    """Whether the gateway lists its models, or wants a key for that."""
    try:
        return httpx.get(f"{GATEWAY_URL}/v1/models", timeout=5, trust_env=False).status_code in (200, 401)
    except httpx.HTTPError:
        return False


def retag(repository: str, old: str, new: str) -> str:
    """Gives an image in the local registry one more tag, and returns the whole name with the new one."""
    url = f"{REGISTRY_URL}/v2/plimsoll/{repository}/manifests"
    manifest = httpx.get(f"{url}/{old}", headers={"accept": _MANIFEST_TYPES}, trust_env=False).raise_for_status()
    headers = {"content-type": manifest.headers["content-type"]}
    httpx.put(f"{url}/{new}", content=manifest.content, headers=headers, trust_env=False).raise_for_status()
    return f"localhost:{REGISTRY_PORT}/plimsoll/{repository}:{new}"


def digest(repository: str, tag: str) -> str:
    """The digest that a tag has in the local registry."""
    url = f"{REGISTRY_URL}/v2/plimsoll/{repository}/manifests/{tag}"
    return str(
        httpx.head(url, headers={"accept": _MANIFEST_TYPES}, trust_env=False)
        .raise_for_status()
        .headers["docker-content-digest"]
    )


def chart_copy(version: str) -> Path:
    """A copy of the chart that calls itself another version, in a temporary folder."""
    copy = Path(tempfile.mkdtemp(prefix="plimsoll-chart-")) / "plimsoll"
    subprocess.run(["cp", "-r", str(CHART), str(copy)], check=True)
    lines = (copy / "Chart.yaml").read_text().splitlines()
    changed = [
        f"{key}: {version}" if (key := line.split(":")[0]) in ("version", "appVersion") else line for line in lines
    ]
    (copy / "Chart.yaml").write_text("\n".join(changed) + "\n")
    return copy


def _restart_stale(cluster: Cluster) -> None:
    """The local tag is always the same: restarts what runs an older image than the registry has."""
    current = digest("operator", "dev")
    for deployment in cluster.list("deployments", SYSTEM):
        name = deployment["metadata"]["name"]
        if any(
            _older(pod, current)
            for pod in cluster.list("pods", SYSTEM)
            if pod["metadata"]["name"].startswith(f"{name}-")
        ):
            cluster.kubectl("rollout", "restart", f"deployment/{name}", "-n", SYSTEM)
            cluster.kubectl("rollout", "status", f"deployment/{name}", "-n", SYSTEM, "--timeout=180s", timeout_s=200)


def _older(pod: Object, current: str) -> bool:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    ours = [s for s in statuses if "/plimsoll/operator:dev" in s["image"] or "/plimsoll/operator@" in s["imageID"]]
    return is_true(pod, "Ready") and any(not s["imageID"].endswith(current) for s in ours)
