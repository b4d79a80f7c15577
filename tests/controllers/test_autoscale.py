"""The scaling tick decides what to set from the cache alone."""

from __future__ import annotations

from plimsoll.api.events import EventReason
from plimsoll.controllers.autoscale import changes
from plimsoll.controllers.store import Store
from tests import builders


def test_a_tier_with_other_replicas_than_decided_is_set_and_explains_itself() -> None:
    store, parent = Store(), builders.service(tiers={"prefill": {"minReplicas": 2}, "decode": {"minReplicas": 1}})
    for tier, replicas in (("prefill", 1), ("decode", 3)):
        store.put(builders.deployment(parent, tier, replicas=replicas))
    store.put(parent)
    up, down = changes(store)
    assert (up.tier, up.before, up.decision.replicas) == ("prefill", 1, 2)
    assert (up.event().reason, down.event().reason) == (EventReason.SCALED_UP, EventReason.SCALED_DOWN)
    assert up.event().message == "prefill 1 -> 2: minReplicas is 2"


def test_nothing_is_set_where_all_is_well_invalid_foreign_or_going_away() -> None:
    store = Store()
    well = builders.service("well")
    invalid = builders.service("invalid", tiers={})
    going = builders.service("going")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for parent in (well, invalid, going):
        store.put(parent)
        store.put(builders.deployment(parent, "decode", replicas=1 if parent is well else 5))
    foreign = builders.deployment(builders.service("well", namespace="team"), "prefill", replicas=7)
    foreign["metadata"]["ownerReferences"][0]["uid"] = "somebody"
    store.put(foreign)
    assert changes(store) == []
