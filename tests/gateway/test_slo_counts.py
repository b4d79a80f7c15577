"""Answers held against what was promised of each: by its class, its prompt, and the service that answered it."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.gateway_signals import parse_signals
from plimsoll.core.ports import ServiceReading, SloCounts
from plimsoll.gateway.signals_document import build_signals
from tests.gateway.kube_objects import pod, service
from tests.gateway.picker_harness import GATEWAY, PickerHarness, engine_names, picked_engine, service_with_slo

SLO = {"ttft": "1s", "ttftPerKToken": "1s", "tpot": "50ms", "e2e": "10s"}
CLASSES = {"classes": [{"name": "batch", "slo": {"ttft": "60s"}}, {"name": "default"}]}


def reading(world: PickerHarness, key: str = "team/chat") -> ServiceReading:
    """What the operator reads of it."""
    return parse_signals(build_signals(world.picker, GATEWAY, synced=True), GATEWAY, 0.0).reading.services[key]


def read_slo_counts(world: PickerHarness, key: str = "team/chat") -> SloCounts:
    found = reading(world, key).slo_counts
    assert found is not None
    return found


def complete_request(world: PickerHarness, first_s: float, last_s: float, tokens: int = 1, **fields: Any) -> None:
    """A request with so long a prompt that was answered; headers and others of `World.ask` in fields."""
    record = {name: fields.pop(name) for name in ("status", "flags") if name in fields}
    reply = world.send(prompt=[1] * tokens, **fields)
    assert isinstance(reply, bytes)
    world.complete(reply, ttft_us=int(1e6 * first_s), duration_us=int(1e6 * last_s), **record)


@pytest.mark.parametrize("model", [True, False], ids=["with a gate", "before there is a gate"])
async def test_slo_counts_request_missing_both_targets_once(model: bool) -> None:
    world = PickerHarness(service_with_slo(slo=SLO, batch=50, model=model), pods=engine_names(1))
    for first_s, last_s in ((0.5, 5.0), (1.5, 5.0), (0.5, 11.0), (1.5, 11.0)):
        complete_request(world, first_s, last_s)
    assert read_slo_counts(world) == SloCounts(4.0, 3.0, 2.0, 2.0)


async def test_slo_counts_allow_ttft_per_prompt_token() -> None:
    world = PickerHarness(service_with_slo(slo=SLO, batch=50), pods=engine_names(1))
    complete_request(world, 2.9, 5.0, tokens=2000)
    complete_request(world, 3.1, 5.0, tokens=2000)
    assert read_slo_counts(world) == SloCounts(2.0, 1.0, 1.0, 0.0)


async def test_slo_counts_exact_target_is_within_slo() -> None:
    world = PickerHarness(service_with_slo(slo={"ttft": "1s", "e2e": "10s"}, batch=50), pods=engine_names(1))
    complete_request(world, 1.0, 10.0)
    assert read_slo_counts(world) == SloCounts(1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("model", [True, False], ids=["with a gate", "before there is a gate"])
async def test_slo_counts_use_class_targets(model: bool) -> None:
    manifest = service_with_slo("chat", CLASSES, slo=SLO, batch=50, classes=("batch", "default"), model=model)
    world = PickerHarness(manifest, pods=engine_names(1))
    for name in ("batch", "default", "unheard-of"):
        complete_request(world, 30.0, 40.0, headers={"x-gateway-inference-objective": name})
    assert read_slo_counts(world) == SloCounts(3.0, 2.0, 2.0, 2.0)


async def test_slo_counts_report_requests_per_tpot_target() -> None:
    """Who was too slow is not seen here; engines tell how many were, and this tells against what."""
    classes = {"classes": [{"name": "batch", "slo": {"ttft": "60s"}}, {"name": "chat", "slo": {"tpot": "30ms"}}]}
    manifest = service_with_slo("chat", classes, slo=SLO, batch=50, classes=("batch", "chat"))
    world = PickerHarness(manifest, pods=engine_names(1))
    for name in ("chat", "batch", "chat"):
        complete_request(world, 0.1, 900.0, headers={"x-gateway-inference-objective": name})
    assert read_slo_counts(world) == SloCounts(3.0, 0.0, 0.0, 0.0)
    assert reading(world).by_tpot_target == {0.03: 2.0}


async def test_slo_counts_fallback_response_uses_its_slo() -> None:
    at_once = {
        "whenFull": "Downgrade",
        "fallback": {"name": "small"},
        "classes": [{"name": "default", "maxQueueTime": "0s"}],
    }
    world = PickerHarness(
        service_with_slo("chat", at_once, slo={"tpot": "50ms"}, batch=1),
        service_with_slo("small", slo={"ttft": "20s"}, batch=50),
        pods=(*engine_names(1), pod("10.0.1.1:8000", service="small")),
    )
    assert picked_engine(world.send()) == "10.0.0.1:8000"
    reply = world.send()
    assert isinstance(reply, bytes)
    world.complete(reply, ttft_us=21_000_000, duration_us=22_000_000)
    assert read_slo_counts(world, "team/small") == SloCounts(1.0, 1.0, 1.0, 0.0)
    assert read_slo_counts(world).responses == 0.0


@pytest.mark.parametrize(
    "record", [{"status": 400}, {"status": 503, "flags": "UC"}, {"flags": "DC"}], ids=["rejected", "cut", "client left"]
)
async def test_slo_counts_ignore_failed_responses(record: dict[str, Any]) -> None:
    world = PickerHarness(service_with_slo(slo=SLO, batch=50), pods=engine_names(1))
    complete_request(world, 5.0, 50.0, **record)
    assert read_slo_counts(world) == SloCounts(0.0, 0.0, 0.0, 0.0)


async def test_slo_counts_tpot_only_slo_has_no_misses() -> None:
    world = PickerHarness(service_with_slo(slo={"tpot": "50ms"}, batch=50), pods=engine_names(1))
    complete_request(world, 500.0, 900.0)
    assert read_slo_counts(world) == SloCounts(1.0, 0.0, 0.0, 0.0)


async def test_slo_counts_without_slo_are_zero() -> None:
    world = PickerHarness(service("chat"), pods=engine_names(1))
    complete_request(world, 500.0, 900.0)
    assert read_slo_counts(world) == SloCounts(0.0, 0.0, 0.0, 0.0)


async def test_slo_counts_use_targets_at_admission() -> None:
    world = PickerHarness(service_with_slo(slo=SLO, batch=50), pods=engine_names(1))
    reply = world.send()
    assert isinstance(reply, bytes)
    world.set_objects(service_with_slo(slo={"ttft": "1ms"}, batch=50), pods=engine_names(1))
    world.complete(reply, ttft_us=500_000, duration_us=5_000_000)
    assert read_slo_counts(world) == SloCounts(1.0, 0.0, 0.0, 0.0)
