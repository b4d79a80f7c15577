"""Classes' own targets size the tiers as those of the service do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plimsoll.controllers.autoscale import scaling_conditions, scaling_status
from plimsoll.controllers.autoscale.decision_document import build_document
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.autoscaling.class_targets import CLASS_MEMORY_S, ClassTargets
from plimsoll.core.autoscaling.inputs import ScalingSpec
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.metrics_aggregator import MetricsAggregator
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo, tightest
from plimsoll.core.types import Role
from tests.core.signal_readings import NOW_S, gateway
from tests.core.test_autoscaler import Fleet, need, service_metrics

SLO = Slo(0.95, ttft_s=2.0, tpot_s=0.05, itl_s=0.2)
STRICT = Slo(0.95, ttft_s=0.5, tpot_s=0.02)
LOOSE = Slo(0.95, ttft_s=30.0, tpot_s=0.2)


def spec_of(slo: Slo = SLO, roles: tuple[str, ...] = ("serve",), **classes: Slo | None) -> ScalingSpec:
    """A spec with these classes; None for the targets of the service."""
    policies = tuple(
        ClassPolicy(name, 0, replace(slo, itl_s=None) if of_class is None else of_class)
        for name, of_class in classes.items()
    )
    return ScalingSpec(ScalingPolicy({role: TierPolicy(1, 50) for role in roles}, slo=slo), slo, classes=policies)


def arrivals(**by_class: float) -> ServiceMetrics:
    return ServiceMetrics(arrivals=sum(by_class.values()), arrivals_by_class=by_class)


def sized(spec: ScalingSpec, targets: ClassTargets | None = None, now_s: float = 0.0, **by_class: float) -> Slo:
    found = (targets or ClassTargets()).apply(spec, arrivals(**by_class), now_s)
    assert found.slo is not None
    assert found.policy.slo == found.slo
    return found.slo


@pytest.mark.parametrize("seed", range(4))
def test_tightest_slo_is_within_each(seed: int) -> None:
    random = np.random.default_rng(seed)

    def target() -> float | None:
        return float(random.uniform(0.1, 2.0)) if random.random() < 0.7 else None

    slos = [Slo(0.9, 1.0, float(random.uniform(0.0, 0.3)), target(), target()) for _ in range(4)]
    slos.append(Slo(0.9, tpot_s=0.5))
    found, prompts = tightest(slos), np.array([1.0, 1000.0, 50_000.0])
    for one in slos:
        assert np.all(found.ttft_targets_s(prompts) <= one.ttft_targets_s(prompts))
        for tight, own in zip(found.deadlines(1.0), one.deadlines(1.0), strict=True):
            assert tight <= own
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert getattr(found, name) in [getattr(one, name) for one in slos]


def test_spec_without_own_targets_is_the_same_object() -> None:
    for spec in (spec_of(), spec_of(chat=None, default=None), replace(spec_of(chat=STRICT), slo=None)):
        targets = ClassTargets()
        assert targets.apply(spec, arrivals(chat=50.0, default=50.0), 0.0) is spec
        assert not targets.by_target


def test_stricter_class_above_error_budget_sizes() -> None:
    spec = spec_of(chat=STRICT, default=None)
    assert sized(spec, chat=6.0, default=94.0) == replace(STRICT, itl_s=0.2)
    assert sized(spec, chat=5.0, default=95.0) == SLO
    assert sized(spec) == SLO  # nothing has arrived


def test_looser_class_sizes_only_alone() -> None:
    spec = spec_of(batch=LOOSE, default=None)
    assert sized(spec, batch=96.0, default=4.0) == replace(LOOSE, itl_s=0.2)
    assert sized(spec, batch=94.0, default=6.0) == SLO


def test_small_classes_share_one_error_budget() -> None:
    spec = spec_of(voice=STRICT, code=replace(STRICT, ttft_s=0.4), default=None)
    assert sized(spec, voice=2.0, code=3.0, default=95.0) == SLO
    assert sized(spec, voice=3.0, code=4.0, default=93.0) == replace(STRICT, ttft_s=0.4, itl_s=0.2)
    assert sized(spec, voice=4.0, code=3.0, default=93.0) == replace(STRICT, itl_s=0.2)


def test_each_target_is_of_the_class_that_is_strictest_in_it() -> None:
    spec = spec_of(voice=Slo(0.95, ttft_s=0.2, tpot_s=0.1), code=Slo(0.95, ttft_s=1.0, tpot_s=0.02, e2e_s=9.0))
    targets = ClassTargets()
    assert sized(spec, targets, voice=50.0, code=50.0) == Slo(0.95, 0.2, tpot_s=0.02, e2e_s=9.0, itl_s=0.2)
    assert targets.by_target == {"TTFT": "voice", "TPOT": "code", "e2e": "code"}


def test_class_counts_for_ten_minutes_after_its_last_share() -> None:
    spec, targets = spec_of(chat=STRICT, default=None), ClassTargets()
    sized(spec, targets, 0.0, chat=50.0, default=50.0)
    assert sized(spec, targets, CLASS_MEMORY_S, default=100.0).tpot_s == STRICT.tpot_s
    assert targets.by_target == {"TTFT": "chat", "TPOT": "chat"}
    assert sized(spec, targets, CLASS_MEMORY_S + 1.0, default=100.0) == SLO
    assert not targets.by_target


def test_restarted_operator_sizes_for_the_same_classes() -> None:
    """Before it sees arrivals of its own: the lengths are known from the checkpoint, so a capacity is computed."""
    spec = spec_of(batch=LOOSE, default=None)
    before, after = ServiceState.for_roles(["serve"]), ServiceState.for_roles(["serve"])
    sized(spec, before.class_targets, 1000.5, batch=100.0)
    restore_service_state(after, json.loads(json.dumps(dump_service_state(before))))
    assert sized(spec, after.class_targets, 2000.0).tpot_s == LOOSE.tpot_s
    assert sized(spec, after.class_targets, 2001.0, default=1.0) == SLO


@pytest.mark.parametrize("stored", [None, [], {"batch": "now"}, {"batch": None}, {"batch": True}, {"batch": 10**400}])
def test_invalid_stored_classes_are_ignored(stored: Any) -> None:
    service = ServiceState.for_roles(["serve"])
    restore_service_state(service, dump_service_state(service) | {"noticed_classes": stored})
    assert not service.class_targets.noticed_s


def test_removed_class_and_unknown_class_do_not_count() -> None:
    targets = ClassTargets()
    sized(spec_of(chat=STRICT, other=LOOSE), targets, chat=50.0, other=50.0, stranger=900.0)
    assert set(targets.noticed_s) == {"chat", "other"}
    assert sized(spec_of(other=LOOSE), targets, 1.0, other=50.0).ttft_s == LOOSE.ttft_s


def test_prefill_tier_keeps_the_ttft_of_the_service() -> None:
    """A class without a TTFT target would leave it without any."""
    paced = Slo(0.95, tpot_s=0.02)
    spec = spec_of(Slo(0.95, 2.0, 0.1, 0.05), ("prefill", "decode"), chat=paced)
    assert sized(spec, chat=9.0) == Slo(0.95, 2.0, 0.1, 0.02)
    assert sized(spec_of(chat=paced), chat=9.0).ttft_s is None


def test_arrivals_by_class_are_of_all_gateways_and_a_minute() -> None:
    metrics = MetricsAggregator([Role.SERVE])
    for second in range(120):
        count = float(second)
        for name in ("a", "b"):
            by_class = {"chat": count} if name == "a" else {"chat": count, "default": 3.0 * count}
            reading = gateway(count if name == "a" else 4.0 * count, arrived_by_class=by_class)
            metrics.observe_gateway(name, "1", NOW_S + second, reading)
    found = metrics.collect(NOW_S + 119.0, {Role.SERVE: []}, ["a", "b"], 0.95)
    assert found.arrivals_by_class["chat"] == pytest.approx(2.0 * 60.0, abs=12.0)
    assert found.arrivals_by_class["default"] == pytest.approx(3.0 * 60.0, abs=18.0)
    assert sum(found.arrivals_by_class.values()) == pytest.approx(found.arrivals)


def fleet_of(**classes: Slo | None) -> Fleet:
    """A service after a minute of 40 requests/s, a third of them in the class `chat`."""
    fleet = Fleet(spec_of(**classes))
    fleet.run(replace(service_metrics(40.0, Role.SERVE), arrivals_by_class={"chat": 800.0, "default": 1600.0}), 60)
    return fleet


def report_of(fleet: Fleet) -> tuple[str | None, dict[str, Any], str]:
    """`status.limitedBy`, the capacity in the document of `explain`, and the sizing step of the decision."""
    assert fleet.service.last_decision is not None
    decision = fleet.service.last_decision.decision
    document = build_document(fleet.service, ("team", "chat"), fleet.now_s)
    sizing = next(step.reason for step in decision.tiers["serve"].steps if step.name == "sizing")
    return scaling_status._limited_by(fleet.service, decision), document["tiers"]["serve"]["capacity"], sizing


def test_class_target_changes_the_count_and_is_named() -> None:
    strict, usual, loose = (fleet_of(chat=slo, default=None) for slo in (STRICT, None, LOOSE))
    assert need(strict).replicas > need(usual).replicas
    assert need(loose) == need(usual)  # most requests still have the targets of the service
    limited_by, capacity, sizing = report_of(strict)
    assert limited_by == "serve TPOT of class chat"
    assert (capacity["constraint"], capacity["class"]) == ("TPOT", "chat")
    assert "limited by TPOT of class chat" in sizing
    assert report_of(usual)[0] == "serve TPOT"
    assert report_of(usual)[1]["class"] is None


def test_infeasible_class_target_is_named() -> None:
    fleet = fleet_of(chat=Slo(0.95, ttft_s=0.5, tpot_s=0.001), default=None)
    condition = scaling_conditions.slo_infeasible(fleet.service)
    assert condition is not None
    assert condition.message.startswith(
        "serve: no replica count meets the targets of its classes, TPOT of class chat violates it; feasible: slo.ttft"
    )
    assert "limited by TPOT of class chat" in report_of(fleet)[2]
    assert "TPOT of class chat violates it" in report_of(fleet)[1]["infeasible"]["summary"]
