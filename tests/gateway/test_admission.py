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


async def test_a_full_engine_holds_what_can_still_be_in_time_and_lets_it_in_when_a_place_is_free() -> None:
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


async def test_the_gates_engine_is_named_first_and_others_are_to_be_tried_next() -> None:
    world = World(promised(), pods=engines(3))
    sent = [headers(world.ask())["x-plimsoll-endpoint"].split(",") for _ in range(6)]
    assert all(len(set(named)) == 3 for named in sent)
    assert sorted(named[0] for named in sent) == sorted(2 * [f"10.0.0.{n}:8000" for n in (1, 2, 3)])


async def test_what_cannot_be_in_time_is_refused_in_plain_words_with_a_ticket() -> None:
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


async def test_the_wake_timer_fires_once_and_resolves_once() -> None:
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


async def test_shed_refuses_at_once_and_who_comes_back_is_one_demand() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, ready_at_s=20.0, ready_work=2.0))
    reply = refused(world.ask())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 20 <= int(reply.headers["retry-after"]) <= 60
    world.asked -= 1  # the same body again, with no header that says so
    refused(world.ask())
    requests = world.service()["requests"]
    assert (requests["arrived"], requests["retried"]) == (1, 1)


@pytest.mark.parametrize("first", [0.9, 5.0])
async def test_tickets_are_for_the_start_that_leaves_room_beside_newcomers(first: float) -> None:
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


async def test_shed_holds_nothing_although_the_target_would_leave_time() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, batch=1), pods=engines(1))
    picked(world.ask())
    assert refused(world.ask()).error["code"] == "overloaded"


async def test_without_a_target_for_the_first_token_nothing_is_too_late() -> None:
    world = World(promised(admission={"whenFull": "Shed"}, batch=2, slo={"tpot": "50ms"}), pods=engines(1))
    picked(world.ask()), picked(world.ask())
    assert refused(world.ask()).error["code"] == "overloaded"


async def test_from_zero_requests_are_held_and_then_released_at_the_gates_pace() -> None:
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


async def test_the_last_engine_goes_in_the_moment_in_which_the_limits_move() -> None:
    """Nobody is sent to it: who comes is held until there is one again."""
    world = World(promised(batch=2), pods=engines(1))
    world.have(promised(batch=3))
    held = world.hold()
    assert world.residents() == {}
    world.have(promised(batch=3), pods=engines(2))
    assert picked(held) == "10.0.0.1:8000"


async def test_from_zero_a_request_waits_as_long_as_its_class_may() -> None:
    classes = [{"name": "default", "holdFor": "5s"}]
    world = World(promised(admission={"classes": classes}))
    held = world.hold()
    world.pass_s(4.5)
    assert not held.done()
    world.pass_s(1.0)
    reply = refused(held)
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert "waited 5 s" in str(reply.error["message"])


async def test_a_start_that_takes_longer_than_the_class_may_wait_is_told_at_once() -> None:
    world = World(promised(ready_at_s=50.0, ready_work=10.0))
    reply = refused(world.ask())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert 50 <= int(reply.headers["retry-after"]) <= 60


async def test_where_nothing_starts_nobody_waits_and_nobody_is_told_to_come_back() -> None:
    reply = refused(World(promised(starting=False)).ask())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "no_endpoint", "false")


async def test_a_quota_is_kept_while_there_is_room() -> None:
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


async def test_a_guess_from_bytes_alone_says_of_no_prompt_that_it_is_too_long() -> None:
    world = World(promised(), pods=engines(1))
    picked(world.ask(pad="", prompt="x" * 2_000_000))
    assert refused(world.ask(prompt="x" * 4_000_000)).status == 400


async def test_no_more_are_held_than_the_service_allows() -> None:
    world = World(promised(admission={"maxHeld": 2}), pods=engines(1))
    world.ask(), world.ask()
    held = [world.hold(), world.hold()]
    assert refused(world.ask()).error["code"] == "overloaded"
    assert world.service()["admission"]["held"] == 2
    held[0].cancel()
    await asyncio.sleep(0)
    world.hold()


async def test_classes_are_told_by_a_header_and_the_higher_goes_first() -> None:
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


async def test_a_service_without_a_promise_or_a_model_is_picked_as_before() -> None:
    for obj in (service(), promised(model=False)):
        world = World(obj, pods=engines(1))
        for _ in range(50):
            assert picked(world.ask()) == "10.0.0.1:8000"
        world.have(obj)
        assert refused(world.ask()).error["code"] == "model_starting"
        assert world.service()["admission"]["outcomes"] == {}


async def test_a_gateway_without_a_share_takes_one_as_if_it_were_one_more() -> None:
    world = World(promised(batch=6, shares={"other": 6}), pods=engines(1))
    for _ in range(3):
        picked(world.ask())
    world.hold()


