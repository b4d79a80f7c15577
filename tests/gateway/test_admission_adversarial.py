"""Admission at the gateway where the world changes under those who wait: nobody is lost and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from plimsoll.core.admission import Outcome
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.guard import MOST_TENANTS
from plimsoll.gateway.http1 import Request, response
from plimsoll.gateway.inflight import OLDEST_SECONDS
from plimsoll.gateway.picker import MOST_HELD_BYTES
from plimsoll.gateway.policy import Policies
from plimsoll.gateway.server import Door
from plimsoll.gateway.signals import signals
from tests.gateway.gated import GATEWAY, World, engines, headers, picked, promised, refused
from tests.gateway.objects import pod, service

ONE = "10.0.0.1:8000"
TWO = "10.0.0.2:8000"


def is_empty(world: World) -> bool:
    """Nothing is held, running or counted anywhere, and no timer runs."""
    picker = world.picker
    guards = picker.admission.guards.values()
    return (
        picker.held == len(picker.inflight) == len(picker.admission) == 0
        and all(load.inflight == 0 for load in picker.inflight.loads.values())
        and all(guard.gate.held == len(guard.held) == len(guard.gate.fleet) == 0 for guard in guards)
        and all(guard.gate.held_work_s == 0.0 for guard in guards)
    )


async def test_thousands_of_disconnects_leave_no_state() -> None:
    world = World(promised(admission={"maxHeld": 5000}))
    held = [world.hold(headers={"x-gateway-inference-fairness-id": f"t{n % 7}"}) for n in range(3002)]
    world.have(promised(admission={"maxHeld": 5000}), pods=engines(1))
    running = [future.result() for future in held if future.done()]
    for future in held:
        future.cancel()
    await asyncio.sleep(0)
    for reply in running:
        world.end(reply)
    world.pass_s(2.0)
    assert is_empty(world)
    assert world.clock.armed == []
    assert world.outcomes() == {"Admitted": 2, "Held": 3002, "ClientGone": 3000}
    world.pass_s(70.0)
    assert world.picker.admission.guards["team/chat"].gate.tenants_known == 0


async def test_disconnect_at_admission_releases_slot() -> None:
    world = World(promised(batch=1), pods=engines(1))
    first = world.ask()
    leaving, next_one = world.hold(), world.hold()
    assert isinstance(first, bytes)
    leaving.cancel()  # the loop has not said so yet
    world.end(first)
    assert world.residents() == {ONE: 0}
    await asyncio.sleep(0)
    world.pass_s(1.0)
    assert picked(next_one) == ONE
    world.end(next_one.result())
    assert is_empty(world)
    assert world.outcomes()["ClientGone"] == 1


async def test_disconnect_during_admission_rebuild_leaves_no_state() -> None:
    world = World(promised())
    leaving, staying = world.hold(), world.hold()
    leaving.cancel()  # the loop has not said so yet
    world.have(promised(admission={"classes": [{"name": "other"}]}, classes=("other",)))
    assert world.service()["admission"]["held"] == 1
    await asyncio.sleep(0)
    staying.cancel()
    await asyncio.sleep(0)
    assert is_empty(world)


async def test_lost_engine_releases_slots_and_returns_with_running() -> None:
    world = World(promised(), pods=engines(2))
    replies = [world.ask() for _ in range(4)]
    held = world.hold()
    world.have(promised(), pods=engines(2), unreachable=(ONE,))
    assert world.residents() == {TWO: 2}
    assert not held.done()
    world.have(promised(), pods=engines(2))
    assert world.residents() == {ONE: 2, TWO: 2}
    assert not held.done()
    for reply in replies:
        assert isinstance(reply, bytes)
        world.end(reply, code=503, flags="UC")
    world.pass_s(6.0)
    world.end(held.result())
    assert is_empty(world)


async def test_missing_limits_admit_everything() -> None:
    for after in (promised(model=False), service(), {**promised(), "status": {"admission": {"version": 99}}}):
        world = World(promised(), pods=engines(1))
        replies = [world.ask(), world.ask()]
        held = [world.hold(), world.hold()]
        world.have(after, pods=engines(1))
        assert [picked(future) for future in held] == [ONE, ONE]
        assert world.picker.held == 0
        world.have(promised(), pods=engines(1))
        assert world.residents() == {ONE: 4}
        for reply in (*replies, *(future.result() for future in held)):
            assert isinstance(reply, bytes)
            world.end(reply)
        assert is_empty(world)


async def test_missing_limits_at_zero_reject_as_starting() -> None:
    world = World(promised())
    held = world.hold()
    world.have(promised(model=False))
    assert refused(held).error["code"] == "model_starting"


async def test_deleted_service_rejects_queued_as_not_found() -> None:
    world = World(promised())
    held = [world.hold(), world.hold()]
    world.have()
    for future in held:
        reply = refused(future)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert is_empty(world)
    world.clock.pass_to(100.0)
    assert "team/chat" not in world.picker.tallies


async def test_class_change_keeps_running_and_queued_requests() -> None:
    world = World(promised(), pods=engines(1))
    replies = [world.ask(), world.ask()]
    held = [world.hold(), world.hold(headers={"x-gateway-inference-objective": "high"})]
    classes = [{"name": "low"}, {"name": "high", "priority": 5}]
    changed: dict[str, Any] = {"admission": {"classes": classes}}
    world.have(promised(**changed), pods=engines(1))  # the model is still that of the classes before
    assert not any(future.done() for future in held)
    assert world.residents() == {ONE: 2}
    world.have(promised(**changed, classes=("low", "high")), pods=engines(1))
    assert not any(future.done() for future in held)
    assert world.residents() == {ONE: 2}
    assert world.service()["admission"]["held"] == 2
    assert isinstance(replies[0], bytes)
    world.end(replies[0])
    assert [future.done() for future in held] == [False, True]
    for reply in (replies[1], held[1].result()):
        assert isinstance(reply, bytes)
        world.end(reply)
    world.end(held[0].result())
    assert is_empty(world)


async def test_class_change_keeps_retry_detection() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, ready_at_s=20.0, ready_work=2.0))
    refused(world.ask())
    classes = [{"name": "other"}]
    told = promised(
        admission={"whenFull": "Shed", "classes": classes}, classes=("other",), ready_at_s=20.0, ready_work=2.0
    )
    world.have(told)
    world.asked -= 1
    refused(world.ask())
    assert world.service()["requests"]["retried"] == 1


async def test_model_or_tenant_change_keeps_queued_requests() -> None:
    world = World(promised(), pods=engines(1))
    world.ask(), world.ask()
    held = world.hold()
    guard = world.picker.admission.guards["team/chat"]
    world.have(promised(admission={"tenants": [{"name": "a", "weight": 3}]}), pods=engines(1))
    assert not held.done()
    world.have(promised(batch=3), pods=engines(1))
    assert held.done()
    assert world.picker.admission.guards["team/chat"] is guard


async def test_admission_error_loses_no_request(caplog: pytest.LogCaptureFixture) -> None:
    world = World(promised(), pods=engines(1))
    world.ask(), world.ask()
    held = [world.hold(), world.hold()]
    with caplog.at_level(logging.ERROR):
        again = world.ask(headers={"x-plimsoll-ticket": "t1"})  # a ticket twice is what the gate cannot take
    assert picked(again) == ONE
    assert [picked(future) for future in held] == [ONE, ONE]
    assert "admission of team/chat failed" in caplog.text
    world.have(promised(), pods=engines(1))
    assert world.residents() == {ONE: 4}


async def test_expired_request_is_released_in_admission() -> None:
    world = World(promised(), pods=engines(1))
    world.ask(), world.ask()
    held = world.hold()
    world.picker.looked({ONE: 0})
    for look in (1.0, 2.0):
        world.clock.pass_to(look)
        world.picker.looked({ONE: 0})
    assert world.residents() == {ONE: 1}
    assert picked(held) == ONE
    world.clock.pass_to(OLDEST_SECONDS + 10.0)
    world.picker.looked({ONE: 1})
    assert len(world.picker.inflight) == len(world.picker.admission) == 0


async def test_request_completed_elsewhere_is_released_at_its_engine() -> None:
    world = World(promised(), pods=engines(2))
    reply = world.ask()
    assert picked(reply) == ONE
    assert isinstance(reply, bytes)
    world.end(reply, host=TWO)
    assert is_empty(world)
    assert picked(world.ask()) == TWO  # the other one has refused it
    world.pass_s(6.0)
    assert picked(world.ask()) == ONE


async def test_external_requests_use_engine_slots() -> None:
    world = World(promised(batch=4), pods=engines(1))
    world.picker.looked({ONE: 3})
    picked(world.ask())
    held = world.hold()
    assert world.service()["admission"]["in_use"] == 4
    world.picker.looked({ONE: 1})
    world.picker.looked({ONE: 1})
    assert picked(held) == ONE


async def test_all_engines_suspect_avoids_none() -> None:
    world = World(promised(), pods=engines(2))
    world.picker.doubt(ONE)
    assert [picked(world.ask()), picked(world.ask())] == [TWO, TWO]
    held = world.hold()
    world.picker.doubt(TWO)
    assert picked(held) == ONE


async def test_hostile_body_never_breaks_admission(caplog: pytest.LogCaptureFixture) -> None:
    world = World(promised(admission={"maxHeld": 1}), pods=engines(1))
    hostile: tuple[dict[str, Any], ...] = (
        {"n": 16_384, "prompt": ["a"] * 100_000},
        {"n": -1, "max_tokens": 0, "max_completion_tokens": 10**30},
        {"n": True, "max_tokens": True, "stream": "yes"},
        {"prompt": [[1, 2], [3]], "n": 10**25},
        {"prompt": [], "max_tokens": 1.5},
        {"prompt": {"a": 1}, "max_tokens": "7", "stream": None},
    )
    guard = world.picker.admission.guards["team/chat"]
    for fields in hostile:
        world.ask(**fields)
    assert world.picker.admission.guards["team/chat"] is guard
    assert caplog.text == ""


async def test_queued_body_bytes_are_limited() -> None:
    world = World(promised(admission={"maxHeld": 5000}))
    body = "x" * (8 << 20)
    held = [world.hold(pad=body) for _ in range(MOST_HELD_BYTES // (8 << 20) - 1)]
    assert refused(world.ask(pad=body)).error["code"] == "model_starting"
    held[0].cancel()
    await asyncio.sleep(0)
    world.hold(pad=body)


async def test_batch_growth_elsewhere_shrinks_own_share() -> None:
    world = World(promised(batch=6, shares={GATEWAY: 2, "other": 4}), pods=engines(1))
    replica = world.picker.admission.guards["team/chat"].gate.fleet.replicas[ONE]
    assert replica.scale == pytest.approx(3.0)
    world.have(promised(batch=8, shares={GATEWAY: 2, "other": 6}), pods=engines(1))
    assert replica.scale == pytest.approx(4.0)


async def test_unknown_tenants_beyond_limit_share_one_name() -> None:
    world = World(promised(admission={"maxHeld": 5000, "tenants": [{"name": "known"}]}))
    for n in range(MOST_TENANTS + 50):
        world.hold(headers={"x-gateway-inference-fairness-id": f"tenant-{n}"})
    world.hold(headers={"x-gateway-inference-fairness-id": "known"})
    world.hold(headers={"x-gateway-inference-fairness-id": "x" * 5000 + "\xff"})
    assert world.picker.admission.guards["team/chat"].gate.tenants_known <= MOST_TENANTS + 2


async def test_queue_time_never_exceeds_envoy_timeout() -> None:
    patient = {"ttft": "3600s", "tpot": "50ms"}
    world = World(promised(slo=patient, batch=1), pods=engines(1))
    world.ask()
    held = world.hold()
    world.pass_s(125.0)
    assert refused(held).status == 429


@pytest.mark.parametrize(
    "broken",
    [
        {"spec": {"slo": 3}},
        {"spec": {"slo": {"ttft": "1s"}, "admission": "no"}},
        {"status": {"admission": []}},
        {"status": {"admission": {"version": 1}}},
        {"status": {"admission": {"version": 1, "classes": None, "limits": {}, "shares": 3}}},
        {"status": "gone"},
    ],
)
async def test_unreadable_object_has_no_policy_and_logs_once(broken: Any, caplog: pytest.LogCaptureFixture) -> None:
    obj = promised()
    obj = {**obj, **broken, "spec": {**obj["spec"], **broken.get("spec", {})}}
    policies = Policies()
    with caplog.at_level(logging.WARNING):
        for same in (obj, {**obj}):
            policy = policies.of("team/chat", same)
            assert policy is None or not policy.gated
    assert caplog.text.count("no admission for team/chat") == 1
    part = next(iter(broken)) if "spec" in broken else "status.admission"
    assert policies.unread("team/chat").startswith(f"{part}: ")
    readable = promised()
    assert policies.of("team/chat", readable) is policies.of("team/chat", readable) is not None
    assert policies.of("team/chat", promised()) is policies.of("team/chat", readable)
    assert policies.unread("team/chat") == ""


async def test_unreadable_publication_still_counts_slo() -> None:
    """An operator of a newer release: no gate, no lost request, and a word about it for as long as it lasts."""
    obj = promised(slo={"ttft": "1s"}, batch=1)
    obj["status"]["admission"]["version"] = 99
    world = World(obj, pods=engines(1))
    replies = [world.ask(), world.ask()]
    assert [picked(reply) for reply in replies] == ["10.0.0.1:8000"] * 2
    for reply in replies:
        assert isinstance(reply, bytes)
        world.end(reply, ttft_us=2_000_000, duration_us=3_000_000)
    told = signals(world.picker, GATEWAY, synced=True)["services"]["team/chat"]
    assert told["object"] == {"version": "", "gated": False, "unread": UNREADABLE_MESSAGE}
    assert told["promise"]["missed_ttft"] == 2
    world.have(promised(slo={"ttft": "1s"}, batch=1), pods=engines(1))
    told = signals(world.picker, GATEWAY, synced=True)["services"]["team/chat"]
    assert told["object"] == {"version": "", "gated": True, "unread": ""}


UNREADABLE_MESSAGE = "status.admission: a model of version 99, not of version 3"


class FakeTransport(asyncio.Transport):
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.written += bytes(data)


CHECK_REQUEST = b"POST /check HTTP/1.1\r\ncontent-length: 0\r\n\r\n"


async def test_http_protocol_cancels_handler_on_disconnect() -> None:
    held: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    door, wire = Door(lambda request: held, 1024, None), FakeTransport()
    door.connection_made(wire)
    door.data_received(CHECK_REQUEST)
    door.connection_lost(None)
    assert held.cancelled()
    await asyncio.sleep(0)
    assert wire.written == b""


async def test_http_protocol_responds_in_order_and_maps_error_to_500() -> None:
    loop = asyncio.get_running_loop()
    replies: list[Any] = [loop.create_future(), response(404), loop.create_future(), response(413)]

    def handle(_: Request) -> Any:
        return replies.pop(0)

    first, third = replies[0], replies[2]
    door, wire = Door(handle, 1024, None), FakeTransport()
    door.connection_made(wire)
    door.data_received(4 * CHECK_REQUEST)
    assert wire.written == b""
    first.set_result(response(200))
    await asyncio.sleep(0)
    third.set_exception(RuntimeError("as a test of faults"))
    await asyncio.sleep(0)
    statuses = [line.split(b" ")[1] for line in wire.written.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
    assert statuses == [b"200", b"404", b"500", b"413"]


class Churn:
    """Requests of which some end, some leave, and the rest go on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running: list[bytes] = []
        self.waiting: list[asyncio.Future[bytes]] = []

    async def come(self, step: int) -> None:
        reply = self.world.ask(stream=step % 2 == 0)
        if isinstance(reply, asyncio.Future):
            self.waiting.append(reply)
        else:
            self._go(reply)  # type: ignore[arg-type]
        await self.settle()

    async def leave(self) -> None:
        if self.waiting:
            self.waiting[0].cancel()
        await self.settle()

    async def end(self) -> None:
        if self.running:
            self.world.end(self.running.pop(0), ttft_us=50_000, sent=1000)
        await self.settle()

    async def settle(self) -> None:
        await asyncio.sleep(0)
        for future in [future for future in self.waiting if future.done()]:
            self.waiting.remove(future)
            if not future.cancelled():
                self._go(future.result())

    def _go(self, reply: bytes) -> None:
        if b"x-plimsoll-endpoint" in reply:
            self.running.append(reply)


