"""Decisions of the gateway by tenant: each is counted once, and the number of series has a bound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plimsoll.gateway.request_stats import RequestStats
from plimsoll.gateway.signals_document import update_metrics
from plimsoll.gateway.tenant_labels import MAX_NAMED_TENANTS, MAX_TENANT_CHARS, OTHER_TENANTS, TenantLabels
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import pod, service
from tests.gateway.picker_harness import PickerHarness, service_with_slo

KEY = "team/chat"
ENGINE = pod("10.0.0.1:8000")
TENANT = "x-gateway-inference-fairness-id"


@pytest.fixture(autouse=True)
def no_series() -> Iterator[None]:
    gateway_metrics.remove_gateway_series(KEY)
    yield
    gateway_metrics.remove_gateway_series(KEY)


def decisions() -> dict[tuple[str, str], float]:
    """The counts of the service by tenant and decision."""
    return {
        (sample.labels["tenant"], sample.labels["decision"]): sample.value
        for metric in gateway_metrics.GATEWAY_TENANT_DECISIONS.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.labels["service"] == KEY
    }


def test_sent_and_rejected_requests_count_by_tenant() -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Shed"}, batch=1), pods=(ENGINE,))
    harness.send(headers={TENANT: "acme"})
    harness.send(headers={TENANT: "acme"})  # the engine is full
    harness.send(headers={TENANT: "umbrella"})
    harness.send()
    update_metrics(harness.picker)
    update_metrics(harness.picker)
    assert decisions() == {
        ("acme", "sent"): 1,
        ("acme", "overloaded"): 1,
        ("umbrella", "overloaded"): 1,
        ("", "overloaded"): 1,
    }


def test_service_without_slo_counts_decisions() -> None:
    harness = PickerHarness(service(), pods=(ENGINE,))
    harness.send(headers={TENANT: "acme"})
    update_metrics(harness.picker)
    assert decisions() == {("acme", "sent"): 1}


async def test_queued_request_counts_when_it_is_decided() -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Queue"}, batch=1), pods=(ENGINE,))
    first = harness.send(headers={TENANT: "acme"})
    assert isinstance(first, bytes)
    assert not isinstance(harness.send(headers={TENANT: "acme"}), bytes)
    update_metrics(harness.picker)
    assert decisions() == {("acme", "sent"): 1}
    harness.complete(first)
    update_metrics(harness.picker)
    assert decisions() == {("acme", "sent"): 2}


def test_tenants_beyond_the_bound_share_one_series() -> None:
    stats = RequestStats(KEY)
    for n in range(20 * MAX_NAMED_TENANTS):
        stats.record_sent(f"t{n}")
    stats.record_sent("x" * (MAX_TENANT_CHARS + 1))
    stats.record_sent("t0")
    stats.update_metrics()
    found = decisions()
    assert len(found) == MAX_NAMED_TENANTS + 1
    assert found["t0", "sent"] == 2
    assert found[OTHER_TENANTS, "sent"] == 19 * MAX_NAMED_TENANTS + 1
    assert len(stats._tenants._named) == MAX_NAMED_TENANTS


def test_label_of_a_tenant_never_changes() -> None:
    labels = TenantLabels()
    first = [labels.of(f"t{n}") for n in range(2 * MAX_NAMED_TENANTS)]
    assert [labels.of(f"t{n}") for n in range(2 * MAX_NAMED_TENANTS)] == first
