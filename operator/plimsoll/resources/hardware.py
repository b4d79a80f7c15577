"""The model and GPUs of a service's engines, as far as its spec names them. Pure.

The shape of a model is known for some names on the hub, and a GPU type where a tier's nodeSelector names it. Nothing is
known of other models and GPUs, of engines that narrow the weights or guess tokens ahead, and of simulated ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.engine_model.roofline import ACCELERATORS, Accelerator, ModelShape
from plimsoll.core.planning.known_models import find_shape
from plimsoll.engines import vllm

HUB: Final = "hf://"
# Node labels that name a GPU type: of GPU feature discovery, GKE, EKS, Karpenter and AMD's labeller.
GPU_LABELS: Final = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "amd.com/gpu.product-name",
)
# By lower-case value. A value that stands for several types has the fastest and largest of them, since the limits are
# lower bounds. Shared cards and MIG slices have other values.
GPU_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nvidia-h100-80gb-hbm3": "H100-SXM",
        "nvidia-h100-80gb": "H100-SXM",
        "nvidia-h100-mega-80gb": "H100-SXM",
        "h100": "H100-SXM",
        "nvidia-h200": "H200",
        "nvidia-h200-141gb": "H200",
        "h200": "H200",
        "nvidia-a100-sxm4-80gb": "A100-80G",
        "nvidia-a100-80gb-pcie": "A100-80G",
        "nvidia-a100-80gb": "A100-80G",
        "a100": "A100-80G",
        "nvidia-a100-sxm4-40gb": "A100-40G",
        "nvidia-a100-pcie-40gb": "A100-40G",
        "nvidia-tesla-a100": "A100-40G",
        "nvidia-l40s": "L40S",
        "l40s": "L40S",
        "nvidia-l4": "L4",
        "l4": "L4",
        "nvidia-b200": "B200",
        "b200": "B200",
        "amd_instinct_mi300x_oam": "MI300X",
        "amd_instinct_mi300x": "MI300X",
    }
)
# Flags after which an engine reads fewer bytes for a token than the published weights have.
_UNKNOWN_COST_FLAGS: Final = (
    "--config",
    vllm.CPU_OFFLOAD,
    "--hf-overrides",
    "--load-format",
    "--quantization",
    vllm.SPECULATIVE_CONFIG,
)


def named_accelerator(node_selector: Mapping[str, str]) -> Accelerator | None:
    """Return the GPU type that the labels of a nodeSelector name; None if they name none or an unknown one."""
    values = (node_selector[label].lower() for label in GPU_LABELS if label in node_selector)
    return next((ACCELERATORS[GPU_TYPES[value]] for value in values if value in GPU_TYPES), None)


def known_shape(service: InferenceService, default_args: Sequence[str]) -> ModelShape | None:
    """Return the shape of the model; None if it, or what a token costs, is unknown. default_args: of the chart."""
    engine, uri = service.spec.engine, service.spec.model.uri
    args = (*default_args, *engine.args)
    has_short_flag = any(arg.startswith("-") and not arg.startswith("--") for arg in args)  # such as -q; none is read
    if has_short_flag or any(vllm.has_flag(args, flag) for flag in _UNKNOWN_COST_FLAGS):
        return None
    if engine.runtime != "vllm" or engine.speculative is not None or not uri.startswith(HUB):
        return None
    try:
        return find_shape(uri.removeprefix(HUB))
    except ValueError:
        return None