async def test_outcomes_add_up_under_churn() -> None:
    few: dict[str, Any] = {"admission": {"maxHeld": 20}}
    world = World(promised(**few), pods=engines(2))
    crowd = Churn(world)
    for step in range(400):
        await crowd.come(step)
        if step % 3 == 0:
            await crowd.end()
        if step % 7 == 0:
            await crowd.leave()
        if step % 40 == 20:
            world.have(promised(**few), pods=engines(2), unreachable=(ONE,))
        if step % 40 == 35:
            world.have(promised(**few, batch=2 + step % 2), pods=engines(2))
        world.pass_s(0.3)
        await crowd.settle()
    outcomes = world.outcomes()
    assert sum(count for name, count in outcomes.items() if name != Outcome.HELD) + world.picker.held == 400
    assert min(outcomes.values()) > 20
    while crowd.running or crowd.waiting:
        await crowd.leave()
        await crowd.end()
    assert is_empty(world)


async def test_capacity_share_is_found_by_gateway_name() -> None:
    world = World(promised(batch=8, shares={GATEWAY: 1, "other": 7}), pods=(pod(ONE),))
    assert isinstance(world.ask(), bytes)
    held = world.hold()
    world.have(promised(batch=8, shares={GATEWAY: 2, "other": 6}), pods=(pod(ONE),))
    assert headers(held)["x-plimsoll-endpoint"] == ONE


async def test_gateway_with_zero_share_admits() -> None:
    world = World(promised(batch=8, shares={GATEWAY: 0, "other": 8}), pods=(pod(ONE),))
    assert [isinstance(world.ask(), bytes) for _ in range(4)] == [True] * 4
    assert world.hold()


async def test_record_without_request_id_changes_nothing() -> None:
    world = World(promised(), pods=engines(1))
    held = world.ask()
    assert not world.picker.ended(Record(host="/run/plimsoll/picker.sock", code=429), 0.0)
    assert isinstance(held, bytes)
    assert len(world.picker.inflight) == 1
