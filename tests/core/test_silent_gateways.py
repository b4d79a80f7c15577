"""Gateways that fall silent: no replica is given back from the very moment on."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.types import Role, Unavailable
from tests.core.test_autoscaler import MIX, Fleet, scaling_spec, service_metrics


def silent_gateway_metrics() -> ServiceMetrics:
    why = Unavailable("none of 2 gateways answers")
    tiers = {Role.SERVE: TierMetrics(LaggingSignals(waiting=0.0, kv_used=0.1), 1.0, 1.0)}
    return ServiceMetrics(
        why,
        succeeded_per_s=why,
        failed_per_s=why,
        mean_prompt_tokens=why,
        ttft_s=why,
        rejected_share=why,
        queued=why,
        workload=MIX,
        tiers=tiers,
    )


def test_silent_gateways_freeze_replicas_at_once() -> None:
    """What was kept since engines were silent is not given back in the very moment in which gateways are."""
    fleet = Fleet(scaling_spec())
    before = fleet.run(service_metrics(40.0, Role.SERVE), 300).tiers["serve"].replicas
    silent_engines = replace(service_metrics(1.0), tiers={Role.SERVE: TierMetrics()})
    assert fleet.run(silent_engines, 300).tiers["serve"].replicas == before
    counts = [fleet.tick(silent_gateway_metrics()).tiers["serve"].replicas for _ in range(120)]
    assert counts == [before] * 120, counts


def test_silent_gateways_during_scale_down_freeze_replicas() -> None:
    fleet = Fleet(scaling_spec())
    fleet.run(service_metrics(40.0, Role.SERVE), 300)
    for _ in range(600):
        now = fleet.tick(service_metrics(4.0, Role.SERVE)).tiers["serve"].replicas
        if fleet.service.decision_state.tiers["serve"].downscale_candidates:
            break
    counts = [fleet.tick(silent_gateway_metrics()).tiers["serve"].replicas for _ in range(120)]
    assert counts == [now] * 120, counts
