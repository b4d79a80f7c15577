"""What admission is asked, and the closed set of what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

MOST_TOKENS: Final = 100_000_000  # of one request; more is a number gone wrong
MOST_SEQUENCES: Final = 1_000_000


class Outcome(StrEnum):
    """What became of a request. Every request has one of these at any time, and one that is not Held at its end."""

    ADMITTED = "Admitted"
    HELD = "Held"  # waits at the gateway; another outcome follows
    DOWNGRADED = "Downgraded"  # goes to the fallback service
    SHED_SATURATED = "ShedSaturated"  # the ready replicas are full, and it would be late
    SHED_STARTING = "ShedStarting"  # no replica is ready, and the wait is longer than its class may wait
    SHED_QUOTA = "ShedQuota"  # its tenant has used what it may
    SHED_DEADLINE = "ShedDeadline"  # its deadline had passed, or passed while no replica was ready
    SHED_NO_CAPACITY = "ShedNoCapacity"  # no replica could ever hold it, or none is wanted
    CLIENT_GONE = "ClientGone"  # its client left while it was held

    __hash__ = str.__hash__  # an enum's own is a call of Python, several times a request


@dataclass(slots=True)
class Request:
    """One request as admission sees it, not to be changed. Tokens are whole numbers; raises ValueError that names the
    argument.

    id: unique among the held and the running. klass, tenant: names. arrived_s: when the gateway received it, on the
    caller's monotonic clock. prompt_tokens: of one prompt, cached ones included. cached_tokens: that a prefix hit is
    expected to save. max_tokens: the client's limit on the output, None if it set none. sequences: `n` times prompts.
    deadline_s: an absolute time after which the first token is of no use, None if unknown. body_hash and
    idempotency_key recognise a client that comes back; with neither it counts as new. fallback: goes to
    the fallback service at once where it cannot be let in: held here it would be late there. again: its client was
    turned away before, so that it is no new demand, ticket or not. blocks: chained hashes of
    the prompt's whole blocks of 128 tokens, empty if unknown; what a replica is known to hold of them counts as cached
    there, beside cached_tokens.
    """

    id: str
    klass: str
    tenant: str
    arrived_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    max_tokens: int | None = None
    sequences: int = 1
    deadline_s: float | None = None
    body_hash: int | None = None
    idempotency_key: str | None = None
    fallback: bool = False
    blocks: tuple[int, ...] = ()
    again: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_tokens <= MOST_TOKENS:
            raise ValueError(f"prompt_tokens must lie between 0 and {MOST_TOKENS}, not {self.prompt_tokens}")
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(f"cached_tokens must lie between 0 and prompt_tokens, not {self.cached_tokens}")
        if self.max_tokens is not None and not self.max_tokens > 0:
            raise ValueError(f"max_tokens must be above 0, not {self.max_tokens}")
        if not 1 <= self.sequences <= MOST_SEQUENCES:
            raise ValueError(f"sequences must lie between 1 and {MOST_SEQUENCES}, not {self.sequences}")
        if self.arrived_s != self.arrived_s or self.deadline_s != self.deadline_s:
            raise ValueError("arrived_s and deadline_s must be numbers")


class Told(NamedTuple):
    """What a refused client is told about coming back.

    eta_s: seconds until it could be served, None if nobody knows. retry_after_s: whole seconds of `Retry-After`, at
    most 60, None where there is none to give. again: False where it had better not come back.
    """

    eta_s: float | None
    retry_after_s: int | None
    again: bool


NOT_AGAIN: Final = Told(None, None, False)


class Decision(NamedTuple):
    """The answer for one request.

    address: the replica that takes it, where Admitted. prefill: the one that computes its prompt, None: the same.
    first_token_s: predicted time from now to its first token, where Admitted. told: where it was shed.
    """

    id: str
    outcome: Outcome
    address: str | None = None
    prefill: str | None = None
    first_token_s: float = 0.0
    told: Told | None = None
