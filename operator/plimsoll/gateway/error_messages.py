"""Error messages for clients whose request the gateway rejects."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import (
    MAX_REQUEST_TOKENS,
    REASON_BY_OUTCOME,
    AdmissionDecision,
    AdmissionOutcome,
)
from plimsoll.core.admission.retry_advice import MAX_RESERVATION_S, NO_RETRY, UNKNOWN_TIME, RetryAdvice, advise_retry
from plimsoll.core.types import Task
from plimsoll.core.units import format_number
from plimsoll.gateway.api_routes import paths_of
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.request_context import RequestContext
from plimsoll.gateway.request_parser import MAX_N, MAX_SEQUENCES_PER_PROMPT
from plimsoll.gateway.service_catalog import ServiceEntry


@dataclass(frozen=True, slots=True)
class Availability:
    """When a service without a ready engine will have one.

    `next_ready_s` is the expected time from now in seconds, None if unknown. `deleted` means never: its namespace is
    being deleted. `stopped` means that it has 0 replicas and no request starts one. `problem` is the reason why its
    engines do not start, as its condition Ready names it, "" without one. `needs_certificate` means that ready engines
    require TLS, for which the gateway has no client certificate.
    """

    next_ready_s: float | None = None
    deleted: bool = False
    stopped: bool = False
    problem: str = ""
    needs_certificate: bool = False


_REASON_BY_OUTCOME = {outcome: RejectionReason(reason) for outcome, reason in REASON_BY_OUTCOME.items()}


def admission_rejection(
    ctx: RequestContext,
    decision: AdmissionDecision,
    ready_engines: int,
    cost_model: EngineCostModel | None,
    availability: Availability,
    now: float,
    target: ServiceEntry | None = None,
) -> Rejection:
    """Returns the rejection that a client receives for an admission decision other than Admitted.

    `ready_engines` counts the ready engines of the service. `cost_model` is given only if no engine can hold the
    request. `target` is the service that decided, None if it is gone.
    """
    if decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY and cost_model is not None:
        max_model_len = None if target is None else target.max_model_len
        context = min(cost_model.kv_tokens, max_model_len or cost_model.kv_tokens)
        return too_long(ctx.model, ctx.prompt.tokens, context, is_exact=_is_exact(ctx))
    retry = decision.retry or NO_RETRY
    if decision.outcome is AdmissionOutcome.SHED_STARTING:
        retry = _not_before(availability.next_ready_s, retry)
    if decision.outcome is AdmissionOutcome.SHED_DEADLINE:
        if not decision.is_demand:
            return deadline_too_short(ctx.model, str(ctx.deadline))
        waited = f"The request waited {now - ctx.arrived_s:.1f} s for model '{ctx.model}'"
        cause = "" if ready_engines else f" {without_engine(ctx.model, availability)}"
        return Rejection(RejectionReason.DEADLINE, f"{waited} and would miss its deadline of {ctx.deadline}.{cause}")
    if decision.outcome is AdmissionOutcome.SHED_QUOTA:
        tenants = {} if target is None or target.policy is None else target.policy.tenants
        return over_quota(ctx, tenants.get(ctx.tenant), retry)
    message = _message(ctx, decision.outcome, ready_engines, availability, now)
    if decision.outcome is AdmissionOutcome.SHED_ADAPTERS and target is not None and target.policy is not None:
        message = _adapters_busy(ctx.model, ready_engines, target.policy.max_loras)
    return Rejection(_REASON_BY_OUTCOME[decision.outcome], message, retry=retry)


def _not_before(next_ready_s: float | None, retry: RetryAdvice) -> RetryAdvice:
    """Returns the advice, or a later one: no retry succeeds before an engine is ready, whatever was reserved."""
    if retry.eta_s is not None and (next_ready_s is None or next_ready_s <= retry.eta_s):
        return retry
    return advise_retry(next_ready_s, is_time_known=True, sdk_limit_s=MAX_RESERVATION_S if retry.retryable else 0.0)


def _is_exact(ctx: RequestContext) -> bool:
    """Whether the prompt is one list of token IDs; several have the mean of their lengths."""
    return not ctx.is_estimated and ctx.prompt.sequences == ctx.n and ctx.prompt.tokens < MAX_REQUEST_TOKENS


def too_long(model: str, tokens: int, context: int, *, is_exact: bool = False) -> Rejection:
    """Returns the rejection of a prompt that no engine can hold.

    `tokens` is the prompt length, estimated unless `is_exact`. `context` is an upper bound on the tokens of a sequence.
    LiteLLM detects this error by "This model's maximum context length is", LangChain by "prompt is too long", others by
    OpenAI's code.
    """
    length = f"{tokens} token IDs" if is_exact else f"about {tokens} tokens (estimated from its size in bytes)"
    message = (
        f"The prompt is too long for model '{model}': it has {length}."
        f" This model's maximum context length is at most {context} tokens. Shorten the prompt."
    )
    return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, code="context_length_exceeded")


def deadline_too_short(model: str, deadline: str) -> Rejection:
    """Returns the rejection of a request that even an idle engine would serve too late."""
    message = (
        f"The deadline of the request is {deadline}, but even an idle engine of model '{model}' is expected to need"
        " longer. Allow more time, shorten the prompt or ask for fewer tokens."
    )
    return Rejection(RejectionReason.DEADLINE_TOO_SHORT, message)


def over_quota(ctx: RequestContext, quota: TenantPolicy | None, retry: RetryAdvice) -> Rejection:
    """Returns the rejection of a request beyond the quota of its tenant. `quota` is None if it has just changed."""
    limits = []
    if quota is not None and quota.requests_per_s is not None:
        limits.append(f"{format_number(quota.requests_per_s)} requests per second")
    if quota is not None and quota.tokens_per_min is not None:
        limits.append(f"{format_number(quota.tokens_per_min)} tokens per minute")
    of = f" of {' and '.join(limits)}" if limits else ""
    message = (
        f"Tenant '{ctx.tenant}' has exceeded its quota{of} for model '{ctx.model}'. This request has about"
        f" {ctx.prompt.tokens} prompt tokens. Send fewer requests or shorter prompts, or ask for a higher quota."
    )
    return Rejection(RejectionReason.QUOTA_EXCEEDED, message, retry=retry)


def too_many(model: str, sequences: int, n: int, limit: int, field: str = "prompt") -> Rejection:
    """Returns the rejection of a request that has more sequences than any engine accepts.

    `sequences` is `n` times the number of prompts. `field` holds the prompts.
    """
    items = "prompts" if field == "prompt" else "items"
    prompts = sequences // n
    if prompts == 1:
        problem, action = f"The field 'n' is {n}", f"Lower 'n' to at most {limit}."
    elif n == 1:
        problem, action = f"The field '{field}' has {prompts} {items}", f"Send at most {limit} {items} in one request."
    else:
        problem = f"The field 'n' is {n} and the field 'prompt' has {prompts} prompts, {sequences} sequences in total"
        action = "Lower 'n' or send fewer prompts in one request."
    message = f"{problem}, but an engine of model '{model}' accepts at most {limit} sequences per request. {action}"
    return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, param=field if n == 1 else "n")


def too_many_completions(model: str, n: int, limit: int) -> Rejection:
    """Returns the rejection of an `n` above vLLM's own limit. `limit` is the lowest that binds."""
    value, bound = n if n < MAX_N else "10^12 or more", min(limit, MAX_SEQUENCES_PER_PROMPT)
    message = (
        f"The field 'n' is {value}, but an engine of model '{model[:200]}' accepts at most {bound} sequences per"
        f" request. Lower 'n' to at most {bound}."
    )
    return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, param="n")


