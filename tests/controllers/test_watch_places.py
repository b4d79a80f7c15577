"""How namespaces share the targets whose pods gateways watch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.controllers.targets.watch_places import WatchCandidate, watched_targets


def team(namespace: str, count: int, held: int = 0) -> list[WatchCandidate]:
    return [WatchCandidate(namespace, str(number), number < held) for number in range(count)]


def counts(candidates: list[WatchCandidate], places: int) -> dict[str, int]:
    names = [one.namespace for one in watched_targets(candidates, places)]
    return {name: names.count(name) for name in names}


def test_all_have_places_while_there_are_enough() -> None:
    assert counts(team("a", 7) + team("b", 3), 10) == {"a": 7, "b": 3}


def test_small_namespace_has_all_and_large_ones_share_the_rest() -> None:
    assert counts(team("a", 90) + team("b", 2) + team("c", 50), 10) == {"a": 4, "b": 2, "c": 4}


def test_newcomer_gets_its_share_and_takes_no_more_than_it_needs() -> None:
    assert counts(team("a", 10, held=10) + team("new", 1), 10) == {"a": 9, "new": 1}
    assert counts(team("a", 10, held=10) + team("new", 90), 10) == {"a": 5, "new": 5}


def test_place_is_kept_against_older_targets_of_the_namespace() -> None:
    older, held = team("a", 5), WatchCandidate("a", "held", True)
    assert watched_targets([*older, held], 1) == {held}
    assert watched_targets([*older, held], 2) == {held, older[0]}


def test_odd_place_stays_where_it_is() -> None:
    assert counts(team("a", 9) + team("b", 9, held=3), 5) == {"a": 2, "b": 3}
    many = [one for name in range(20) for one in team(f"n{name}", 2, held=name >= 15)]
    assert {f"n{name}" for name in range(15, 20)} < set(counts(many, 10))


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60), st.integers(0, 20))
def test_no_place_is_left_and_nobody_below_the_share_goes_without(asked: list[tuple[str, bool]], places: int) -> None:
    candidates = [WatchCandidate(name, str(number), held) for number, (name, held) in enumerate(asked)]
    found = watched_targets(candidates, places)
    assert len(found) == min(places, len(candidates))
    asks = {name: sum(one.namespace == name for one in candidates) for name, _ in asked}
    has = {name: sum(one.namespace == name for one in found) for name in asks}
    assert all(has[name] >= max(has.values()) - 1 for name in asks if has[name] < asks[name])
    settled = [one._replace(has_place=one in found) for one in candidates]
    assert {one.name for one in watched_targets(settled, places)} == {one.name for one in found}, "it does not change"
