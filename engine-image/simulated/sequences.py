"""One sequence in the engine: its prompt, how far it is, the blocks it holds, and when what happened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from simulated import words

Outcome = Literal["length", "abort", "error"]


def silent() -> None:
    """For a sequence that nobody listens to."""


@dataclass(eq=False, slots=True)
class Sequence:
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
    produce: bool = False
    heard: Callable[[], None] = silent

    output: int = 0
    emitted: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    outcome: Outcome | None = None

    cached_tokens: int = 0  # of the prompt, found here at the first admission
    fetched_tokens: int = 0  # of the prompt, computed elsewhere
    preemptions: int = 0
    scheduled_s: float | None = None
    first_s: float = 0.0
    last_s: float = 0.0

    prompt_tokens: int = field(init=False)
    seed: int = field(init=False)
    named: int = field(init=False, default=0)  # blocks whose content the pool knows
    _contents: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = words.count(self.prompt)
        self.seed = words.seed(self.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.prompt_tokens + self.output

    @property
    def settled(self) -> bool:
        """Whether its last token is in a step already: nothing is left to schedule."""
        return self.output >= self.max_tokens

    def text(self, first: int, last: int) -> str:
        """The answer's tokens first..last-1."""
        return words.text(self.seed, first, last)

    def contents(self, blocks: int, block_size: int) -> list[int]:
        """Hashes of the first full blocks' contents, each with all that comes before it."""
        while len(self._contents) < blocks:
            start = len(self._contents) * block_size
            before = self._contents[-1] if self._contents else hash(self.salt)
            self._contents.append(hash((before, self._tokens(start, start + block_size))) or 1)
        return self._contents[:blocks]

    def _tokens(self, first: int, last: int) -> bytes:
        held = self.prompt[first * words.TOKEN_BYTES : last * words.TOKEN_BYTES]
        if last <= self.prompt_tokens:
            return held
        return held + self.text(max(0, first - self.prompt_tokens), last - self.prompt_tokens).encode()
