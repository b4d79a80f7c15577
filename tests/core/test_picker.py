"""Which endpoint a request gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad, Leaving, Prompt
from plimsoll.core.routing.picker import FALLBACKS, EndpointIndex, Pick, eligible
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.engines import vllm

SHORT = Prompt(tokens=KV_BLOCK_TOKENS - 1)
LONG = Prompt(tokens=KV_BLOCK_TOKENS)


def endpoint(address: str, role: Role = Role.SERVE, revision: str = "r1", **changes: bool) -> Endpoint:
    made = Endpoint(address, f"pod-{address}", role, revision, ready=True, routable=role is not Role.PREFILL)
    return replace(made, **changes)


A, B, C, D = (endpoint(name) for name in "abcd")
DECODE, DECODE2 = endpoint("d1", Role.DECODE), endpoint("d2", Role.DECODE, "r2")
PREFILL, PREFILL2 = endpoint("p1", Role.PREFILL), endpoint("p2", Role.PREFILL, "r2")


def pick(endpoints: Sequence[Endpoint], loads: Mapping[str, EndpointLoad], prompt: Prompt) -> Pick | None:
    return EndpointIndex(endpoints, loads).pick(prompt)


def chosen(found: Pick | None) -> str:
    assert found is not None
    return found.endpoint.address


def test_pick_returns_least_loaded_and_fallbacks() -> None:
    loads = {"a": EndpointLoad(5), "b": EndpointLoad(1), "c": EndpointLoad(3), "d": EndpointLoad(2)}
    found = pick([A, B, C, D], loads, LONG)
    assert found == Pick(B, (D, C))
    assert len(found.fallbacks) == FALLBACKS


def test_pick_tie_uses_least_recently_picked() -> None:
    loads: dict[str, EndpointLoad] = {}
    order = []
    for turn in range(1, 10):
        address = chosen(pick([A, B, C], loads, SHORT))
        loads.setdefault(address, EndpointLoad()).last_pick = turn
        order.append(address)
    assert order == ["a", "b", "c"] * 3


@pytest.mark.parametrize(
    "bad",
    [{"ready": False}, {"leaving": Leaving.HANDS_OVER}, {"routable": False}],
    ids=["not ready", "leaving", "unseen"],
)
def test_pick_ineligible_endpoint_is_never_used(bad: dict[str, Any]) -> None:
    assert pick([endpoint("a", **bad)], {}, LONG) is None
    assert chosen(pick([endpoint("a", **bad), B], {"b": EndpointLoad(100)}, LONG)) == "b"


def test_pick_suspect_endpoint_is_last_resort() -> None:
    loads = {"a": EndpointLoad(0, suspect=True), "b": EndpointLoad(9)}
    found = pick([A, B], loads, LONG)
    assert found == Pick(B)
    assert chosen(pick([A], loads, LONG)) == "a"


def test_pick_prefill_only_fleet_returns_none() -> None:
    assert pick([PREFILL], {}, LONG) is None


def test_pick_long_prompt_uses_remote_prefill() -> None:
    assert pick([DECODE, PREFILL], {}, LONG) == Pick(DECODE, (), PREFILL)
    assert pick([DECODE, PREFILL], {}, SHORT) == Pick(DECODE)


def test_pick_several_sequences_prefill_locally() -> None:
    assert pick([DECODE, PREFILL], {}, Prompt(1000, sequences=2)) == Pick(DECODE)


def test_pick_never_mixes_revisions() -> None:
    everything = [DECODE, DECODE2, PREFILL, PREFILL2]
    busy = {"d1": EndpointLoad(1)}
    assert pick(everything, busy, LONG) == Pick(DECODE2, (), PREFILL2)
    assert pick([DECODE2, PREFILL], {}, LONG) == Pick(DECODE2)


def test_pick_fallbacks_with_remote_prefill_share_revision() -> None:
    third = endpoint("d3", Role.DECODE)
    assert pick([DECODE, DECODE2, third, PREFILL], {}, LONG) == Pick(DECODE, (third,), PREFILL)
    assert pick([DECODE, DECODE2, third, PREFILL], {}, SHORT) == Pick(DECODE, (DECODE2, third))


def test_pick_remote_prefill_is_least_loaded_live_one() -> None:
    second = endpoint("p9", Role.PREFILL)
    assert pick([DECODE, PREFILL, second], {"p1": EndpointLoad(2)}, LONG) == Pick(DECODE, (), second)
    assert pick([DECODE, replace(PREFILL, ready=False)], {}, LONG) == Pick(DECODE)
    assert pick([DECODE, replace(PREFILL, leaving=Leaving.AT_ONCE)], {}, LONG) == Pick(DECODE)


def test_endpoint_index_follows_load_changes() -> None:
    loads = {"a": EndpointLoad(1), "b": EndpointLoad(2)}
    standing = EndpointIndex([A, B], loads)
    assert standing.pick(LONG) == Pick(A, (B,))
    loads["a"].inflight = 3
    assert standing.pick(LONG) == Pick(B, (A,))
    loads["b"].suspect = True
    assert standing.pick(LONG) == Pick(A)


def test_pick_at_uses_requested_endpoint_if_eligible() -> None:
    second = endpoint("p9", Role.PREFILL)
    standing = EndpointIndex([DECODE, DECODE2, PREFILL, PREFILL2, second], {"p1": EndpointLoad(7)})
    assert standing.pick_at("d1", "p1", LONG) == Pick(DECODE, (), PREFILL)
    assert standing.pick_at("d1", "p2", LONG) == Pick(DECODE, (), second)  # of another revision
    assert standing.pick_at("d1", "gone", LONG) == Pick(DECODE, (), second)
    assert standing.pick_at("d1", "p1", SHORT) == Pick(DECODE, (DECODE2,))
    assert standing.pick_at("d1", None, LONG) == Pick(DECODE, (DECODE2,))  # computed in place
    assert standing.pick_at("gone", "p1", LONG) is None
    assert standing.pick_at("p1", None, LONG) is None


def test_pick_serving_engine_prefills_itself() -> None:
    assert pick([A, PREFILL], {}, LONG) == Pick(A)


ENDPOINTS = st.builds(
    Endpoint,
    address=st.sampled_from("abcdefgh"),
    pod=st.just("pod"),
    role=st.sampled_from(Role),
    revision=st.sampled_from(("r1", "r2")),
    ready=st.booleans(),
    leaving=st.sampled_from(Leaving),
    routable=st.booleans(),
)
LOADS = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(EndpointLoad, inflight=st.integers(0, 9), last_pick=st.integers(0, 9), suspect=st.booleans()),
)


@given(st.lists(ENDPOINTS, unique_by=lambda e: e.address), LOADS, st.integers(0, 1000), st.integers(1, 3))
def test_pick_result_is_always_eligible(
    endpoints: list[Endpoint], loads: dict[str, EndpointLoad], tokens: int, sequences: int
) -> None:
    found = pick(endpoints, loads, Prompt(tokens, sequences))
    able = [e for e in endpoints if e.available and e.routable and e.role is not Role.PREFILL]
    if found is None:
        assert able == []
        return
    named = (found.endpoint, *found.fallbacks)
    assert set(named) <= set(able)
    assert len(set(named)) == len(named)
    rivals = eligible(able, loads)
    held = {e.address: loads.get(e.address, EndpointLoad()).inflight for e in rivals}
    assert held[found.endpoint.address] == min(held.values())
    if found.prefill is not None:
        assert found.endpoint.role is Role.DECODE
        assert (found.prefill.role, found.prefill.available) == (Role.PREFILL, True)
        assert {e.revision for e in (*named, found.prefill)} == {found.endpoint.revision}


def reference_pick(
    endpoints: list[Endpoint], loads: dict[str, EndpointLoad], prompt: Prompt, best: Endpoint | None, wished: str | None
) -> Pick | None:
    """What `Standing` does, by sorting. best: the endpoint that is to be taken, None for the least loaded one.

    wished: the prefill endpoint for it, None for none.
    """

    def ranked(rivals: Iterable[Endpoint]) -> list[Endpoint]:
        return sorted(eligible(rivals, loads), key=lambda e: (held(e).inflight, held(e).last_pick))

    def held(e: Endpoint) -> EndpointLoad:
        return loads.get(e.address, EndpointLoad())

    able = [e for e in endpoints if e.available and e.routable and e.role is not Role.PREFILL]
    if not able:
        return None
    found = best or ranked(able)[0]
    prefill = None
    local = best is not None and wished is None
    if not local and found.role is Role.DECODE and prompt.tokens >= KV_BLOCK_TOKENS and prompt.sequences == 1:
        pairs = [e for e in endpoints if e.role is Role.PREFILL and e.available and e.revision == found.revision]
        prefill = next((e for e in pairs if e.address == wished), None) or next(iter(ranked(pairs)), None)
    if best is None:
        spares = [e for e in ranked(able) if e is not found and (prefill is None or e.revision == found.revision)]
    else:
        spares = ranked(e for e in able if e is not found and (prefill is None or e.revision == found.revision))
    return Pick(found, tuple(spares[:FALLBACKS]), prefill)


@given(
    st.lists(ENDPOINTS, unique_by=lambda e: e.address),
    LOADS,
    st.integers(0, 300),
    st.integers(1, 2),
    st.sampled_from("abcdefgh"),
    st.sampled_from([None, *"abcdefgh"]),
)
def test_pick_equals_sorted_reference(
    endpoints: list[Endpoint],
    loads: dict[str, EndpointLoad],
    tokens: int,
    sequences: int,
    address: str,
    wished: str | None,
) -> None:
    standing, prompt = EndpointIndex(endpoints, loads), Prompt(tokens, sequences)
    assert standing.pick(prompt) == reference_pick(endpoints, loads, prompt, None, None)
    able = (e for e in endpoints if e.available and e.routable and e.role is not Role.PREFILL and e.address == address)
    best = next(able, None)
    expected = None if best is None else reference_pick(endpoints, loads, prompt, best, wished)
    assert standing.pick_at(address, wished, prompt) == expected


MOVES = st.lists(
    st.tuples(
        st.sampled_from("abcdp"),
        st.sampled_from(["inflight", "last_pick", "suspect", "elsewhere"]),
        st.integers(0, 3),
    ),
    max_size=20,
)


@given(MOVES)
@example([("a", "elsewhere", 0), ("a", "inflight", 3), ("a", "inflight", 0), ("d", "last_pick", 1)])
def test_pick_equals_sorted_reference_under_updates(moves: list[tuple[str, str, int]]) -> None:
    endpoints = [
        *(endpoint(name, Role.DECODE, "r2" if name == "d" else "r1") for name in "abcd"),
        endpoint("p", Role.PREFILL),
    ]
    loads = {name: EndpointLoad() for name in "abcdp"}
    standing, other = EndpointIndex(endpoints, loads), EndpointIndex(endpoints[::-1], loads)
    for name, what, value in moves:
        if what == "elsewhere":  # another one has the loads tell it of their moves
            assert other.pick(LONG) == reference_pick(endpoints[::-1], loads, LONG, None, None)
        else:
            setattr(loads[name], what, bool(value) if what == "suspect" else value)
        if value != 2:  # else a few moves at once
            assert standing.pick(SHORT) == reference_pick(endpoints, loads, SHORT, None, None)
            assert standing.pick(LONG) == reference_pick(endpoints, loads, LONG, None, None)
            assert standing.pick_at("c", "p", LONG) == reference_pick(endpoints, loads, LONG, endpoints[2], "p")


def test_kv_block_tokens_equal_the_engines_argument() -> None:
    assert KV_BLOCK_TOKENS == vllm.DISAGGREGATED_BLOCK_TOKENS
