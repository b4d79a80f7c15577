"""One sequence in one engine: its request, its progress and its cache blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class EngineSequence:
    """One sequence in one engine. Times in seconds.

    output_tokens: tokens to generate. block_ids: hashes of the prompt's chunks, for the prefix cache. remote: another
    engine computes the prompt. keeps_kv: another engine will fetch its KV here. adapter: its LoRA adapter, "" for the
    model itself. scheduled_output: output tokens in composed steps. computed_tokens: tokens with KV. While it decodes
    both follow from the step number: `token_offset` + step tokens are computed before a step, and `finish_step` is its
    last.
    """

    id: int
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    remote: bool = False
    keeps_kv: bool = False
    arrived_s: float = 0.0
    adapter: str = ""
    scheduled_output: int = 0
    computed_tokens: int = 0
    own_blocks: int = 0  # of its own
    shared_blocks: int = 0  # those behind `held_names`
    held_names: list[int] = field(default_factory=list)  # chunks that it uses and others may find
    token_offset: int = 0
    finish_step: int = -1
    cached_tokens: int = 0
    transferred_tokens: int = 0
    preemptions: int = 0
    admitted: bool = False
    scheduled_s: float | None = None  # first put into a step
    first_token_s: float | None = None
    last_token_s: float | None = None

    def block_names(self, tokens: int, chunk_tokens: int) -> Sequence[int]:
        """Return the hashes of the whole chunks in the first `tokens` tokens, as far as they exist."""
        return self.block_ids[: tokens // chunk_tokens]
