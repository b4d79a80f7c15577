"""Observing: whose turn it is when a name is claimed or freed, and what counts as a service's own."""

from __future__ import annotations

from plimsoll.controllers.gateways import View
from plimsoll.controllers.observe import observe, rivals
from plimsoll.controllers.store import Store
from tests import builders

MODEL = {"uri": "file:///models/tiny", "name": "shared"}


def test_whoever_claims_the_same_name_is_told_when_one_comes_goes_or_renames() -> None:
    store = Store()
    first, second = builders.service("first", model=MODEL), builders.service("second", model=MODEL)
    other = builders.service("other")
    for raw in (first, second, other):
        store.put(raw)
    both = [("team", "first"), ("team", "second")]
    assert rivals(store, None, second) == both
    assert rivals(store, first, None) == both
    assert rivals(store, other, second) == [*both, ("team", "other")]
    assert rivals(store, second, second) == []


def test_a_service_that_is_being_deleted_is_left_to_kubernetes() -> None:
    store, raw = Store(), builders.service()
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store.put(raw)
    assert observe(store, View(), ("team", "chat")) is None
    assert observe(store, View(), ("team", "nobody")) is None


def test_children_of_an_earlier_service_of_the_same_name_are_not_ours() -> None:
    store, raw = Store(), builders.service()
    old = builders.deployment(raw, "decode")
    old["metadata"]["ownerReferences"][0]["uid"] = "earlier"
    store.put(raw)
    store.put(old)
    seen = observe(store, View(), ("team", "chat"))
    assert seen is not None
    assert seen.children == {}


def test_a_bad_spec_is_observed_with_its_problems() -> None:
    store, raw = Store(), builders.service(tiers={})
    store.put(raw)
    seen = observe(store, View(), ("team", "chat"))
    assert seen is not None
    assert seen.service is None
    assert any("tiers" in problem for problem in seen.problems)
