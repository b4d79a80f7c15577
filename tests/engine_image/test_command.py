"""The command line of the engine, from its environment."""

import json
from dataclasses import replace

import pytest

from launcher import command, contract, settings, vllm
from launcher.settings import Settings, SettingsError
from tests.engine_image.middleware_harness import CONTRACT

PLAIN = {"PLIMSOLL_ROLE": "serve", "PLIMSOLL_MODEL": "org/model"}


def built(cpu: bool = False, **more: str) -> list[str]:
    return command.engine_command(settings.read({**PLAIN, **more}, CONTRACT), CONTRACT, cpu=cpu)


def value(argv: list[str], flag: str) -> str:
    return argv[len(argv) - argv[::-1].index(flag)]


def test_engine_argv_order_is_model_defaults_user_contract() -> None:
    argv = built(PLIMSOLL_DEFAULT_ARGS='["--dtype","auto"]', PLIMSOLL_ARGS='["--dtype","float32"]')
    assert argv[:7] == [*command.FAST_IMPORT, "vllm", "serve", "org/model"]
    assert argv[9:13] == ["--dtype", "auto", "--dtype", "float32"]
    assert argv.index("--port") > argv.index("float32")
    assert value(argv, "--port") == "8000"


@pytest.mark.parametrize("role", ["serve", "prefill", "decode"])
def test_engine_argv_simulated_runtime_takes_same_flags(role: str) -> None:
    more = {"PLIMSOLL_ROLE": role, "PLIMSOLL_ARGS": '["--max-num-seqs","16"]', "PLIMSOLL_MODEL_REVISION": "abc"}
    real, light = built(**more), built(PLIMSOLL_RUNTIME="simulated", **more)
    assert real[:6] == [*command.FAST_IMPORT, "vllm", "serve"]
    assert light[:4] == ["python3", "-m", "simulated", "serve"]
    assert light[4:] == real[6:]


def test_engine_environment_simulated_runtime_finds_package() -> None:
    read = settings.read({**PLAIN, "PLIMSOLL_RUNTIME": "simulated"}, CONTRACT)
    assert command.engine_environment({}, read, CONTRACT)["PYTHONPATH"] == str(contract.IMAGE_ROOT)


def test_runtime_defaults_to_vllm() -> None:
    assert settings.read(PLAIN, CONTRACT).runtime == "vllm"
    assert set(command.RUNTIME_PROGRAMS) == set(CONTRACT.runtimes)


def test_engine_argv_polled_paths_are_not_logged() -> None:
    quiet = value(built(), vllm.QUIET_ENDPOINTS).split(",")
    assert quiet == ["/health", CONTRACT.paths["metrics"], CONTRACT.paths["progress"]]


@pytest.mark.parametrize(
    "args",
    [
        ["--load-format", "runai_streamer", "--model-loader-extra-config", '{"concurrency":16}'],
        ["--load-format", "fastsafetensors"],
        ["--load-format=tensorizer"],
    ],
)
def test_engine_argv_streaming_loader_reads_the_download(args: list[str]) -> None:
    """A loader's arguments reach the engine, and its model is the folder that is downloaded before."""
    given = {**PLAIN, "PLIMSOLL_ARGS": json.dumps(args)}
    argv = command.engine_command(replace(settings.read(given, CONTRACT), source="s3://b/m"), CONTRACT, cpu=False)
    assert argv[: len(command.FETCH)] == [*command.FETCH]
    start = argv.index(args[0])
    assert argv[start : start + len(args)] == args
    assert "s3://b/m" not in argv


def test_engine_argv_has_contract_flags() -> None:
    argv = built(
        PLIMSOLL_SERVED_NAMES='["m","ns/m"]',
        PLIMSOLL_MODEL_REVISION="abc",
        PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS="77",
        PLIMSOLL_POD_IP="10.0.0.1",
    )
    names = argv.index("--served-model-name")
    assert argv[names + 1 : names + 3] == ["m", "ns/m"]
    assert value(argv, "--revision") == "abc"
    assert value(argv, "--shutdown-timeout") == "77"
    assert value(argv, "--middleware") == "launcher.middleware.Plimsoll"
    assert value(argv, "--host") == "0.0.0.0"


def test_engine_argv_shutdown_timeout_defaults_to_contract() -> None:
    assert value(built(), "--shutdown-timeout") == "600"


