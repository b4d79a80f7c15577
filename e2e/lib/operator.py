"""The operator that leads, as scenarios ask it: what it decided, what it had heard, and its own metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from e2e.lib.kube import Cluster, Object
from e2e.lib.metrics import Samples
from e2e.lib.request_log import RequestRecord

LEASE = "plimsoll-operator"
PORT = 8081
MINUTE_S, SLOT_S = 60.0, 5.0  # of what the operator calls the last minute, to the nearest slot


class OperatorClient:
    """Found by its lease at every question, so that a restart in between is none of the scenario's business."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace

    @property
    def leader(self) -> str:
        """The pod that holds the lease, "" if none does."""
        lease = self._cluster.get("leases", LEASE, self._namespace) or {}
        return str((lease.get("spec") or {}).get("holderIdentity") or "")

    def explain(self, key: str) -> Object:
        """The document of service NAMESPACE/NAME; raises httpx.HTTPStatusError while it cannot be asked."""
        return dict(json.loads(self._cluster.in_pod(self._namespace, self.leader, PORT, f"/explain/{key}")))

    def metrics(self) -> Samples:
        """Raises httpx.HTTPStatusError while it cannot be asked."""
        return Samples.parse(self._cluster.in_pod(self._namespace, self.leader, PORT, "/metrics"))

    def log(self, tail: int = 2000) -> list[Object]:
        """The last lines of its log."""
        output = self._cluster.logs(self._namespace, self.leader, "operator", tail)
        return [dict(json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def observed_at(document: Object) -> float:
    """When the last tick was that `explain` tells of, seconds since the epoch."""
    return datetime.fromisoformat(document["metrics"]["at"]).timestamp()


def gateways_read_at(document: Object) -> float:
    """When the gateways had said what that tick heard."""
    return observed_at(document) - float(document["metrics"]["gateways"]["age_s"] or 0.0)


def last_minute_bounds(
    first_attempts: Iterable[RequestRecord], records: Iterable[RequestRecord], document: Object
) -> tuple[int, int]:
    """How many requests must be, and can be, in what the operator calls the last minute, which begins with a slot.

    A request is in the slot of the reading in which it is first counted: not before it is sent, and not after it has
    ended and all gateways were read.
    """
    begin, read_at = SLOT_S * math.floor((observed_at(document) - MINUTE_S) / SLOT_S), gateways_read_at(document)
    surely = sum(begin <= r.sent_at and r.ended_at <= read_at for r in first_attempts)
    return surely, sum(begin - SLOT_S <= r.sent_at <= observed_at(document) for r in records)


def metric_value(document: Object, name: str) -> float:
    """What gateways told, 0 where it is not known."""
    value: Any = document["metrics"]["gateways"][name]
    return float(value) if isinstance(value, int | float) else 0.0
