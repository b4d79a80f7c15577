"""Conditions of a model name that another service holds."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.api.conditions import (
    Condition,
    ConditionReason,
    ConditionType,
)
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.model_names import Former, ModelNames
from plimsoll.controllers.reconcile.observe import NO_RULES, name_state
from plimsoll.core.routing.model_names import NameClaim, NameRules
from tests.controllers.status_inputs import by_type, status_inputs

CHAT = NameClaim("team", "chat", "chat", "2026-01-01T00:00:00Z")
OTHER = NameClaim("other", "chat", "chat", "2026-02-01T00:00:00Z", "chat", "2026-03-01T00:00:00.123456Z")


def names_found(claim: NameClaim, *others: NameClaim, rules: NameRules = NO_RULES) -> dict[ConditionType, Condition]:
    """The conditions of a service among others."""
    state = name_state(claim, [claim, *others], rules)
    names = ModelNames(tuple(sorted(state.owned)))
    return by_type(service_status.build_conditions(status_inputs(name_state=state, model_names=names)))


def name_condition(claim: NameClaim, *others: NameClaim, rules: NameRules = NO_RULES) -> Condition:
    """ModelNameRejected of a service among others."""
    return names_found(claim, *others, rules=rules)[ConditionType.MODEL_NAME_REJECTED]


def test_conditions_model_name_loser_names_holder_and_time() -> None:
    condition = name_condition(CHAT, OTHER)
    assert (condition.holds, condition.reason) == (True, ConditionReason.MODEL_NAME_TAKEN)
    assert condition.message == (
        "spec.model.name chat: service other/chat holds the name since 2026-03-01T00:00:00Z; clients reach this service"
        " as team/chat. Change spec.model.name to get a name of its own"
    )
    assert "other/chat" in condition.event_message
    assert "2026-03-01T00:00:00Z" in condition.event_message


def test_conditions_qualified_name_holder_is_named() -> None:
    openai = NameClaim("openai", "gpt", "gpt", "", "gpt", "2026-04-01T00:00:00.000000Z")
    first = NameClaim("team", "x", "openai/gpt", "", "openai/gpt", "2026-03-01T00:00:00.000000Z")
    condition = name_condition(openai, first)
    assert (condition.holds, condition.reason) == (True, ConditionReason.MODEL_NAME_TAKEN)
    assert "NAMESPACE/NAME openai/gpt: service team/x holds the name since 2026-03-01T00:00:00Z" in condition.message
    assert "clients reach this service as gpt." in condition.message
    assert ConditionType.MODEL_NAME_REJECTED not in names_found(first, openai)


def test_conditions_qualified_name_of_neighbour_is_named() -> None:
    condition = name_condition(NameClaim("team", "x", "team/chat", ""), CHAT)
    assert (
        "team/chat: the name is the NAMESPACE/NAME of service team/chat; clients reach this service"
        in condition.message
    )


def test_conditions_unrecorded_rival_is_named() -> None:
    other_writer = NameClaim("a", "a", "chat", "2025-01-01T00:00:00Z")
    assert (
        "service a/a claims the name too and was created first (2025-01-01"
        in name_condition(CHAT, other_writer).message
    )


def test_conditions_reserved_name_names_the_namespace() -> None:
    rules = NameRules(service_namespaces=frozenset({"bank"}))
    condition = name_condition(NameClaim("team", "chat", "bank/chat", ""), rules=rules)
    assert (condition.holds, condition.reason) == (True, ConditionReason.MODEL_NAME_RESERVED)
    assert condition.message.startswith(
        "spec.model.name bank/chat: names that begin with bank/ belong to namespace bank, which has or had services;"
        " clients reach this service as team/chat."
    )


def test_conditions_restricted_namespace_names_the_value() -> None:
    rules = NameRules(short_name_namespaces=frozenset({"bank"}))
    condition = name_condition(replace(CHAT, published=("chat", "old")), rules=rules)
    assert (condition.holds, condition.reason) == (True, ConditionReason.SHORT_NAMES_RESTRICTED)
    assert "gateway.shortModelNames.namespaces" in condition.message
    assert "clients reach this service as team/chat. Set spec.model.name to team/chat" in condition.message
    qualified = names_found(replace(CHAT, model="team/chat"), rules=rules)
    assert ConditionType.MODEL_NAME_REJECTED not in qualified


def test_pending_name_is_reconciling() -> None:
    former = (Former("old", "2026-01-01T13:00:00Z"),)
    changing = status_inputs(model_names=ModelNames(("team/chat", "old"), former, "new"))
    found = by_type(service_status.build_conditions(changing))
    assert found[ConditionType.RECONCILING].message == "model name new is added when every gateway accepts it"
    assert ConditionType.MODEL_NAME_REJECTED not in found
