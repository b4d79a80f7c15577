"""One sequence of a request: the engine's sequence, with its text and a listener."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, Literal

from plimsoll.sim.engine.sequence import EngineSequence
from simulated import token_text

Outcome = Literal["length", "abort", "error"]

_ids: Final = itertools.count()


def ignore_update() -> None:
    """For a sequence without a listener."""


class ServedSequence(EngineSequence):
    """A sequence from its arrival at the API to its end. Times in seconds on the engine's clock.

    `emitted_tokens` counts the generated tokens, the newest at last_token_s. `on_update` is called after new tokens,
    and only at the end if it is not `streamed`. `outcome` is how it ended, None before. salt: sequences of different
    salts share no KV.
    """

    __slots__ = (
        "_content_hashes",
        "emitted_tokens",
        "on_update",
        "outcome",
        "prompt",
        "request_id",
        "salt",
        "seed",
        "streamed",
    )

    def __init__(
        self,
        request_id: str,
        prompt: bytes,
        max_tokens: int,
        arrived_s: float,
        *,
        salt: str = "",
        streamed: bool = False,
        remote: bool = False,
        keeps_kv: bool = False,
        adapter: str = "",
    ) -> None:
        super().__init__(
            next(_ids),
            token_text.count_tokens(prompt),
            max_tokens,
            remote=remote,
            keeps_kv=keeps_kv,
            arrived_s=arrived_s,
            adapter=adapter,
        )
        self.request_id = request_id
        self.prompt = prompt
        self.salt = salt
        self.streamed = streamed
        self.on_update: Callable[[], None] = ignore_update
        self.emitted_tokens = 0
        self.outcome: Outcome | None = None
        self.seed = token_text.prompt_seed(prompt)
        self._content_hashes: list[int] = []

    def text(self, first: int, last: int) -> str:
        """Return the output's tokens first..last-1."""
        return token_text.words_between(self.seed, first, last)

    def block_names(self, tokens: int, chunk_tokens: int) -> Sequence[int]:
        """Return hashes of the full blocks in the first `tokens` tokens of prompt and output, each including all before
        it.
        """
        blocks = tokens // chunk_tokens
        while len(self._content_hashes) < blocks:
            start = len(self._content_hashes) * chunk_tokens
            before = self._content_hashes[-1] if self._content_hashes else hash(self.salt)
            self._content_hashes.append(hash((before, self._tokens(start, start + chunk_tokens))))
        return self._content_hashes[:blocks]

    def _tokens(self, first: int, last: int) -> bytes:
        prompt_bytes = self.prompt[first * token_text.TOKEN_BYTES : last * token_text.TOKEN_BYTES]
        if last <= self.prompt_tokens:
            return prompt_bytes
        return prompt_bytes + self.text(max(0, first - self.prompt_tokens), last - self.prompt_tokens).encode()
