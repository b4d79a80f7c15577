"""Error messages for clients whose request the gateway rejects."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.request import NO_RETRY, AdmissionDecision, AdmissionOutcome
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.request_context import RequestContext


@dataclass(frozen=True, slots=True)
class Availability:
    """When a service without a ready engine will have one.

    `next_ready_s` is the expected time from now in seconds, None if unknown. `deleted` means never: its namespace is
    being deleted.
    """

    next_ready_s: float | None = None
    deleted: bool = False


_REASON_BY_OUTCOME = {
    AdmissionOutcome.SHED_SATURATED: RejectionReason.OVERLOADED,
    AdmissionOutcome.SHED_STARTING: RejectionReason.MODEL_STARTING,
    AdmissionOutcome.SHED_QUOTA: RejectionReason.QUOTA_EXCEEDED,
    AdmissionOutcome.SHED_DEADLINE: RejectionReason.DEADLINE,
    AdmissionOutcome.SHED_NO_CAPACITY: RejectionReason.NO_ENDPOINT,
}


def admission_rejection(
    ctx: RequestContext,
    decision: AdmissionDecision,
    ready_engines: int,
    cost_model: EngineCostModel | None,
    availability: Availability,
    now: float,
    max_model_len: int | None = None,
) -> Rejection:
    """Returns the rejection that a client receives for an admission decision other than Admitted.

    `ready_engines` counts the ready engines of the service. `cost_model` is given only if no engine can hold the
    request. `max_model_len` is the longest sequence in tokens by the engines' arguments, None if unknown.
    """
    if decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY and cost_model is not None:
        return too_long(ctx.model, ctx.prompt.tokens, min(cost_model.kv_tokens, max_model_len or cost_model.kv_tokens))
    retry = decision.retry or NO_RETRY
    message, eta_s = _message(ctx, decision.outcome, ready_engines, availability, now), retry.eta_s
    if decision.outcome is AdmissionOutcome.SHED_STARTING and eta_s is None:
        eta_s = availability.next_ready_s
    return Rejection(_REASON_BY_OUTCOME[decision.outcome], message, eta_seconds=eta_s, retryable=retry.retryable)


def too_long(model: str, tokens: int, context: int) -> Rejection:
    """Returns the rejection of a prompt that no engine can hold.

    `tokens` is the estimated prompt length. `context` is an upper bound on the tokens of one sequence.
    LiteLLM detects this error by "This model's maximum context length is", LangChain by "prompt is too long".
    """
    message = (
        f"The prompt is too long for model '{model}': it has about {tokens} tokens (estimated from its size in bytes)."
        f" This model's maximum context length is at most {context} tokens. Shorten the prompt."
    )
    return Rejection(RejectionReason.REQUEST_TOO_LARGE, message)


def too_many(model: str, sequences: int, n: int, limit: int) -> Rejection:
    """Returns the rejection of a request that has more sequences than any engine accepts.

    `sequences` is `n` times the number of prompts.
    """
    prompts = sequences // n
    if prompts == 1:
        problem, action = f"The field 'n' is {n}", f"Lower 'n' to at most {limit}."
    elif n == 1:
        problem, action = f"The field 'prompt' has {prompts} prompts", f"Send at most {limit} prompts in one request."
    else:
        problem = f"The field 'n' is {n} and the field 'prompt' has {prompts} prompts, {sequences} sequences in total"
        action = "Lower 'n' or send fewer prompts in one request."
    message = f"{problem}, but an engine of model '{model}' accepts at most {limit} sequences per request. {action}"
    return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, param="prompt" if n == 1 else "n")


def no_endpoint(model: str, ready: bool, availability: Availability) -> Rejection:
    """Returns the rejection of a request for which the picker finds no engine.

    `ready` is true if engines are ready but Envoy cannot reach them.
    """
    model = model[:200]
    if ready:
        return Rejection(RejectionReason.NO_ENDPOINT, f"The gateway cannot reach any ready engine of model '{model}'.")
    if availability.deleted:
        return Rejection(RejectionReason.NO_ENDPOINT, _deleted(model), retryable=False)
    eta_s = availability.next_ready_s
    return Rejection(RejectionReason.MODEL_STARTING, _starting(model, eta_s), eta_seconds=eta_s)


def _starting(model: str, next_ready_s: float | None) -> str:
    expected = "" if next_ready_s is None else f" The next one is expected in {math.ceil(next_ready_s)} s."
    return f"Model '{model}' is starting: none of its engines is ready yet.{expected}"


def _deleted(model: str) -> str:
    return f"Model '{model}' is being deleted with its namespace, and none of its engines is ready."


def model_not_found(model: str) -> Rejection:
    """Returns the rejection of a request whose model name belongs to no service."""
    message = f"The model '{model[:200]}' does not exist. GET /v1/models lists the available models."
    return Rejection(RejectionReason.MODEL_NOT_FOUND, message, param="model")


def _message(
    ctx: RequestContext, outcome: AdmissionOutcome, ready_engines: int, availability: Availability, now: float
) -> str:
    model, waited_s = ctx.model, now - ctx.arrived_s
    if outcome is AdmissionOutcome.SHED_SATURATED:
        load = "its one ready engine" if ready_engines == 1 else f"its {ready_engines} ready engines"
        return f"Model '{model}' is at capacity: {load} cannot serve another request within the SLO."
    if outcome is AdmissionOutcome.SHED_QUOTA:
        return f"Tenant '{ctx.tenant}' has exceeded its quota for model '{model}'."
    if outcome is AdmissionOutcome.SHED_DEADLINE:
        return f"The request waited {waited_s:.0f} s for model '{model}', its maximum queue time. Send it again later."
    if outcome is AdmissionOutcome.SHED_STARTING:
        waited = f"The request waited {waited_s:.0f} s. " if waited_s >= 1.0 else ""
        return waited + _starting(model, availability.next_ready_s)
    if availability.deleted:
        return _deleted(model)
    return f"Model '{model}' has no engine and none is starting. Check the status of its InferenceService."
