"""The Events of conditions that begin, change their reason, or end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import conditions
from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.events import EventReason
from plimsoll.controllers.autoscale.scaling_status import initial_report
from plimsoll.controllers.reconcile import condition_events, service_status
from tests import builders
from tests.controllers.status_inputs import PARENT, by_type, status_inputs, tier
from tests.controllers.test_service_status import INFEASIBLE, MET, QUEUEING_REPORT, events, waiting


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        (ConditionReason.MODEL_NAME_TAKEN, EventReason.MODEL_NAME_TAKEN),
        (ConditionReason.MODEL_NAME_RESERVED, EventReason.MODEL_NAME_REJECTED),
        (ConditionReason.SHORT_NAMES_RESTRICTED, EventReason.MODEL_NAME_REJECTED),
    ],
)
def test_events_model_name_loss_and_return(reason: ConditionReason, event: EventReason) -> None:
    lost = Condition(ConditionType.MODEL_NAME_REJECTED, True, reason, "why")
    before = conditions.merge([], (lost,), "2026-01-01T00:00:00Z")
    assert [one.reason for one in events([], (lost,), "1")] == [event]
    assert events(before, (lost,), "1") == []
    [regained] = events(before, (), "1")
    assert regained.reason is EventReason.MODEL_NAME_ACCEPTED
    assert regained.message == "the service has its model name, and each of its adapters its own"
    assert events([], (), "1") == []
    assert events(before, (), "1", spec_problems=("spec: no",)) == [], "an invalid spec says nothing about names"


METRICS = {
    reason: Condition(ConditionType.METRICS_DEGRADED, True, reason, reason.value)
    for reason in (ConditionReason.METRICS_MISSING, ConditionReason.METRICS_PARTIAL, ConditionReason.METRICS_DELAYED)
}

SHEDDING = Condition(ConditionType.SHEDDING, True, ConditionReason.SHEDDING, "12% were rejected")
STALE = Condition(ConditionType.GATEWAY_CONFIG_STALE, True, ConditionReason.GATEWAY_CONFIG_STALE, "1 of 2 gateways")


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, METRICS[ConditionReason.METRICS_MISSING], EventReason.METRICS_LOST),
        (METRICS[ConditionReason.METRICS_MISSING], None, EventReason.METRICS_RECOVERED),
        (None, METRICS[ConditionReason.METRICS_PARTIAL], None),
        (METRICS[ConditionReason.METRICS_PARTIAL], None, None),
        (None, METRICS[ConditionReason.METRICS_DELAYED], None),
        (METRICS[ConditionReason.METRICS_PARTIAL], METRICS[ConditionReason.METRICS_MISSING], EventReason.METRICS_LOST),
        (
            METRICS[ConditionReason.METRICS_MISSING],
            METRICS[ConditionReason.METRICS_DELAYED],
            EventReason.METRICS_RECOVERED,
        ),
        (None, SHEDDING, EventReason.SHEDDING_STARTED),
        (SHEDDING, None, EventReason.SHEDDING_STOPPED),
        (None, STALE, EventReason.GATEWAY_CONFIG_STALE),
        (STALE, None, EventReason.GATEWAY_CONFIG_SYNCED),
        (None, INFEASIBLE, EventReason.SLO_INFEASIBLE),
    ],
)
def test_events_begin_and_end_of_condition(
    before: Condition | None, after: Condition | None, expected: EventReason | None
) -> None:
    old, new = (() if one is None else (one,) for one in (before, after))
    report = replace(initial_report(None, 0.0), conditions=(MET, *new))
    stored = conditions.merge([], (MET, *old), "t1")
    found = events(stored, (MET, *new), "7", scaling_report=report)
    assert [event.reason for event in found] == ([] if expected is None else [expected])
    assert events(conditions.merge([], (MET, *new), "t2"), (MET, *new), "8", scaling_report=report) == []


@pytest.mark.parametrize("condition", [METRICS[ConditionReason.METRICS_MISSING], SHEDDING, STALE])
def test_events_condition_that_is_not_assessed_has_not_ended(condition: Condition) -> None:
    """Before the first report about the present spec, and without an SLO, an absent condition tells nothing."""
    stored = conditions.merge([], (condition,), "t1")
    for report in (None, initial_report(None, 0.0)):
        assert events(stored, (), "7", scaling_report=report) == []


def test_events_silent_gateways_do_not_end_shedding() -> None:
    missing = METRICS[ConditionReason.METRICS_MISSING]
    report = replace(initial_report(None, 0.0), conditions=(missing, MET))
    found = events(conditions.merge([], (SHEDDING,), "t1"), (missing, MET), "7", scaling_report=report)
    assert [event.reason for event in found] == [EventReason.METRICS_LOST]


def test_event_of_crash_loop_is_one() -> None:
    """The condition comes and goes with every restart of the engine; the tier is never settled in between."""
    crashed = {"containerStatuses": [{"ready": False, "state": {"terminated": {"exitCode": 1}}}]}
    failing, starting = (
        service_status.build_conditions(
            status_inputs(tier("prefill"), tier("decode", ready=0, pods=(builders.pod(PARENT, "decode", **status),)))
        )
        for status in (crashed, {})
    )
    assert ConditionType.DECODE_DEGRADED in by_type(failing)
    assert ConditionType.DECODE_DEGRADED not in by_type(starting)
    stored, names = conditions.merge([], starting, "t1"), set()
    for version in range(3):
        for stated in (failing, starting):
            for event in events(stored, stated, str(version)):
                assert event.reason is EventReason.ENGINE_FAILING
                names.add(event.manifest(PARENT, "o", "t")["metadata"]["name"])
            stored = conditions.merge(stored, stated, f"t{version + 2}")
    assert len(names) == 1


def test_events_unchanged_conditions_emit_nothing() -> None:
    stated = service_status.build_conditions(status_inputs())
    assert [event.reason for event in events([], stated, "7")] == [EventReason.READY]
    kept = conditions.merge([], stated, "t1")
    assert events(kept, stated, "7") == []


def test_event_of_same_transition_has_one_name() -> None:
    stated = service_status.build_conditions(status_inputs())
    names = {
        e.manifest(PARENT, f"operator-{n}", f"t{n}")["metadata"]["name"]
        for n in (1, 2)
        for e in events([], stated, "7")
    }
    assert len(names) == 1


def test_events_ready_lost_and_regained_are_three() -> None:
    well, lost = (
        service_status.build_conditions(status_inputs()),
        service_status.build_conditions(status_inputs(routable_endpoints=0)),
    )
    first = conditions.merge([], well, "t1")
    second = conditions.merge(first, lost, "t2")
    event_messages = [
        *events([], well, "7"),
        *events(first, lost, "7"),
        *events(second, well, "7"),
    ]
    assert [e.reason for e in event_messages] == [EventReason.READY, EventReason.NOT_READY, EventReason.READY]
    assert len({e.manifest(PARENT, "o", "t")["metadata"]["name"] for e in event_messages}) == 3


def test_event_of_condition_that_appears_again_has_another_name() -> None:
    """An absent condition has no time of its last change: the object's version tells two appearances apart."""
    stalled = service_status.build_conditions(status_inputs(rejection="denied"))
    well = conditions.merge([], service_status.build_conditions(status_inputs()), "t1")
    names = [
        event.manifest(PARENT, "o", "t")["metadata"]["name"]
        for version in ("7", "7", "9")
        for event in events(well, stalled, version)
        if event.reason is EventReason.APPLY_REJECTED
    ]
    assert names[0] == names[1] != names[2]
    assert events(conditions.merge(well, stalled, "t2"), stalled, "9") == []


