"""Conditions and Events from what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import conditions
from plimsoll.api.conditions import (
    ABNORMAL_TRUE,
    REASON_MEANINGS,
    TYPE_MEANINGS,
    Condition,
    ConditionReason,
    ConditionType,
)
from plimsoll.api.events import EVENT_MEANINGS as EVENT_MEANING
from plimsoll.api.events import Event, EventReason
from plimsoll.api.next_steps import NEXT_STEPS
from plimsoll.controllers.autoscale.scaling_status import initial_report
from plimsoll.controllers.reconcile import condition_events, service_status
from plimsoll.core.admission.publication import AdmissionLimits
from tests import builders
from tests.controllers.status_inputs import PARENT, by_type, status_inputs, tier
from tests.core.test_admission_published import LIMITS as TWO_CLASSES


def events(old: list[dict[str, Any]], new: tuple[Condition, ...], version: str, **facts: Any) -> list[Event]:
    """The Events of a change. facts: of the service that `new` is about."""
    return condition_events.changed_events(old, new, service_status.recovery_messages(status_inputs(**facts)), version)


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": reason, "message": message}}}]}


MET = Condition(ConditionType.SLO_MET, True, ConditionReason.SLO_MET, "within targets")
INFEASIBLE = Condition(ConditionType.SLO_INFEASIBLE, True, ConditionReason.INFEASIBLE, "by measurement")


@pytest.mark.parametrize(
    ("reported", "is_known", "expected"),
    [
        ((MET,), False, "by data sheet"),
        ((MET,), True, None),
        ((INFEASIBLE, MET), False, "by measurement"),
        ((INFEASIBLE, MET), True, "by measurement"),
        ((), False, None),
    ],
    ids=["unmeasured", "feasible", "one tier infeasible", "infeasible", "no SLO"],
)
def test_slo_infeasible_by_data_sheet_until_measured(
    reported: tuple[Condition, ...], is_known: bool, expected: str | None
) -> None:
    report = replace(initial_report(None, 0.0), conditions=reported, is_feasibility_known=is_known)
    limits = ("spec.slo.tpot: by data sheet tier serve cannot meet 1ms", "spec.slo.ttft: tier serve cannot meet 1ms")
    inputs = status_inputs(scaling_report=report, hardware_limits=limits)
    found = by_type(service_status.build_conditions(inputs)).get(ConditionType.SLO_INFEASIBLE)
    assert (found is None) is (expected is None)
    if found is not None and expected is not None:
        assert found.holds
        assert expected in found.message
        assert all(limit in found.message for limit in limits) is (expected == "by data sheet")
    without = by_type(service_status.build_conditions(status_inputs(scaling_report=report)))
    assert (ConditionType.SLO_INFEASIBLE in without) is (INFEASIBLE in reported)


def test_conditions_healthy_service_is_ready() -> None:
    found = by_type(service_status.build_conditions(status_inputs()))
    assert {t: c.holds for t, c in found.items()} == {ConditionType.READY: True}


def test_conditions_ready_requires_routable_endpoint() -> None:
    assert (
        by_type(service_status.build_conditions(status_inputs(routable_endpoints=0)))[ConditionType.READY].reason
        is ConditionReason.NO_ROUTABLE_ENDPOINT
    )
    unknown = by_type(service_status.build_conditions(status_inputs(routable_endpoints=None)))[ConditionType.READY]
    assert (unknown.status, unknown.reason) == ("Unknown", ConditionReason.NO_GATEWAY)
    none = by_type(service_status.build_conditions(status_inputs(routable_endpoints=None, gateway_replicas=0)))[
        ConditionType.READY
    ]
    assert (none.status, none.reason) == ("False", ConditionReason.NO_GATEWAY)
    said = by_type(
        service_status.build_conditions(
            status_inputs(routable_endpoints=None, gateways_error="it has not got the objects")
        )
    )[ConditionType.READY]
    assert said.message.startswith("no gateway replica is usable: it has not got the objects; check with: kubectl")


def test_conditions_dead_prefill_tier_keeps_service_ready() -> None:
    found = by_type(service_status.build_conditions(status_inputs(tier("prefill", ready=0), tier("decode"))))
    assert found[ConditionType.READY].holds
    assert found[ConditionType.RECONCILING].message == "prefill: 0 of 1 ready: 1 not created yet"
    assert ConditionType.PREFILL_DEGRADED not in found


@pytest.mark.parametrize(
    ("ready", "endpoints", "reason"),
    [
        (0, 1, ConditionReason.PREFILL_UNAVAILABLE),
        (1, 1, ConditionReason.SERVING),
        (0, 0, ConditionReason.NO_ROUTABLE_ENDPOINT),
    ],
)
def test_conditions_required_prefill_tier_decides_ready(ready: int, endpoints: int, reason: ConditionReason) -> None:
    strict = {**PARENT, "spec": {**PARENT["spec"], "whenPrefillUnavailable": "Reject"}}
    inputs = status_inputs(
        tier("prefill", ready=ready), tier("decode"), service_object=strict, routable_endpoints=endpoints
    )
    found = by_type(service_status.build_conditions(inputs))[ConditionType.READY]
    assert (found.reason, found.holds) == (reason, reason is ConditionReason.SERVING)


@pytest.mark.parametrize(
    ("pod_status", "reason", "words"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient gpu"}]},
            ConditionReason.UNSCHEDULABLE,
            "0/1 nodes: Insufficient gpu",
        ),
        (
            waiting("CreateContainerConfigError", 'secret "hub" not found'),
            ConditionReason.CONFIG_ERROR,
            'secret "hub" not found',
        ),
        (waiting("ImagePullBackOff", "manifest unknown"), ConditionReason.IMAGE_UNAVAILABLE, "manifest unknown"),
        (
            {
                "containerStatuses": [
                    {
                        "ready": False,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {
                            "terminated": {"reason": "OOMKilled", "exitCode": 137, "message": "out of memory"}
                        },
                    }
                ]
            },
            ConditionReason.ENGINE_FAILING,
            "the engine was killed, because it ran out of memory (OOMKilled)",
        ),
    ],
)
def test_conditions_tier_reports_pod_problem_message(pod_status: Any, reason: ConditionReason, words: str) -> None:
    sick = builders.pod(PARENT, "decode", **pod_status)
    found = service_status.build_conditions(
        status_inputs(tier("prefill"), tier("decode", ready=0, pods=(sick,)), routable_endpoints=0)
    )
    decode, ready = by_type(found)[ConditionType.DECODE_DEGRADED], by_type(found)[ConditionType.READY]
    assert (decode.holds, decode.reason) == (True, reason)
    assert words in decode.message
    assert (ready.reason, ready.message) == (decode.reason, decode.message)
    assert reason.value in [event.reason.value for event in events([], found, "7")]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (f"usage: {'[--flag] ' * 99}\nvllm serve: error: unrecognized arguments: --nope\n", "vllm serve: error:"),
        (f"ValueError: no room {'x ' * 400}", "ValueError: no room x"),
        (f"{'line ' * 400}\nthe end", ""),
        (
            "(launcher) WARNING the self-benchmark ended early: TimeoutError: \n(launcher) INFO ready after 3 s\n"
            "(launcher) ERROR the engine ended by itself with code -9\n",
            "(launcher) ERROR the engine ended by itself",
        ),
    ],
    ids=["usage", "launcher's cause", "no error", "a warning is no cause"],
)
def test_conditions_engine_log_is_quoted_from_its_error(log: str, expected: str) -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 2, "message": log}}
    sick = builders.pod(PARENT, "decode", containerStatuses=[{"ready": False, "state": {}, "lastState": ended}])
    found = service_status.build_conditions(status_inputs(tier("prefill"), tier("decode", ready=0, pods=(sick,))))
    condition = by_type(found)[ConditionType.DECODE_DEGRADED]
    assert f"exit code 2): {expected}" in condition.message
    assert "usage" not in condition.message
    if expected == "vllm serve: error:":
        assert "unrecognized arguments: --nope" in condition.event_message
    if not expected:
        assert condition.message.endswith("the end")


def test_conditions_access_lines_of_a_killed_engine_are_no_cause() -> None:
    """Kubernetes keeps the end of the log, so that its first line may be cut."""
    log = "O: 127.0.0.1:1 - POST 200 OK\n" + 'INFO:     127.0.0.1:2 - "POST /v1/completions HTTP/1.1" 200 OK\n' * 40
    ended = {"terminated": {"reason": "Error", "exitCode": 137, "message": log}}
    sick = builders.pod(PARENT, "decode", containerStatuses=[{"ready": False, "state": {}, "lastState": ended}])
    found = service_status.build_conditions(status_inputs(tier("prefill"), tier("decode", ready=0, pods=(sick,))))
    assert by_type(found)[ConditionType.DECODE_DEGRADED].message.endswith(
        "the engine terminated (Error, exit code 137)"
    )


def test_conditions_out_of_memory_names_the_limit() -> None:
    ended = {
        "terminated": {"reason": "OOMKilled", "exitCode": 137, "message": "(launcher) INFO starting: " + "x" * 900}
    }
    sick = builders.pod(
        PARENT, "decode", containerStatuses=[{"name": "engine", "ready": False, "state": {}, "lastState": ended}]
    )
    sick["spec"] = {"containers": [{"name": "engine", "resources": {"limits": {"memory": "40Mi"}}}]}
    found = service_status.build_conditions(status_inputs(tier("prefill"), tier("decode", ready=0, pods=(sick,))))
    condition = by_type(found)[ConditionType.DECODE_DEGRADED]
    assert condition.message.endswith("its limit is 40Mi; raise resources.limits.memory of the tier's pod")
    assert "its limit is 40Mi; raise" in condition.event_message


def test_tier_whose_image_is_missing_has_no_time() -> None:
    stuck = builders.pod(PARENT, "decode", **waiting("ImagePullBackOff", "manifest unknown"))
    starting = {"count": 1, "nextReady": "2026-01-01T00:00:00Z"}
    report = replace(
        initial_report(None, 0.0), tiers={"prefill": {"starting": starting}, "decode": {"starting": starting}}
    )
    inputs = status_inputs(tier("prefill"), tier("decode", ready=0, pods=(stuck,)), scaling_report=report)
    tiers = service_status.tiers_status(inputs)
    assert tiers["decode"]["startingPods"] == "1"
    assert "startingPods" not in tiers["prefill"], "its pods are ready since the report"


def test_conditions_asleep_is_ready_before_the_first_report() -> None:
    """A new leader has no report yet; gateways go on with the limits that are stored."""
    zero = tier("serve", ready=0, desired=0)
    for stored, holds in ((True, True), (False, False)):
        inputs = status_inputs(zero, routable_endpoints=0, scales_to_zero=True, has_stored_cost_model=stored)
        assert by_type(service_status.build_conditions(inputs))[ConditionType.READY].holds is holds


def test_conditions_quota_error_is_read_from_deployment() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    found = by_type(
        service_status.build_conditions(status_inputs(tier("prefill"), tier("decode", ready=0, conditions=[failure])))
    )
    assert found[ConditionType.DECODE_DEGRADED].reason is ConditionReason.PODS_REJECTED
    assert "exceeded quota" in found[ConditionType.DECODE_DEGRADED].message


@pytest.mark.parametrize(
    ("rejection", "reason"),
    [
        ("exceeded quota: gpus", ConditionReason.APPLY_REJECTED),
        (
            "unable to create new content in namespace team because it is being terminated",
            ConditionReason.NAMESPACE_TERMINATING,
        ),
    ],
)
def test_conditions_rejected_object_says_why(rejection: str, reason: ConditionReason) -> None:
    found = by_type(service_status.build_conditions(status_inputs(rejection=rejection, routable_endpoints=0)))
    assert (found[ConditionType.READY].reason, found[ConditionType.READY].message) == (reason, rejection)
    assert found[ConditionType.STALLED].reason is ConditionReason.APPLY_REJECTED


def test_conditions_surplus_pod_problem_is_not_the_tiers() -> None:
    pending = builders.pod(
        PARENT, "decode", conditions=[{"type": "PodScheduled", "status": "False", "message": "no gpu left"}]
    )
    rolling = tier("decode", pods=(pending,), replicas=2, updatedReplicas=1)
    found = by_type(service_status.build_conditions(status_inputs(tier("prefill"), rolling)))
    assert ConditionType.DECODE_DEGRADED not in found
    assert found[ConditionType.RECONCILING].message == "decode: 1 of 1 ready: the surplus is removed"


def test_conditions_invalid_spec_stalls_but_stays_ready() -> None:
    found = by_type(service_status.build_conditions(status_inputs(spec_problems=("spec.tiers: has no tier",))))
    assert found[ConditionType.STALLED].holds
    assert "spec.tiers" in found[ConditionType.STALLED].message
    assert found[ConditionType.READY].holds


def test_conditions_of_another_release_are_not_kept() -> None:
    """Before the first report of a new operator, which also writes the types of the release before it away."""
    old = [
        {"type": kind, "status": status, "reason": reason, "message": "m", "lastTransitionTime": "t1"}
        for kind, status, reason in (
            ("PrefillReady", "True", "AllReplicasReady"),
            ("ModelNameAccepted", "True", "Accepted"),
            ("ScalingActive", "False", "DemandUnknown"),
            ("MetricsAvailable", "False", "MetricsMissing"),
            ("AdmissionHealthy", "Unknown", "GatewayConfigStale"),
            ("SLOFeasible", "Unknown", "NotMeasured"),
            ("SLOMet", "False", "SLOViolated"),
            ("Shedding", "True", "Shedding"),
        )
    ]
    parent = {**PARENT, "status": {"observedGeneration": PARENT["metadata"]["generation"], "conditions": old}}
    inputs = replace(status_inputs(), service_object=parent)
    stored = conditions.merge(old, service_status.build_conditions(inputs), "t2")
    assert {one["type"]: one["lastTransitionTime"] for one in stored} == {
        "Ready": "t2",
        "SLOMet": "t1",
        "Shedding": "t1",
    }


def test_merge_transition_time_moves_only_on_status_change() -> None:
    first = conditions.merge([], (Condition(ConditionType.READY, False, ConditionReason.STARTING, "a"),), "t1")
    same = conditions.merge(first, (Condition(ConditionType.READY, False, ConditionReason.UNSCHEDULABLE, "b"),), "t2")
    flipped = conditions.merge(same, (Condition(ConditionType.READY, True, ConditionReason.SERVING, "c"),), "t3")
    assert [c[0]["lastTransitionTime"] for c in (first, same, flipped)] == ["t1", "t1", "t3"]


def test_abnormal_true_conditions_exist_only_while_true() -> None:
    """As kstatus expects; whatever reads them takes absence for False."""
    cases = (status_inputs(), status_inputs(rejection="denied"), status_inputs(spec_problems=("spec: no",)))
    found = [by_type(service_status.build_conditions(inputs)) for inputs in cases]
    assert not ABNORMAL_TRUE & found[0].keys()
    assert {ConditionType.RECONCILING, ConditionType.STALLED} == ABNORMAL_TRUE & found[1].keys()
    assert ABNORMAL_TRUE & found[2].keys() == {ConditionType.STALLED}
    assert all(one.holds for stated in found for one in stated.values() if one.type in ABNORMAL_TRUE)


def test_reasons_all_have_a_meaning_and_next_step() -> None:
    assert set(TYPE_MEANINGS) == set(ConditionType)
    assert set(REASON_MEANINGS) == set(ConditionReason)
    assert set(NEXT_STEPS) == set(ConditionReason)
    assert set(EVENT_MEANING) == set(EventReason)


LIMITS = replace(TWO_CLASSES, tpot_s=(0.05,), step_budget_s=(0.03,))
QUEUEING_REPORT = replace(
    initial_report(None, 0.0), published=AdmissionLimits(("default",), LIMITS)
)  # gateways know by what to hold
NO_MODEL_REPORT = replace(initial_report(None, 0.0), published=AdmissionLimits(("default",)))


def test_conditions_scaled_to_zero_with_queueing_is_ready() -> None:
    zero = tier("serve", ready=0, desired=0)
    found = by_type(
        service_status.build_conditions(
            status_inputs(zero, routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT)
        )
    )
    assert (found[ConditionType.READY].status, found[ConditionType.READY].reason) == (
        "True",
        ConditionReason.SCALED_TO_ZERO,
    )
    assert found.keys() == {ConditionType.READY}
    for ready in (0, 1):  # an engine is ready a moment before gateways list it
        up = tier("serve", ready=ready)
        waking = by_type(
            service_status.build_conditions(
                status_inputs(up, routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT)
            )
        )
        assert (waking[ConditionType.READY].status, waking[ConditionType.READY].reason) == (
            "True",
            ConditionReason.WAKING,
        )
    waking = by_type(
        service_status.build_conditions(
            status_inputs(
                tier("serve", ready=0), routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT
            )
        )
    )
    assert (waking[ConditionType.READY].status, waking[ConditionType.READY].reason) == ("True", ConditionReason.WAKING)
    assert waking[ConditionType.RECONCILING].message == "serve: 0 of 1 ready: 1 not created yet"


def test_conditions_scaled_to_zero_without_queueing_is_not_ready() -> None:
    stuck = tier(
        "serve", ready=0, pods=(builders.pod(PARENT, "serve", **waiting("ImagePullBackOff", "no such image")),)
    )
    for service in (
        status_inputs(stuck, routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT),
        status_inputs(
            tier("serve", ready=0, desired=0),
            routable_endpoints=None,
            scales_to_zero=True,
            scaling_report=QUEUEING_REPORT,
        ),
        status_inputs(
            tier("serve", ready=0, desired=0), routable_endpoints=0, scales_to_zero=True, scaling_report=NO_MODEL_REPORT
        ),
        status_inputs(tier("serve", ready=0, desired=0), routable_endpoints=0, scales_to_zero=True),
        status_inputs(tier("serve", ready=0), routable_endpoints=0, scaling_report=QUEUEING_REPORT),
    ):
        assert by_type(service_status.build_conditions(service))[ConditionType.READY].holds is not True
    kept_down = by_type(
        service_status.build_conditions(status_inputs(tier("serve", ready=0, desired=0), routable_endpoints=0))
    )[ConditionType.READY]
    assert (kept_down.status, kept_down.reason) == ("False", ConditionReason.SCALED_TO_ZERO)


def test_scaling_status_keeps_known_fields_of_earlier_process() -> None:
    """Limits that an earlier release wrote into the status go with the first write."""
    reported = {"limitedBy": "decode TPOT"}
    assert service_status.scaling_fields(status_inputs(), {**reported, "admission": {"version": 4}}) == reported


def test_conditions_slow_transfer_keeps_tier_ready() -> None:
    report = replace(
        initial_report(None, 0.0), slow_transfer_message="moving a token takes 1 s: give both tiers an RDMA device"
    )
    found = by_type(service_status.build_conditions(status_inputs(scaling_report=report)))
    assert found[ConditionType.PREFILL_DEGRADED].reason is ConditionReason.TRANSFER_SLOW
    assert "RDMA" in found[ConditionType.PREFILL_DEGRADED].message
    assert found.keys() == {ConditionType.READY, ConditionType.PREFILL_DEGRADED}
    before = conditions.merge([], service_status.build_conditions(status_inputs()), "2026-01-01T00:00:00Z")
    [event] = events(before, service_status.build_conditions(status_inputs(scaling_report=report)), "7")
    assert event.reason is EventReason.TRANSFER_SLOW
