"""GPUs that a cluster has: pods beyond them are pending, as the operator sees them, and cost nothing."""

from __future__ import annotations

from random import Random

import pytest

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import TierDecision
from plimsoll.core.scaling.decision import Limit
from plimsoll.sim.errors import BadInput
from plimsoll.sim.fleet import Cards, Tier
from plimsoll.sim.policies.base import Look, Static
from plimsoll.sim.visit import Asked, End
from tests.sim import lab

EVENLY = [Asked(float(n), 100, 2) for n in range(100)]


def tier(gpus: int, each: int = 1) -> Tier:
    hardware = lab.plant(start_s=20.0, gpus={Role.SERVE: each})
    return Tier(Role.SERVE, hardware, Random(1), Cards(gpus))


def test_tier_without_free_gpu_keeps_pod_pending_with_reason() -> None:
    of = tier(3, each=2)
    of.begin(1)
    made, _ = of.set(2, 10.0)
    assert not of.place(made[0], 10.0)
    assert of.counts() == (2, 1, 1, 0)
    [seen] = of.seen(500.0, 1000.0).starting
    assert seen.refused is not None
    assert "nvidia.com/gpu" in seen.refused
    assert (seen.phase, seen.since_s) == ("schedule", 1010.0)
    assert of.paid_s(500.0) == 500.0


def test_tier_pending_pod_starts_when_gpu_is_freed() -> None:
    of = tier(1)
    [old] = of.begin(1)
    [new], _ = of.set(2, 10.0)
    assert not of.place(new, 10.0)
    of.end(old, 40.0)
    assert of.place(new, 40.0)
    assert new.ready_s == pytest.approx(60.0)
    assert sum(seconds for _, seconds in new.took) == pytest.approx(50.0)
    [seen] = of.seen(40.0, 0.0).starting
    assert seen.refused is None
    assert of.paid_s(100.0) == pytest.approx(40.0 + 60.0)


def test_tier_paid_time_stops_at_the_given_time() -> None:
    of = tier(3)
    [first] = of.begin(1)
    of.set(0, 100.0)
    of.end(first, 700.0)
    assert [of.paid_s(until_s) for until_s in (50.0, 600.0, 700.0, 900.0)] == [50.0, 600.0, 700.0, 700.0]
    [late], _ = of.set(1, 800.0)
    assert of.place(late, 800.0)
    of.end(late, 810.0)
    assert [of.paid_s(until_s) for until_s in (750.0, 805.0, 900.0)] == [700.0, 705.0, 710.0]


def test_tier_removed_pending_pod_frees_no_gpu() -> None:
    cards = Cards(1)
    of = Tier(Role.SERVE, lab.plant(), Random(1), cards)
    of.begin(1)
    of.set(2, 10.0)
    of.set(1, 20.0)
    assert cards.free == 0
    assert not of.pending
    assert of.paid_s(30.0) == 30.0


def test_simulate_too_few_gpus_at_start_is_rejected() -> None:
    with pytest.raises(BadInput, match="--max-gpus: too few for the 2 serve replicas"):
        lab.simulate(EVENLY, Static({Role.SERVE: 2}, gated=False), initial={Role.SERVE: 2}, max_gpus=1)


class ScriptedPolicy(Static):
    """Orders so many, gives some back later."""

    def wanted(self, look: Look) -> dict[Role, int]:
        return {Role.PREFILL: 1 if look.now_s < 50.0 else 2, Role.DECODE: 3 if look.now_s < 50.0 else 1}


def test_tiers_share_gpus_oldest_pending_pod_first() -> None:
    both = {Role.PREFILL: 1, Role.DECODE: 1}
    policy = ScriptedPolicy(both, gated=False)
    done = lab.simulate(EVENLY, policy, lab.disaggregated(), lab.plant(start_s=10.0), initial=both, max_gpus=3)
    up = {role: [(at_s, ready) for at_s, one, _, ready, *_ in done.world.log.replicas if one is role] for role in both}
    assert max(ready for _, ready in up[Role.DECODE]) == 2  # the third one found no GPU
    second = next(at_s for at_s, ready in up[Role.PREFILL] if ready == 2)
    freed = next(at_s for at_s, one, *_, draining in done.world.log.replicas if at_s > 50.0 and not draining)
    assert second >= max(freed, 50.0) + 10.0 - 1e-6
    assert sum(one.paid_s(100.0) for one in done.world.tiers.values()) <= 3 * 100.0
    assert {visit.end for visit in done.visits} == {End.OK}


def test_operator_sees_unschedulable_pods() -> None:
    rush = [Asked(n / 10, 1500, 300) for n in range(1500)]
    of = lab.service(tiers={"serve": {"minReplicas": 1, "maxReplicas": 8}})
    done = lab.simulate(rush, of=of, hardware=lab.plant(scale=4.0), max_gpus=2)
    assert max(ready for _, _, _, ready, *_ in done.world.log.replicas) == 2
    decisions = [why for _, _, _, why in done.world.log.changes if isinstance(why, TierDecision)]
    assert any(Limit.UNSCHEDULABLE in one.limits for one in decisions)
    assert any("Insufficient nvidia.com/gpu" in step.why for one in decisions for step in one.steps)
