"""Who is let in, held, sent elsewhere and refused at the gateway, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll.core.admission.controller import RENEWALS_PER_DECISION
from plimsoll.core.engine_model.step_time import KvTransfer
from plimsoll.gateway.admission_manager import MAX_RELEASED
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

TRANSFER = KvTransfer(32, 128)


async def test_full_engine_queues_and_admits_when_slot_is_free() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    first, second = world.send(), world.send()
    assert picked_engine(first) == picked_engine(second) == "10.0.0.1:8000"
    queued = world.send_queued()
    assert (world.service()["admission"]["queued"], world.service()["admission"]["in_use"]) == (1, 2)
    world.clock.advance_to(2.0)
    assert isinstance(first, bytes)
    world.complete(first)
    assert response_headers(queued)["x-plimsoll-cluster"] == "pick/team/chat"
    assert response_headers(queued)["x-plimsoll-request-id"] == "t3"
    assert world.running_by_engine() == {"10.0.0.1:8000": 2}
    assert world.outcomes() == {"Admitted": 3, "Queued": 1}
    assert world.service()["admission"]["queued"] == 0


async def test_admitted_endpoint_is_first_and_others_follow() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(3))
    sent = [response_headers(world.send())["x-plimsoll-endpoint"].split(",") for _ in range(6)]
    assert all(len(set(named)) == 3 for named in sent)
    assert sorted(named[0] for named in sent) == sorted(2 * [f"10.0.0.{n}:8000" for n in (1, 2, 3)])


async def test_late_request_is_rejected_with_retry_reservation() -> None:
    world = PickerHarness(service_with_slo(ready_at_s=30.0, ready_work=5.0), pods=engine_names(2))
    for _ in range(4):
        world.send()
    queued = world.send_queued()
    world.advance(20.0)
    reply = rejection_of(queued)
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    assert str(reply.error["message"]).startswith(
        "The request waited 10 s. Model 'chat' is at capacity: its 2 ready engines cannot serve another"
    )
    assert 10 <= int(reply.headers["retry-after"]) <= 30
    assert reply.headers["x-plimsoll-eta"] == reply.headers["retry-after"]
    assert world.service()["requests"]["rejected"] == {"overloaded": 1}
    assert world.outcomes() == {"Admitted": 4, "Queued": 1, "ShedSaturated": 1}


async def test_wakeup_timer_fires_and_resolves_once() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    world.send(), world.send()
    queued = world.send_queued()
    done: list[bytes] = []
    queued.add_done_callback(lambda future: done.append(future.result()))
    assert len(world.clock.armed) == 1
    world.clock.advance_to(60.0)
    await asyncio.sleep(0)
    assert world.clock.fired == len(done) == 1
    assert world.clock.armed == []


async def test_shed_rejects_at_once_and_retry_is_not_new_demand() -> None:
    world = PickerHarness(service_with_slo(admission={"whenFull": "Shed"}, ready_at_s=20.0, ready_work=2.0))
    reply = rejection_of(world.send())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 20 <= int(reply.headers["retry-after"]) <= 60
    world.requests -= 1  # the same body again, with no header that says so
    rejection_of(world.send())
    requests = world.service()["requests"]
    assert (requests["arrived"], requests["retried"]) == (1, 1)


@pytest.mark.parametrize("first", [0.9, 5.0])
async def test_retry_reservation_uses_start_with_spare_capacity(first: float) -> None:
    """first: what the first of two replicas carries, over what newcomers bring."""
    world = PickerHarness(service_with_slo(admission={"whenFull": "Shed"}, ready_at_s=60.0, ready_work=1e3))
    world.send()
    each = world.picker.admission.services["team/chat"].controller.offered_work_s
    starts = ((60.0, first * 2 * each), (100.0, 1e3))
    world.set_objects(service_with_slo(admission={"whenFull": "Shed"}, ready_at_s=60.0, ready_work=1e3, starts=starts))
    for _ in range(20):
        replies = [world.send(), world.send()]
        world.advance(1.0)
    eta_s = int(rejection_of(replies[-1]).headers["x-plimsoll-eta"])
    assert (eta_s + 19 >= 100) == (first < 1.0)


async def test_shed_queues_nothing_despite_time_left() -> None:
    world = PickerHarness(service_with_slo(admission={"whenFull": "Shed"}, batch=1), pods=engine_names(1))
    picked_engine(world.send())
    assert rejection_of(world.send()).error["code"] == "overloaded"


async def test_shed_without_ttft_target_rejects_as_overloaded() -> None:
    world = PickerHarness(
        service_with_slo(admission={"whenFull": "Shed"}, batch=2, slo={"tpot": "50ms"}), pods=engine_names(1)
    )
    picked_engine(world.send()), picked_engine(world.send())
    assert rejection_of(world.send()).error["code"] == "overloaded"


async def test_scale_from_zero_queues_and_releases_by_capacity() -> None:
    world = PickerHarness(service_with_slo(ready_at_s=10.0))
    queued = [world.send_queued() for _ in range(5)]
    assert world.service()["admission"]["queued"] == 5
    world.advance(9.0)
    assert not any(future.done() for future in queued)
    world.set_objects(service_with_slo(), pods=engine_names(1), unreachable=("10.0.0.1:8000",))
    assert not any(future.done() for future in queued)
    world.set_objects(service_with_slo(), pods=engine_names(1))
    assert [future.done() for future in queued] == [True, True, False, False, False]
    world.set_objects(service_with_slo(), pods=engine_names(2))
    assert [future.done() for future in queued] == [True, True, True, True, False]
    assert world.running_by_engine() == {"10.0.0.1:8000": 2, "10.0.0.2:8000": 2}


async def test_many_queued_requests_are_released_over_several_turns() -> None:
    """Each takes the event loop a part of a millisecond."""
    world = PickerHarness(service_with_slo(ready_at_s=10.0, batch=100))
    queued = [world.send_queued() for _ in range(2 * MAX_RELEASED + 5)]

    def released() -> list[bool]:
        return [future.done() for future in queued]

    world.set_objects(service_with_slo(batch=100), pods=engine_names(1))
    assert released() == [True] * MAX_RELEASED + [False] * (MAX_RELEASED + 5)
    assert world.clock.armed[0] == world.clock.now_s, "the next turn comes at once"
    assert isinstance(world.send(), asyncio.Future), "nobody overtakes"
    world.clock.advance_to(world.clock.now_s)
    assert released() == [True] * len(queued)
    assert {picked_engine(future) for future in queued} == {"10.0.0.1:8000"}


async def test_many_requests_are_renewed_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first engine is ready, each costs and is due otherwise: admission begins when all are renewed."""
    world = PickerHarness(service_with_slo(ready_at_s=10.0, batch=100))
    queued = [world.send_queued() for _ in range(500)]
    pool = world.picker.admission.services["team/chat"].controller.pool
    estimate, costs = pool.estimate_cost, []
    monkeypatch.setattr(pool, "estimate_cost", lambda request: costs.append(request.id) or estimate(request))
    world.set_objects(service_with_slo(batch=100), pods=engine_names(1))
    assert len(costs) == RENEWALS_PER_DECISION * MAX_RELEASED
    assert not any(future.done() for future in queued)
    world.clock.advance_to(world.clock.now_s)
    assert sum(future.done() for future in queued) == 100
    assert len(costs) == len(set(costs)) == len(queued)


