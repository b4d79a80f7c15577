"""From the environment to the command line of the engine; pure.

Order decides: the model, defaults of role and chart, the user's arguments, then the contract's flags. vLLM takes the
last of two equal flags, so the user wins over defaults and the contract wins over the user. The simulated runtime takes
vLLM's command line word for word, so that a fleet of it differs in nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from launcher.contract import IMAGE_ROOT, Contract
from launcher.settings import Settings, SettingsError

RUNTIME_PROGRAMS = {"vllm": ("vllm", "serve"), "simulated": ("python3", "-m", "simulated", "serve")}
MIDDLEWARE = "launcher.middleware.Plimsoll"
QUEUE_LIMIT_FLAG = "--max-num-queued-reqs"
MAX_SEQUENCES_FLAG = "--max-num-seqs"
TOKEN_BUDGET_FLAG = "--max-num-batched-tokens"
TENSOR_PARALLEL_FLAG = "--tensor-parallel-size"
COUNT_PATTERN = re.compile(r"(?P<whole>[0-9]{1,12})(?P<part>\.[0-9]{1,12})?(?P<unit>[kKmMgGtT]?)")
# The launcher and its scrapers ask for these every second: no line of log for each.
ACCESS_LOG_ARGUMENTS = ("--disable-access-log-for-endpoints", "/health,/metrics")


def flag_name(argument: str) -> str:
    """The flag that an argument sets, as vLLM reads it: `--a_b=4` and `--a-b.c` are both `--a-b`; empty for a value."""
    if not argument.startswith("--"):
        return ""
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def value_of(arguments: tuple[str, ...], name: str) -> str | None:
    """The last value given for a flag, or None where it is not given (or given without a value)."""
    value = None
    for position, argument in enumerate(arguments):
        if flag_name(argument) == name:
            following = arguments[position + 1] if position + 1 < len(arguments) else None
            value = argument.split("=", 1)[1] if "=" in argument else following
    return value


def count_of(arguments: tuple[str, ...], name: str) -> int | None:
    """The last number given for a flag, read as vLLM reads it (`8k` is 8,000, `8K` 8,192); None for none of 1 or more.

    Flags that vLLM knows by a short name too are not looked for under it.
    """
    match = COUNT_PATTERN.fullmatch(value_of(arguments, name) or "")
    if not match or (match["part"] and not match["unit"].islower()):  # vLLM takes a part of a decimal unit only
        return None
    exponent = "kmgt".find(match["unit"].lower()) + 1 if match["unit"] else 0
    unit = 1000**exponent if match["unit"].islower() else 1024**exponent
    count = int(match["whole"]) * unit + int(float(match["part"] or 0) * unit)
    return count if count >= 1 else None


def queue_limit(arguments: tuple[str, ...], contract: Contract) -> int | None:
    """The sequences that an engine accepts at once; None where its arguments set a limit that is no number."""
    guard = queue_limit_arguments(arguments, contract)
    return int(guard[1]) if guard else count_of(arguments, QUEUE_LIMIT_FLAG)


def queue_limit_arguments(arguments: tuple[str, ...], contract: Contract) -> list[str]:
    """The limit on requests in an engine (running and waiting) that holds when nothing in front of it does.

    Some sequences' worth of queue for each that can run; the contract's number where --max-num-seqs is vLLM's choice.
    """
    if any(flag_name(argument) == QUEUE_LIMIT_FLAG for argument in arguments):
        return []
    sequences = value_of(arguments, MAX_SEQUENCES_FLAG)
    limit = contract.limits["queued_requests"]
    if sequences is not None and sequences.isdecimal():
        limit = max(64, int(sequences) * contract.limits["queued_per_sequence"])
    return [QUEUE_LIMIT_FLAG, str(limit)]


def kv_transfer_config(role: str, cpu: bool) -> dict[str, str] | None:
    """vLLM's KV transfer configuration of a role; None for an engine that serves alone.

    `recompute`: with vLLM's default a stream whose prefill engine died ends well, without a token.
    """
    if role == "serve":
        return None
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_producer" if role == "prefill" else "kv_consumer"}
    if role == "decode":
        config["kv_load_failure_policy"] = "recompute"
    if cpu:
        config["kv_buffer_device"] = "cpu"
    return config


def engine_command(settings: Settings, contract: Contract, *, cpu: bool) -> list[str]:
    """The command line of the engine; `cpu` where vLLM's platform is the CPU.

    Raises SettingsError for a flag that the contract keeps for itself.
    """
    arguments = (*settings.default_args, *settings.args)
    for argument in arguments:
        if flag_name(argument) in contract.reserved_args:
            raise SettingsError(f"{contract.env['args']}: {flag_name(argument)} is set by Plimsoll")
    command = [
        *RUNTIME_PROGRAMS[settings.runtime],
        settings.model,
        *ACCESS_LOG_ARGUMENTS,
        *arguments,
        *queue_limit_arguments(arguments, contract),
    ]
    command += ["--host", "::" if ":" in settings.pod_ip else "0.0.0.0", "--port", str(contract.ports["api"])]
    command += ["--served-model-name", *settings.served_names]
    if settings.revision:
        command += ["--revision", settings.revision]
    transfer = kv_transfer_config(settings.role, cpu)
    if transfer:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return [*command, "--middleware", MIDDLEWARE, "--shutdown-timeout", str(settings.shutdown_timeout)]


def engine_environment(base: Mapping[str, str], settings: Settings, contract: Contract) -> dict[str, str]:
    """The engine's environment: the launcher's own, where NIXL is reached, and the path to the middleware."""
    environment = dict(base)
    environment["PYTHONPATH"] = ":".join(filter(None, [str(IMAGE_ROOT), base.get("PYTHONPATH", "")]))
    environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(contract.ports["nixl"])
    if settings.pod_ip:
        environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.pod_ip
    return environment


def is_cpu_build(version: str) -> bool:
    """Whether vLLM will choose its CPU platform: it looks for this word in its own version (`0.32.0+cpu`)."""
    return "cpu" in version
