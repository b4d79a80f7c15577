"""Estimates the output tokens of a response from its size in bytes.

Problem: responses do not pass the picker, and the bytes per token of a stream depend on the model, its tokenizer and
the client's options.

Idea: the operator knows the mean output in tokens, and the access log has the bytes of each response. Over many
complete streams, the ratio of the means is the bytes per token.
"""

from __future__ import annotations

from typing import Final

MIN_STREAMS: Final = 20  # fewer streams give no estimate
MAX_MEAN_STREAMS: Final = 500  # approximate window of the mean


class TokenEstimator:
    """Tracks the mean bytes per sequence of a service's streamed responses."""

    def __init__(self) -> None:
        self._streams = 0
        self._mean_bytes = 0.0

    def estimate(self, sent_bytes: int, sequences: int, mean_output_tokens: float | None) -> int | None:
        """Returns the estimated tokens of a complete streamed response, and updates the mean.

        `mean_output_tokens` is the mean output of one sequence, None if unknown. Returns None without enough data.
        """
        if sent_bytes <= 0:
            return None
        self._streams += 1
        self._mean_bytes += (sent_bytes / sequences - self._mean_bytes) / min(self._streams, MAX_MEAN_STREAMS)
        if self._streams < MIN_STREAMS or mean_output_tokens is None:
            return None
        return max(1, round(sent_bytes / self._mean_bytes * mean_output_tokens))
