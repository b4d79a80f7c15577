"""Engine arguments that an SLO determines before any engine has run.

Problem: vLLM's defaults fit no particular SLO. With an ITL target, chunks of 8,192 prompt tokens stop all streams of an
engine for a quarter of a second. But an argument that is wrong for the service costs capacity, or the engine's start.

Idea: set what follows from model, GPU and SLO alone, and only where measurements say that it helps.
- `--max-num-batched-tokens`, for an ITL target and a dense model: `choose_token_budget`, by data sheets and typical
  lengths. Without an ITL target vLLM's chunk is better: its TTFT is shorter, and it keeps TPOT.
- `--cudagraph-capture-sizes`, for a mixture of experts: `choose_cuda_graphs`.
- `--max-num-seqs` is not set. It follows from the lengths of requests (32 to 528 for one SLO), which change, and
  admission control bounds the batch by the present ones.

The result depends on its arguments only, so no measurement's noise can change it. A flag that the user has set is
never set again, and one that would exclude another is a reason to set nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from plimsoll.core import units
from plimsoll.core.engine_model.roofline import Accelerator, ModelShape
from plimsoll.core.planning.arrangement import aggregated_tier
from plimsoll.core.planning.engine_settings import choose_cuda_graphs, choose_token_budget, max_itl_s
from plimsoll.core.planning.machine_model import TOKEN_BUDGETS, machine_from_roofline
from plimsoll.core.planning.workloads import lognormal_workload
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines import vllm

GAP_FACTOR: Final = (
    2.0  # longest gap between tokens over the predicted step: 60 ms over 31 in docs/evaluation/gpu-engine
)
TYPICAL_TOKENS: Final = (1000.0, 200.0)  # prompt and output of a chat request; the longest step hardly depends on it
_MAX_REMEMBERED: Final = 256

# Another setting of these takes the meaning from a choice, or lets the engine refuse it.
_BUDGET_EXCLUDED_BY: Final = (vllm.MAX_NUM_BATCHED_TOKENS, vllm.CHUNKED_PREFILL, vllm.NO_CHUNKED_PREFILL)
_GRAPHS_EXCLUDED_BY: Final = (
    vllm.CUDA_GRAPH_SIZES,
    vllm.CUDA_GRAPH_SIZES_UNTIL_0_11,
    vllm.MAX_CUDA_GRAPH_SIZE,
    vllm.COMPILATION_CONFIG,
    vllm.OPTIMIZATION_LEVEL,
    vllm.ENFORCE_EAGER,
)
_PARALLELISM: Final = (
    vllm.TENSOR_PARALLEL_SIZE,
    vllm.PIPELINE_PARALLEL_SIZE,
    vllm.DATA_PARALLEL_SIZE,
    vllm.DECODE_CONTEXT_PARALLEL_SIZE,
)


@dataclass(frozen=True)
class TunedArgument:
    """One argument. cause: what asks for it, in a word or two. reason: a sentence for users."""

    flag: str
    values: tuple[str, ...]
    cause: str
    reason: str

    @property
    def args(self) -> tuple[str, ...]:
        """Words of the engine's command line."""
        return self.flag, *self.values

    @property
    def value(self) -> int:
        """The number, or the largest of several."""
        return int(self.values[-1])

    @property
    def short(self) -> str:
        """The argument in a few words."""
        return f"{self.flag}={self.values[0]}" if len(self.values) == 1 else f"{self.flag} up to {self.value}"


@dataclass(frozen=True)
class EngineHardware:
    """The engines of a tier: the model, and the GPUs of each."""

    shape: ModelShape
    gpu: Accelerator
    gpus: int


def tune_engine(
    role: Role, hardware: EngineHardware, slo: Slo | None, given: Sequence[str], *, graphs: bool = True
) -> tuple[TunedArgument, ...] | Unavailable:
    """The arguments for the engines of a tier, in a fixed order; why there are none.

    given: arguments of user and chart. graphs: whether the engine's release is one that knows CUDA_GRAPH_SIZES.
    """
    return _tune(role, hardware, slo, tuple(given), graphs)


def chunk_excluded_by(given: Sequence[str], gpus: int) -> str | None:
    """The argument of user or chart that keeps the operator from setting a chunk; None if there is none.

    Tensor parallelism over the engine's GPUs is what the operator itself sets.
    """
    tensor, *others = _PARALLELISM
    if vllm.flag_count(given, tensor) != gpus:
        others.append(tensor)
    return _first_set(given, (*_BUDGET_EXCLUDED_BY, *others))


