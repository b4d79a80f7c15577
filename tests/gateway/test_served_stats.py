"""What the gateway counts as served: successes alone, by length class and by tenant, in bounded series."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.served_stats import (
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    OUTPUT_CLASSES,
    PROMPT_CLASSES,
    ServedRequest,
    ServedStats,
    length_class,
)
from plimsoll.gateway.signals_document import update_metrics
from plimsoll.gateway.tenant_labels import MAX_NAMED_TENANTS, MAX_TENANT_CHARS, OTHER_TENANTS
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import pod, service
from tests.gateway.one_queue_harness import Gateways, eventually
from tests.gateway.picker_harness import PickerHarness, service_with_slo

KEY = "team/chat"
ENGINE = pod("10.0.0.1:8000")
TENANT = "x-gateway-inference-fairness-id"
DONE = {"ttft_us": 200_000, "received_us": 0, "duration_us": 2_200_000, "sent_bytes": 20_000}


@pytest.fixture(autouse=True)
def no_series() -> Iterator[None]:
    gateway_metrics.remove_gateway_series(KEY)
    yield
    gateway_metrics.remove_gateway_series(KEY)


def value(name: str, **labels: str) -> float | None:
    return gateway_metrics.GATEWAY.get_sample_value(f"plimsoll_gateway_{name}", {"service": KEY, **labels})


def served(**changes: Any) -> ServedRequest:
    fields: dict[str, Any] = {
        "tenant": "a", "prompt_tokens": 100, "sequences": 1, "output_tokens": 101, "is_output_known": True,
        "work_s": 0.5, "queued_s": 0.0, "ttft_s": 0.2, "e2e_s": 2.2, "is_stream": True, "is_within_slo": True,
    }  # fmt: skip
    return ServedRequest(**(fields | changes))


@pytest.mark.parametrize(("tokens", "name"), [(0, "0-1k"), (1024, "0-1k"), (1025, "1k-8k"), (32_768, "8k-32k")])
def test_prompt_class_includes_its_bound(tokens: int, name: str) -> None:
    assert length_class(tokens, PROMPT_CLASSES, LONGEST_PROMPT) == name


def test_length_beyond_all_bounds_is_longest_class() -> None:
    assert length_class(10**9, PROMPT_CLASSES, LONGEST_PROMPT) == LONGEST_PROMPT
    assert length_class(1025, OUTPUT_CLASSES, LONGEST_OUTPUT) == LONGEST_OUTPUT


@pytest.mark.parametrize(
    ("changes", "tpot_s"),
    [
        ({}, 0.02),
        ({"sequences": 2, "output_tokens": 202}, 0.02),
        ({"is_stream": False}, None),
        ({"is_output_known": False}, None),
        ({"output_tokens": 1}, None),
        ({"e2e_s": 0.1}, 0.0),
    ],
)
def test_tpot_needs_a_stream_of_known_length(changes: dict[str, Any], tpot_s: float | None) -> None:
    assert served(**changes).tpot_s == (tpot_s if tpot_s is None else pytest.approx(tpot_s))


def test_latencies_fall_into_classes() -> None:
    stats = ServedStats(KEY)
    stats.record(served(queued_s=3.0))
    stats.record(served(prompt_tokens=9000, output_tokens=2000))
    stats.record(served(is_stream=False, is_output_known=False))
    stats.update_metrics()
    assert value("ttft_by_prompt_seconds_count", prompt="0-1k") == 1
    assert value("ttft_by_prompt_seconds_sum", prompt="8k-32k") == pytest.approx(0.2)
    assert value("tpot_by_output_seconds_sum", output="64-256") == pytest.approx(0.02)
    assert value("tpot_by_output_seconds_count", output="1k+") == 1
    assert (value("queue_seconds_count"), value("queue_seconds_sum")) == (3, 3.0)


def test_tenants_are_counted_by_name_up_to_limit() -> None:
    stats = ServedStats(KEY)
    stats.record(served(tenant="x" * (MAX_TENANT_CHARS + 1)))
    for number in range(MAX_NAMED_TENANTS + 5):
        stats.record(served(tenant=f"t{number}"))
    stats.update_metrics()
    stats.update_metrics()
    assert value("served_requests_total", tenant="t0") == 1
    assert value("served_requests_total", tenant=OTHER_TENANTS) == 6
    assert value("served_tokens_total", tenant=OTHER_TENANTS, kind="output") == 606
    assert value("served_work_seconds_total", tenant="t1") == 0.5
    assert value("served_requests_total", tenant=f"t{MAX_NAMED_TENANTS}") is None


def test_only_tokens_within_slo_are_goodput() -> None:
    stats = ServedStats(KEY)
    stats.record(served())
    stats.record(served(is_within_slo=False))
    stats.update_metrics()
    assert value("goodput_tokens_total") == 101
    assert value("served_tokens_total", tenant="a", kind="output") == 202


def test_picker_counts_successes_and_nothing_else() -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Shed"}, batch=1), pods=(ENGINE,))

    def send() -> bytes:
        reply = harness.send(headers={TENANT: "acme"}, stream=True)
        assert isinstance(reply, bytes)
        return reply

    first = send()
    send()  # is rejected: the engine is full
    harness.complete(first, **DONE)
    harness.complete(send(), **DONE | {"ttft_us": 30_000_000, "duration_us": 31_000_000})  # misses its TTFT target
    harness.complete(send(), flags="UC", **DONE)  # cut
    harness.complete(send(), **DONE | {"status": 400})
    harness.complete(send(), flags="DC", **DONE)  # its client has left
    update_metrics(harness.picker)
    assert value("served_requests_total", tenant="acme") == 2
    output = value("served_tokens_total", tenant="acme", kind="output")
    assert output is not None
    assert value("goodput_tokens_total") == pytest.approx(output / 2)
    assert (value("served_work_seconds_total", tenant="acme") or 0.0) > 0
    assert value("ttft_by_prompt_seconds_count", prompt="0-1k") == 2


def test_embeddings_have_no_output_tokens() -> None:
    obj = service_with_slo("chat")
    obj["spec"]["model"]["task"] = "embed"
    harness = PickerHarness(obj, pods=(ENGINE,))
    reply = harness.picker.check(b'{"model":"chat","input":["a","b"]}', {}, 0.0, ROUTES["/v1/embeddings"])
    assert isinstance(reply, bytes)
    harness.complete(reply, **DONE)
    update_metrics(harness.picker)
    assert value("served_tokens_total", tenant="", kind="output") == 0
    assert (value("served_tokens_total", tenant="", kind="prompt") or 0) > 0


def test_service_without_slo_has_no_served_series() -> None:
    harness = PickerHarness(service(), pods=(ENGINE,))
    reply = harness.send()
    assert isinstance(reply, bytes)
    harness.complete(reply, **DONE)
    update_metrics(harness.picker)
    assert value("served_requests_total", tenant="") is None


async def test_request_that_the_owner_decided_is_served_once(tmp_path: Path) -> None:
    """At the gateway that carried it, which has the times of its response."""
    async with Gateways(tmp_path, 2, service_with_slo("chat"), pods=(ENGINE,)) as gateways:
        (carrier,), owner = gateways.others(), gateways.owner()
        carrier.complete(await carrier.ask("hi", stream=True), **DONE)
        await eventually(lambda: owner.admits == 0, "the owner has counted its end")
        owner.picker.stats(KEY).served.update_metrics()
        assert value("served_requests_total", tenant="") is None
        carrier.picker.stats(KEY).served.update_metrics()
        assert value("served_requests_total", tenant="") == 1
        assert (value("served_work_seconds_total", tenant="") or 0.0) > 0
