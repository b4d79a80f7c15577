"""The names, ports, versions and folders of the local cluster, in one place."""

from __future__ import annotations

import os
from pathlib import Path

WORKERS = int(os.environ.get("PLIMSOLL_WORKERS") or 0)  # nodes beside the control plane's; with any: another cluster
CLUSTER = "plimsoll-nodes" if WORKERS else "plimsoll"
NODE = f"{CLUSTER}-control-plane"
WORKER_NODES = tuple(f"{CLUSTER}-worker{number if number > 1 else ''}" for number in range(1, WORKERS + 1))
REGISTRY = "plimsoll-registry"
REGISTRY_PORT = 5001  # on 127.0.0.1; pods and Docker both say localhost:5001
GATEWAY_PORT = 8089 if WORKERS else 8088  # on 127.0.0.1; node port 30088 inside
WHEELS_PORT = 5003  # on 127.0.0.1, only while images are built
GPUS = 16
LENIENT_RUNC = "/usr/local/bin/runc-lenient"  # on the machine and on the node

KUBERNETES_VARIABLE = "PLIMSOLL_KUBERNETES"  # names one of the two versions; else the machine decides
KUBERNETES = "v1.36.3"  # that programs and the node image are built of
PULLED_KUBERNETES = "v1.37.0"  # what this kind release was published with
BASE_IMAGE = "debian:bookworm-slim"
PULLED_NODE_IMAGE = f"kindest/node:{PULLED_KUBERNETES}"
PULLED_REGISTRY_IMAGE = "registry:2"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("PLIMSOLL_CACHE") or Path.home() / ".cache" / "plimsoll") / "cluster"
BIN = CACHE / "bin"
LOGS = ROOT / "build" / "log"
KUBECONFIG = ROOT / "build" / ("kubeconfig-nodes" if WORKERS else "kubeconfig")

DISK_GB_FIRST = 25  # Go modules 5, build cache 3, binaries 1, images twice (Docker's copy and the node's)
DISK_GB_LATER = 6
DOCKER_DATA = Path("/var/lib/docker")
PACKAGES = {
    "dockerd": "docker.io",
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "jq": "jq",
    "debootstrap": "debootstrap",
}
