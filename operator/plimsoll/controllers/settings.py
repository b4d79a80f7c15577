"""Where the operator's settings come from: the chart's file, the pod's environment, and kopf's own knobs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import kopf
import yaml
from pydantic import ValidationError

from plimsoll.core.errors import PlimsollError
from plimsoll.resources.platform import Platform

DEFAULT_CONFIG = "/etc/plimsoll/operator.yaml"


class BadSettings(PlimsollError):
    """The configuration file or the environment cannot be used; the message names the place."""


@dataclass(frozen=True)
class Settings:
    """Everything that the operator process is told.

    identity: unique name of this process, for the lease. prometheus_url: where the past is known, "" for nowhere.
    """

    platform: Platform
    namespace: str
    identity: str
    probe_port: int = 8080
    metrics_port: int = 8081
    prometheus_url: str = ""


def load(environment: dict[str, str] | None = None) -> Settings:
    """Settings of this process. Raises BadSettings."""
    env = dict(os.environ) if environment is None else environment
    path = Path(env.get("PLIMSOLL_CONFIG", DEFAULT_CONFIG))
    try:
        platform = Platform.model_validate(yaml.safe_load(path.read_text()) or {})
    except OSError as error:
        raise BadSettings(f"{path}: {error.strerror}; PLIMSOLL_CONFIG names the file") from error
    except (yaml.YAMLError, ValidationError) as error:
        raise BadSettings(f"{path}: {error}") from error
    return Settings(
        platform=platform,
        namespace=env.get("POD_NAMESPACE", platform.gateway.namespace),
        identity=env.get("POD_NAME", socket.gethostname()),
        probe_port=int(env.get("PLIMSOLL_PROBE_PORT", "8080")),
        metrics_port=int(env.get("PLIMSOLL_METRICS_PORT", "8081")),
        prometheus_url=env.get("PLIMSOLL_PROMETHEUS_URL", ""),
    )


def tune(settings: kopf.OperatorSettings, *, namespaced: bool) -> None:
    """kopf as it is used here: a watch, and nothing written to any object.

    Peering freezes streams when another operator runs with its defaults; the lease does its work. The watch times
    make a stalled stream end within seconds of its due time. Scanning needs rights beyond one namespace.
    """
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = namespaced
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 320
    settings.watching.connect_timeout = 30
    settings.networking.request_timeout = 30
