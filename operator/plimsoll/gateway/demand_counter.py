"""Counts the requests of one service that are demand, their prompt tokens and their classes, for the operator.

Problem: an engine's rejection of a request, as too long for the model for example, is known only after the request has
counted. A count that decreases looks like a restart to its readers.

Idea: report the highest value so far of what was added less what was withdrawn. A request that is added and withdrawn
between two reports was never there. One that is withdrawn later is made up for by the next arrivals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from plimsoll.core.types import MediaKind
from plimsoll.gateway.recent_counter import RecentCounter


class DemandTokens(NamedTuple):
    """Estimated prompt tokens of one request; `media` are those of them that are no text, by kind.

    `request_class` is the class that the service gives it, "" without classes.
    """

    total: int
    media: Mapping[MediaKind, int] = MappingProxyType({})
    request_class: str = ""


class DemandReport(NamedTuple):
    """Requests and their prompt tokens since the start; `by_class` are the requests of each class."""

    requests: int
    tokens: int
    media_tokens: Mapping[MediaKind, int]
    by_class: Mapping[str, int]


class DemandCounter:
    """First attempts that are demand, and their tokens. `report` never decreases."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0  # added less withdrawn
        self._media: Counter[MediaKind] = Counter()
        self._by_class: RecentCounter[str] = RecentCounter()
        self._reported = DemandReport(0, 0, {}, {})

    def add(self, tokens: DemandTokens) -> None:
        """Count a request."""
        self._change(tokens, 1)

    def withdraw(self, tokens: DemandTokens) -> None:
        """Take a request off that was added with these tokens."""
        self._change(tokens, -1)

    def report(self) -> DemandReport:
        """Returns what was added less what was withdrawn."""
        requests, tokens, media, by_class = self._reported
        self._reported = DemandReport(
            max(requests, self._requests),
            max(tokens, self._tokens),
            {kind: max(media.get(kind, 0), count) for kind, count in self._media.items()},
            {name: max(by_class.get(name, 0), count) for name, count in self._by_class.items()},
        )
        return self._reported

    def _change(self, tokens: DemandTokens, sign: int) -> None:
        self._requests += sign
        self._tokens += sign * tokens.total
        for kind, count in tokens.media.items():
            self._media[kind] += sign * count
        if tokens.request_class:
            self._by_class.add(tokens.request_class, sign)
