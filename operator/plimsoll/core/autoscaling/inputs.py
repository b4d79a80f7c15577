"""Inputs of a tick for one service: metrics, replicas, and the scaling spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT, Variant
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.ports import EngineInfo
from plimsoll.core.slo import Slo


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """One tier in the cluster. replicas: ordered count. engine_info: report of one engine, None before the first.
    is_uniform: all engines that report have one configuration (`measured_limits`), unlike in some rollouts. variant:
    the configuration of new pods. replicas_set_by: who else ordered the count, None if no other did. unselected: pods
    that the workload counts while no pod has the labels by which engines are found; 0 if one has.
    """

    replicas: int
    ready: int
    starting: tuple[StartingPod, ...] = ()
    engine_info: EngineInfo | None = None
    is_uniform: bool = True
    variant: Variant = UNKNOWN_VARIANT
    replicas_set_by: str | None = None
    unselected: int = 0


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """One service at one time. tiers: those that exist."""

    metrics: ServiceMetrics
    tiers: Mapping[str, TierSnapshot]


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """Scaling settings of a service.

    slo: None if nothing is sized. headroom: share of the SLO capacity to keep free. horizon_s: forecast horizon,
    None for the measured start-up time. classes: request classes for admission control.
    """

    policy: ScalingPolicy
    slo: Slo | None
    headroom: float = 0.0
    horizon_s: float | None = None
    classes: tuple[ClassPolicy, ...] = ()

    @property
    def slos(self) -> tuple[Slo, ...]:
        """SLO of each request class, or the service's SLO; empty without one."""
        service_slo = () if self.slo is None else (self.slo,)
        return tuple(one.slo for one in self.classes) or service_slo
