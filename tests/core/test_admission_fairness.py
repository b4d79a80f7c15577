"""Shares of classes and tenants, and quotas, while requests exceed the capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionOutcome
from tests.core.admission_fixtures import (
    ONE_CLASS,
    SLO,
    fill,
    gate,
    make_request,
)


def flood(
    classes: tuple[ClassPolicy, ...],
    tenants: Mapping[str, TenantPolicy],
    requested: list[tuple[str, str, int]],
    outputs: Mapping[str, int] | None = None,
) -> dict[tuple[str, str], int]:
    """Thirty seconds of overload, on a replica filled by tenant `first` of the first class.

    requested: class, tenant and requests every 50 ms. outputs: tokens of a tenant's answers, where known. Returns the
    number of admitted requests of each.
    """
    controller = gate(classes=classes, tenants=tenants)
    count, now = fill(controller, request_class=classes[0].name)
    running = [f"fill{k}" for k in range(count)]
    who: dict[str, tuple[str, str]] = {}
    got = {(classes[0].name, "first"): count}
    for k in range(600):
        now += 0.05
        for request_class, tenant, n in requested:
            for i in range(n):
                id = f"{request_class}{tenant}{k}.{i}"
                who[id] = (request_class, tenant)
                decision = controller.submit(make_request(id, now, request_class=request_class, tenant=tenant), now)
                if decision.outcome is AdmissionOutcome.ADMITTED:
                    running.append(id)
                    got[who[id]] = got.get(who[id], 0) + 1
        id = running.pop(0)
        controller.complete(id, now, (outputs or {}).get(who.get(id, ("", ""))[1]))
        for decision in controller.release(now):
            if decision.outcome is AdmissionOutcome.ADMITTED:
                running.append(decision.request_id)
                got[who[decision.request_id]] = got.get(who[decision.request_id], 0) + 1
    return got


def test_fair_share_follows_tenant_weight_not_demand() -> None:
    got = flood(ONE_CLASS, {"b": TenantPolicy(weight=2.0)}, [("chat", "a", 10), ("chat", "b", 2), ("chat", "c", 2)])
    total = sum(got.values()) - got["chat", "first"]
    assert got["chat", "a"] / total == pytest.approx(0.25, abs=0.05)
    assert got["chat", "b"] / total == pytest.approx(0.5, abs=0.05)


def test_fair_share_charges_actual_output_tokens() -> None:
    got = flood(ONE_CLASS, {}, [("chat", "a", 4), ("chat", "b", 4)], outputs={"a": 880, "b": 220})
    assert got["chat", "a"] < 0.8 * got["chat", "b"]


def test_class_priority_respects_guaranteed_share() -> None:
    high, low = ClassPolicy("high", 1, SLO), ClassPolicy("low", 0, SLO, max_utilization=0.9)
    got = flood((high, low), {}, [("high", "a", 3), ("low", "b", 3)])
    assert got.get(("low", "b"), 0) <= 0.02 * got["high", "a"]
    got = flood((high, replace(low, guaranteed_share=0.2)), {}, [("high", "a", 3), ("low", "b", 3)])
    assert got["low", "b"] / sum(got.values()) == pytest.approx(0.2, abs=0.04)


def test_low_class_fill_limit_sheds_before_saturation() -> None:
    classes = (ClassPolicy("high", 1, SLO), ClassPolicy("low", 0, SLO, max_utilization=0.8))
    controller = gate(classes=classes)
    low, now = fill(controller, request_class="low")
    for k in range(20):
        assert (
            controller.submit(make_request(f"high{k}", now, request_class="high"), now).outcome
            is AdmissionOutcome.ADMITTED
        )
        now += 0.04
    assert low <= 0.85 * fill(gate())[0]


def test_quota_exceeded_sheds_with_retry_after() -> None:
    controller = gate(tenants={"t": TenantPolicy(requests_per_s=0.2), "u": TenantPolicy(tokens_per_min=6000.0)})
    first = [controller.submit(make_request(f"t{k}"), 0.0).outcome for k in range(4)]
    assert first == [
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.ADMITTED,
        AdmissionOutcome.SHED_QUOTA,
        AdmissionOutcome.SHED_QUOTA,
    ]
    advice = controller.submit(make_request("t9"), 0.0).retry
    assert advice is not None
    assert advice.retry_after_s == 5
    assert controller.submit(make_request("t5", 5.1), 5.1).outcome is AdmissionOutcome.ADMITTED
    assert controller.submit(make_request("u1", 5.1, tenant="u"), 5.1).outcome is AdmissionOutcome.ADMITTED
    assert controller.submit(make_request("u2", 5.1, tenant="u"), 5.1).outcome is AdmissionOutcome.SHED_QUOTA
