"""Who goes when a tier shrinks: whatever order they are named in, the emptiest that is known to be so."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest

from plimsoll.core.autoscaling.scale_down_candidates import (
    CACHE_HITS_TIME_S,
    UNKNOWN_LOAD,
    CacheHits,
    ReplicaLoad,
    ScaleDownCandidate,
    replica_load,
    select_for_removal,
)
from plimsoll.core.ports import EngineReading, ServiceReading

IDLE_READING = ServiceReading(
    arrived=0.0, arrived_tokens=0.0, retried=0.0, succeeded=0.0, failed=0.0, cancelled=0.0, rejected={}, ttft_s=None
)


def ready(name: str, since_s: float = 0.0, sent: float | None = None) -> ScaleDownCandidate:
    return ScaleDownCandidate(name, True, since_s, ReplicaLoad(sent, None))


def names(candidates: list[ScaleDownCandidate], after: int) -> list[str]:
    return [one.name for one in select_for_removal(candidates, after)]


def test_candidates_least_loaded_then_youngest_go_first() -> None:
    tier = [ready("a", 1, 0), ready("b", 2, 5), ready("c", 3, 2), ready("d", 4, 2)]
    assert names(tier, 1) == ["a", "d", "c"]
    assert names([one._replace(load=ReplicaLoad(1.0, None)) for one in tier], 3) == ["d"]


def test_candidates_of_equal_load_lose_the_least_useful_cache() -> None:
    tier = [
        ScaleDownCandidate("new", True, 9.0, ReplicaLoad(1.0, None, 5000.0)),
        ScaleDownCandidate("old", True, 1.0, ReplicaLoad(1.0, None, 20.0)),
        ScaleDownCandidate("cold", True, 1.0, ReplicaLoad(2.0, None, 0.0)),
        ScaleDownCandidate("starting", False, 1.0, ReplicaLoad(None, None, 0.0)),
    ]
    assert names(tier, 0) == ["starting", "old", "new", "cold"]


def test_cache_hits_decay_and_end_with_their_engine() -> None:
    hits = CacheHits()

    def observe(at_s: float, counter: float | None) -> float:
        hits.observe(EngineReading("a", at_s, "i", cached_prompt_tokens=counter))
        return hits.tokens

    assert observe(0.0, 1e6) == 0.0, "the first reading tells no increase"
    assert observe(1.0, 1e6 + 100.0) == 100.0
    assert observe(0.5, 2e6) == 100.0, "an older reading"
    assert observe(2.0, None) == 100.0
    assert observe(1.0 + CACHE_HITS_TIME_S, 1e6 + 100.0) == pytest.approx(100.0 / math.e)
    assert observe(CACHE_HITS_TIME_S + 2.0, 0.0) == 0.0, "a new process has nothing in its cache"
    assert observe(CACHE_HITS_TIME_S + 3.0, 7.0) == 7.0


def test_candidates_unready_pods_go_before_ready() -> None:
    starting = ScaleDownCandidate("new", False, 9.0, ReplicaLoad(50.0, 50.0))
    older = ScaleDownCandidate("old", False, 8.0, ReplicaLoad(0.0, 0.0))
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
    tier = [ready("a", 1, 2), ready("b", 1, 2), ready("c", 2, 2), ScaleDownCandidate("d", False, 1.0)]
    assert {tuple(names(list(order), 1)) for order in permutations(tier)} == {("d", "c", "a")}


def test_replica_load_sums_gateways_then_ranks_by_engine() -> None:
    reported = [replace(IDLE_READING, inflight={"a": sent}) for sent in (2, 3)]
    assert replica_load(reported, "a", None) == ReplicaLoad(5.0, None)
    assert replica_load(reported, "b", 4.0) == ReplicaLoad(0.0, 4.0), "no gateway sends it anything"
    assert replica_load([], "a", 4.0) == ReplicaLoad(None, 4.0), "no gateway knows the service"
    ranks = [
        ReplicaLoad(0.0, 0.0),
        ReplicaLoad(0.0, 4.0),
        ReplicaLoad(0.0, None),
        ReplicaLoad(1.0, 0.0),
        ReplicaLoad(None, 2.0),
        UNKNOWN_LOAD,
    ]
    assert sorted(reversed(ranks), key=lambda one: one.rank) == ranks


def test_replica_load_text_uses_best_source() -> None:
    said = [ReplicaLoad(3.0, 9.0).description, ReplicaLoad(None, 2.0).description, UNKNOWN_LOAD.description]
    assert said == ["3 in flight", "2 in flight", "load unknown"]
