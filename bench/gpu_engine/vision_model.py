"""A Qwen2.5-VL without weights: its shape, its processor, its chat template, and a real tokenizer from a package.

Problem: what an engine counts for a picture follows from the model's processor, and for tools from its chat template.
Neither is in a model of plain words (`bench.hardware.dummy_models`).
Idea: the published shape and processor of the 3B. The tokenizer is Anthropic's, which LiteLLM carries; Qwen's special
tokens follow its own. The chat template is ChatML, with tools where Qwen writes them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_FIRST_SPECIAL: Final = 65_000  # after the tokenizer's own
_IDS: Final = {word: _FIRST_SPECIAL + number for number, word in enumerate(SPECIAL)}
_TEXT: Final[Mapping[str, Any]] = {
    "model_type": "qwen2_5_vl_text",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
    "vocab_size": 65_536,
    "tie_word_embeddings": True,
    "bos_token_id": _IDS["<|endoftext|>"],
    "eos_token_id": _IDS["<|im_end|>"],
}
_VISION: Final[Mapping[str, Any]] = {
    "model_type": "qwen2_5_vl_vision",
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}
_TINY_TEXT: Final = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
                     "num_hidden_layers": 1}  # fmt: skip
_TINY_VISION: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 256,
                       "fullatt_block_indexes": []}  # fmt: skip
_PICTURES: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_TEMPLATE: Final = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content if messages[0].content is string else \
messages[0].content[0].text }}

{% endif %}# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}<|im_start|>\
{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>
{% endif %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}
{%- for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.text is defined %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- if message.role == 'tool' %}
</tool_response>{% endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def config(*, tiny: bool = False) -> dict[str, Any]:
    """config.json of the model; `tiny` for a rehearsal on a CPU."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "float32" if tiny else "bfloat16",
        "text_config": {**_TEXT, **(_TINY_TEXT if tiny else {})},
        "vision_config": {**_VISION, **(_TINY_VISION if tiny else {})},
        "image_token_id": _IDS["<|image_pad|>"],
        "video_token_id": _IDS["<|video_pad|>"],
        "vision_start_token_id": _IDS["<|vision_start|>"],
        "vision_end_token_id": _IDS["<|vision_end|>"],
        "tie_word_embeddings": True,
    }


def write_model(folder: Path, *, tiny: bool = False) -> Path:
    """Makes the model's folder and returns it. Needs the package LiteLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": _TEXT["max_position_embeddings"],
        "additional_special_tokens": list(SPECIAL),
    }
    videos = {**_PICTURES, "video_processor_type": "Qwen2VLVideoProcessor"}
    for file, document in (
        ("config.json", config(tiny=tiny)),
        ("generation_config.json", {"eos_token_id": [_IDS["<|im_end|>"], _IDS["<|endoftext|>"]]}),
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", tokenizer_config),
        ("preprocessor_config.json", _PICTURES),
        ("video_preprocessor_config.json", {k: v for k, v in videos.items() if k != "image_processor_type"}),
    ):
        (folder / file).write_text(json.dumps(document))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _tokenizer() -> dict[str, Any]:
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        raise RuntimeError("the tokenizer is in the package LiteLLM: install requirements/clients.txt")
    file = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers" / "anthropic_tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": _IDS[word], "content": word, "special": True, **flags} for word in SPECIAL]
    return tokenizer
