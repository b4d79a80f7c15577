"""The checks of the launcher on a GPU, where no GPU is needed: their verdicts, and the kept result."""

import json
import struct
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_engine import check, compare, lora_adapter, results
from bench.hardware import dummy_models
from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.core.slo import Slo
from plimsoll.engines import launched

DATA = Path(check.__file__).parent / "data"
ABOUT: dict[str, Any] = {
    "engine_version": "0.32.0",
    "config": {"model_type": "llama"},
    "self_benchmark": {"prefill": [[16, 0.01]], "decode": [[1, 24, 0.005]]},
    "limits": {"max_sequences": 256, "kv_tokens": 1, "token_budget": None, "block_tokens": 16, "max_model_len": 1},
    "accelerator": {"name": "H", "count": 1},
}


def test_failed_check_is_counted_and_on_disk(tmp_path: Path) -> None:
    found = results.Results(tmp_path / "results.json")
    assert found.check("one", True, seconds=1.5)
    assert not found.check("two", False)
    written = json.loads((tmp_path / "results.json").read_text())
    assert (written["passed"], written["failed"]) == (1, ["two"])
    assert written["checks"][0] == {"check": "one", "passed": True, "seconds": 1.5}


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, []),
        ({"config": None}, ["config"]),
        ({"self_benchmark": None}, ["self_benchmark"]),
        ({"accelerator": {"name": None, "count": 1}}, ["accelerator.name"]),
        ({"limits": ABOUT["limits"] | {"kv_tokens": None}}, ["limits.kv_tokens"]),
    ],
)
def test_about_without_a_fact_is_incomplete(change: dict[str, Any], missing: list[str]) -> None:
    assert results.missing_about(ABOUT | change) == missing


def test_page_without_a_signal_names_it() -> None:
    missing = results.missing_signals(
        parse_metrics(b'vllm:num_requests_running{engine="0"} 1\n', "pod", 0.0, launched.METRICS)
    )
    assert "running" not in missing
    assert {"waiting", "kv_used", "ttft_s", "instance_id"} <= set(missing)
    assert "transfer_s" not in missing  # only with NIXL


def test_ready_during_a_phase_is_too_early() -> None:
    warm = {"phase": None, "readyz": 200}
    early = {"phase": "warmup", "readyz": 200}
    assert results.ready_before_warm([{"phase": "init", "readyz": 503}, early, warm]) == [early]


def test_flag_that_is_only_a_prefix_is_lacking() -> None:
    assert results.flag_errors("vllm serve m --port 1", ("--port", "--por")) == ["--por"]


def test_adapter_file_has_the_shapes_of_the_model(tmp_path: Path) -> None:
    config = dict(dummy_models.CONFIGS["8b"]) | {"num_hidden_layers": 2}
    raw = (lora_adapter.write_adapter(tmp_path, config) / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    assert len(header) == 2 * 2 * 2
    shapes = {name.split("layers.0.self_attn.")[-1]: entry["shape"] for name, entry in header.items()}
    assert shapes["q_proj.lora_A.weight"] == [8, 4096]
    assert shapes["v_proj.lora_B.weight"] == [1024, 8]
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(raw) - 8 - length


def test_stored_result_has_every_engine_and_no_failure() -> None:
    kept = json.loads((DATA / "h200.json").read_text())
    assert kept["failed"] == []
    assert {entry["check"].split(":")[0] for entry in kept["checks"]} == set(check.STAGES)


def test_recommended_arguments_are_those_of_the_plan() -> None:
    given = Namespace(hardware="h200-8b-launcher", rate=17.0, ttft="500ms", tpot="30ms", itl_limit="40ms")
    plan, args = compare.recommended_args(given)
    assert args == ["--max-num-seqs", "144", "--max-num-batched-tokens", "1024"]
    kept = json.loads((DATA / "h200-compare.json").read_text())
    assert kept["args"] == args
    assert kept["plan"]["tiers"]["serve"]["binding"] == plan["tiers"]["serve"]["binding"]


def test_compared_requests_are_judged_after_the_warm_up() -> None:
    def row(at_s: float, ttft_s: float, gap_s: float) -> dict[str, Any]:
        return {
            "at_s": at_s,
            "first_s": ttft_s,
            "last_s": ttft_s + 0.02,
            "output": 3,
            "late_s": 0.0,
            "gap_s": gap_s,
            "ok": True,
        }

    rows = [row(1.0, 9.0, 9.0), row(6.0, 0.1, 0.03), row(7.0, 0.1, 0.05), row(8.0, 0.9, 0.03)]
    result = compare.judge(rows, Slo(0.95, ttft_s=0.5, tpot_s=0.03), 0.04, 10.0)
    assert result["sent"] == 3
    assert result["in_promise"] == pytest.approx(2 / 3)
    assert result["gaps_within_limit"] == pytest.approx(2 / 3)
    assert result["longest_gap_s"] == 0.05
