"""One queue of several gateways: whatever one gateway can do, any number of them does together."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.applied_engines import AppliedEngines
from plimsoll.telemetry import gateway_metrics
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.one_queue_harness import Gateway, Gateways, eventually, fallbacks, is_admitted, make_catalog
from tests.gateway.picker_harness import engine_names, picked_engine, rejection_of, response_headers, service_with_slo

SHED = {"whenFull": "Shed"}
DOWNGRADE_AT_ONCE = {
    "whenFull": "Downgrade",
    "fallback": {"name": "small"},
    "classes": [{"name": "default", "maxQueueTime": "0s"}],
}
TENANT = "x-gateway-inference-fairness-id"


def chat(batch: int = 9, **fields: object) -> Object:
    return service_with_slo(batch=batch, **fields)  # type: ignore[arg-type]


def delayed() -> float:
    """How many answers of owners have waited for an Envoy, in all tests of this process."""
    return float(gateway_metrics.GATEWAY_OWNER_ANSWERS_DELAYED._value.get())


async def ask_all(gateways: list[Gateway], count: int, **fields: object) -> list[tuple[Gateway, bytes]]:
    """Requests by turns, all at once, with their gateways."""
    by = [gateways[number % len(gateways)] for number in range(count)]
    replies = await asyncio.gather(*(g.ask(f"request {n}", **fields) for n, g in enumerate(by)))  # type: ignore[arg-type]
    return list(zip(by, replies, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_all_slots_are_used_by_any_number_of_gateways(tmp_path: Path, count: int) -> None:
    async with Gateways(tmp_path, count, chat(admission=SHED), pods=engine_names(1)) as gateways:
        replies = await ask_all(gateways.all, 30)
        assert sum(is_admitted(reply) for _, reply in replies) == 9
        assert gateways.owner().admits == 9
        for gateway, reply in replies:
            if is_admitted(reply):
                gateway.complete(reply)
        await eventually(lambda: gateways.owner().admits == 0, "the owner knows that all have ended")
        assert sum(is_admitted(reply) for _, reply in await ask_all(gateways.all, 30)) == 9


async def test_slots_follow_the_clients_at_once(tmp_path: Path) -> None:
    """All clients of a moment are at one gateway, which does not own the service."""
    async with Gateways(tmp_path, 3, chat(admission=SHED), pods=engine_names(1)) as gateways:
        replies = await ask_all(gateways.others()[:1], 20)
        assert sum(is_admitted(reply) for _, reply in replies) == 9


async def test_queued_request_gets_the_slot_of_another_gateway(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(1), pods=engine_names(1)) as gateways:
        first, second = gateways.others()
        reply = await first.ask("first")
        held = second.send("second")
        await eventually(lambda: gateways.owner().signals()["admission"]["queued"] == 1, "it is queued at the owner")
        assert not held.done()
        first.complete(reply)
        assert picked_engine(await held) == "10.0.0.1:8000"


async def test_answer_waits_until_own_envoy_knows_the_engine(tmp_path: Path) -> None:
    """The engine has become ready, and the owner's Envoy is the first to know it."""
    chats, pods, before = (chat(1),), engine_names(1), delayed()
    async with Gateways(tmp_path, 2, *chats) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        queued = other.send("queued")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "it is queued at the owner")
        owner.picker.set_catalog(make_catalog(chats, pods))
        await eventually(lambda: delayed() == before + 1, "the owner's answer waits")
        assert not queued.done()
        other.picker.set_catalog(make_catalog(chats, pods))
        reply = await queued
        assert picked_engine(reply) == "10.0.0.1:8000"
        other.complete(reply)
        await eventually(lambda: owner.admits == 0, "the owner knows that it has ended")


async def test_client_that_leaves_before_its_answer_frees_the_slot(tmp_path: Path) -> None:
    chats, pods, before = (chat(1),), engine_names(1), delayed()
    async with Gateways(tmp_path, 2, *chats) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        leaves = other.send("leaves")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "it is queued at the owner")
        owner.picker.set_catalog(make_catalog(chats, pods))
        await eventually(lambda: delayed() == before + 1, "the owner's answer waits")
        ((request_id, _),) = other.picker.inflight.requests()
        leaves.cancel()
        record = AccessRecord(request_id=request_id, upstream=None, status=0, flags="DC")
        other.picker.reports.on_access_record(record, time.monotonic())
        await eventually(lambda: owner.admits == 0, "the owner has the slot again")
        other.picker.set_catalog(make_catalog(chats, pods))
        assert is_admitted(await other.ask("next"))


