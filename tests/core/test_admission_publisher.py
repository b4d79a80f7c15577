"""What a service's gateways are told over time: made with the load line, changed seldom, never forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.publication import MAX_CAPACITY_STEPS, AdmissionLimits
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.autoscaling.admission_publisher import MIN_PUBLISH_INTERVAL_S, AdmissionPublisher
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, TierPolicy
from plimsoll.core.autoscaling.startup_models import Variant, select_variant
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.engine_model.kv_transfer import MIN_TRANSFERRED_TOKENS, TRANSFER_MEMORY_S, TransferStats
from plimsoll.core.types import Role
from tests.core.test_autoscaler import ABOUT, SLO, Fleet, scaling_spec, service_metrics

CLASSES = (ClassPolicy("default", 0, SLO),)
GATEWAYS = ("gw-a", "gw-b")


def busy_fleet(mode: ScalingMode = ScalingMode.AUTO) -> Fleet:
    fleet = Fleet(replace(scaling_spec(mode=mode), classes=CLASSES))
    fleet.run(service_metrics(20.0, Role.SERVE), 30)
    return fleet


def snapshot(fleet: Fleet, starting: tuple[StartingPod, ...] = ()) -> ServiceSnapshot:
    count = fleet.replicas["serve"]
    return ServiceSnapshot(
        service_metrics(20.0, Role.SERVE), {"serve": TierSnapshot(count, count - len(starting), starting, ABOUT)}
    )


def test_publish_unchanged_inputs_keeps_publication() -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    assert keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    limits = keeper.published
    assert limits is not None
    assert limits.cost_model is not None
    assert limits.cost_model.tpot_s == (SLO.tpot_s,)
    assert sum(limits.shares.values()) == limits.cost_model.batch
    for second in range(20):
        assert not keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s + second)
    assert keeper.published is limits


def test_publish_without_slo_is_none_without_engine_permissive() -> None:
    fleet, keeper = Fleet(replace(scaling_spec(), classes=CLASSES), about=None), AdmissionPublisher()
    fleet.tick(service_metrics(20.0, Role.SERVE))
    keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.cost_model is None
    assert keeper.publish(
        fleet.service, snapshot(fleet), replace(fleet.scaling_spec, classes=()), GATEWAYS, fleet.now_s
    )
    assert keeper.published is None


def test_restore_keeps_limits_until_new_engine_info() -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    fresh, after = Fleet(fleet.scaling_spec, about=None), AdmissionPublisher.restore(keeper.published)
    fresh.tick(service_metrics(20.0, Role.SERVE))
    after.publish(fresh.service, snapshot(fresh), fresh.scaling_spec, GATEWAYS, fresh.now_s)
    assert keeper.published is not None
    assert after.published is not None
    assert after.published.cost_model == keeper.published.cost_model
    assert after.published.shares == keeper.published.shares


def test_publish_starting_replicas_have_ready_time_and_work() -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    fleet.service.record_startup("serve", [("load", 30.0), ("whole", 30.0)])
    fleet.arrives = False
    keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    before = keeper.published
    fleet.replicas["serve"] += 2
    new = tuple(StartingPod(f"p{n}", fleet.now_s) for n in range(2))
    fleet.tick(service_metrics(20.0, Role.SERVE), serve=new)
    later_s = fleet.now_s + MIN_PUBLISH_INTERVAL_S
    assert keeper.publish(fleet.service, snapshot(fleet, new), fleet.scaling_spec, GATEWAYS, later_s)
    assert before is not None
    assert keeper.published is not None
    assert keeper.published.ready_at_s is not None
    assert keeper.published.ready_at_s > later_s
    assert keeper.published.ready_capacity > before.ready_capacity
    assert before.ready_at_s is None


def published_after_startups(tier: TierSnapshot) -> tuple[Fleet, AdmissionLimits]:
    """A busy service that has had starts of 10 to 80 s, and what is published for a tier in this state."""
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    for seconds in (10.0, 20.0, 80.0):
        fleet.service.record_startup("serve", [("load", seconds)])
    snapshot = ServiceSnapshot(service_metrics(20.0, Role.SERVE), {"serve": tier})
    keeper.publish(fleet.service, snapshot, fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    return fleet, keeper.published


def test_publish_startup_begun_by_a_request_has_median_time() -> None:
    """As that of a pod that has begun. With a higher quantile, gateways reject who would most likely be served."""
    fleet, published = published_after_startups(TierSnapshot(9, 0))
    model = fleet.service.tiers["serve"].startup_model
    assert published.startup_s == pytest.approx(model.total.quantile_s(0.5))
    assert published.startup_s < 0.8 * model.horizon_s


def test_publish_expects_ordered_replica_after_the_median() -> None:
    """As before the order, and as once its pod starts: in between, nobody is rejected who would be served."""
    fleet, published = published_after_startups(TierSnapshot(0, 0))
    model = fleet.service.tiers["serve"].startup_model
    assert published.startup_s is None, "a replica is ordered"
    assert published.ready_at_s == pytest.approx(fleet.now_s + model.total.quantile_s(0.5))


def test_publish_startup_time_depends_on_same_model() -> None:
    for after, reported in ((Variant("m", "engine:2"), True), (Variant("other", "engine:1"), False)):
        fleet, keeper = busy_fleet(), AdmissionPublisher()
        fleet.service.tiers["serve"].startup_models = select_variant(
            fleet.service.tiers["serve"].startup_models, Variant("m", "engine:1")
        )
        fleet.service.record_startup("serve", [("load", 30.0)])
        fleet.service.tiers["serve"].startup_models = select_variant(fleet.service.tiers["serve"].startup_models, after)
        fleet.arrives = False
        fleet.replicas["serve"] += 1
        new = (StartingPod("p", fleet.now_s),)
        fleet.tick(service_metrics(20.0, Role.SERVE), serve=new)
        keeper.publish(fleet.service, snapshot(fleet, new), fleet.scaling_spec, GATEWAYS, fleet.now_s)
        assert keeper.published is not None
        assert (keeper.published.ready_at_s is not None) is reported


@pytest.mark.parametrize("new", [1, 2, 8, 30])
def test_publish_staggered_startups_have_cumulative_work(new: int) -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    fleet.service.record_startup("serve", [("load", 30.0), ("whole", 30.0)])
    fleet.arrives = False
    ready = fleet.replicas["serve"]
    fleet.replicas["serve"] += new
    starting = tuple(StartingPod(f"p{n}", fleet.now_s - n) for n in range(new))
    fleet.tick(service_metrics(20.0, Role.SERVE), serve=starting)
    assert keeper.publish(fleet.service, snapshot(fleet, starting), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    limits = keeper.published
    assert limits is not None
    assert limits.ready_at_s is not None
    if new == 1:
        assert limits.capacity_steps == ()
        return
    assert len(limits.capacity_steps) == min(new, MAX_CAPACITY_STEPS)
    assert limits.capacity_steps[0][0] == limits.ready_at_s
    assert limits.capacity_steps[-1][1] == limits.ready_capacity
    times, works = zip(*limits.capacity_steps, strict=True)
    assert list(times) == sorted(times)
    each = limits.ready_capacity / (ready + new)
    assert works[0] == pytest.approx((ready + 1) * each)
    for at_s, work in limits.capacity_steps:  # who starts a second later is there a second later
        assert work == pytest.approx((ready + 1 + at_s - limits.ready_at_s) * each)


def test_publish_recommend_mode_announces_no_replica() -> None:
    fleet, keeper = busy_fleet(ScalingMode.RECOMMEND), AdmissionPublisher()
    keeper.publish(fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert not keeper.published.starting
    assert keeper.published.ready_at_s is None


def test_publish_without_engine_drops_stale_limits() -> None:
    fleet, keeper = Fleet(replace(scaling_spec(), classes=CLASSES), about=None), AdmissionPublisher()
    fleet.tick(service_metrics(0.0, Role.SERVE))
    asleep = ServiceSnapshot(service_metrics(0.0, Role.SERVE), {"serve": TierSnapshot(0, 0)})
    assert keeper.publish(fleet.service, asleep, fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.cost_model is not None
    assert keeper.publish(
        fleet.service, snapshot(fleet), fleet.scaling_spec, GATEWAYS, fleet.now_s + MIN_PUBLISH_INTERVAL_S
    )
    assert keeper.published.cost_model is None


def test_publish_unmeasured_startup_has_no_ready_time() -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    fleet.arrives = False
    fleet.replicas["serve"] += 1
    new = (StartingPod("p", fleet.now_s),)
    fleet.tick(service_metrics(20.0, Role.SERVE), serve=new)
    keeper.publish(fleet.service, snapshot(fleet, new), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.ready_at_s is None
    assert keeper.published.starting


def test_publish_remote_prefill_cost_uses_prefill_model() -> None:
    """Engines that decode never show how fast others prefill."""
    tiers = {"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}
    fleet, keeper = Fleet(replace(scaling_spec(tiers=tiers), classes=CLASSES)), AdmissionPublisher()
    said = service_metrics(5.0, Role.PREFILL, Role.DECODE)
    fleet.run(said, 30)
    there = {name: TierSnapshot(count, count, (), ABOUT) for name, count in fleet.replicas.items()}
    prefill = fleet.service.tiers["prefill"].capacity_state
    assert prefill.tier_spec is not None
    slower = replace(prefill.tier_spec.model, prefill_token_s=3.0 * prefill.tier_spec.model.prefill_token_s)
    keeper.publish(fleet.service, ServiceSnapshot(said, there), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.cost_model is not None
    before = keeper.published.cost_model
    assert before.remote_token_s == prefill.tier_spec.model.prefill_token_s
    prefill.tier_spec = replace(prefill.tier_spec, model=slower)
    assert keeper.publish(
        fleet.service, ServiceSnapshot(said, there), fleet.scaling_spec, GATEWAYS, fleet.now_s + MIN_PUBLISH_INTERVAL_S
    )
    after = keeper.published.cost_model
    assert after is not None
    assert after.remote_token_s == slower.prefill_token_s
    assert after.prefill_token_s == before.prefill_token_s


PAIR = {"prefill": TierPolicy(1, 8), "decode": TierPolicy(1, 8)}


def with_transfers(tokens: float, token_s: float) -> ServiceMetrics:
    """So many tokens moved, each so long on its way beside half as long a posting."""
    return replace(
        service_metrics(20.0, Role.PREFILL, Role.DECODE),
        transfer_stats=TransferStats(tokens, 1.5 * token_s * tokens, 0.5 * token_s * tokens),
    )


def published_move_s(keeper: AdmissionPublisher, fleet: Fleet, said: ServiceMetrics) -> float | None:
    """What a moved token is told to take, seconds."""
    fleet.tick(said)
    tiers = {name: TierSnapshot(count, count, (), ABOUT) for name, count in fleet.replicas.items()}
    keeper.publish(fleet.service, ServiceSnapshot(said, tiers), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.cost_model is not None
    return keeper.published.cost_model.kv_transfer_token_s


def pair() -> Fleet:
    fleet = Fleet(replace(scaling_spec(tiers=PAIR), classes=CLASSES))
    fleet.run(service_metrics(20.0, Role.PREFILL, Role.DECODE), 30)
    return fleet


def test_publish_kv_transfer_time_once_measured() -> None:
    fleet, keeper = pair(), AdmissionPublisher()
    assert published_move_s(keeper, fleet, with_transfers(MIN_TRANSFERRED_TOKENS - 1.0, 3e-4)) is None
    fleet.now_s += MIN_PUBLISH_INTERVAL_S
    assert published_move_s(keeper, fleet, with_transfers(MIN_TRANSFERRED_TOKENS, 3e-4)) == pytest.approx(3e-4)
    for wavering_s in (2.6e-4, 3.4e-4):
        fleet.now_s += MIN_PUBLISH_INTERVAL_S
        assert published_move_s(keeper, fleet, with_transfers(1e5, wavering_s)) == pytest.approx(3e-4)
    fleet.now_s += MIN_PUBLISH_INTERVAL_S
    assert published_move_s(keeper, fleet, with_transfers(1e5, 2e-6)) == pytest.approx(2e-6)
    fleet.now_s += MIN_PUBLISH_INTERVAL_S
    assert published_move_s(keeper, fleet, with_transfers(1e5, 1.2e-6)) == pytest.approx(2e-6), (
        "less than a microsecond is no news"
    )


def test_publish_kv_transfer_time_expires_after_idle() -> None:
    fleet, keeper = pair(), AdmissionPublisher()
    published_move_s(keeper, fleet, with_transfers(MIN_TRANSFERRED_TOKENS, 3e-4))
    after = AdmissionPublisher.restore(keeper.published)
    for one in (keeper, after):
        fleet.now_s += MIN_PUBLISH_INTERVAL_S
        assert published_move_s(one, fleet, with_transfers(0.0, 0.0)) == pytest.approx(3e-4)
    fleet.now_s += TRANSFER_MEMORY_S + MIN_PUBLISH_INTERVAL_S
    for one in (keeper, after):
        assert published_move_s(one, fleet, with_transfers(0.0, 0.0)) is None


def test_publish_permissive_limits_use_remote_prefill() -> None:
    fleet, keeper = Fleet(replace(scaling_spec(tiers=PAIR), classes=CLASSES), about=None), AdmissionPublisher()
    said = service_metrics(20.0, Role.PREFILL, Role.DECODE)
    fleet.tick(said)
    tiers = {name: TierSnapshot(1, 0) for name in PAIR}
    keeper.publish(fleet.service, ServiceSnapshot(said, tiers), fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.cost_model is not None
    gateway_controller = AdmissionController(CLASSES, keeper.published.cost_model, {})
    gateway_controller.set_replicas({"d": 50}, 0.0, frozenset({"p"}))
    found = [gateway_controller.submit(AdmissionRequest(str(k), "default", "t", 0.0, 8000), 0.0) for k in range(20)]
    assert {one.prefill for one in found} == {"p"}
    assert gateway_controller.pool.prefill_queues["p"].free_s < 1e-3


def test_publish_has_learned_token_ratios_and_keeps_them() -> None:
    fleet, keeper = busy_fleet(), AdmissionPublisher()
    observed = snapshot(fleet)
    learned = replace(
        observed, metrics=replace(observed.metrics, token_ratios={"image": 0.26, "text": 1.1, "video": 1e6})
    )
    keeper.publish(fleet.service, learned, fleet.scaling_spec, GATEWAYS, fleet.now_s)
    assert keeper.published is not None
    assert keeper.published.token_ratios == {"image": 0.26, "text": 1.1, "video": 100.0}
    after = AdmissionPublisher.restore(keeper.published)  # a new process has learned nothing yet
    after.publish(fleet.service, observed, fleet.scaling_spec, GATEWAYS, fleet.now_s + MIN_PUBLISH_INTERVAL_S)
    assert after.published is not None
    assert after.published.token_ratios == keeper.published.token_ratios
