"""LoRA adapters without trained weights for the made model: drawn numbers in the shapes of its attention.

Problem: adapters of the model would have to be carried, and what they cost follows from their shapes.
Idea: small numbers are drawn for two projections of each layer, in the form in which `peft` writes adapters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.hardware.dummy_models import CONFIGS
from e2e.gpu.scenarios import ADAPTERS

_RANK: Final = 8
_PREFIX: Final = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"


def write_all(folder: Path) -> None:
    """The folders of all adapters, unless they are there."""
    for number, name in enumerate(ADAPTERS):
        if not (folder / name).exists():
            write(folder / name, CONFIGS["8b"], number)


def write(folder: Path, model: Any, seed: int) -> None:
    """One adapter for a model with this config.json."""
    generator = np.random.default_rng(seed)
    heads, kv_heads, size = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, width in (("q_proj", heads * size), ("v_proj", kv_heads * size)):
            for half, shape in (("A", (_RANK, model["hidden_size"])), ("B", (width, _RANK))):
                drawn = generator.normal(0.0, 0.01, shape).astype(np.float16)
                tensors[_PREFIX.format(layer, name, half)] = drawn
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "made",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def safetensors(tensors: Mapping[str, npt.NDArray[np.float16]]) -> bytes:
    """The tensors as one file: the length of a table, the table, all numbers in its order."""
    table, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        table[name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": (begin, end)}
        begin = end
    raw = json.dumps(table).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensor.tobytes() for tensor in tensors.values())
