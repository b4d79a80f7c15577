"""The limits of single requests: length of the output, time in all, and time without a byte.

A limit of a class replaces that of its service.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request.

    `max_output_tokens` is for each sequence, None without a limit. `max_duration_s` is the time from the arrival to the
    last byte of the response, in seconds. `idle_timeout_s` is the longest time without a byte from the engine in a
    stream, in seconds, None for the gateway's own.
    """

    max_output_tokens: int | None = None
    max_duration_s: float = math.inf
    idle_timeout_s: int | None = None


NO_LIMITS: Final = RequestLimits()
