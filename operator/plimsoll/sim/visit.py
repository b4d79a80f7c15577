"""One request on its way through the simulated fleet, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plimsoll.core.admission import Request
from plimsoll.sim.job import Job


class End(StrEnum):
    """How an attempt ended; the values are those of the demo's requests.jsonl, but for DOWNGRADED and UNFINISHED."""

    OK = "ok"
    SHED = "shed"  # the gateway said: not now
    DOWNGRADED = "downgraded"  # it went to the fallback service
    REFUSED = "refused"  # no engine could ever hold it
    FAILED = "failed"  # its engine died
    UNFINISHED = "unfinished"  # the run ended first


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a trace: seconds after its start, tokens in and out, who asks, names of the prompt's blocks.

    klass: name of its class as the trace has it. tenant: whom quotas and fairness are for. client: who comes back.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    klass: str = ""
    tenant: str = ""
    ids: tuple[int, ...] = ()
    client: str = ""


@dataclass(eq=False, slots=True)
class Visit:
    """What is known of one attempt. Times in seconds after the run's start; None: it did not come to that.

    id: of the demand, the same for all its attempts, which never are there at once. asked: what the trace has, a
    retry's with its own time. known: how many tokens the client allows, None where it set no limit. waited: whether it
    was held at the gateway. retry_after_s: what its refusal told, ticket_s: the time that the first attempt's refusal
    named, None where it named none. honours: whether its client does as it is told.
    """

    id: int
    asked: Asked
    known: int | None
    gateway: int = 0
    attempt: int = 1
    request: Request | None = None
    waited: bool = False
    admitted_s: float | None = None
    address: str = ""
    prefill: str = ""
    leg: Job | None = None  # at the prefill engine
    job: Job | None = None  # at the engine that answers
    first_s: float | None = None
    end_s: float | None = None
    end: End | None = None
    reason: str = ""
    retry_after_s: int | None = None
    ticket_s: float | None = None
    honours: bool = False
    adopted: bool = False

    @property
    def ttft_s(self) -> float | None:
        """From its arrival, hold included; None where nothing came, or the stream broke."""
        return None if self.first_s is None or self.end is not End.OK else self.first_s - self.asked.at_s

    @property
    def e2e_s(self) -> float | None:
        """From its arrival to its last token, hold included; None where it did not end well."""
        return None if self.end_s is None or self.end is not End.OK else self.end_s - self.asked.at_s

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens."""
        if self.end is not End.OK or self.first_s is None or self.end_s is None or self.asked.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.asked.output_tokens - 1)
