"""Counts the requests of one service that are demand, and their prompt tokens, for the operator.

Problem: an engine's rejection of a request, as too long for the model for example, is known only after the request has
counted. A count that decreases looks like a restart to its readers.

Idea: report the highest value so far of what was added less what was withdrawn. A request that is added and withdrawn
between two reports was never there. One that is withdrawn later is made up for by the next arrivals.
"""

from __future__ import annotations


class DemandCounter:
    """First attempts that are demand, and their tokens. `report` never decreases."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0  # added less withdrawn
        self._reported_requests = self._reported_tokens = 0

    def add(self, tokens: int) -> None:
        """Count a request with so many prompt tokens."""
        self._requests += 1
        self._tokens += tokens

    def withdraw(self, tokens: int) -> None:
        """Take a request off that was added with so many prompt tokens."""
        self._requests -= 1
        self._tokens -= tokens

    def report(self) -> tuple[int, int]:
        """Returns the requests and their prompt tokens since the start."""
        self._reported_requests = max(self._reported_requests, self._requests)
        self._reported_tokens = max(self._reported_tokens, self._tokens)
        return self._reported_requests, self._reported_tokens
