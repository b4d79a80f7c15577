"""Admission through real Envoy: requests that wait, are refused, go to another model, or whose client leaves."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_scale_from_zero_queues_then_admits(stack: GatewayStack) -> None:
    await stack.set_objects([service_with_slo()], [])
    pending = [asyncio.create_task(stack.ask_fully()) for _ in range(3)]
    await stack.wait_queued(3)
    engine = await stack.engine()
    hold = engine.behaviour.release_event = asyncio.Event()
    stack.write_objects([service_with_slo()], [pod(engine.address)])
    await wait_until(lambda: engine.open == 2, "as many as there are places are let in")
    assert (await stack.admission())["queued"] == 1
    hold.set()
    assert [status for status, *_ in await asyncio.gather(*pending)] == [200, 200, 200]
    assert (await stack.admission())["outcomes"] == {"Queued": 3, "Admitted": 3}
    assert (await stack.admin.stats()).failed_open == 0


async def test_full_service_rejects_with_retry_after(stack: GatewayStack) -> None:
    engine = await stack.engine()
    hold = engine.behaviour.release_event = asyncio.Event()
    await stack.set_objects([service_with_slo(admission={"whenFull": "Shed"}, batch=1)], [pod(engine.address)])
    await stack.wait_routable(engine)
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    status, body, headers = await stack.ask_fully()
    assert (status, body["error"]["code"], headers["x-plimsoll-reason"]) == (429, "overloaded", "overloaded")
    assert 10 <= int(headers["retry-after"]) <= 30
    hold.set()
    assert (await running)[0] == 200
    await stack.wait_inflight(engine, 0)
    assert (await stack.ask_fully())[0] == 200


async def test_queued_client_disconnect_frees_slot(stack: GatewayStack) -> None:
    engine = await stack.engine()
    hold = engine.behaviour.release_event = asyncio.Event()
    await stack.set_objects([service_with_slo(batch=1)], [pod(engine.address)])
    await stack.wait_routable(engine)
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    leaving = asyncio.create_task(stack.ask_fully())
    await stack.wait_queued(1)
    staying = asyncio.create_task(stack.ask_fully())
    await stack.wait_queued(2)
    leaving.cancel()
    await stack.wait_queued(1)
    hold.set()
    assert [status for status, *_ in (await running, await staying)] == [200, 200]
    assert len(engine.received) == 2
    assert (await stack.admission())["outcomes"] == {"Queued": 2, "Admitted": 2, "ClientGone": 1}
    await stack.wait_inflight(engine, 0)


async def test_headers_set_class_and_tenant_but_not_request_id(stack: GatewayStack) -> None:
    engine = await stack.engine()
    classes = [{"name": "low"}, {"name": "high", "priority": 1}]
    tenants = [{"name": "jobs", "requestsPerSecond": "0.001"}]
    await stack.set_objects(
        [service_with_slo(admission={"classes": classes, "tenants": tenants}, classes=("low", "high"), batch=1)],
        [pod(engine.address)],
    )
    await stack.wait_routable(engine)
    jobs = {"x-gateway-inference-fairness-id": "jobs", "x-plimsoll-request-id": "mine"}
    assert (await stack.ask_fully(sent=jobs))[0] == 200
    assert len(engine.header("x-plimsoll-request-id") or "") == 36
    await stack.wait_inflight(engine, 0)
    status, body, headers = await stack.ask_fully(sent=jobs)
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (429, "quota_exceeded", "false")
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    low = asyncio.create_task(stack.ask_fully())
    await stack.wait_queued(1)
    high = asyncio.create_task(stack.ask_fully(sent={"x-gateway-inference-objective": "high"}))
    await stack.wait_queued(2)
    hold.set()
    done, _ = await asyncio.wait({low, high}, return_when=asyncio.FIRST_COMPLETED)
    assert high in done
    assert [(await task)[0] for task in (running, low, high)] == [200, 200, 200]


async def test_downgrade_routes_to_fallback_under_its_name(stack: GatewayStack) -> None:
    big, small = await stack.engine(), await stack.engine()
    hold = big.behaviour.release_event = asyncio.Event()
    down = {
        "whenFull": "Downgrade",
        "fallback": {"name": "small"},
        "classes": [{"name": "default", "maxQueueTime": "0s"}],
    }
    objects = [service_with_slo(admission=down, batch=1, slo={"tpot": "50ms"}), service_with_slo("small")]
    await stack.set_objects(objects, [pod(big.address), pod(small.address, service="small")])
    await stack.wait_routable(big)
    await stack.wait_routable(small, service="team/small")
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(big, 1)
    status, _, headers = await stack.ask_fully()
    assert (status, headers["x-engine"]) == (200, small.address)
    assert (small.header("x-plimsoll-model"), small.header("x-plimsoll-response-model")) == ("team/small", "small")
    hold.set()
    assert (await running)[0] == 200
    assert (big.header("x-plimsoll-model"), big.header("x-plimsoll-response-model")) == ("team/chat", None)
    assert (await stack.admission())["outcomes"] == {"Admitted": 1, "Downgraded": 1}


async def test_drain_serves_queued_requests(lone: GatewayStack) -> None:
    engine = await lone.engine()
    hold = engine.behaviour.release_event = asyncio.Event()
    await lone.start([service_with_slo(batch=1)], [pod(engine.address)])
    await lone.wait_routable(engine)
    running = asyncio.create_task(lone.ask_fully())
    await lone.wait_inflight(engine, 1)
    queued = asyncio.create_task(lone.ask_fully())
    await lone.wait_queued(1)
    picker = lone.picker
    assert picker is not None
    picker.terminate()

    async def drains() -> bool:
        async with lone.http.get(f"{lone.url}/healthz") as answer:
            return answer.status == 503

    await wait_until(drains, "the gateway drains")
    hold.set()
    assert [(await task)[0] for task in (running, queued)] == [200, 200]
    await wait_until(lambda: picker.poll() is not None, "the picker ends")
    assert picker.returncode == 0


async def test_responses_are_assessed_by_class_targets(stack: GatewayStack) -> None:
    engine = await stack.engine()
    classes = [{"name": "patient", "slo": {"ttft": "30m", "e2e": "1h"}}, {"name": "default"}]
    obj = service_with_slo(
        admission={"classes": classes}, classes=("patient", "default"), slo={"ttft": "1us", "tpot": "50ms"}
    )
    await stack.set_objects([obj], [pod(engine.address)])
    await stack.wait_routable(engine)
    for klass in ("patient", "default", "default"):
        assert (await stack.ask_fully(sent={"x-gateway-inference-objective": klass}))[0] == 200
    assert (await stack.wait_completed(3))["slo"] == {
        "assessed": 3,
        "missed": 2,
        "missed_ttft": 2,
        "missed_e2e": 0,
        "tpot": {"targets_s": [0.05], "counts": [2]},  # the patient one is promised no pace
    }
