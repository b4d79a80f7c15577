"""What the gateway's replicas say together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson
import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.gateway_poller import FRESHNESS_SECONDS, GatewayPoller, GatewayView
from plimsoll.controllers.object_cache import Key
from plimsoll.core.errors import BackendUnavailable, UntrustedPeer
from tests.builders import PLATFORM

CHAT = ("team", "chat")


def signals(count: int, *, synced: bool = True, instance_id: str = "a", arrived: int = 0) -> dict[str, Any]:
    """A replica's document: a service with so many endpoints that can be reached."""
    endpoints = [{"pod": f"p{n}", "role": "decode", "routable": True, "inflight": 0} for n in range(count)]
    requests = {"arrived": arrived, "retried": 0, "succeeded": 0, "failed": 0, "cancelled": 0, "rejected": {}}
    services = {"team/chat": {"endpoints": endpoints, "requests": requests}}
    return {"version": 2, "instance_id": instance_id, "synced": synced, "services": services}


def name_of(address: str) -> str:
    return f"gw-{address.rpartition('.')[2]}"


def pod(address: str, uid: str | None = None) -> dict[str, Any]:
    uid = uid or address
    return {"metadata": {"uid": uid, "name": name_of(uid)}, "status": {"podIP": address, "phase": "Running"}}


