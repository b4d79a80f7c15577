"""Speculative decoding and KV offloading in a pod template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.api.v1alpha1 import parse
from plimsoll.resources import engine_pod, objects
from plimsoll.resources.platform_config import EngineDefaults, PlatformConfig
from tests import builders

Object = dict[str, Any]

MODEL = {"uri": "pvc://models/chat"}


def platform(**defaults: Any) -> PlatformConfig:
    engine = builders.PLATFORM.engine.model_copy(update={"defaults": EngineDefaults(**defaults)})
    return builders.PLATFORM.model_copy(update={"engine": engine})


def template(of: PlatformConfig = builders.PLATFORM, **spec: Any) -> Object:
    return engine_pod.pod_template(
        parse(builders.service(**{"model": MODEL, "tiers": {"serve": {}}, **spec})), "serve", of
    )


def default_args(made: Object) -> list[str]:
    environment = {one["name"]: one.get("value") for one in made["spec"]["containers"][0]["env"]}
    found: list[str] = json.loads(environment["PLIMSOLL_DEFAULT_ARGS"])
    return found


def resources(made: Object) -> Object:
    found: Object = made["spec"]["containers"][0]["resources"]
    return found


def shared_memory(made: Object) -> str:
    return next(one["emptyDir"]["sizeLimit"] for one in made["spec"]["volumes"] if one["name"] == "shm")


@pytest.mark.parametrize(
    ("speculative", "config"),
    [
        ({"method": "ngram"}, {"method": "ngram", "num_speculative_tokens": 3}),
        (
            {"method": "eagle3", "draft": "hf://org/head", "revision": "v1", "tokens": 2},
            {"method": "eagle3", "num_speculative_tokens": 2, "model": "org/head", "revision": "v1"},
        ),
        (
            {"method": "draft_model", "draft": "pvc://models/small"},
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "/models/claim/small"},
        ),
        (
            {"method": "mtp", "maxBatch": 32},
            {
                "method": "mtp",
                "num_speculative_tokens": 3,
                "num_speculative_tokens_per_batch_size": [[1, 32, 3], [33, 33, 0]],
            },
        ),
    ],
)
def test_speculation_is_one_argument_after_the_chart(speculative: Object, config: Object) -> None:
    made = template(platform(args=("--speculative-config={}",)), engine={"speculative": speculative})
    *_, chart, flag, value = default_args(made)
    assert (chart, flag) == ("--speculative-config={}", "--speculative-config")
    assert json.loads(value) == config


@pytest.mark.parametrize(
    ("memory", "args", "size"),
    [("64Gi", [], "64"), ("1500Mi", [], "1.464844"), ("64Gi", ["-dp", "4"], "16")],
)
def test_offload_size_is_shared_by_data_parallel_ranks(memory: str, args: list[str], size: str) -> None:
    made = template(kvOffload={"memory": memory}, engine={"args": args}, tiers={"serve": {"gpus": 4}})
    assert default_args(made)[-2:] == ["--kv-offloading-size", size]


@pytest.mark.parametrize(
    ("defaults", "pod", "memory"),
    [
        ({}, {}, {"requests": "64Gi"}),
        ({"requests": {"memory": "16Gi"}}, {}, {"requests": "80Gi"}),
        ({"requests": {"memory": "16Gi"}, "limits": {"memory": "32Gi"}}, {}, {"requests": "80Gi", "limits": "96Gi"}),
        ({}, {"resources": {"limits": {"memory": "100M"}}}, {"limits": str(64 * 2**30 + 10**8)}),
    ],
)
def test_offload_raises_memory_and_shared_memory(defaults: Object, pod: Object, memory: Object) -> None:
    made = template(
        platform(resources=defaults),
        kvOffload={"memory": "64Gi"},
        tiers={"serve": {"pod": {**pod, "sharedMemory": "2Gi"}}},
    )
    found = {part: amounts["memory"] for part, amounts in resources(made).items() if "memory" in amounts}
    assert found == memory
    assert shared_memory(made) == "66Gi"


def test_offload_is_part_of_the_revision() -> None:
    bare, small, large = (
        objects.revision_name(parse(builders.service(model=MODEL, tiers={"serve": {}}, **more)), "serve")
        for more in ({}, {"kvOffload": {"memory": "1Gi"}}, {"kvOffload": {"memory": "2Gi"}})
    )
    assert len({bare, small, large}) == 3


def test_speculation_leaves_the_cost_of_a_token_unknown() -> None:
    spec = {
        "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "tiers": {"serve": {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}},
        "slo": {"ttft": "500ms", "tpot": "30ms", "itl": "40ms"},
    }
    assert "--max-num-batched-tokens" in default_args(template(**spec))
    assert "--max-num-batched-tokens" not in default_args(template(**spec, engine={"speculative": {"method": "ngram"}}))