def test_engine_argv_ipv6_pod_listens_on_ipv6() -> None:
    assert value(built(PLIMSOLL_POD_IP="fd00::1"), "--host") == "::"


@pytest.mark.parametrize(
    ("role", "cpu", "config"),
    [
        ("prefill", False, {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}),
        ("prefill", True, {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}),
        ("decode", False, {"kv_connector": "NixlConnector", "kv_role": "kv_consumer",
                           "kv_load_failure_policy": "recompute"}),
        ("serve", True, None),
    ],
)  # fmt: skip
def test_engine_argv_kv_transfer_config_follows_role(role: str, cpu: bool, config: dict[str, str] | None) -> None:
    argv = built(cpu, PLIMSOLL_ROLE=role)
    assert ("--kv-transfer-config" in argv) is (config is not None)
    if config:
        assert json.loads(value(argv, "--kv-transfer-config")) == config


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        ('["--max-num-seqs","16"]', "128"),
        ('["--max_num_seqs=256"]', "2048"),
        ('["--max-num-seqs","1"]', "64"),
        ("[]", "2048"),
        ('["--max-num-seqs"]', "2048"),
        ('["--max-num-seqs","1_000"]', "8000"),
    ],
)
def test_engine_argv_limits_the_queue(args: str, limit: str) -> None:
    assert value(built(PLIMSOLL_ARGS=args), "--max-num-queued-reqs") == limit


@pytest.mark.parametrize("args", ['["--max-num-queued-reqs","7"]', '["--max_num_queued_reqs=7"]'])
def test_engine_argv_user_queue_limit_is_kept(args: str) -> None:
    assert sum(vllm.flag_name(argument) == "--max-num-queued-reqs" for argument in built(PLIMSOLL_ARGS=args)) == 1


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        ((), 2048),
        (("--max-num-seqs", "16"), 128),
        (("--max-num-seqs", "\u00b2"), 2048),
        (("--max-num-queued-reqs", "1k"), 1000),
        (("--max-num-queued-reqs", "many"), None),
    ],
)
def test_queue_limit_is_the_one_that_vllm_gets(args: tuple[str, ...], limit: int | None) -> None:
    assert command.queue_limit(args, CONTRACT) == limit


@pytest.mark.parametrize("arg", ["--port", "--port=1", "--served_model_name", "--kv-transfer-config.kv_role", "--uds"])
def test_engine_argv_reserved_flag_is_rejected_by_name(arg: str) -> None:
    with pytest.raises(SettingsError, match="PLIMSOLL_ARGS: --"):
        built(PLIMSOLL_ARGS=json.dumps([arg, "x"]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PLIMSOLL_RUNTIME", "sglang"),
        ("PLIMSOLL_RUNTIME", ""),
        ("PLIMSOLL_ROLE", "router"),
        ("PLIMSOLL_MODEL", ""),
        ("PLIMSOLL_ARGS", "--x"),
        ("PLIMSOLL_ARGS", '{"a":1}'),
        ("PLIMSOLL_SERVED_NAMES", "[1]"),
        ("PLIMSOLL_REMOTE_PREFILL_DEADLINE_SECONDS", "soon"),
        ("PLIMSOLL_REMOTE_PREFILL_DEADLINE_SECONDS", "nan"),
        ("PLIMSOLL_SHUTDOWN_TIMEOUT_SECONDS", "-1"),
    ],
)
def test_settings_invalid_value_names_its_variable(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=name):
        settings.read({**PLAIN, name: text}, CONTRACT)


def test_engine_environment_sets_nixl_host_and_python_path() -> None:
    read: Settings = settings.read({**PLAIN, "PLIMSOLL_POD_IP": "10.0.0.9"}, CONTRACT)
    environment = command.engine_environment({"PYTHONPATH": "/a", "X": "1"}, read, CONTRACT)
    assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.9"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert environment["PYTHONPATH"].endswith("engine-image:/a")
    assert environment["X"] == "1"
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in command.engine_environment({}, replace(read, pod_ip=""), CONTRACT)


@pytest.mark.parametrize(("version", "cpu"), [("0.32.0+cpu", True), ("0.32.0", False), ("", False)])
def test_cpu_platform_is_read_from_version(version: str, cpu: bool) -> None:
    assert command.is_cpu_build(version) is cpu
