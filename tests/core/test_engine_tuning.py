"""Which engine arguments follow from an SLO, and who may override them."""

from __future__ import annotations

import pytest

from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.core.planning.engine_tuning import EngineHardware, TunedArgument, tune_engine
from plimsoll.core.planning.known_models import find_shape
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable

Result = tuple[TunedArgument, ...] | Unavailable


def tuned(
    *given: str, model: str = "Llama-3.1-8B", gpu: str = "H200", gpus: int = 1, itl: float | None = 0.04,
    role: Role = Role.SERVE, graphs: bool = True,
) -> Result:  # fmt: skip
    slo = Slo(0.95, ttft_s=0.5, tpot_s=0.03, itl_s=itl)
    return tune_engine(role, EngineHardware(find_shape(model), ACCELERATORS[gpu], gpus), slo, given, graphs=graphs)


def args(result: Result) -> list[str]:
    assert not isinstance(result, Unavailable), result.reason
    return [word for argument in result for word in argument.args]


def reason(result: Result) -> str:
    assert isinstance(result, Unavailable)
    return result.reason


def budget(itl: float) -> int:
    result = tuned(itl=itl)
    return 8192 if isinstance(result, Unavailable) else result[0].value


def test_tight_itl_gets_the_measured_chunk() -> None:
    """The chunk that made the longest gap a fifth to a third as long (docs/evaluation/gpu-engine.md)."""
    assert args(tuned()) == ["--max-num-batched-tokens", "1024"]
    assert args(tuned(role=Role.DECODE)) == ["--max-num-batched-tokens", "1024"]


def test_chunk_grows_with_itl_target_and_never_beyond_default() -> None:
    found = [budget(itl) for itl in (0.02, 0.04, 0.08, 0.15, 0.3, 1.0, 30.0)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1024, 4096)
    assert max(found) <= 8192


def test_measured_gaps_bound_the_chunk() -> None:
    """Gaps were twice the predicted step, so a target is half used."""
    result = tuned(itl=0.15)
    assert not isinstance(result, Unavailable)
    assert result[0].value == 2048
    assert "about 55ms by data sheets" in result[0].reason
    assert "8192" in result[0].reason


def test_no_itl_target_leaves_vllm_alone() -> None:
    assert reason(tuned(itl=None)).startswith("spec.slo.itl is not set")
    assert reason(tuned(role=Role.PREFILL)) == "no stream runs on a prefill engine"
    hardware = EngineHardware(find_shape("Llama-3.1-8B"), ACCELERATORS["H200"], 1)
    assert reason(tune_engine(Role.SERVE, hardware, None, ())) == "spec.slo is not set"


@pytest.mark.parametrize(
    "given",
    [
        ("--max-num-batched-tokens=4096",),
        ("--max_num_batched_tokens", "4096"),
        ("--no-enable-chunked-prefill",),
        ("--enable-chunked-prefill=false",),
        ("--tensor-parallel-size", "2"),
        ("--pipeline_parallel_size=2",),
        ("--data-parallel-size", "8"),
    ],
)
def test_user_argument_keeps_chunk(given: tuple[str, ...]) -> None:
    flag = given[0].split("=")[0].replace("_", "-")
    assert flag in reason(tuned(*given))


def test_unrelated_user_arguments_change_nothing() -> None:
    assert tuned("--max-num-seqs=64", "--seed", "1") == tuned()


def test_chunk_is_never_below_user_sequences() -> None:
    """vLLM does not start with fewer tokens than sequences."""
    assert args(tuned("--max-num-seqs", "1500")) == ["--max-num-batched-tokens", "2048"]
    assert "no chunk is possible" in reason(tuned("--max-num-seqs", "20000"))
    assert "no chunk is possible" in reason(tuned("--max-num-seqs=many"))


def test_smaller_gpus_have_their_own_default() -> None:
    result = tuned(gpu="L40S")
    assert not isinstance(result, Unavailable)
    assert (result[0].value, "2048" in result[0].reason) == (1024, True)


def test_mixture_gets_graphs_with_or_without_itl() -> None:
    result = tuned(model="Qwen3-30B-A3B", itl=None)
    assert not isinstance(result, Unavailable)
    assert [(one.flag, one.value) for one in result] == [("--cudagraph-capture-sizes", 8192)]
    assert result == tuned(model="Qwen3-30B-A3B")
    decode = tuned(model="Qwen3-30B-A3B", role=Role.DECODE)
    assert not isinstance(decode, Unavailable)
    assert decode[0].value == 1024  # sequences
    own = tuned("--max-num-batched-tokens", "2048", model="Qwen3-30B-A3B")
    assert not isinstance(own, Unavailable)
    assert own[0].value == 2048
    assert "large enough" in reason(tuned("--max-num-batched-tokens", "512", model="Qwen3-30B-A3B"))
    assert reason(tuned(model="Qwen3-30B-A3B", graphs=False)) == "the engine's release is not known"


@pytest.mark.parametrize(
    "given",
    ["--enforce-eager", "--cudagraph_capture_sizes=1", "--max-cudagraph-capture-size=64",
     "--compilation-config.mode=0", "--optimization-level=0"],
)  # fmt: skip
def test_user_graph_settings_keep_graphs(given: str) -> None:
    assert reason(tuned(given, model="Qwen3-30B-A3B")).startswith("engine.args has --")


def test_gpus_that_do_not_divide_heads_are_left_alone() -> None:
    assert "do not divide" in reason(tuned(gpus=3))
    assert "no chunk is possible" in reason(tuned(model="Llama-3.3-70B"))  # its weights do not fit