async def test_many_expired_requests_are_released_over_several_turns() -> None:
    classes = [{"name": "default", "maxQueueTime": "5s"}]
    world = PickerHarness(service_with_slo(admission={"classes": classes}))
    queued = [world.send_queued() for _ in range(2 * MAX_RELEASED)]
    world.clock.now_s = 6.0
    world.picker.release(("team/chat",), 6.0)
    assert sum(future.done() for future in queued) == MAX_RELEASED
    world.clock.advance_to(6.0)
    assert {rejection_of(future).status for future in queued} == {503}


async def test_last_engine_lost_on_update_queues_requests() -> None:
    """Nobody is sent to it: who comes is held until there is one again."""
    world = PickerHarness(service_with_slo(batch=2), pods=engine_names(1))
    world.set_objects(service_with_slo(batch=3))
    queued = world.send_queued()
    assert world.running_by_engine() == {}
    world.set_objects(service_with_slo(batch=3), pods=engine_names(2))
    assert picked_engine(queued) == "10.0.0.1:8000"


async def test_scale_from_zero_waits_as_long_as_class_allows() -> None:
    classes = [{"name": "default", "maxQueueTime": "5s"}]
    world = PickerHarness(service_with_slo(admission={"classes": classes}))
    queued = world.send_queued()
    world.advance(4.5)
    assert not queued.done()
    world.advance(1.0)
    reply = rejection_of(queued)
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 10 <= int(reply.headers["retry-after"]) <= 30
    assert "waited 5 s" in str(reply.error["message"])


async def test_startup_longer_than_hold_time_is_rejected_at_once() -> None:
    world = PickerHarness(service_with_slo(ready_at_s=50.0, ready_work=10.0))
    reply = rejection_of(world.send())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 50 <= int(reply.headers["retry-after"]) <= 60


