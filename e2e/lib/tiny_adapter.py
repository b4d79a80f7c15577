"""LoRA adapters for the tiny model of the engine image, made without torch.

A file in the safetensors format is the length of a JSON header, the header, and the numbers. The weights are drawn from
a seed, so that adapters of different seeds give different answers.
"""

from __future__ import annotations

import base64
import json
import random
import struct

from e2e.lib.kube import Object

RANK, LAYERS, HIDDEN = 8, 4, 256  # of the tiny model: see engine-image/image/make_tiny_model.py
OUT_FEATURES = {"q_proj": 256, "v_proj": 128}
SCALE = 0.5  # large enough that greedy answers differ


def adapter_files(seed: int) -> dict[str, bytes]:
    """The two files of an adapter."""
    draw = random.Random(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(LAYERS):
        for module, features in OUT_FEATURES.items():
            for half, shape in (("A", (RANK, HIDDEN)), ("B", (features, RANK))):
                count = shape[0] * shape[1]
                numbers = struct.pack(f"<{count}f", *(draw.gauss(0.0, SCALE) for _ in range(count)))
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{half}.weight"
                offsets = [len(data), len(data) + len(numbers)]
                header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
                data += numbers
    text = json.dumps(header).encode()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "/models/tiny",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(OUT_FEATURES),
    }
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": struct.pack("<Q", len(text)) + text + bytes(data),
    }


def adapter_config_map(name: str, seed: int) -> Object:
    """A ConfigMap with an adapter, to be mounted as its directory."""
    files = {key: base64.b64encode(content).decode() for key, content in adapter_files(seed).items()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "binaryData": files}
