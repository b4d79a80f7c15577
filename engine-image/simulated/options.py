"""The command line: vLLM's flags that have an effect here, flags of the simulation, and all others ignored.

Problem: users pass vLLM's arguments, of which a hundred flags change nothing here. Idea: as in vLLM, the last of two
equal flags wins and `--a_b` is `--a-b`; an unknown one is logged once. What vLLM would reject at its start raises
OptionsError here too.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from plimsoll.engines import vllm
from plimsoll.sim.profiles import HardwareProfile, ProfileError, load
from simulated.metric_families import METRIC_FAMILIES

LEASE_SECONDS: Final = 30.0


class OptionsError(ValueError):
    """The command line is invalid; the message names the flag."""


@dataclass(frozen=True)
class LoraOptions:
    """LoRA options. failing: paths that cannot be loaded. load_s: seconds of a load. max_loras: adapters of a step."""

    enabled: bool
    failing: frozenset[str]
    load_s: float
    max_loras: int


@dataclass(frozen=True)
class TlsOptions:
    """Files of TLS. requirement: of `ssl.VerifyMode`. refresh: changed files are loaded for new connections."""

    key: str
    certificate: str
    authority: str | None
    requirement: int
    refresh: bool


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine. Times in seconds of real time, the time scale applied."""

    model: str
    served_names: tuple[str, ...]
    host: str
    port: int
    profile: HardwareProfile
    step_factor: float  # of every step: scales and spread
    noise: float
    seed: int
    startup_s: float
    time_scale: float
    transfer_rate: float
    coalesce_s: float
    export: frozenset[str]  # metric families, without `vllm:`
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    prefix_caching: bool
    blocks: int
    middleware: tuple[str, ...]
    shutdown_s: float
    kv_role: str  # of the KV connector: kv_producer, kv_consumer, kv_both, or empty without one
    recompute: bool  # what to do where KV cannot be had
    lease_s: float
    side_channel_host: str
    side_channel_port: int
    is_pooling: bool
    lora: LoraOptions
    ignored: tuple[str, ...]
    tls: TlsOptions | None = None  # None: plain HTTP


class _OptionsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionsError(message)


def _parse_count(text: str) -> int:
    count = vllm.parse_count(text)
    if count is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return count


def _parse_positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _parse_share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in 0..1")
    return value


def _parse_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _parse_duration(text: str) -> tuple[float, float]:
    """Return seconds, or the bounds of `uniform:LEAST,MOST`."""
    kind, _, rest = text.rpartition(":")
    parts = [float(part) for part in rest.split(",")]
    minimum, maximum = parts[0], parts[-1]
    if kind not in ("", "uniform") or len(parts) != (2 if kind else 1) or not 0 <= minimum <= maximum < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither seconds nor uniform:LEAST,MOST")
    return minimum, maximum


def _parse_families(text: str) -> frozenset[str]:
    """Return metric families, by vLLM's names, separated by commas."""
    families = frozenset(name.removeprefix(vllm.METRIC_PREFIX) for name in text.split(","))
    if unknown := sorted(families - METRIC_FAMILIES):
        raise argparse.ArgumentTypeError(
            f"{', '.join(map(repr, unknown))} not among {', '.join(sorted(METRIC_FAMILIES))}"
        )
    return families


