"""The decoding sequences, as counts that follow from the number of the step.

Idea: while a sequence decodes, each step adds one token to it. Its tokens, its context and the steps at which it needs
a block follow from the step number and one offset, so a step costs no time per sequence.
"""

from __future__ import annotations

import heapq

from plimsoll.sim.engine.sequence import EngineSequence


class DecodeBatch:
    """Decoding sequences of one engine. block_tokens: tokens of a KV block. step: number of the next step."""

    def __init__(self, block_tokens: int) -> None:
        self.step = 0
        self.sequences: dict[EngineSequence, None] = {}  # in order of admission
        self._block_tokens = block_tokens
        self._offset_sum = 0
        # decoding sequences by the step, modulo a block, at which they need one
        self._block_crossings = [0] * block_tokens
        self._finish_heap: list[tuple[int, int, EngineSequence]] = []
        self._serial = 0

    @property
    def context_tokens(self) -> int:
        """Context tokens that the next step reads."""
        return self._offset_sum + self.step * len(self.sequences)

    @property
    def next_blocks(self) -> int:
        """Blocks that the next step needs."""
        return self._block_crossings[self.step % self._block_tokens]

    @property
    def steps_to_first_end(self) -> int:
        """Steps until the first sequence has its last token; needs at least one sequence."""
        return self._finish_heap[0][0] - self.step + 1

    def needs_block(self, sequence: EngineSequence) -> bool:
        """Whether a sequence needs a block for the next step."""
        return (sequence.token_offset + self.step) % self._block_tokens == 0

    def blocks_of(self, steps: int) -> int:
        """Return the number of blocks that the next `steps` steps need."""
        sequences = len(self.sequences)
        if not sequences:
            return 0
        rounds, rest = divmod(steps, self._block_tokens)
        blocks = rounds * sequences
        for step in range(self.step, self.step + rest):
            blocks += self._block_crossings[step % self._block_tokens]
        return blocks

    def steps_within(self, free_blocks: int) -> int:
        """Return the number of steps for which the free blocks suffice; the next step has its block already."""
        rounds, blocks_left = divmod(free_blocks, len(self.sequences))
        step = rounds * self._block_tokens + 1
        while blocks_left >= 0:
            blocks_left -= self._block_crossings[(self.step + step) % self._block_tokens]
            step += blocks_left >= 0
        return step

    def add(self, sequence: EngineSequence) -> None:
        """Add a sequence that decodes from the next step on."""
        sequence.token_offset = sequence.computed_tokens - self.step
        sequence.finish_step = self.step + sequence.output_tokens - sequence.scheduled_output - 1
        self.sequences[sequence] = None
        self._offset_sum += sequence.token_offset
        self._block_crossings[-sequence.token_offset % self._block_tokens] += 1
        self._serial += 1
        heapq.heappush(self._finish_heap, (sequence.finish_step, self._serial, sequence))

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence whose tokens are all scheduled, or that is preempted, and set its token counts."""
        del self.sequences[sequence]
        self._offset_sum -= sequence.token_offset
        self._block_crossings[-sequence.token_offset % self._block_tokens] -= 1
        sequence.computed_tokens = sequence.token_offset + self.step
        sequence.scheduled_output = sequence.output_tokens - (sequence.finish_step - self.step + 1)
        sequence.own_blocks = -(-sequence.computed_tokens // self._block_tokens) - sequence.shared_blocks
        sequence.finish_step = -1

    def advance(self, steps: int) -> list[EngineSequence]:
        """Compose `steps` more steps. Removes and returns the sequences that end with the last of them."""
        self.step += steps
        heap, ended = self._finish_heap, []
        while heap and heap[0][0] < self.step:
            sequence = heapq.heappop(heap)[2]
            if sequence.finish_step == self.step - 1:
                ended.append(sequence)
                self.remove(sequence)
        return ended
