"""Which requests count as demand, which sizes the fleet: those that capacity serves or would have served."""

from __future__ import annotations

import pytest

from plimsoll.core.ports import NO_DEMAND_REASONS
from plimsoll.core.types import MediaKind
from plimsoll.gateway.demand_counter import DemandCounter, DemandTokens
from plimsoll.gateway.errors import RejectionReason
from plimsoll.gateway.recent_counter import MAX_NAMES
from plimsoll.gateway.signals_document import update_metrics
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import LIMITS, pod
from tests.gateway.picker_harness import (
    PickerHarness,
    engine_names,
    picked_engine,
    rejection_of,
    service_with_slo,
)

TENANT = {"x-gateway-inference-fairness-id": "team"}
QUOTA = {"tenants": [{"name": "team", "requestsPerSecond": "0.1"}]}
DOWNGRADE = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
TOO_LARGE = "x" * 4_000_000  # far more tokens than an engine's KV cache


def demand(world: PickerHarness, key: str = "team/chat") -> tuple[int, int, int]:
    requests = world.service(key)["requests"]
    return requests["arrived"], requests["arrived_tokens"], requests["retried"]


def exported(world: PickerHarness, name: str, **labels: str) -> float:
    update_metrics(world.picker)
    return gateway_metrics.GATEWAY.get_sample_value(name, {"service": "team/chat", **labels}) or 0.0


def test_every_no_demand_reason_is_a_rejection_reason() -> None:
    assert set(RejectionReason) >= NO_DEMAND_REASONS


@pytest.mark.parametrize("reason", RejectionReason)
def test_only_lack_of_capacity_is_demand(reason: RejectionReason) -> None:
    capacity = {
        "overloaded",
        "model_starting",
        "no_endpoint",
        "prefill_unavailable",
        "deadline_exceeded",
        "adapters_busy",
    }
    assert reason.is_demand == (reason.value in capacity)


async def test_request_over_quota_is_no_demand() -> None:
    world = PickerHarness(service_with_slo(admission=QUOTA, batch=8), pods=engine_names(1))
    picked_engine(world.send(headers=TENANT))
    admitted = demand(world)
    for _ in range(20):
        assert rejection_of(world.send(headers=TENANT)).error["code"] == "quota_exceeded"
    assert demand(world) == admitted
    assert world.picker.admission.services["team/chat"].controller.offered_work_s < 1.0


async def test_request_over_quota_wakes_no_service() -> None:
    world = PickerHarness(service_with_slo(admission=QUOTA))
    world.send_queued(headers=TENANT)
    before = demand(world), world.service()["admission"]["queued"]
    assert rejection_of(world.send(headers=TENANT)).error["code"] == "quota_exceeded"
    assert (demand(world), world.service()["admission"]["queued"]) == before
    assert world.service()["admission"]["reserved_work_s"] == 0.0


async def test_retry_after_quota_is_new_demand() -> None:
    world = PickerHarness(service_with_slo(admission=QUOTA, batch=8), pods=engine_names(1))
    picked_engine(world.send(headers=TENANT))
    rejection_of(world.send(headers=TENANT))
    world.advance(11.0)
    world.requests -= 1  # the same body again
    picked_engine(world.send(headers=TENANT | {"x-stainless-retry-count": "1"}))
    assert (demand(world)[0], demand(world)[2]) == (2, 0)


async def test_request_too_large_is_no_demand() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = rejection_of(world.send(messages=[{"role": "user", "content": TOO_LARGE}]))
    assert reply.error["code"] == "context_length_exceeded"
    assert demand(world) == (0, 0, 0)


async def test_too_many_sequences_are_no_demand() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = rejection_of(world.send(n=16_000))
    assert reply.error["code"] == "request_too_large"
    assert demand(world) == (0, 0, 0)


async def test_too_large_request_is_demand_of_fallback_only() -> None:
    """The fallback is tried for a request that no engine of the named service can hold."""
    small = service_with_slo("small", batch=8)
    small[LIMITS]["costModel"]["kv_tokens"] = 8_000_000
    world = PickerHarness(
        service_with_slo(admission=DOWNGRADE), small, pods=(*engine_names(1), pod("10.0.1.1:8000", service="small"))
    )
    reply = world.send(messages=[{"role": "user", "content": TOO_LARGE}])
    assert picked_engine(reply) == "10.0.1.1:8000"
    assert demand(world)[0] == 0
    assert demand(world, "team/small")[0] == 1


async def test_overloaded_and_queued_requests_are_demand() -> None:
    world = PickerHarness(service_with_slo(admission={"whenFull": "Shed"}, batch=1), pods=engine_names(1))
    picked_engine(world.send())
    assert rejection_of(world.send()).error["code"] == "overloaded"
    assert demand(world)[0] == 2
    waiting = PickerHarness(service_with_slo())
    waiting.send_queued()
    assert demand(waiting)[0] == 1


@pytest.mark.parametrize(("status", "counted"), [(400, 0), (404, 0), (422, 0), (429, 1), (500, 1), (200, 1)])
async def test_engine_rejection_takes_demand_off(status: int, counted: int) -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    arrived = exported(world, "plimsoll_gateway_requests_arrived_total", attempt="first")
    world.complete(world.send(), status=status, ttft_us=5_000)
    assert demand(world)[0] == counted
    assert exported(world, "plimsoll_gateway_requests_arrived_total", attempt="first") == arrived + 1