async def test_answer_waits_for_envoy_no_longer_than_its_bound() -> None:
    released = asyncio.Event()
    engines = AppliedEngines(lambda key, address: False, max_wait_seconds=0.01)
    engines.when_applied("team/chat", "10.0.0.1:8000", released.set)
    engines.check()
    assert not released.is_set()
    async with asyncio.timeout(30):
        await released.wait()


async def test_client_that_leaves_is_taken_from_the_owners_queue(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(1), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        reply = await other.ask("first")
        left, stays = other.send("second"), other.send("third")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 2, "both are queued")
        left.cancel()
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "one has left")
        other.complete(reply)
        assert is_admitted(await stays)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_tenant_quota_is_exact(tmp_path: Path, count: int) -> None:
    """0.3 requests per second, and a burst of ten seconds."""
    limited = {"tenants": [{"name": "jobs", "requestsPerSecond": "0.3"}]}
    async with Gateways(tmp_path, count, chat(100, admission=limited), pods=engine_names(1)) as gateways:
        replies = await ask_all(gateways.all, 12, headers={TENANT: "jobs"})
        assert sum(is_admitted(reply) for _, reply in replies) == 3
        codes = {rejection_of(reply).error["code"] for _, reply in replies if not is_admitted(reply)}
        assert codes == {"quota_exceeded"}


async def test_retry_at_another_gateway_is_no_new_demand(tmp_path: Path) -> None:
    starting = chat(admission=SHED, ready_at_s=20.0, ready_work=2.0)
    async with Gateways(tmp_path, 3, starting) as gateways:
        for gateway in gateways.all:
            assert rejection_of(await gateway.ask("the same body")).error["code"] == "model_starting"
        requests = gateways.owner().signals()["requests"]
        assert (requests["arrived"], requests["retried"]) == (1, 2)
        assert all(g.signals()["requests"]["arrived"] == 0 for g in gateways.others())


async def test_retry_reservation_is_honoured_at_another_gateway(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(1, admission=SHED), pods=engine_names(1)) as gateways:
        first, second = gateways.others()
        running = await first.ask("first")
        assert rejection_of(await first.ask("rejected")).error["code"] == "overloaded"
        controller = gateways.owner().picker.admission.services["team/chat"].controller
        assert len(controller.reservations) == 1
        first.complete(running)
        await eventually(lambda: gateways.owner().admits == 0, "the owner knows of the end")
        assert is_admitted(await second.ask("rejected"))
        assert len(controller.reservations) == 0


async def test_shared_prefix_goes_to_one_engine(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(50), pods=engine_names(3)) as gateways:
        prefix = "a long common beginning of the conversation. " * 100
        engines = {picked_engine(await gateway.ask(f"{prefix}{n}")) for n, gateway in enumerate(gateways.all)}
        assert len(engines) == 1


