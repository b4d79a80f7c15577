"""Queries a Prometheus that scrapes gateways and engines: request history of services, and current engine metrics.

Problem: Prometheus may be down, slow, of another cluster, or full of gaps. An answer has at most 11,000 points, and a
pod that two jobs scrape appears twice.

Idea: the history is queried week by week in steps of a minute. For engines the samples of the last scrape are written
as the metrics page they came from, dated by the scrape. Queries have a timeout and no retry. Any failure is one
BackendUnavailable, and impossible samples are skipped.
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

from plimsoll.adapters.engine_metrics import MetricsReader, reader_of
from plimsoll.core.errors import BackendUnavailable, cause_of
from plimsoll.core.ports import EngineReading
from plimsoll.engines.engine import MetricMap

QUERY_STEP_S: Final = 60
MAX_QUERY_SPAN_S: Final = 7 * 86400.0  # 10,081 points
QUERY_TIMEOUT_S: Final = 5.0
MAX_RATE_PER_S: Final = 1e9  # requests per second; a larger value is an error
MAX_PODS_PER_QUERY: Final = 40  # limits the length of the URL
MAX_SCRAPE_AGE_S: Final = 30  # an older scrape is of no use
_RATE_QUERY: Final = 'sum(rate(plimsoll_gateway_demand_requests_total{{service="{service}"}}[1m]))'
_ENGINES_QUERY: Final = '{{namespace="{namespace}",pod=~"{pods}",__name__=~"{names}"}}[{seconds}s]'
_TARGET_LABELS: Final = ("job", "instance")  # identify a scrape target


class PrometheusHistory:
    """Implements `core.ports.MetricsHistory`. It blocks: call it in a thread."""

    def __init__(self, url: str, timeout_s: float = QUERY_TIMEOUT_S) -> None:
        """url: of the HTTP API, without `/api/v1`. timeout_s: per query."""
        self._url = url.rstrip("/")
        self._client = PrometheusConnect(url=self._url, retry=0, timeout=timeout_s)  # type: ignore[arg-type]

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """See `MetricsHistory`. Raises BackendUnavailable."""
        samples: list[tuple[float, float]] = []
        from_s = start_s
        while from_s < end_s:
            to_s = min(end_s, from_s + MAX_QUERY_SPAN_S)
            samples += _valid_samples(
                self._query_range(_RATE_QUERY.format(service=service), from_s, to_s), from_s, to_s
            )
            from_s = to_s + QUERY_STEP_S
        return samples

    def engine_readings(self, namespace: str, pods: Mapping[str, MetricMap]) -> list[EngineReading]:
        """Readings of the engines in these pods, dated by their last scrape; pods without samples are absent.

        pods: the metric names of each pod's engine. Raises BackendUnavailable.
        """
        by_map: defaultdict[MetricMap, list[str]] = defaultdict(list)
        for pod, metric_map in pods.items():
            by_map[metric_map].append(pod)
        readings: list[EngineReading] = []
        for metric_map, names in by_map.items():
            reader = reader_of(metric_map)
            for offset in range(0, len(names), MAX_PODS_PER_QUERY):
                readings += self._readings(namespace, names[offset : offset + MAX_PODS_PER_QUERY], reader)
        return readings

    def _readings(self, namespace: str, pods: Sequence[str], reader: MetricsReader) -> list[EngineReading]:
        # Pod names need no escaping: their dots match themselves.
        query = _ENGINES_QUERY.format(
            namespace=namespace, pods="|".join(pods), names=reader.names_regex, seconds=MAX_SCRAPE_AGE_S
        )
        with self._as_unavailable():
            series = self._client.custom_query(query)
        return list(_readings(series, reader))

    def _query_range(self, query: str, start_s: float, end_s: float) -> Any:
        first, last = datetime.fromtimestamp(start_s, UTC), datetime.fromtimestamp(end_s, UTC)
        with self._as_unavailable():
            series = self._client.custom_query_range(query, first, last, str(QUERY_STEP_S))
            return series[0]["values"] if series else []

    @contextlib.contextmanager
    def _as_unavailable(self) -> Iterator[None]:
        """Convert any error of a query into BackendUnavailable."""
        try:
            yield
        except (PrometheusApiClientException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise BackendUnavailable(f"Prometheus at {self._url}: {cause_of(error)}") from error


def _valid_samples(values: Any, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    """The samples within the time range, in order, and with a possible rate."""
    previous_s = -math.inf
    for value in values if isinstance(values, list) else ():
        try:
            at_s, rate = (float(part) for part in value)
        except (TypeError, ValueError):
            continue
        if start_s - 1.0 <= at_s <= end_s + 1.0 and at_s > previous_s and 0.0 <= rate <= MAX_RATE_PER_S:
            previous_s = at_s
            yield at_s, rate


def _readings(series: Any, reader: MetricsReader) -> Iterator[EngineReading]:
    """One reading per pod, from its most recent scrape by one job."""
    pods: defaultdict[str, defaultdict[tuple[str, ...], list[tuple[float, str]]]]
    pods = defaultdict(lambda: defaultdict(list))
    sample_labels = ("le", *(label for label, _ in reader.labels.values()))  # those that the engine sets itself
    for row in series if isinstance(series, list) else ():
        try:
            labels: Mapping[str, str] = row["metric"]
            at_s, value = row["values"][-1]
            target = tuple(labels.get(name, "") for name in _TARGET_LABELS)
            pods[labels["pod"]][target].append((float(at_s), _format_sample(labels, value, sample_labels)))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue
    for pod, targets in pods.items():
        scraped_s, _, target = max(
            (max(line[0] for line in lines), len(lines), name) for name, lines in targets.items()
        )
        page = "\n".join(line for at_s, line in targets[target] if at_s == scraped_s)
        try:
            yield reader.parse(page.encode(), pod, scraped_s)
        except ValueError:
            continue


def _format_sample(labels: Mapping[str, str], value: str, sample_labels: Sequence[str]) -> str:
    """The sample as the engine exports it, without the labels that Prometheus adds."""
    label_text = ",".join(f'{name}="{labels[name]}"' for name in sample_labels if name in labels)
    return f"{labels['__name__']}{{{label_text}}} {float(value)!r}"
