"""Who goes when a tier shrinks: whatever order they are named in, the emptiest that is known to be so."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from plimsoll.core.ports import ServiceReading
from plimsoll.core.scaling.leaving import UNTOLD, Candidate, Load, leaving, load

IDLE_READING = ServiceReading(
    arrived=0.0, arrived_tokens=0.0, retried=0.0, answered=0.0, failed=0.0, cancelled=0.0, refused={}, ttft_s=None
)


def ready(name: str, since_s: float = 0.0, sent: float | None = None) -> Candidate:
    return Candidate(name, True, since_s, Load(sent, None))


def names(candidates: list[Candidate], after: int) -> list[str]:
    return [one.name for one in leaving(candidates, after)]


def test_candidates_least_loaded_then_youngest_go_first() -> None:
    tier = [ready("a", 1, 0), ready("b", 2, 5), ready("c", 3, 2), ready("d", 4, 2)]
    assert names(tier, 1) == ["a", "d", "c"]
    assert names([one._replace(load=Load(1.0, None)) for one in tier], 3) == ["d"]


def test_candidates_unready_pods_go_before_ready() -> None:
    starting = Candidate("new", False, 9.0, Load(50.0, 50.0))
    older = Candidate("old", False, 8.0, Load(0.0, 0.0))
    tier = [ready("a", sent=0), older, ready("b", sent=4), starting]
    assert names(tier, 2) == ["new", "old"]
    assert names(tier, 1) == ["new", "old", "a"]


def test_candidates_scale_to_zero_lists_all_no_change_none() -> None:
    tier = [ready("a", sent=3), ready("b", sent=1)]
    assert names(tier, 0) == ["b", "a"]
    for after in (2, 5):
        assert names(tier, after) == []
    assert names([], 0) == []


def test_candidates_unknown_load_is_not_taken_as_empty() -> None:
    assert names([ready("silent", 9), ready("busy", 1, 50)], 1) == ["busy"]


def test_candidates_without_any_load_youngest_go_first() -> None:
    assert names([ready("a", 3), ready("b", 1), ready("c", 2)], 1) == ["a", "c"]


def test_candidates_order_is_independent_of_input_order() -> None:
    tier = [ready("a", 1, 2), ready("b", 1, 2), ready("c", 2, 2), Candidate("d", False, 1.0)]
    assert {tuple(names(list(order), 1)) for order in permutations(tier)} == {("d", "c", "a")}


def test_replica_load_sums_gateways_then_ranks_by_engine() -> None:
    told = [replace(IDLE_READING, inflight={"a": sent}) for sent in (2, 3)]
    assert load(told, "a", None) == Load(5.0, None)
    assert load(told, "b", 4.0) == Load(0.0, 4.0), "no gateway sends it anything"
    assert load([], "a", 4.0) == Load(None, 4.0), "no gateway knows the service"
    ranks = [Load(0.0, 0.0), Load(0.0, 4.0), Load(0.0, None), Load(1.0, 0.0), Load(None, 2.0), UNTOLD]
    assert sorted(reversed(ranks), key=lambda one: one.rank) == ranks


def test_replica_load_text_uses_best_source() -> None:
    said = [Load(3.0, 9.0).words, Load(None, 2.0).words, UNTOLD.words]
    assert said == ["3 in flight", "2 in flight", "load not known"]
