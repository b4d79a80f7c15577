"""What only the node can do: signal a container's first process, drop packets, and read the API server's audit log.

Inside its own PID namespace a container's first process cannot be killed, and a hung one cannot be asked; the node
container sees every process under its real id.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from e2e.cluster.settings import NODE
from e2e.lib.kube import Object

AUDIT_LOGS = "/var/log/kubernetes/audit*.log"  # with those that a rotation has put aside
_COMPONENTS = "system:(node|kube-|apiserver|serviceaccount:kube-system)"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


def on_node(*argv: str) -> str:
    """Runs a command in the node container and returns what it printed; raises CalledProcessError."""
    return subprocess.run(["docker", "exec", NODE, *argv], capture_output=True, text=True, check=True).stdout


def main_process(pod: Object, container: str) -> str:
    """The node's id of the first process of a pod's running container."""
    status = pod["status"]
    every = [*(status.get("initContainerStatuses") or []), *status["containerStatuses"]]
    container_id = next(s["containerID"] for s in every if s["name"] == container).removeprefix("containerd://")
    tasks = on_node("ctr", "-n", "k8s.io", "task", "ls").splitlines()
    return next(line.split()[1] for line in tasks if line.startswith(container_id))


def signal_container(pod: Object, container: str, signal: str) -> None:
    """Sends a signal (`KILL`, `STOP`) to the first process of a pod's container."""
    on_node("kill", f"-{signal}", main_process(pod, container))


@contextmanager
def drop_packets(source: str, port: int) -> Iterator[None]:
    """While the block lasts, nothing that the pod at address `source` sends to this port of other pods gets there."""
    rule = ["FORWARD", "-s", source, "-p", "tcp", "--dport", str(port), "-j", "DROP"]
    on_node("iptables", "-I", *rule)
    try:
        yield
    finally:
        on_node("iptables", "-D", *rule)


def has_ended(pid: str) -> bool:
    """True once a container's first process has ended: the kernel ends all others of its PID namespace before it."""
    state = on_node("sh", "-c", f"cat /proc/{pid}/stat 2>/dev/null || true").rpartition(")")[2].split()
    return not state or state[0] in "ZX"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One finished call in the audit log."""

    at: float  # seconds since the epoch
    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    group: str = ""  # of the API; "" for the core group

    def __str__(self) -> str:
        what = f"{self.verb} {self.resource} {self.namespace}/{self.name}"
        return f"{datetime.fromtimestamp(self.at):%T} {self.user} {what} {self.code}"


def parse_audit(lines: Iterable[str]) -> Iterator[ApiCall]:
    """The finished calls among audit events, one JSON object a line; lines cut by a rotation are left out."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("stage") == "ResponseComplete":
            yield _call(event)


def _call(event: dict[str, Any]) -> ApiCall:
    ref = event.get("objectRef") or {}
    resource = "/".join(filter(None, (ref.get("resource", ""), ref.get("subresource", ""))))
    return ApiCall(
        at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
        user=event["user"]["username"],
        verb=event["verb"],
        resource=resource,
        namespace=ref.get("namespace", ""),
        name=ref.get("name", ""),
        code=(event.get("responseStatus") or {}).get("code", 0),
        group=ref.get("apiGroup", ""),
    )


def audit_writes(since: float) -> list[ApiCall]:
    """The writes to the API server since `since`, by anybody but the cluster's own components."""
    lines = on_node("sh", "-c", f"grep -hvE '{_COMPONENTS}' {AUDIT_LOGS} || true").splitlines()
    calls = (call for call in parse_audit(lines) if call.at >= since and call.verb in WRITES)
    return sorted(calls, key=lambda call: call.at)


def audit_calls_of(namespace: str) -> list[ApiCall]:
    """Every call, reads too, by the service accounts of one namespace, as long as the log reaches back."""
    account = f"system:serviceaccount:{namespace}:"
    lines = on_node("sh", "-c", f"grep -hF '{account}' {AUDIT_LOGS} || true").splitlines()
    return [call for call in parse_audit(lines) if call.user.startswith(account)]
