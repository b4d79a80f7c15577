"""What the user wrote of admission becomes what the gateways decide by."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request_limits import RequestLimits
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.slo import Slo
from tests.api.cases_admission import service_with_slo
from tests.api.manifests import examples, service

SERVICE_SLO = Slo(share=0.95, ttft_s=1.0, tpot_s=0.05)


def parse_admission(**written: Any) -> InferenceService:
    return parse(service_with_slo(**{"spec.admission": written}))


@pytest.mark.parametrize("edits", [{}, {"spec.admission": {}}], ids=str)
def test_admission_absent_is_one_queueing_default_class(edits: dict[str, Any]) -> None:
    read = parse(service_with_slo(**edits))
    assert read.classes == (
        ClassPolicy("default", 0, SERVICE_SLO, max_queue_time_s=30.0, guaranteed_share=0.0, max_utilization=1.0),
    )
    assert read.tenants == {}
    assert (read.when_full, read.fallback, read.max_queued) == ("Queue", None, 1000)


def test_admission_without_slo_has_no_classes() -> None:
    read = parse(service())
    assert read.classes == ()
    assert (read.tenants, read.when_full, read.fallback, read.max_queued) == ({}, "Queue", None, 1000)


def test_admission_class_without_fields_equals_default() -> None:
    (named,) = parse_admission(classes=[{"name": "chat"}]).classes
    (default,) = parse_admission().classes
    assert named == ClassPolicy("chat", default.priority, default.slo, default.max_queue_time_s)


def test_admission_classes_keep_their_order() -> None:
    read = parse_admission(classes=[{"name": "low", "priority": -7}, {"name": "high", "priority": 7}])
    assert [(one.name, one.priority) for one in read.classes] == [("low", -7), ("high", 7)]


@pytest.mark.parametrize(
    ("written", "promise"),
    [
        ({"ttft": "2s"}, Slo(share=0.95, ttft_s=2.0)),
        ({"tpot": "100ms"}, Slo(share=0.95, tpot_s=0.1)),
        ({"ttft": "2s", "ttftPerKToken": "100ms"}, Slo(share=0.95, ttft_s=2.0, ttft_per_1k_tokens_s=0.1)),
    ],
)
def test_admission_class_slo_replaces_all_service_targets(written: dict[str, Any], promise: Slo) -> None:
    (one,) = parse_admission(classes=[{"name": "batch", "slo": written}]).classes
    assert one.slo == promise


def test_admission_class_uses_service_percentile() -> None:
    classes = [{"name": "chat"}, {"name": "batch", "slo": {"ttft": "1m"}}]
    slo = {"percentile": 99, "tpot": "50ms"}
    read = parse(service(**{"spec.slo": slo, "spec.admission.classes": classes}))
    assert [one.slo for one in read.classes] == [Slo(share=0.99, tpot_s=0.05), Slo(share=0.99, ttft_s=60.0)]
    with pytest.raises(InvalidSpec) as caught:
        parse_admission(classes=[{"name": "batch", "slo": slo}])
    assert caught.value.problems == ("spec.admission.classes[0].slo.percentile: is not a known field",)


@pytest.mark.parametrize(
    ("written", "hold_s"), [({}, 30.0), ({"maxQueueTime": "0s"}, 0.0), ({"maxQueueTime": "1m30s"}, 90.0)]
)
@pytest.mark.parametrize("rest", [{}, {"whenFull": "Downgrade", "fallback": {"name": "small"}}], ids=str)
def test_admission_class_hold_for_sets_queue_time(written: dict[str, Any], hold_s: float, rest: dict[str, Any]) -> None:
    (one,) = parse_admission(classes=[{"name": "chat", **written}], **rest).classes
    assert one.max_queue_time_s == hold_s


@pytest.mark.parametrize("classes", [{}, {"classes": [{"name": "a"}, {"name": "b"}]}], ids=str)
def test_admission_when_full_shed_queues_nothing(classes: dict[str, Any]) -> None:
    assert {one.max_queue_time_s for one in parse_admission(whenFull="Shed", **classes).classes} == {0.0}


def test_admission_share_and_fill_are_read_as_ratios() -> None:
    (one,) = parse_admission(classes=[{"name": "chat", "guaranteedShare": "90%", "maxUtilization": "10%"}]).classes
    assert (one.guaranteed_share, one.max_utilization) == (0.9, 0.1)


def test_admission_guaranteed_shares_may_sum_to_one() -> None:
    classes = [{"name": "a", "guaranteedShare": "50%"}, {"name": "b", "guaranteedShare": "50%"}]
    assert sum(one.guaranteed_share for one in parse_admission(classes=classes).classes) == 1.0


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ({}, TenantPolicy()),
        ({"weight": 4}, TenantPolicy(weight=4.0)),
        ({"requestsPerSecond": 5}, TenantPolicy(requests_per_s=5.0)),
        ({"requestsPerSecond": "0.001"}, TenantPolicy(requests_per_s=0.001)),
        ({"tokensPerMinute": 60_000}, TenantPolicy(tokens_per_min=60_000.0)),
    ],
)
def test_admission_tenant_is_read_as_policy(written: dict[str, Any], policy: TenantPolicy) -> None:
    assert parse_admission(tenants=[{"name": "a/b@c", **written}]).tenants == {"a/b@c": policy}


def test_admission_fallback_is_in_same_namespace() -> None:
    read = parse_admission(whenFull="Downgrade", fallback={"name": "small"})
    assert (read.when_full, read.fallback) == ("Downgrade", ("default", "small"))


def test_admission_full_example_is_read() -> None:
    read = parse(examples()["admission"])
    slow = Slo(share=0.95, ttft_s=60.0, ttft_per_1k_tokens_s=1.0, tpot_s=0.2)
    assert read.classes == (
        ClassPolicy("chat", 100, SERVICE_SLO, max_queue_time_s=10.0, guaranteed_share=0.6),
        ClassPolicy("default", 0, SERVICE_SLO, guaranteed_share=0.1),
        ClassPolicy("batch", -100, slow, max_queue_time_s=120.0, max_utilization=0.8),
    )
    assert read.tenants == {"help-desk": TenantPolicy(4.0), "research": TenantPolicy(1.0, 2.5, 600_000.0)}
    assert (read.when_full, read.max_queued) == ("Downgrade", 500)
    assert read.fallback is not None
    assert read.fallback[1] == parse(examples()["admission-fallback"]).metadata.name


def test_request_limits_of_class_replace_one_by_one() -> None:
    classes = [{"name": "chat", "requestLimits": {"idleTimeout": "15s", "maxDuration": "30m"}}, {"name": "default"}]
    limits = {"maxOutputTokens": 900, "maxDuration": "1m30s"}
    read = parse(service_with_slo(**{"spec.requestLimits": limits, "spec.admission": {"classes": classes}}))
    assert read.request_limits == {"": RequestLimits(900, 90.0), "chat": RequestLimits(900, 1800.0, 15)}


@pytest.mark.parametrize("edits", [{}, {"spec.requestLimits": {}}], ids=str)
def test_request_limits_absent_are_none(edits: dict[str, Any]) -> None:
    assert parse(service(**edits)).request_limits == {}


def test_request_limits_need_no_slo() -> None:
    assert parse(service(**{"spec.requestLimits.idleTimeout": "60s"})).request_limits == {
        "": RequestLimits(idle_timeout_s=60)
    }
