"""A LoRA adapter without training, for the shape of a made model: small random matrices on q_proj and v_proj."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

RANK: Final = 8
_MODULES: Final = ("q_proj", "v_proj")


def write_adapter(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes a 16-bit adapter for a Llama's config.json in PEFT's format; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_MODULES),
        "base_model_name_or_path": "m",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(document))
    hidden, head = int(config["hidden_size"]), int(config["head_dim"])
    outputs = {"q_proj": int(config["num_attention_heads"]) * head, "v_proj": int(config["num_key_value_heads"]) * head}
    generator = np.random.default_rng(7)
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    offset = 0
    for layer in range(int(config["num_hidden_layers"])):
        for module in _MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, hidden)), ("lora_B", (outputs[module], RANK))):
                blob = generator.normal(0, 0.02, shape).astype("<f2").tobytes()
                end = offset + len(blob)
                header[f"{name}.{part}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
                blobs.append(blob)
                offset = end
    head_bytes = json.dumps(header).encode()
    file = struct.pack("<Q", len(head_bytes)) + head_bytes + b"".join(blobs)
    (folder / "adapter_model.safetensors").write_bytes(file)
    return folder
