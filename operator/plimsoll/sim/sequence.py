"""One sequence in one engine: its request, its progress and its cache blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class EngineSequence:
    """One sequence in one engine. Times in seconds.

    output: tokens to make. ids: names of the prompt's blocks, for the prefix cache. remote: another engine computes
    the prompt. produce: another engine will fetch its KV here. made: output tokens put into steps; computed: tokens
    with KV; while it decodes both follow from the step's number, `shift` + step being computed and `finish` its last.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    remote: bool = False
    keeps_kv: bool = False
    arrived_s: float = 0.0
    scheduled_output: int = 0
    computed_tokens: int = 0
    own_blocks: int = 0  # of its own
    shared_blocks: int = 0  # first ids whose blocks it shares
    token_offset: int = 0
    finish_step: int = -1
    cached_tokens: int = 0
    transferred_tokens: int = 0
    admitted: bool = False
    first_token_s: float | None = None
    last_token_s: float | None = None
