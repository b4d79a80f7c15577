"""Latency SLO of a service: the share of its requests that must meet which targets.

Problem: one TTFT target for all lengths cannot be met by long prompts even on an idle fleet, and a mean hides the tail
that users notice.

Idea: a share of requests, each of which meets all its targets together or counts as missed; the TTFT target may grow
with the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from plimsoll.core.types import Role
from plimsoll.core.units import format_number

Tokens = TypeVar("Tokens", float, NDArray[np.float64])


class Deadlines(NamedTuple):
    """Deadlines of one request, seconds after its receipt: ttft_s for its first token, e2e_s for its last.

    tpot_s: highest mean time per token after the first. Infinite without a target.
    """

    ttft_s: float
    e2e_s: float
    tpot_s: float = math.inf


@dataclass(frozen=True)
class Slo:
    """A share of requests, and the targets that each of them meets together. None: no such target.

    share: of requests, above 0 and below 1, such as 0.95. ttft_s: time to first token. ttft_per_1k_tokens_s: added to
    it for each 1,000 prompt tokens. tpot_s: mean time per output token of one request after its first. e2e_s: to the
    last token. itl_s: 99th percentile of the inter-token latencies of all responses; it is no target of a request, so
    `share` does not apply to it. Raises ValueError that names the argument.
    """

    share: float
    ttft_s: float | None = None
    ttft_per_1k_tokens_s: float = 0.0
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie between 0 and 1, both excluded, not {self.share}")
        for name in ("ttft_s", "tpot_s", "e2e_s", "itl_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and above 0, not {value}")
        if not (math.isfinite(self.ttft_per_1k_tokens_s) and self.ttft_per_1k_tokens_s >= 0):
            raise ValueError(f"ttft_per_1k_tokens_s must be finite and at least 0, not {self.ttft_per_1k_tokens_s}")
        if self.ttft_s is None and self.ttft_per_1k_tokens_s > 0:
            raise ValueError("ttft_per_1k_tokens_s adds to ttft_s, which is missing")
        if self.ttft_s is None and self.tpot_s is None and self.e2e_s is None:
            raise ValueError("ttft_s, tpot_s or e2e_s is needed: an SLO needs a target")

    @property
    def targets(self) -> tuple[tuple[str, float | None], ...]:
        """Each target by the name that people call it, s; None: no such target."""
        return ("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("e2e", self.e2e_s), ("itl", self.itl_s)

    def has_target_for(self, role: str) -> bool:
        """Whether a target depends on the engines of such a tier. Of a prefill tier, only TTFT does."""
        return role != Role.PREFILL or self.ttft_s is not None

    def percentile(self, name: str) -> str:
        """Which percentile the target of that name bounds: that of all gaps between tokens is the 99th."""
        return "p99" if name == "itl" else f"p{format_number(100 * self.share)}"

    def deadlines(self, prompt_tokens: float) -> Deadlines:
        """Return the deadlines of a request with this prompt, cached tokens included."""
        e2e_s = math.inf if self.e2e_s is None else self.e2e_s
        tpot_s = math.inf if self.tpot_s is None else self.tpot_s
        return Deadlines(self.ttft_target_s(prompt_tokens), e2e_s, tpot_s)

    def ttft_targets_s(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the TTFT target of each prompt, s, in the shape of `prompt_tokens`."""
        return np.asarray(self.ttft_target_s(np.asarray(prompt_tokens, dtype=np.float64)))

    def ttft_target_s(self, prompt_tokens: Tokens) -> Tokens:
        """Return the TTFT target of a prompt, s; infinity without one. Cached tokens count."""
        base_s = math.inf if self.ttft_s is None else self.ttft_s
        return base_s + self.ttft_per_1k_tokens_s * prompt_tokens / 1000


def tightest(slos: Sequence[Slo]) -> Slo:
    """Return the SLO whose every target is the least of these, so that whatever meets it meets each of them.

    At least one; all have the same share. Only those with a TTFT target count for the time added to it.
    """

    def least(name: str) -> float | None:
        return min((value for slo in slos if (value := getattr(slo, name)) is not None), default=None)

    added_s = min((slo.ttft_per_1k_tokens_s for slo in slos if slo.ttft_s is not None), default=0.0)
    return Slo(slos[0].share, least("ttft_s"), added_s, least("tpot_s"), least("e2e_s"), least("itl_s"))
