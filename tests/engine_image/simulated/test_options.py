"""The command line: what the launcher passes, what vLLM takes, what the simulation adds."""

from __future__ import annotations

import json

import pytest

from launcher.command import engine_command
from launcher.contract import load as contract
from launcher.settings import read
from simulated.cold_start import startup_phases
from simulated.options import EngineOptions, OptionsError, parse_options


def parsed(*flags: str, **environment: str) -> EngineOptions:
    """The options of a command line."""
    return parse_options(["serve", "m", *flags], environment)


@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
def test_parse_launcher_command_line_is_fully_understood(role: str) -> None:
    known = contract({})
    args = ["--max-num-seqs", "64", "--block-size=128", "--enforce-eager", "--dtype", "float32"]
    environment = {
        "PLIMSOLL_ROLE": role,
        "PLIMSOLL_MODEL": "org/model",
        "PLIMSOLL_MODEL_REVISION": "main",
        "PLIMSOLL_SERVED_NAMES": '["a", "b"]',
        "PLIMSOLL_ARGS": json.dumps(args),
        "PLIMSOLL_POD_IP": "10.0.0.7",
    }
    command = engine_command(read(environment, known), known, cpu=False)
    options = parse_options(command[command.index("serve") :], {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7"})
    assert (options.model, options.served_names, options.port) == ("org/model", ("a", "b"), 8000)
    assert options.middleware == ("launcher.middleware.Plimsoll",)
    assert (options.max_num_queued_reqs, options.shutdown_s) == (512, 600.0)
    assert (options.profile.max_num_seqs, options.profile.block_size) == (64, 128)
    assert options.kv_role == {"serve": "", "prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert options.recompute == (role == "decode")
    assert options.side_channel_host == "10.0.0.7"
    assert options.ignored == ("--enforce-eager", "--dtype", "float32")


def test_parse_tuned_arguments_of_the_operator() -> None:
    """Those of `plimsoll.core.planning.engine_tuning`, which the launcher passes before the user's."""
    options = parsed(
        "--max-num-batched-tokens", "1024", "--cudagraph-capture-sizes", "1", "2", "8192", "--max-num-seqs=64"
    )
    assert (options.profile.budget, options.profile.max_num_seqs) == (1024, 64)
    assert options.ignored == ("--cudagraph-capture-sizes", "1", "2", "8192")


def test_parse_last_duplicate_flag_wins_in_either_spelling() -> None:
    assert parsed("--max_num_seqs", "4", "--max-num-seqs=9").profile.max_num_seqs == 9
    assert parsed("--max-model-len", "2k").profile.max_model_len == 2000
    assert parsed("--max-model-len", "2K").profile.max_model_len == 2048
    assert not parsed("--no-enable-prefix-caching").prefix_caching


def test_parse_kv_cache_size_in_blocks_or_bytes() -> None:
    assert parsed("--num-gpu-blocks-override", "100").blocks == 100
    assert parsed("--kv-cache-memory-bytes", str(131_072 * 1600)).blocks == 100
    assert parsed("--num-gpu-blocks-override", "100").profile.max_model_len == 1600


def test_parse_replica_speed_is_drawn_from_pod_name() -> None:
    speeds = {parsed(HOSTNAME=f"pod-{number}").step_factor for number in range(50)}
    assert len(speeds) == 50
    assert 0.9 <= min(speeds) < 0.93 < 1.07 < max(speeds) <= 1.1
    assert parsed(HOSTNAME="pod-1").step_factor == parsed(HOSTNAME="pod-1").step_factor
    assert parsed("--spread", "0", HOSTNAME="x").step_factor == 1.0
    assert parsed("--seed", "3", HOSTNAME="x").step_factor == parsed("--seed", "3", HOSTNAME="y").step_factor


def test_parse_scales_multiply_speed_and_times() -> None:
    slow = parsed("--spread", "0", "--profile-scale", "1.4", "--start-seconds", "10")
    assert (slow.step_factor, slow.startup_s) == (1.4, 10.0)
    fast = parsed("--spread", "0", "--profile-scale", "1.4", "--start-seconds", "10", "--time-scale", "0.5")
    assert (fast.step_factor, fast.startup_s, fast.lease_s) == (0.7, 5.0, 15.0)


@pytest.mark.parametrize(("role", "factor"), [("kv_producer", 0.97), ("kv_consumer", 0.96), ("kv_both", 1.0)])
def test_parse_prefill_and_decode_roles_have_own_speed_factor(role: str, factor: float) -> None:
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    assert parsed("--spread", "0", "--kv-transfer-config", config).step_factor == pytest.approx(factor)


def test_startup_phases_take_their_time_and_log_launcher_lines() -> None:
    starts = [parsed("--start-seconds", "uniform:30,60", HOSTNAME=f"pod-{number}").startup_s for number in range(50)]
    assert 30 <= min(starts) < 33
    assert 57 < max(starts) <= 60
    for model, words in (("org/m", "Time spent downloading weights"), ("/models/m", "")):
        options = parse_options(["serve", model, "--start-seconds", "40"], {})
        parts = startup_phases(options)
        assert sum(part.seconds for part in parts) == pytest.approx(40)
        said = "\n".join(line for part in parts for _, line in part.log_lines)
        assert ("Time spent downloading weights" in said) == bool(words)
        assert all(expected in said for expected in ("Initializing a V1 LLM engine", "Loading weights took"))


def test_parse_exported_families_in_either_name_form() -> None:
    few = parsed("--export", "vllm:num_requests_waiting,num_preemptions").export
    assert few == {"num_requests_waiting", "num_preemptions"} < parsed().export


def test_parse_small_token_budget_bounds_default_sequences() -> None:
    profile = parsed("--max-num-batched-tokens", "32").profile
    assert (profile.max_num_seqs, profile.budget) == (32, 32)


WRONG = [
    (("--profile", "gpu-9000"), "h200-70b"),
    (("--profile", "/nowhere.json"), "/nowhere.json: No such file"),
    (("--spread", "1.5"), "--spread"),
    (("--profile-scale", "0"), "--profile-scale"),
    (("--start-seconds", "uniform:9,1"), "--start-seconds"),
    (("--start-seconds", "normal:9,1"), "--start-seconds"),
    (("--start-seconds", "1,2"), "--start-seconds"),
    (("--start-seconds", "soon"), "--start-seconds"),
    (("--export", "vllm:queue_depth,vllm:num_preemptions"), "--export: 'queue_depth' not among .*num_requests_waiting"),
    (("--export", ""), "--export"),
    (("--max-num-seqs", "many"), "--max-num-seqs"),
    (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), r"max_num_batched_tokens \(32\) .* \(64\)"),
    (("--max-model-len", "2000000"), "max_model_len"),
    (("--kv-transfer-config", "[]"), "--kv-transfer-config"),
    (("--kv-transfer-config", "{"), "--kv-transfer-config"),
    (("--kv-transfer-config", '{"kv_connector": "Other", "kv_role": "kv_both"}'), "NixlConnector"),
    (("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'), "kv_role"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_parse_invalid_flag_is_named(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        parsed(*flags)


def test_parse_command_without_model_is_rejected() -> None:
    with pytest.raises(OptionsError, match="model"):
        parse_options(["serve"], {})
