"""Each bound of a gateway pod has its own count and its own advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.telemetry import gateway_metrics
from tests.gateway.picker_harness import PickerHarness, service_with_slo, times_reached

ALERTS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "alerts.md"


@pytest.mark.parametrize("limit", GatewayLimit)
def test_rejection_counts_at_its_own_limit_alone(limit: GatewayLimit) -> None:
    picker = PickerHarness(service_with_slo("chat")).picker
    before = {one: times_reached(one) for one in GatewayLimit}
    picker.reject(Rejection(RejectionReason.GATEWAY_FULL, "full", limit=limit))
    picker.reject(Rejection(RejectionReason.MODEL_NOT_FOUND, "unknown"))
    assert {one: times_reached(one) - before[one] for one in GatewayLimit if times_reached(one) > before[one]} == {
        limit: 1
    }


def test_alert_page_and_metric_name_every_limit() -> None:
    section = ALERTS_PAGE.read_text().split("## PlimsollGatewayLimitReached\n")[1].split("\n## ")[0]
    advised = {name for row in re.findall(r"(?m)^\| (`[^|]*) \|", section) for name in re.findall(r"`(\w+)`", row)}
    assert advised == {limit.value for limit in GatewayLimit if not limit.value.endswith("_time")}
    named = re.findall(r"\w+", gateway_metrics.GATEWAY_LIMIT_REACHED._documentation.partition("(limit: ")[2])
    assert {limit.value for limit in GatewayLimit} <= set(named)
