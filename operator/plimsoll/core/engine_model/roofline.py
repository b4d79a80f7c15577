"""Roofline of a model on an accelerator before any measurement: a prior, and a floor on step times.

Problem: the first replicas of a new model must be sized before an engine has run. A wrong fit (an overload, a reset
counter) implies speeds that no hardware has.

Idea: every coefficient of a step is bytes over memory bandwidth, or operations over peak arithmetic throughput. Both
counts follow from the model's configuration, and both rates from the accelerator's data sheet. The full rates of the
data sheet give the floor. The shares of them that engines reach, and a launch cost per layer, give the prior.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from plimsoll.core.engine_model.step_time import StepModel

_MIB: Final = 1024**2

# Decoders with full attention in every layer, separate keys and values, and networks of three matrices.
_DENSE: Final = frozenset({"gemma", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"})
# Mixtures, with the keys of their number of experts and of one expert's width.
_MIXTURES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "mixtral": ("num_local_experts", "intermediate_size"),
        "qwen2_moe": ("num_experts", "moe_intermediate_size"),
        "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    }
)


@dataclass(frozen=True)
class Accelerator:
    """One GPU's figures: bytes of memory, bytes per second, and dense (not sparse) operations per second.

    flops_8bit is None without 8-bit floating-point units; such products are computed in 16 bits.
    """

    name: str
    memory_bytes: float  # as the driver reports it, error correction and reserves deducted
    bandwidth_bytes_per_s: float
    flops_16bit: float
    flops_8bit: float | None
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bandwidth_bytes_per_s", "flops_16bit", "flops_8bit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and above 0, not {value}")


def _from_data_sheet(
    name: str, mib: int, tb_per_s: float, tflops: float, tflops_8bit: float | None, origin: str
) -> Accelerator:
    flops_8bit = None if tflops_8bit is None else tflops_8bit * 1e12
    return Accelerator(name, mib * float(_MIB), tb_per_s * 1e12, tflops * 1e12, flops_8bit, origin)


# Bandwidth and dense peaks are those of the vendors' public data sheets, quoted from memory and not looked up
# again; sheets that print sparse peaks are halved. Memory is what nvidia-smi or amd-smi reports on such a card.
ACCELERATORS: Final[Mapping[str, Accelerator]] = MappingProxyType(
    {
        a.name: a
        for a in (
            _from_data_sheet(
                "H100-SXM", 81_559, 3.35, 989.4, 1978.9, "NVIDIA H100 Tensor Core GPU data sheet, SXM5 80 GB"
            ),
            _from_data_sheet("H200", 143_771, 4.8, 989.4, 1978.9, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
            _from_data_sheet(
                "A100-80G", 81_920, 2.039, 312.0, None, "NVIDIA A100 80GB Tensor Core GPU data sheet, SXM4"
            ),
            _from_data_sheet(
                "A100-40G", 40_960, 1.555, 312.0, None, "NVIDIA A100 Tensor Core GPU data sheet, SXM4 40 GB"
            ),
            _from_data_sheet("L40S", 46_068, 0.864, 362.05, 733.0, "NVIDIA L40S GPU data sheet"),
            _from_data_sheet(
                "L4", 23_034, 0.3, 121.0, 242.5, "NVIDIA L4 Tensor Core GPU data sheet, sparse peaks halved"
            ),
            _from_data_sheet(
                "B200", 183_359, 8.0, 2250.0, 4500.0, "NVIDIA HGX B200 data sheet, eighth of a board, halved"
            ),
            _from_data_sheet("MI300X", 196_592, 5.3, 1307.4, 2614.9, "AMD Instinct MI300X accelerator data sheet"),
        )
    }
)


@dataclass(frozen=True)
class ModelShape:
    """The figures of a decoder's configuration that cost time and memory. Widths in numbers, bytes per value.

    experts 1 means a dense model; ffn_width is one expert's width, shared_width that of the part that every token
    passes.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_width: int
    vocabulary: int
    weight_bytes: float = 2.0  # of the layers' matrices; embeddings and the output layer have 16 bits
    product_bytes: float = 2.0  # of both operands in their products: 1 if activations are narrow too
    kv_bytes: float = 2.0
    experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    tied: bool = False  # one matrix embeds and reads out

    def __post_init__(self) -> None:
        may_be_0 = {"shared_width", "tied"}
        for field in fields(self):
            value = getattr(self, field.name)
            if not (0 if field.name in may_be_0 else 1e-9) <= value < math.inf:
                raise ValueError(f"{field.name} must be finite and above 0, not {value}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token} of only {self.experts} experts")

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of one token's keys and values: 2 layers kv_heads head_size bytes."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * self.kv_bytes

    @property
    def layer_parameters(self) -> float:
        """Parameters of all layers' matrices in memory, every expert included."""
        return self._layers(self.experts)

    @property
    def active_parameters(self) -> float:
        """Parameters of the layers that one token passes."""
        return self._layers(self.experts_per_token)

    @property
    def output_parameters(self) -> float:
        """Parameters of the output layer, which computes only sampled positions."""
        return float(self.vocabulary * self.hidden)

    @property
    def memory_bytes(self) -> float:
        """Bytes of all weights."""
        embeddings = (1 if self.tied else 2) * self.output_parameters
        return self.layer_parameters * self.weight_bytes + embeddings * 2.0

    def _layers(self, experts: int) -> float:
        attention = 2.0 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        # Three matrices: gate, up and down.
        networks = 3.0 * self.hidden * (self.ffn_width * experts + self.shared_width)
        return (attention + router + networks) * self.layers


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's rates that engines reach. Shares are above 0 and at most 1; raises ValueError.

    The values are rounded from measurements of two models on one H200 with vLLM 0.26 (an 8B in 16 bits, a 70B in 8):
    weights and cache at 0.80 to 0.87 of the bandwidth (a plain copy reaches 0.89), prefill's products at 0.57 to 0.69
    of the peak, its attention at 0.39 to 0.54, and 33 to 45 us of launches per layer.
    """

    bandwidth: float = 0.85
    compute: float = 0.65
    attention: float = 0.45
    tensor_scaling: float = 0.9  # of the speed-up at each doubling of the GPUs that share a layer
    layer_s: float = 40e-6
    layer_reduce_s: float = 20e-6  # two sums over the GPUs of a layer, where there are several

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                if not 0 <= value < math.inf:
                    raise ValueError(f"{field.name} must be finite and 0 or more, not {value}")
            elif not 0 < value <= 1:
                raise ValueError(f"{field.name} must lie above 0 and at most at 1, not {value}")


def model_shape(config: Mapping[str, object], kv_bytes: float = 2.0) -> ModelShape:
    """The shape in a Hugging Face config.json, read into a dict. kv_bytes: per cached value, 1 for an fp8 cache.

    Weights that are not quantised count 16 bits, because engines cast wider ones. Raises a ValueError that names a key
    that is missing, out of range, or of unknown cost (another architecture, sliding windows).
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    model_type = config.get("model_type")
    if model_type not in _DENSE and model_type not in _MIXTURES:
        known_types = ", ".join(sorted(_DENSE | set(_MIXTURES)))
        raise ValueError(f"model_type is {model_type!r}, whose costs are not known; known are {known_types}")
    _reject_sliding_window(config)
    hidden, heads = _positive_int(config, "hidden_size"), _positive_int(config, "num_attention_heads")
    weight_bytes, product_bytes = _quantization_bytes(config.get("quantization_config"))
    shape = ModelShape(
        layers=_positive_int(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_positive_int(config, "num_key_value_heads", heads),
        head_size=_positive_int(config, "head_dim", hidden // heads),
        ffn_width=_positive_int(config, "intermediate_size"),
        vocabulary=_positive_int(config, "vocab_size"),
        weight_bytes=weight_bytes,
        product_bytes=product_bytes,
        kv_bytes=kv_bytes,
        tied=config.get("tie_word_embeddings", model_type == "gemma") is True,
    )
    return _with_experts(shape, config, *_MIXTURES[str(model_type)]) if model_type in _MIXTURES else shape


def _with_experts(shape: ModelShape, config: Mapping[str, object], number: str, width: str) -> ModelShape:
    for key, dense_value in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(key, dense_value) != dense_value:
            raise ValueError(f"{key} is {config[key]!r}: layers without experts are not known here")
    shared = "shared_expert_intermediate_size"
    return replace(
        shape,
        ffn_width=_positive_int(config, width),
        experts=_positive_int(config, number),
        experts_per_token=_positive_int(config, "num_experts_per_tok"),
        shared_width=_positive_int(config, shared) if config.get(shared) else 0,
    )


def _reject_sliding_window(config: Mapping[str, object]) -> None:
    """Reject layers with sliding-window attention: they hold and read less, so the floor would be too high."""
    window = config.get("sliding_window")
    max_context = config.get("max_position_embeddings")
    window_enabled = window is not None and config.get("use_sliding_window", True) is not False
    if window_enabled and not (isinstance(window, int) and isinstance(max_context, int) and window >= max_context):
        raise ValueError(f"sliding_window is {window!r}: attention to a window is not known here")


def _positive_int(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{key} is missing from the model's configuration")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a whole number of at least 1, not {value!r}")
    return value


def _quantization_bytes(config: object) -> tuple[float, float]:
    """Bytes of a weight and of the operands in products, from `quantization_config` (None: not quantised)."""
    if config is None:
        return 2.0, 2.0
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config must be a mapping, not {config!r}")
    method = config.get("quant_method")
    if method == "fp8":
        return 1.0, 1.0
    if method in ("awq", "gptq"):
        return _positive_int(config, "bits") / 8, 2.0
    if method == "compressed-tensors" and isinstance(config.get("config_groups"), Mapping):
        groups = [group for group in config["config_groups"].values() if isinstance(group, Mapping)]
        weights = [weight for group in groups if isinstance(weight := group.get("weights"), Mapping)]
        if weights and len(weights) == len(groups):
            narrow = all(group.get("input_activations") for group in groups)
            return max(_positive_int(weight, "num_bits") for weight in weights) / 8, 1.0 if narrow else 2.0
    raise ValueError(f"quantization_config.quant_method is {method!r}, whose widths are not known here")


def prior(shape: ModelShape, gpu: Accelerator, tensor: int = 1, efficiency: Efficiency | None = None) -> StepModel:
    """Return the expected step model of a model on `tensor` GPUs, before any measurement.

    The base reads all weights (in a mixture of experts every expert, as from a few dozen sequences on) and launches
    each layer. The products of a decoding sequence cost their time at full peak, because they overlap in part with the
    reading. any_prefill_s is 0: it was -29 % of the base in one model and +112 % in another, so it has no prior. Raises
    ValueError.
    """
    e = efficiency or Efficiency()
    gpus = _validate_tensor_parallel(shape, tensor)
    speed = gpus * e.tensor_scaling ** math.log2(gpus)
    read = gpu.bandwidth_bytes_per_s * e.bandwidth * speed
    peak = (gpu.flops_8bit if shape.product_bytes <= 1 and gpu.flops_8bit is not None else gpu.flops_16bit) * speed
    launches = shape.layers * (e.layer_s + (e.layer_reduce_s if gpus > 1 else 0.0))
    return StepModel(
        base_s=_step_bytes(shape, shape.layer_parameters) / read + launches,
        any_prefill_s=0.0,
        prefill_token_s=2.0 * shape.active_parameters / (peak * e.compute),
        prefill_pair_s=_pair_flops(shape) / (gpu.flops_16bit * speed * e.attention),
        sequence_s=2.0 * (shape.active_parameters + shape.output_parameters) / peak,
        cached_token_s=_kv_bytes_read(shape, gpus) * gpus / read,
    )


def physical_floor(shape: ModelShape, gpu: Accelerator, tensor: int = 1) -> StepModel:
    """Lower bound of every coefficient: the data sheet's full rates, no launches, and GPUs that share without loss.

    Each bound is for its own kind of step: base and cached tokens for one bound by memory (of a mixture only the
    experts that one token passes), prefill tokens and pairs for one bound by compute. A compute-bound step hides the
    reading of weights, so any_prefill may subtract the whole base. Products of decoding overlap with that reading, so
    only the bytes of the sampled logits remain for a sequence. Raises ValueError.
    """
    gpus = _validate_tensor_parallel(shape, tensor)
    base_s = _step_bytes(shape, shape.active_parameters) / (gpu.bandwidth_bytes_per_s * gpus)
    return StepModel(
        base_s=base_s,
        any_prefill_s=-base_s,
        prefill_token_s=2.0 * shape.active_parameters / (_max_flops(shape, gpu) * gpus),
        prefill_pair_s=_pair_flops(shape) / (gpu.flops_16bit * gpus),
        sequence_s=2.0 * shape.vocabulary / (gpu.bandwidth_bytes_per_s * gpus),
        cached_token_s=_kv_bytes_read(shape, gpus) / gpu.bandwidth_bytes_per_s,
    )


class LoraSlots(NamedTuple):
    """Places of LoRA adapters in GPU memory: vLLM's max_loras, and its max_lora_rank."""

    loras: int
    rank: int


def lora_bytes(shape: ModelShape, slots: LoraSlots, tensor: int = 1) -> float:
    """Bytes that vLLM reserves for adapters on each of `tensor` GPUs, whether or not they are loaded.

    For each matrix of a layer, two of the rank in 16 bits. Of the inputs of attention and feed-forward, tensor
    parallelism splits the second one, of their outputs the first. Raises ValueError.
    """
    if shape.experts > 1:
        raise ValueError("the memory of adapters of a mixture of experts is not known")
    gpus = _validate_tensor_parallel(shape, tensor)
    queries, keys = shape.heads * shape.head_size / gpus, math.ceil(shape.kv_heads / gpus) * shape.head_size
    width = 7 * shape.hidden + 2 * queries + 2 * keys + 3 * shape.ffn_width / gpus
    return 2.0 * slots.loras * slots.rank * shape.layers * width


def kv_tokens(
    shape: ModelShape,
    gpu: Accelerator,
    tensor: int = 1,
    utilisation: float = 0.92,
    token_budget: int = 8192,
    lora: LoraSlots | None = None,
) -> int | None:
    """Tokens of KV cache that fit next to the weights on `tensor` GPUs; None where the weights do not fit.

    utilisation: share of the memory the engine may use, vLLM's gpu_memory_utilization. Reserved are the activations of
    a step of token_budget tokens, 2.5 bytes (3 ffn_width + 4 hidden) per token, and 30 MiB per layer of CUDA graphs, as
    measured with vLLM 0.26 for two models on one H200: within 3 % of the cache it reported. Raises ValueError.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation must lie above 0 and at most at 1, not {utilisation}")
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")
    gpus = _validate_tensor_parallel(shape, tensor)
    width = 3 * (shape.ffn_width * shape.experts_per_token + shape.shared_width)
    activations = 2.5 * token_budget * (width / gpus + 4 * shape.hidden)
    free = gpu.memory_bytes * utilisation - shape.memory_bytes / gpus - activations - 30 * _MIB * shape.layers
    free -= 0.0 if lora is None else lora_bytes(shape, lora, gpus)
    tokens = int(free // _kv_bytes_read(shape, gpus))
    return tokens if tokens >= 1 else None


def _validate_tensor_parallel(shape: ModelShape, tensor: int) -> int:
    if tensor < 1 or shape.heads % tensor:
        raise ValueError(f"tensor must divide the {shape.heads} attention heads, not be {tensor}")
    return tensor


def _max_flops(shape: ModelShape, gpu: Accelerator) -> float:
    """No unit does more than twice the operations at half the width, whatever kernels do with narrow weights."""
    if shape.weight_bytes >= 2:
        return gpu.flops_16bit
    narrow = max(2 * gpu.flops_16bit, gpu.flops_8bit or 0.0)
    return narrow if shape.weight_bytes >= 1 else 2 * narrow


def _step_bytes(shape: ModelShape, parameters: float) -> float:
    """Bytes of weights that one step reads: the layers' and the output layer's; of the embedding only single rows."""
    return parameters * shape.weight_bytes + shape.output_parameters * 2.0


def _pair_flops(shape: ModelShape) -> float:
    """Operations of attention for one pair of tokens: a product with the key, one with the value, in every head."""
    return 4.0 * shape.layers * shape.heads * shape.head_size


def _kv_bytes_read(shape: ModelShape, gpus: int) -> float:
    """Bytes of one token's keys and values on one GPU; heads are copied where there are fewer than GPUs."""
    return shape.kv_bytes_per_token * math.ceil(shape.kv_heads / gpus) / shape.kv_heads
