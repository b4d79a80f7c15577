"""Configuration of the operator: the chart's file, the pod's environment, and kopf's settings."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import kopf
import yaml
from pydantic import ValidationError

from plimsoll.controllers import kopf_storage
from plimsoll.core.errors import PlimsollError
from plimsoll.resources.platform_config import PlatformConfig

DEFAULT_CONFIG_PATH = "/etc/plimsoll/operator.yaml"
LIST_CHUNK = 10  # objects per list call of kopf; each has up to 1.5 MB


class InvalidConfig(PlimsollError):
    """The configuration file or the environment is invalid; the message names the place."""


@dataclass(frozen=True)
class OperatorConfig:
    """Configuration of the operator process.

    identity: unique name of this process, for the lease. prometheus_url: metrics store with the request history, ""
    for none.
    """

    platform: PlatformConfig
    namespace: str
    identity: str
    probe_port: int = 8080
    metrics_port: int = 8081
    prometheus_url: str = ""


def load_config(environment: dict[str, str] | None = None) -> OperatorConfig:
    """The configuration of this process. Raises InvalidConfig."""
    env = dict(os.environ) if environment is None else environment
    path = Path(env.get("PLIMSOLL_CONFIG", DEFAULT_CONFIG_PATH))
    try:
        platform = PlatformConfig.model_validate(yaml.safe_load(path.read_text()) or {})
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}; PLIMSOLL_CONFIG names the file") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise InvalidConfig(f"{path}: {error}") from error
    return OperatorConfig(
        platform=platform,
        namespace=env.get("POD_NAMESPACE", platform.gateway.namespace),
        identity=env.get("POD_NAME", socket.gethostname()),
        probe_port=int(env.get("PLIMSOLL_PROBE_PORT", "8080")),
        metrics_port=int(env.get("PLIMSOLL_METRICS_PORT", "8081")),
        prometheus_url=env.get("PLIMSOLL_PROMETHEUS_URL", ""),
    )


def configure_kopf(settings: kopf.OperatorSettings, *, namespaced: bool) -> None:
    """Restrict kopf to a watch that writes to no object.

    Peering would freeze the streams while another operator runs with kopf's defaults; the lease replaces it. The watch
    timeouts end a stalled stream within seconds of its due time. Scanning needs permissions beyond one namespace.
    Nothing that a user writes into an object may stop its events: kopf reads no annotation, has no finalizer, and goes
    on at once after an error. Small chunks and a short idle time bound what it holds of large objects.
    """
    settings.peering.standalone = True
    settings.persistence.diffbase_storage = kopf_storage.NoDiffBase()
    settings.persistence.progress_storage = kopf_storage.NoProgress()
    settings.persistence.finalizer = ""  # no object can have it, so kopf never patches one to remove it
    settings.queueing.error_delays = ()
    settings.queueing.idle_timeout = 0.1
    settings.watching.chunk_size = LIST_CHUNK
    settings.posting.enabled = False
    settings.scanning.disabled = namespaced
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 320
    settings.watching.connect_timeout = 30
    settings.networking.request_timeout = 30
