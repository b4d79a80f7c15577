"""What a Prometheus knows that scraped the gateways and the engines: the past of services, and engines by now.

Problem: it may be away, slow, of another cluster, or full of gaps; one answer has at most 11,000 points, and a pod that
two jobs scrape is there twice.

Idea: of the past a question a week, at steps of a minute; of engines the samples of the last scrape, with its own time,
written down again as the page that they came from. A time limit and no retry; whatever is wrong is one error in words,
and a sample that cannot be is left out, like one that was never taken.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect

from plimsoll.adapters import scrape
from plimsoll.core.errors import Unavailable
from plimsoll.core.ports import EngineReading

STEP_S: Final = 60
AT_ONCE_S: Final = 7 * 86400.0  # 10,081 points
TIMEOUT_S: Final = 5.0
MOST_PER_S: Final = 1e9  # requests; more is a number gone wrong
PODS_AT_ONCE: Final = 40  # in one question, which is a URL
SCRAPED_S: Final = 30  # a scrape longer ago is of no use
_RATE: Final = 'sum(rate(plimsoll_gateway_requests_arrived_total{{service="{service}",attempt="first"}}[1m]))'
_ENGINES: Final = '{{namespace="{namespace}",pod=~"{pods}",__name__=~"{names}"}}[{seconds}s]'
_TARGET: Final = ("job", "instance")  # together they name what was scraped
_KEPT: Final = ("le", "source")  # labels that tell what a sample counts


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

    def engines(self, namespace: str, pods: Sequence[str]) -> list[EngineReading]:
        """Engines in these pods at their last scrape, dated by it; one of which nothing is known is absent.

        Raises Unavailable.
        """
        found: list[EngineReading] = []
        for first in range(0, len(pods), PODS_AT_ONCE):
            some = "|".join(pods[first : first + PODS_AT_ONCE])  # DNS labels: nothing to escape but dots, which match
            query = _ENGINES.format(namespace=namespace, pods=some, names=scrape.NAMES, seconds=SCRAPED_S)
            with self._in_words():
                series = self._client.custom_query(query)
            found += _readings(series)
        return found

    def _ask(self, query: str, start_s: float, end_s: float) -> Any:
        first, last = datetime.fromtimestamp(start_s, UTC), datetime.fromtimestamp(end_s, UTC)
        with self._in_words():
            series = self._client.custom_query_range(query, first, last, str(STEP_S))
            return series[0]["values"] if series else []

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Whatever is wrong with an answer, as Unavailable."""
        try:
            yield
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


def _readings(series: Any) -> Iterator[EngineReading]:
    """One for each pod that has any: of what was scraped last there, by one job."""
    pods: defaultdict[str, defaultdict[tuple[str, ...], list[tuple[float, str]]]]
    pods = defaultdict(lambda: defaultdict(list))
    for one in series if isinstance(series, list) else ():
        try:
            labels: Mapping[str, str] = one["metric"]
            at_s, value = one["values"][-1]
            target = tuple(labels.get(name, "") for name in _TARGET)
            pods[labels["pod"]][target].append((float(at_s), _line(labels, value)))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue
    for pod, targets in pods.items():
        last_s, _, target = max((max(line[0] for line in lines), len(lines), name) for name, lines in targets.items())
        page = "\n".join(line for at_s, line in targets[target] if at_s == last_s)
        try:
            yield scrape.read(page.encode(), pod, last_s)
        except ValueError:
            continue


def _line(labels: Mapping[str, str], value: str) -> str:
    """The sample as the engine wrote it, without what was put there by who scraped it."""
    kept = ",".join(f'{name}="{labels[name]}"' for name in _KEPT if name in labels)
    return f"{labels['__name__']}{{{kept}}} {float(value)!r}"
