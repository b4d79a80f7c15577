"""Who answers to which model name, and what in-flight counts are corrected by."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from plimsoll.core.routing.inflight_reconciliation import reconcile_inflight
from plimsoll.core.routing.model_names import NameClaim, published, resolve_owners, served_names

OLD = NameClaim("a", "old", "tiny", "2026-01-01T00:00:00Z", "u9")
NEW = NameClaim("b", "new", "tiny", "2026-01-02T00:00:00Z", "u1")
TWIN = NameClaim("c", "twin", "tiny", "2026-01-01T00:00:00Z", "u1")


@pytest.mark.parametrize("claims", list(itertools.permutations((OLD, NEW, TWIN))))
def test_resolve_owners_oldest_then_smallest_uid_owns_short_name(claims: tuple[NameClaim, ...]) -> None:
    assert resolve_owners(claims)["tiny"] is TWIN
    assert resolve_owners([claim for claim in claims if claim is not TWIN])["tiny"] is OLD


def test_resolve_owners_every_service_has_a_qualified_name() -> None:
    owned = resolve_owners([OLD, NEW])
    assert {name: claim.name for name, claim in owned.items()} == {"tiny": "old", "a/old": "old", "b/new": "new"}
    assert served_names(OLD, owned) == ("tiny", "a/old")
    assert served_names(NEW, owned) == ("b/new",)


def test_resolve_owners_short_name_cannot_take_qualified_name() -> None:
    thief = NameClaim("x", "thief", "b/new", "2020-01-01T00:00:00Z", "u0")
    owned = resolve_owners([thief, NEW])
    assert owned["b/new"] is NEW
    assert served_names(thief, owned) == ("x/thief",)


def test_served_names_equal_names_are_listed_once() -> None:
    claim = NameClaim("a", "b", "a/b", "", "")
    assert served_names(claim, resolve_owners([claim])) == ("a/b",)


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
    renamed = replace(OLD, model="big", published=("tiny", "a/old"))
    owned = resolve_owners([renamed])
    assert owned["tiny"] is owned["big"] is renamed
    assert served_names(renamed, owned) == ("big", "a/old", "tiny")


@pytest.mark.parametrize("created", ["2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z"])
def test_owners_claim_wins_over_a_dropped_name(created: str) -> None:
    renamed, claims = replace(OLD, model="big", published=("tiny",)), replace(NEW, created=created)
    owned = resolve_owners([renamed, claims])
    assert owned["tiny"] is claims
    assert served_names(renamed, owned) == ("big", "a/old")


def test_owners_published_name_takes_no_long_name() -> None:
    thief = replace(OLD, published=("b/new",))
    assert resolve_owners([thief, NEW])["b/new"] is NEW


@pytest.mark.parametrize("status", [None, {}, {"modelNames": "chat"}, {"modelNames": [1, None, ""]}])
def test_published_unreadable_status_has_no_names(status: object) -> None:
    assert published({"status": status}) == ()