def no_endpoint(model: str, ready: bool, availability: Availability) -> Rejection:
    """Returns the rejection of a request for which the picker finds no engine.

    `ready` is true if engines are ready but Envoy cannot reach them.
    """
    model = model[:200]
    if ready:
        message = f"The gateway cannot reach any ready engine of model '{model}'."
        return Rejection(RejectionReason.NO_ENDPOINT, message, retry=UNKNOWN_TIME)
    if availability.deleted:
        return Rejection(RejectionReason.NO_ENDPOINT, _deleted(model))
    if availability.stopped:
        return Rejection(RejectionReason.NO_ENDPOINT, _stopped(model))
    if availability.needs_certificate:
        return Rejection(RejectionReason.NO_ENDPOINT, _starting(model, availability), retry=UNKNOWN_TIME)
    retry = advise_retry(availability.next_ready_s, is_time_known=True)
    return Rejection(RejectionReason.MODEL_STARTING, _starting(model, availability), retry=retry)


def prefill_unavailable(model: str) -> Rejection:
    """Returns the rejection of a prompt that only a prefill engine may compute, while none can take it."""
    message = (
        f"No prefill engine of model '{model[:200]}' can take the prompt, and spec.whenPrefillUnavailable is Reject."
    )
    return Rejection(RejectionReason.PREFILL_UNAVAILABLE, message, retry=UNKNOWN_TIME)


