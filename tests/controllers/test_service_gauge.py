"""Gauges with series for each service: the text of prometheus_client, in bounded pieces."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.controllers import http_server
from plimsoll.telemetry import operator_metrics, service_gauge
from plimsoll.telemetry.service_gauge import SLICE_SIZE, ServiceGauge

LABELS = ["service", "tier", "model"]
MODEL = 'a "b" \\ \n c é'
VALUES = (0, 1, True, -1, 0.25, 12_345_678.0, 1e-9, float("inf"), float("-inf"), float("nan"))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def gauge(registry: CollectorRegistry) -> ServiceGauge:
    return ServiceGauge("plimsoll_x", "One \\ line.\nAnother.", LABELS, registry)


def page(registry: CollectorRegistry) -> str:
    return b"".join(service_gauge.page(registry)).decode()


def test_page_is_what_prometheus_client_writes(registry: CollectorRegistry, gauge: ServiceGauge) -> None:
    library = CollectorRegistry()
    same = Gauge("plimsoll_x", "One \\ line.\nAnother.", LABELS, registry=library)
    for number, value in enumerate(VALUES):
        gauge.set(7.0, "team/a", f"t{number}", MODEL)
        gauge.set(value, "team/a", f"t{number}", MODEL)
        same.labels("team/a", f"t{number}", MODEL).set(value)
    for one in (registry, library):
        Counter("plimsoll_y", "Other.", registry=one)
    created = "plimsoll_y_created "
    expected, found = (
        [line for line in text.splitlines() if not line.startswith(created)]
        for text in (generate_latest(library).decode(), page(registry))
    )
    assert found == expected
    assert generate_latest(registry).decode().splitlines()[: len(VALUES)] == expected[: len(VALUES)]


@pytest.mark.parametrize(
    "text", ["", MODEL, "\\n", "\\", '"', '",tier="x', "a}", "a\r\n", "\u2028\x85\x0b\x00", "# TYPE x", "é漢😀"]
)
def test_page_is_read_as_it_was_set(registry: CollectorRegistry, gauge: ServiceGauge, text: str) -> None:
    for other in ("", "other"):
        gauge.set(2.5, "team/a", text + other, text)
    (family,) = text_string_to_metric_families(page(registry))
    assert (family.name, family.type, family.documentation) == ("plimsoll_x", "gauge", "One \\ line.\nAnother.")
    assert [(one.labels, one.value) for one in family.samples] == [
        ({"service": "team/a", "tier": text + other, "model": text}, 2.5) for other in ("", "other")
    ]


def test_page_of_the_operator_has_each_series_once() -> None:
    operator_metrics.AUTOSCALER_READY.set(1, "team/once", "serve")
    seen = Counts[str]()
    for family in text_string_to_metric_families(page(operator_metrics.OPERATOR)):
        seen[family.name] += 1
        seen.update(f"{one.name} {sorted(one.labels.items())}" for one in family.samples)
    operator_metrics.AUTOSCALER_READY.remove_service("team/once")
    assert set(seen.values()) == {1}


def test_removed_series_leave_the_page(registry: CollectorRegistry, gauge: ServiceGauge) -> None:
    for service, tier in (("team/a", "x"), ("team/a", "y"), ("team/b", "x")):
        gauge.set(1.0, service, tier, "m")
    gauge.remove("team/a", "x", "m")
    gauge.remove("team/a", "x", "m")
    gauge.remove("team/c", "x", "m")
    assert [line for line in page(registry).splitlines() if "x{" in line] == [
        'plimsoll_x{model="m",service="team/a",tier="y"} 1.0',
        'plimsoll_x{model="m",service="team/b",tier="x"} 1.0',
    ]
    gauge.remove_service("team/b")
    assert registry.get_sample_value("plimsoll_x", {"service": "team/a", "tier": "y", "model": "m"}) == 1.0
    gauge.remove("team/a", "y", "m")
    assert gauge._series == {}


def test_series_with_missing_label_is_refused(gauge: ServiceGauge) -> None:
    with pytest.raises(ValueError, match="has the labels"):
        gauge.set(1.0, "team/a")


async def test_page_of_a_thousand_services_is_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    monkeypatch.setattr(operator_metrics, "OPERATOR", registry := CollectorRegistry())
    gauge = ServiceGauge("plimsoll_x", "One.", ["service", "type"], registry)
    for number in range(1000 * 10):
        gauge.set(1.0, f"team/{number // 10}", str(number % 10))
    pieces = service_gauge.page

    def record(one: CollectorRegistry) -> Iterator[bytes]:
        for piece in pieces(one):
            sizes.append(piece.count(b"\n"))
            yield piece

    monkeypatch.setattr(service_gauge, "page", record)
    body = (await http_server._metrics(make_mocked_request("GET", "/metrics"))).body
    assert isinstance(body, bytes)
    assert body.count(b"\n") == sum(sizes) == 10_002
    assert max(sizes) <= 10 * SLICE_SIZE
