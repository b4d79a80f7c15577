"""What pods leave undone: who says so, that it is counted once and told once, and what is no such end."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.drain_reports import DrainReports, drain_timeout_of
from plimsoll.telemetry.operator_metrics import OPERATOR
from tests import builders
from tests.controllers.conftest import ControllerHarness

KEY = ("team", "chat")
DRAIN_MESSAGE = '{"abortedRequests": 3, "drainSeconds": 600}'


def pod(name: str = "chat-decode-a", tier: str = "decode", namespace: str = "team", **ended: Any) -> dict[str, Any]:
    meta = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "labels": {labels.SERVICE: "chat", labels.ROLE: tier},
        "deletionTimestamp": "2026-01-01T00:10:25Z",
        "deletionGracePeriodSeconds": 625,
    }
    statuses = [{"name": "engine", "state": {"terminated": ended} if ended else {"running": {}}}]
    return {"kind": "Pod", "metadata": meta, "status": {"containerStatuses": statuses}}


def killed(at: str, **other: Any) -> dict[str, Any]:
    return pod(exitCode=137, reason=other.pop("reason", "Error"), finishedAt=at, **other)


def counter_value(metric: str) -> float | None:
    return OPERATOR.get_sample_value(f"plimsoll_operator_{metric}_total", {"service": "team/chat", "tier": "decode"})


@pytest.fixture
def drain_reports() -> Any:
    store = ObjectCache()
    store.put(builders.service("chat", "team"))
    made = DrainReports(store)
    yield made
    made.forget(KEY)


def observe(drain_reports: DrainReports, obj: dict[str, Any], kind: str = "MODIFIED") -> None:
    drain_reports.on_pod_event(WatchEvent(kind, obj, ()))


def test_drain_report_is_counted_and_emitted_once(drain_reports: DrainReports) -> None:
    observe(drain_reports, pod())
    assert (counter_value("requests_aborted"), counter_value("drains_timed_out")) == (0, 0)
    for kind in ("MODIFIED", "MODIFIED", "DELETED"):
        observe(drain_reports, pod(message=DRAIN_MESSAGE, exitCode=0), kind)
    (event,) = drain_reports.pending(KEY)
    assert event.message == (
        "3 requests were aborted in decode pod chat-decode-a, "
        "still running 600 s after its stop; raise spec.engine.drainTimeout for longer requests"
    )
    assert (counter_value("requests_aborted"), counter_value("drains_timed_out")) == (3, 1)
    drain_reports.ack(KEY, (event,))
    assert drain_reports.pending(KEY) == ()


def test_drain_report_of_a_worker_is_none(drain_reports: DrainReports) -> None:
    worker = pod(message=DRAIN_MESSAGE, exitCode=0)
    worker["metadata"]["labels"] = {labels.SERVICE: "chat", labels.WORKER_OF: "serve"}
    observe(drain_reports, worker)
    assert drain_reports.pending(KEY) == ()
    series = {"service": "team/chat", "tier": ""}
    assert OPERATOR.get_sample_value("plimsoll_operator_drains_timed_out_total", series) is None


def test_drain_report_from_deleted_pod_version_is_read(drain_reports: DrainReports) -> None:
    observe(drain_reports, pod(message=DRAIN_MESSAGE.replace("3", "1")), "DELETED")
    assert "1 request was aborted" in drain_reports.pending(KEY)[0].message


def test_drain_report_arriving_during_ack_is_kept(drain_reports: DrainReports) -> None:
    observe(drain_reports, pod("a", message=DRAIN_MESSAGE))
    first = drain_reports.pending(KEY)
    observe(drain_reports, pod("b", message=DRAIN_MESSAGE))
    drain_reports.ack(KEY, first)
    assert ["pod b," in event.message for event in drain_reports.pending(KEY)] == [True]


def test_drain_report_relist_counts_nothing_twice(drain_reports: DrainReports) -> None:
    store = ObjectCache()
    store.put(builders.service("chat", "team"))
    store.put(pod(message=DRAIN_MESSAGE))
    again = DrainReports(store)
    for _ in range(2):
        again.on_pod_event(WatchEvent("SYNC", {}, (pod(message=DRAIN_MESSAGE),)))
    assert counter_value("drains_timed_out") == 1
    assert len(again.pending(KEY)) == 1
    again.forget(KEY)
    assert counter_value("drains_timed_out") is None


def test_drain_report_killed_pod_has_unknown_loss(drain_reports: DrainReports) -> None:
    observe(drain_reports, killed("2026-01-01T00:10:25Z"))
    (event,) = drain_reports.pending(KEY)
    assert "was killed after its termination grace period of 625 s" in event.message
    assert "the number of aborted requests is unknown" in event.message
    assert (counter_value("requests_aborted"), counter_value("drains_timed_out")) == (0, 1)


@pytest.mark.parametrize(
    "ended",
    [
        pod(exitCode=0, message=""),
        pod(exitCode=1, message="CUDA error: out of memory"),
        pod(exitCode=1, message='{"abortedRequests": "many"}'),
        pod(exitCode=1, message="[3]"),
        pod(exitCode=1, message="3"),
        killed("2026-01-01T00:00:00Z"),
        killed("2026-01-01T00:10:25Z", reason="OOMKilled"),
        pod(exitCode=137),
        {"kind": "Pod", "metadata": {"name": "x", "namespace": "team", "uid": "u"}, "status": {}},
    ],
    ids=["well", "engine died", "odd", "list", "number", "killed early", "memory", "no time", "nobody's"],
)
def test_drain_report_absent_for_other_pod_endings(drain_reports: DrainReports, ended: dict[str, Any]) -> None:
    assert drain_timeout_of(ended) is None
    observe(drain_reports, ended)
    assert drain_reports.pending(KEY) == ()


def test_drain_report_of_deleted_service_leaves_no_series(drain_reports: DrainReports) -> None:
    drain_reports.forget(KEY)
    DrainReports(ObjectCache()).on_pod_event(WatchEvent("DELETED", pod(message=DRAIN_MESSAGE), ()))
    assert counter_value("drains_timed_out") is None


@pytest.mark.api
async def test_drain_report_event_is_written_once_by_next_round(world: ControllerHarness) -> None:
    await world.create()
    parts = await world.reconcile_once("chat")
    gone = WatchEvent("DELETED", pod(namespace=world.namespace, message=DRAIN_MESSAGE), ())
    parts.endings.on_pod_event(gone)
    await world.reconcile_once("chat", parts)
    assert (await world.events()).count("DrainTimedOut") == 1
    again = world.operator()
    await world.sync(again.store)
    again.endings.on_pod_event(gone)  # a process that does not know that it was told
    await world.reconcile_once("chat", again)
    assert (await world.events()).count("DrainTimedOut") == 1
