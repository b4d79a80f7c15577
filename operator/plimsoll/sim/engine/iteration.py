"""What one step of an engine worked on, and what waited meanwhile: telemetry of a scheduler that was instrumented.

No counter of a stock engine tells this, and nothing of the operator reads it. Some peers' autoscalers ask for engines
that publish it after every step (Dynamo's forward pass metrics), and their policies get it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.sim.engine.sequence import EngineSequence


class StepWork(NamedTuple):
    """Work of a step. prefills: sequences whose prompt it read, with so many new tokens of it and so many `cached`
    ones. decodes: sequences that it gave a token, with so many tokens of context."""

    prefills: int = 0
    tokens: int = 0
    cached: int = 0
    decodes: int = 0
    context: int = 0


class QueuedWork(NamedTuple):
    """What waits. Preempted sequences and those whose KV is on its way wait for decoding; the others for prefill."""

    prefills: int = 0
    tokens: int = 0
    decodes: int = 0
    context: int = 0


NO_WORK: Final = StepWork()
NO_QUEUED_WORK: Final = QueuedWork()


@dataclass(frozen=True, slots=True)
class Iteration:
    """The newest step that one engine has completed; took_s is 0 and all else nothing while it is idle."""

    pod: str
    duration_s: float = 0.0
    work: StepWork = NO_WORK
    queued: QueuedWork = NO_QUEUED_WORK


def queued_work(waiting: Iterable[EngineSequence], loading: Iterable[EngineSequence]) -> QueuedWork:
    """Sums over what waits; loading: sequences whose KV is on its way, of which `moved` tokens come."""
    prefills = tokens = decodes = context = 0
    for sequence in waiting:
        if sequence.scheduled_output:  # it lost its place and its KV
            decodes += 1
        elif sequence.computed_tokens:  # its KV has come
            decodes += 1
            context += sequence.computed_tokens
        else:
            prefills += 1
            tokens += sequence.prompt_tokens
    for sequence in loading:
        decodes += 1
        context += sequence.computed_tokens + sequence.transferred_tokens
    return QueuedWork(prefills, tokens, decodes, context)
