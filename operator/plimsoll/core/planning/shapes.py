"""Model shapes that need no file: what their published config.json says, in the keys that cost time or memory.

Each is read by `roofline.model_shape`, as a file is. Names compare without case, owner, and the words of a tuned copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from plimsoll.core.roofline import ModelShape, model_shape

_NARROW: Final = {"bf16": 2.0, "fp8": 1.0}
_TUNED: Final = ("-instruct", "-it", "-base", "-chat")


def _config(kind: str, sizes: tuple[int, int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    keys = (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size",
    )  # fmt: skip
    return {"model_type": kind, **dict(zip(keys, sizes, strict=True)), **more}


def _experts(width: int, number: int, each: int) -> dict[str, Any]:
    return {"moe_intermediate_size": width, "num_experts": number, "num_experts_per_tok": each}


# layers, hidden, heads, key-value heads, head size, network width, vocabulary
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
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
# Known by name, and refused: their costs would be guessed.
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "DeepSeek-V3": "its cache is one latent vector a token (MLA), and its first layers are dense: neither is known",
        "DeepSeek-R1": "its cache is one latent vector a token (MLA), and its first layers are dense: neither is known",
        "gpt-oss-20b": "half of its layers attend to a window only, whose costs are not known",
        "gpt-oss-120b": "half of its layers attend to a window only, whose costs are not known",
    }
)


def find(name: str, weights: str | None = None, kv_bytes: float = 2.0) -> ModelShape:
    """The shape of a model by its name, such as `Llama-3.1-8B` or `meta-llama/Llama-3.1-8B-Instruct`.

    weights: `bf16` or `fp8`, None for 16 bits. Raises ValueError that says what is known.
    """
    wanted = _plain(name)
    for known, why in REFUSED.items():
        if wanted == _plain(known):
            raise ValueError(f"{known} cannot be planned: {why}; give a measured profile of it in its place")
    for known, config in SHAPES.items():
        if wanted == _plain(known):
            return with_weights(model_shape(config, kv_bytes), weights)
    raise ValueError(f"{name!r} is no model known by name: known are {', '.join(SHAPES)}, or the path of a config.json")


def with_weights(shape: ModelShape, weights: str | None) -> ModelShape:
    """The same with its layers' weights, and their products, in another width. Raises ValueError."""
    if weights is None:
        return shape
    if weights not in _NARROW:
        raise ValueError(f"{weights!r} is no width of weights: {' or '.join(_NARROW)}")
    return replace(shape, weight_bytes=_NARROW[weights], product_bytes=_NARROW[weights])


def _plain(name: str) -> str:
    plain = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for word in _TUNED:
        plain = plain.removesuffix(word)
    return plain
