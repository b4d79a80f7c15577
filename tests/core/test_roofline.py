"""Priors and floors from a model's configuration and a GPU's figures, against what was measured."""

from __future__ import annotations

import math
from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.engine_model.roofline import (
    ACCELERATORS,
    Accelerator,
    Efficiency,
    LoraSlots,
    ModelShape,
    kv_tokens,
    lora_bytes,
    model_shape,
    physical_floor,
    prior,
)
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.planning import known_models

H200, H100 = ACCELERATORS["H200"], ACCELERATORS["H100-SXM"]

LLAMA_8B: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, object] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
QWEN_32B: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "sliding_window": None,
    "use_sliding_window": False,
}
MIXTRAL: dict[str, object] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN_30B_A3B: dict[str, object] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# Fits to vLLM 0.26 on one H200: of whole runs, of a cool and of a hot card. The 70B's pair term is that of prompts
# measured alone, twice their square's coefficient: under load it could not be told from its any-prefill term.
MEASURED_8B = {
    "pooled": StepModel(4.88876e-3, -1.39002e-3, 2.11088e-5, 1.37287e-9, 1.52883e-5, 3.16481e-8),
    "cool": StepModel(4.91977e-3, -1.67349e-3, 1.91458e-5, 1.73962e-9, 1.11519e-5, 3.53261e-8),
    "hot": StepModel(4.74166e-3, -1.30016e-3, 2.26495e-5, 1.03542e-9, 1.81580e-5, 3.04844e-8),
}
MEASURED_70B = {
    "pooled": StepModel(2.06668e-2, 2.32424e-2, 1.02183e-4, 4.92664e-9, 7.64733e-5, 8.56825e-8),
    "hot": StepModel(2.08728e-2, 3.31152e-2, 9.69744e-5, 4.92664e-9, 7.06790e-5, 7.80545e-8),
}
SETS = [(LLAMA_8B, fit) for fit in MEASURED_8B.values()] + [(LLAMA_70B, fit) for fit in MEASURED_70B.values()]


def ratios(one: StepModel, other: StepModel) -> dict[str, float]:
    names = [field.name for field in fields(StepModel)]
    return {name: a / b for name, a, b in zip(names, astuple(one), astuple(other), strict=True) if b}


# Against the measurements


@pytest.mark.parametrize(("config", "fit"), SETS)
def test_physical_floor_is_below_measured_coefficients(config: dict[str, object], fit: StepModel) -> None:
    floor = physical_floor(model_shape(config), H200)
    assert all(mine >= least for mine, least in zip(astuple(fit), astuple(floor), strict=True))
    found = ratios(fit, floor)
    # And none is so far above it that the count of bytes or operations could be wrong by a factor.
    assert 1.4 < found["base_s"] < 1.6
    assert 1.3 < found["prefill_token_s"] < 1.65
    assert 1.8 < found["prefill_pair_s"] < 3.4
    assert 1.1 < found["cached_token_s"] < 1.3


@pytest.mark.parametrize(("config", "fit"), SETS)
def test_prior_is_near_measured_coefficients(config: dict[str, object], fit: StepModel) -> None:
    found = ratios(prior(model_shape(config), H200), fit)
    assert found["base_s"] == pytest.approx(1, abs=0.06)
    assert found["prefill_token_s"] == pytest.approx(1, abs=0.15)
    assert 0.65 < found["prefill_pair_s"] < 1.25
    assert 0.8 < found["sequence_s"] < 1.4
    assert found["cached_token_s"] == pytest.approx(1, abs=0.1)
    assert found["any_prefill_s"] == 0


@pytest.mark.parametrize(("config", "tokens"), [(LLAMA_8B, 919_824), (LLAMA_70B, 191_440)])
def test_kv_tokens_match_vllm_report(config: dict[str, object], tokens: int) -> None:
    assert kv_tokens(model_shape(config), H200) == pytest.approx(tokens, rel=0.03)


def test_model_shape_known_models_have_published_sizes() -> None:
    small, large = model_shape(LLAMA_8B), model_shape(LLAMA_70B)
    assert small.memory_bytes / 2**30 == pytest.approx(15.0, abs=0.05)
    assert large.memory_bytes / 2**30 == pytest.approx(67.7, abs=0.05)
    assert 2 * small.active_parameters == pytest.approx(13.96e9, rel=1e-3)
    assert (small.kv_bytes_per_token, large.kv_bytes_per_token) == (131_072, 327_680)
    mixtral, tiny = model_shape(MIXTRAL), model_shape(QWEN_30B_A3B)
    assert mixtral.memory_bytes / 2 == pytest.approx(46.7e9, rel=5e-3)
    assert mixtral.active_parameters + 2 * mixtral.output_parameters == pytest.approx(12.9e9, rel=5e-3)
    assert tiny.memory_bytes / 2 == pytest.approx(30.5e9, rel=5e-3)
    assert tiny.active_parameters + 2 * tiny.output_parameters == pytest.approx(3.35e9, rel=0.01)


