"""Gateways that fall silent: no replica is given back from the very moment on."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.forecast import Unknown
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Measured
from plimsoll.core.signals import Heard, TierHeard
from tests.core.test_autoscaler import MIX, Fleet, heard, wish


def silent_gateway_metrics() -> Heard:
    why = Unknown("none of 2 gateways answers")
    tiers = {Role.SERVE: TierHeard(Measured(waiting=0.0, kv_used=0.1), 1.0, 1.0)}
    return Heard(
        why,
        answered_per_s=why,
        failed_per_s=why,
        prompt_tokens=why,
        ttft_s=why,
        shed_share=why,
        held=why,
        workload=MIX,
        tiers=tiers,
    )


def test_silent_gateways_freeze_replicas_at_once() -> None:
    """What was kept since engines were silent is not given back in the very moment in which gateways are."""
    fleet = Fleet(wish())
    before = fleet.run(heard(40.0, Role.SERVE), 300).tiers["serve"].replicas
    silent_engines = replace(heard(1.0), tiers={Role.SERVE: TierHeard()})
    assert fleet.run(silent_engines, 300).tiers["serve"].replicas == before
    counts = [fleet.tick(silent_gateway_metrics()).tiers["serve"].replicas for _ in range(120)]
    assert counts == [before] * 120, counts


def test_silent_gateways_during_scale_down_freeze_replicas() -> None:
    fleet = Fleet(wish())
    fleet.run(heard(40.0, Role.SERVE), 300)
    for _ in range(600):
        now = fleet.tick(heard(4.0, Role.SERVE)).tiers["serve"].replicas
        if fleet.service.state.tiers["serve"].lower:
            break
    counts = [fleet.tick(silent_gateway_metrics()).tiers["serve"].replicas for _ in range(120)]
    assert counts == [now] * 120, counts
