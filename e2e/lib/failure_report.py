"""What to print when a scenario fails: the objects, Events and logs that explain it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from e2e.lib.kube import Cluster, KubectlError, Object
from plimsoll.api import labels

MAX_EVENTS, MAX_LOG_LINES, MAX_LINE_WIDTH = 40, 30, 300


def describe(cluster: Cluster, namespaces: Iterable[str], system: str) -> str:
    """The state of the namespaces and of Plimsoll itself (namespace `system`); never raises for what is gone."""
    parts = {"services": _services, "pods": _pods, "events": _events, "logs": _logs}
    return "\n".join(
        f"=== {title} in {ns}\n{_read_or_error(read, cluster, ns)}"
        for title, read in parts.items()
        for ns in dict.fromkeys([*namespaces, system])
    )


def _read_or_error(read: Callable[[Cluster, str], str], cluster: Cluster, namespace: str) -> str:
    try:
        return read(cluster, namespace).rstrip()
    except Exception as error:  # noqa: BLE001  # the report of a failure must not hide it behind another one
        return f"(not to be had: {error})"


def _pods(cluster: Cluster, namespace: str) -> str:
    return cluster.kubectl("get", "pods", "-n", namespace, "-o", "wide")


def _services(cluster: Cluster, namespace: str) -> str:
    return "\n".join(line for obj in cluster.list(labels.PLURAL, namespace) for line in _service(obj))


def _service(obj: Object) -> Iterable[str]:
    """One line for the spec, one for each tier and each condition of the status."""
    status = obj.get("status") or {}
    yield f"{obj['metadata']['name']}: {json.dumps(obj['spec'])}"
    for tier, condition_texts in (status.get("tiers") or {}).items():
        yield f"  {tier}: {json.dumps(condition_texts)}"
    for c in status.get("conditions") or []:
        yield f"  {c['type']} {c['status']} since {c['lastTransitionTime']} {c.get('reason')}: {c.get('message')}"


def _events(cluster: Cluster, namespace: str) -> str:
    return "\n".join(line for _, line in sorted(map(_event, cluster.list("events", namespace)))[-MAX_EVENTS:])


def _event(event: Object) -> tuple[str, str]:
    at, object_name = str(event.get("lastTimestamp") or event.get("eventTime")), event["involvedObject"]
    return at, f"{at} {object_name['kind']}/{object_name.get('name')} {event.get('reason')}: {event.get('message')}"


def _logs(cluster: Cluster, namespace: str) -> str:
    return "\n".join(text for pod in cluster.list("pods", namespace) for text in _pod_logs(cluster, namespace, pod))


def _short(text: str) -> str:
    """Without the lists of extensions that Envoy begins with, and without the ends of very long lines."""
    return "\n".join(line[:MAX_LINE_WIDTH] for line in text.splitlines() if "[info][main]" not in line)


def _pod_logs(cluster: Cluster, namespace: str, pod: Object) -> Iterable[str]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        for previous in (True, False) if container.get("restartCount") else (False,):
            try:
                text = _short(cluster.logs(namespace, name, container["name"], MAX_LOG_LINES, previous))
            except KubectlError as error:
                text = str(error)
            yield f"--- {name} {container['name']}{' (before its restart)' if previous else ''}\n{text}"
