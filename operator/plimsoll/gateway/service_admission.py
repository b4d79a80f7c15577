"""Admission of one service at this gateway: adapts gateway requests to the `AdmissionDriver`.

Problem: the driver takes a policy that never changes its classes, and tokens. At a gateway, classes change, prompts
are bytes, responses are records of Envoy, and anybody can name a tenant.

Idea: the manager keeps the forwarded requests outside the driver, so that a new one for other classes can register
them. Tokens are estimated from bytes, with care near the limit. A bounded number of tenants is tracked by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from plimsoll.core.admission.admission_driver import AdmissionDriver
from plimsoll.core.admission.fairness import IDLE_TENANT_TTL_S
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import AdmissionDecision, AdmissionRequest
from plimsoll.core.admission.token_estimator import TokenEstimator
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.gateway.admission_policy import AdmissionPolicy
from plimsoll.gateway.envoy.access_log import AccessRecord, RequestOutcome
from plimsoll.gateway.request_context import RequestContext

MAX_TENANTS: Final = 1000  # tracked by name; all others share one account
# Prompt tokens are estimated from bytes. An estimate near the limit must not reject a prompt as too long.
CERTAIN_KV_SHARE: Final = 0.75
PROMPT_OVERESTIMATE: Final = 4


class ForwardedRequest(msgspec.Struct, eq=False):
    """A request at an engine. `queued_s` is the time from its arrival to its admission, `path` that of its route."""

    request: AdmissionRequest
    target_service: str
    address: str
    queued_s: float
    stream: bool
    path: str
    registered_late: bool = False  # admitted before this controller existed: its TTFT updates no estimate
    has_first_token: bool = False  # known while its response runs
    output_tokens: int | None = None  # of its complete stream, None if unknown
    work_s: float = 0.0  # engine time of its complete response, 0 if unknown


class ServiceAdmission(AdmissionDriver[RequestContext, ForwardedRequest]):
    """Admission of one service. Raises ValueError for a policy without a cost model."""

    def __init__(
        self,
        key: str,
        policy: AdmissionPolicy,
        gateway: str,
        token_estimators: Mapping[str, TokenEstimator],
        now: float,
        gateways: Callable[[str], int | None] = lambda key: None,
    ) -> None:
        """Create the admission of the service.

        `token_estimators` are those of each path, because each API has other bytes around a token. `gateways` returns
        among how many gateways the slots of a service are divided: 1 at its owner, None for the published shares.
        """
        super().__init__(
            gateway,
            policy.classes,
            policy.tenants,
            _limits_of(policy),
            policy.max_queued,
            now,
            queued_request=self._to_admission_request,
            sent_request=lambda forwarded: self._reclassify(forwarded.request),
            gateways=lambda: gateways(key),
        )
        self.key = key
        self.policy = policy
        self._token_estimators = token_estimators
        self._tenant_seen_s: dict[str, float] = {}  # last request by tenant

    def is_compatible(self, policy: AdmissionPolicy) -> bool:
        """Whether the controller can keep running with this policy. Otherwise create a new one."""
        return policy.classes == self.policy.classes

    def update_policy(self, policy: AdmissionPolicy, now: float, clock_offset_s: float) -> None:
        """Apply a policy that the operator or the user changed."""
        if policy is self.policy:
            return
        previous, self.policy, self.max_queued = self.policy, policy, policy.max_queued
        if policy.tenants != previous.tenants:
            self.controller.set_tenants(policy.tenants)
        self.update_limits(_limits_of(policy), now, clock_offset_s)

    def set_adapters(self, not_loaded_on: Mapping[str, Collection[str]]) -> None:
        """Set the addresses of engines that have not loaded an adapter, by adapter, as far as that is known."""
        self.controller.pool.adapters.configure(self.policy.max_loras, not_loaded_on)

    def reject(self, ctx: RequestContext, now: float) -> AdmissionDecision:
        """Reject the request without a fallback, for a reason unknown to the controller."""
        return self.controller.reject(replace(self._to_admission_request(ctx), has_fallback=False), now)

    def record_first_token(
        self, request_id: str, forwarded: ForwardedRequest, record: AccessRecord, now: float
    ) -> None:
        """Record the first token of a running response."""
        self.on_first_token(request_id, forwarded, _ttft_s(forwarded, record), now)

    def complete(self, request_id: str, forwarded: ForwardedRequest, record: AccessRecord | None, now: float) -> None:
        """Record the end of a request at an engine. `record` is None if it is lost."""
        ttft_s = output_tokens = None
        if record is not None and record.ttft_s is not None:
            output_tokens = self._output_tokens(forwarded, record)
            ttft_s = _ttft_s(forwarded, record)
        forwarded.output_tokens = output_tokens
        forwarded.work_s = self._work_s(request_id, forwarded, output_tokens)
        self.on_end(request_id, forwarded, output_tokens, ttft_s, now)

    def _work_s(self, request_id: str, forwarded: ForwardedRequest, output_tokens: int | None) -> float:
        """Returns the engine time of a request that ends, with its prompt's cached part and its real output."""
        replica = self.controller.pool.replicas.get(forwarded.address)
        running = None if replica is None else replica.running.get(request_id)
        if running is None:
            return 0.0
        cost = running.cost
        output = 1.0 if output_tokens is None else output_tokens / cost.output_tokens
        return cost.stall_s + output * max(0.0, cost.work_s - cost.stall_s)

    def tick(self, now: float, clock_offset_s: float) -> None:
        """Update the controller. Call this once a second."""
        super().tick(now, clock_offset_s)
        for name in [name for name, seen_s in self._tenant_seen_s.items() if now - seen_s > IDLE_TENANT_TTL_S]:
            del self._tenant_seen_s[name]

    def _to_admission_request(self, ctx: RequestContext) -> AdmissionRequest:
        """Returns the controller's view of a request, cached in the context."""
        if ctx.admission_request is None:
            prompt, request_class = ctx.prompt, self.policy.class_of(ctx.request_class).name
            ctx.admission_request = AdmissionRequest(  # positional: keyword arguments cost 1 us
                ctx.request_id,
                request_class,
                self._tracked_tenant(ctx.tenant, ctx.arrived_s),
                ctx.arrived_s,
                self._prompt_tokens(prompt, is_estimated=ctx.is_estimated),
                0,
                ctx.max_tokens,
                prompt.sequences,
                ctx.deadline.first_token_s if ctx.deadline.first_token_s < math.inf else None,
                ctx.body_digest,
                ctx.idempotency_key,
                ctx.fallback is not None,
                ctx.block_hashes,
                ctx.is_retry,
                ctx.deadline.complete_s if ctx.deadline.complete_s < math.inf else None,
                "" if ctx.adapter is None else ctx.adapter.name,
                ctx.stream,
            )
        return ctx.admission_request

    def _output_tokens(self, forwarded: ForwardedRequest, record: AccessRecord) -> int | None:
        if not forwarded.stream or record.outcome is not RequestOutcome.SUCCEEDED:
            return None
        return self._token_estimators[forwarded.path].estimate(
            record.sent_bytes or 0, forwarded.request.sequences, self.cost_model.output_mean
        )

    def _tracked_tenant(self, name: str, now: float) -> str:
        if (
            name not in self._tenant_seen_s
            and name not in self.policy.tenants
            and len(self._tenant_seen_s) >= MAX_TENANTS
        ):
            return ""
        self._tenant_seen_s[name] = now
        return name

    def _prompt_tokens(self, prompt: Prompt, *, is_estimated: bool) -> int:
        tokens = prompt.tokens
        if not is_estimated and prompt.sequences == 1:  # several prompts of token IDs count by their mean
            return tokens
        certain_tokens = int(CERTAIN_KV_SHARE * self.cost_model.kv_tokens / prompt.sequences)
        return tokens if tokens <= certain_tokens else max(certain_tokens, tokens // PROMPT_OVERESTIMATE)

    def _reclassify(self, request: AdmissionRequest) -> AdmissionRequest:
        """Returns a running request with its class mapped to the classes of this policy."""
        request_class = self.policy.class_of(request.request_class.encode()).name
        return request if request.request_class == request_class else replace(request, request_class=request_class)


def _ttft_s(forwarded: ForwardedRequest, record: AccessRecord) -> float | None:
    """Returns the time from admission to the first token. None for another engine."""
    if record.ttft_s is None or record.upstream not in (None, "", forwarded.address):
        return None
    return max(0.0, record.ttft_s - (record.received_us or 0) / 1e6 - forwarded.queued_s)


def _limits_of(policy: AdmissionPolicy) -> AdmissionLimits:
    if policy.limits is None:
        raise ValueError("the policy has no admission limits: its InferenceServiceAdmission is missing")
    return policy.limits
