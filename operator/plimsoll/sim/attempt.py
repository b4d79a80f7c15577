"""One attempt of a request in the simulated fleet, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.sim.engine.sequence import EngineSequence


class AttemptOutcome(StrEnum):
    """How an attempt ended; the values are those of the demo's requests.jsonl, except DOWNGRADED and UNFINISHED."""

    OK = "ok"
    SHED = "shed"  # the gateway rejected it for now
    DOWNGRADED = "downgraded"  # it went to the fallback service
    REFUSED = "refused"  # no engine can hold it
    FAILED = "failed"  # its engine died
    UNFINISHED = "unfinished"  # the run ended first


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace: seconds after its start, tokens in and out, client identity, and ids of the prompt's
    blocks.

    request_class: name of its class in the trace. tenant: for quotas and fairness. client: identity for retries.
    adapter: its LoRA adapter, "" for the model itself.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    request_class: str = ""
    tenant: str = ""
    block_ids: tuple[int, ...] = ()
    client: str = ""
    adapter: str = ""


@dataclass(eq=False, slots=True)
class Attempt:
    """State of one attempt. Times in seconds after the run's start; None: the event did not happen.

    id: of the original request, the same for all its attempts, which never overlap. trace_request: the trace's request,
    for a retry with its own time. max_tokens: the client's limit, None without one. was_queued: whether the gateway
    queued it. retry_after_s: `Retry-After` of its rejection. reservation_s: time of the retry reservation from the
    first attempt's rejection, None without one. honours_retry_after: whether its client follows `Retry-After`.
    registered_late: it ran before its gateway had limits.
    """

    id: int
    trace_request: TraceRequest
    max_tokens: int | None
    gateway: int = 0
    attempt: int = 1
    request: AdmissionRequest | None = None
    was_queued: bool = False
    admitted_s: float | None = None
    address: str = ""
    prefill_address: str = ""
    prefill_sequence: EngineSequence | None = None  # at the prefill engine
    sequence: EngineSequence | None = None  # at the engine that generates the response
    first_token_s: float | None = None
    end_s: float | None = None
    outcome: AttemptOutcome | None = None
    reason: str = ""
    retry_after_s: int | None = None
    reservation_s: float | None = None
    honours_retry_after: bool = False
    registered_late: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Time from its arrival to the first token, queueing included; None without a token, or if the stream broke."""
        return (
            None
            if self.first_token_s is None or self.outcome is not AttemptOutcome.OK
            else self.first_token_s - self.trace_request.at_s
        )

    @property
    def e2e_s(self) -> float | None:
        """Time from its arrival to the last token, queueing included; None unless it succeeded."""
        return (
            None
            if self.end_s is None or self.outcome is not AttemptOutcome.OK
            else self.end_s - self.trace_request.at_s
        )

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens."""
        if (
            self.outcome is not AttemptOutcome.OK
            or self.first_token_s is None
            or self.end_s is None
            or self.trace_request.output_tokens < 2
        ):
            return None
        return (self.end_s - self.first_token_s) / (self.trace_request.output_tokens - 1)
