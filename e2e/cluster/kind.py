"""The cluster itself: one node, made by kind; brought back after the machine was restarted."""

from __future__ import annotations

import json

from e2e.cluster.docker import container
from e2e.cluster.planning import ClusterStep, cluster_step
from e2e.cluster.settings import BIN, CLUSTER, GPUS, HERE, KUBECONFIG, NODE
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
        with stage("creating the cluster"):
            run(
                BIN / "kind",
                "create",
                "cluster",
                "--name",
                CLUSTER,
                "--image",
                image,
                "--config",
                HERE / "kind.yaml",
                "--kubeconfig",
                KUBECONFIG,
                "--wait",
                "120s",
            )
    _export()
    wait_for(_ready, "the node", START_SECONDS)


def delete() -> None:
    """Remove the cluster, if there is one."""
    if container(NODE) is not None:
        with stage("deleting the cluster"):
            run("docker", "rm", "-f", "-v", NODE)  # all that kind itself does, and kind need not be built for it
            KUBECONFIG.unlink(missing_ok=True)


def advertise_gpus() -> None:
    """Put nvidia.com/gpu into the node's status, where it is missing: kubelet forgets it when it restarts."""
    node = json.loads(kubectl("get", "node", NODE, "-o", "json"))
    if node["status"]["capacity"].get("nvidia.com/gpu") == str(GPUS):
        return
    patch = {"status": {key: {"nvidia.com/gpu": str(GPUS)} for key in ("capacity", "allocatable")}}
    kubectl("patch", "node", NODE, "--subresource=status", "--type=merge", "-p", json.dumps(patch))


def kubectl(*words: str) -> str:
    """Ask the cluster; raises Failed."""
    return output(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *words)


def _restarted() -> bool:
    """After a reboot of the machine the container is there, stopped; its API server's port is kept by Docker."""
    with stage("starting the stopped node"):
        try:
            run("docker", "start", NODE)
            _export()
            wait_for(_ready, "the node", START_SECONDS)
        except CommandFailed:
            return False
    return True


def _export() -> None:
    KUBECONFIG.parent.mkdir(parents=True, exist_ok=True)
    run(BIN / "kind", "export", "kubeconfig", "--name", CLUSTER, "--kubeconfig", KUBECONFIG)


def _ready() -> bool:
    """The node takes pods, and names resolve in them."""
    return _is("Ready", f"node/{NODE}") and _is("Available", "deployment/coredns", "-n", "kube-system")


def _is(condition: str, *what: str) -> bool:
    wait = ("wait", f"--for=condition={condition}", "--timeout=5s")
    return succeeds(BIN / "kubectl", "--kubeconfig", KUBECONFIG, *wait, *what)
