"""The arguments that a pod template gets from the SLO, and what keeps it from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.resources import engine_pod
from plimsoll.resources.engine_tuning import stored_arguments
from plimsoll.resources.platform_config import EngineDefaults, PlatformConfig
from tests import builders

Object = dict[str, Any]

CHUNK = ["--max-num-batched-tokens", "1024"]
ON_H200 = {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}


def spec(**changes: Any) -> Object:
    whole = {
        "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "tiers": {"serve": ON_H200},
        "slo": {"ttft": "500ms", "tpot": "30ms", "itl": "40ms"},
    }
    return builders.service(**{**whole, **changes})


def platform(*args: str) -> PlatformConfig:
    engine = builders.PLATFORM.engine.model_copy(update={"defaults": EngineDefaults(args=args)})
    return builders.PLATFORM.model_copy(update={"engine": engine})


def template(raw: Object, *chart_args: str, role: str = "serve") -> Object:
    return engine_pod.pod_template(parse(raw), role, platform(*chart_args))  # type: ignore[arg-type]


def default_args(made: Object) -> list[str]:
    environment = {one["name"]: one.get("value") for one in made["spec"]["containers"][0]["env"]}
    found: list[str] = json.loads(environment["PLIMSOLL_DEFAULT_ARGS"])
    return found


def test_template_has_chunk_before_chart_and_user_arguments() -> None:
    made = template(spec(engine={"args": ["--seed=1"]}), "--disable-log-stats")
    assert default_args(made) == [*CHUNK, "--disable-log-stats"]
    (stored,) = stored_arguments(made)
    assert (stored.flag, stored.value) == ("--max-num-batched-tokens", 1024)
    assert stored.text == "--max-num-batched-tokens=1024 (itl 40ms)"
    assert "by data sheets" in stored.reason


def test_tuning_does_not_part_prefill_and_decode() -> None:
    raw = spec(tiers={"prefill": ON_H200, "decode": ON_H200})
    prefill, decode = (template(raw, role=role) for role in ("prefill", "decode"))
    assert (CHUNK[0] in default_args(prefill), CHUNK[0] in default_args(decode)) == (False, True)
    revisions = {made["metadata"]["labels"][labels.REVISION] for made in (prefill, decode, template(spec()))}
    assert len(revisions) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"tuning": "Off"}},
        {"engine": {"args": ["--max-num-batched-tokens=2048"]}},
        {"engine": {"args": ["--config=/etc/vllm.yaml"]}},
        {"engine": {"args": ["--quantization", "fp8"]}},
        {"engine": {"args": ["--speculative-config={}"]}},
        {"engine": {"args": ["-tp", "1"]}},
        {"engine": {"runtime": "simulated"}},
        {"engine": {"runtime": "sglang", "image": "example.com/sglang:1"}},
        {"slo": {"ttft": "500ms", "tpot": "30ms"}},
        {"slo": None},
        {"model": {"uri": "hf://example/unknown"}},
        {"model": {"uri": "file:///models/Llama-3.1-8B"}},
        {"model": {"uri": "hf://meta-llama/Llama-3.1-8B", "task": "embed"}},
        {"tiers": {"serve": {}}},
        {"tiers": {"serve": {**ON_H200, "gpuResource": "nvidia.com/mig-1g.18gb"}}},
        {"tiers": {"serve": {**ON_H200, "gpus": 0}}},
    ],
)
def test_template_without_tuning_has_no_trace_of_it(changes: Object) -> None:
    raw = spec(**changes)
    if raw["spec"]["slo"] is None:
        del raw["spec"]["slo"]
    made = template(raw)
    assert CHUNK[0] not in json.dumps(made["spec"]).replace(CHUNK[0] + "=2048", "")
    assert labels.TUNING not in made["metadata"].get("annotations", {})
    assert stored_arguments(made) == ()


def test_chunk_follows_tightest_targets_of_classes() -> None:
    loose, strict = {"ttft": "2s", "tpot": "100ms"}, {"ttft": "1s", "tpot": "12ms"}

    def chunk(own: Object, of_class: Object | None) -> list[str]:
        classes = {} if of_class is None else {"admission": {"classes": [{"name": "fast", "slo": of_class}]}}
        return default_args(template(spec(slo={**own, "itl": "300ms"}, **classes)))

    assert chunk(loose, strict) == chunk(strict, None) != chunk(loose, None)
    assert chunk(strict, loose) == chunk(loose, None), "no request has the targets of spec.slo"


def test_chart_argument_keeps_its_value() -> None:
    made = template(spec(), "--max-num-batched-tokens", "4096")
    assert default_args(made) == ["--max-num-batched-tokens", "4096"]
    assert "annotations" not in made["metadata"]


def test_graphs_need_the_bundled_release() -> None:
    mixture = {"uri": "hf://Qwen/Qwen3-30B-A3B"}
    assert "--cudagraph-capture-sizes" in default_args(template(spec(model=mixture)))
    assert default_args(template(spec(model=mixture, engine={"version": "1.0"}))) == []
    assert default_args(template(spec(model=mixture, engine={"image": "example.com/own:1"}))) == []
    assert default_args(template(spec(engine={"version": "1.0"}))) == CHUNK


@pytest.mark.parametrize(
    "text", ["", "x", "1", "{}", "[1]", '["a"]', '[{"flag": "a"}]', '[{"flag": "a", "value": "b"}]']
)
def test_foreign_annotation_is_no_tuning(text: str) -> None:
    assert stored_arguments({"metadata": {"annotations": {labels.TUNING: text}}}) == ()
    assert stored_arguments({"metadata": {"annotations": [text]}}) == ()
    assert stored_arguments({"metadata": text}) == ()
