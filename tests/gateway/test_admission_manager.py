"""Who is let in, held, sent elsewhere and refused at the gateway, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from plimsoll.adapters.signals import parse
from plimsoll.core.latency import KvTransfer
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.signals import show_metrics, signals
from plimsoll.telemetry import metrics
from tests.gateway.gated import GATEWAY, World, engines, headers, picked, promised, refused
from tests.gateway.objects import pod, service

TRANSFER = KvTransfer(32, 128)


async def test_full_engine_queues_and_admits_when_slot_is_free() -> None:
    world = World(promised(), pods=engines(1))
    first, second = world.ask(), world.ask()
    assert picked(first) == picked(second) == "10.0.0.1:8000"
    held = world.hold()
    assert (world.service()["admission"]["held"], world.service()["admission"]["in_use"]) == (1, 2)
    world.clock.pass_to(2.0)
    assert isinstance(first, bytes)
    world.end(first)
    assert headers(held)["x-plimsoll-cluster"] == "pick/team/chat"
    assert headers(held)["x-plimsoll-ticket"] == "t3"
    assert world.residents() == {"10.0.0.1:8000": 2}
    assert world.outcomes() == {"Admitted": 3, "Held": 1}
    assert world.service()["admission"]["held"] == 0


async def test_admitted_endpoint_is_first_and_others_follow() -> None:
    world = World(promised(), pods=engines(3))
    sent = [headers(world.ask())["x-plimsoll-endpoint"].split(",") for _ in range(6)]
    assert all(len(set(named)) == 3 for named in sent)
    assert sorted(named[0] for named in sent) == sorted(2 * [f"10.0.0.{n}:8000" for n in (1, 2, 3)])


async def test_late_request_is_rejected_with_retry_reservation() -> None:
    world = World(promised(ready_at_s=30.0, ready_work=5.0), pods=engines(2))
    for _ in range(4):
        world.ask()
    held = world.hold()
    world.pass_s(20.0)
    reply = refused(held)
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    assert str(reply.error["message"]).startswith("The model 'chat' is at its limit: its 2 ready engines are full.")
    assert 10 <= int(reply.headers["retry-after"]) <= 30
    assert reply.headers["x-plimsoll-eta"] == reply.headers["retry-after"]
    assert world.service()["requests"]["refused"] == {"overloaded": 1}
    assert world.outcomes() == {"Admitted": 4, "Held": 1, "ShedSaturated": 1}


async def test_wakeup_timer_fires_and_resolves_once() -> None:
    world = World(promised(), pods=engines(1))
    world.ask(), world.ask()
    held = world.hold()
    done: list[bytes] = []
    held.add_done_callback(lambda future: done.append(future.result()))
    assert len(world.clock.armed) == 1
    world.clock.pass_to(60.0)
    await asyncio.sleep(0)
    assert world.clock.fired == len(done) == 1
    assert world.clock.armed == []


async def test_shed_rejects_at_once_and_retry_is_not_new_demand() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, ready_at_s=20.0, ready_work=2.0))
    reply = refused(world.ask())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 20 <= int(reply.headers["retry-after"]) <= 60
    world.asked -= 1  # the same body again, with no header that says so
    refused(world.ask())
    requests = world.service()["requests"]
    assert (requests["arrived"], requests["retried"]) == (1, 1)


@pytest.mark.parametrize("first", [0.9, 5.0])
async def test_retry_reservation_uses_start_with_spare_capacity(first: float) -> None:
    """first: what the first of two replicas carries, over what newcomers bring."""
    world = World(promised(admission={"whenFull": "Shed"}, ready_at_s=60.0, ready_work=1e3))
    world.ask()
    each = world.picker.admission.guards["team/chat"].gate.offered_work_s
    starts = ((60.0, first * 2 * each), (100.0, 1e3))
    world.have(promised(admission={"whenFull": "Shed"}, ready_at_s=60.0, ready_work=1e3, starts=starts))
    for _ in range(20):
        replies = [world.ask(), world.ask()]
        world.pass_s(1.0)
    told_s = int(refused(replies[-1]).headers["x-plimsoll-eta"])
    assert (told_s + 19 >= 100) == (first < 1.0)


async def test_shed_queues_nothing_despite_time_left() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, batch=1), pods=engines(1))
    picked(world.ask())
    assert refused(world.ask()).error["code"] == "overloaded"


async def test_shed_without_ttft_target_rejects_as_overloaded() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, batch=2, slo={"tpot": "50ms"}), pods=engines(1))
    picked(world.ask()), picked(world.ask())
    assert refused(world.ask()).error["code"] == "overloaded"


async def test_scale_from_zero_queues_and_releases_by_capacity() -> None:
    world = World(promised(ready_at_s=10.0))
    held = [world.hold() for _ in range(5)]
    assert world.service()["admission"]["held"] == 5
    world.pass_s(9.0)
    assert not any(future.done() for future in held)
    world.have(promised(), pods=engines(1), unreachable=("10.0.0.1:8000",))
    assert not any(future.done() for future in held)
    world.have(promised(), pods=engines(1))
    assert [future.done() for future in held] == [True, True, False, False, False]
    world.have(promised(), pods=engines(2))
    assert [future.done() for future in held] == [True, True, True, True, False]
    assert world.residents() == {"10.0.0.1:8000": 2, "10.0.0.2:8000": 2}


async def test_last_engine_lost_on_update_queues_requests() -> None:
    """Nobody is sent to it: who comes is held until there is one again."""
    world = World(promised(batch=2), pods=engines(1))
    world.have(promised(batch=3))
    held = world.hold()
    assert world.residents() == {}
    world.have(promised(batch=3), pods=engines(2))
    assert picked(held) == "10.0.0.1:8000"


async def test_scale_from_zero_waits_as_long_as_class_allows() -> None:
    classes = [{"name": "default", "holdFor": "5s"}]
    world = World(promised(admission={"classes": classes}))
    held = world.hold()
    world.pass_s(4.5)
    assert not held.done()
    world.pass_s(1.0)
    reply = refused(held)
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert "waited 5 s" in str(reply.error["message"])


async def test_startup_longer_than_hold_time_is_rejected_at_once() -> None:
    world = World(promised(ready_at_s=50.0, ready_work=10.0))
    reply = refused(world.ask())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 50 <= int(reply.headers["retry-after"]) <= 60


async def test_no_starting_engine_rejects_without_retry() -> None:
    reply = refused(World(promised(starting=False)).ask())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "no_endpoint", "false")


async def test_tenant_quota_applies_despite_free_slots() -> None:
    limited = {"tenants": [{"name": "jobs", "requestsPerSecond": "0.1"}]}
    world = World(promised(admission=limited, batch=20), pods=engines(1))
    told = {"x-gateway-inference-fairness-id": "jobs"}
    picked(world.ask(headers=told))
    reply = refused(world.ask(headers=told))
    assert (reply.status, reply.error["code"]) == (429, "quota_exceeded")
    assert int(reply.headers["retry-after"]) == 10
    assert "'jobs'" in str(reply.error["message"])
    picked(world.ask())


async def test_prompt_on_no_engine_names_the_limit() -> None:
    world = World(promised(), pods=engines(1))
    reply = refused(world.ask(prompt="x" * 4_000_000))
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (400, "request_too_large", "false")
    message = str(reply.error["message"])
    assert "The prompt is too long" in message
    assert "about 1000000 tokens" in message
    assert "This model's maximum context length is at most 200000 tokens" in message
    assert world.outcomes() == {"ShedNoCapacity": 1}


async def test_n_above_every_engine_is_refused_unasked() -> None:
    world = World(promised(), pods=engines(1))
    reply = refused(world.ask(n=2049))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "request_too_large", "n")
    assert "at most 2048 sequences" in str(reply.error["message"])
    assert world.outcomes() == {"ShedNoCapacity": 1}
    picked(world.ask(n=2048))


async def test_prompt_estimate_from_bytes_rejects_no_long_prompt() -> None:
    world = World(promised(), pods=engines(1))
    picked(world.ask(pad="", prompt="x" * 2_000_000))
    assert refused(world.ask(prompt="x" * 4_000_000)).status == 400


async def test_queue_length_is_limited_by_max_held() -> None:
    world = World(promised(admission={"maxHeld": 2}), pods=engines(1))
    world.ask(), world.ask()
    held = [world.hold(), world.hold()]
    assert refused(world.ask()).error["code"] == "overloaded"
    assert world.service()["admission"]["held"] == 2
    held[0].cancel()
    await asyncio.sleep(0)
    world.hold()


async def test_class_header_sets_priority() -> None:
    classes = [{"name": "low", "priority": 0}, {"name": "high", "priority": 1}]
    world = World(promised(admission={"classes": classes}, classes=("low", "high")), pods=engines(1))
    first = world.ask()
    world.ask()
    other = world.hold(headers={"x-gateway-inference-objective": "no such class"})
    high = world.hold(headers={"x-gateway-inference-objective": "high"})
    assert isinstance(first, bytes)
    world.end(first)
    assert high.done()
    assert not other.done()


async def test_service_without_slo_or_model_is_not_limited() -> None:
    for obj in (service(), promised(model=False)):
        world = World(obj, pods=engines(1))
        for _ in range(50):
            assert picked(world.ask()) == "10.0.0.1:8000"
        world.have(obj)
        assert refused(world.ask()).error["code"] == "model_starting"
        assert world.service()["admission"]["outcomes"] == {}


async def test_gateway_without_share_assumes_one_more_gateway() -> None:
    world = World(promised(batch=6, shares={"other": 6}), pods=engines(1))
    for _ in range(3):
        picked(world.ask())
    world.hold()


async def test_capacity_share_is_enforced_and_updated() -> None:
    world = World(promised(batch=6, shares={GATEWAY: 2, "other": 4}), pods=engines(1))
    picked(world.ask()), picked(world.ask())
    held = [world.hold(), world.hold()]
    world.have(promised(batch=6, shares={GATEWAY: 3, "other": 3}), pods=engines(1))
    assert [future.done() for future in held] == [True, False]
    assert world.service()["admission"]["units"] == 3
    world.have(promised(batch=6, shares={GATEWAY: 1, "other": 5}), pods=engines(1))
    assert (world.service()["admission"]["units"], world.service()["admission"]["in_use"]) == (1, 3)


async def test_eta_scales_with_capacity_share() -> None:
    waits = {}
    for shares in ({GATEWAY: 6}, {GATEWAY: 2, "other": 4}):
        told = promised(admission={"whenFull": "Shed"}, batch=6, shares=shares, ready_at_s=10.0, ready_work=0.006)
        world = World(told)
        replies = [refused(world.ask()) for _ in range(8)]
        waits[len(shares)] = float(replies[-1].headers["x-plimsoll-eta"]) - 10.0
    assert waits[2] == pytest.approx(3 * waits[1], rel=0.1)


async def test_remote_prefill_is_used_only_where_possible() -> None:
    pods = (
        pod("10.0.0.1:8000", role="decode"),
        pod("10.0.0.2:8000", role="prefill"),
        pod("10.0.0.3:8000", role="prefill", revision="r2"),
    )
    world = World(promised(batch=20, transfer=TRANSFER), pods=pods)
    assert headers(world.ask(pad="", prompt="x" * 4000))["x-plimsoll-prefill"] == "10.0.0.2:8000"
    assert "x-plimsoll-prefill" not in headers(world.ask(prompt="x" * 400))
    assert "x-plimsoll-prefill" not in headers(world.ask(prompt="x" * 4000, n=2))
    assert world.service()["prefill"] == {"remote": 1, "local": 2}


async def test_local_prefill_decision_names_no_prefill_engine() -> None:
    pods = pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill")
    for move_token_s, remote in ((1e-6, 1), (1e-2, 0)):
        world = World(promised(batch=20, transfer=TRANSFER, move_token_s=move_token_s), pods=pods)
        sent = headers(world.ask(prompt="x" * 4000))
        assert sent["x-plimsoll-endpoint"] == "10.0.0.1:8000"
        assert ("x-plimsoll-prefill" in sent) == bool(remote)
        assert world.service()["prefill"] == {"remote": remote, "local": 1 - remote}


def small(**fields: Any) -> Any:
    return promised("small", **fields)


DOWNGRADE = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
FALLBACK_POD = pod("10.0.1.1:8000", service="small")
DOWNGRADE_AT_ONCE = {**DOWNGRADE, "classes": [{"name": "default", "holdFor": "0s"}]}


def saturated_world(*others: Any, pods: tuple[Any, ...] = (), admission: Any = DOWNGRADE_AT_ONCE) -> World:
    """`chat` downgrades at once, and its one place is taken."""
    world = World(promised(admission=admission, batch=1, slo={"tpot": "50ms"}), *others, pods=(*engines(1), *pods))
    assert picked(world.ask()) == "10.0.0.1:8000"
    return world


async def test_downgrade_uses_fallback_admission_and_cluster() -> None:
    world = saturated_world(small(batch=1), pods=(FALLBACK_POD,))
    sent = headers(world.ask())
    assert (sent["x-plimsoll-cluster"], sent["x-plimsoll-endpoint"]) == ("pick/team/small", "10.0.1.1:8000")
    assert sent["x-plimsoll-response-model"] == "small"
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1}
    assert world.outcomes("team/small") == {"Admitted": 1}
    assert world.service()["requests"]["arrived"] == 2
    assert world.service("team/small")["requests"]["arrived"] == 1
    assert world.residents("team/small") == {"10.0.1.1:8000": 1}
    held = world.hold()
    assert world.service("team/small")["admission"]["held"] == 1
    world.pass_s(20.0)
    reply = refused(held)
    assert (reply.status, reply.error["code"]) == (429, "overloaded")
    assert "'chat'" in str(reply.error["message"])
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1, "ShedSaturated": 1}
    assert world.service("team/small")["requests"]["arrived"] == 1
    assert world.service()["requests"]["refused"] == {"overloaded": 1}
    assert len(world.picker.admission.guards["team/small"].gate.tickets) == 0
    assert len(world.picker.admission.guards["team/chat"].gate.tickets) == 1


async def test_fallback_without_admission_accepts_all() -> None:
    world = saturated_world(service("small"), pods=(FALLBACK_POD,))
    assert headers(world.ask())["x-plimsoll-response-model"] == "small"
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1}
    assert world.service("team/small")["requests"]["arrived"] == 1


async def test_unusable_fallback_returns_original_rejection() -> None:
    nowhere = saturated_world()
    asleep = saturated_world(small())
    full = saturated_world(small(admission={"whenFull": "Shed"}, batch=1, slo={"tpot": "50ms"}), pods=(FALLBACK_POD,))
    picked(full.ask("small"))
    for world in (nowhere, asleep, full):
        reply = refused(world.ask())
        assert (reply.status, reply.error["code"]) == (429, "overloaded")
        assert "'chat'" in str(reply.error["message"])
        assert world.outcomes() == {"Admitted": 1, "ShedSaturated": 1}
    assert full.service("team/small")["requests"]["arrived"] == 1
    assert full.service("team/small")["requests"]["refused"] == {}


async def test_mutual_fallbacks_do_not_loop() -> None:
    back = {**DOWNGRADE_AT_ONCE, "fallback": {"name": "chat"}}
    world = saturated_world(small(admission=back, batch=1, slo={"tpot": "50ms"}), pods=(FALLBACK_POD,))
    assert picked(world.ask()) == "10.0.1.1:8000"
    assert "'chat'" in str(refused(world.ask()).error["message"])
    assert "'small'" in str(refused(world.ask("small")).error["message"])


async def test_response_bytes_update_step_time_ratio() -> None:
    world = World(promised(batch=50), pods=engines(1))
    replica = world.picker.admission.guards["team/chat"].gate.fleet.replicas["10.0.0.1:8000"]
    mean = replica.limits.output_mean
    for _ in range(60):
        reply = world.ask(stream=True)
        assert isinstance(reply, bytes)
        world.clock.pass_to(world.clock.now_s + 4.0)  # four times what the model says
        world.end(reply, ttft_us=100_000, duration_us=4_000_000, sent=40_000)
    assert replica.pace > 2.0
    assert mean == pytest.approx(700 / 3, rel=1e-3)
    for _ in range(5):  # neither a whole answer in one piece nor a broken one says anything
        before = replica.pace
        for fields, record in (({}, {"sent": 9}), ({"stream": True}, {"sent": 9, "flags": "UC"})):
            reply = world.ask(**fields)
            assert isinstance(reply, bytes)
            world.end(reply, **({"ttft_us": 1, "duration_us": 9} | record))
        assert replica.pace == before


async def test_queue_time_is_excluded_from_ttft_margin() -> None:
    world = World(promised(batch=1), pods=engines(1))
    guard = world.picker.admission.guards["team/chat"]
    margin = guard.gate._margins[0]
    first = world.ask()
    held = world.hold()
    world.clock.pass_to(5.0)
    assert isinstance(first, bytes)
    world.end(first)
    before = margin.margin_s
    world.clock.pass_to(8.0)
    world.end(held.result(), ttft_us=6_040_000, received_us=1_000_000)
    assert margin.margin_s < before  # 40 ms after it was let in, not 5 s


async def test_signals_document_is_read_by_operator() -> None:
    world = World(promised(ready_at_s=10.0))
    world.hold()
    document = signals(world.picker, GATEWAY, synced=True)
    assert document["version"] == 3
    read = parse(document, GATEWAY, 0.0).reading.services["team/chat"]
    assert (read.waiting, read.in_use, read.outcomes) == (1, 0, {"Held": 1})
    assert read.held_work_s > 0
    show_metrics(world.picker)
    assert metrics.GATEWAY.get_sample_value("plimsoll_gateway_held", {"service": "team/chat"}) == 1.0
    labels = {"service": "team/chat", "outcome": "Held"}
    assert (metrics.GATEWAY.get_sample_value("plimsoll_gateway_outcomes_total", labels) or 0.0) >= 1.0


def test_metrics_equal_signals_however_often_read() -> None:
    def read(name: str, **labels: str) -> float:
        show_metrics(world.picker)
        return metrics.GATEWAY.get_sample_value(name, {"service": "team/counted", **labels}) or 0.0

    world = World(promised("counted", batch=50), pods=engines(1, service="counted"))
    for count in (1, 2, 3):
        reply = world.ask("counted")
        assert isinstance(reply, bytes)
        world.end(reply)
        for _ in range(2):
            assert read("plimsoll_gateway_requests_arrived_total", attempt="first") == count
            assert read("plimsoll_gateway_outcomes_total", outcome="Admitted") == count
            assert read("plimsoll_gateway_requests_ended_total", outcome="answered") == count
    world.have()
    assert read("plimsoll_gateway_requests_arrived_total", attempt="first") == 0.0


def test_engine_estimates_are_exported_while_engines_exist() -> None:
    def read(name: str) -> float | None:
        show_metrics(world.picker)
        return metrics.GATEWAY.get_sample_value(f"plimsoll_gateway_{name}", {"service": "team/learned"})

    world = World(promised("learned", batch=50), pods=engines(1, service="learned"))
    assert (read("engine_pace_ratio"), read("unseen_first_token_seconds")) == (1.0, 0.0)
    for at_s in range(1, 9):
        replies = [world.ask("learned") for _ in range(20)]
        world.clock.pass_to(float(at_s))
        for reply in replies:
            assert isinstance(reply, bytes)
            world.end(reply, ttft_us=at_s * 1_000_000 - 100_000, received_us=(at_s - 1) * 1_000_000)
    assert read("unseen_first_token_seconds") == 0.0  # an empty engine owes nothing
    for _ in range(20):
        world.ask("learned")
    late_s = read("unseen_first_token_seconds")
    assert late_s is not None
    assert late_s > 0.0
    world.have()
    assert read("engine_pace_ratio") is None


async def test_client_disconnect_record_ends_queued_request() -> None:
    world = World(promised())
    held = world.hold()
    world.picker.ended(Record(ticket="t1", flags="DC"), 1.0)
    assert held.cancelled()
    await asyncio.sleep(0)
    assert world.outcomes() == {"Held": 1, "ClientGone": 1}
    assert world.picker.held == 0
