"""Requests that a full service hands to its fallback, and what the gateway reports of admission."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll.adapters.gateway_signals import parse_signals
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.signals_document import build_signals, update_metrics
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import pod, service
from tests.gateway.picker_harness import (
    GATEWAY,
    PickerHarness,
    engine_names,
    picked_engine,
    rejection_of,
    response_headers,
    service_with_slo,
)


def small(**fields: Any) -> Any:
    return service_with_slo("small", **fields)


DOWNGRADE = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
FALLBACK_POD = pod("10.0.1.1:8000", service="small")
DOWNGRADE_AT_ONCE = {**DOWNGRADE, "classes": [{"name": "default", "maxQueueTime": "0s"}]}


def saturated_world(*others: Any, pods: tuple[Any, ...] = (), admission: Any = DOWNGRADE_AT_ONCE) -> PickerHarness:
    """`chat` downgrades at once, and its one place is taken."""
    world = PickerHarness(
        service_with_slo(admission=admission, batch=1, slo={"tpot": "50ms"}), *others, pods=(*engine_names(1), *pods)
    )
    assert picked_engine(world.send()) == "10.0.0.1:8000"
    return world


async def test_downgrade_uses_fallback_admission_and_cluster() -> None:
    world = saturated_world(small(batch=1), pods=(FALLBACK_POD,))
    sent = response_headers(world.send())
    assert (sent["x-plimsoll-cluster"], sent["x-plimsoll-endpoint"]) == ("pick/team/small", "10.0.1.1:8000")
    assert sent["x-plimsoll-response-model"] == "small"
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1}
    assert world.outcomes("team/small") == {"Admitted": 1}
    assert world.service()["requests"]["arrived"] == 2
    assert world.service("team/small")["requests"]["arrived"] == 1
    assert world.running_by_engine("team/small") == {"10.0.1.1:8000": 1}
    queued = world.send_queued()
    assert world.service("team/small")["admission"]["queued"] == 1
    world.advance(20.0)
    reply = rejection_of(queued)
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    assert "'chat'" in str(reply.error["message"])
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1, "ShedSaturated": 1}
    assert world.service("team/small")["requests"]["arrived"] == 1
    assert world.service()["requests"]["rejected"] == {"overloaded": 1}
    assert len(world.picker.admission.services["team/small"].controller.reservations) == 0
    assert len(world.picker.admission.services["team/chat"].controller.reservations) == 1


async def test_fallback_without_admission_accepts_all() -> None:
    world = saturated_world(service("small"), pods=(FALLBACK_POD,))
    assert response_headers(world.send())["x-plimsoll-response-model"] == "small"
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1}
    assert world.service("team/small")["requests"]["arrived"] == 1


async def test_unusable_fallback_returns_original_rejection() -> None:
    nowhere = saturated_world()
    asleep = saturated_world(small())
    full = saturated_world(small(admission={"whenFull": "Shed"}, batch=1, slo={"tpot": "50ms"}), pods=(FALLBACK_POD,))
    picked_engine(full.send("small"))
    for world in (nowhere, asleep, full):
        reply = rejection_of(world.send())
        assert (reply.status, reply.error["code"]) == (429, "overloaded")
        assert "'chat'" in str(reply.error["message"])
        assert world.outcomes() == {"Admitted": 1, "ShedSaturated": 1}
    assert full.service("team/small")["requests"]["arrived"] == 1
    assert full.service("team/small")["requests"]["rejected"] == {}


async def test_mutual_fallbacks_do_not_loop() -> None:
    back = {**DOWNGRADE_AT_ONCE, "fallback": {"name": "chat"}}
    world = saturated_world(small(admission=back, batch=1, slo={"tpot": "50ms"}), pods=(FALLBACK_POD,))
    assert picked_engine(world.send()) == "10.0.1.1:8000"
    assert "'chat'" in str(rejection_of(world.send()).error["message"])
    assert "'small'" in str(rejection_of(world.send("small")).error["message"])


async def test_response_bytes_update_step_time_ratio() -> None:
    world = PickerHarness(service_with_slo(batch=50), pods=engine_names(1))
    replica = world.picker.admission.services["team/chat"].controller.pool.replicas["10.0.0.1:8000"]
    mean = replica.cost_model.output_mean
    for _ in range(60):
        reply = world.send(stream=True)
        assert isinstance(reply, bytes)
        world.clock.advance_to(world.clock.now_s + 4.0)  # four times what the model says
        world.complete(reply, ttft_us=100_000, duration_us=4_000_000, sent_bytes=40_000)
    assert replica.step_time_ratio > 2.0
    assert mean == pytest.approx(700 / 3, rel=1e-3)
    for _ in range(5):  # neither a whole answer in one piece nor a broken one says anything
        before = replica.step_time_ratio
        for fields, record in (({}, {"sent_bytes": 9}), ({"stream": True}, {"sent_bytes": 9, "flags": "UC"})):
            reply = world.send(**fields)
            assert isinstance(reply, bytes)
            world.complete(reply, **({"ttft_us": 1, "duration_us": 9} | record))
        assert replica.step_time_ratio == before


async def test_queue_time_is_excluded_from_ttft_margin() -> None:
    world = PickerHarness(service_with_slo(batch=1), pods=engine_names(1))
    guard = world.picker.admission.services["team/chat"]
    margin = guard.controller._margins[0]
    first = world.send()
    queued = world.send_queued()
    world.clock.advance_to(5.0)
    assert isinstance(first, bytes)
    world.complete(first)
    before = margin.margin_s
    world.clock.advance_to(8.0)
    world.complete(queued.result(), ttft_us=6_040_000, received_us=1_000_000)
    assert margin.margin_s < before  # 40 ms after it was let in, not 5 s


async def test_signals_document_is_read_by_operator() -> None:
    world = PickerHarness(service_with_slo(ready_at_s=10.0))
    world.send_queued()
    document = build_signals(world.picker, GATEWAY, synced=True)
    assert document["version"] == 3
    read = parse_signals(document, GATEWAY, 0.0).reading.services["team/chat"]
    assert (read.queued, read.slots_in_use, read.outcomes) == (1, 0, {"Queued": 1})
    assert read.queued_work_s > 0
    update_metrics(world.picker)
    assert gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_queued_requests", {"service": "team/chat"}) == 1.0
    labels = {"service": "team/chat", "outcome": "Queued"}
    assert (
        gateway_metrics.GATEWAY.get_sample_value("plimsoll_gateway_admission_decisions_total", labels) or 0.0
    ) >= 1.0


def test_metrics_equal_signals_however_often_read() -> None:
    def read(name: str, **labels: str) -> float:
        update_metrics(world.picker)
        return gateway_metrics.GATEWAY.get_sample_value(name, {"service": "team/counted", **labels}) or 0.0

    world = PickerHarness(service_with_slo("counted", batch=50), pods=engine_names(1, service="counted"))
    for count in (1, 2, 3):
        reply = world.send("counted")
        assert isinstance(reply, bytes)
        world.complete(reply)
        for _ in range(2):
            assert read("plimsoll_gateway_requests_arrived_total", attempt="first") == count
            assert read("plimsoll_gateway_admission_decisions_total", outcome="Admitted") == count
            assert read("plimsoll_gateway_requests_completed_total", outcome="succeeded") == count
    world.set_objects()
    assert read("plimsoll_gateway_requests_arrived_total", attempt="first") == 0.0


def test_engine_estimates_are_exported_while_engines_exist() -> None:
    def read(name: str) -> float | None:
        update_metrics(world.picker)
        return gateway_metrics.GATEWAY.get_sample_value(f"plimsoll_gateway_{name}", {"service": "team/learned"})

    world = PickerHarness(service_with_slo("learned", batch=50), pods=engine_names(1, service="learned"))
    assert (read("step_time_ratio"), read("ttft_residual_seconds")) == (1.0, 0.0)
    for at_s in range(1, 9):
        replies = [world.send("learned") for _ in range(20)]
        world.clock.advance_to(float(at_s))
        for reply in replies:
            assert isinstance(reply, bytes)
            world.complete(reply, ttft_us=at_s * 1_000_000 - 100_000, received_us=(at_s - 1) * 1_000_000)
    assert read("ttft_residual_seconds") == 0.0  # an empty engine owes nothing
    for _ in range(20):
        world.send("learned")
    late_s = read("ttft_residual_seconds")
    assert late_s is not None
    assert late_s > 0.0
    world.set_objects()
    assert read("step_time_ratio") is None


async def test_client_disconnect_record_ends_queued_request() -> None:
    world = PickerHarness(service_with_slo())
    queued = world.send_queued()
    world.picker.reports.on_access_record(AccessRecord(request_id="t1", flags="DC"), 1.0)
    assert queued.cancelled()
    await asyncio.sleep(0)
    assert world.outcomes() == {"Queued": 1, "ClientGone": 1}
    assert len(world.picker.queue) == 0
