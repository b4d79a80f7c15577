"""Names, addresses and folders of the node, in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
ROOT: Final = Path(os.environ.get("PLIMSOLL_NODE_ROOT", "/var/lib/plimsoll-node"))  # everything the node has and writes
BIN: Final = ROOT / "bin"
DEBIAN: Final = ROOT / "debian"
IMAGES: Final = ROOT / "images"
ENGINE: Final = ROOT / "engine"
LOGS: Final = ROOT / "log"
PARTS: Final = ROOT / "parts"
CACHES: Final = ROOT / "caches"  # of compilers, kept from one engine to the next
DEVICE_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")  # kubelet's, whatever its root folder is
KUBECONFIG: Final = ROOT / "kubeconfig"

NODE: Final = "gpu-node"
NODE_IP: Final = "172.30.99.1"
POD_NETWORK: Final = "10.244.0.0/24"
SERVICE_NETWORK: Final = "10.96.0.0/16"
API_SERVICE_IP: Final = "10.96.0.1"
GATEWAY_PORT: Final = 30088
GATEWAY_URL: Final = f"http://{NODE_IP}:{GATEWAY_PORT}"

SYSTEM: Final = "plimsoll-system"
NAMESPACE: Final = "gpu"
RELEASE: Final = "plimsoll"
REGISTRY: Final = "localhost/plimsoll"

MODELS: Final = Path("/opt/models")  # in the engine's image, as is the environment
HUB_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"  # its shape is the made model's; a folder below MODELS
ENVIRONMENT: Final = Path("/opt/vllm")
OFFLINE: Final = ("HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "DO_NOT_TRACK=1", "VLLM_USE_FLASHINFER_SAMPLER=0")

PIECE_BYTES: Final = 45_500_000  # at most in one transfer, beside the checkout
ARCHIVES: Final = ("engine", "node", "images")  # in the order in which they travel: the longest work begins first
NODE_PROGRAMS: Final = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
    "coredns",
    "pki",
)


def image(name: str) -> str:
    """The reference of one of the project's images on the node."""
    return f"{REGISTRY}/{name}:dev"
