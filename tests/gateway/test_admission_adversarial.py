"""Admission at the gateway where the world changes under those who wait: nobody is lost and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import pytest

from plimsoll.core.admission.publication import FORMAT_VERSION
from plimsoll.gateway.admission_policy import AdmissionPolicy, PolicyCache
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.inflight import MAX_REQUEST_AGE_SECONDS
from plimsoll.gateway.request_queue import MAX_CLIENT_QUEUED_BYTES, MAX_QUEUED_BYTES
from plimsoll.gateway.service_admission import MAX_TENANTS
from plimsoll.gateway.signals_document import build_signals
from tests.gateway.admission_state import ONE, is_empty
from tests.gateway.kube_objects import LIMITS, Object, pod, service, split
from tests.gateway.picker_harness import (
    GATEWAY,
    PickerHarness,
    engine_names,
    picked_engine,
    rejection_of,
    response_headers,
    service_with_slo,
)

TWO = "10.0.0.2:8000"


async def test_thousands_of_disconnects_leave_no_state() -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 5000}))
    queued = [world.send_queued(headers={"x-gateway-inference-fairness-id": f"t{n % 7}"}) for n in range(3002)]
    world.set_objects(service_with_slo(admission={"maxQueued": 5000}), pods=engine_names(1))
    world.clock.advance_to(world.clock.now_s)  # all turns
    running = [future.result() for future in queued if future.done()]
    for future in queued:
        future.cancel()
    await asyncio.sleep(0)
    for reply in running:
        world.complete(reply)
    world.advance(2.0)
    assert is_empty(world)
    assert world.clock.armed == []
    assert world.outcomes() == {"Admitted": 2, "Queued": 3002, "ClientGone": 3000}
    world.advance(70.0)
    assert len(world.picker.admission.services["team/chat"].controller._queue.accounts) == 0


async def test_disconnect_at_admission_releases_slot() -> None:
    world = PickerHarness(service_with_slo(batch=1), pods=engine_names(1))
    first = world.send()
    leaving, next_one = world.send_queued(), world.send_queued()
    assert isinstance(first, bytes)
    leaving.cancel()  # the loop has not said so yet
    world.complete(first)
    assert world.running_by_engine() == {ONE: 0}
    await asyncio.sleep(0)
    world.advance(1.0)
    assert picked_engine(next_one) == ONE
    world.complete(next_one.result())
    assert is_empty(world)
    assert world.outcomes()["ClientGone"] == 1


async def test_disconnect_during_admission_rebuild_leaves_no_state() -> None:
    world = PickerHarness(service_with_slo())
    leaving, staying = world.send_queued(), world.send_queued()
    leaving.cancel()  # the loop has not said so yet
    world.set_objects(service_with_slo(admission={"classes": [{"name": "other"}]}, classes=("other",)))
    assert world.service()["admission"]["queued"] == 1
    await asyncio.sleep(0)
    staying.cancel()
    await asyncio.sleep(0)
    assert is_empty(world)


async def test_lost_engine_releases_slots_and_returns_with_running() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(2))
    replies = [world.send() for _ in range(4)]
    queued = world.send_queued()
    world.set_objects(service_with_slo(), pods=engine_names(2), unreachable=(ONE,))
    assert world.running_by_engine() == {TWO: 2}
    assert not queued.done()
    world.set_objects(service_with_slo(), pods=engine_names(2))
    assert world.running_by_engine() == {ONE: 2, TWO: 2}
    assert not queued.done()
    for reply in replies:
        assert isinstance(reply, bytes)
        world.complete(reply, status=503, flags="UC")
    world.advance(6.0)
    world.complete(queued.result())
    assert is_empty(world)


async def test_missing_limits_admit_everything() -> None:
    for after in (service_with_slo(model=False), service()):
        world = PickerHarness(service_with_slo(), pods=engine_names(1))
        replies = [world.send(), world.send()]
        queued = [world.send_queued(), world.send_queued()]
        world.set_objects(after, pods=engine_names(1))
        assert [picked_engine(future) for future in queued] == [ONE, ONE]
        assert len(world.picker.queue) == 0
        world.set_objects(service_with_slo(), pods=engine_names(1))
        assert world.running_by_engine() == {ONE: 4}
        for reply in (*replies, *(future.result() for future in queued)):
            assert isinstance(reply, bytes)
            world.complete(reply)
        assert is_empty(world)


async def test_missing_limits_at_zero_reject_as_starting() -> None:
    world = PickerHarness(service_with_slo())
    queued = world.send_queued()
    world.set_objects(service_with_slo(model=False))
    assert rejection_of(queued).error["code"] == "model_starting"


async def test_deleted_service_rejects_queued_as_not_found() -> None:
    world = PickerHarness(service_with_slo())
    queued = [world.send_queued(), world.send_queued()]
    world.set_objects()
    for future in queued:
        reply = rejection_of(future)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert is_empty(world)
    world.clock.advance_to(100.0)
    assert "team/chat" not in world.picker.stats_by_service


async def test_class_change_keeps_running_and_queued_requests() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    replies = [world.send(), world.send()]
    queued = [world.send_queued(), world.send_queued(headers={"x-gateway-inference-objective": "high"})]
    classes = [{"name": "low"}, {"name": "high", "priority": 5}]
    changed: dict[str, Any] = {"admission": {"classes": classes}}
    world.set_objects(
        service_with_slo(**changed), pods=engine_names(1)
    )  # the model is still that of the classes before
    assert not any(future.done() for future in queued)
    assert world.running_by_engine() == {ONE: 2}
    world.set_objects(service_with_slo(**changed, classes=("low", "high")), pods=engine_names(1))
    assert not any(future.done() for future in queued)
    assert world.running_by_engine() == {ONE: 2}
    assert world.service()["admission"]["queued"] == 2
    assert isinstance(replies[0], bytes)
    world.complete(replies[0])
    assert [future.done() for future in queued] == [False, True]
    for reply in (replies[1], queued[1].result()):
        assert isinstance(reply, bytes)
        world.complete(reply)
    world.complete(queued[0].result())
    assert is_empty(world)


async def test_class_change_keeps_retry_detection() -> None:
    world = PickerHarness(service_with_slo(admission={"whenFull": "Shed"}, ready_at_s=20.0, ready_work=2.0))
    rejection_of(world.send())
    classes = [{"name": "other"}]
    obj = service_with_slo(
        admission={"whenFull": "Shed", "classes": classes}, classes=("other",), ready_at_s=20.0, ready_work=2.0
    )
    world.set_objects(obj)
    world.requests -= 1
    rejection_of(world.send())
    assert world.service()["requests"]["retried"] == 1


async def test_model_or_tenant_change_keeps_queued_requests() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    world.send(), world.send()
    queued = world.send_queued()
    guard = world.picker.admission.services["team/chat"]
    world.set_objects(service_with_slo(admission={"tenants": [{"name": "a", "weight": 3}]}), pods=engine_names(1))
    assert not queued.done()
    world.set_objects(service_with_slo(batch=3), pods=engine_names(1))
    assert queued.done()
    assert world.picker.admission.services["team/chat"] is guard


async def test_admission_error_loses_no_request(caplog: pytest.LogCaptureFixture) -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    world.send(), world.send()
    queued = [world.send_queued(), world.send_queued()]
    with caplog.at_level(logging.ERROR):
        again = world.send(headers={"x-plimsoll-request-id": "t1"})  # a ticket twice is what the gate cannot take
    assert picked_engine(again) == ONE
    assert [picked_engine(future) for future in queued] == [ONE, ONE]
    assert "admission of team/chat failed" in caplog.text
    world.set_objects(service_with_slo(), pods=engine_names(1))
    assert world.running_by_engine() == {ONE: 4}


async def test_expired_request_is_released_in_admission() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    world.send(), world.send()
    queued = world.send_queued()
    world.picker.reports.on_envoy_stats({ONE: 0})
    for look in (1.0, 2.0):
        world.clock.advance_to(look)
        world.picker.reports.on_envoy_stats({ONE: 0})
    assert world.running_by_engine() == {ONE: 1}
    assert picked_engine(queued) == ONE
    world.clock.advance_to(MAX_REQUEST_AGE_SECONDS + 10.0)
    world.picker.reports.on_envoy_stats({ONE: 1})
    assert len(world.picker.inflight) == len(world.picker.admission) == 0


async def test_request_completed_elsewhere_is_released_at_its_engine() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(2))
    reply = world.send()
    assert picked_engine(reply) == ONE
    assert isinstance(reply, bytes)
    world.complete(reply, upstream=TWO)
    assert is_empty(world)
    assert picked_engine(world.send()) == TWO  # the other one has refused it
    world.advance(6.0)
    assert picked_engine(world.send()) == ONE


async def test_external_requests_use_engine_slots() -> None:
    world = PickerHarness(service_with_slo(batch=4), pods=engine_names(1))
    world.picker.reports.on_envoy_stats({ONE: 3})
    picked_engine(world.send())
    queued = world.send_queued()
    assert world.service()["admission"]["in_use"] == 4
    world.picker.reports.on_envoy_stats({ONE: 1})
    world.picker.reports.on_envoy_stats({ONE: 1})
    assert picked_engine(queued) == ONE


async def test_all_engines_suspect_avoids_none() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(2))
    world.picker.reports.mark_suspect(ONE)
    assert [picked_engine(world.send()), picked_engine(world.send())] == [TWO, TWO]
    queued = world.send_queued()
    world.picker.reports.mark_suspect(TWO)
    assert picked_engine(queued) == ONE


async def test_hostile_body_never_breaks_admission(caplog: pytest.LogCaptureFixture) -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 1}), pods=engine_names(1))
    hostile: tuple[dict[str, Any], ...] = (
        {"n": 16_384, "prompt": ["a"] * 100_000},
        {"n": -1, "max_tokens": 0, "max_completion_tokens": 10**30},
        {"n": True, "max_tokens": True, "stream": "yes"},
        {"prompt": [[1, 2], [3]], "n": 10**25},
        {"prompt": [], "max_tokens": 1.5},
        {"prompt": {"a": 1}, "max_tokens": "7", "stream": None},
    )
    guard = world.picker.admission.services["team/chat"]
    for fields in hostile:
        world.send(**fields)
    assert world.picker.admission.services["team/chat"] is guard
    assert caplog.text == ""


async def test_queued_body_bytes_are_limited() -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 5000}))
    body = "x" * (8 << 20)
    sources = itertools.count()

    def of_another_client() -> dict[str, str]:
        return {"x-forwarded-for": f"10.0.0.{next(sources)}"}

    bodies = MAX_QUEUED_BYTES // (8 << 20) - 1
    queued = [world.send_queued(pad=body, headers=of_another_client()) for _ in range(bodies)]
    assert rejection_of(world.send(pad=body, headers=of_another_client())).error["code"] == "model_starting"
    queued[0].cancel()
    await asyncio.sleep(0)
    world.send_queued(pad=body, headers=of_another_client())


async def test_one_client_leaves_queue_memory_to_others() -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 5000}))
    hostile, body = {"x-forwarded-for": "10.0.0.1"}, "x" * (8 << 20)
    queued = [world.send_queued(pad=body, headers=hostile) for _ in range(MAX_CLIENT_QUEUED_BYTES // (8 << 20) - 1)]
    assert rejection_of(world.send(pad=body, headers=hostile)).error["code"] == "model_starting"
    world.send_queued(pad=body, headers={"x-forwarded-for": "10.0.0.2"})
    queued[0].cancel()
    await asyncio.sleep(0)
    world.send_queued(pad=body, headers=hostile)


async def test_batch_growth_elsewhere_shrinks_own_share() -> None:
    world = PickerHarness(service_with_slo(batch=6, shares={GATEWAY: 2, "other": 4}), pods=engine_names(1))
    replica = world.picker.admission.services["team/chat"].controller.pool.replicas[ONE]
    assert replica.inverse_share == pytest.approx(3.0)
    world.set_objects(service_with_slo(batch=8, shares={GATEWAY: 2, "other": 6}), pods=engine_names(1))
    assert replica.inverse_share == pytest.approx(4.0)


async def test_unknown_tenants_beyond_limit_share_one_name() -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 5000, "tenants": [{"name": "known"}]}))
    for n in range(MAX_TENANTS + 50):
        world.send_queued(headers={"x-gateway-inference-fairness-id": f"tenant-{n}"})
    world.send_queued(headers={"x-gateway-inference-fairness-id": "known"})
    world.send_queued(headers={"x-gateway-inference-fairness-id": "x" * 5000 + "\xff"})
    assert len(world.picker.admission.services["team/chat"].controller._queue.accounts) <= MAX_TENANTS + 2


async def test_queue_time_never_exceeds_envoy_timeout() -> None:
    patient = {"ttft": "3600s", "tpot": "50ms"}
    world = PickerHarness(service_with_slo(slo=patient, batch=1), pods=engine_names(1))
    world.send()
    queued = world.send_queued()
    world.advance(125.0)
    assert rejection_of(queued).status == 429


@pytest.mark.parametrize(
    "broken",
    [
        {"spec": {"slo": 3}},
        {"spec": {"slo": {"ttft": "1s"}, "admission": "no"}},
        {LIMITS: []},
        {LIMITS: None},
        {LIMITS: {"version": 1}},
        {LIMITS: {"version": FORMAT_VERSION, "classes": None, "costModel": {}, "shares": 3}},
    ],
)
async def test_unreadable_object_has_no_policy_and_logs_once(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    obj = service_with_slo()
    obj = {**obj, **broken, "spec": {**obj["spec"], **broken.get("spec", {})}}
    policies = PolicyCache()
    with caplog.at_level(logging.WARNING):
        for same in (obj, {**obj}):
            policy = read(policies, same)
            assert policy is None or not policy.has_cost_model
    assert caplog.text.count("cannot parse the admission of InferenceService team/chat") == 1
    part = "spec" if "spec" in broken else "InferenceServiceAdmission"
    assert policies.parse_error("team/chat").startswith(f"{part}: ")
    readable = service_with_slo()
    found = read(policies, readable)
    assert found is not None
    assert found.has_cost_model
    assert read(policies, readable) is read(policies, service_with_slo()) is found
    assert policies.parse_error("team/chat") == ""


def read(policies: PolicyCache, obj: Object) -> AdmissionPolicy | None:
    [plain], [published] = split([obj])
    return policies.get("team/chat", plain, published)


async def test_unreadable_publication_still_counts_slo() -> None:
    """An operator of a newer release: no gate, no lost request, and a word about it for as long as it lasts."""
    obj = service_with_slo(slo={"ttft": "1s"}, batch=1)
    obj[LIMITS]["version"] = 99
    world = PickerHarness(obj, pods=engine_names(1))
    replies = [world.send(), world.send()]
    assert [picked_engine(reply) for reply in replies] == ["10.0.0.1:8000"] * 2
    for reply in replies:
        assert isinstance(reply, bytes)
        world.complete(reply, ttft_us=2_000_000, duration_us=3_000_000)
    signals = build_signals(world.picker, GATEWAY, synced=True)["services"]["team/chat"]
    assert signals["object"] == CONFIG | {"admission_active": False, "parse_error": UNREADABLE_MESSAGE}
    assert signals["slo"]["missed_ttft"] == 2
    world.set_objects(service_with_slo(slo={"ttft": "1s"}, batch=1), pods=engine_names(1))
    signals = build_signals(world.picker, GATEWAY, synced=True)["services"]["team/chat"]
    assert signals["object"] == CONFIG | {"admission_active": True, "parse_error": ""}


CONFIG = {"version": "", "limits_version": ""}
UNREADABLE_MESSAGE = "InferenceServiceAdmission: not admission limits: version 99 is not supported; expected 4"


async def test_capacity_share_is_found_by_gateway_name() -> None:
    world = PickerHarness(service_with_slo(batch=8, shares={GATEWAY: 1, "other": 7}), pods=(pod(ONE),))
    assert isinstance(world.send(), bytes)
    queued = world.send_queued()
    world.set_objects(service_with_slo(batch=8, shares={GATEWAY: 2, "other": 6}), pods=(pod(ONE),))
    assert response_headers(queued)["x-plimsoll-endpoint"] == ONE


async def test_gateway_with_zero_share_admits() -> None:
    world = PickerHarness(service_with_slo(batch=8, shares={GATEWAY: 0, "other": 8}), pods=(pod(ONE),))
    assert [isinstance(world.send(), bytes) for _ in range(4)] == [True] * 4
    assert world.send_queued()


async def test_record_without_request_id_changes_nothing() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    queued = world.send()
    assert not world.picker.reports.on_access_record(
        AccessRecord(upstream="/run/plimsoll/picker.sock", status=429), 0.0
    )
    assert isinstance(queued, bytes)
    assert len(world.picker.inflight) == 1
