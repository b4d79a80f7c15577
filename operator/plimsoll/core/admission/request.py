"""The request, the outcomes and the decision of admission control."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from plimsoll.core.admission.retry_advice import RetryAdvice

MAX_REQUEST_TOKENS: Final = 100_000_000  # upper bound for validation
MAX_REQUEST_SEQUENCES: Final = 1_000_000


class AdmissionOutcome(StrEnum):
    """The admission outcome of a request. Queued is followed by another outcome; all others are final."""

    ADMITTED = "Admitted"
    QUEUED = "Queued"  # waits at the gateway; another outcome follows
    DOWNGRADED = "Downgraded"  # sent to the fallback service
    SHED_SATURATED = "ShedSaturated"  # the ready replicas are full and it would miss its SLO
    SHED_ADAPTERS = "ShedAdapters"  # each ready replica has requests of as many adapters as it runs at once
    SHED_STARTING = "ShedStarting"  # no replica is ready within the maximum queue time
    SHED_QUOTA = "ShedQuota"  # its tenant exceeded its quota
    SHED_DEADLINE = "ShedDeadline"  # its client's deadline has passed
    SHED_NO_CAPACITY = "ShedNoCapacity"  # no replica can ever hold it, or no replica is starting
    CLIENT_GONE = "ClientGone"  # its client disconnected while it was queued

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


@dataclass(slots=True)
class AdmissionRequest:
    """One request as admission sees it. Treat it as immutable. Raises ValueError that names the field.

    - `id`: unique among queued and running requests.
    - `arrived_s`: its arrival at the gateway, in seconds on the caller's monotonic clock.
    - `prompt_tokens`: tokens of one prompt, including cached ones.
    - `cached_tokens`: tokens that a prefix-cache hit is expected to save.
    - `max_tokens`: the client's output limit, None without one.
    - `sequences`: `n` times the number of prompts.
    - `deadline_s`: the absolute time after which the first token is useless, None if unknown.
    - `complete_by_s`: the same for the last token.
    - `body_hash`, `idempotency_key`: identify a client's retry. Without both, the request counts as new.
    - `has_fallback`: if it cannot be admitted, it goes to the fallback service at once, because queueing it here would
      make it late there.
    - `is_retry`: an earlier attempt was rejected, so it is no new demand, with or without a retry reservation.
    - `adapter`: its LoRA adapter, "" for the model itself.
    - `is_stream`: its first token is reported while it runs, so one that does not come is missed.
    - `block_hashes`: chained hashes of the prompt's full blocks of 128 tokens, empty if unknown. Blocks that a replica
      holds count as cached there.
    """

    id: str
    request_class: str
    tenant: str
    arrived_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    max_tokens: int | None = None
    sequences: int = 1
    deadline_s: float | None = None
    body_hash: int | None = None
    idempotency_key: str | None = None
    has_fallback: bool = False
    block_hashes: tuple[int, ...] = ()
    is_retry: bool = False
    complete_by_s: float | None = None
    adapter: str = ""
    is_stream: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens <= MAX_REQUEST_TOKENS:
            raise ValueError(f"prompt_tokens must lie between 0 and {MAX_REQUEST_TOKENS}, not {self.prompt_tokens}")
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(f"cached_tokens must lie between 0 and prompt_tokens, not {self.cached_tokens}")
        if self.max_tokens is not None and not self.max_tokens > 0:
            raise ValueError(f"max_tokens must be above 0, not {self.max_tokens}")
        if not 1 <= self.sequences <= MAX_REQUEST_SEQUENCES:
            raise ValueError(f"sequences must lie between 1 and {MAX_REQUEST_SEQUENCES}, not {self.sequences}")
        deadline_s, complete_by_s = self.deadline_s, self.complete_by_s
        if self.arrived_s != self.arrived_s or deadline_s != deadline_s or complete_by_s != complete_by_s:  # NaN
            raise ValueError("arrived_s, deadline_s and complete_by_s must be numbers")

    def is_expired(self, now: float) -> bool:
        """Whether one of its deadlines has passed, so that no engine of any model can meet it."""
        return any(time is not None and time <= now for time in (self.deadline_s, self.complete_by_s))


class AdmissionDecision(NamedTuple):
    """The admission decision for one request.

    An Admitted request has the `address` of its replica and `first_token_s`, the predicted time from now to its first
    token. `prefill` is the replica that computes its prompt, None for the same one. A shed request has `retry`.
    `is_demand` is false if no capacity would serve it: it is over a quota, past its deadline, or larger than an empty
    replica.
    """

    request_id: str
    outcome: AdmissionOutcome
    address: str | None = None
    prefill: str | None = None
    first_token_s: float = 0.0
    retry: RetryAdvice | None = None
    is_demand: bool = True
