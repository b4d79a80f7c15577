"""What the engine says of itself: where each fact comes from, that none of them can fail, and the document of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import client, engine_info, model_config, settings
from launcher.health import EngineStatus
from launcher.self_benchmark import SelfBenchmark
from launcher.settings import Settings
from launcher.startup_phases import StartupPhases
from plimsoll.adapters.launcher import StartupProgress, parse_engine_info
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.self_benchmark import choose_prior
from plimsoll.core.ports import EngineInfo
from plimsoll.core.ports import SelfBenchmark as Told
from tests.core.test_roofline import LLAMA_8B, LLAMA_70B, MIXTRAL, QWEN_30B_A3B, QWEN_32B
from tests.engine_image.middleware_harness import CONTRACT

ARGS = '["--max-num-seqs","64","--max-num-batched-tokens","8k","--tensor-parallel-size","2"]'
METRICS = (
    b'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",cache_dtype="auto",'
    b'kv_cache_size_tokens="919824",num_gpu_blocks="57489",num_gpu_blocks_override="None"} 1.0\n'
)
MODELS = b'{"data":[{"id":"m","max_model_len":4096}]}'


def launcher_environment(**more: str) -> Settings:
    return settings.read({"PLIMSOLL_MODEL": "org/model", "PLIMSOLL_ARGS": ARGS, **more}, CONTRACT)


def answering(answers: Mapping[str, bytes | Exception], requested: list[str]) -> engine_info.Fetch:
    """An engine that knows some paths."""

    async def get(path: str) -> client.Response:
        requested.append(path)
        answer = answers.get(path)
        if isinstance(answer, Exception):
            raise answer
        return client.Response(404, b"no") if answer is None else client.Response(200, answer)

    return get


def test_from_settings_fills_static_facts() -> None:
    facts = engine_info.from_settings(launcher_environment(), "0.32.0")
    assert (facts.engine, facts.engine_version, facts.accelerator) == ("vllm", "0.32.0", None)
    assert (facts.max_sequences, facts.token_budget) == (64, 8000)
    light = engine_info.from_settings(launcher_environment(PLIMSOLL_RUNTIME="simulated"), "")
    assert (light.engine, light.engine_version) == ("simulated", "simulated")
    assert (light.accelerator, light.accelerators) == ("simulated", 2)
    bare = engine_info.from_settings(launcher_environment(PLIMSOLL_ARGS="[]"), "")
    assert (bare.engine_version, bare.max_sequences, bare.token_budget) == (None, None, None)


async def test_learn_fills_facts_from_engine_endpoints_once() -> None:
    facts, requested = engine_info.from_settings(launcher_environment(), ""), list[str]()
    get = answering({"/metrics": METRICS, "/v1/models": MODELS, "/version": b'{"version":"0.32.0"}'}, requested)
    await engine_info.query_engine(facts, CONTRACT, get)
    assert (facts.kv_tokens, facts.block_tokens, facts.max_model_len) == (919824, 16, 4096)
    assert facts.engine_version == "0.32.0"
    requested.clear()
    await engine_info.query_engine(facts, CONTRACT, get)
    assert requested == []


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError(), ValueError("not HTTP"), None])
async def test_learn_retries_after_missing_or_failed_responses(error: Exception | None) -> None:
    facts, requested = engine_info.from_settings(launcher_environment(), ""), list[str]()
    said = {} if error is None else {path: error for path in ("/metrics", "/v1/models", "/version")}
    await engine_info.query_engine(facts, CONTRACT, answering(said, requested))
    assert (facts.kv_tokens, facts.block_tokens, facts.max_model_len, facts.engine_version) == (None,) * 4
    await engine_info.query_engine(facts, CONTRACT, answering({"/metrics": METRICS, "/v1/models": MODELS}, requested))
    assert (facts.kv_tokens, facts.max_model_len) == (919824, 4096)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (b'{"version":"1","accelerator":"H200"}', "H200"),
        (b'{"version":"1"}', "simulated"),
        (b'{"accelerator":7}', "simulated"),
        (b'{"accelerator":""}', "simulated"),
        (b"[]", "simulated"),
        (b"[" * 9999, "simulated"),
        (b"", "simulated"),
    ],
)
async def test_learn_simulated_engine_reports_its_accelerator(version: bytes, name: str) -> None:
    facts = engine_info.from_settings(launcher_environment(PLIMSOLL_RUNTIME="simulated"), "")
    await engine_info.query_engine(facts, CONTRACT, answering({"/version": version}, []))
    assert (facts.accelerator, facts.engine_version) == (name, "simulated")


@pytest.mark.parametrize(
    ("labels", "known"),
    [
        ('block_size="16",num_gpu_blocks="100"', (1600, 16)),
        ('block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1500"', (1500, 16)),
        ('block_size="16",num_gpu_blocks="None",kv_cache_size_tokens="None"', (None, 16)),
        ('block_size="0",num_gpu_blocks="5"', (None, None)),
        ('block_size="-1",num_gpu_blocks="1e9"', (None, None)),
        (f'block_size="16",num_gpu_blocks="{"9" * 99}"', (None, 16)),
        ('odd="a\\"b",block_size="16"', (None, 16)),
        ("", (None, None)),
    ],
)
def test_cache_config_is_read_from_metrics(labels: str, known: tuple[int | None, int | None]) -> None:
    assert engine_info.parse_cache_config(b"vllm:x 1\nvllm:cache_config_info{%b} 1.0\n" % labels.encode()) == known


def test_cache_config_first_engine_core_counts() -> None:
    line = 'vllm:cache_config_info{{block_size="16",engine="{}",num_gpu_blocks="{}"}} 1.0\n'
    assert engine_info.parse_cache_config((line.format(0, 100) + line.format(1, 90)).encode()) == (1600, 16)


def smi(folder: Path, script: str) -> tuple[str, ...]:
    """A command in nvidia-smi's place."""
    path = folder / "smi.py"
    path.write_text(script)
    return (sys.executable, str(path))


