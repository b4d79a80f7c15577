"""Folders of models without weights: a config.json and a tokenizer of plain words, for vLLM's `--load-format dummy`.

Problem: the speed of an engine follows from a model's shape, so a measurement needs no real weights.

Idea: config.json has the shape, vLLM draws random weights, and the text "w17 w4 w9" is exactly three tokens, so no
tokenizer has to be downloaded. Prompts are sent as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_SPECIAL: Final = ("<unk>", "<s>", "</s>")
_TEMPLATE: Final = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

# Shapes of published models, from their config.json: Llama-3.1-8B and Qwen3-30B-A3B.
_PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    **_PUBLISHED,
    "8b-fp8": {
        **_PUBLISHED["8b"],
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    },
}


def write_model(folder: Path, name: str) -> Path:
    """Makes the model's folder in `folder` and returns it. Raises KeyError for a name that is not in CONFIGS."""
    model_folder = folder / name
    model_folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[name]
    vocabulary = {word: number for number, word in enumerate(_SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(_SPECIAL), int(config["vocab_size"]))}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(number, word) for number, word in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": _SPECIAL[0]},
    }
    config_text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "model_max_length": config["max_position_embeddings"],
        "chat_template": _TEMPLATE,
    }
    for file, document in (
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config_text),
    ):
        (model_folder / file).write_text(json.dumps(document))
    return model_folder


def _special_token(number: int, word: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": word, "special": True, **flags}