async def test_engine_failure_through_one_gateway_counts_at_all(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(2)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        failed = await other.ask("first")
        other.complete(failed, status=503, flags="UC", ttft_us=None)
        await eventually(lambda: owner.picker.inflight.loads[picked_engine(failed)].suspect, "the owner avoids it")
        assert picked_engine(await owner.ask("second")) != picked_engine(failed)


async def test_completion_counts_at_the_gateway_that_carried_it(tmp_path: Path) -> None:
    """The operator adds up what gateways report: nothing may count twice."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        reply = await other.ask("first")
        assert [g.signals()["endpoints"][0]["inflight"] for g in (owner, other)] == [0, 1]
        other.complete(reply, ttft_us=1000, duration_us=2000)
        await eventually(lambda: owner.admits == 0, "the owner knows of the end")
        assert [g.signals()["requests"]["succeeded"] for g in (owner, other)] == [0, 1]
        assert [g.signals()["slo"]["assessed"] for g in (owner, other)] == [0, 1]
        assert [g.signals()["requests"]["arrived"] for g in (owner, other)] == [1, 0]


async def test_envoys_count_of_the_owner_leaves_out_other_gateways(tmp_path: Path) -> None:
    """What another gateway's Envoy carries is neither lost nor foreign because the owner's own Envoy lacks it."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        await other.ask("first")
        for _ in range(5):
            owner.picker.reports.on_envoy_stats({"10.0.0.1:8000": 0})
        assert owner.admits == 1
        assert owner.picker.inflight.loads["10.0.0.1:8000"].inflight == 1


async def test_requests_that_no_picker_sent_take_slots_at_the_owner(tmp_path: Path) -> None:
    """While a picker is away, its Envoy sends requests by itself."""
    async with Gateways(tmp_path, 2, chat(3, admission=SHED), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        for _ in range(2):
            other.picker.reports.on_envoy_stats({"10.0.0.1:8000": 2})
        await eventually(lambda: owner.picker.inflight.external_inflight("10.0.0.1:8000") == 2, "the owner knows")
        assert sum(is_admitted(reply) for _, reply in await ask_all(gateways.all, 6)) == 1


async def test_service_without_slo_is_decided_where_it_comes(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, service(), pods=engine_names(1)) as gateways:
        for gateway in gateways.all:
            assert is_admitted(await gateway.ask("hi"))
            assert gateway.signals()["requests"]["arrived"] == 1


async def test_fallback_service_has_the_same_owner(tmp_path: Path) -> None:
    """A request that is sent to the fallback takes a slot there that all gateways see."""
    services = (
        service_with_slo(admission=DOWNGRADE_AT_ONCE, batch=1, slo={"tpot": "50ms"}),
        service_with_slo("small", batch=2, admission=SHED),
    )
    pods = (*engine_names(1), pod("10.0.1.1:8000", service="small"))
    async with Gateways(tmp_path, 3, *services, pods=pods) as gateways:
        assert gateways.owner("team/chat") is gateways.owner("team/small")
        replies = await ask_all(gateways.all, 9)
        engines = sorted(picked_engine(reply) for _, reply in replies if is_admitted(reply))
        assert engines == ["10.0.0.1:8000", "10.0.1.1:8000", "10.0.1.1:8000"]


async def test_no_request_falls_back_while_owners_answer(tmp_path: Path) -> None:
    before = [fallbacks(reason) for reason in ("disconnected", "timeout", "busy", "refused")]
    async with Gateways(tmp_path, 3, chat(), pods=engine_names(1)) as gateways:
        await ask_all(gateways.all, 60, headers=None)
    assert [fallbacks(reason) for reason in ("disconnected", "timeout", "busy", "refused")] == before


async def test_response_headers_are_the_owners(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        (other,) = gateways.others()
        sent = response_headers(await other.ask("hi", headers={"x-request-timeout": "30"}))
        assert sent["x-plimsoll-cluster"] == response_headers(await gateways.owner().ask("hi"))["x-plimsoll-cluster"]
        assert 29_000 < int(sent["x-envoy-upstream-stream-duration-ms"]) <= 30_000


async def test_schema_tokens_pass_an_owner_of_an_earlier_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows three kinds, and a kind that it does not know would end the connection with all that waits on it."""
    questions: list[messages.Question] = []
    decode = messages.decode_to_owner
    monkeypatch.setattr(messages, "decode_to_owner", lambda data: kept(decode(data)))

    def kept(message: messages.ToOwner) -> messages.ToOwner:
        if isinstance(message, messages.Question):
            questions.append(message)
        return message

    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"description": "x" * 4000}}}
    async with Gateways(tmp_path, 2, service_with_slo(batch=8), pods=engine_names(1)) as gateways:
        (other,) = gateways.others()
        assert is_admitted(await other.ask("hi", response_format=form))
        (question,) = questions
        assert question.estimate_media.keys() <= {"image", "audio", "video"}
        assert gateways.owner().signals()["requests"]["arrived_media_tokens"]["schema"] > 900
