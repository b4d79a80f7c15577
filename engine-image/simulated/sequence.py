"""One sequence in the engine: its prompt, how far it is, the blocks it holds, and when what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from simulated import token_text

Outcome = Literal["length", "abort", "error"]


def ignore_update() -> None:
    """For a sequence that nobody listens to."""


@dataclass(eq=False, slots=True)
class EngineSequence:
    """A sequence from its arrival to its end; times in seconds on the engine's clock.

    `output` tokens have been put into a step, `emitted` ones have come out; `computed` tokens have their KV. `remote`:
    the prompt's KV is to be had from another engine; `produce`: another engine will fetch it here. `heard` is called
    when tokens have come out, only at the end where it is not `streamed`.
    """

    request_id: str
    prompt: bytes
    max_tokens: int
    arrived_s: float
    salt: str = ""
    streamed: bool = False
    remote: bool = False
    keeps_kv: bool = False
    on_update: Callable[[], None] = ignore_update

    scheduled_output: int = 0
    emitted_tokens: int = 0
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    outcome: Outcome | None = None

    cached_tokens: int = 0  # of the prompt, found here at the first admission
    fetched_tokens: int = 0  # of the prompt, computed elsewhere
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    prompt_tokens: int = field(init=False)
    seed: int = field(init=False)
    registered_blocks: int = field(init=False, default=0)  # blocks whose content the pool knows
    _content_hashes: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = token_text.count_tokens(self.prompt)
        self.seed = token_text.prompt_seed(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt_tokens + self.scheduled_output

    @property
    def is_fully_scheduled(self) -> bool:
        """Whether its last token is in a step already: nothing is left to schedule."""
        return self.scheduled_output >= self.max_tokens

    def text(self, first: int, last: int) -> str:
        """The answer's tokens first..last-1."""
        return token_text.words_between(self.seed, first, last)

    def content_hashes(self, blocks: int, block_size: int) -> list[int]:
        """Hashes of the first full blocks' contents, each with all that comes before it."""
        while len(self._content_hashes) < blocks:
            start = len(self._content_hashes) * block_size
            before = self._content_hashes[-1] if self._content_hashes else hash(self.salt)
            self._content_hashes.append(hash((before, self._tokens(start, start + block_size))) or 1)
        return self._content_hashes[:blocks]

    def _tokens(self, first: int, last: int) -> bytes:
        prompt_bytes = self.prompt[first * token_text.TOKEN_BYTES : last * token_text.TOKEN_BYTES]
        if last <= self.prompt_tokens:
            return prompt_bytes
        return prompt_bytes + self.text(max(0, first - self.prompt_tokens), last - self.prompt_tokens).encode()
