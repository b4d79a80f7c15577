"""Metrics as scenarios compare them: snapshots of counters, their differences and sums.

Idea: a snapshot is a mapping from (name, labels) to a value; the differences between two snapshots of one tier are
what a scenario speaks about, so they are one operator.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from e2e.lib.kube import Cluster
from plimsoll.gateway.one_queue.ownership import Ownership

Key = tuple[str, frozenset[tuple[str, str]]]


class Samples:
    """All samples of one exposition, or of the sum of several."""

    def __init__(self, values: Mapping[Key, float]) -> None:
        self._values = dict(values)

    @classmethod
    def parse(cls, text: str) -> Self:
        families = text_string_to_metric_families(text)
        return cls({(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples})

    @classmethod
    def sum(cls, parts: Iterable[Samples]) -> Self:
        total: Counter[Key] = Counter()
        for part in parts:
            total.update(part._values)
        return cls(total)

    def __sub__(self, before: Samples) -> Samples:
        return Samples({key: value - before._values.get(key, 0.0) for key, value in self._values.items()})

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name which carry these labels; 0 if there is none."""
        label_items = set(labels.items())
        return sum(
            value for (n, sample_labels), value in self._values.items() if n == name and label_items <= sample_labels
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric by one label's values."""
        sums: Counter[str] = Counter()
        for (n, sample_labels), value in self._values.items():
            if n == name:
                sums[dict(sample_labels).get(label, "")] += value  # type: ignore[assignment]
        return dict(sums)

    def names(self, prefix: str) -> set[str]:
        return {n for n, _ in self._values if n.startswith(prefix)}


def prompt_sources(samples: Samples) -> dict[str, int]:
    """Prompt tokens of a tier by where their KV cache came from."""
    by_source = samples.by("vllm:prompt_tokens_by_source_total", "source")
    return {source: int(tokens) for source, tokens in by_source.items()}


class GatewayClient:
    """The gateway's own pages, read in its pods."""

    def __init__(self, cluster: Cluster, namespace: str, picker_port: int = 8081) -> None:
        self._cluster, self._namespace, self._port = cluster, namespace, picker_port

    @property
    def pods(self) -> list[str]:
        found = self._cluster.list("pods", self._namespace, "app.kubernetes.io/component=gateway")
        return [p["metadata"]["name"] for p in found if "deletionTimestamp" not in p["metadata"]]

    def signals(self) -> list[dict[str, Any]]:
        """`/signals` of every gateway pod; raises httpx.HTTPStatusError while a picker is away."""
        return [json.loads(self._cluster.in_pod(self._namespace, pod, self._port, "/signals")) for pod in self.pods]

    def metrics(self, without: str = "") -> Samples:
        """The sum over all gateway pods but `without`."""
        pods = (pod for pod in self.pods if pod != without)
        return Samples.sum(
            Samples.parse(self._cluster.in_pod(self._namespace, pod, self._port, "/metrics")) for pod in pods
        )

    def services(self, key: str) -> list[dict[str, Any]]:
        """What each gateway that knows service NAMESPACE/NAME says about it."""
        return [found for signals in self.signals() if (found := signals["services"].get(key))]

    def slots(self, key: str) -> dict[str, int]:
        """The sequences that each gateway pod may run on one replica of a service: all at its owner, else a share."""
        known = [signals for signals in self.signals() if key in signals["services"]]
        return {signals["gateway"]: signals["services"][key]["admission"]["slots"] for signals in known}

    def owner(self, key: str) -> str:
        """The gateway pod that owns a service without fallback, if all pods are ready. Needs a gateway."""
        pods = self.pods
        ownership = Ownership(pods[0])
        ownership.set_candidates(pods)
        return ownership.owner_of(key)

    def has_owner(self, key: str, slots: int) -> bool:
        """Whether the owner has all slots of a replica, and the others the share that they use without the owner."""
        pods, owner = self.pods, self.owner(key)
        try:
            return self.slots(key) == {pod: slots if pod == owner else max(1, slots // len(pods)) for pod in pods}
        except httpx.HTTPError:  # one of them comes or goes
            return False

    def has_all_peers(self) -> bool:
        """Whether every gateway can ask all others."""
        count = len(self.pods)
        return self.metrics().total("plimsoll_gateway_peers_connected") == count * (count - 1)

    def fallbacks(self, without: str = "") -> int:
        """Requests that a gateway has decided about without their owner, such as on a machine without a free core.

        without: a pod whose counts restart meanwhile.
        """
        return int(self.metrics(without).total("plimsoll_gateway_owner_fallbacks_total"))

    def fallbacks_by_pod(self) -> dict[str, int]:
        """The same for each gateway pod, since it began."""
        pages = {pod: self._cluster.in_pod(self._namespace, pod, self._port, "/metrics") for pod in self.pods}
        name = "plimsoll_gateway_owner_fallbacks_total"
        return {pod: int(Samples.parse(page).total(name)) for pod, page in pages.items()}

    def prefill_counts(self, key: str) -> Counter[str]:
        """How many requests were prefilled remotely and locally."""
        total: Counter[str] = Counter()
        for service in self.services(key):
            total.update(service["prefill"])
        return total

    def routable_pods(self, key: str) -> set[str]:
        """The pods that some gateway would pick."""
        return {e["pod"] for reported in self.services(key) for e in reported["endpoints"] if e["routable"]}

    def in_flight(self, key: str) -> Counter[str]:
        """Requests under way by pod."""
        total: Counter[str] = Counter()
        for service in self.services(key):
            total.update({e["pod"]: e["inflight"] for e in service["endpoints"]})
        return total

    def envoy_stats(self, pattern: str) -> Counter[str]:
        """Envoy's counters whose names match, over all pods, from its admin socket (in no other way reachable)."""
        total: Counter[str] = Counter()
        program = _ADMIN.format(path=f"/stats?filter={pattern}")
        for pod in self.pods:
            output = self._cluster.execute(self._namespace, pod, "picker", "python3", "-c", program)
            lines = (line.split(": ") for line in output.splitlines() if ": " in line)
            total.update({name: int(value) for name, value in lines if value.isdigit()})
        return total

    def failures_allowed(self) -> int:
        """How often Envoy let a request pass because the picker did not answer."""
        return self.envoy_stats("failure_mode_allowed").total()


_ADMIN = """
import http.client, socket
c = http.client.HTTPConnection("admin")
c.sock = socket.socket(socket.AF_UNIX)
c.sock.connect("/run/plimsoll/admin.sock")
c.request("GET", "{path}")
print(c.getresponse().read().decode())
"""
