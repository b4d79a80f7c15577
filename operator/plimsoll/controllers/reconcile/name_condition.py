"""The condition ModelNameRejected: what keeps a model name from a service. Pure."""

from __future__ import annotations

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.observe import NameState
from plimsoll.core.routing.model_names import NameClaim, Refusal

SHORT_NAMES_VALUE = "gateway.shortModelNames.namespaces"  # of the chart


def name_rejected(state: NameState | None, names: ModelNames) -> Condition | None:
    """The condition of a service without one of its names; None if it has all.

    A refused name comes before a name that another service holds.
    """
    if state is None:
        return None
    claim = state.claim
    if state.refusal is Refusal.RESTRICTED:
        rule = f"namespace {claim.namespace} may not claim short model names (chart value {SHORT_NAMES_VALUE})"
        advice = f"Set spec.model.name to {claim.qualified_name} to confirm this"
        return _rejected(ConditionReason.SHORT_NAMES_RESTRICTED, state, names, rule, rule, advice)
    advice = "Change spec.model.name to get a name of its own"
    if state.refusal is Refusal.RESERVED:
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
        return _taken(state, names, "spec.model.name", claim.model, state.holder, advice)
    if state.qualified_holder is not None:
        advice = f"Change spec.model.name of {state.qualified_holder.qualified_name} to free the name"
        return _taken(state, names, "NAMESPACE/NAME", claim.qualified_name, state.qualified_holder, advice)
    return None


def accepted_again(state: NameState | None) -> str:
    """The message of the Event about a name that is no longer rejected."""
    return "the service has its model name" + (f" {_quote(state.claim.model)}" if state is not None else "")


def why_taken(name: str, holder: NameClaim) -> str:
    """Why another service has a name: since when `holder` holds it, or what else makes it the owner."""
    service = holder.qualified_name
    if holder.granted == name:
        return f"service {service} holds the name since {_to_seconds(holder.since)}"
    if service == name:
        return f"the name is the NAMESPACE/NAME of service {service}"
    return f"service {service} claims the name too and was created first ({holder.created})"


def _taken(state: NameState, names: ModelNames, field: str, name: str, holder: NameClaim, advice: str) -> Condition:
    """The condition of a service without the name that `field` stands for."""
    service, quoted = (shorten(text, MAX_QUOTE_CHARS // 2) for text in (holder.qualified_name, name))
    if holder.granted == name:
        brief = f"service {service} holds model name {quoted} since {_to_seconds(holder.since)}"
    elif holder.qualified_name == name:
        brief = f"model name {quoted} is the NAMESPACE/NAME of service {service}"
    else:
        brief = f"service {service} claims model name {quoted} too and was created first"
    message, brief = f"{field} {name}: {why_taken(name, holder)}", f"{brief}; change spec.model.name"
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
