"""Work of one engine step, and the queued work meanwhile: telemetry of an instrumented scheduler.

A stock engine has no such counter, and the operator does not read it. Some peers' autoscalers need engines that publish
it after every step (Dynamo's forward pass metrics), and their policies get it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.sim.engine.sequence import EngineSequence


class StepWork(NamedTuple):
    """Work of a step.

    prefills: sequences with prompt tokens in it. tokens: new prompt tokens; cached: their cached ones. decodes:
    decoding sequences; context: their context tokens.
    """

    prefills: int = 0
    tokens: int = 0
    cached: int = 0
    decodes: int = 0
    context: int = 0


class QueuedWork(NamedTuple):
    """Queued work. Preempted sequences and those with a KV transfer wait for decoding; the others for prefill."""

    prefills: int = 0
    tokens: int = 0
    decodes: int = 0
    context: int = 0


NO_WORK: Final = StepWork()
NO_QUEUED_WORK: Final = QueuedWork()


@dataclass(frozen=True, slots=True)
class Iteration:
    """The last completed step of one engine; all values are 0 while it is idle."""

    pod: str
    duration_s: float = 0.0
    work: StepWork = NO_WORK
    queued: QueuedWork = NO_QUEUED_WORK


def queued_work(waiting: Iterable[EngineSequence], loading: Iterable[EngineSequence]) -> QueuedWork:
    """Return the queued work. loading: sequences with a KV transfer, whose transferred tokens need no prefill."""
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