def no_engine(model: str, task: Task) -> Rejection:
    """Returns the rejection of a request that starts no engine, while none runs or starts."""
    path = next(iter(paths_of(task)))
    message = f"No engine of model '{model[:200]}' is ready. A request to {path} starts one, unless one starts already."
    return Rejection(RejectionReason.NO_ENDPOINT, message)


def without_engine(model: str, availability: Availability) -> str:
    """Returns why a model has no ready engine, and when it is expected to have one."""
    if availability.deleted:
        return _deleted(model)
    return _stopped(model) if availability.stopped else _starting(model, availability)


def _starting(model: str, availability: Availability) -> str:
    next_ready_s, problem = availability.next_ready_s, availability.problem
    if availability.needs_certificate:
        return (
            f"The engines of model '{model}' require TLS, and this gateway has no client certificate for them"
            " (internalTls.secretName)."
        )
    expected = "" if next_ready_s is None else f" The next one is expected in {math.ceil(next_ready_s)} s."
    if problem:
        return f"Model '{model}' has no ready engine: its InferenceService reports {problem}.{expected}"
    return f"Model '{model}' is starting: none of its engines is ready yet.{expected}"


def _stopped(model: str) -> str:
    return f"Model '{model}' has no engine and none is starting. Check the status of its InferenceService."


def _adapters_busy(model: str, ready_engines: int, max_loras: int) -> str:
    engines = "the one ready engine" if ready_engines == 1 else f"each of the {ready_engines} ready engines"
    return (
        f"Adapter '{model}' waits for its turn: {engines} runs requests of at most {max_loras} adapters at once"
        " (engine.lora.maxLoras), and others have them."
    )


def _deleted(model: str) -> str:
    return f"Model '{model}' is being deleted with its namespace, and none of its engines is ready. Use another model."


def model_not_found(model: str) -> Rejection:
    """Returns the rejection of a request whose model name belongs to no service."""
    message = f"The model '{model[:200]}' does not exist. GET /v1/models lists the available models."
    return Rejection(RejectionReason.MODEL_NOT_FOUND, message, param="model")


def route_not_served(model: str, path: str, task: Task) -> Rejection:
    """Returns the rejection of a request on a route that the model's engines do not serve."""
    served = ", ".join(paths_of(task))
    message = (
        f"Model '{model[:200]}' does not serve {path}. Its task is '{task}' (spec.model.task); it serves {served}."
    )
    return Rejection(RejectionReason.ROUTE_NOT_SERVED, message)


def too_many_unbooked(model: str, path: str, limit: GatewayLimit, count: int) -> Rejection:
    """Returns the rejection of a request that takes no capacity while `count` others are at each engine."""
    who = " of this client" if limit is GatewayLimit.CLIENT_TOKEN_REQUESTS else ""
    message = (
        f"The ready engines of model '{model[:200]}' have {count} requests like {path}{who} each already, the limit."
        " Send fewer at once."
    )
    return Rejection(RejectionReason.GATEWAY_FULL, message, retry=advise_retry(1.0), limit=limit)


def too_many_streams(limit: GatewayLimit, count: int, model: str) -> Rejection:
    """Returns the rejection of a progress stream while `count` others of this client, model or gateway are open."""
    if limit is GatewayLimit.PROGRESS_STREAMS:
        message = f"This gateway instance has {count} event streams of models open already, its limit."
    else:
        who = "This client" if limit is GatewayLimit.CLIENT_PROGRESS_STREAMS else f"Model '{model[:200]}'"
        message = (
            f"{who} has {count} event streams of models open at this gateway instance already, the limit. Close one."
        )
    return Rejection(RejectionReason.GATEWAY_FULL, message, retry=advise_retry(10.0), limit=limit)


def _message(
    ctx: RequestContext, outcome: AdmissionOutcome, ready_engines: int, availability: Availability, now: float
) -> str:
    model, waited_s = ctx.model, now - ctx.arrived_s
    waited = f"The request waited {waited_s:.0f} s. " if waited_s >= 1.0 else ""
    if outcome is AdmissionOutcome.SHED_SATURATED:
        load = "its one ready engine" if ready_engines == 1 else f"its {ready_engines} ready engines"
        return f"{waited}Model '{model}' is at capacity: {load} cannot serve another request within the SLO."
    if outcome is AdmissionOutcome.SHED_STARTING:
        return waited + _starting(model, availability)
    return _deleted(model) if availability.deleted else _stopped(model)
