"""Conditions and Events from what was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import conditions
from plimsoll.api.conditions import MEANING, Condition, Reason, Type
from plimsoll.api.events import MEANING as EVENT_MEANING
from plimsoll.api.events import EventReason
from plimsoll.controllers import status
from plimsoll.controllers.modelnames import Former
from plimsoll.controllers.report import nothing
from plimsoll.controllers.status import Sight, TierSight
from plimsoll.core.admission.published import Published
from tests import builders
from tests.core.test_admission_published import LIMITS as TWO_CLASSES

PARENT = builders.service()


def tier(kind: str, *, ready: int = 1, desired: int = 1, pods: tuple[Any, ...] = (), **found: Any) -> TierSight:
    made = builders.deployment(PARENT, kind, replicas=desired, ready=ready, status=found)
    return TierSight(kind, desired, made, pods, f"chat-{kind}-1")


def status_inputs(*tiers: TierSight, **other: Any) -> Sight:
    facts: dict[str, Any] = {
        "routable": 1,
        "gateways_present": 1,
        "model_names": ("chat", "team/chat"),
        "url": "http://g/v1",
    }
    return Sight(service=PARENT, tiers=tiers or (tier("prefill"), tier("decode")), **(facts | other))


def by_type(found: tuple[Condition, ...]) -> dict[Type, Condition]:
    return {condition.type: condition for condition in found}


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"image": "i", "state": {"waiting": {"reason": reason, "message": message}}}]}


def test_conditions_healthy_service_is_ready() -> None:
    found = by_type(status.conditions(status_inputs()))
    assert {t: c.holds for t, c in found.items()} == {
        Type.READY: True,
        Type.RECONCILING: False,
        Type.STALLED: False,
        Type.PREFILL_READY: True,
        Type.DECODE_READY: True,
        Type.MODEL_NAME_OWNED: True,
    }


def test_conditions_ready_requires_routable_endpoint() -> None:
    assert by_type(status.conditions(status_inputs(routable=0)))[Type.READY].reason is Reason.NO_ROUTABLE_ENDPOINT
    unknown = by_type(status.conditions(status_inputs(routable=None)))[Type.READY]
    assert (unknown.status, unknown.reason) == ("Unknown", Reason.NO_GATEWAY)
    none = by_type(status.conditions(status_inputs(routable=None, gateways_present=0)))[Type.READY]
    assert (none.status, none.reason) == ("False", Reason.NO_GATEWAY)
    said = by_type(status.conditions(status_inputs(routable=None, gateways_say="it has not got the objects")))[
        Type.READY
    ]
    assert said.message.startswith("no gateway replica is of use: it has not got the objects; look at it with: kubectl")


def test_conditions_dead_prefill_tier_keeps_service_ready() -> None:
    found = by_type(status.conditions(status_inputs(tier("prefill", ready=0), tier("decode"))))
    assert found[Type.READY].holds
    assert not found[Type.PREFILL_READY].holds
    assert found[Type.RECONCILING].holds


@pytest.mark.parametrize(
    ("pod_status", "reason", "words"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient gpu"}]},
            Reason.UNSCHEDULABLE,
            "0/1 nodes: Insufficient gpu",
        ),
        (
            waiting("CreateContainerConfigError", 'secret "hub" not found'),
            Reason.CONFIG_ERROR,
            'secret "hub" not found',
        ),
        (waiting("ImagePullBackOff", "manifest unknown"), Reason.IMAGE_UNAVAILABLE, "manifest unknown"),
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
            Reason.ENGINE_FAILING,
            "OOMKilled, exit code 137): out of memory",
        ),
    ],
)
def test_conditions_tier_reports_pod_problem_message(pod_status: Any, reason: Reason, words: str) -> None:
    sick = builders.pod(PARENT, "decode", **pod_status)
    found = status.conditions(status_inputs(tier("prefill"), tier("decode", ready=0, pods=(sick,)), routable=0))
    decode, ready = by_type(found)[Type.DECODE_READY], by_type(found)[Type.READY]
    assert decode.reason is reason
    assert words in decode.message
    assert (ready.reason, ready.message) == (decode.reason, decode.message)
    assert reason.value in [event.reason.value for event in status.events([], found)]


def test_conditions_quota_error_is_read_from_deployment() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    found = by_type(status.conditions(status_inputs(tier("prefill"), tier("decode", ready=0, conditions=[failure]))))
    assert found[Type.DECODE_READY].reason is Reason.PODS_REFUSED
    assert "exceeded quota" in found[Type.DECODE_READY].message


def test_conditions_unschedulable_surge_pod_names_max_surge() -> None:
    pending = builders.pod(
        PARENT, "decode", conditions=[{"type": "PodScheduled", "status": "False", "message": "no gpu left"}]
    )
    rolling = tier("decode", pods=(pending,), replicas=2, updatedReplicas=1)
    decode = by_type(status.conditions(status_inputs(tier("prefill"), rolling)))[Type.DECODE_READY]
    assert (decode.holds, decode.reason) == (True, Reason.ROLLING_OUT)
    assert "no gpu left" in decode.message
    assert "tiers.decode.rollout.maxSurge" in decode.message


def test_conditions_invalid_spec_stalls_but_stays_ready() -> None:
    found = by_type(status.conditions(status_inputs(invalid=("spec.tiers: has no tier",))))
    assert found[Type.STALLED].holds
    assert "spec.tiers" in found[Type.STALLED].message
    assert found[Type.READY].holds


def test_conditions_model_name_loser_names_owner() -> None:
    found = by_type(status.conditions(status_inputs(name_taken_by="other/chat", model_names=("team/chat",))))
    owned = found[Type.MODEL_NAME_OWNED]
    assert owned.holds is False
    assert "other/chat" in owned.message
    assert "team/chat" in owned.message


def test_name_owned_changing_names_are_in_the_message() -> None:
    former = (Former("old", "2026-01-01T13:00:00Z"),)
    changing = status_inputs(model_names=("team/chat", "old"), former=former, name_pending="new")
    owned = by_type(status.conditions(changing))[Type.MODEL_NAME_OWNED]
    assert owned.holds
    assert owned.message == (
        "clients may say team/chat, old; new follows when every gateway answers to it;"
        " old is answered until 2026-01-01T13:00:00Z"
    )


def test_merge_transition_time_moves_only_on_status_change() -> None:
    first = conditions.merge([], (Condition(Type.READY, False, Reason.STARTING, "a"),), 1, "t1")
    same = conditions.merge(first, (Condition(Type.READY, False, Reason.UNSCHEDULABLE, "b"),), 2, "t2")
    flipped = conditions.merge(same, (Condition(Type.READY, True, Reason.SERVING, "c"),), 2, "t3")
    assert [c[0]["lastTransitionTime"] for c in (first, same, flipped)] == ["t1", "t1", "t3"]
    assert [c[0]["observedGeneration"] for c in (first, same, flipped)] == [1, 2, 2]


def test_events_unchanged_conditions_emit_nothing() -> None:
    stated = status.conditions(status_inputs())
    assert [event.reason for event in status.events([], stated)] == [EventReason.READY]
    kept = conditions.merge([], stated, 1, "t1")
    assert status.events(kept, stated) == []


def test_event_of_same_transition_has_one_name() -> None:
    stated = status.conditions(status_inputs())
    names = {
        e.manifest(PARENT, f"operator-{n}", f"t{n}")["metadata"]["name"]
        for n in (1, 2)
        for e in status.events([], stated)
    }
    assert len(names) == 1


def test_events_ready_lost_and_regained_are_three() -> None:
    well, lost = status.conditions(status_inputs()), status.conditions(status_inputs(routable=0))
    first = conditions.merge([], well, 1, "t1")
    second = conditions.merge(first, lost, 1, "t2")
    told = [*status.events([], well), *status.events(first, lost), *status.events(second, well)]
    assert [e.reason for e in told] == [EventReason.READY, EventReason.NOT_READY, EventReason.READY]
    assert len({e.manifest(PARENT, "o", "t")["metadata"]["name"] for e in told}) == 3


def test_reasons_all_have_a_meaning() -> None:
    assert set(MEANING) == set(Reason)
    assert set(EVENT_MEANING) == set(EventReason)


LIMITS = replace(TWO_CLASSES, tpot_s=(0.05,), step_budget_s=(0.03,))
QUEUEING_REPORT = replace(nothing(None, 0.0), told=Published(("default",), LIMITS))  # gateways know by what to hold
NO_MODEL_REPORT = replace(nothing(None, 0.0), told=Published(("default",)))


def test_conditions_scaled_to_zero_with_queueing_is_ready() -> None:
    zero = tier("serve", ready=0, desired=0)
    found = by_type(status.conditions(status_inputs(zero, routable=0, sleeps=True, report=QUEUEING_REPORT)))
    assert (found[Type.READY].status, found[Type.READY].reason) == ("True", Reason.SCALED_TO_ZERO)
    assert (found[Type.SERVE_READY].status, found[Type.SERVE_READY].reason) == ("True", Reason.SCALED_TO_ZERO)
    assert found[Type.RECONCILING].holds is False
    for ready in (0, 1):  # an engine is ready a moment before gateways list it
        up = tier("serve", ready=ready)
        waking = by_type(status.conditions(status_inputs(up, routable=0, sleeps=True, report=QUEUEING_REPORT)))
        assert (waking[Type.READY].status, waking[Type.READY].reason) == ("True", Reason.WAKING)
    waking = by_type(
        status.conditions(status_inputs(tier("serve", ready=0), routable=0, sleeps=True, report=QUEUEING_REPORT))
    )
    assert (waking[Type.READY].status, waking[Type.READY].reason) == ("True", Reason.WAKING)
    assert waking[Type.SERVE_READY].holds is False


def test_conditions_scaled_to_zero_without_queueing_is_not_ready() -> None:
    stuck = tier(
        "serve", ready=0, pods=(builders.pod(PARENT, "serve", **waiting("ImagePullBackOff", "no such image")),)
    )
    for service in (
        status_inputs(stuck, routable=0, sleeps=True, report=QUEUEING_REPORT),
        status_inputs(tier("serve", ready=0, desired=0), routable=None, sleeps=True, report=QUEUEING_REPORT),
        status_inputs(tier("serve", ready=0, desired=0), routable=0, sleeps=True, report=NO_MODEL_REPORT),
        status_inputs(tier("serve", ready=0, desired=0), routable=0, sleeps=True),
        status_inputs(tier("serve", ready=0), routable=0, report=QUEUEING_REPORT),
    ):
        assert by_type(status.conditions(service))[Type.READY].holds is not True
    kept_down = by_type(status.conditions(status_inputs(tier("serve", ready=0, desired=0), routable=0)))[Type.READY]
    assert (kept_down.status, kept_down.reason) == ("False", Reason.SCALED_TO_ZERO)


def test_scaling_status_keeps_publication_of_earlier_process() -> None:
    told = {"admission": {"version": 1}}
    assert status.scaling(status_inputs(), told) == told


def test_events_unusable_fallback_emits_event() -> None:
    good = status.conditions(status_inputs(fallback=("team/small", "")))
    bad = status.conditions(status_inputs(fallback=("team/small", "is not there")))
    assert by_type(good)[Type.FALLBACK_FOUND].holds
    message = "spec.admission.fallback.name: team/small is not there; what it should take is refused"
    assert by_type(bad)[Type.FALLBACK_FOUND].message == message
    before = conditions.merge([], good, 1, "2026-01-01T00:00:00Z")
    assert [event.reason for event in status.events(before, bad)] == [EventReason.FALLBACK_UNUSABLE]
    assert Type.FALLBACK_FOUND not in by_type(status.conditions(status_inputs()))


def test_conditions_slow_transfer_keeps_tier_ready() -> None:
    report = replace(nothing(None, 0.0), slow_transfer="moving a token takes 1 s: give both tiers an RDMA device")
    found = by_type(status.conditions(status_inputs(report=report)))
    assert (found[Type.PREFILL_READY].holds, found[Type.PREFILL_READY].reason) == (True, Reason.TRANSFER_SLOW)
    assert "RDMA" in found[Type.PREFILL_READY].message
    assert found[Type.DECODE_READY].reason is Reason.ALL_REPLICAS_READY
    assert found[Type.RECONCILING].holds is False
    before = conditions.merge([], status.conditions(status_inputs()), 1, "2026-01-01T00:00:00Z")
    [event] = status.events(before, status.conditions(status_inputs(report=report)))
    assert event.reason is EventReason.TRANSFER_SLOW


def test_events_scale_to_zero_and_wake_up_emit_nothing() -> None:
    zero, up = tier("serve", ready=0, desired=0), tier("serve", ready=0)
    asleep = status.conditions(status_inputs(zero, routable=0, sleeps=True, report=QUEUEING_REPORT))
    waking = status.conditions(status_inputs(up, routable=0, sleeps=True, report=QUEUEING_REPORT))
    before = conditions.merge([], asleep, 1, "2026-01-01T00:00:00Z")
    assert status.events(before, waking) == []
    after = conditions.merge(before, waking, 1, "2026-01-01T00:00:05Z")
    assert (
        status.events(after, status.conditions(status_inputs(tier("serve"), sleeps=True, report=QUEUEING_REPORT))) == []
    )
