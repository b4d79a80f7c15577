"""Each engine's contract: what it is started with, what its pages say, and that the record is whole."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.core.demand.counter_delta import engine_interval
from plimsoll.core.demand.derived_windows import needs_derivation, step_time_of
from plimsoll.core.ports import EngineReading
from plimsoll.engines import tensorrt_llm
from plimsoll.engines.engine import (
    Feature,
    Launch,
    MetricMap,
    Signal,
    Source,
    last_count,
    last_value,
    missing_for_sizing,
)
from plimsoll.engines.registry import ENGINES, engine_named, engines_with, engines_without

PAGES = Path(__file__).with_name("pages")
LAUNCH = Launch("/models/claim/m.gguf", False, "chat", "generate", 1, 8000)
HUB = Launch("org/m", True, "chat", "embed", 2, 9000, "v1")
METRICS_ON = {"return_perf_metrics": True, "enable_iter_perf_stats": True}


def reading(engine: str) -> EngineReading:
    metric_map = ENGINES[engine].metrics
    assert metric_map is not None
    return parse_metrics((PAGES / f"{engine.replace('-', '_')}.txt").read_bytes(), "pod", 1.0, metric_map)


@pytest.mark.parametrize(
    ("engine", "launch", "expected"),
    [
        (
            "llama-cpp",
            LAUNCH,
            "--model /models/claim/m.gguf --alias chat --host 0.0.0.0 --port 8000 --metrics",
        ),
        (
            "llama-cpp",
            HUB,
            "--hf-repo org/m --alias chat --host 0.0.0.0 --port 9000 --metrics --embeddings",
        ),
        (
            "sglang",
            LAUNCH,
            "--model-path /models/claim/m.gguf --served-model-name chat --host 0.0.0.0 --port 8000 --enable-metrics",
        ),
        (
            "sglang",
            HUB,
            "--model-path org/m --served-model-name chat --revision v1 --tp-size 2 --is-embedding --host 0.0.0.0"
            " --port 9000 --enable-metrics",
        ),
        (
            "tensorrt-llm",
            LAUNCH,
            "/models/claim/m.gguf --host 0.0.0.0 --port 8000",
        ),
        (
            "tensorrt-llm",
            HUB,
            "org/m --host 0.0.0.0 --port 9000 --revision v1 --tp_size 2",
        ),
        ("tgi", LAUNCH, "--model-id /models/claim/m.gguf --hostname 0.0.0.0 --port 8000"),
        ("tgi", HUB, "--model-id org/m --revision v1 --num-shard 2 --hostname 0.0.0.0 --port 9000"),
        ("openai", HUB, ""),
    ],
)
def test_own_args_place_model_name_and_port(engine: str, launch: Launch, expected: str) -> None:
    assert ENGINES[engine].own_args(launch) == tuple(expected.split())


@pytest.mark.parametrize("name", [name for name, engine in ENGINES.items() if not engine.launched])
def test_own_flags_are_reserved(name: str) -> None:
    engine = ENGINES[name]
    flags = {arg for launch in (LAUNCH, HUB) for arg in engine.own_args(launch) if arg.startswith("--")}
    assert flags - set(engine.reserved_flags) <= {
        "--embeddings",
        "--tp-size",
        "--is-embedding",
        "--tp_size",
    }


def test_llama_cpp_page_of_real_server_is_read() -> None:
    found = reading("llama-cpp")
    assert (found.running, found.waiting, found.generated_tokens) == (0.0, 0.0, 24.0)
    assert found.local_prompt_tokens is not None
    assert found.computed_tokens == found.local_prompt_tokens + 24.0
    assert found.steps is not None
    assert 24.0 <= found.steps <= 27.0
    assert (found.kv_used, found.ttft_s, found.tpot_s, found.instance_id) == (None, None, None, "")


def test_sglang_page_of_real_server_is_read() -> None:
    found = reading("sglang")
    assert (found.running, found.waiting, found.kv_used) == (0.0, 0.0, 0.0)
    assert (found.generated_tokens, found.local_prompt_tokens, found.cached_prompt_tokens) == (353.0, 7599.0, 114.0)
    assert found.computed_tokens == 353.0 + 7599.0
    histograms = (found.ttft_s, found.tpot_s, found.prompt_tokens, found.output_tokens)
    assert [sum(one.counts) for one in histograms if one] == [12.0, 10.0, 12.0, 12.0]  # two had one token
    assert found.itl_s is not None


def test_sglang_priorities_are_not_counted_twice() -> None:
    page = "".join(
        f'sglang:num_{kind}_reqs{{model_name="m",priority="{priority}"}} {count}\n'
        for kind in ("running", "queue")
        for priority, count in (("", 5), ("1", 2), ("2", 3))
    )
    metric_map = ENGINES["sglang"].metrics
    assert metric_map is not None
    found = parse_metrics(page.encode(), "pod", 1.0, metric_map)
    assert (found.running, found.waiting) == (5.0, 5.0)


def test_sglang_realtime_tokens_separate_cached_ones() -> None:
    page = "".join(
        f'sglang:realtime_tokens_total{{mode="{mode}",model_name="m"}} {count}\n'
        for mode, count in (("prefill_compute", 30), ("prefill_cache", 12), ("decode", 5))
    )
    metric_map = ENGINES["sglang"].metrics
    assert metric_map is not None
    found = parse_metrics(page.encode(), "pod", 1.0, metric_map)
    assert (found.local_prompt_tokens, found.cached_prompt_tokens, found.computed_tokens) == (30.0, 12.0, 35.0)


def test_tensorrt_llm_page_of_its_collector_is_read() -> None:
    found = reading("tensorrt-llm")
    assert (found.running, found.waiting, found.kv_used, found.generated_tokens) == (3.0, 2.0, 0.25, 1024.0)
    assert found.ttft_s is not None
    assert found.tpot_s is not None
    assert (found.ttft_s.counts, found.tpot_s.counts) == ((2.0, 5.0, 1.0), (5.0, 3.0, 0.0))
    assert found.local_prompt_tokens is None  # its prompt tokens include cached ones
    assert ENGINES["tensorrt-llm"].metrics_path == "/prometheus/metrics"


def run_tensorrt_llm(folder: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Start the command of TensorRT-LLM with a server that prints its arguments; also the file of its options."""
    python, flag, script = ENGINES["tensorrt-llm"].command
    assert python == "python3"
    (folder / "trtllm-serve").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    (folder / "trtllm-serve").chmod(0o755)
    options = folder / "options.yaml"
    command = [sys.executable, flag, script.replace(tensorrt_llm.OPTIONS_FILE, str(options)), *args]
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True), options


