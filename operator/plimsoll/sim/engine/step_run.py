"""Composed steps of an engine: the work of one step, and a run of identical steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from plimsoll.sim.engine.iteration import NO_WORK, StepWork
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.step_timing import StepSeries


@dataclass(eq=False, slots=True)
class StepRun:
    """Steps of one batch.

    start_s: of the first step. second_composed_s: when a second one is composed. emitting: sequences that get a token
    of each step. prefill_completions: sequences that get a token of the only step without having decoded before it.
    final_sequences: those that end with the last step. decoding: decoding sequences, only if `on_steps` needs them.
    """

    series: StepSeries
    start_s: float
    second_composed_s: float
    previous_end_s: float
    count: int
    emitting: int
    composed: int = 0
    completed: int = 0
    end_s: float = 0.0
    next_compose_s: float = 0.0  # when what follows is composed
    prefill_completions: list[EngineSequence] = field(default_factory=list)
    final_sequences: list[EngineSequence] = field(default_factory=list)
    decoding: list[EngineSequence] = field(default_factory=list)
    first_step_work: StepWork = NO_WORK  # of the first step

    def drop(self, sequence: EngineSequence) -> None:
        """Remove a sequence, which gets no more tokens of this run."""
        for got_tokens in (self.decoding, self.prefill_completions):
            if sequence in got_tokens:
                got_tokens.remove(sequence)
                self.emitting -= 1
        if sequence in self.final_sequences:
            self.final_sequences.remove(sequence)


@dataclass(slots=True)
class StepBatch:
    """Work of one step: `decodes` decoding sequences, which read `context` tokens; the other fields are additional
    work. adapter_loads: LoRA adapters that are copied to the GPU before it.
    """

    decodes: int = 0
    context: int = 0
    tokens: int = 0
    pairs: float = 0.0
    single_token_sequences: int = 0  # sequences that lack one token without being in the decoding batch
    single_token_context: int = 0
    prefills: int = 0
    cached: int = 0
    adapter_loads: int = 0
    prefill_completions: list[EngineSequence] = field(default_factory=list)
    final_sequences: list[EngineSequence] = field(default_factory=list)
    new_decodes: list[EngineSequence] = field(default_factory=list)
    kv_fetches: list[EngineSequence] = field(default_factory=list)
