"""A gauge with series for each InferenceService, for pages of ten thousands of lines.

Problem: prometheus_client takes 10 µs of CPU for each line of a page, and 0.7 KB of memory for each series. To remove
the series of one service it looks at those of all.

Idea: values by service, and the labels of a series are formatted once. The text is what prometheus_client writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString
SLICE_SIZE: Final = 250  # services; the largest family has some 10 lines for each


class ServiceGauge(Collector):
    """Values by label values, of which `service`, the first, is NAMESPACE/NAME."""

    def __init__(self, name: str, documentation: str, labels: list[str], registry: CollectorRegistry) -> None:
        """labels: names of the labels."""
        assert labels[0] == "service"
        self._name, self._documentation, self._labelnames = name, documentation, tuple(labels)
        self._order = sorted(range(len(labels)), key=labels.__getitem__)
        # By service and the other label values: the text up to the value, and the value.
        self._series: dict[str, dict[tuple[str, ...], tuple[str, float]]] = {}
        registry.register(self)

    def set(self, value: float, service: str, *others: str) -> None:
        """Set a series. others: the values of the other labels."""
        series = self._series.setdefault(service, {})
        known = series.get(others)
        if known is None:
            series[others] = self._head(service, *others), value
        elif known[1] != value:
            series[others] = known[0], value

    def remove(self, service: str, *others: str) -> None:
        """Remove a series, if it is there."""
        series = self._series.get(service, {})
        if series.pop(others, None) is not None and not series:
            del self._series[service]

    def remove_service(self, service: str) -> None:
        """Remove all series of a service."""
        self._series.pop(service, None)

    def clear(self) -> None:
        """Remove all series."""
        self._series.clear()

    def text(self) -> Iterator[bytes]:
        """The family in Prometheus' text format, some services at a time."""
        yield generate_latest(_One(self._family()))
        services = iter(list(self._series.values()))
        while group := list(islice(services, SLICE_SIZE)):
            lines = [f"{head}{_number(value)}\n" for series in group for head, value in series.values()]
            yield "".join(lines).encode()

    def collect(self) -> Iterable[Metric]:
        """The family with its samples, as prometheus_client has it."""
        family = self._family()
        for service, series in self._series.items():
            for others, (_, value) in series.items():
                family.add_metric((service, *others), value)
        return (family,)

    def describe(self) -> Iterable[Metric]:
        """The family without samples."""
        return (self._family(),)

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(self._name, self._documentation, labels=self._labelnames)

    def _head(self, *values: str) -> str:
        if len(values) != len(self._labelnames):
            raise ValueError(f"{self._name} has the labels {self._labelnames}, not {len(values)}")
        labels = ",".join(f'{self._labelnames[at]}="{_escaped(values[at])}"' for at in self._order)
        return f"{self._name}{{{labels}}} "


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Returns the family."""
        return (self._family,)


def page(registry: CollectorRegistry) -> Iterator[bytes]:
    """The page of a registry in pieces, between which other work may run."""
    for collector in list(registry._collector_to_names):  # `collect` would make an object of each sample
        if isinstance(collector, ServiceGauge):
            yield from collector.text()
        else:
            for family in collector.collect():
                yield generate_latest(_One(family))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