def test_tensorrt_llm_command_writes_the_options_of_its_metrics(tmp_path: Path) -> None:
    done, options = run_tensorrt_llm(tmp_path, "a b", "$(x)", "--c")
    assert done.stdout == f"a b|$(x)|--c|--extra_llm_api_options|{options}|"
    assert yaml.safe_load(options.read_text()) == METRICS_ON


@pytest.mark.parametrize("flag", ["--config", "--extra_llm_api_options"])
@pytest.mark.parametrize("joined", [True, False])
def test_tensorrt_llm_users_options_keep_the_metrics(tmp_path: Path, flag: str, joined: bool) -> None:
    users = tmp_path / "users.yaml"
    users.write_text("kv_cache_config: {dtype: fp8}\nreturn_perf_metrics: false\n")
    argument = [f"{flag}={users}"] if joined else [flag, str(users)]
    done, options = run_tensorrt_llm(tmp_path, "m", "--config", "/absent", *argument, "--tp_size", "2")
    assert done.stdout == f"m|--tp_size|2|--extra_llm_api_options|{options}|"
    assert yaml.safe_load(options.read_text()) == {"kv_cache_config": {"dtype": "fp8"}, **METRICS_ON}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file or directory"),
        ("- a\n", "is no mapping of options"),
        ("a: [\n", "is no YAML"),
    ],
)
def test_tensorrt_llm_unusable_options_are_named(tmp_path: Path, text: str | None, says: str) -> None:
    users = tmp_path / "users.yaml"
    if text is not None:
        users.write_text(text)
    done, _ = run_tensorrt_llm(tmp_path, "m", "--config", str(users))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"spec.engine.args: --config {users}: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_tensorrt_llm_empty_options_are_none(tmp_path: Path) -> None:
    users = tmp_path / "users.yaml"
    users.write_text("# nothing\n")
    done, options = run_tensorrt_llm(tmp_path, "m", "--config", str(users))
    assert done.returncode == 0
    assert yaml.safe_load(options.read_text()) == METRICS_ON


def test_tgi_page_of_its_documentation_is_read() -> None:
    found = reading("tgi")
    assert (found.running, found.waiting, found.steps) == (3.0, 1.0, 100.0)
    assert found.prompt_tokens is not None
    assert found.output_tokens is not None
    assert (found.prompt_tokens.value_sum, found.output_tokens.value_sum) == (250.0, 100.0)
    assert (found.tpot_s, found.itl_s, found.ttft_s) == (None, None, None)  # its mean includes the prefill


def test_pages_have_what_sizing_needs() -> None:
    for engine in ("llama-cpp", "sglang", "tensorrt-llm", "tgi"):
        assert missing_for_sizing(ENGINES[engine].metrics) == ()
    assert missing_for_sizing(None)
    llama, trt, tgi = reading("llama-cpp"), reading("tensorrt-llm"), reading("tgi")
    assert (llama.prefill_s, llama.decode_s) == (0.125413, 0.041217)
    assert (trt.all_prompt_tokens, trt.kv_tokens) == (4096.0, 1000.0 * 64.0)
    assert (tgi.busy_s, tgi.prefill_s) == (2.5, 0.7)  # of all steps, and of those that prefill
    assert reading("sglang").kv_tokens == 471258.0


