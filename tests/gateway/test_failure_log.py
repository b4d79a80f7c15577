"""Log lines about failed requests are bounded, whatever clients send."""

from __future__ import annotations

import pytest

from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.failure_log import MAX_LINES, FailureLog


def record(status: int, flags: str = "-") -> AccessRecord:
    return AccessRecord(
        "id", "10.0.0.1:8000", status=status, flags=flags, client_request_id="abc", details="via_upstream"
    )


@pytest.mark.parametrize(
    ("ended", "lines"),
    [(record(200), 0), (record(400), 0), (record(200, "DC"), 0), (record(500), 1), (record(200, "SI"), 1)],
)
def test_failure_log_writes_failures_alone(ended: AccessRecord, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().write(ended)
    assert len(caplog.messages) == lines


def test_failure_log_counts_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for _ in range(1000):
        failures.write(record(500))
    assert caplog.messages == ["request abc failed at 10.0.0.1:8000: 500 - via_upstream"] * MAX_LINES
    caplog.clear()
    failures.flush()
    failures.flush()
    assert caplog.messages == [f"{1000 - MAX_LINES} more requests failed at engines"]
    failures.write(record(500))
    assert len(caplog.messages) == 2
