"""The past of services, as a Prometheus that scraped the gateways knows it.

Problem: it may be away, slow, of another cluster, or full of gaps, and one answer has at most 11,000 points.

Idea: a question a week, at steps of a minute, with a time limit and no retry; whatever is wrong is one error in words,
and a sample that cannot be is left out, like one that was never taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect

from plimsoll.core.errors import Unavailable

STEP_S: Final = 60
AT_ONCE_S: Final = 7 * 86400.0  # 10,081 points
TIMEOUT_S: Final = 5.0
MOST_PER_S: Final = 1e9  # requests; more is a number gone wrong
_RATE: Final = 'sum(rate(plimsoll_gateway_requests_arrived_total{{service="{service}",attempt="first"}}[1m]))'


class Prometheus:
    """Implements `core.ports.History`. Blocks: call it in a thread."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """url: of the HTTP API, without `/api/v1`. timeout_s: of one question."""
        self._url = url.rstrip("/")
        self._client = PrometheusConnect(url=self._url, retry=0, timeout=timeout_s)  # type: ignore[arg-type]

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """See `History`. Raises Unavailable."""
        found: list[tuple[float, float]] = []
        first_s = start_s
        while first_s < end_s:
            last_s = min(end_s, first_s + AT_ONCE_S)
            found += _samples(self._ask(_RATE.format(service=service), first_s, last_s), first_s, last_s)
            first_s = last_s + STEP_S
        return found

    def _ask(self, query: str, start_s: float, end_s: float) -> Any:
        first, last = datetime.fromtimestamp(start_s, UTC), datetime.fromtimestamp(end_s, UTC)
        try:
            series = self._client.custom_query_range(query, first, last, str(STEP_S))
            return series[0]["values"] if series else []
        except (PrometheusApiClientException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise Unavailable(f"Prometheus at {self._url}: {error or type(error).__name__}") from error


def _samples(values: Any, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """Those that can be: of this time, in order, and a rate."""
    before_s = -math.inf
    for value in values if isinstance(values, list) else ():
        try:
            at_s, rate = (float(part) for part in value)
        except (TypeError, ValueError):
            continue
        if start_s - 1.0 <= at_s <= end_s + 1.0 and at_s > before_s and 0.0 <= rate <= MOST_PER_S:
            before_s = at_s
            yield at_s, rate
