"""What pods leave undone: who says so, that it is counted once and told once, and what is no such end."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube import WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.endings import Endings, of_pod
from plimsoll.controllers.store import Store
from plimsoll.telemetry.metrics import OPERATOR
from tests import builders
from tests.controllers.conftest import World

KEY = ("team", "chat")
DRAIN_MESSAGE = '{"cutOff": 3, "drainSeconds": 600}'


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


def counted(metric: str) -> float | None:
    return OPERATOR.get_sample_value(f"plimsoll_operator_{metric}_total", {"service": "team/chat", "tier": "decode"})


@pytest.fixture
def endings() -> Any:
    store = Store()
    store.put(builders.service("chat", "team"))
    made = Endings(store)
    yield made
    made.forget(KEY)


def hear(endings: Endings, obj: dict[str, Any], kind: str = "MODIFIED") -> None:
    endings.hear(WatchEvent(kind, obj, ()))


def test_drain_report_is_counted_and_emitted_once(endings: Endings) -> None:
    hear(endings, pod())
    assert (counted("requests_cut_off"), counted("drains_timed_out")) == (0, 0)
    for kind in ("MODIFIED", "MODIFIED", "DELETED"):
        hear(endings, pod(message=DRAIN_MESSAGE, exitCode=0), kind)
    (event,) = endings.owed(KEY)
    assert event.message == (
        "3 requests were cut off with decode pod chat-decode-a: "
        "not done 600 s after it was stopped (engine.drainTimeout)"
    )
    assert (counted("requests_cut_off"), counted("drains_timed_out")) == (3, 1)
    endings.told(KEY, (event,))
    assert endings.owed(KEY) == ()


def test_drain_report_from_deleted_pod_version_is_seen(endings: Endings) -> None:
    hear(endings, pod(message=DRAIN_MESSAGE.replace("3", "1")), "DELETED")
    assert "1 request was cut off" in endings.owed(KEY)[0].message


def test_drain_report_arriving_during_ack_is_kept(endings: Endings) -> None:
    hear(endings, pod("a", message=DRAIN_MESSAGE))
    first = endings.owed(KEY)
    hear(endings, pod("b", message=DRAIN_MESSAGE))
    endings.told(KEY, first)
    assert ["pod b:" in event.message for event in endings.owed(KEY)] == [True]


def test_drain_report_relist_counts_nothing_twice(endings: Endings) -> None:
    store = Store()
    store.put(builders.service("chat", "team"))
    store.put(pod(message=DRAIN_MESSAGE))
    again = Endings(store)
    for _ in range(2):
        again.hear(WatchEvent("SYNC", {}, (pod(message=DRAIN_MESSAGE),)))
    assert counted("drains_timed_out") == 1
    assert len(again.owed(KEY)) == 1
    again.forget(KEY)
    assert counted("drains_timed_out") is None


def test_drain_report_killed_pod_has_unknown_loss(endings: Endings) -> None:
    hear(endings, killed("2026-01-01T00:10:25Z"))
    (event,) = endings.owed(KEY)
    assert "was killed when its grace of 625 s was over" in event.message
    assert "how much that was is not known" in event.message
    assert (counted("requests_cut_off"), counted("drains_timed_out")) == (0, 1)


@pytest.mark.parametrize(
    "ended",
    [
        pod(exitCode=0, message=""),
        pod(exitCode=1, message="CUDA error: out of memory"),
        pod(exitCode=1, message='{"cutOff": "many"}'),
        pod(exitCode=1, message="[3]"),
        pod(exitCode=1, message="3"),
        killed("2026-01-01T00:00:00Z"),
        killed("2026-01-01T00:10:25Z", reason="OOMKilled"),
        pod(exitCode=137),
        {"kind": "Pod", "metadata": {"name": "x", "namespace": "team", "uid": "u"}, "status": {}},
    ],
    ids=["well", "engine died", "odd", "list", "number", "killed early", "memory", "no time", "nobody's"],
)
def test_drain_report_absent_for_other_pod_endings(endings: Endings, ended: dict[str, Any]) -> None:
    assert of_pod(ended) is None
    hear(endings, ended)
    assert endings.owed(KEY) == ()


def test_drain_report_of_deleted_service_leaves_no_series(endings: Endings) -> None:
    endings.forget(KEY)
    Endings(Store()).hear(WatchEvent("DELETED", pod(message=DRAIN_MESSAGE), ()))
    assert counted("drains_timed_out") is None


@pytest.mark.api
async def test_drain_report_event_is_written_once_by_next_round(world: World) -> None:
    await world.create()
    parts = await world.round("chat")
    gone = WatchEvent("DELETED", pod(namespace=world.namespace, message=DRAIN_MESSAGE), ())
    parts.endings.hear(gone)
    await world.round("chat", parts)
    assert (await world.events()).count("DrainTimedOut") == 1
    again = world.operator()
    await world.look(again.store)
    again.endings.hear(gone)  # a process that does not know that it was told
    await world.round("chat", again)
    assert (await world.events()).count("DrainTimedOut") == 1
