"""Built-in model shapes: the keys of the published config.json that cost time or memory.

`roofline.model_shape` reads each like a file. Names compare without case, owner, and the suffixes of tuned copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from plimsoll.core.engine_model.roofline import ModelShape, model_shape

_WEIGHT_BYTES: Final = {"bf16": 2.0, "fp8": 1.0}
_TUNED_SUFFIXES: Final = ("-instruct", "-it", "-base", "-chat")


def _config(kind: str, sizes: tuple[int, int, int, int, int, int, int], **extra: Any) -> dict[str, Any]:
    keys = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size",
    )  # fmt: skip
    return {"model_type": kind, **dict(zip(keys, sizes, strict=True)), **extra}


def _experts(width: int, number: int, per_token: int) -> dict[str, Any]:
    return {"moe_intermediate_size": width, "num_experts": number, "num_experts_per_tok": per_token}


# layers, hidden, heads, key-value heads, head size, network width, vocabulary
KNOWN_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama-3.1-8B": _config("llama", (32, 4096, 32, 8, 128, 14336, 128256)),
        "Llama-3.1-70B": _config("llama", (80, 8192, 64, 8, 128, 28672, 128256)),
        "Llama-3.3-70B": _config("llama", (80, 8192, 64, 8, 128, 28672, 128256)),
        "Qwen3-8B": _config("qwen3", (36, 4096, 32, 8, 128, 12288, 151936)),
        "Qwen3-32B": _config("qwen3", (64, 5120, 64, 8, 128, 25600, 151936)),
        "Qwen3-30B-A3B": _config("qwen3_moe", (48, 2048, 32, 4, 128, 6144, 151936), **_experts(768, 128, 8)),
        "Qwen3-235B-A22B": _config("qwen3_moe", (94, 4096, 64, 4, 128, 12288, 151936), **_experts(1536, 128, 8)),
    }
)
# Known by name, and rejected: their costs would be guesses.
UNSUPPORTED_MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DeepSeek-V3": "its cache is one latent vector a token (MLA), and its first layers are dense: neither is known",
        "DeepSeek-R1": "its cache is one latent vector a token (MLA), and its first layers are dense: neither is known",
        "gpt-oss-20b": "half of its layers attend to a window only, whose costs are not known",
        "gpt-oss-120b": "half of its layers attend to a window only, whose costs are not known",
    }
)


def find_shape(name: str, weights: str | None = None, kv_bytes: float = 2.0) -> ModelShape:
    """The shape of a model by its name, such as `Llama-3.1-8B` or `meta-llama/Llama-3.1-8B-Instruct`.

    weights: `bf16` or `fp8`, None for 16 bits. Raises a ValueError that lists the known models.
    """
    normalized = _normalize_name(name)
    for known, reason in UNSUPPORTED_MODELS.items():
        if normalized == _normalize_name(known):
            raise ValueError(f"{known} cannot be planned: {reason}; give a measured profile of it in its place")
    for known, config in KNOWN_CONFIGS.items():
        if normalized == _normalize_name(known):
            return with_weights(model_shape(config, kv_bytes), weights)
    raise ValueError(
        f"{name!r} is no model known by name: known are {', '.join(KNOWN_CONFIGS)}, or the path of a config.json"
    )


def find_config(name: str) -> Mapping[str, Any] | None:
    """The config.json of a model by its name, as `find_shape` reads it; None for a model that is not known."""
    normalized = _normalize_name(name)
    return next((config for known, config in KNOWN_CONFIGS.items() if normalized == _normalize_name(known)), None)


def with_weights(shape: ModelShape, weights: str | None) -> ModelShape:
    """The same shape with another width of the layers' weights and their products. Raises ValueError."""
    if weights is None:
        return shape
    if weights not in _WEIGHT_BYTES:
        raise ValueError(f"{weights!r} is no width of weights: {' or '.join(_WEIGHT_BYTES)}")
    return replace(shape, weight_bytes=_WEIGHT_BYTES[weights], product_bytes=_WEIGHT_BYTES[weights])


def _normalize_name(name: str) -> str:
    normalized = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for suffix in _TUNED_SUFFIXES:
        normalized = normalized.removesuffix(suffix)
    return normalized