def test_prior_two_h100_with_32b_matches_reference() -> None:
    shape = model_shape(QWEN_32B)
    assert kv_tokens(shape, H100, tensor=2) == pytest.approx(330_000, rel=0.03)
    found = prior(shape, H100, tensor=2)
    other = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2.0e-5, 4.6e-8)  # another roofline of the same
    assert all(1 <= ratio < 1.9 for ratio in ratios(found, other).values())
    assert all(
        mine >= least for mine, least in zip(astuple(other), astuple(physical_floor(shape, H100, 2)), strict=True)
    )


# What must hold of all

shapes = st.sampled_from([model_shape(c) for c in (LLAMA_8B, LLAMA_70B, QWEN_32B, MIXTRAL, QWEN_30B_A3B)])
gpus = st.sampled_from(sorted(ACCELERATORS.values(), key=lambda gpu: gpu.name))


@given(shapes, gpus, st.sampled_from([1, 2, 4, 8, 16]))
@settings(max_examples=40)
def test_prior_is_never_below_floor(shape: ModelShape, gpu: Accelerator, tensor: int) -> None:
    floor = physical_floor(shape, gpu, tensor)
    for efficiency in (Efficiency(), Efficiency(1, 1, 1, 1, 0, 0)):
        expected = prior(shape, gpu, tensor, efficiency)
        assert all(mine >= least * (1 - 1e-12) for mine, least in zip(astuple(expected), astuple(floor), strict=True))


@given(shapes, gpus, st.sampled_from([1, 2, 4]))
@settings(max_examples=25)
def test_prior_more_gpus_are_faster_and_hold_more_kv(shape: ModelShape, gpu: Accelerator, tensor: int) -> None:
    one, more = prior(shape, gpu, tensor), prior(shape, gpu, 2 * tensor)
    assert more.prefill_token_s < one.prefill_token_s
    assert physical_floor(shape, gpu, 2 * tensor).base_s == pytest.approx(physical_floor(shape, gpu, tensor).base_s / 2)
    held, wider = kv_tokens(shape, gpu, tensor), kv_tokens(shape, gpu, 2 * tensor)
    assert held is None or (wider is not None and wider > held)


def test_floor_kv_heads_are_replicated_beyond_their_count() -> None:
    shape = model_shape(LLAMA_70B)
    eight, sixteen = physical_floor(shape, H200, 8), physical_floor(shape, H200, 16)
    assert sixteen.cached_token_s == eight.cached_token_s
    assert sixteen.base_s == pytest.approx(eight.base_s / 2)


def test_prior_is_bytes_over_bandwidth_plus_flops_over_peak() -> None:
    gpu = Accelerator("round", 1e9, 1e9, 1e12, 2e12, "made up")
    shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_size=4, ffn_width=16, vocabulary=100)
    layer = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16
    floor = physical_floor(shape, gpu)
    assert floor.base_s == pytest.approx((2 * layer + 800) * 2 / 1e9)
    assert floor.prefill_token_s == pytest.approx(2 * 2 * layer / 1e12)
    assert floor.prefill_pair_s == pytest.approx(4 * 2 * 8 / 1e12)
    assert floor.cached_token_s == pytest.approx(2 * 2 * 1 * 4 * 2 / 1e9)
    assert floor.step_s(1, 0, 0, 0) == pytest.approx(floor.prefill_token_s)
    # Every expert is read, those of one token are computed; a floor reads no more than those.
    mixed = replace(shape, experts=4, experts_per_token=1)
    assert prior(mixed, gpu).base_s > 2.5 * physical_floor(mixed, gpu).base_s
    assert mixed.active_parameters == 2 * (layer + 8 * 4)


def test_prior_quantized_weights_read_faster() -> None:
    wide, narrow = model_shape({**LLAMA_70B, "quantization_config": None}), model_shape(LLAMA_70B)
    awq = model_shape({**LLAMA_70B, "quantization_config": {"quant_method": "awq", "bits": 4}})
    assert prior(narrow, H200).base_s < 0.6 * prior(wide, H200).base_s
    assert prior(narrow, H200).prefill_token_s == pytest.approx(prior(wide, H200).prefill_token_s / 2, rel=1e-3)
    assert prior(awq, H200).prefill_token_s == prior(wide, H200).prefill_token_s
    a100 = ACCELERATORS["A100-80G"]  # no 8-bit floating point
    assert prior(narrow, a100).prefill_token_s == prior(wide, a100).prefill_token_s
    assert kv_tokens(wide, H200) is None
    half = model_shape(LLAMA_8B, kv_bytes=1.0)
    assert half.kv_bytes_per_token == 65_536


