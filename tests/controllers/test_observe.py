"""Observing: whose turn it is when a name is claimed or freed, and what counts as a service's own."""

from __future__ import annotations

from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile.observe import affected_services, observe
from tests import builders

MODEL = {"uri": "file:///models/tiny", "name": "shared"}


def test_affected_services_lists_services_of_same_model_name() -> None:
    store = ObjectCache()
    first, second = builders.service("first", model=MODEL), builders.service("second", model=MODEL)
    other = builders.service("other")
    for raw in (first, second, other):
        store.put(raw)
    both = [("team", "first"), ("team", "second")]
    assert affected_services(store, None, second) == both
    assert affected_services(store, first, None) == both
    assert affected_services(store, other, second) == [*both, ("team", "other")]
    assert affected_services(store, second, second) == []


def test_observe_deleted_service_returns_none() -> None:
    store, raw = ObjectCache(), builders.service()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store.put(raw)
    assert observe(store, GatewayView(), ("team", "chat")) is None
    assert observe(store, GatewayView(), ("team", "nobody")) is None


def test_observe_ignores_children_of_earlier_service() -> None:
    store, raw = ObjectCache(), builders.service()
    old = builders.deployment(raw, "decode")
    old["metadata"]["ownerReferences"][0]["uid"] = "earlier"
    store.put(raw)
    store.put(old)
    observed = observe(store, GatewayView(), ("team", "chat"))
    assert observed is not None
    assert observed.children == {}


def test_observe_invalid_spec_returns_problems() -> None:
    store, raw = ObjectCache(), builders.service(tiers={})
    store.put(raw)
    observed = observe(store, GatewayView(), ("team", "chat"))
    assert observed is not None
    assert observed.service is None
    assert any("tiers" in problem for problem in observed.problems)


def with_fallback(name: str, to: str) -> dict[str, object]:
    return builders.service(name, slo={"ttft": "1s"}, admission={"whenFull": "Downgrade", "fallback": {"name": to}})


def test_observe_fallback_missing_or_cyclic_is_reported() -> None:
    store = ObjectCache()
    for raw in (with_fallback("a", "b"), with_fallback("b", "c"), builders.service("c"), with_fallback("d", "nobody")):
        store.put(raw)

    def observed_fallback(name: str) -> tuple[str, str] | None:
        observed = observe(store, GatewayView(), ("team", name))
        assert observed is not None
        return observed.fallback

    assert {name: observed_fallback(name) for name in "abcd"} == {
        "a": ("team/b", ""),
        "b": ("team/c", ""),
        "c": None,
        "d": ("team/nobody", "does not exist"),
    }
    store.put(with_fallback("c", "a"))
    in_turn = "falls back to this service (cycle: {0} -> {1} -> {2} -> {0})"
    ways = (("team/a", "team/b", "team/c"), ("team/b", "team/c", "team/a"), ("team/c", "team/a", "team/b"))
    assert [observed_fallback(name) for name in "abc"] == [(way[1], in_turn.format(*way)) for way in ways]
    store.put(with_fallback("c", "b"))
    assert observed_fallback("a") == ("team/b", ""), "the ring of others is theirs"


def test_affected_services_lists_services_with_fallback() -> None:
    store = ObjectCache()
    for raw in (with_fallback("a", "b"), builders.service("c")):
        store.put(raw)
    new = builders.service("b")
    store.put(new)
    assert affected_services(store, None, new) == [("team", "a"), ("team", "b")]
    assert affected_services(store, new, new) == []


def test_rivals_former_name_claimed_wakes_its_service() -> None:
    store = ObjectCache()
    renamed, claims = builders.service("renamed"), builders.service("claims", model=MODEL)
    renamed["status"] = {"modelNames": ["renamed", "team/renamed", "shared"]}
    for raw in (renamed, claims):
        store.put(raw)
    assert affected_services(store, None, claims) == [("team", "renamed"), ("team", "claims")]
