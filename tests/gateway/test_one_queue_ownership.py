"""Which gateway owns what: all agree, and a change moves as little as possible."""

from __future__ import annotations

from collections import Counter

import pytest

from plimsoll.gateway.one_queue.ownership import MAX_REMEMBERED, Ownership, fallback_groups, rendezvous_owner

NAMES = [f"plimsoll-gateway-7d4b9c-{n}" for n in range(5)]
KEYS = [f"team-{n % 7}/model-{n}" for n in range(1000)]


def test_owner_does_not_depend_on_order() -> None:
    for key in KEYS[:50]:
        assert len({rendezvous_owner(key, names) for names in (NAMES, NAMES[::-1], set(NAMES))}) == 1


def test_keys_are_spread_evenly() -> None:
    owned = Counter(rendezvous_owner(key, NAMES) for key in KEYS)
    assert all(150 <= owned[name] <= 250 for name in NAMES)


def test_change_moves_the_keys_of_one_gateway() -> None:
    for key in KEYS:
        before, after = rendezvous_owner(key, NAMES), rendezvous_owner(key, NAMES[1:])
        assert before == after or before == NAMES[0]


def test_all_gateways_agree() -> None:
    tables = [Ownership(name) for name in NAMES]
    for table in tables:
        assert table.set_candidates(NAMES)
        assert not table.set_candidates(NAMES[::-1])
    for key in KEYS[:50]:
        assert len({table.owner_of(key) for table in tables}) == 1
        assert len({table.owner_of_key(key) for table in tables}) == 1


def test_gateway_without_pods_owns_everything() -> None:
    table = Ownership("gateway-0")
    assert (table.owner_of("team/chat"), table.gateways) == ("gateway-0", 1)
    table.set_candidates(["gateway-1", "gateway-2"])  # it is not ready itself
    assert table.owner_of("team/chat") != "gateway-0"
    assert table.gateways == 3


@pytest.mark.parametrize(
    "fallbacks",
    [{"a": "b", "b": "c", "d": "c"}, {"d": "c", "b": "c", "a": "b"}, {"a": "b", "b": "a", "c": "b", "d": "a"}],
)
def test_services_linked_by_fallbacks_are_one_group(fallbacks: dict[str, str]) -> None:
    assert fallback_groups({**fallbacks, "x": "y"}) == {**dict.fromkeys("abcd", "a"), "x": "x", "y": "x"}


def test_group_moves_together() -> None:
    table = Ownership("gateway-0")
    table.set_candidates(NAMES)
    fallbacks = {key: KEYS[0] for key in KEYS[1:20]}
    assert table.set_fallbacks(fallbacks)
    assert not table.set_fallbacks(dict(reversed(fallbacks.items())))
    assert len({table.owner_of(key) for key in KEYS[:20]}) == 1


def test_names_that_clients_choose_fill_no_memory() -> None:
    table = Ownership("gateway-0")
    table.set_candidates(NAMES[:2])
    for number in range(MAX_REMEMBERED + 10):
        table.owner_of_key(str(number))
    assert len(table._owners) <= MAX_REMEMBERED