@pytest.mark.parametrize(
    ("script", "version", "known"),
    [
        ("print('NVIDIA H200\\nNVIDIA H200')", "0.32.0", ("NVIDIA H200", 2)),
        ("print('NVIDIA H200')", "0.32.0+cpu", ("NVIDIA H200", 1)),
        ("print('NVIDIA-SMI has failed because it could not reach the driver.')", "0.32.0", (None, None)),
        ("print('No devices were found')", "0.32.0+cpu", ("cpu", 0)),
        ("print('NVIDIA H200'); raise SystemExit(9)", "0.32.0+cpu", ("cpu", 0)),
        ("import os; os.write(1, b'\\xff\\xfe')", "", ("\ufffd\ufffd", 1)),
        ("", "0.32.0+cpu", ("cpu", 0)),
    ],
)
def test_accelerators_are_read_from_nvidia_smi(
    tmp_path: Path, script: str, version: str, known: tuple[str | None, int | None]
) -> None:
    facts = engine_info.from_settings(launcher_environment(), version)
    engine_info.detect_accelerators(facts, smi(tmp_path, script))
    assert (facts.accelerator, facts.accelerators) == known


def test_accelerator_without_nvidia_smi_is_known_for_cpu_only() -> None:
    for version, known in (("0.32.0+cpu", "cpu"), ("0.32.0", None), ("", None)):
        facts = engine_info.from_settings(launcher_environment(), version)
        engine_info.detect_accelerators(facts, ("/nowhere/nvidia-smi",))
        assert facts.accelerator == known


def test_accelerator_of_simulated_engine_ignores_driver(tmp_path: Path) -> None:
    facts = engine_info.from_settings(launcher_environment(PLIMSOLL_RUNTIME="simulated"), "")
    engine_info.detect_accelerators(facts, smi(tmp_path, "print('NVIDIA H200')"))
    assert facts.accelerator == "simulated"


def snapshot(hub: Path, commit: str, config: Mapping[str, object], modified: int = 0) -> Path:
    """A snapshot as Hugging Face's library leaves it."""
    folder = hub / "models--org--model" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    os.utime(folder / "config.json", (modified, modified))
    return folder


def test_model_config_is_read_from_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert model_config.read(str(tmp_path), "", {}) == LLAMA_8B


