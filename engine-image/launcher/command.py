"""Builds the command line of the engine from the environment, without side effects.

Order decides: the model, defaults of role and chart, the user's arguments, then the contract's flags. vLLM takes the
last of two equal flags, so the user wins over defaults and the contract wins over the user. The simulated runtime takes
vLLM's command line unchanged, so that a fleet of it differs in nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from launcher import vllm
from launcher.contract import IMAGE_ROOT, Contract
from launcher.settings import LoraBounds, PodGroup, Settings, SettingsError
from launcher.tls import EngineTls

FAST_IMPORT = ("python3", "-P", "-m", "launcher.fast_import")  # becomes the program that follows
RUNTIME_PROGRAMS = {
    "vllm": (*FAST_IMPORT, "vllm", "serve"),
    "simulated": ("python3", "-m", "simulated", "serve"),
}
FETCH = ("python3", "-P", "-m", "launcher.fetch")  # becomes the engine once the model is there
MIDDLEWARE = "launcher.middleware.Plimsoll"
HEALTH_PATH = "/health"


def queue_limit(arguments: tuple[str, ...], contract: Contract) -> int | None:
    """Return the sequences that an engine accepts at once; None if its arguments set a limit that is no number."""
    limits = contract.limits
    return vllm.queue_limit(arguments, default=limits["queued_requests"], per_sequence=limits["queued_per_sequence"])


def queue_limit_arguments(arguments: tuple[str, ...], contract: Contract) -> list[str]:
    """Return the default limit on requests in an engine, running and waiting, for load without admission control.

    Empty if the arguments set one.
    """
    if vllm.has_flag(arguments, vllm.MAX_NUM_QUEUED_REQS):
        return []
    return [vllm.MAX_NUM_QUEUED_REQS, str(queue_limit(arguments, contract))]


def access_log_arguments(contract: Contract) -> list[str]:
    """Return arguments that exclude the paths of probes and scrapes from the access log."""
    paths = (HEALTH_PATH, contract.paths["metrics"], contract.paths["progress"])
    return [vllm.QUIET_ENDPOINTS, ",".join(paths)]


def kv_transfer_config(role: str, cpu: bool) -> dict[str, str] | None:
    """Return vLLM's KV transfer configuration of a role; None for an aggregated engine.

    `recompute`: with vLLM's default a stream ends successfully without a token if its prefill engine fails.
    """
    if role == "serve":
        return None
    config = {"kv_connector": vllm.KV_CONNECTOR, "kv_role": vllm.KV_PRODUCER if role == "prefill" else vllm.KV_CONSUMER}
    if role == "decode":
        config["kv_load_failure_policy"] = "recompute"
    if cpu:
        config["kv_buffer_device"] = "cpu"
    return config


def lora_arguments(bounds: LoraBounds | None) -> list[str]:
    """Return the flags for loading adapters at run time; none without bounds."""
    if bounds is None:
        return []
    return [
        vllm.ENABLE_LORA,
        *(vllm.MAX_LORAS, str(bounds.max_loras)),
        *(vllm.MAX_LORA_RANK, str(bounds.max_lora_rank)),
        *(vllm.MAX_CPU_LORAS, str(bounds.max_cpu_loras)),
    ]


def group_arguments(group: PodGroup | None) -> list[str]:
    """Return the flags that make an engine of several pods, without Ray; none without a group.

    torch.distributed connects the pods over the leader's address. Only the leader has an API server.
    """
    if group is None:
        return []
    return [
        *(vllm.EXECUTOR_BACKEND, "mp"),
        *(vllm.NODES, str(group.size)),
        *(vllm.NODE_RANK, str(group.rank)),
        *(vllm.MASTER_ADDRESS, group.leader),
        *([vllm.HEADLESS] if group.rank else []),
    ]


def check_group_arguments(arguments: Sequence[str], contract: Contract) -> None:
    """Raise SettingsError if arguments say how an engine of several pods spans them, except for the operator's sizes.

    These come first, each once.
    """
    sizes = {vllm.TENSOR_PARALLEL_SIZE, vllm.PIPELINE_PARALLEL_SIZE}
    for argument in arguments:
        if not re.match(vllm.GROUP_FLAGS, argument):
            continue
        if (name := vllm.flag_name(argument)) not in sizes:
            names = f"{contract.env['default_args']} or {contract.env['args']}"
            raise SettingsError(f"{names}: {argument} is set by Plimsoll for an engine of several nodes")
        sizes.remove(name)


def engine_command(settings: Settings, contract: Contract, *, cpu: bool) -> list[str]:
    """Return the command line of the engine; `cpu` if vLLM's platform is the CPU.

    Raises SettingsError for a flag that is reserved by the contract, or that would change a group.
    """
    arguments = (*settings.default_args, *settings.args)
    for argument in arguments:
        if vllm.flag_name(argument) in vllm.RESERVED_FLAGS:
            raise SettingsError(f"{contract.env['args']}: {vllm.flag_name(argument)} is set by Plimsoll")
    if settings.group is not None:
        check_group_arguments(arguments, contract)
    command = [
        *(FETCH if settings.source else ()),
        *RUNTIME_PROGRAMS[settings.runtime],
        settings.model,
        *access_log_arguments(contract),
        *arguments,
        *queue_limit_arguments(arguments, contract),
    ]
    command += [vllm.HOST, "::" if ":" in settings.pod_ip else "0.0.0.0", vllm.PORT, str(contract.ports["api"])]
    command += [vllm.SERVED_MODEL_NAME, *settings.served_names]
    if settings.revision:
        command += [vllm.REVISION, settings.revision]
    command += lora_arguments(settings.lora)
    command += group_arguments(settings.group)
    if (tls := EngineTls.of(settings.tls, contract)) is not None:
        command += tls.arguments()
    transfer = kv_transfer_config(settings.role, cpu)
    if transfer:
        command += [vllm.KV_TRANSFER_CONFIG, json.dumps(transfer)]
    return [*command, vllm.MIDDLEWARE, MIDDLEWARE, vllm.SHUTDOWN_TIMEOUT, str(settings.shutdown_timeout)]


def engine_environment(base: Mapping[str, str], settings: Settings, contract: Contract) -> dict[str, str]:
    """Return the engine's environment: the launcher's own, the address of NIXL, and the path to the middleware."""
    environment = dict(base)
    environment["PYTHONPATH"] = ":".join(filter(None, [str(IMAGE_ROOT), base.get("PYTHONPATH", "")]))
    environment[vllm.NIXL_PORT_VARIABLE] = str(contract.ports["nixl"])
    if settings.lora is not None:
        environment[vllm.RUNTIME_LORA_VARIABLE] = "1"
    if settings.pod_ip:
        environment[vllm.NIXL_HOST_VARIABLE] = settings.pod_ip
    return environment


def is_cpu_build(version: str) -> bool:
    """Whether vLLM will choose its CPU platform, which its version shows (`0.32.0+cpu`)."""
    return "cpu" in version