@lru_cache(maxsize=_MAX_REMEMBERED)
def _tune(
    role: Role, hardware: EngineHardware, slo: Slo | None, given: tuple[str, ...], graphs: bool
) -> tuple[TunedArgument, ...] | Unavailable:
    if slo is None:
        return Unavailable("spec.slo is not set")
    if (flag := _first_set(given, _PARALLELISM)) is not None:
        return Unavailable(f"engine.args has {flag}, so the work of each GPU is not known")
    if hardware.shape.heads % hardware.gpus:
        return Unavailable(f"{hardware.gpus} GPUs do not divide the model's {hardware.shape.heads} attention heads")
    if hardware.shape.experts > 1:
        return _mixture(role, hardware.gpu, given) if graphs else Unavailable("the engine's release is not known")
    return _dense(role, hardware, slo, given)


def _dense(
    role: Role, hardware: EngineHardware, slo: Slo, given: Sequence[str]
) -> tuple[TunedArgument, ...] | Unavailable:
    """The chunk budget."""
    if slo.itl_s is None:
        return Unavailable("spec.slo.itl is not set, and without it vLLM's own arguments keep the SLO as well")
    if role is Role.PREFILL:
        return Unavailable("no stream runs on a prefill engine")
    if (flag := _first_set(given, _BUDGET_EXCLUDED_BY)) is not None:
        return Unavailable(f"engine.args has {flag}")
    default = vllm.default_batched_tokens(hardware.gpu.name, hardware.gpu.memory_bytes)
    sequences = vllm.flag_count(given, vllm.MAX_NUM_SEQS) if vllm.has_flag(given, vllm.MAX_NUM_SEQS) else 1
    budgets = [b for b in TOKEN_BUDGETS if b <= default and sequences is not None and b >= sequences]
    machines = [machine_from_roofline(hardware.shape, hardware.gpu, hardware.gpus, budget) for budget in budgets]
    workload = lognormal_workload(*TYPICAL_TOKENS)
    tiers = [aggregated_tier(machine, workload, slo) for machine in machines if machine is not None]
    if not tiers:
        return Unavailable("no chunk is possible with engine.args on these GPUs")
    chosen = choose_token_budget(tiers, slo.itl_s / GAP_FACTOR) or tiers[0]
    budget = chosen.limits.token_budget
    if budget >= default:
        return Unavailable(f"vLLM's own chunk of {budget} tokens meets spec.slo.itl")
    return (_budget_argument(budget, default, max_itl_s(chosen), slo.itl_s),)


def _budget_argument(budget: int, default: int, step_s: float, itl_s: float) -> TunedArgument:
    itl = units.format_rounded_duration(itl_s)
    smallest = "" if GAP_FACTOR * step_s <= itl_s else "; smaller chunks are not considered"
    reason = (
        f"vLLM's own chunk is {default} prompt tokens; a step of {budget} takes about "
        f"{units.format_rounded_duration(step_s)} by data sheets, and gaps between tokens are up to {GAP_FACTOR:.0f} "
        f"steps{smallest}"
    )
    return TunedArgument(vllm.MAX_NUM_BATCHED_TOKENS, (str(budget),), f"itl {itl}", reason)


def _mixture(role: Role, gpu: Accelerator, given: Sequence[str]) -> tuple[TunedArgument, ...] | Unavailable:
    """The CUDA graphs. The chunk is left alone, because data sheets say too little about a mixture's steps."""
    if (flag := _first_set(given, _GRAPHS_EXCLUDED_BY)) is not None:
        return Unavailable(f"engine.args has {flag}")
    limit, default = (
        (vllm.MAX_NUM_SEQS, vllm.default_sequences(gpu.name, gpu.memory_bytes))
        if role is Role.DECODE
        else (vllm.MAX_NUM_BATCHED_TOKENS, vllm.default_batched_tokens(gpu.name, gpu.memory_bytes))
    )
    tokens = vllm.flag_count(given, limit) if vllm.has_flag(given, limit) else default
    graphs = None if tokens is None else choose_cuda_graphs(tokens, True)
    if graphs is None:
        return Unavailable("the CUDA graphs that vLLM captures by itself are large enough")
    return (TunedArgument(vllm.CUDA_GRAPH_SIZES, graphs.args[1:], "mixture of experts", graphs.reason),)


def _first_set(given: Sequence[str], flags: Sequence[str]) -> str | None:
    return next((flag for flag in flags if vllm.has_flag(given, flag)), None)