def test_accelerator_table_is_plausible_and_read_only() -> None:
    assert set(ACCELERATORS) == {"H100-SXM", "H200", "A100-80G", "A100-40G", "L40S", "L4", "B200", "MI300X"}
    for name, gpu in ACCELERATORS.items():
        assert gpu.name == name
        assert "sheet" in gpu.source
        # Operations for each byte read, in 16 bits: a slip of a unit or a sparse peak would leave this range.
        assert 120 < gpu.flops_16bit / gpu.bandwidth_bytes_per_s < 450
        assert gpu.flops_8bit is None or gpu.flops_8bit / gpu.flops_16bit == pytest.approx(2, rel=0.02)
    with pytest.raises(TypeError):
        ACCELERATORS["H200"] = H100  # type: ignore[index]


# Reading a configuration


def test_model_shape_nested_config_and_defaults() -> None:
    assert model_shape({"model_type": "outer", "text_config": LLAMA_8B}) == model_shape(LLAMA_8B)
    bare = {key: value for key, value in LLAMA_8B.items() if key not in ("head_dim", "num_key_value_heads")}
    shape = model_shape(bare)
    assert (shape.head_size, shape.kv_heads) == (128, 32)
    tied = model_shape({**LLAMA_8B, "tie_word_embeddings": True})
    assert tied.memory_bytes == model_shape(LLAMA_8B).memory_bytes - 128256 * 4096 * 2
    compressed = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}},
    }
    assert model_shape({**LLAMA_8B, "quantization_config": compressed}).product_bytes == 1
    shared = {**QWEN_30B_A3B, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    assert model_shape(shared).shared_width == 5632


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"]
)
def test_model_shape_missing_key_raises_naming_key(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        model_shape({name: value for name, value in LLAMA_8B.items() if name != key})


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_model_shape_missing_moe_key_raises_naming_key(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        model_shape({name: value for name, value in QWEN_30B_A3B.items() if name != key})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": math.nan}, "vocab_size"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {}}}}, "quant_method"),
        ({"quantization_config": {"quant_method": "gptq"}}, "bits"),
        ({"quantization_config": "fp8"}, "quantization_config"),
    ],
)
def test_model_shape_unsupported_config_raises(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        model_shape({**LLAMA_8B, **change})


def test_roofline_invalid_arguments_raise() -> None:
    assert model_shape({**LLAMA_8B, "sliding_window": 131072}) == model_shape(LLAMA_8B)
    with pytest.raises(ValueError, match="decoder_sparse_step"):
        model_shape({**QWEN_30B_A3B, "decoder_sparse_step": 2})
    shape = model_shape(LLAMA_8B)
    for tensor in (0, -1, 3, 64):
        with pytest.raises(ValueError, match="tensor"):
            prior(shape, H200, tensor)
    with pytest.raises(ValueError, match="experts_per_token"):
        replace(shape, experts_per_token=2)
    for bad in (math.nan, math.inf, 0.0, -1.0):
        with pytest.raises(ValueError, match="bandwidth"):
            replace(H200, bandwidth_bytes_per_s=bad)
        with pytest.raises(ValueError, match="hidden"):
            replace(shape, hidden=bad)
        with pytest.raises(ValueError, match="compute"):
            Efficiency(compute=bad)
        with pytest.raises(ValueError, match="utilisation"):
            kv_tokens(shape, H200, utilisation=bad)
    with pytest.raises(ValueError, match="layer_s"):
        Efficiency(layer_s=-1.0)
    with pytest.raises(ValueError, match="token_budget"):
        kv_tokens(shape, H200, token_budget=0)


def test_kv_tokens_without_memory_is_none() -> None:
    assert kv_tokens(model_shape(LLAMA_8B), ACCELERATORS["L4"], utilisation=0.5) is None
    found = kv_tokens(model_shape(LLAMA_8B), ACCELERATORS["L4"])
    assert found is not None
    assert 0 < found < 50_000
    assert np.isfinite(found)


def test_adapters_take_what_vllm_reserves() -> None:
    """On one H200, engines of an 8B with four places of rank 16 held 768 to 6,352 tokens less than others."""
    shape = known_models.find_shape("Qwen3-8B")
    alone, with_adapters = (kv_tokens(shape, H200, lora=lora) for lora in (None, LoraSlots(4, 16)))
    assert alone is not None
    assert with_adapters is not None
    assert 768 < alone - with_adapters < 6352
    assert lora_bytes(shape, LoraSlots(8, 32)) == 4 * lora_bytes(shape, LoraSlots(4, 16))
    halves = lora_bytes(shape, LoraSlots(4, 16), 2)
    assert 0.5 < halves / lora_bytes(shape, LoraSlots(4, 16)) < 1.0, "one of each pair is whole on each GPU"
    with pytest.raises(ValueError, match="mixture"):
        lora_bytes(known_models.find_shape("Qwen3-30B-A3B"), LoraSlots(4, 16))
