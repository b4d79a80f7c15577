"""Engine arguments are read as vLLM reads them, in one place, and all programs read the same."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher import command, engine_info, settings
from launcher import vllm as launcher_vllm
from plimsoll.adapters.engine_metrics import reader_of
from plimsoll.cli import simulate
from plimsoll.engines import launched, vllm
from plimsoll.sim.errors import BadInput
from simulated.metric_families import METRIC_FAMILIES
from simulated.options import OptionsError, parse_options
from tests.engine_image.middleware_harness import CONTRACT
from tests.gateway.kube_objects import build_catalog, service

ROOT = Path(__file__).parents[2]
HOME = ROOT / "operator/plimsoll/engines/vllm.py"
COPY = ROOT / "engine-image/launcher/vllm.py"
OTHER_ENGINES = [
    HOME.with_name(name) for name in ("llama_cpp.py", "sglang.py", "tensorrt_llm.py", "tgi.py")
]  # with flags of the same names
OWN_OPTIONS = {"--model", "--max-loras", "--max-lora-rank"}  # options of `plimsoll plan` have the same names
FLAGS = {value for name, value in vars(vllm).items() if isinstance(value, str) and value.startswith("--")}

COUNTS = [
    ("8192", 8192),
    ("8_192", 8192),
    ("8k", 8000),
    ("8K", 8192),
    ("25.6k", 25_600),
    ("1.5G", None),
    ("1.5g", 1_500_000_000),
    ("1_0k", None),
    ("1.5", None),
    ("0", None),
    ("many", None),
    ("٣", None),
]


def gateway(text: str) -> int | None:
    made = service()
    made["spec"]["engine"] = {"args": ["--max-num-seqs", text]}
    found = build_catalog([made], []).services["team/chat"].max_sequences
    return None if found == vllm.DEFAULT_MAX_NUM_SEQS else found


def simulate_command(text: str) -> int | None:
    try:
        return simulate._stated_limits(["--max-num-seqs", text]).get("max_num_seqs")
    except BadInput:
        return None


def launcher(text: str) -> int | None:
    environment = {"PLIMSOLL_MODEL": "m", "PLIMSOLL_ARGS": json.dumps(["--max-num-seqs", text])}
    return engine_info.from_settings(settings.read(environment, CONTRACT), "").max_sequences


def launcher_queue(text: str) -> int | None:
    limit = command.queue_limit(("--max-num-queued-reqs", text), CONTRACT)
    per_sequence = CONTRACT.limits["queued_per_sequence"]
    default = command.queue_limit((), CONTRACT)
    scaled = command.queue_limit(("--max-num-seqs", text), CONTRACT)
    assert scaled == (default if limit is None else max(vllm.MIN_QUEUE_LIMIT, limit * per_sequence))
    return limit


def simulated(text: str) -> int | None:
    try:
        return parse_options(["serve", "m", "--max-num-queued-reqs", text], {}).max_num_queued_reqs or None
    except OptionsError:
        return None


@pytest.mark.parametrize("program", [gateway, simulate_command, launcher, launcher_queue, simulated])
@pytest.mark.parametrize(("text", "count"), COUNTS)
def test_all_programs_read_the_same_count(program: Callable[[str], int | None], text: str, count: int | None) -> None:
    assert program(text) == count


def string_constants(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield node.value if isinstance(node.value, str) else node.value.decode("latin1")


def product_files() -> list[Path]:
    files = [*ROOT.glob("operator/plimsoll/**/*.py"), *ROOT.glob("engine-image/**/*.py")]
    return [path for path in files if path not in (HOME, COPY, *OTHER_ENGINES)]


def test_flags_and_metric_names_are_written_once() -> None:
    facts = (FLAGS | set(vllm.RESERVED_FLAGS) | set(vllm.Metric) | {vllm.METRIC_PREFIX}) - OWN_OPTIONS
    copies = {(path.name, text) for path in product_files() for text in string_constants(path) if text in facts}
    assert copies == set()
    assert {"--max-num-seqs", "vllm:num_requests_running"} <= {*string_constants(HOME)}


def test_launcher_copy_needs_the_standard_library_alone() -> None:
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(HOME.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported == {"__future__", "collections", "enum", "itertools", "json", "re", "typing"}
    assert HOME.read_bytes() == COPY.read_bytes()
    assert launcher_vllm.parse_count("8k") == vllm.parse_count("8k") == 8000


def test_simulator_exports_all_metrics_that_are_read() -> None:
    read = {
        re.sub("_(total|bucket|sum|count)$", "", name) for name in reader_of(launched.METRICS).names_regex.split("|")
    }
    former = {vllm.Metric.KV_USED_UNTIL_0_10, vllm.Metric.ITL_UNTIL_0_12, vllm.PROCESS_START_METRIC}
    drafts = {"vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"}  # only if an engine drafts
    families = {f"{vllm.METRIC_PREFIX}{name}" for name in METRIC_FAMILIES}
    assert {
        name for name in read - former - drafts if name not in families and f"{name}_total" not in families
    } == set()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-num-seqs", "16"], {"--max-num-seqs": "16"}),
        (["--max_num_seqs=16"], {"--max-num-seqs": "16"}),
        (["--max-num-seqs=16", "--max-num-seqs", "8"], {"--max-num-seqs": "8"}),
        (["--enforce-eager", "--max-model-len", "-1"], {"--max-model-len": "-1"}),
        (["--hf-overrides", '{"a_b": 1}'], {"--hf-overrides": '{"a_b": 1}'}),
        (["--model-loader=a_b=c"], {"--model-loader": "a_b=c"}),
        (["-O3", "--quantization", ""], {"--quantization": ""}),
        (["--last"], {}),
        ([], {}),
    ],
)
def test_flag_values_returns_flag_value_engine_uses(args: list[str], expected: dict[str, str]) -> None:
    assert vllm.flag_values(args) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("8192", 8192),
        ("1_000", 1000),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2M", 2 * 1024**2),
        ("0.5t", 500_000_000_000),
        ("1.5K", None),
        ("1_0k", None),
        ("1__0", None),
        ("1.5", None),
        ("-1", None),
        ("auto", None),
        ("", None),
        ("1 k", None),
        ("9" * 40, None),
    ],
)
def test_parse_count_accepts_unit_suffix(text: str, expected: int | None) -> None:
    assert vllm.parse_count(text) == expected


@pytest.mark.parametrize(
    ("args", "count"),
    [
        (["--max-num-seqs", "16", "--max-num-seqs=32"], 32),
        (["--max-num-seqs", "2.5k"], 2500),
        (["--max-num-seqs", "2.5"], None),
        (["--max-num-seqs", "0"], None),
        (["--max-num-seqs", "-1"], None),
        (["--max-num-seqs", "9" * 400], None),
        (["--max-num-seqs"], None),
        (["--max-num-seqs", "--enforce-eager"], None),
        (["--max-num-batched-tokens", "16"], None),
        ([], None),
    ],
)
def test_flag_count_is_a_count_of_at_least_1(args: list[str], count: int | None) -> None:
    assert vllm.flag_count(args, vllm.MAX_NUM_SEQS) == count