async def test_a_share_is_kept_and_followed() -> None:
    world = World(promised(batch=6, shares={GATEWAY: 2, "other": 4}), pods=engines(1))
    picked(world.ask()), picked(world.ask())
    held = [world.hold(), world.hold()]
    world.have(promised(batch=6, shares={GATEWAY: 3, "other": 3}), pods=engines(1))
    assert [future.done() for future in held] == [True, False]
    assert world.service()["admission"]["units"] == 3
    world.have(promised(batch=6, shares={GATEWAY: 1, "other": 5}), pods=engines(1))
    assert (world.service()["admission"]["units"], world.service()["admission"]["in_use"]) == (1, 3)


async def test_spare_capacity_is_that_of_this_gateways_share() -> None:
    waits = {}
    for shares in ({GATEWAY: 6}, {GATEWAY: 2, "other": 4}):
        told = promised(admission={"whenFull": "Shed"}, batch=6, shares=shares, ready_at_s=10.0, ready_work=0.006)
        world = World(told)
        replies = [refused(world.ask()) for _ in range(8)]
        waits[len(shares)] = float(replies[-1].headers["x-plimsoll-eta"]) - 10.0
    assert waits[2] == pytest.approx(3 * waits[1], rel=0.1)


async def test_a_remote_prefill_is_sent_only_where_it_can_be_used() -> None:
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


async def test_a_prompt_that_the_gate_has_computed_in_place_is_named_no_prefill_engine() -> None:
    pods = pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill")
    for move_token_s, remote in ((1e-6, 1), (1e-2, 0)):
        world = World(promised(batch=20, transfer=TRANSFER, move_token_s=move_token_s), pods=pods)
        sent = headers(world.ask(prompt="x" * 4000))
        assert sent["x-plimsoll-endpoint"] == "10.0.0.1:8000"
        assert ("x-plimsoll-prefill" in sent) == bool(remote)
        assert world.service()["prefill"] == {"remote": remote, "local": 1 - remote}


def small(**fields: Any) -> Any:
    return promised("small", **fields)


BIG = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
SMALL = pod("10.0.1.1:8000", service="small")
NOW = {**BIG, "classes": [{"name": "default", "holdFor": "0s"}]}


def busy(*others: Any, pods: tuple[Any, ...] = (), admission: Any = NOW) -> World:
    """`chat` downgrades at once, and its one place is taken."""
    world = World(promised(admission=admission, batch=1, slo={"tpot": "50ms"}), *others, pods=(*engines(1), *pods))
    assert picked(world.ask()) == "10.0.0.1:8000"
    return world


async def test_a_downgrade_goes_to_the_fallbacks_gate_and_cluster() -> None:
    world = busy(small(batch=1), pods=(SMALL,))
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


async def test_a_fallback_without_a_gate_takes_what_comes() -> None:
    world = busy(service("small"), pods=(SMALL,))
    assert headers(world.ask())["x-plimsoll-response-model"] == "small"
    assert world.outcomes() == {"Admitted": 1, "Downgraded": 1}
    assert world.service("team/small")["requests"]["arrived"] == 1


async def test_the_original_refusal_is_given_where_the_fallback_is_not_there_or_not_reached_or_full() -> None:
    nowhere = busy()
    asleep = busy(small())
    full = busy(small(admission={"whenFull": "Shed"}, batch=1, slo={"tpot": "50ms"}), pods=(SMALL,))
    picked(full.ask("small"))
    for world in (nowhere, asleep, full):
        reply = refused(world.ask())
        assert (reply.status, reply.error["code"]) == (429, "overloaded")
        assert "'chat'" in str(reply.error["message"])
        assert world.outcomes() == {"Admitted": 1, "ShedSaturated": 1}
    assert full.service("team/small")["requests"]["arrived"] == 1
    assert full.service("team/small")["requests"]["refused"] == {}


async def test_two_services_that_fall_back_on_each_other_are_no_ring() -> None:
    back = {**NOW, "fallback": {"name": "chat"}}
    world = busy(small(admission=back, batch=1, slo={"tpot": "50ms"}), pods=(SMALL,))
    assert picked(world.ask()) == "10.0.1.1:8000"
    assert "'chat'" in str(refused(world.ask()).error["message"])
    assert "'small'" in str(refused(world.ask("small")).error["message"])


async def test_answers_by_bytes_tell_the_gate_how_fast_an_engine_is() -> None:
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


async def test_the_time_in_the_line_is_not_the_engines() -> None:
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


async def test_signals_are_what_the_operator_reads() -> None:
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


def test_metrics_count_what_signals_count_however_often_they_are_read() -> None:
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


def test_what_a_gateway_has_learned_of_its_engines_is_told_as_long_as_there_are_any() -> None:
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


async def test_an_envoy_record_of_a_client_that_left_ends_its_wait() -> None:
    world = World(promised())
    held = world.hold()
    world.picker.ended(Record(ticket="t1", flags="DC"), 1.0)
    assert held.cancelled()
    await asyncio.sleep(0)
    assert world.outcomes() == {"Held": 1, "ClientGone": 1}
    assert world.picker.held == 0