def _parser() -> _OptionsParser:
    parser = _OptionsParser(prog="simulated", allow_abbrev=False, description=__doc__)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    of_vllm = parser.add_argument_group("vLLM's")
    of_vllm.add_argument(vllm.HOST, default="0.0.0.0")
    of_vllm.add_argument(vllm.PORT, type=int, default=8000)
    of_vllm.add_argument(vllm.SERVED_MODEL_NAME, nargs="+")
    of_vllm.add_argument(vllm.REVISION)
    of_vllm.add_argument(vllm.RUNNER, choices=["auto", "generate", vllm.POOLING_RUNNER], default="auto")
    of_vllm.add_argument(vllm.MAX_MODEL_LEN, type=_parse_count)
    of_vllm.add_argument(vllm.MAX_NUM_SEQS, type=_parse_count)
    of_vllm.add_argument(vllm.MAX_NUM_BATCHED_TOKENS, type=_parse_count)
    of_vllm.add_argument(vllm.BLOCK_SIZE, type=_parse_count)
    of_vllm.add_argument(vllm.NUM_GPU_BLOCKS, type=_parse_count)
    of_vllm.add_argument(vllm.KV_CACHE_BYTES, type=_parse_count)
    of_vllm.add_argument(vllm.PREFIX_CACHING, action=argparse.BooleanOptionalAction, default=True)
    of_vllm.add_argument(vllm.MAX_NUM_QUEUED_REQS, type=_parse_count)
    of_vllm.add_argument(vllm.MAX_NUM_QUEUED_TOKENS, type=_parse_count)
    of_vllm.add_argument(vllm.KV_TRANSFER_CONFIG, type=_parse_object, default={})
    of_vllm.add_argument(vllm.MIDDLEWARE, action="append", default=[])
    of_vllm.add_argument(vllm.SHUTDOWN_TIMEOUT, type=float, default=0.0)
    of_vllm.add_argument(vllm.QUIET_ENDPOINTS)
    for flag in (vllm.SSL_KEY_FILE, vllm.SSL_CERTIFICATE_FILE, vllm.SSL_AUTHORITY_FILE):
        of_vllm.add_argument(flag)
    of_vllm.add_argument(vllm.SSL_CLIENT_CERTIFICATE, type=int, default=0)
    of_vllm.add_argument(vllm.SSL_REFRESH, action="store_true")
    of_vllm.add_argument(vllm.ENABLE_LORA, action="store_true")
    for flag in (vllm.MAX_LORAS, vllm.MAX_LORA_RANK, vllm.MAX_CPU_LORAS):
        of_vllm.add_argument(flag, type=_parse_count)
    own = parser.add_argument_group("the simulation's")
    own.add_argument("--profile", default="h200-8b", help="a name, or the path of a .json file")
    own.add_argument(
        "--profile-scale", type=_parse_positive, default=1.0, help="every step takes so many times as long"
    )
    own.add_argument(
        "--spread", type=_parse_share, default=0.1, help="this replica's steps: within +- so much, drawn once"
    )
    own.add_argument("--noise", type=_parse_share, default=0.02, help="a step's relative standard deviation")
    own.add_argument("--seed", type=int, help="of spread, noise and start; from the pod's name without")
    own.add_argument("--start-seconds", type=_parse_duration, default=(0.0, 0.0), help="seconds, or uniform:LEAST,MOST")
    own.add_argument("--time-scale", type=_parse_positive, default=1.0, help="every time takes so many times as long")
    own.add_argument("--transfer-rate", type=_parse_positive, default=1e11, help="bytes a second of KV transfers")
    own.add_argument("--coalesce-seconds", type=float, default=0.02, help="how long tokens may wait for the next")
    own.add_argument("--adapter-seconds", type=float, default=0.0, help="how long the load of a LoRA adapter takes")
    own.add_argument("--failing-adapters", default="", help="paths of adapters that cannot be loaded: PATH,PATH")
    own.add_argument(
        "--export",
        type=_parse_families,
        default=METRIC_FAMILIES,
        help="metric families, all without: vllm:NAME,vllm:NAME",
    )
    return parser