def test_steps_of_pages_are_counted_or_follow_from_latencies() -> None:
    """Mean step times of the recorded pages: each engine by its best source."""
    found = {}
    for engine in ("llama-cpp", "sglang", "tensorrt-llm"):
        now = reading(engine)
        none = {"itl_s": None, "tpot_s": None, "ttft_s": None, "decode_s": 0.0, "generated_tokens": 0.0}
        before = dataclasses.replace(now, at_s=now.at_s - 10.0, **none)
        interval = engine_interval(before, now)
        assert interval is not None
        whole = interval._replace(itl_s=now.itl_s, tpot_s=now.tpot_s)
        step_time = step_time_of(whole)
        assert step_time is not None
        assert needs_derivation(now)
        found[engine] = step_time
    assert found["llama-cpp"] == (pytest.approx(0.041217 / 24), False)
    assert found["sglang"] == (pytest.approx(103.41077 / 261, rel=1e-5), True)
    assert found["tensorrt-llm"] == (pytest.approx(0.088 / 8), False)


def test_token_budget_and_kv_cache_follow_the_arguments() -> None:
    llama, budgets = ENGINES["llama-cpp"], {"sglang": "--chunked-prefill-size", "tensorrt-llm": "--max_num_tokens"}
    assert (llama.token_budget(["-b", "512"]), llama.kv_tokens(["--ctx-size", "8192"])) == (512, 8192)
    for engine, flag in {**budgets, "tgi": "--max-batch-prefill-tokens"}.items():
        assert ENGINES[engine].token_budget([flag, "4096"]) == 4096
        assert ENGINES[engine].token_budget([]) is None
    assert ENGINES["sglang"].token_budget(["--chunked-prefill-size", "-1"]) is None  # not chunked


def test_limits_follow_the_arguments_of_tensorrt_llm_and_tgi() -> None:
    engine, args = ENGINES["tensorrt-llm"], ["--max_batch_size", "64", "--max_seq_len=4096"]
    assert (engine.max_sequences(args), engine.max_model_len(args), engine.queue_limit(args, 9, 8)) == (64, 4096, None)
    engine, args = ENGINES["tgi"], ["--max-batch-size", "8", "--max-total-tokens=2048", "--max-concurrent-requests=300"]
    assert (engine.max_sequences(args), engine.max_model_len(args), engine.queue_limit(args, 9, 8)) == (8, 2048, 300)
    assert engine.queue_limit([], 9, 8) == 128


def test_signals_are_fields_of_a_reading() -> None:
    fields = {field.name for field in dataclasses.fields(EngineReading)}
    assert {signal.value for signal in Signal} - fields == {Signal.STEP_TOKENS, Signal.KV_BLOCKS}


def test_map_without_prefix_selects_lines_by_name() -> None:
    metric_map = MetricMap("x", ((Signal.RUNNING, (Source("a_running"),)), (Signal.TTFT, (Source("a_ttft"),))))
    page = b'a_running_other 5\na_running{m="x"} 2\na_running{m="y"} 1\na_ttft_bucket{le="+Inf"} 3\na_ttft_sum 1.5\n'
    found = parse_metrics(page, "pod", 1.0, metric_map)
    assert found.running == 3.0
    assert found.ttft_s is not None
    assert (found.ttft_s.counts, found.ttft_s.value_sum) == ((3.0,), 1.5)


@pytest.mark.parametrize(
    ("args", "sequences", "length"),
    [
        ([], None, None),
        (["--parallel", "8"], 8, None),
        (["-np", "8", "-c", "4096"], 8, 512),
        (["-c", "4096"], None, 4096),
        (["-c", "4096", "--parallel", "8", "--kv-unified"], 8, 4096),
        (["-c", "0", "--parallel", "many"], None, None),
    ],
)
def test_llama_cpp_slots_share_the_context(args: list[str], sequences: int | None, length: int | None) -> None:
    engine = ENGINES["llama-cpp"]
    assert (engine.max_sequences(args), engine.max_model_len(args)) == (sequences, length)
    assert engine.queue_limit(args, 2048, 8) is None


def test_sglang_queue_limit_includes_running_requests() -> None:
    engine = ENGINES["sglang"]
    args = ["--max-running-requests", "32", "--max-queued-requests=100", "--context-length", "4096"]
    assert (engine.queue_limit(args, 2048, 8), engine.max_sequences(args), engine.max_model_len(args)) == (
        132,
        32,
        4096,
    )
    assert engine.queue_limit([], 2048, 8) is None


def test_last_spelling_of_a_flag_counts() -> None:
    assert last_value(["-c", "1", "--ctx-size=2"], ("--ctx-size", "-c")) == "2"
    assert last_value(["-c"], ("-c",)) == ""
    assert last_count(["-c", "-1"], ("-c",)) is None


def test_features_have_engines_and_unknown_names_are_vllm() -> None:
    for feature in Feature:
        assert engines_with(feature)
        assert {*engines_with(feature), *engines_without(feature)} == set(ENGINES)
    assert engine_named(None) is engine_named("of a newer release") is ENGINES["vllm"]
