"""Which probes bind, and what excuses one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from e2e.lib.client import Target
from e2e.lib.prober import Prober, ready_for
from e2e.lib.wait import wait_until
from tests.e2e_lib.fake_engine_server import FakeEngineServer

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def service(status: str, ago_s: float) -> dict[str, Any]:
    at = (NOW - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"status": {"conditions": [{"type": "Ready", "status": status, "lastTransitionTime": at}]}}


@pytest.mark.parametrize(
    ("obj", "seconds"),
    [(service("True", 5), 5.0), (service("False", 5), None), (service("Unknown", 5), None), ({}, None), (None, None)],
)
def test_ready_for_follows_ready_condition(obj: dict[str, Any] | None, seconds: float | None) -> None:
    assert ready_for(obj, NOW.timestamp()) == seconds


def _probed(url: str, obj: dict[str, Any]) -> Prober:
    with Prober() as prober:
        prober.watch("ns/tiny", Target(url, "tiny"), lambda: obj)
        wait_until("a probe", lambda: prober.probes(0), 10, 0.01)
        with prober.paused():
            prober.unwatch("ns/tiny")
    return prober


def test_failed_probe_while_ready_violates_slo_unless_excused() -> None:
    prober = _probed("http://127.0.0.1:9", service("True", 5))
    [probe] = prober.ready_violations(0)
    assert probe.counts_against_ready
    prober.allow_failures(probe.record.sent_at - 10, probe.record.sent_at - 5)
    assert prober.ready_violations(0)
    prober.allow_failures(probe.record.sent_at - 1, probe.record.ended_at + 1)
    assert not prober.ready_violations(0)


def test_failed_probe_while_not_ready_is_not_binding() -> None:
    prober = _probed("http://127.0.0.1:9", service("False", 5))
    assert not prober.ready_violations(0)
    assert "1 failed" in prober.summary(0)


def test_probes_are_in_request_log_of_their_model() -> None:
    with FakeEngineServer().running() as url:
        prober = _probed(url, service("True", 5))
    assert prober.ledger(0, "tiny").records[0].status == 200
    assert not prober.ledger(0, "another").records
