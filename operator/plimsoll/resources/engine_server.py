"""Builds the container of an engine without a launcher: the user's image, and Kubernetes in the launcher's place.

- Its start-up is over when its health path answers 200; until then nothing else is probed.
- An engine with a path that asks for progress is restarted when it hangs.
- A terminating pod first sleeps. An engine that finishes running requests on SIGTERM sleeps until no gateway sends it
  new ones. Any other sleeps for the drain timeout, because the signal would end its requests.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.engines.engine import PROGRESS_SECONDS, Feature, Launch

Object = dict[str, Any]

STARTUP_SECONDS: Final = 3600  # downloading a model of hundreds of gigabytes can take most of an hour
_STARTUP_PERIOD_SECONDS: Final = 5


def metadata(service: InferenceService) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations by which operator and gateway read the pod's engine; none for one with a launcher."""
    engine = service.spec.engine
    if engine.contract.launched:
        return {}, {}
    metrics = engine.metrics
    if metrics is None:
        return {labels.ENGINE: engine.runtime}, {}
    document = {"port": metrics.port or engine.api_port, "path": metrics.path, "names": metrics.names()}
    return {labels.ENGINE: engine.runtime}, {labels.METRICS: orjson.dumps(document).decode()}


def metrics_port(service: InferenceService) -> int | None:
    """The port of a tier's engine for its metrics; None for an engine without any."""
    engine = service.spec.engine
    if engine.contract.launched:
        return engine_contract().ports["launcher"]
    if engine.contract.metrics is not None:
        return engine.api_port
    return None if engine.metrics is None else engine.metrics.port or engine.api_port


def command(service: InferenceService, model: str, gpus: int) -> Object:
    """Entry point and arguments. model: repository or path in the container."""
    engine, source = service.spec.engine, service.spec.model
    launch = Launch(
        model=model,
        from_hub=source.scheme == "hf",
        served_name=service.model_name,
        task=source.task,
        gpus=gpus,
        port=engine.api_port,
        revision=source.revision or "",
    )
    entry_point = list(engine.command or engine.contract.command)
    arguments = [*engine.contract.own_args(launch), *engine.args]
    return {**({"command": entry_point} if entry_point else {}), **({"args": arguments} if arguments else {})}


def ports_and_probes(service: InferenceService) -> Object:
    """Ports, probes, and the sleep of a terminating pod."""
    engine, drain = service.spec.engine, engine_contract().drain
    api, metrics = engine.api_port, metrics_port(service)
    health = {"httpGet": {"path": engine.health_path or engine.contract.health_path, "port": "api"}}
    liveness = {**health, "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5}
    if engine.contract.progress_path is not None:  # one failure is patient already: three are a minute without a token
        liveness = {
            "httpGet": {"path": engine.contract.progress_path, "port": "api"},
            "periodSeconds": PROGRESS_SECONDS,
            "failureThreshold": 3,
            "timeoutSeconds": PROGRESS_SECONDS + 5,
        }
    drains = Feature.DRAIN_ON_TERM in engine.contract.features
    sleep_s = int(drain["max_rejecting_seconds"]) + (0 if drains else engine.drain_seconds)
    return {
        "ports": [
            {"name": "api", "containerPort": api},
            *([] if metrics in (None, api) else [{"name": "metrics", "containerPort": metrics}]),
        ],
        "startupProbe": {
            **health,
            "periodSeconds": _STARTUP_PERIOD_SECONDS,
            "failureThreshold": STARTUP_SECONDS // _STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 5,
        },
        "readinessProbe": {**health, "periodSeconds": 1, "failureThreshold": 3, "timeoutSeconds": 5},
        "livenessProbe": liveness,
        "lifecycle": {"preStop": {"sleep": {"seconds": sleep_s}}},
    }


def environment(service: InferenceService, model: str) -> list[Object]:
    """Variables that an engine without launcher has besides those of its home: the model, download folders, its own."""
    names, source, engine = engine_contract().env, service.spec.model, service.spec.engine.contract
    cache = f"{engine_contract().paths['home']}/hf"
    return [
        {"name": names["model"], "value": model},
        {"name": names["model_revision"], "value": source.revision or ""},
        *({"name": name, "value": f"{cache}/{engine.name}"} for name in engine.cache_variables),
        *({"name": name, "value": value} for name, value in engine.variables),
    ]
