"""Settings of one engine by the operator, read from the environment once.

Every name comes from the contract. An invalid value is a SettingsError that names its variable, so that the pod's
termination message says what to repair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.contract import Contract


class SettingsError(ValueError):
    """A setting is missing or invalid; the message names the environment variable."""


@dataclass(frozen=True)
class LoraBounds:
    """Adapters in GPU memory, their highest rank, and adapters in CPU memory."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int


@dataclass(frozen=True)
class PodGroup:
    """The pods of an engine of several nodes: their number, this one's rank (0: the leader), and the leader's host."""

    size: int
    rank: int
    leader: str


@dataclass(frozen=True)
class TlsSettings:
    """Mutual TLS: the Secret as NAMESPACE/NAME, and names in certificates.

    `name` is that of all engines of the namespace, `release` that of operator and gateways.
    """

    secret: str
    name: str
    release: str


@dataclass(frozen=True)
class Settings:
    """Settings of one engine; times in seconds.

    `source` is the URI of a model that is downloaded before the engine starts, "" for none. `lora` are the bounds on
    LoRA adapters, None without LoRA. `tls` is None for plain HTTP. `runtime` is the engine program; `task` is the
    model's task; `pod_ip` is empty outside a pod, `revision` if none is pinned. `group` is None for an engine of one
    pod.
    """

    runtime: str
    role: str
    task: str
    model: str
    revision: str
    served_names: tuple[str, ...]
    default_args: tuple[str, ...]
    args: tuple[str, ...]
    pod_ip: str
    shutdown_timeout: int
    remote_prefill_deadline: float
    max_body_bytes: int
    source: str = ""
    lora: LoraBounds | None = None
    tls: TlsSettings | None = None
    group: PodGroup | None = None

    @property
    def is_worker(self) -> bool:
        """Whether another pod of the engine has its API server."""
        return self.group is not None and self.group.rank > 0


def read(environment: Mapping[str, str], contract: Contract) -> Settings:
    """Return the settings from environment variables; raises SettingsError."""
    names = contract.env
    runtime = _read_choice(environment, names["runtime"], "vllm", contract.runtimes)
    role = _read_choice(environment, names["role"], "serve", contract.roles)
    task = _read_choice(environment, names["task"], "generate", contract.tasks)
    model = environment.get(names["model"], "")
    if not model:
        raise SettingsError(f"{names['model']} is not set")
    return Settings(
        runtime=runtime,
        role=role,
        task=task,
        model=model,
        revision=environment.get(names["model_revision"], ""),
        served_names=_read_strings(environment, names["served_names"]) or (model,),
        default_args=_read_strings(environment, names["default_args"]),
        args=_read_strings(environment, names["args"]),
        pod_ip=environment.get(names["pod_ip"], ""),
        shutdown_timeout=int(
            _read_number(environment, names["shutdown_timeout"], contract.drain.shutdown_timeout_seconds)
        ),
        remote_prefill_deadline=_read_number(
            environment, names["remote_prefill_deadline"], contract.remote_prefill_deadline_seconds
        ),
        max_body_bytes=int(_read_number(environment, names["max_body"], contract.limits["max_body_bytes"])),
        source=environment.get(names["model_source"], ""),
        lora=_read_lora(environment, names["lora"]),
        group=_read_group(environment, contract),
        tls=_read_tls(environment, names["tls"]),
    )


def _read_group(environment: Mapping[str, str], contract: Contract) -> PodGroup | None:
    """Return the group by the variables of the LeaderWorkerSet controller; None without them."""
    size_name, rank_name, leader_name = (contract.env[key] for key in ("group_size", "group_rank", "leader_address"))
    texts = environment.get(size_name, ""), environment.get(rank_name, "")
    if not any(texts) or texts[0] == "1":
        return None
    if not all(text.isascii() and text.isdigit() for text in texts) or int(texts[1]) >= int(texts[0]):
        raise SettingsError(f"{size_name}: {texts[0]!r} and {rank_name}: {texts[1]!r} are no size and rank of a group")
    leader = environment.get(leader_name, "")
    if not leader:
        raise SettingsError(f"{leader_name} is not set")
    return PodGroup(int(texts[0]), int(texts[1]), leader)


def _read_lora(environment: Mapping[str, str], name: str) -> LoraBounds | None:
    text = environment.get(name, "")
    if not text:
        return None
    try:
        bounds = LoraBounds(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{name} has no bounds on adapters: {error}") from None
    if not all(type(value) is int and value > 0 for value in vars(bounds).values()):
        raise SettingsError(f"{name}: {text!r} has a bound that is not a positive whole number")
    return bounds


def _read_tls(environment: Mapping[str, str], name: str) -> TlsSettings | None:
    text = environment.get(name, "")
    try:
        return TlsSettings(**json.loads(text)) if text else None
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{name} has no Secret and name of certificates: {error}") from None


def _read_choice(environment: Mapping[str, str], name: str, default: str, known: tuple[str, ...]) -> str:
    value = environment.get(name, default)
    if value not in known:
        raise SettingsError(f"{name}: {value!r} is not one of {', '.join(known)}")
    return value


def _read_strings(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = environment.get(name, "")
    if not text:
        return ()
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SettingsError(f"{name} is not a JSON list of strings")
    return tuple(values)


def _read_number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        raise SettingsError(f"{name}: {text!r} is not a number") from None
    if not 0 < value < 1e12:
        raise SettingsError(f"{name}: {text!r} is not a positive number")
    return value
