"""Owners that are killed, hang or change: no request waits for them, and none is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.connection import PeerConnection
from plimsoll.gateway.one_queue.owner_link import PAUSE_SECONDS
from plimsoll.gateway.one_queue.peer_secret import PeerSecret
from tests.gateway.kube_objects import Object, service
from tests.gateway.one_queue_harness import (
    Gateway,
    Gateways,
    eventually,
    fallbacks,
    is_admitted,
    make_catalog,
)
from tests.gateway.picker_harness import engine_names, picked_engine, rejection_of, service_with_slo

SHED = {"whenFull": "Shed"}


def chat(batch: int = 9, **fields: object) -> Object:
    return service_with_slo(batch=batch, **fields)  # type: ignore[arg-type]


async def test_killed_owner_costs_no_request(tmp_path: Path) -> None:
    """Requests in its queue and new ones are decided elsewhere, at first by each gateway, then by the next owner."""
    async with Gateways(tmp_path, 3, chat(30), pods=engine_names(1)) as gateways:
        owner, others = gateways.owner(), gateways.others()
        running = [(gateway, await gateway.ask(f"{gateway.name} {n}")) for gateway in others for n in range(3)]
        before = fallbacks("disconnected")
        sent = [gateway.send(f"{gateway.name} during {n}") for gateway in others for n in range(2)]
        gateways.kill(owner)
        sent += [gateway.send(f"{gateway.name} after {n}") for gateway in others for n in range(2)]
        assert all(map(is_admitted, await asyncio.gather(*sent)))
        assert fallbacks("disconnected") >= before + 4
        await gateways.set_ready(*others)
        new = gateways.owner()
        await eventually(lambda: new.admits == len(running) + len(sent), "the next owner knows all that run")
        for gateway, reply in running:
            gateway.complete(reply)
        await eventually(lambda: new.admits == len(sent), "the next owner knows what has ended")


async def test_gateway_alone_has_an_equal_share(tmp_path: Path) -> None:
    """Until the API server says that the owner is gone, each may use its part of the slots, and no more."""
    async with Gateways(tmp_path, 3, chat(9, admission=SHED), pods=engine_names(1)) as gateways:
        others = gateways.others()
        gateways.kill(gateways.owner())
        for gateway in others:
            replies = [await gateway.ask(f"{gateway.name} {n}") for n in range(6)]
            assert sum(map(is_admitted, replies)) == 3
            assert rejection_of(replies[-1]).error["code"] == "overloaded"


async def test_requests_in_the_queue_of_a_killed_owner_are_decided(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(2), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        running = [await other.ask(f"running {n}") for n in range(2)]
        held = other.send("held")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "it is queued at the owner")
        gateways.kill(owner)
        await eventually(lambda: other.signals()["admission"]["queued"] == 1, "it is queued at its gateway")
        gateways.publish(other)
        other.complete(running[0])
        assert picked_engine(await held) == "10.0.0.1:8000"


async def test_queued_requests_move_with_the_service(tmp_path: Path) -> None:
    """The owner is to stop: it is ready no more, and still serves its clients."""
    async with Gateways(tmp_path, 3, chat(1), pods=engine_names(1)) as gateways:
        owner, others = gateways.owner(), gateways.others()
        running = await others[0].ask("running")
        held = [gateway.send(f"{gateway.name} held") for gateway in gateways.all]
        await eventually(lambda: owner.signals()["admission"]["queued"] == 3, "all are queued at the owner")
        gateways.publish(*others)
        await gateways.connected(*others)
        new = gateways.owner()
        assert new is not owner
        await eventually(lambda: new.signals()["admission"]["queued"] == 3, "all are queued at the next owner")
        assert owner.signals()["admission"]["queued"] == 0
        assert new.admits == 1
        others[0].complete(running)
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
        assert len(done) == 1
        await eventually(lambda: new.admits == 1, "the next owner admits one")


async def test_change_moves_affected_services_alone(tmp_path: Path) -> None:
    services = [service_with_slo(f"model-{n}", batch=9) for n in range(30)]
    async with Gateways(tmp_path, 3, *services) as gateways:
        keys = [f"team/model-{n}" for n in range(30)]
        before = {key: gateways.owner(key) for key in keys}
        assert set(before.values()) == set(gateways.all)
        gone = gateways.all[1]
        gateways.publish(*(gateway for gateway in gateways.all if gateway is not gone))
        assert all(gateways.owner(key) is owner for key, owner in before.items() if owner is not gone)


async def test_gateway_that_left_frees_its_slots(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 3, chat(2, admission=SHED), pods=engine_names(1)) as gateways:
        owner, (first, second) = gateways.owner(), gateways.others()
        assert all([is_admitted(await first.ask(f"{n}")) for n in range(2)])
        assert not is_admitted(await second.ask("full"))
        gateways.kill(first)
        assert owner.admits == 2  # its Envoy may still carry them
        gateways.publish(*(gateway for gateway in gateways.all if gateway is not first))
        await eventually(lambda: owner.admits == 0, "its streams ended with it")


async def test_picker_that_started_again_names_what_runs(tmp_path: Path) -> None:
    """What it does not name any more has ended meanwhile."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        replies = [await other.ask(f"{n}") for n in range(3)]
        link = other.queue._links[owner.name]
        assert link._connection is not None
        link._connection.close()
        other.complete(replies[0])  # no connection to the owner
        await gateways.connected(*gateways.all)
        await eventually(lambda: owner.admits == 2, "the owner knows what has ended")