def test_model_config_is_read_from_hub_cache_by_revision(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    snapshot(hub, "aaa", {"vocab_size": 1}, 100)
    snapshot(hub, "bbb", {"vocab_size": 2}, 200)
    environment = {"HF_HOME": str(tmp_path)}

    def vocab_size(revision: str = "") -> object:
        return (model_config.read("org/model", revision, environment) or {}).get("vocab_size")

    assert (vocab_size(), vocab_size("aaa"), vocab_size("other")) == (2, 1, None)
    refs = hub / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa")
    (refs / "v2").write_text("bbb\n")
    assert (vocab_size(), vocab_size("v2")) == (1, 2)
    (refs / "main").write_bytes(b"\xff")
    assert vocab_size() == 2


def test_model_config_hub_cache_location_follows_environment(tmp_path: Path) -> None:
    places = {
        "HF_HUB_CACHE": tmp_path,
        "HF_HOME": tmp_path / "hub",
        "XDG_CACHE_HOME": tmp_path / "huggingface" / "hub",
        "HOME": tmp_path / ".cache" / "huggingface" / "hub",
    }
    for number, (name, hub) in enumerate(places.items()):
        snapshot(hub, "aaa", {"vocab_size": number})
        assert model_config.read("org/model", "", {name: str(tmp_path)}) == {"vocab_size": number}


@pytest.mark.parametrize("raw", [b"", b"[1]", b"\xff", b"7", b"[" * 99999, b'{"vocab_size":' + b"9" * 9999 + b"}"])
def test_model_config_malformed_file_is_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    assert model_config.read(str(tmp_path), "", {}) is None


def test_model_config_non_finite_numbers_are_null(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": NaN, "head_dim": 1e999, "hidden_size": -Infinity, "bits": 1}')
    assert model_config.read(str(tmp_path), "", {}) == {"vocab_size": None, "head_dim": None, "hidden_size": None}


NARROW = {"quant_method": "compressed-tensors", "ignore": ["lm_head"] * 500}
W4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}, "input_activations": None, "targets": ["Linear"]}
W8A8 = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8, "dynamic": True}}
CONFIGS: dict[str, dict[str, object]] = {
    "8b": LLAMA_8B,
    "70b": LLAMA_70B,
    "32b": QWEN_32B,
    "mixtral": MIXTRAL,
    "30b-a3b": QWEN_30B_A3B,
    "shared": {
        **QWEN_30B_A3B,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "awq": {**LLAMA_8B, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    "w4a16": {**LLAMA_8B, "quantization_config": {**NARROW, "config_groups": {"group_0": W4}}},
    "w8a8": {**LLAMA_8B, "quantization_config": {**NARROW, "config_groups": {"group_0": W8A8}}},
    "nested": {"model_type": "gemma_mm", "vision_config": {"x": [1] * 999}, "text_config": {**LLAMA_70B, "eos": 1}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_model_config_reduced_keeps_model_shape(config: dict[str, object]) -> None:
    kept = model_config.reduce_config({**config, "architectures": ["x"], "rope_scaling": {"a": 1}})
    assert kept is not None
    assert len(json.dumps(kept)) < 1000
    assert roofline.model_shape(kept) == roofline.model_shape(config)


class RecordingConfig(Mapping[str, object]):
    """A configuration that knows what it was asked for."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self.requested: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.requested.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"nested"}))
def test_model_config_reduced_keeps_every_key_read_by_operator(name: str) -> None:
    config = RecordingConfig(CONFIGS[name])
    roofline.model_shape(config)
    assert config.requested <= {*model_config.SPEED_KEYS, model_config.NESTED_KEY, model_config.QUANTIZATION_KEY}


def starting() -> StartupPhases:
    phases = StartupPhases(CONTRACT.startup_phases, 100.0)
    phases.end("launch", 100.5)
    phases.end("import", 104.5)
    return phases


def test_engine_info_document_is_parsed_by_operator() -> None:
    facts = engine_info.from_settings(launcher_environment(), "0.32.0")
    facts.accelerator, facts.accelerators = "NVIDIA H200", 2
    facts.kv_tokens, facts.block_tokens, facts.max_model_len = 919824, 16, 4096
    facts.config = model_config.reduce_config(LLAMA_70B)
    facts.self_benchmark = SelfBenchmark(((16, 0.01), (128, 0.02)), ((1, 24, 0.005), (4, 24, 0.006)))
    said, start = parse_engine_info(engine_info.to_json(facts, "serve", EngineStatus(), starting(), 105.0))
    ladder = Told(((16, 0.01), (128, 0.02)), ((1, 24, 0.005), (4, 24, 0.006)))
    assert said == EngineInfo(
        "vllm", "0.32.0", "NVIDIA H200", 2, 64, 919824, 8000, 16, 4096, model_config.reduce_config(LLAMA_70B), ladder
    )
    assert start == StartupProgress("download", 0.5, (("launch", 0.5), ("import", 4.0)), False, False)
    chosen = choose_prior(said)
    assert isinstance(chosen, tuple)
    shape = roofline.model_shape(LLAMA_70B)
    assert chosen[0] == roofline.prior(shape, roofline.ACCELERATORS["H200"], 2)


def test_engine_info_unknown_facts_are_null() -> None:
    facts = engine_info.from_settings(launcher_environment(PLIMSOLL_ARGS="[]"), "")
    document = json.loads(engine_info.to_json(facts, "prefill", EngineStatus(), starting(), 105.0))
    assert document["role"] == "prefill"
    assert set(document["limits"].values()) == {None}
    assert (document["config"], document["self_benchmark"], document["engine_version"]) == (None, None, None)
    assert document["accelerator"] == {"name": None, "count": None}
    assert asdict(parse_engine_info(json.dumps(document).encode())[0])["accelerator"] == "unknown"


def test_engine_info_ready_engine_has_no_phase() -> None:
    phases = starting()
    phases.end("warmup", 120.0)
    status = EngineStatus(warm=True)
    facts = engine_info.from_settings(launcher_environment(), "")
    document: dict[str, Any] = json.loads(engine_info.to_json(facts, "serve", status, phases, 999.0))
    assert (document["phase"], document["phase_seconds"], document["ready"]) == (None, None, True)
    assert document["phases"][-1] == ["warmup", 15.5]
    leaving = json.loads(
        engine_info.to_json(facts, "serve", replace(status, leaving=True, draining=True), phases, 999.0)
    )
    assert (leaving["ready"], leaving["draining"]) == (False, True)
