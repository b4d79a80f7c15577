"""Admission through real Envoy: requests that wait, are refused, go to another model, or whose client leaves."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.gated import promised
from tests.gateway.objects import pod
from tests.gateway.stack import Stack, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


async def test_scale_from_zero_queues_then_admits(stack: Stack) -> None:
    await stack.have([promised()], [])
    asked = [asyncio.create_task(stack.ask_fully()) for _ in range(3)]
    await stack.held(3)
    engine = await stack.engine()
    hold = engine.behaviour.hold = asyncio.Event()
    stack.set([promised()], [pod(engine.address)])
    await until(lambda: engine.open == 2, "as many as there are places are let in")
    assert (await stack.admission())["held"] == 1
    hold.set()
    assert [status for status, *_ in await asyncio.gather(*asked)] == [200, 200, 200]
    assert (await stack.admission())["outcomes"] == {"Held": 3, "Admitted": 3}
    assert (await stack.admin.stats()).failed_open == 0


async def test_full_service_rejects_with_retry_after(stack: Stack) -> None:
    engine = await stack.engine()
    hold = engine.behaviour.hold = asyncio.Event()
    await stack.have([promised(admission={"whenFull": "Shed"}, batch=1)], [pod(engine.address)])
    await stack.routable(engine)
    running = asyncio.create_task(stack.ask_fully())
    await stack.inflight(engine, 1)
    status, body, headers = await stack.ask_fully()
    assert (status, body["error"]["code"], headers["x-plimsoll-reason"]) == (429, "overloaded", "overloaded")
    assert 10 <= int(headers["retry-after"]) <= 30
    hold.set()
    assert (await running)[0] == 200
    await stack.inflight(engine, 0)
    assert (await stack.ask_fully())[0] == 200


async def test_queued_client_disconnect_frees_slot(stack: Stack) -> None:
    engine = await stack.engine()
    hold = engine.behaviour.hold = asyncio.Event()
    await stack.have([promised(batch=1)], [pod(engine.address)])
    await stack.routable(engine)
    running = asyncio.create_task(stack.ask_fully())
    await stack.inflight(engine, 1)
    leaving = asyncio.create_task(stack.ask_fully())
    await stack.held(1)
    staying = asyncio.create_task(stack.ask_fully())
    await stack.held(2)
    leaving.cancel()
    await stack.held(1)
    hold.set()
    assert [status for status, *_ in (await running, await staying)] == [200, 200]
    assert len(engine.seen) == 2
    assert (await stack.admission())["outcomes"] == {"Held": 2, "Admitted": 2, "ClientGone": 1}
    await stack.inflight(engine, 0)


async def test_headers_set_class_and_tenant_but_not_request_id(stack: Stack) -> None:
    engine = await stack.engine()
    classes = [{"name": "low"}, {"name": "high", "priority": 1}]
    tenants = [{"name": "jobs", "requestsPerSecond": "0.001"}]
    await stack.have(
        [promised(admission={"classes": classes, "tenants": tenants}, classes=("low", "high"), batch=1)],
        [pod(engine.address)],
    )
    await stack.routable(engine)
    jobs = {"x-gateway-inference-fairness-id": "jobs", "x-plimsoll-ticket": "mine"}
    assert (await stack.ask_fully(sent=jobs))[0] == 200
    assert len(engine.header("x-plimsoll-ticket") or "") == 36
    await stack.inflight(engine, 0)
    status, body, headers = await stack.ask_fully(sent=jobs)
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (429, "quota_exceeded", "false")
    hold = engine.behaviour.hold = asyncio.Event()
    running = asyncio.create_task(stack.ask_fully())
    await stack.inflight(engine, 1)
    low = asyncio.create_task(stack.ask_fully())
    await stack.held(1)
    high = asyncio.create_task(stack.ask_fully(sent={"x-gateway-inference-objective": "high"}))
    await stack.held(2)
    hold.set()
    done, _ = await asyncio.wait({low, high}, return_when=asyncio.FIRST_COMPLETED)
    assert high in done
    assert [(await task)[0] for task in (running, low, high)] == [200, 200, 200]


async def test_downgrade_routes_to_fallback_under_its_name(stack: Stack) -> None:
    big, small = await stack.engine(), await stack.engine()
    hold = big.behaviour.hold = asyncio.Event()
    down = {
        "whenFull": "Downgrade",
        "fallback": {"name": "small"},
        "classes": [{"name": "default", "holdFor": "0s"}],
    }
    objects = [promised(admission=down, batch=1, slo={"tpot": "50ms"}), promised("small")]
    await stack.have(objects, [pod(big.address), pod(small.address, service="small")])
    await stack.routable(big)
    await stack.routable(small, service="team/small")
    running = asyncio.create_task(stack.ask_fully())
    await stack.inflight(big, 1)
    status, _, headers = await stack.ask_fully()
    assert (status, headers["x-engine"]) == (200, small.address)
    assert (small.header("x-plimsoll-model"), small.header("x-plimsoll-response-model")) == ("team/small", "small")
    hold.set()
    assert (await running)[0] == 200
    assert (big.header("x-plimsoll-model"), big.header("x-plimsoll-response-model")) == ("team/chat", None)
    assert (await stack.admission())["outcomes"] == {"Admitted": 1, "Downgraded": 1}


async def test_drain_serves_queued_requests(lone: Stack) -> None:
    engine = await lone.engine()
    hold = engine.behaviour.hold = asyncio.Event()
    await lone.up([promised(batch=1)], [pod(engine.address)])
    await lone.routable(engine)
    running = asyncio.create_task(lone.ask_fully())
    await lone.inflight(engine, 1)
    held = asyncio.create_task(lone.ask_fully())
    await lone.held(1)
    picker = lone.picker
    assert picker is not None
    picker.terminate()

    async def is_unready() -> bool:
        async with lone.http.get(f"{lone.picker_url}/readyz") as answer:
            return answer.status == 503

    await until(is_unready, "the gateway drains")
    hold.set()
    assert [(await task)[0] for task in (running, held)] == [200, 200]
    await until(lambda: picker.poll() is not None, "the picker ends")
    assert picker.returncode == 0


async def test_responses_are_assessed_by_class_targets(stack: Stack) -> None:
    engine = await stack.engine()
    classes = [{"name": "patient", "slo": {"ttft": "30m", "e2e": "1h"}}, {"name": "default"}]
    told = promised(admission={"classes": classes}, classes=("patient", "default"), slo={"ttft": "1us", "tpot": "50ms"})
    await stack.have([told], [pod(engine.address)])
    await stack.routable(engine)
    for klass in ("patient", "default", "default"):
        assert (await stack.ask_fully(sent={"x-gateway-inference-objective": klass}))[0] == 200
        await stack.inflight(engine, 0)
    judged = (await stack.signals())["services"]["team/chat"]["promise"]
    assert judged == {
        "judged": 3,
        "missed": 2,
        "missed_ttft": 2,
        "missed_e2e": 0,
        "tpot": {"targets_s": [0.05], "answers": [2]},  # the patient one is promised no pace
    }