def test_events_unusable_fallback_emits_event() -> None:
    good = service_status.build_conditions(status_inputs(fallback=("team/small", "")))
    bad = service_status.build_conditions(status_inputs(fallback=("team/small", "does not exist")))
    assert ConditionType.FALLBACK_UNUSABLE not in by_type(good)
    message = "spec.admission.fallback.name: team/small does not exist; requests meant for it are rejected"
    assert by_type(bad)[ConditionType.FALLBACK_UNUSABLE].message == message
    before = conditions.merge([], good, "2026-01-01T00:00:00Z")
    assert [event.reason for event in events(before, bad, "7")] == [EventReason.FALLBACK_UNUSABLE]


def test_events_scale_to_zero_and_wake_up_emit_nothing() -> None:
    zero, up = tier("serve", ready=0, desired=0), tier("serve", ready=0)
    asleep = service_status.build_conditions(
        status_inputs(zero, routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT)
    )
    waking = service_status.build_conditions(
        status_inputs(up, routable_endpoints=0, scales_to_zero=True, scaling_report=QUEUEING_REPORT)
    )
    before = conditions.merge([], asleep, "2026-01-01T00:00:00Z")
    assert events(before, waking, "7") == []
    after = conditions.merge(before, waking, "2026-01-01T00:00:05Z")
    assert (
        events(
            after,
            service_status.build_conditions(
                status_inputs(tier("serve"), scales_to_zero=True, scaling_report=QUEUEING_REPORT)
            ),
            "7",
        )
        == []
    )


