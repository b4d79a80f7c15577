"""The names that a status lists while a service's name changes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from plimsoll.controllers.reconcile.model_names import MOST_FORMER, Former, ModelNames, model_names
from tests import builders

AT = datetime(2026, 1, 1, 12, tzinfo=UTC)
END = "2026-01-01T13:00:00Z"
OVER = timedelta(hours=1)


def names(
    claimed: str,
    *before: str,
    answered: set[str] | None = None,
    former: Any = (),
    complete: bool = True,
    at: datetime = AT,
    **owned_by: str,
) -> ModelNames:
    """The names of team/chat. before: those that its status lists. owned_by: names of others."""
    raw = builders.service()
    raw["status"] = {"modelNames": list(before), "formerNames": former}
    owned = {claimed, "team/chat", *before} - {name for name, owner in owned_by.items() if owner != "team/chat"}
    return model_names(raw, claimed, owned, answered, complete, at)


def entry(name: str, until: str = END) -> str:
    return f"{name} until {until}"


def test_names_new_service_lists_both() -> None:
    assert names("chat") == ModelNames(("chat", "team/chat"))


def test_names_renamed_keeps_old_for_an_hour() -> None:
    found = names("big", "chat", "team/chat", answered={"big", "chat", "team/chat"})
    assert found.listed == ("big", "team/chat", "chat")
    assert found.former == (Former("chat", END),)
    assert (found.pending, found.next_s) == ("", 3601.0)


def test_names_unanswered_new_name_is_pending() -> None:
    found = names("big", "chat", "team/chat", answered={"chat", "team/chat"})
    assert found.listed == ("team/chat", "chat")
    assert found.pending == "big"


def test_names_listed_name_stays_when_a_gateway_lacks_it() -> None:
    found = names("chat", "chat", "team/chat", answered=set())
    assert (found.listed, found.pending) == (("chat", "team/chat"), "")


def test_names_end_is_not_put_off_by_later_rounds() -> None:
    later = AT + timedelta(minutes=30)
    found = names("big", "big", "team/chat", "chat", former=[entry("chat")], at=later)
    assert found.former == (Former("chat", END),)
    assert found.next_s == 1801.0


def test_names_old_name_is_dropped_after_its_end() -> None:
    found = names("big", "big", "team/chat", "chat", former=[entry("chat")], at=AT + OVER)
    assert found == ModelNames(("big", "team/chat"))


@pytest.mark.parametrize(
    ("answered", "complete"), [({"chat", "team/chat"}, True), ({"big", "chat", "team/chat"}, False)]
)
def test_names_old_name_outlasts_slow_gateways(answered: set[str], complete: bool) -> None:
    before, past = ("big", "team/chat", "chat"), [entry("chat")]
    found = names("big", *before, answered=answered, former=past, complete=complete, at=AT + 2 * OVER)
    assert found.former == (Former("chat", END),)
    assert found.next_s == 1.0


def test_names_claimed_old_name_is_given_up_at_once() -> None:
    found = names("big", "chat", "team/chat", chat="team/other")
    assert found == ModelNames(("big", "team/chat"))


def test_names_taken_name_leaves_the_long_one() -> None:
    assert names("chat", "chat", "team/chat", chat="team/older").listed == ("team/chat",)


def test_names_service_without_names_lists_none() -> None:
    raw = {**builders.service(), "status": {}}
    assert model_names(raw, "chat", set(), None, True, AT) == ModelNames(())


def test_names_name_that_returns_is_no_former_one() -> None:
    found = names("chat", "big", "team/chat", "chat", former=[entry("chat")])
    assert found.listed == ("chat", "team/chat", "big")
    assert [one.name for one in found.former] == ["big"]


@pytest.mark.parametrize("former", [None, "chat", [1], [{"name": "chat"}], [entry("chat", "soon")]])
def test_names_unreadable_end_begins_anew(former: Any) -> None:
    assert names("big", "chat", "team/chat", former=former).former == (Former("chat", END),)


def test_names_many_renames_keep_the_newest() -> None:
    past = [entry(f"n{n}", f"2026-01-01T12:{10 + n}:00Z") for n in range(MOST_FORMER + 1)]
    found = names("big", "big", "team/chat", *(one.partition(" until ")[0] for one in past), former=past)
    assert [one.name for one in found.former] == [f"n{n}" for n in range(MOST_FORMER, 0, -1)]
