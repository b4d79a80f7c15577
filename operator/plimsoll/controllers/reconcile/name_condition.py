"""The condition ModelNameRejected: what keeps a model name from a service. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.observe import NameState
from plimsoll.core.routing.model_names import NameClaim, NameRejection

SHORT_NAMES_VALUE = "gateway.shortModelNames.namespaces"  # of the chart


def name_rejected(state: NameState | None, names: ModelNames) -> Condition | None:
    """The condition of a service without one of its names; None if it has all.

    A rejected name comes before a name that another service holds.
    """
    if state is None:
        return None
    claim = state.claim
    if state.rejection is NameRejection.RESTRICTED:
        rule = f"namespace {claim.namespace} may not claim short model names (chart value {SHORT_NAMES_VALUE})"
        advice = f"Set spec.model.name to {claim.qualified_name} to confirm this"
        return _rejected(ConditionReason.SHORT_NAMES_RESTRICTED, state, names, rule, rule, advice)
    advice = "Change spec.model.name to get a name of its own"
    if state.rejection is NameRejection.RESERVED:
        owner = claim.model.partition("/")[0]
        rule = f"names that begin with {owner}/ belong to namespace {owner}, which has or had services"
        return _rejected(
            ConditionReason.MODEL_NAME_RESERVED,
            state,
            names,
            f"spec.model.name {claim.model}: {rule}",
            f"the model name belongs to namespace {_quote(owner)}; change spec.model.name",
            advice,
        )
    if state.holder is not None:
        return _name_rejected_condition(state, names, "spec.model.name", claim.model, state.holder, advice)
    if state.qualified_holder is not None:
        advice = f"Change spec.model.name of {state.qualified_holder.qualified_name} to free the name"
        return _name_rejected_condition(
            state, names, "NAMESPACE/NAME", claim.qualified_name, state.qualified_holder, advice
        )
    return None


def adapter_name_rejected(states: Sequence[NameState]) -> Condition | None:
    """The condition of a service with adapters that do not have their names; None if all have theirs."""
    lacking = [state for state in states if state.rejection is not None or state.holder is not None]
    if not lacking:
        return None
    state, others = lacking[0], len(lacking) - 1
    claim = state.claim
    reason, problem = ConditionReason.MODEL_NAME_TAKEN, ""
    if state.rejection is NameRejection.RESTRICTED:
        reason = ConditionReason.SHORT_NAMES_RESTRICTED
        problem = f"namespace {claim.namespace} may not claim short model names (chart value {SHORT_NAMES_VALUE})"
    elif state.rejection is NameRejection.RESERVED:
        reason = ConditionReason.MODEL_NAME_RESERVED
        owner = claim.model.partition("/")[0]
        problem = f"names that begin with {owner}/ belong to namespace {owner}, which has or had services"
    elif state.holder is not None:
        problem = describe_conflict(claim.model, state.holder)
    more = (
        f" {others} more {'adapter lacks its name' if others == 1 else 'adapters lack their names'}." if others else ""
    )
    reachable = f"clients reach this adapter as {claim.qualified_name}"
    message = f"spec.adapters {claim.model}: {problem}; {reachable}. Change its name to get a name of its own.{more}"
    brief = f"adapter {shorten(claim.model, 60)} lacks its name, change it: {shorten(problem, 140)}"
    return Condition(ConditionType.MODEL_NAME_REJECTED, True, reason, message, brief)


def accepted_again(state: NameState | None) -> str:
    """The message of the Event about a name that is no longer rejected."""
    name = "" if state is None else f" {_quote(state.claim.model)}"
    return f"the service has its model name{name}, and each of its adapters its own"


def describe_conflict(name: str, holder: NameClaim) -> str:
    """Why another service has a name: since when `holder` holds it, or what else makes it the owner."""
    if holder.granted == name:
        return f"{holder.holder_text} holds the name since {_to_seconds(holder.since)}"
    if holder.qualified_name == name:
        form = "NAMESPACE/SERVICE/NAME" if holder.adapter else "NAMESPACE/NAME"
        return f"the name is the {form} of {holder.holder_text}"
    return f"{holder.holder_text} claims the name too and was created first ({holder.created})"


def _name_rejected_condition(
    state: NameState, names: ModelNames, field: str, name: str, holder: NameClaim, advice: str
) -> Condition:
    """The condition of a service without the name that `field` stands for."""
    half = MAX_QUOTE_CHARS // 2
    service, quoted = shorten("/".join(holder.service), half), shorten(name, half)
    who = f"adapter {shorten(holder.adapter, 40)} of service {service}" if holder.adapter else f"service {service}"
    if holder.granted == name:
        brief = f"{who} holds model name {quoted} since {_to_seconds(holder.since)}"
    elif holder.qualified_name == name:
        brief = f"model name {quoted} is the NAMESPACE/NAME of {who}"
    else:
        brief = f"{who} claims model name {quoted} too and was created first"
    message, brief = f"{field} {name}: {describe_conflict(name, holder)}", f"{brief}; change spec.model.name"
    return _rejected(ConditionReason.MODEL_NAME_TAKEN, state, names, message, brief, advice)


def _rejected(
    reason: ConditionReason, state: NameState, names: ModelNames, problem: str, brief: str, advice: str
) -> Condition:
    reachable = f"clients reach this service as {', '.join(names.listed)}" if names.listed else "it has no other name"
    former = "".join(f"; {one.name} is accepted until {one.until}" for one in names.former)
    message = f"{problem}; {reachable}. {advice}{former}"
    return Condition(ConditionType.MODEL_NAME_REJECTED, True, reason, message, brief)


def _to_seconds(time: str) -> str:
    """A time of a record without its fraction of a second."""
    return f"{time.partition('.')[0]}Z" if "." in time else time


def _quote(text: str) -> str:
    return shorten(text, MAX_QUOTE_CHARS)