def _canonical_flag(argument: str) -> str:
    """Return a flag in vLLM's canonical spelling."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> EngineOptions:
    """Return the options of a command line; raises OptionsError."""
    given, ignored = _parser().parse_known_args([_canonical_flag(argument) for argument in arguments])
    try:
        profile = _profile(given)
    except ProfileError as error:
        raise OptionsError(f"argument --profile: {error}") from None
    transfer = given.kv_transfer_config
    role = _kv_role(transfer)
    extra = transfer.get("kv_connector_extra_config") or {}
    pod = environment.get("HOSTNAME", "")
    seed = given.seed if given.seed is not None else zlib.crc32(pod.encode())
    random_source = random.Random(seed)
    spread = 1.0 + given.spread * random_source.uniform(-1.0, 1.0)
    scale = given.time_scale
    role_factor = {vllm.KV_PRODUCER: profile.producer_factor, vllm.KV_CONSUMER: profile.consumer_factor}.get(role, 1.0)
    return EngineOptions(
        model=given.model,
        served_names=tuple(given.served_model_name or [given.model]),
        host=given.host,
        port=given.port,
        profile=profile,
        step_factor=given.profile_scale * scale * spread * role_factor,
        noise=given.noise,
        seed=seed,
        startup_s=random_source.uniform(*given.start_seconds) * scale,
        time_scale=scale,
        transfer_rate=given.transfer_rate,
        coalesce_s=given.coalesce_seconds,
        export=given.export,
        max_num_queued_reqs=given.max_num_queued_reqs,
        max_num_queued_tokens=given.max_num_queued_tokens,
        prefix_caching=given.enable_prefix_caching,
        blocks=profile.kv_tokens // profile.block_size,
        middleware=tuple(given.middleware),
        shutdown_s=given.shutdown_timeout,
        kv_role=role,
        recompute=transfer.get("kv_load_failure_policy", "fail") == "recompute",
        lease_s=float(extra.get("kv_lease_duration", LEASE_SECONDS)) * scale,
        side_channel_host=environment.get(vllm.NIXL_HOST_VARIABLE, "localhost"),
        side_channel_port=int(environment.get(vllm.NIXL_PORT_VARIABLE, "5600")),
        is_pooling=given.runner == vllm.POOLING_RUNNER,
        lora=LoraOptions(
            enabled=given.enable_lora and environment.get(vllm.RUNTIME_LORA_VARIABLE, "0") == "1",
            failing=frozenset(given.failing_adapters.split(",")) - {""},
            load_s=given.adapter_seconds * scale,
            max_loras=given.max_loras or 1,
        ),
        ignored=tuple(ignored),
        tls=_tls(given),
    )


def _tls(given: argparse.Namespace) -> TlsOptions | None:
    """Return the files of TLS; None unless both key and certificate are given, as in vLLM."""
    if not (given.ssl_keyfile and given.ssl_certfile):
        return None
    return TlsOptions(
        given.ssl_keyfile, given.ssl_certfile, given.ssl_ca_certs, given.ssl_cert_reqs, given.enable_ssl_refresh
    )


def _profile(given: argparse.Namespace) -> HardwareProfile:
    """Return the profile with the changes by vLLM's flags."""
    profile = load(given.profile)
    size = given.block_size or profile.block_size
    tokens = profile.kv_tokens
    if given.kv_cache_memory_bytes:
        tokens = given.kv_cache_memory_bytes // profile.kv_bytes_per_token
    if given.num_gpu_blocks_override:
        tokens = given.num_gpu_blocks_override * size
    tokens -= tokens % size
    context = given.max_model_len or min(profile.max_model_len, tokens)
    if not 0 < context <= tokens:
        raise OptionsError(
            f"To serve at least one request with the model's max seq len ({context}), more KV cache is needed than the "
            f"{tokens} tokens there are. Try decreasing `max_model_len`."
        )
    budget = given.max_num_batched_tokens or profile.budget
    sequences = given.max_num_seqs or min(profile.max_num_seqs, budget)
    if sequences > budget:
        raise OptionsError(
            f"max_num_batched_tokens ({budget}) must be greater than or equal to max_num_seqs ({sequences})."
        )
    changed = {
        **vars(profile),
        "kv_tokens": tokens,
        "block_size": size,
        "max_model_len": context,
        "max_num_seqs": sequences,
        "budget": budget,
    }
    return HardwareProfile(**changed)


def _kv_role(transfer: Mapping[str, Any]) -> str:
    if not transfer:
        return ""
    role = transfer.get("kv_role")
    if transfer.get("kv_connector") != vllm.KV_CONNECTOR or role not in (
        vllm.KV_PRODUCER,
        vllm.KV_CONSUMER,
        vllm.KV_BOTH,
    ):
        raise OptionsError(f"argument {vllm.KV_TRANSFER_CONFIG}: only {vllm.KV_CONNECTOR} with a kv_role is simulated")
    return str(role)
