"""Who serves which model name, and what in-flight counts are corrected by."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from plimsoll.core.routing.inflight_reconciliation import reconcile_inflight
from plimsoll.core.routing.model_names import (
    NameClaim,
    NameRejection,
    NameRules,
    find_holder,
    is_grantable,
    published,
    read_claim,
    resolve_owners,
    served_names,
)

MARCH, APRIL = "2026-03-01T00:00:00.000001Z", "2026-04-01T00:00:00.000001Z"
OLD = NameClaim("a", "old", "tiny", "2026-01-01T00:00:00Z")
NEW = NameClaim("b", "new", "tiny", "2026-01-02T00:00:00Z")
TWIN = NameClaim("c", "twin", "tiny", "2026-01-01T00:00:00Z")
ALL = NameRules()


def grant(claim: NameClaim, since: str = MARCH) -> NameClaim:
    """The claim with the record that its name is granted to it."""
    return replace(claim, granted=claim.model, since=since)


def test_resolve_owners_unrecorded_name_is_not_served() -> None:
    owned = resolve_owners([OLD, NEW])
    assert {name: claim.name for name, claim in owned.items()} == {"a/old": "old", "b/new": "new"}


@pytest.mark.parametrize("claims", list(itertools.permutations((OLD, grant(NEW), TWIN))))
def test_resolve_owners_granted_name_stays_with_younger(claims: tuple[NameClaim, ...]) -> None:
    owned = resolve_owners(claims)
    assert owned["tiny"].name == "new"
    assert served_names(owned["tiny"], owned) == ("tiny", "b/new")
    assert served_names(OLD, owned) == ("a/old",)


def test_resolve_owners_earliest_of_two_records_wins() -> None:
    assert resolve_owners([grant(OLD, APRIL), grant(NEW, MARCH)])["tiny"].name == "new"


def test_resolve_owners_record_of_another_name_counts_not() -> None:
    assert "tiny" not in resolve_owners([replace(OLD, granted="big", since=MARCH)])


def test_resolve_owners_claim_takes_no_qualified_name() -> None:
    thief = NameClaim("x", "thief", "b/new", "2020-01-01T00:00:00Z")
    owned = resolve_owners([thief, NEW])
    assert owned["b/new"] is NEW
    assert served_names(thief, owned) == ("x/thief",)


def test_resolve_owners_granted_name_outlasts_new_namespace() -> None:
    first = grant(NameClaim("team", "x", "openai/gpt", "2026-01-01T00:00:00Z"))
    late = grant(NameClaim("openai", "gpt", "gpt", "2020-01-01T00:00:00Z"))
    owned = resolve_owners([first, late])
    assert owned["openai/gpt"] is first
    assert served_names(late, owned) == ("gpt",)


def test_served_names_equal_names_are_listed_once() -> None:
    claim = NameClaim("a", "b", "a/b", "")
    assert served_names(claim, resolve_owners([claim])) == ("a/b",)


def test_find_holder_edited_older_service_gets_nothing() -> None:
    bank, evil = grant(NEW), OLD
    assert find_holder(evil, [bank, evil], ALL) is bank
    assert not is_grantable(evil, [bank, evil], ALL)
    assert is_grantable(bank, [bank, evil], ALL)


@pytest.mark.parametrize("claims", list(itertools.permutations((OLD, NEW, TWIN))))
def test_find_holder_unrecorded_claims_go_by_age_and_key(claims: tuple[NameClaim, ...]) -> None:
    assert [c.name for c in claims if is_grantable(c, claims, ALL)] == ["old"]
    assert [c.name for c in claims if c is not OLD and is_grantable(c, [c, NEW, TWIN], ALL)] == ["twin"]


def test_find_holder_lost_record_returns_to_who_serves() -> None:
    serving = replace(NEW, published=("tiny", "b/new"))
    assert find_holder(OLD, [OLD, serving], ALL) is serving
    assert is_grantable(serving, [OLD, serving], ALL)


def test_find_holder_record_is_kept_until_it_is_removed() -> None:
    renamed = replace(grant(OLD), model="big")
    assert find_holder(NEW, [renamed, NEW], ALL) is renamed
    assert find_holder(NEW, [replace(renamed, granted="", since=""), NEW], ALL) is None


def test_find_holder_later_of_two_records_is_withdrawn() -> None:
    first, second = grant(NEW, MARCH), grant(OLD, APRIL)
    assert find_holder(first, [first, second], ALL) is None
    assert find_holder(second, [first, second], ALL) is first


def test_find_holder_qualified_name_of_same_namespace() -> None:
    chat, other = NameClaim("team", "chat", "chat", "2"), NameClaim("team", "other", "team/chat", "1")
    assert find_holder(other, [chat, other], ALL) is chat
    assert find_holder(other, [other], ALL) is None


def test_find_holder_refused_claim_keeps_nobody_waiting() -> None:
    rules = NameRules(short_name_namespaces=frozenset({"b"}))
    assert find_holder(NEW, [OLD, NEW], rules) is None


def test_is_grantable_qualified_name_needs_no_record() -> None:
    assert not is_grantable(NameClaim("a", "b", "a/b", ""), [], ALL)


KNOWN = NameRules(service_namespaces=frozenset({"bank", "team"}))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("bank/chat", NameRejection.RESERVED),
        ("bank/Chat-2.5", NameRejection.RESERVED),
        ("bank/a/b", NameRejection.RESERVED),
        ("bank", None),
        ("team/chat", None),
        ("team/other", None),
        ("openai/gpt-oss-20b", None),
        ("Qwen/Qwen3-8B", None),
        ("chat", None),
    ],
)
def test_refusal_name_of_another_namespace_is_reserved(model: str, expected: NameRejection | None) -> None:
    assert KNOWN.rejection(NameClaim("team", "chat", model, "")) is expected


def test_refusal_accepted_name_stays_when_namespace_appears() -> None:
    claim = NameClaim("team", "x", "bank/chat", "")
    assert KNOWN.rejection(grant(claim)) is None
    assert KNOWN.rejection(replace(claim, published=("bank/chat",))) is None


@pytest.mark.parametrize(
    ("namespace", "model", "expected"),
    [
        ("bank", "chat", None),
        ("team", "chat", NameRejection.RESTRICTED),
        ("team", "Qwen/Qwen3-8B", NameRejection.RESTRICTED),
        ("team", "team/x", None),
    ],
)
def test_refusal_only_listed_namespaces_claim_short(namespace: str, model: str, expected: NameRejection | None) -> None:
    rules = NameRules(short_name_namespaces=frozenset({"bank"}))
    assert rules.rejection(grant(NameClaim(namespace, "x", model, ""))) is expected


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (None, 5, 5),
        (0, 3, 0),
        (3, 0, 0),
        (2, 5, 2),
        (5, 2, 2),
        (-2, -5, -2),
        (-5, -2, -2),
        (-3, 3, 0),
    ],
)
def test_reconcile_inflight_applies_only_persistent_difference(before: int | None, now: int, expected: int) -> None:
    assert reconcile_inflight(before, now) == expected


def test_owners_dropped_name_stays_with_its_service() -> None:
    renamed = grant(replace(OLD, model="big", published=("tiny", "a/old")))
    owned = resolve_owners([renamed])
    assert owned["tiny"] is owned["big"] is renamed
    assert served_names(renamed, owned) == ("big", "a/old", "tiny")


@pytest.mark.parametrize("created", ["2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z"])
def test_owners_grant_wins_over_a_dropped_name(created: str) -> None:
    renamed, claims = grant(replace(OLD, model="big", published=("tiny",))), grant(replace(NEW, created=created))
    owned = resolve_owners([renamed, claims])
    assert owned["tiny"] is claims
    assert served_names(renamed, owned) == ("big", "a/old")


def test_owners_published_name_takes_no_long_name() -> None:
    thief = replace(OLD, published=("b/new",))
    assert resolve_owners([thief, NEW])["b/new"] is NEW


@pytest.mark.parametrize(
    "record", [None, "chat", {}, {"name": "chat", "since": MARCH}, "chat since ", f" since {MARCH}", 7]
)
def test_read_claim_invalid_record_is_none(record: object) -> None:
    meta = {"namespace": "team", "name": "chat", "creationTimestamp": "2026-01-01T00:00:00Z"}
    claim = read_claim({"metadata": meta, "spec": {}, "status": {"nameClaim": record}})
    assert claim == NameClaim("team", "chat", "chat", "2026-01-01T00:00:00Z")


def test_read_claim_of_deleted_service_is_none() -> None:
    assert read_claim({"metadata": {"namespace": "a", "name": "b", "deletionTimestamp": MARCH}}) is None


@pytest.mark.parametrize("status", [None, {}, {"modelNames": "chat"}, {"modelNames": [1, None, ""]}])
def test_published_unreadable_status_has_no_names(status: object) -> None:
    assert published({"status": status}) == ()