async def test_engine_rejection_after_report_offsets_next_arrival() -> None:
    world = PickerHarness(service_with_slo(batch=8), pods=engine_names(1))
    first = world.send()
    assert demand(world)[0] == 1
    world.complete(first, status=400, ttft_us=5_000)
    counted = [demand(world)[:2]]
    for _ in range(3):
        picked_engine(world.send())
        counted.append(demand(world)[:2])
    assert [requests for requests, _ in counted] == [1, 1, 2, 3]
    assert counted == sorted(counted), "a count that decreases looks like a restart"


async def test_rejection_from_queue_withdraws_demand() -> None:
    """Classes change while the request waits for the first engine, and the new limits have a smaller KV cache."""
    world = PickerHarness(service_with_slo())
    queued = world.send_queued(messages=[{"role": "user", "content": "x" * 400_000}])
    assert demand(world)[0] == 1
    smaller = service_with_slo(
        admission={"classes": [{"name": "default"}, {"name": "batch"}]}, classes=("default", "batch")
    )
    smaller[LIMITS]["costModel"]["kv_tokens"] = 1_000
    world.set_objects(smaller)
    assert rejection_of(queued).error["code"] == "context_length_exceeded"
    world.send_queued()
    assert demand(world)[0] == 1


async def test_arrived_metric_keeps_all_requests() -> None:
    world = PickerHarness(service_with_slo(admission=QUOTA, batch=8), pods=engine_names(1))
    arrived = exported(world, "plimsoll_gateway_requests_arrived_total", attempt="first")
    counted = exported(world, "plimsoll_gateway_demand_requests_total")
    for _ in range(5):
        world.send(headers=TENANT)
    assert exported(world, "plimsoll_gateway_requests_arrived_total", attempt="first") == arrived + 5
    assert exported(world, "plimsoll_gateway_demand_requests_total") == counted + 1


def test_counter_reports_added_less_withdrawn() -> None:
    counter = DemandCounter()
    small, large = DemandTokens(30), DemandTokens(100, {MediaKind.IMAGE: 60}, "chat")
    counter.add(large)
    counter.withdraw(large)
    assert counter.report() == (0, 0, {MediaKind.IMAGE: 0}, {"chat": 0})
    counter.add(large)
    assert counter.report() == (1, 100, {MediaKind.IMAGE: 60}, {"chat": 1})
    counter.withdraw(large)
    assert counter.report() == (1, 100, {MediaKind.IMAGE: 60}, {"chat": 1})
    counter.add(small)
    assert counter.report() == (1, 100, {MediaKind.IMAGE: 60}, {"chat": 1})
    counter.add(large)
    assert counter.report() == (2, 130, {MediaKind.IMAGE: 60}, {"chat": 1})


async def test_one_request_is_at_most_one_engine_of_demand() -> None:
    """A prompt of 400 kB with `n` 128 would count as 12.8 million tokens."""
    world = PickerHarness(service_with_slo(batch=8), pods=engine_names(1))
    picked_engine(world.send())
    offered_s = world.picker.admission.services["team/chat"].controller.offered_work_s
    before = demand(world)[1]
    world.send(messages=[{"role": "user", "content": "x" * 400_000}], n=128)
    cost_model = world.picker.admission.services["team/chat"].controller.pool.cost_model
    assert demand(world)[1] - before == cost_model.kv_tokens == 200_000
    added_s = world.picker.admission.services["team/chat"].controller.offered_work_s - offered_s
    prefill_s = cost_model.kv_tokens * (cost_model.prefill_token_s + cost_model.prefill_pair_s * cost_model.kv_tokens)
    assert added_s < 2 * prefill_s


async def test_capped_demand_is_withdrawn_whole() -> None:
    world = PickerHarness(service_with_slo(batch=8), pods=engine_names(1))
    huge = world.send(messages=[{"role": "user", "content": "x" * 400_000}], n=128)
    world.complete(huge, status=400, ttft_us=5_000)
    assert demand(world)[:2] == (0, 0)


async def test_demand_counts_by_class_of_the_service() -> None:
    """An unknown class is the default one, and a rejection by the engine takes the request off its class."""
    classes = {"classes": [{"name": "default"}, {"name": "chat"}]}
    world = PickerHarness(
        service_with_slo(admission=classes, classes=("default", "chat"), batch=50), pods=engine_names(1)
    )
    for name in ("chat", "chat", "strange"):
        picked_engine(world.send(headers={"x-gateway-inference-objective": name}))
    assert world.service()["requests"]["arrived_by_class"] == {"chat": 2, "default": 1}
    rejected = world.send(headers={"x-gateway-inference-objective": "chat"})
    assert isinstance(rejected, bytes)
    world.complete(rejected, status=400)
    assert world.service()["requests"]["arrived_by_class"] == {"chat": 2, "default": 1}


async def test_classes_of_former_specs_are_forgotten() -> None:
    world = PickerHarness()
    for number in range(MAX_NAMES):
        name, slo = f"class-{number}", {"ttft": "1s", "tpot": f"{50 + number}ms"}
        classes = {"classes": [{"name": "kept"}, {"name": name, "slo": slo}]}
        made = service_with_slo(admission=classes, classes=("kept", name), batch=500)
        world.set_objects(made, pods=engine_names(1))
        for one in ("kept", name):
            reply = world.send(headers={"x-gateway-inference-objective": one})
            assert isinstance(reply, bytes)
            world.complete(reply, ttft_us=1000, duration_us=2000)
    counts = world.service()["requests"]["arrived_by_class"]
    assert len(counts) == MAX_NAMES
    assert (counts["kept"], counts[f"class-{MAX_NAMES - 1}"]) == (MAX_NAMES, 1), "those of the present spec are exact"
    assert "class-0" not in counts
    targets = world.service()["slo"]["tpot"]["targets_s"]
    assert len(targets) == MAX_NAMES
    assert 0.05 in targets, "that of the service itself"
