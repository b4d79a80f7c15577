"""The cluster itself, made by kind: one node, or workers beside it; brought back after the machine was restarted."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from e2e.cluster import pod_network
from e2e.cluster.docker import container
from e2e.cluster.planning import ClusterStep, cluster_step
from e2e.cluster.settings import BIN, CLUSTER, GATEWAY_PORT, GPUS, HERE, KUBECONFIG, NODE, WORKER_NODES
from e2e.cluster.shell import CommandFailed, output, print_line, run, stage, succeeds, wait_for

START_SECONDS = 90


def ensure(image: str) -> None:
    """A ready cluster made from this image, and its kubeconfig in build/; never touches the user's own kubeconfig."""
    state = container(NODE)
    step = cluster_step(state["Config"]["Image"] if state else None, bool(state and state["State"]["Running"]), image)
    if step is ClusterStep.START and not _restarted():
        print_line("the stopped node does not come back: making a new cluster")
        step = ClusterStep.RECREATE
    if step is ClusterStep.RECREATE:
        delete()
    if step in (ClusterStep.CREATE, ClusterStep.RECREATE):
        with stage("creating the cluster"), tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "kind.yaml"
            config.write_text(_config())
            wait = "0s" if WORKER_NODES else "120s"  # several nodes are ready once their pod networks are joined
            create = (BIN / "kind", "create", "cluster", "--name", CLUSTER, "--image", image)
            run(*create, "--config", config, "--kubeconfig", KUBECONFIG, "--wait", wait)
    _export()
    if WORKER_NODES:
        pod_network.join()
    wait_for(_ready, "the node", START_SECONDS)


def delete() -> None:
    """Remove the cluster, if there is one."""
    if nodes := [node for node in (NODE, *WORKER_NODES) if container(node) is not None]:
        with stage("deleting the cluster"):
            run("docker", "rm", "-f", "-v", *nodes)  # all that kind itself does, and kind need not be built for it
            KUBECONFIG.unlink(missing_ok=True)


def advertise_gpus() -> None:
    """Put nvidia.com/gpu into the nodes' status, where it is missing: kubelet forgets it when it restarts."""
    patch = json.dumps({"status": {key: {"nvidia.com/gpu": str(GPUS)} for key in ("capacity", "allocatable")}})
    for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]:
        if node["status"]["capacity"].get("nvidia.com/gpu") != str(GPUS):
            name = node["metadata"]["name"]
            kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)


def kubectl(*words: str) -> str:
    """Ask the cluster; raises Failed."""
    return output(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *words)


def _config() -> str:
    """kind's configuration of the cluster; each worker is a zone of its own."""
    text = (HERE / "kind.yaml").read_text().replace("hostPort: 8088", f"hostPort: {GATEWAY_PORT}")
    for number, _ in enumerate(WORKER_NODES, 1):
        text += f"- role: worker\n  labels: {{topology.kubernetes.io/zone: zone-{number}}}\n"
    return text


def _restarted() -> bool:
    """After a reboot of the machine the container is there, stopped; its API server's port is kept by Docker."""
    with stage("starting the stopped node"):
        try:
            run("docker", "start", NODE, *WORKER_NODES)
            _export()
            if WORKER_NODES:
                pod_network.join()
            wait_for(_ready, "the node", START_SECONDS)
        except CommandFailed:
            return False
    return True


def _export() -> None:
    KUBECONFIG.parent.mkdir(parents=True, exist_ok=True)
    run(BIN / "kind", "export", "kubeconfig", "--name", CLUSTER, "--kubeconfig", KUBECONFIG)


def _ready() -> bool:
    """The node takes pods, and names resolve in them."""
    nodes = [f"node/{name}" for name in (NODE, *WORKER_NODES)]
    return _is("Ready", *nodes) and _is("Available", "deployment/coredns", "-n", "kube-system")


def _is(condition: str, *what: str) -> bool:
    wait = ("wait", f"--for=condition={condition}", "--timeout=5s")
    return succeeds(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *wait, *what)