async def test_no_starting_engine_rejects_without_retry() -> None:
    reply = rejection_of(PickerHarness(service_with_slo(starting=False)).send())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "no_endpoint", "false")


async def test_tenant_quota_applies_despite_free_slots() -> None:
    limited = {"tenants": [{"name": "jobs", "requestsPerSecond": "0.1"}]}
    world = PickerHarness(service_with_slo(admission=limited, batch=20), pods=engine_names(1))
    tenant_headers = {"x-gateway-inference-fairness-id": "jobs"}
    picked_engine(world.send(headers=tenant_headers))
    reply = rejection_of(world.send(headers=tenant_headers))
    assert (reply.status, reply.error["code"]) == (429, "quota_exceeded")
    assert int(reply.headers["retry-after"]) == 10
    assert str(reply.error["message"]) == (
        "Tenant 'jobs' has exceeded its quota of 0.1 requests per second for model 'chat'. This request has about"
        " 9 prompt tokens. Send fewer requests or shorter prompts, or ask for a higher quota. Try again in 10 s."
    )
    picked_engine(world.send())


@pytest.mark.parametrize("pods", [(), engine_names(1)])
@pytest.mark.parametrize(("n", "shown"), [(20_000, "20000"), (10**30, "10^12 or more")])
async def test_n_above_vllms_limit_names_what_binds(pods: tuple[Any, ...], n: int, shown: str) -> None:
    world = PickerHarness(service_with_slo(), pods=pods)
    limit = min(16_384, world.picker.catalog.services["team/chat"].max_queued)
    reply = rejection_of(world.send(n=n))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "request_too_large", "n")
    assert reply.error["message"] == (
        f"The field 'n' is {shown}, but an engine of model 'chat' accepts at most {limit} sequences per request."
        f" Lower 'n' to at most {limit}."
    )
    assert (limit < 16_384) is bool(pods)


@pytest.mark.parametrize("pods", [(), engine_names(1)])
async def test_too_many_token_ids_for_an_engine_are_no_demand(pods: tuple[Any, ...]) -> None:
    world = PickerHarness(service_with_slo(), pods=pods)
    reply = rejection_of(world.send(prompt=[1] * 250_000))  # the KV cache holds 200,000
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert world.service()["requests"]["arrived"] == 0


async def test_token_ids_near_the_limit_count_in_full() -> None:
    world = PickerHarness(service_with_slo(batch=200, slo={"ttft": "1000s", "tpot": "50ms"}), pods=engine_names(1))
    picked_engine(world.send(prompt=[1] * 190_000, max_tokens=1))
    (running,) = world.picker.admission.services["team/chat"].controller.pool.replicas["10.0.0.1:8000"].running.values()
    assert running.cost.prompt_tokens == 190_000


async def test_prompt_of_token_ids_on_no_engine_is_exact() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    message = str(rejection_of(world.send(prompt=[1] * 900_000)).error["message"])
    assert "it has 900000 token IDs. This model's" in message
    message = str(rejection_of(world.send(prompt=[[1] * 900_000, [1] * 900_010])).error["message"])
    assert "about 900005 tokens" in message


async def test_prompt_on_no_engine_names_the_limit() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = rejection_of(world.send(prompt="x" * 4_000_000))
    assert (reply.status, reply.headers["x-should-retry"]) == (400, "false")
    code, reason = reply.error["code"], reply.headers["x-plimsoll-reason"]
    assert (code, reason) == ("context_length_exceeded", "request_too_large")
    message = str(reply.error["message"])
    assert "The prompt is too long" in message
    assert "about 1000000 tokens" in message
    assert "This model's maximum context length is at most 200000 tokens" in message
    assert world.outcomes() == {"ShedNoCapacity": 1}


async def test_prompt_on_no_engine_names_the_limit_that_binds() -> None:
    """The arguments of the engines limit a sequence to less than their KV cache holds."""
    engine = engine_names(1)[0]
    engine["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": '["--max-model-len=4k"]'}]
    reply = rejection_of(PickerHarness(service_with_slo(), pods=(engine,)).send(prompt="x" * 4_000_000))
    assert "This model's maximum context length is at most 4000 tokens" in str(reply.error["message"])


async def test_n_above_every_engine_is_rejected_by_the_gateway() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = rejection_of(world.send(n=2049))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "request_too_large", "n")
    assert "at most 2048 sequences" in str(reply.error["message"])
    assert world.outcomes() == {"ShedNoCapacity": 1}
    picked_engine(world.send(n=2048))


async def test_prompt_estimate_from_bytes_rejects_no_long_prompt() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    picked_engine(world.send(pad="", prompt="x" * 2_000_000))
    assert rejection_of(world.send(prompt="x" * 4_000_000)).status == 400


