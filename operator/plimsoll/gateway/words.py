"""What a client is told about a decision against its request, in plain words."""

from __future__ import annotations

from plimsoll.core.admission import Decision, Limits, Outcome
from plimsoll.core.admission.outcome import NOT_AGAIN
from plimsoll.gateway.replies import Reason, Refusal
from plimsoll.gateway.visit import Visit

_REASON = {
    Outcome.SHED_SATURATED: Reason.OVERLOADED,
    Outcome.SHED_STARTING: Reason.MODEL_STARTING,
    Outcome.SHED_QUOTA: Reason.QUOTA_EXCEEDED,
    Outcome.SHED_DEADLINE: Reason.DEADLINE,
    Outcome.SHED_NO_CAPACITY: Reason.NO_ENDPOINT,
}


def refusal(visit: Visit, decision: Decision, ready: int, limits: Limits | None, now: float) -> Refusal:
    """ready: engines of its service that are. limits: of one of them, where it is too small for the prompt."""
    if decision.outcome is Outcome.SHED_NO_CAPACITY and limits is not None:
        return too_long(visit.model, visit.prompt.tokens, limits.kv_tokens)
    told = decision.told or NOT_AGAIN
    words = _words(visit, decision.outcome, ready, now)
    return Refusal(_REASON[decision.outcome], words, eta_seconds=told.eta_s, again=told.again)


def too_long(model: str, tokens: int, context: int) -> Refusal:
    """A prompt that no engine can hold; tokens: estimated, context: at most what one sequence may have.

    LiteLLM knows it by "This model's maximum context length is", LangChain by "prompt is too long".
    """
    message = (
        f"The prompt is too long for the model '{model}': it has about {tokens} tokens (estimated from its bytes)."
        f" This model's maximum context length is at most {context} tokens. Shorten the prompt."
    )
    return Refusal(Reason.REQUEST_TOO_LARGE, message)


def too_many(model: str, sequences: int, n: int, limit: int) -> Refusal:
    """More sequences than any engine accepts from one request. sequences: `n` times prompts."""
    prompts = sequences // n
    if prompts == 1:
        asked, todo = f"The field 'n' is {n}", f"Lower 'n' to at most {limit}."
    elif n == 1:
        asked, todo = f"The field 'prompt' has {prompts} prompts", f"Send at most {limit} prompts in one request."
    else:
        asked = f"The field 'n' is {n} and 'prompt' has {prompts} prompts, {sequences} sequences in all"
        todo = "Lower 'n', or send fewer prompts in one request."
    message = f"{asked}: an engine of the model '{model}' accepts at most {limit} sequences in one request. {todo}"
    return Refusal(Reason.REQUEST_TOO_LARGE, message, param="prompt" if n == 1 else "n")


def nobody(model: str, reachable: bool) -> Refusal:
    """No engine can be picked. reachable: there are ready ones, which Envoy does not reach."""
    model = model[:200]
    if reachable:
        return Refusal(Reason.NO_ENDPOINT, f"No engine of the model '{model}' can be reached right now.")
    return Refusal(Reason.MODEL_STARTING, f"The model '{model}' is starting: none of its engines is ready yet.")


def unknown(model: str) -> Refusal:
    """No service has this name."""
    message = f"The model '{model[:200]}' does not exist. GET /v1/models lists those that do."
    return Refusal(Reason.MODEL_NOT_FOUND, message, param="model")


def _words(visit: Visit, outcome: Outcome, ready: int, now: float) -> str:
    model = visit.model
    if outcome is Outcome.SHED_SATURATED:
        full = "its one ready engine is full" if ready == 1 else f"its {ready} ready engines are full"
        return f"The model '{model}' is at its limit: {full}."
    if outcome is Outcome.SHED_QUOTA:
        return f"The tenant '{visit.tenant}' has used what it may of the model '{model}' for now."
    if outcome is Outcome.SHED_DEADLINE:
        waited_s = now - visit.arrived_s
        return f"The request has waited {waited_s:.0f} s for the model '{model}', and may wait no longer."
    if outcome is Outcome.SHED_STARTING:
        return nobody(model, False).message
    return f"The model '{model}' has no engine, and none is being started."
