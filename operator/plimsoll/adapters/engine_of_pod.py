"""What a pod says of its engine: which one it is, its arguments, and where its metrics are.

Problem: pods of several revisions run at once, so the spec does not say what a pod runs.

Idea: the pod says it. A pod with a launcher has the engine's arguments in its environment. Any other has the label
`plimsoll.dev/engine`, its arguments in the container, and an annotation if the user named the metrics. The copy of a
target's pod has the ports of its API and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.engines.engine import Engine, MetricMap, Signal, Source
from plimsoll.engines.registry import engine_named

Object = Mapping[str, Any]

MAX_CLOCK_SKEW_S: Final = 2.0  # between two API servers, which write creation times in whole seconds


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where the metrics of an engine are, and their names."""

    port: int
    path: str
    names: MetricMap


def engine_of(pod: Object) -> Engine:
    """The engine of a pod. The simulator counts as vLLM, whose arguments and metrics it has."""
    return engine_named((pod["metadata"].get("labels") or {}).get(labels.ENGINE))


def has_launcher(pod: Object) -> bool:
    """Whether Plimsoll's launcher runs the engine. It runs none of a target."""
    return engine_of(pod).launched and labels.ADOPTED not in pod


def is_of_earlier_service(pod: Object, service: Object) -> bool:
    """Whether an engine pod belongs to an earlier service of this name, because it is older than the service.

    Labels do not tell the two apart. A pod that stays may be older by the clock skew; one that is leaving may not. Pods
    of targets are not the service's own, and may have any age.
    """
    created_s, service_created_s = (epoch_s(one["metadata"].get("creationTimestamp")) for one in (pod, service))
    if created_s is None or service_created_s is None or labels.ADOPTED in pod:
        return False
    skew_s = 0.0 if pod["metadata"].get("deletionTimestamp") else MAX_CLOCK_SKEW_S
    return created_s < service_created_s - skew_s


def engine_args(pod: Object) -> tuple[object, ...]:
    """The engine's arguments, those of variables and defaults first. Ignores what cannot be parsed."""
    if labels.ADOPTED in pod:
        return tuple(command_line(engine_container(pod)))
    containers = pod.get("spec", {}).get("containers") or ()
    if not (engine := engine_of(pod)).launched:
        own = [one for one in containers if one.get("name") == "engine"]
        return engine.all_args(own[0].get("args") or (), own[0].get("env")) if own else ()
    names = engine_contract().env
    given = {entry.get("name"): entry.get("value") for one in containers for entry in one.get("env") or ()}
    return tuple(arg for name in ("default_args", "args") for arg in _list(given.get(names[name])))


def api_port(pod: Object) -> int:
    """The port of the engine's API."""
    if labels.ADOPTED in pod:
        return int(pod[labels.ADOPTED]["port"])
    for container in pod.get("spec", {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "api" and "containerPort" in port:
                return int(port["containerPort"])
    return engine_contract().ports["api"]


def engine_container(pod: Object) -> dict[str, Any]:
    """The container that runs the engine: that of the service, or the one that names vLLM, else the first."""
    containers: list[dict[str, Any]] = (pod.get("spec") or {}).get("containers") or [{}]
    named = (one for one in containers if _runs_engine(one, is_own=labels.ADOPTED not in pod))
    return next(named, containers[0])


def command_line(container: Object) -> list[str]:
    """Command and arguments of a container; those of `sh -c` are split at blanks."""
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    return [part for word in words for part in (word.split() if "vllm " in word else [word])]


def _runs_engine(container: Object, *, is_own: bool) -> bool:
    if is_own:
        return bool(container.get("name") == "engine")
    return "vllm" in " ".join((str(container.get("image", "")), *command_line(container)))


def metrics_address(pod: Object) -> MetricsAddress | None:
    """Where the engine's metrics are; None if it has none. Raises ValueError for an annotation of another form."""
    engine, contract = engine_of(pod), engine_contract()
    if labels.ADOPTED in pod and engine.metrics is not None:
        return MetricsAddress(int(pod[labels.ADOPTED]["metricsPort"]), engine.metrics_path, engine.metrics)
    if engine.launched and engine.metrics is not None:
        return MetricsAddress(contract.ports["launcher"], contract.paths["metrics"], engine.metrics)
    if engine.metrics is not None:
        return MetricsAddress(api_port(pod), engine.metrics_path, engine.metrics)
    text = (pod["metadata"].get("annotations") or {}).get(labels.METRICS)
    return None if text is None else _named(text)


def _named(text: str) -> MetricsAddress:
    """Return the address in the annotation. Raises ValueError for another form."""
    try:
        document = orjson.loads(text)
        signals = tuple((Signal(signal), (Source(str(metric)),)) for signal, metric in document["names"].items())
        return MetricsAddress(int(document["port"]), str(document["path"]), MetricMap("the engine", signals))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the annotation {labels.METRICS} has another form: {error}") from error


def _list(text: object) -> list[object]:
    try:
        read = orjson.loads(text) if isinstance(text, str) else []
    except ValueError:
        return []
    return read if isinstance(read, list) else []