async def test_queue_length_is_limited_by_max_queued() -> None:
    world = PickerHarness(service_with_slo(admission={"maxQueued": 2}), pods=engine_names(1))
    world.send(), world.send()
    queued = [world.send_queued(), world.send_queued()]
    assert rejection_of(world.send()).error["code"] == "overloaded"
    assert world.service()["admission"]["queued"] == 2
    queued[0].cancel()
    await asyncio.sleep(0)
    world.send_queued()


async def test_class_header_sets_priority() -> None:
    classes = [{"name": "low", "priority": 0}, {"name": "high", "priority": 1}]
    world = PickerHarness(
        service_with_slo(admission={"classes": classes}, classes=("low", "high")), pods=engine_names(1)
    )
    first = world.send()
    world.send()
    other = world.send_queued(headers={"x-gateway-inference-objective": "no such class"})
    high = world.send_queued(headers={"x-gateway-inference-objective": "high"})
    assert isinstance(first, bytes)
    world.complete(first)
    assert high.done()
    assert not other.done()


async def test_service_without_slo_or_model_is_not_limited() -> None:
    for obj in (service(), service_with_slo(model=False)):
        world = PickerHarness(obj, pods=engine_names(1))
        for _ in range(50):
            assert picked_engine(world.send()) == "10.0.0.1:8000"
        world.set_objects(obj)
        assert rejection_of(world.send()).error["code"] == "model_starting"
        assert world.service()["admission"]["outcomes"] == {}


async def test_gateway_without_share_assumes_one_more_gateway() -> None:
    world = PickerHarness(service_with_slo(batch=6, shares={"other": 6}), pods=engine_names(1))
    for _ in range(3):
        picked_engine(world.send())
    world.send_queued()


async def test_capacity_share_is_enforced_and_updated() -> None:
    world = PickerHarness(service_with_slo(batch=6, shares={GATEWAY: 2, "other": 4}), pods=engine_names(1))
    picked_engine(world.send()), picked_engine(world.send())
    queued = [world.send_queued(), world.send_queued()]
    world.set_objects(service_with_slo(batch=6, shares={GATEWAY: 3, "other": 3}), pods=engine_names(1))
    assert [future.done() for future in queued] == [True, False]
    assert world.service()["admission"]["slots"] == 3
    world.set_objects(service_with_slo(batch=6, shares={GATEWAY: 1, "other": 5}), pods=engine_names(1))
    assert (world.service()["admission"]["slots"], world.service()["admission"]["in_use"]) == (1, 3)


async def test_eta_scales_with_capacity_share() -> None:
    waits = {}
    for shares in ({GATEWAY: 6}, {GATEWAY: 2, "other": 4}):
        obj = service_with_slo(
            admission={"whenFull": "Shed"}, batch=6, shares=shares, ready_at_s=10.0, ready_work=0.006
        )
        world = PickerHarness(obj)
        replies = [rejection_of(world.send()) for _ in range(8)]
        waits[len(shares)] = float(replies[-1].headers["x-plimsoll-eta"]) - 10.0
    assert waits[2] == pytest.approx(3 * waits[1], rel=0.1)


async def test_remote_prefill_is_used_only_where_possible() -> None:
    pods = (
        pod("10.0.0.1:8000", role="decode"),
        pod("10.0.0.2:8000", role="prefill"),
        pod("10.0.0.3:8000", role="prefill", revision="r2"),
    )
    world = PickerHarness(service_with_slo(batch=20, transfer=TRANSFER), pods=pods)
    assert response_headers(world.send(pad="", prompt="x" * 4000))["x-plimsoll-prefill"] == "10.0.0.2:8000"
    assert "x-plimsoll-prefill" not in response_headers(world.send(prompt="x" * 400))
    assert "x-plimsoll-prefill" not in response_headers(world.send(prompt="x" * 4000, n=2))
    assert world.service()["prefill"] == {"remote": 1, "local": 2}


async def test_local_prefill_decision_names_no_prefill_engine() -> None:
    pods = pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill")
    for move_token_s, remote in ((1e-6, 1), (1e-2, 0)):
        world = PickerHarness(service_with_slo(batch=20, transfer=TRANSFER, move_token_s=move_token_s), pods=pods)
        sent = response_headers(world.send(prompt="x" * 4000))
        assert sent["x-plimsoll-endpoint"] == "10.0.0.1:8000"
        assert ("x-plimsoll-prefill" in sent) == bool(remote)
        assert world.service()["prefill"] == {"remote": remote, "local": 1 - remote}
