"""What a service costs, by the price of `spec.cost`: in the status, and as metrics.

Problem: a price per offered request flatters a service that rejects much, and rejected requests are no product.

Idea: all ordered GPUs are paid, idle and starting ones too. The denominators are successful requests and their output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.api.v1alpha1 import CostSpec, InferenceService
from plimsoll.controllers.object_cache import Key
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.types import Unavailable
from plimsoll.telemetry import operator_metrics


@dataclass(frozen=True)
class CostReport:
    """The cost of a service at present, in the currency of `spec`; None if unknown, as without a success."""

    spec: CostSpec
    per_hour: float
    per_million_tokens: float | None = None
    per_request: float | None = None

    def status(self) -> dict[str, Any]:
        """Returns `status.cost`."""
        amounts = {
            "perHour": self.per_hour,
            "perMillionTokens": self.per_million_tokens,
            "perSuccessfulRequest": self.per_request,
        }
        return {name: self.spec.format_amount(amount) for name, amount in amounts.items() if amount is not None}


def gpus_by_tier(service: InferenceService, snapshot: ServiceSnapshot) -> dict[str, int]:
    """Returns the GPUs of the ordered replicas of each tier."""
    sized = service.spec.sized_tiers.items()
    return {kind: tier.replica_gpus * snapshot.tiers[kind].replicas for kind, tier in sized if kind in snapshot.tiers}


def cost_of(service: InferenceService, service_state: ServiceState, snapshot: ServiceSnapshot) -> CostReport | None:
    """Returns the cost of a service, None without a price."""
    cost = service.spec.cost
    if cost is None:
        return None
    gpus, served_per_s = sum(gpus_by_tier(service, snapshot).values()), snapshot.metrics.succeeded_per_s
    if isinstance(served_per_s, Unavailable):
        return CostReport(cost, cost.per_hour(gpus))
    workload = service_state.workload
    mean_tokens = 0.0 if isinstance(workload, Unavailable) else workload.mean(workload.output_tokens)
    return CostReport(
        cost,
        cost.per_hour(gpus),
        _known(cost.per_million_tokens(gpus, served_per_s * mean_tokens)),
        _known(cost.per_request(gpus, served_per_s)),
    )


def cost_status(service: InferenceService, service_state: ServiceState, snapshot: ServiceSnapshot) -> dict[str, Any]:
    """Returns `status.cost`, empty without a price."""
    cost = cost_of(service, service_state, snapshot)
    return {} if cost is None else cost.status()


def _known(amount: float | Unavailable) -> float | None:
    return None if isinstance(amount, Unavailable) else amount


class CostGauges:
    """Exports the GPUs of services and what they cost an hour; rules divide that by what gateways have served."""

    def __init__(self) -> None:
        self._exported: dict[Key, tuple[set[str], tuple[str, str] | None]] = {}

    def export(self, key: Key, service: InferenceService, gpus: Mapping[str, int]) -> None:
        """Set the series of a service. Without a price it has no cost."""
        name, cost = "/".join(key), service.spec.cost
        price = None if cost is None else (service.model_name, cost.currency)
        current = set(gpus), price
        if self._exported.get(key, current) != current:
            self.forget(key)
        for tier, count in gpus.items():
            operator_metrics.SERVICE_GPUS.set(count, name, tier)
        if cost is not None and price is not None:
            operator_metrics.SERVICE_COST.set(cost.per_hour(sum(gpus.values())), name, *price)
        self._exported[key] = current

    def forget(self, key: Key) -> None:
        """Remove the series of a deleted service."""
        if self._exported.pop(key, None) is not None:
            for gauge in (operator_metrics.SERVICE_GPUS, operator_metrics.SERVICE_COST):
                gauge.remove_service("/".join(key))