class Fleet:
    """Gateway replicas that answer what the test says; an absent answer is a refused connection."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.hung: dict[str, asyncio.Event] = {}  # those that answer only once this is set
        self.untrusted: set[str] = set()
        self.tls_names: dict[str, str] = {}
        self.reported: list[Key | None] = []
        self.now_s = 100.0
        self.elapsed_s = 0.0
        self.gateways = GatewayPoller(
            None,  # type: ignore[arg-type]
            PLATFORM.gateway,
            self._answer,
            self.reported.append,
            lambda: self.now_s,
            lambda: self.elapsed_s,
            round_timeout_s=0.05,
        )

    async def _answer(self, address: str, port: int, path: str, tls_name: str = "") -> bytes:
        assert (port, path) == (PLATFORM.gateway.picker_port, "/signals")
        self.tls_names[address] = tls_name
        if address in self.untrusted:
            raise UntrustedPeer(f"https://{address}:{port}{path} has no valid certificate: certificate has expired")
        if address in self.hung:
            await self.hung[address].wait()
        if address not in self.answers:
            raise BackendUnavailable("rejected")
        return orjson.dumps({"gateway": name_of(address), **self.answers[address]})

    def present(self, *addresses: str) -> None:
        self.gateways.on_pod_event(WatchEvent("SYNC", objects=tuple(pod(a) for a in addresses)))

    async def ask(self) -> GatewayView:
        await self.gateways.poll_round()
        return self.gateways.view

    async def counted(self) -> dict[str, tuple[str, float, float]]:
        """After a round: instance, time and arrivals by replica, of those whose word is fresh."""
        await self.gateways.poll_round()
        readings, _ = self.gateways.readings()
        return {r.gateway: (r.instance_id, r.at_s, r.services["team/chat"].arrived) for r in readings}


async def test_endpoint_listed_by_one_replica_is_routable() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0), "10.0.0.2": signals(1)}
    fleet.present("10.0.0.1", "10.0.0.2")
    assert await fleet.ask() == GatewayView(2, 2, {CHAT: 1})


async def test_label_of_a_replica_decides_about_tls(caplog: pytest.LogCaptureFixture) -> None:
    """Both kinds run while TLS is turned on. A certificate that has expired is in the view, and logged once."""
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1), "10.0.0.2": signals(1)}
    secure = pod("10.0.0.2")
    secure["metadata"] |= {"labels": {labels.TLS: labels.MUTUAL_TLS}, "namespace": "plimsoll-system"}
    fleet.gateways.on_pod_event(WatchEvent("SYNC", objects=(pod("10.0.0.1"), secure)))
    assert (await fleet.ask()).responding == 2
    assert fleet.tls_names == {"10.0.0.1": "", "10.0.0.2": "plimsoll-internal.plimsoll-system.svc"}
    fleet.untrusted = {"10.0.0.1", "10.0.0.2"}
    fleet.elapsed_s = 2 * FRESHNESS_SECONDS
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            view = await fleet.ask()
    assert "cannot be read with TLS: https://10.0.0.1:8081/signals has no valid certificate" in view.error
    assert len(caplog.records) == 2


async def test_silent_replica_keeps_last_view_for_a_while() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    fleet.answers = {}
    assert (await fleet.ask()).routable == {CHAT: 1}


async def test_hung_replica_does_not_block_other_replicas() -> None:
    """Rounds go on without it; what it says in the end counts, and it is not asked twice at once."""
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1, arrived=5), "10.0.0.2": signals(1, arrived=6)}
    fleet.present("10.0.0.1", "10.0.0.2")
    await fleet.ask()
    fleet.hung["10.0.0.2"] = asyncio.Event()
    for arrived in (7, 8):
        fleet.now_s += 1.0
        fleet.answers["10.0.0.1"] = signals(1, arrived=arrived)
        assert await fleet.counted() == {"gw-1": ("a", fleet.now_s, arrived), "gw-2": ("a", 100.0, 6)}
    fleet.answers["10.0.0.2"] = signals(1, arrived=9)
    fleet.hung.pop("10.0.0.2").set()
    assert (await fleet.counted())["gw-2"] == ("a", fleet.now_s, 9)


async def test_concurrent_poll_waiters_see_new_readings() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1, arrived=5)}
    fleet.present("10.0.0.1")
    found: list[float] = []

    async def wait() -> None:
        for _ in range(2):
            await fleet.gateways.wait_for_round()
            found.append(fleet.gateways.readings()[0][0].services["team/chat"].arrived)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.0)
    await fleet.ask()
    fleet.answers = {"10.0.0.1": signals(1, arrived=6)}
    await asyncio.sleep(0.0)
    await fleet.ask()
    await waiting
    assert found == [5, 6]


async def test_readings_beyond_trust_window_are_dropped() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1, arrived=5), "10.0.0.2": signals(0, arrived=6)}
    fleet.present("10.0.0.1", "10.0.0.2")
    await fleet.ask()
    del fleet.answers["10.0.0.1"]
    fleet.elapsed_s = FRESHNESS_SECONDS
    assert fleet.gateways.readings() == ((), ("gw-1", "gw-2"))
    assert await fleet.ask() == GatewayView(2, 1, {CHAT: 0})
    assert list(await fleet.counted()) == ["gw-2"]


async def test_replica_silent_from_start_counts_as_unknown() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    assert await fleet.ask() == GatewayView(1, 0, {})


async def test_unsynced_replica_is_not_answering() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0, synced=False)}
    fleet.present("10.0.0.1")
    assert (await fleet.ask()).responding == 0


async def test_deleted_replica_is_dropped() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    fleet.gateways.on_pod_event(WatchEvent("DELETED", pod("10.0.0.1")))
    assert await fleet.ask() == GatewayView()


async def test_routable_change_notifies_service() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": signals(0)}
    fleet.present("10.0.0.1")
    await fleet.ask()
    assert fleet.reported == [None]
    fleet.answers = {"10.0.0.1": signals(1)}
    await fleet.ask()
    fleet.answers = {"10.0.0.1": signals(2)}
    await fleet.ask()
    assert fleet.reported == [None, CHAT]
    fleet.answers = {"10.0.0.1": signals(0) | {"services": {}}}
    await fleet.ask()
    assert fleet.reported == [None, CHAT, CHAT]


async def test_synced_after_every_replica_answered() -> None:
    fleet = Fleet()
    assert not fleet.gateways.is_synced
    await fleet.ask()
    assert not fleet.gateways.is_synced
    fleet.answers = {"10.0.0.1": signals(1)}
    fleet.present("10.0.0.1", "10.0.0.2")
    await fleet.ask()
    assert not fleet.gateways.is_synced
    fleet.answers["10.0.0.2"] = signals(0)
    await fleet.ask()
    assert fleet.gateways.is_synced


async def test_synced_after_trust_window_without_answer() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    await fleet.ask()
    assert not fleet.gateways.is_synced
    fleet.elapsed_s = FRESHNESS_SECONDS + 1.0
    assert fleet.gateways.is_synced


async def test_synced_without_replicas_after_first_round() -> None:
    fleet = Fleet()
    fleet.present()
    assert not fleet.gateways.is_synced
    await fleet.ask()
    assert fleet.gateways.is_synced


# ---------------------------------------------------------------- what they counted


async def test_readings_before_first_round_are_empty() -> None:
    assert Fleet().gateways.readings() == ((), ())


async def test_readings_are_kept_per_replica() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.2", "10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1, arrived=5), "10.0.0.2": signals(1, instance_id="b", arrived=9)}
    assert await fleet.counted() == {"gw-1": ("a", 100.0, 5), "gw-2": ("b", 100.0, 9)}
    assert fleet.gateways.readings()[1] == ("gw-1", "gw-2")


async def test_restarted_replica_keeps_name_with_new_instance_id() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1, instance_id="a", arrived=500)}
    assert await fleet.counted() == {"gw-1": ("a", 100.0, 500)}
    fleet.answers, fleet.now_s = {"10.0.0.1": signals(1, instance_id="b", arrived=3)}, 101.0
    assert await fleet.counted() == {"gw-1": ("b", 101.0, 3)}


async def test_readings_of_partial_round_list_all_replicas() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1", "10.0.0.2")
    fleet.answers = {"10.0.0.1": signals(1, arrived=5)}
    assert list(await fleet.counted()) == ["gw-1"]
    assert fleet.gateways.readings()[1] == ("gw-1", "gw-2")
    assert (fleet.gateways.view.replicas, fleet.gateways.view.responding) == (2, 1)


async def test_last_reading_of_silent_replica_keeps_its_time() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1, arrived=5)}
    await fleet.ask()
    fleet.answers, fleet.now_s = {}, 102.0
    assert await fleet.counted() == {"gw-1": ("a", 100.0, 5)}


async def test_clock_set_back_silences_no_replica() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1, arrived=5)}
    await fleet.ask()
    fleet.answers, fleet.now_s = {"10.0.0.1": signals(1, arrived=6)}, -1000.0
    assert await fleet.counted() == {"gw-1": ("a", -1000.0, 6)}
    assert fleet.gateways.view.responding == 1


async def test_unsynced_replica_has_no_reading() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(0, synced=False)}
    assert await fleet.counted() == {}


# ---------------------------------------------------------------- answers that are none


@pytest.mark.parametrize(
    "answer",
    [{}, {"version": 99}, signals(1, arrived=-1), signals(1) | {"gateway": "gw-7"}, signals(1) | {"services": None}],
    ids=["empty", "future", "negative", "of another pod", "no services"],
)
async def test_malformed_response_counts_as_silence(answer: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1", "10.0.0.2")
    fleet.answers = {"10.0.0.1": answer, "10.0.0.2": signals(2)}
    assert await fleet.ask() == GatewayView(2, 1, {CHAT: 2})
    assert await fleet.ask() == GatewayView(2, 1, {CHAT: 2})
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [(r.msg, r.__dict__["gateway"]) for r in warned] == [("gateway signals cannot be parsed", "gw-1")]


async def test_view_explains_why_no_replica_is_usable() -> None:
    """One that may not watch the objects, and one of another release: neither is silent, and both can be mended."""
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1) | {"synced": False}}
    assert (await fleet.ask()).error.startswith("its caches are not synced with the API server")
    reported = len(fleet.reported)
    await fleet.ask()
    assert fleet.reported[reported:] == []
    fleet.answers = {"10.0.0.1": signals(1) | {"version": 99}}
    assert "run operator and gateways at the same release" in (await fleet.ask()).error
    assert fleet.reported[reported:] == [None]
    fleet.answers = {}
    assert (await fleet.ask()).error == ""
    fleet.answers = {"10.0.0.1": signals(1)}
    assert await fleet.ask() == GatewayView(1, 1, {CHAT: 1})


async def test_malformed_response_keeps_last_reading() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.1": signals(1, arrived=5)}
    await fleet.ask()
    fleet.answers = {"10.0.0.1": signals(1, arrived=-5)}
    assert await fleet.counted() == {"gw-1": ("a", 100.0, 5)}


async def test_changed_pod_address_is_polled() -> None:
    fleet = Fleet()
    fleet.present("10.0.0.1")
    fleet.answers = {"10.0.0.9": signals(1) | {"gateway": "gw-1"}}
    assert (await fleet.ask()).responding == 0
    fleet.gateways.on_pod_event(WatchEvent("MODIFIED", pod("10.0.0.9", uid="10.0.0.1")))
    assert await fleet.ask() == GatewayView(1, 1, {CHAT: 1})


def names(*models: str) -> dict[str, Any]:
    """A replica's document that tells the names of a service."""
    document = signals(1)
    document["services"]["team/chat"]["models"] = list(models)
    return document


async def test_view_lists_names_that_all_replicas_answer() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": names("new", "old"), "10.0.0.2": names("old")}
    fleet.present("10.0.0.1", "10.0.0.2")
    assert (await fleet.ask()).models == {CHAT: {"old"}}
    fleet.reported.clear()
    fleet.answers["10.0.0.2"] = names("new", "old")
    assert (await fleet.ask()).models == {CHAT: {"new", "old"}}
    assert fleet.reported == [CHAT]


async def test_view_silent_release_does_not_hide_names() -> None:
    fleet = Fleet()
    fleet.answers = {"10.0.0.1": names("new"), "10.0.0.2": signals(1)}
    fleet.present("10.0.0.1", "10.0.0.2")
    assert (await fleet.ask()).models == {CHAT: {"new"}}
