"""What one step of an engine worked on, and what waited meanwhile: telemetry of a scheduler that was instrumented.

No counter of a stock engine tells this, and nothing of the operator reads it. Some peers' autoscalers ask for engines
that publish it after every step (Dynamo's forward pass metrics), and their policies get it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.sim.job import Job


class Did(NamedTuple):
    """Work of a step. prefills: sequences whose prompt it read, with so many new tokens of it and so many `cached`
    ones. decodes: sequences that it gave a token, with so many tokens of context."""

    prefills: int = 0
    tokens: int = 0
    cached: int = 0
    decodes: int = 0
    context: int = 0


class Queued(NamedTuple):
    """What waits. Preempted sequences and those whose KV is on its way wait for decoding; the others for prefill."""

    prefills: int = 0
    tokens: int = 0
    decodes: int = 0
    context: int = 0


NOTHING: Final = Did()
NONE: Final = Queued()


@dataclass(frozen=True, slots=True)
class Iteration:
    """The newest step that one engine has completed; took_s is 0 and all else nothing while it is idle."""

    pod: str
    took_s: float = 0.0
    did: Did = NOTHING
    queued: Queued = NONE


def queued(waiting: Iterable[Job], loading: Iterable[Job]) -> Queued:
    """Sums over what waits; loading: sequences whose KV is on its way, of which `moved` tokens come."""
    prefills = tokens = decodes = context = 0
    for job in waiting:
        if job.made:  # it lost its place and its KV
            decodes += 1
        elif job.computed:  # its KV has come
            decodes += 1
            context += job.computed
        else:
            prefills += 1
            tokens += job.prompt
    for job in loading:
        decodes += 1
        context += job.computed + job.moved
    return Queued(prefills, tokens, decodes, context)