async def test_restarted_owner_counts_what_runs_at_once(tmp_path: Path) -> None:
    """Other gateways connect at once, while its first list from the API server is not complete."""
    async with Gateways(tmp_path, 2, chat(4, admission=SHED), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        replies = [await other.ask(f"{n}") for n in range(3)]
        gateways.kill(owner)
        link = other.queue._links[owner.name]
        await eventually(lambda: not link.is_ready, "the other gateway has lost the owner")
        again = await gateways.start_again(owner)
        await eventually(lambda: len(again.picker.inflight) == 3, "it knows what runs")
        gateways.set_objects(chat(4, admission=SHED), pods=engine_names(1))
        assert again.admits == 3
        assert [is_admitted(await other.ask(f"more {n}")) for n in range(2)] == [True, False]
        for reply in replies:
            other.complete(reply)
        await eventually(lambda: again.admits == 1, "it knows what has ended")


async def test_gained_or_lost_slo_leaves_nothing_behind(tmp_path: Path) -> None:
    """The owner counts what runs from the time on that the service has an SLO, and no more without one."""
    async with Gateways(tmp_path, 2, service(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        first = await other.ask("without an SLO")
        gateways.set_objects(chat(), pods=engine_names(1))
        await eventually(lambda: owner.admits == 1, "the owner knows what runs")
        second = await other.ask("with an SLO")
        assert owner.admits == 2
        gateways.set_objects(service(), pods=engine_names(1))
        await eventually(lambda: not len(owner.picker.inflight), "the owner forgets what others carry")
        for reply in (first, second):
            other.complete(reply)
        assert not len(other.picker.inflight)


async def test_service_without_slo_at_the_owner_is_not_decided_there(tmp_path: Path) -> None:
    """Gateways learn of a new SLO at different moments."""
    async with Gateways(tmp_path, 2, service(), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        other.picker.set_catalog(make_catalog((chat(),), engine_names(1)))
        before = fallbacks("refused")
        assert is_admitted(await other.ask("hi"))
        assert fallbacks("refused") == before + 1
        assert not [request for _, request in owner.picker.inflight.requests() if not request.via]


async def test_request_decided_during_a_move_is_known_afterwards(tmp_path: Path) -> None:
    """A gateway joins that is to own the service; the present owner does not know it yet, and admits from its queue."""
    async with Gateways(tmp_path, 3, chat(1), pods=engine_names(1)) as gateways:
        new, others = gateways.owner(), gateways.others()
        await gateways.set_ready(*others)
        owner = gateways.owner()
        (asking,) = (gateway for gateway in others if gateway is not owner)
        running = await asking.ask("running")
        held = asking.send("held")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "it is queued at the present owner")
        for gateway in (asking, new):
            gateway.queue.set_pods({g.name: g.address for g in gateways.all}, [])
        await eventually(lambda: new.admits == 1, "the next owner knows what runs")
        for gateway in (asking, owner):  # the end of the first request reaches both
            gateway.complete(running)
        assert is_admitted(await held)
        await eventually(lambda: [*new.picker.inflight.requests()] != [], "the next owner counts it")
        assert new.admits == 1


async def test_gateway_with_another_address_is_found(tmp_path: Path) -> None:
    """A node that started again gives a pod another address and keeps its name."""
    async with Gateways(tmp_path, 2, chat(), pods=engine_names(1)) as gateways:
        owner = gateways.owner()
        gateways.kill(owner)
        await gateways.start_again(owner, "127.0.0.9")
        await gateways.connected(*gateways.all)


async def test_gateways_with_different_secrets_decide_alone(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(10), pods=engine_names(1)) as gateways:
        (other,) = gateways.others()
        other.queue._secret._current = b"another secret that is long enough"
        for gateway in gateways.all:
            for link in gateway.queue._links.values():
                assert link._connection is not None
                link._connection.close()
        before = fallbacks("disconnected")
        await eventually(lambda: not any(link.is_ready for link in other.queue._links.values()), "it is disconnected")
        assert is_admitted(await other.ask("hi"))
        assert fallbacks("disconnected") == before + 1
        await asyncio.sleep(0.3)
        assert not any(link.is_ready for link in other.queue._links.values())


class SilentOwner:
    """A listener that knows the secret and answers pings, but no question, until `answer` is called."""

    def __init__(self, peer_secret: PeerSecret) -> None:
        self._peer_secret = peer_secret
        self.received: list[messages.ToOwner] = []
        self.connection: PeerConnection[messages.ToOwner] | None = None
        self._server: asyncio.Server | None = None

    async def start(self, address: str, port: int) -> None:
        self._server = await asyncio.get_running_loop().create_server(self._accept, address, port)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self.connection is not None:
            self.connection.close()

    def _accept(self) -> PeerConnection[messages.ToOwner]:
        self.connection = PeerConnection(
            self._peer_secret.accepted,
            self._peer_secret,
            messages.decode_to_owner,
            lambda c: None,
            self._on_message,
            lambda c: None,
            ping=None,
        )
        return self.connection

    def _on_message(self, connection: PeerConnection[messages.ToOwner], message: messages.ToOwner) -> None:
        self.received.append(message)
        if isinstance(message, messages.Greeting):
            connection.peer = message.gateway
        if isinstance(message, messages.Ping):
            connection.send(messages.Pong())

    def of_type(self, kind: type[messages.ToOwner]) -> list[messages.ToOwner]:
        return [message for message in self.received if isinstance(message, kind)]


async def replace_owner(gateways: Gateways) -> tuple[SilentOwner, Gateway]:
    """The owner's process hangs in the worst way: its connections live. Returns it with another gateway."""
    owner, (other,) = gateways.owner(), gateways.others()
    silent_owner = SilentOwner(other.queue._secret)
    gateways.kill(owner)
    await eventually(lambda: not other.queue._links[owner.name].is_ready, "the other gateway has lost the owner")
    await silent_owner.start(owner.address, gateways.port)
    await eventually(lambda: other.queue._links[owner.name].is_ready, "the other gateway is connected again")
    return silent_owner, other


async def test_owner_of_an_earlier_release_gets_no_first_tokens(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(20), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        await eventually(lambda: other.queue._links[owner.name].takes_first_tokens, "this release takes them")
        silent_owner, other = await replace_owner(gateways)
        await eventually(lambda: bool(silent_owner.of_type(messages.Ping)), "the earlier release has answered a ping")
        assert not other.queue._links[owner.name].takes_first_tokens
        silent_owner.close()


async def test_silent_owner_is_not_waited_for(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(20), pods=engine_names(1), ack_seconds=0.05) as gateways:
        silent_owner, other = await replace_owner(gateways)
        before = fallbacks("timeout")
        replies = await asyncio.gather(*(other.ask(f"{n}") for n in range(4)))
        assert all(map(is_admitted, replies))
        assert fallbacks("timeout") == before + 4
        await eventually(lambda: len(silent_owner.of_type(messages.Withdrawn)) == 4, "all questions are withdrawn")
        questions = len(silent_owner.of_type(messages.Question))
        assert is_admitted(await other.ask("in the pause"))
        assert len(silent_owner.of_type(messages.Question)) == questions
        running = [r for message in silent_owner.of_type(messages.RunningRequests) for r in message.requests]  # type: ignore[union-attr]
        assert len(running) == 5  # a slow owner still learns what runs
        silent_owner.close()


async def test_owner_that_recovers_is_asked_again(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(20), pods=engine_names(1), ack_seconds=0.05) as gateways:
        silent_owner, other = await replace_owner(gateways)
        await other.ask("first")
        await asyncio.sleep(PAUSE_SECONDS)
        await eventually(lambda: _asks_again(silent_owner, other), "questions follow again after the pause and a pong")
        silent_owner.close()


def _asks_again(silent_owner: SilentOwner, other: Gateway) -> bool:
    other.send(f"{time.monotonic_ns()}")
    return len(silent_owner.of_type(messages.Question)) > 1


async def test_late_answer_is_ignored(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, chat(20), pods=engine_names(1), ack_seconds=0.05) as gateways:
        silent_owner, other = await replace_owner(gateways)
        reply = await other.ask("first")
        (question,) = silent_owner.of_type(messages.Question)
        assert isinstance(question, messages.Question)
        assert silent_owner.connection is not None
        silent_owner.connection.send(messages.Answer(question.number, b"late", None, "team/chat", "default", False))
        silent_owner.connection.send(messages.Queued(question.number + 100))
        await asyncio.sleep(0.05)
        assert is_admitted(reply)
        assert other.queue._links[gateways.all[0].name if other is gateways.all[1] else gateways.all[1].name].is_ready
        silent_owner.close()


async def test_acknowledged_request_waits_as_long_as_the_queue(tmp_path: Path) -> None:
    """Waiting in the owner's queue is no failure, however short the time for an acknowledgement is."""
    async with Gateways(tmp_path, 2, chat(1), pods=engine_names(1)) as gateways:
        owner, (other,) = gateways.owner(), gateways.others()
        running = await other.ask("first")
        link = other.queue._links[owner.name]
        held = other.send("second")
        await eventually(lambda: owner.signals()["admission"]["queued"] == 1, "it is queued")
        await eventually(lambda: all(u.timer.cancelled() for u in link._unanswered.values()), "it is acknowledged")
        assert all(u.timer.cancelled() for u in link._unanswered.values())
        other.complete(running)
        assert is_admitted(await held)
