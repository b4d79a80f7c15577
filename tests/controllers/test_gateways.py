"""What the gateway's replicas say together."""

from __future__ import annotations

from typing import Any

import httpx

from plimsoll.adapters.kube import WatchEvent
from plimsoll.controllers.gateways import Gateways, View, routable
from plimsoll.controllers.store import Key
from tests.builders import PLATFORM

CHAT = ("team", "chat")


def signals(count: int, *, synced: bool = True, role: str = "decode") -> dict[str, Any]:
    endpoints = [{"pod": f"p{n}", "role": role, "routable": True} for n in range(count)]
    return {"synced": synced, "services": {"team/chat": {"endpoints": endpoints}}}


def pod(address: str) -> dict[str, Any]:
    return {"metadata": {"uid": address}, "status": {"podIP": address, "phase": "Running"}}


class Fleet:
    """Gateway replicas that answer what the test says; an absent answer is a refused connection."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.told: list[Key | None] = []
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.gateways = Gateways(None, PLATFORM.gateway, client, self.told.append)  # type: ignore[arg-type]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.host not in self.answers:
            raise httpx.ConnectError("refused")
        assert request.url.path == "/signals"
        return httpx.Response(200, json=self.answers[request.url.host])

    def present(self, *addresses: str) -> None:
        self.gateways.saw(WatchEvent("SYNC", objects=tuple(pod(a) for a in addresses)))

    async def ask(self) -> View:
        await self.gateways.ask()
        return self.gateways.view


def test_only_endpoints_that_answer_clients_count() -> None:
    assert routable(signals(2)) == {CHAT: 2}
    assert routable(signals(2, role="prefill")) == {CHAT: 0}


async def test_one_replica_that_lists_an_endpoint_is_enough() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0), "10.0.0.2": signals(1)}
    fleet.present("10.0.0.1", "10.0.0.2")
    assert await fleet.ask() == View(2, 2, {CHAT: 1})


async def test_a_silent_replica_keeps_its_last_word_for_a_while() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    fleet.answers = {}
    assert (await fleet.ask()).routable == {CHAT: 1}


async def test_silence_from_the_start_is_not_zero() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    assert await fleet.ask() == View(1, 0, {})


async def test_a_replica_that_knows_nothing_yet_does_not_count() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0, synced=False)}
    fleet.present("10.0.0.1")
    assert (await fleet.ask()).answering == 0


async def test_a_replica_that_is_gone_counts_no_more() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    fleet.gateways.saw(WatchEvent("DELETED", pod("10.0.0.1")))
    assert await fleet.ask() == View()


async def test_who_must_be_told() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    assert fleet.told == [None]
    fleet.answers = {"10.0.0.1": signals(1)}
    await fleet.ask()
    fleet.answers = {"10.0.0.1": signals(2)}
    await fleet.ask()
    assert fleet.told == [None, CHAT]
    fleet.answers = {"10.0.0.1": {"synced": True, "services": {}}}
    await fleet.ask()
    assert fleet.told == [None, CHAT, CHAT]


async def test_nothing_is_known_before_every_replica_has_spoken() -> None:
    fleet = Fleet()
    assert not fleet.gateways.synced
    await fleet.ask()
    assert not fleet.gateways.synced
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1", "10.0.0.2")
    await fleet.ask()
    assert not fleet.gateways.synced
    fleet.answers["10.0.0.2"] = signals(0)
    await fleet.ask()
    assert fleet.gateways.synced


async def test_no_replica_at_all_is_known_after_the_first_round() -> None:
    fleet = Fleet()
    fleet.present()
    assert not fleet.gateways.synced
    await fleet.ask()
    assert fleet.gateways.synced