STALLED = Condition(ConditionType.STALLED, True, ConditionReason.INVALID_SPEC, "spec.slo: no")
NO_FALLBACK = Condition(ConditionType.FALLBACK_UNUSABLE, True, ConditionReason.FALLBACK_UNUSABLE, "it does not exist")
SLOW = Condition(ConditionType.PREFILL_DEGRADED, True, ConditionReason.TRANSFER_SLOW, "too slow")


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (STALLED, "the spec is valid, and the API server accepts all objects"),
        (NO_FALLBACK, "the fallback team/small can be used"),
        (INFEASIBLE, "a replica count meets the SLO"),
        (SLOW, "transferring the KV cache pays again"),
    ],
)
def test_events_mended_warning_is_taken_back_once(ended: Condition, message: str) -> None:
    report = replace(initial_report(None, 0.0), conditions=(MET,), is_feasibility_known=True)
    facts: dict[str, Any] = {"scaling_report": report, "fallback": ("team/small", "")}
    stored = conditions.merge([], (MET, ended), "t1")
    [found] = events(stored, (MET,), "7", **facts)
    assert (found.reason, found.message) == (EventReason.RECOVERED, message)
    assert found.manifest(PARENT, "o", "t")["type"] == "Normal"
    assert events(conditions.merge(stored, (MET,), "t2"), (MET,), "8", **facts) == []


def test_events_infeasible_slo_is_not_over_while_unknown() -> None:
    report = replace(initial_report(None, 0.0), conditions=(MET,))
    assert events(conditions.merge([], (MET, INFEASIBLE), "t1"), (MET,), "7", scaling_report=report) == []


WRONG_IMAGE = builders.pod(PARENT, "serve", "new", **waiting("ImagePullBackOff", "no such image"))
CRASHED = builders.pod(
    PARENT, "serve", "new", containerStatuses=[{"ready": False, "state": {"terminated": {"exitCode": 1}}}]
)
STARTING = builders.pod(PARENT, "serve", "new")


@pytest.mark.parametrize(
    "pods", [(WRONG_IMAGE, STARTING, None), (CRASHED, STARTING, CRASHED, None), (CRASHED, None)], ids=len
)
def test_events_recovered_tier_is_reported_when_ready(pods: tuple[Any, ...]) -> None:
    """A crashed engine that starts again is not mended, and neither is one whose new pod has yet to start."""
    stored, normal = conditions.merge([], service_status.build_conditions(status_inputs(tier("serve"))), "t0"), []
    for second, pod in enumerate((*pods, None)):
        one = tier("serve", ready=0, pods=(pod,)) if pod else tier("serve")
        facts = {"service_object": {**PARENT, "status": {"conditions": stored}}}
        inputs = replace(status_inputs(one), **facts)
        stated = service_status.build_conditions(inputs)
        found = condition_events.changed_events(stored, stated, service_status.recovery_messages(inputs), str(second))
        normal += [(second, event.message) for event in found if event.reason is EventReason.RECOVERED]
        stored = conditions.merge(stored, stated, f"t{second + 1}")
    assert normal == [(len(pods) - 1, "engines start and run again; ready: serve 1 of 1")]
