"""What the operator says of a spec that its GPUs can never serve, and where it says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.hardware_limits import hardware_limits
from plimsoll.controllers.object_cache import ObjectCache, key_of
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.observe import observe
from plimsoll.controllers.reconcile.status_inputs import collect_status_inputs
from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.resources.hardware import GPU_LABELS, GPU_TYPES, named_accelerator
from plimsoll.resources.platform_config import EngineDefaults
from tests import builders
from tests.controllers.conftest import ControllerHarness

H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
SLO = {"ttft": "500ms", "tpot": "1ms"}


def warnings_for(
    uri: str = "hf://Qwen/Qwen3-8B",
    slo: dict[str, str] | None = SLO,
    args: tuple[str, ...] = (),
    default_args: tuple[str, ...] = (),
    runtime: str = "vllm",
    tiers: tuple[str, ...] = ("serve",),
    classes: dict[str, dict[str, str] | None] | None = None,
    **tier: Any,
) -> tuple[str, ...]:
    shape = {role: {"pod": {"nodeSelector": H100}} | tier for role in tiers}
    engine = {"args": list(args), "runtime": runtime}
    extra: dict[str, Any] = {} if slo is None else {"slo": slo}
    if classes is not None:
        own = [{"name": name} | ({} if targets is None else {"slo": targets}) for name, targets in classes.items()]
        extra["admission"] = {"classes": own}
    raw = builders.service(model={"uri": uri}, tiers=shape, engine=engine, **extra)
    return hardware_limits(parse(raw), default_args)


def test_target_below_one_weight_read_is_reported() -> None:
    """15.1 GiB of weights that a token passes, at 3.35 TB/s."""
    assert warnings_for() == (
        "spec.slo.tpot: tier serve cannot meet 1 ms, because reading the weights of Qwen/Qwen3-8B takes 1 GPU of"
        " type H100-SXM at least 4.5 ms (data sheet)",
    )


@pytest.mark.parametrize(
    ("slo", "tiers", "fields"),
    [
        ({"tpot": "4ms"}, ("serve",), ["spec.slo.tpot"]),
        ({"tpot": "5ms"}, ("serve",), []),
        ({"ttft": "4ms", "tpot": "50ms"}, ("serve",), ["spec.slo.ttft"]),
        ({"ttft": "4ms", "tpot": "50ms", "ttftPerKToken": "1ms"}, ("serve",), []),
        ({"ttft": "4ms", "tpot": "4ms"}, ("prefill", "decode"), ["spec.slo.ttft", "spec.slo.tpot"]),
        ({"tpot": "50ms", "itl": "3ms"}, ("serve",), ["spec.slo.itl"]),
        ({"e2e": "2ms"}, ("serve",), ["spec.slo.e2e"]),
        (None, ("serve",), []),
    ],
)
def test_each_target_is_reported_with_its_tier(
    slo: dict[str, str] | None, tiers: tuple[str, ...], fields: list[str]
) -> None:
    assert [sentence.partition(":")[0] for sentence in warnings_for(slo=slo, tiers=tiers)] == fields


@pytest.mark.parametrize(
    ("slo", "classes", "fields"),
    [
        ({"tpot": "50ms"}, {"default": None, "fast": {"tpot": "2ms"}}, ["spec.admission.classes[fast].slo.tpot"]),
        ({"tpot": "3ms"}, {"default": None, "fast": {"tpot": "2ms"}}, ["spec.admission.classes[fast].slo.tpot"]),
        ({"tpot": "3ms"}, {"default": None, "slow": {"tpot": "90ms"}}, ["spec.slo.tpot"]),
        ({"tpot": "3ms", "itl": "2ms"}, {"slow": {"tpot": "90ms"}}, ["spec.slo.itl"]),
        (
            {"tpot": "50ms"},
            {"a": {"tpot": "3ms"}, "b": {"tpot": "2ms", "e2e": "1ms"}},
            ["spec.admission.classes[b].slo.tpot", "spec.admission.classes[b].slo.e2e"],
        ),
    ],
)
def test_tightest_target_of_classes_is_reported(
    slo: dict[str, str], classes: dict[str, dict[str, str] | None], fields: list[str]
) -> None:
    assert [sentence.partition(":")[0] for sentence in warnings_for(slo=slo, classes=classes)] == fields


def test_more_gpus_meet_what_one_does_not() -> None:
    slo = {"tpot": "3ms"}
    assert warnings_for(slo=slo)
    assert not warnings_for(slo=slo, gpus=2)


@pytest.mark.parametrize("slo", [None, SLO])
def test_weights_larger_than_memory_are_reported(slo: dict[str, str] | None) -> None:
    [sentence] = warnings_for("hf://meta-llama/Llama-3.1-70B-Instruct", slo, gpus=1)
    assert sentence.startswith("spec.tiers.serve.gpus: the weights of meta-llama/Llama-3.1-70B-Instruct have 131 GiB")
    assert not warnings_for("hf://meta-llama/Llama-3.1-70B-Instruct", None, gpus=2)


@pytest.mark.parametrize(
    "unknown",
    [
        {"uri": "hf://Qwen/Qwen3-8B-FP8"},
        {"uri": "hf://deepseek-ai/DeepSeek-V3"},
        {"uri": "file:///models/Qwen3-8B"},
        {"args": ("--quantization=fp8",)},
        {"args": ("--quantization", "fp8")},
        {"args": ("-q", "fp8")},
        {"default_args": ("--speculative_config.method=ngram",)},
        {"runtime": "simulated"},
        {"gpus": 0},
        {"gpus": 3},
        {"pod": {}},
        {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}}},
    ],
)
def test_nothing_is_reported_where_costs_are_unknown(unknown: dict[str, Any]) -> None:
    assert warnings_for(**unknown) == ()


def test_gpu_types_have_data_sheets() -> None:
    assert set(GPU_TYPES.values()) <= set(ACCELERATORS)
    for label in GPU_LABELS:
        for value, name in GPU_TYPES.items():
            assert named_accelerator({label: value.upper(), "zone": "a"}) == ACCELERATORS[name]
    assert named_accelerator({"zone": "h100"}) is None


def test_status_inputs_have_the_limits_of_the_spec() -> None:
    """The condition says what the webhook warned of; arguments of the chart count too."""
    tier = {"serve": {"pod": {"nodeSelector": H100}}}
    raw = builders.service(model={"uri": "hf://Qwen/Qwen3-8B"}, tiers=tier, slo=SLO)
    cache = ObjectCache()
    cache.put(raw)
    observed = observe(cache, GatewayView(), key_of(raw))
    assert observed is not None
    platform = builders.PLATFORM
    quantized = platform.engine.model_copy(update={"defaults": EngineDefaults(args=("--quantization=fp8",))})
    for config, expected in ((platform, warnings_for()), (platform.model_copy(update={"engine": quantized}), ())):
        inputs = collect_status_inputs(observed, None, None, None, config, ModelNames())
        assert inputs.hardware_limits == expected


@pytest.mark.api
async def test_slo_infeasible_is_true_before_an_engine_has_run(world: ControllerHarness) -> None:
    tier = {"serve": {"pod": {"nodeSelector": H100}}}
    await world.create(model={"uri": "hf://Qwen/Qwen3-8B"}, tiers=tier, slo=SLO)
    operator = await world.reconcile_once("chat")
    await world.reconcile_once("chat", operator)
    stored = {one["type"]: one for one in (await world.service())["status"]["conditions"]}
    assert stored["SLOInfeasible"]["status"] == "True"
    assert warnings_for()[0] in stored["SLOInfeasible"]["message"]
    assert "SLOInfeasible" in await world.events()
