"""Pods of a deleted service do not count for its successor of the same name."""

from __future__ import annotations

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.observe import observe
from tests import builders
from tests.controllers.status_walk import Walk

KEY = ("team", "chat")
Object = builders.Object


def pod(name: str, created: str, **meta: str) -> Object:
    made = builders.pod(builders.service(), "decode", name)
    made["metadata"] |= {"creationTimestamp": created, **meta}
    return made


def cache(*pods: Object) -> ObjectCache:
    """The cache of a service that was created at 2026-01-01T00:00:00Z, and of these pods."""
    made = ObjectCache()
    for obj in (builders.service(), *pods):
        made.put(obj)
    return made


def test_pods_of_an_earlier_service_are_not_counted() -> None:
    old, new = pod("old", "2025-12-31T23:50:00Z"), pod("new", "2026-01-01T00:00:00Z")
    store = cache(old, new)
    observed = observe(store, GatewayView(), KEY)
    assert observed is not None
    assert [one["metadata"]["name"] for one in observed.pods] == ["new"]
    assert [one["metadata"]["name"] for one in store.all_pods()] == ["new"]
    assert [one["metadata"]["name"] for one in store.tier_pods(KEY)] == ["new"]


def test_pods_count_for_their_own_service_until_it_is_replaced() -> None:
    store = cache(pod("p", "2026-01-01T00:00:30Z"))
    assert len(store.pods(KEY)) == 1
    successor = builders.service()
    successor["metadata"] |= {"uid": "successor", "creationTimestamp": "2026-01-01T00:05:00Z"}
    store.put(successor)
    assert store.pods(KEY) == list(store.all_pods()) == []
    store.remove(successor)
    assert len(list(store.all_pods())) == 1  # its engine still runs


def test_pods_of_targets_may_be_older_than_the_service() -> None:
    target = pod("target", "2025-01-01T00:00:00Z") | {"kind": labels.ADOPTED_POD_KIND, labels.ADOPTED: {}}
    store = cache(target)
    assert store.pods(KEY) == list(store.all_pods()) == [target]


def test_requests_that_an_earlier_service_aborts_have_no_event() -> None:
    old = pod("old", "2025-12-31T23:50:00Z", deletionTimestamp="2026-01-01T00:00:10Z")
    message = '{"abortedRequests": 3, "drainSeconds": 600}'
    terminated = {"message": message, "exitCode": 0}
    old["status"] = {"containerStatuses": [{"name": "engine", "state": {"terminated": terminated}}]}
    reports = DrainReports(cache(old))
    reports.on_pod_event(WatchEvent("MODIFIED", old, ()))
    assert reports.pending(KEY) == ()


def test_status_of_a_successor_tells_of_engines_that_still_drain() -> None:
    walk = Walk()
    old = builders.pod(walk.parent, "serve", "old", conditions=[{"type": "Ready", "status": "True"}])
    old["metadata"] |= {"creationTimestamp": "2025-12-31T23:50:00Z", "deletionTimestamp": "2026-01-01T00:10:00Z"}
    walk.store.put(old)
    status = walk.render()
    assert status["tiers"]["serve"]["summary"] == "0/1"
    expected = "serve: 0 of 1 ready: 1 not created yet, 1 of a deleted service of this name"
    assert walk.condition("Reconciling", status)["message"] == expected
