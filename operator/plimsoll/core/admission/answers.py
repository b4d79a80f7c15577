"""How many tokens an answer had, from its bytes.

Problem: tokens never pass the gateway's picker, and what an event of a stream weighs depends on the model, its
tokenizer and the client's options.

Idea: the operator knows the mean answer in tokens, the access log every answer in bytes. Over many streams that ran to
their ends one mean over the other is the weight of a token.
"""

from __future__ import annotations

from typing import Final

LEAST_STREAMS: Final = 20  # before that, nothing is said
MEMORY_STREAMS: Final = 500  # over about so many the mean is taken


class AnswerBytes:
    """Mean bytes of one sequence of a service's streamed answers."""

    def __init__(self) -> None:
        self._streams = 0
        self._mean = 0.0

    def tokens(self, sent: int, sequences: int, output_mean: float | None) -> int | None:
        """Tokens of a whole streamed answer of so many bytes, which is learned from; None while little is known.

        output_mean: tokens of a mean sequence, None while nobody knows.
        """
        if sent <= 0:
            return None
        self._streams += 1
        self._mean += (sent / sequences - self._mean) / min(self._streams, MEMORY_STREAMS)
        if self._streams < LEAST_STREAMS or output_mean is None:
            return None
        return max(1, round(sent / self._mean * output_mean))
