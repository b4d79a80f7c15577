"""Ratios of counted to estimated prompt tokens: text, pictures, sound, video and schemas of response formats.

Problem: a gateway estimates prompt tokens by rules of thumb: bytes of text, pixels of pictures. Tokenizers differ, and
one model family needs 256 tokens for any picture where another needs 2,700. Engines count only the sum of all prompt
tokens.

Idea: the mix of text and pictures varies from half minute to half minute, and so does the sum that engines count. A
ridge regression of counted on estimated tokens gives a ratio for each kind. Without evidence all ratios stay near 1;
with a constant mix the ratio of the least certain kind moves most (Hoerl and Kennard 1970, in its Bayesian reading).

A service of text only has a ratio once its text differs from the rule of thumb by more than noise explains, and keeps
it. Gateways estimate what arrives and engines count what is admitted, so text is not learned while requests are
rejected: long prompts are rejected first. Media are, because their first estimate can be the reason for rejections.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from plimsoll.core.prompt_tokens import KINDS, TEXT

_WINDOW_S: Final = 30.0  # longer than a queue and a prefill: arrivals and prefills of a window are the same requests
_MIN_REQUESTS: Final = 5.0  # fewer make no observation
_MEMORY_S: Final = 1800.0
_PRIOR_ERROR: Final = np.array([0.2, 1.0, 1.0, 1.0, 1.0])  # standard deviation of a ratio before evidence, by kind
_REQUEST_ERROR: Final = 0.5  # of the mean of one request's tokens, relative
_RANGE: Final = (0.05, 20.0)
_TEXT_RANGE: Final = (0.25, 4.0)  # of text only: from 16 bytes for each token to one
_TEXT_TOLERANCE: Final = 0.05  # difference of a text ratio from 1, beyond its standard error, that is not corrected
_MAX_TEXT_ERROR: Final = 0.12  # standard error of a text ratio after 11 to 40 requests; before, none is used
_MAX_REJECTED_SHARE: Final = 0.02  # of a window in which text is learned


class TokenRatioEstimator:
    """Learns the ratios of one service. Times are Unix seconds."""

    def __init__(self) -> None:
        self._precision = np.zeros((len(KINDS), len(KINDS)))  # weighted sums of products of the estimated means
        self._products = np.zeros(len(KINDS))  # and of the estimated with the counted means
        self._started_s: float | None = None  # of the present window
        self._estimated = np.zeros(len(KINDS))
        self._estimated_requests = self._counted_requests = self._counted = self._rejected = 0.0
        self._ratios: dict[str, float] | None = None
        self._corrects_text = False

    @property
    def has_media(self) -> bool:
        """Whether requests with media are known."""
        return bool(self._precision.diagonal()[1:].any())

    def on_estimated(
        self, at_s: float, requests: float, tokens: float, media: Mapping[str, float], rejected: float = 0.0
    ) -> None:
        """Add requests that arrived until at_s, and how many were rejected in that time.

        `tokens` are all of theirs, `media` those that are no text, by kind.
        """
        self._advance(at_s)
        self._rejected += rejected
        kinds = np.array([media.get(kind, 0.0) for kind in KINDS[1:]])
        self._estimated += (max(0.0, tokens - kinds.sum()), *kinds)
        self._estimated_requests += requests

    def on_counted(self, at_s: float, requests: float, tokens: float) -> None:
        """Add prompts that engines began to answer until at_s, and their tokens."""
        if self._started_s is not None:
            self._advance(at_s)
            self._counted_requests += requests
            self._counted += tokens

    def ratios(self) -> Mapping[str, float]:
        """Counted over estimated tokens by kind (`KINDS`). Empty for text that is close to the estimate."""
        if not (self.has_media or self._corrects_text):
            return {}
        if self._ratios is None:
            self._ratios = self._solve()
        return self._ratios

    def _solve(self) -> dict[str, float]:
        if not self.has_media:
            return {TEXT: float(np.clip(self._text_estimate()[0], *_TEXT_RANGE))}
        prior = np.diag(1.0 / _PRIOR_ERROR**2)
        solved = np.linalg.solve(self._precision + prior, self._products + prior.diagonal())
        return {kind: float(r) for kind, r in zip(KINDS, np.clip(solved, *_RANGE), strict=True)}

    def _text_estimate(self) -> tuple[float, float]:
        """Returns the ratio of a service without media and its standard error."""
        prior = 1.0 / float(_PRIOR_ERROR[0]) ** 2
        precision = float(self._precision[0, 0]) + prior
        return (float(self._products[0]) + prior) / precision, 1.0 / math.sqrt(precision)

    def _advance(self, at_s: float) -> None:
        """Close the window if it is over."""
        if self._started_s is None:
            self._started_s = at_s
        if 0.0 <= at_s - self._started_s < _WINDOW_S:
            return
        requests = min(self._estimated_requests, self._counted_requests)
        has_media = self.has_media or bool(self._estimated[1:].any())
        is_biased = not has_media and self._rejected > _MAX_REJECTED_SHARE * self._estimated_requests
        if requests >= _MIN_REQUESTS and self._counted > 0.0 and self._estimated.any() and not is_biased:
            estimated, counted = self._estimated / self._estimated_requests, self._counted / self._counted_requests
            # Long prompts that no engine has counted are a large error, not a certain observation of a small ratio.
            weight = requests / (_REQUEST_ERROR * max(counted, float(estimated.sum()))) ** 2
            retained = math.exp(-max(0.0, at_s - self._started_s) / _MEMORY_S)
            self._precision = retained * self._precision + weight * np.outer(estimated, estimated)
            self._products = retained * self._products + weight * counted * estimated
            self._ratios = None
            ratio, error = self._text_estimate()
            self._corrects_text |= error <= _MAX_TEXT_ERROR and abs(ratio - 1.0) > _TEXT_TOLERANCE + error
        self._started_s = at_s
        self._estimated = np.zeros(len(KINDS))
        self._estimated_requests = self._counted_requests = self._counted = self._rejected = 0.0
