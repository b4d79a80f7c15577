"""LoRA adapters at the gateway: model names of their own, served by the engines of their service.

Problem: a request for an adapter should go where the adapter is loaded. Engines know that, and the operator reports it
with a delay of some seconds.

Idea: the status of the service names ready pods without an adapter. They are avoided while another engine can serve;
admission control, if the service has it, also counts the adapters at each engine (`core.admission.adapter_slots`).
The engine has the last word: it refuses a request for an adapter that it has not loaded, and Envoy tries the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.normalize import value_at
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.routing.picker import FALLBACKS, Pick
from plimsoll.core.types import Role
from plimsoll.telemetry import gateway_metrics

ADAPTER_HEADER: Final = "x-plimsoll-adapter"


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter of a service. `names` are its model names, the preferred one first.

    `not_loaded_on` are the names of pods that have not loaded it, by the operator's last report.
    """

    name: str
    names: tuple[str, ...]
    not_loaded_on: frozenset[str] = frozenset()


class AdapterRequests:
    """Counts requests at engines by adapter, in metrics that end with the adapter."""

    def __init__(self) -> None:
        self._counted: set[tuple[str, str]] = set()  # service and adapter

    def record(self, service: str, adapter: AdapterEntry) -> None:
        """Count a request for an adapter of this service."""
        self._counted.add((service, adapter.name))
        gateway_metrics.GATEWAY_ADAPTER_REQUESTS.labels(service, adapter.name).inc()

    def keep_only(self, adapters: Mapping[str, Mapping[str, AdapterEntry]]) -> None:
        """Remove the metrics of adapters that are gone. `adapters`: those of all services, by service and name."""
        known = {(service, one.name) for service, by_name in adapters.items() for one in by_name.values()}
        for gone in self._counted - known:
            gateway_metrics.GATEWAY_ADAPTER_REQUESTS.remove(*gone)
        self._counted &= known


def not_loaded_on(inference_service: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Returns the pods without an adapter in the status of an InferenceService, by adapter. Ignores invalid entries."""
    entries = value_at(inference_service, "status", "adapters")
    found = {}
    for entry in entries if isinstance(entries, list) else ():
        pods = value_at(entry, "notLoadedOn")
        if isinstance(name := value_at(entry, "name"), str) and isinstance(pods, list):
            found[name] = frozenset(pod for pod in pods if isinstance(pod, str))
    return found


def not_loaded_at(entries: Iterable[AdapterEntry], endpoints: Iterable[Endpoint]) -> dict[str, frozenset[str]]:
    """Returns the addresses of the endpoints without an adapter, by the adapter's name."""
    missing = {entry.name: entry.not_loaded_on for entry in entries if entry.not_loaded_on}
    addresses = {endpoint.pod: endpoint.address for endpoint in endpoints} if missing else {}
    return {name: frozenset(addresses[pod] for pod in pods if pod in addresses) for name, pods in missing.items()}


def prefer_loaded(
    pick: Pick, adapter: AdapterEntry, endpoints: Sequence[Endpoint], rank: Callable[[Endpoint], int]
) -> Pick:
    """Returns the pick with engines that have loaded the adapter first, and the least loaded of these if it has none.

    `rank` orders endpoints, lowest first. If no engine has the adapter, the pick stays.
    """
    avoided = adapter.not_loaded_on
    if not avoided or not _is_avoided(avoided, pick):
        return pick
    loaded = [e for e in endpoints if e.routable and e.role is not Role.PREFILL and e.pod not in avoided]
    if not loaded:
        return pick
    chosen = [e for e in (pick.endpoint, *pick.fallbacks) if e.pod not in avoided]
    chosen += sorted((e for e in loaded if e not in chosen), key=rank)
    best, *fallbacks = chosen[: 1 + FALLBACKS]
    return Pick(best, tuple(fallbacks))


def _is_avoided(avoided: frozenset[str], pick: Pick) -> bool:
    return any(endpoint.pod in avoided for endpoint in (pick.endpoint, *pick.fallbacks))
