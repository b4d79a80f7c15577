"""Who is asked when, under a clock of the test's own."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from plimsoll.adapters.launcher import StartupProgress
from plimsoll.api import labels
from plimsoll.controllers import engine_poller
from plimsoll.controllers.engine_poller import (
    BUSY_INTERVAL_S,
    ENGINE_INFO_INTERVAL_S,
    FOREIGN_ENGINE_INTERVAL_S,
    IDLE_INTERVAL_S,
    MAX_CONCURRENT_REQUESTS,
    RETRY_DELAY_S,
    EnginePoller,
)
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.polled_pod import polled_pod
from plimsoll.core.demand.counter_delta import MAX_READING_GAP_S
from plimsoll.core.errors import BackendUnavailable, UntrustedPeer
from plimsoll.core.ports import EngineInfo, EngineReading
from plimsoll.core.types import Role
from tests import builders

Object = dict[str, Any]

SERVICE = builders.service()
KEY = ("team", "chat")


class World:
    """Engines that answer as the test says, and a clock that it turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.running: Counter[str] = Counter()  # by address
        self.steps: Counter[str] = Counter()
        self.down: set[str] = set()
        self.silent: set[str] = set()  # of what they are
        self.tls_names: dict[str, str] = {}
        self.untrusted: set[str] = set()  # names in certificates
        self.requested: list[tuple[float, str]] = []  # when, and URL
        self.received: list[tuple[Key, Role, EngineReading]] = []
        self.page = b""  # in place of vLLM's
        self.open = 0
        self.most_open = 0
        self.store = ObjectCache()
        self.engines = EnginePoller(
            self.store,
            self.answer,
            lambda *reported: self.received.append(reported),
            parse,
            lambda: 1.8e9,
            lambda: self.now_s,
        )

    async def answer(self, address: str, port: int, path: str, tls_name: str = "") -> bytes:
        self.requested.append((self.now_s, f"{address}:{port}{path}"))
        self.tls_names[address] = tls_name
        if tls_name in self.untrusted:
            raise UntrustedPeer("no valid certificate")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        for _ in range(3):
            await asyncio.sleep(0)
        self.open -= 1
        if address in self.down or (path == "/about" and address in self.silent):
            raise BackendUnavailable("connection refused")
        if path == "/about":
            return address.encode()
        if self.page:
            return self.page
        steps = f"vllm:iteration_tokens_total_count {self.steps[address]}\n"
        return f"vllm:num_requests_running {self.running[address]}\n{steps}".encode()

    def pod(self, number: int, tier: str = "decode", *, ready: bool = True, **status: Any) -> Object:
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        obj = builders.pod(SERVICE, tier, f"pod-{number}", podIP=f"10.0.0.{number}", conditions=conditions, **status)
        obj["metadata"]["uid"] = f"uid-{number}"
        self.store.put(obj)
        return obj

    async def until(self, seconds: float, step_s: float = 0.25) -> None:
        """Let time pass as the loop of `run` would."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            await self.engines.poll_due()
            self.now_s += step_s

    def times(self, number: int, path: str = "/metrics") -> list[float]:
        """When a pod was asked."""
        return [at_s for at_s, url in self.requested if url == f"10.0.0.{number}:8001{path}"]


def parse(body: bytes) -> tuple[EngineInfo, StartupProgress]:
    """The engine's name is its address."""
    if not body.startswith(b"10."):
        raise ValueError("not an address")
    return EngineInfo(body.decode(), "1", "cpu", 0), StartupProgress("load", 1.0, (), None, None)


@pytest.fixture
def world() -> World:
    return World()


async def test_unchanged_pods_are_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def counted(obj: Object) -> Any:
        read.append(obj["metadata"]["name"])
        return polled_pod(obj)

    monkeypatch.setattr(engine_poller, "polled_pod", counted)
    first, _ = world.pod(1), world.pod(2)
    await world.until(5.0)
    assert read == ["pod-1", "pod-2"]
    first["metadata"]["resourceVersion"] = "11"
    world.store.put(copy.deepcopy(first))
    await world.until(5.0)
    assert read == ["pod-1", "pod-2", "pod-1"]


def gaps(times: list[float]) -> set[float]:
    return {round(after - before, 6) for before, after in pairwise(times)}


async def test_idle_engine_is_polled_rarely_within_trust_window(
    world: World,
) -> None:
    world.pod(1)
    await world.until(60.0)
    assert gaps(world.times(1)) == {IDLE_INTERVAL_S}
    assert IDLE_INTERVAL_S + 2.0 + RETRY_DELAY_S < MAX_READING_GAP_S


async def test_busy_engine_is_polled_often(world: World) -> None:
    world.pod(1)
    world.running["10.0.0.1"] = 3
    await world.until(60.0)
    assert gaps(world.times(1)) == {BUSY_INTERVAL_S}


async def test_reading_carries_service_and_tier(world: World) -> None:
    world.pod(1)
    world.pod(2, "prefill")
    world.running["10.0.0.1"] = 3
    await world.until(6.0)
    reported = {(key, role, reading.pod, reading.running, reading.at_s) for key, role, reading in world.received}
    assert reported == {(KEY, Role.DECODE, "pod-1", 3.0, 1.8e9), (KEY, Role.PREFILL, "pod-2", 0.0, 1.8e9)}


async def test_label_of_an_engine_decides_about_tls(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """One whose certificate is wrong is logged once for each page."""
    world.pod(1)
    secure = world.pod(2)
    secure["metadata"]["labels"][labels.TLS] = labels.MUTUAL_TLS
    world.store.put(secure)
    name = f"plimsoll-engine.{KEY[0]}.svc"
    world.untrusted.add(name)
    with caplog.at_level(logging.WARNING):
        await world.until(60.0)
    assert world.tls_names == {"10.0.0.1": "", "10.0.0.2": name}
    assert sorted(record.getMessage() for record in caplog.records) == [
        "engine info is not available",
        "engine metrics are not available",
    ]


async def test_busy_engine_speeds_up_polling_of_its_tier_only(world: World) -> None:
    for number in (1, 2):
        world.pod(number)
    world.pod(3, "prefill")
    world.running["10.0.0.1"] = 3
    await world.until(60.0)
    assert gaps(world.times(2)[2:]) == {BUSY_INTERVAL_S}
    assert gaps(world.times(3)) == {IDLE_INTERVAL_S}
    world.running["10.0.0.1"] = 0
    await world.until(60.0)
    assert gaps(world.times(2)[-3:]) == {IDLE_INTERVAL_S}


async def test_engine_active_between_polls_is_not_idle(world: World) -> None:
    world.pod(1)
    for _ in range(12):
        world.steps["10.0.0.1"] += 7
        await world.until(BUSY_INTERVAL_S)
    assert gaps(world.times(1)[2:]) == {BUSY_INTERVAL_S}


async def test_arrivals_expedite_next_poll(world: World) -> None:
    world.pod(1)
    await world.until(25.0)
    last_s = world.times(1)[-1]
    world.now_s = last_s + 1.0
    world.engines.mark_active(KEY)
    await world.until(15.0)
    assert world.times(1)[-3:] == [last_s + 5.0, last_s + 10.0, last_s + 15.0]


async def test_polls_of_many_pods_are_spread_over_interval(world: World) -> None:
    for number in range(1, 201):
        world.pod(number)
    await world.until(BUSY_INTERVAL_S + 0.25)
    per_round = Counter(at_s for at_s, url in world.requested if url.endswith("/metrics"))
    assert sum(per_round.values()) == 200
    assert max(per_round.values()) < 30  # of twenty rounds


async def test_concurrent_polls_are_limited(world: World) -> None:
    for number in range(1, 201):
        world.pod(number)
    await world.engines.poll_due()
    world.now_s += 2 * BUSY_INTERVAL_S
    await world.engines.poll_due()
    assert world.most_open == MAX_CONCURRENT_REQUESTS


async def test_unreachable_engine_is_retried_once_then_on_schedule(world: World) -> None:
    world.pod(1)
    world.down = {"10.0.0.1"}
    await world.until(40.0)
    times = world.times(1)
    assert times[1] - times[0] == RETRY_DELAY_S
    assert gaps(times[1:]) == {IDLE_INTERVAL_S}
    assert world.received == []
    world.down = set()
    await world.until(12.0)
    assert len(world.received) >= 1


async def test_pod_being_polled_is_not_polled_again(world: World) -> None:
    world.pod(1)
    await world.engines.poll_due()
    world.now_s += BUSY_INTERVAL_S
    await asyncio.gather(*(world.engines.poll_due() for _ in range(5)))
    assert len(world.times(1)) == 1


async def test_deleted_terminating_or_addressless_pods_are_not_polled(world: World) -> None:
    kept, leaving, gone = world.pod(1), world.pod(2), world.pod(3)
    addressless = copy.deepcopy(world.pod(4))
    del addressless["status"]["podIP"]
    world.pod(5, phase="Failed")
    leaving = {**leaving, "metadata": {**leaving["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    world.store.put(addressless)
    world.store.put(leaving)
    await world.until(12.0)
    assert {number for number in range(1, 6) if world.times(number)} == {1, 3}
    world.store.remove(gone)
    before = len(world.times(3))
    await world.until(30.0)
    assert len(world.times(3)) == before
    assert world.engines.engine_info("team", kept["metadata"]["name"]) is not None
    assert world.engines.engine_info("team", gone["metadata"]["name"]) is None


async def test_pod_of_the_same_name_elsewhere_says_nothing(world: World) -> None:
    world.pod(1)
    ready = [{"type": "Ready", "status": "True"}]
    ghost = {"metadata": {"namespace": "other", "name": "ghost"}}
    liar = builders.pod(ghost, "decode", "pod-1", podIP="10.0.0.99", conditions=ready)
    liar["metadata"]["uid"] = "uid-liar"
    world.store.put(liar)
    world.running["10.0.0.1"], world.running["10.0.0.99"] = 3, 50
    await world.until(30.0)
    assert world.times(99), "it is polled as an engine of its own namespace"
    assert world.engines.running_requests("team", "pod-1") == 3.0
    assert world.engines.running_requests("other", "pod-1") == 50.0
    assert world.engines.engine_info("team", "pod-1") != world.engines.engine_info("other", "pod-1")


async def test_response_of_deleted_pod_is_dropped(world: World) -> None:
    obj = world.pod(1)
    await world.engines.poll_due()
    world.now_s += BUSY_INTERVAL_S
    asking = asyncio.create_task(world.engines.poll_due())
    await asyncio.sleep(0)
    world.store.remove(obj)
    world.now_s += 2.0
    await world.engines.poll_due()
    await asking
    assert world.received == []


async def test_starting_engine_is_polled_for_engine_info_only(world: World) -> None:
    world.pod(1, ready=False)
    await world.until(30.0)
    assert world.times(1) == []
    assert gaps(world.times(1, "/about")) == {ENGINE_INFO_INTERVAL_S}
    start = world.engines.startup_progress("team", "pod-1")
    assert start is not None
    assert start.phase == "load"


async def test_report_of_ended_container_is_dropped(world: World) -> None:
    """Its phases would count as those of the container that runs now."""

    def container(started: str) -> list[Object]:
        return [{"name": "engine", "state": {"running": {"startedAt": started}}}]

    world.pod(1, ready=False, containerStatuses=container("2026-01-01T00:00:00Z"))
    await world.until(12.0)
    assert world.engines.startup_progress("team", "pod-1") is not None
    world.silent.add("10.0.0.1")
    await world.until(12.0)
    assert world.engines.startup_progress("team", "pod-1") is not None
    world.pod(1, ready=False, containerStatuses=container("2026-01-01T00:05:00Z"))
    await world.until(12.0)
    assert world.engines.startup_progress("team", "pod-1") is None


async def test_newly_ready_engine_is_polled_at_once(world: World) -> None:
    world.pod(1, ready=False)
    await world.until(12.0)
    world.pod(1)
    ready_s = world.now_s
    await world.until(60.0)
    assert 0.0 <= world.times(1)[0] - ready_s <= 1.0
    last = world.times(1, "/about")[-1]
    assert 0.0 <= last - ready_s <= 1.0
    about = world.engines.engine_info("team", "pod-1")
    assert about is not None
    assert about.engine == "10.0.0.1"


async def test_ready_engine_is_polled_once_for_engine_info(world: World) -> None:
    world.pod(1)
    await world.until(60.0)
    assert len(world.times(1, "/about")) == 1


async def test_engine_without_engine_info_is_polled_with_backoff(world: World) -> None:
    world.pod(1)
    world.silent = {"10.0.0.1"}
    await world.until(200.0)
    times = world.times(1, "/about")
    assert gaps(times[:3]) == {ENGINE_INFO_INTERVAL_S}
    assert gaps(times[2:]) == {FOREIGN_ENGINE_INTERVAL_S}
    assert world.engines.engine_info("team", "pod-1") is None
    assert len(world.received) > 10


async def test_unready_engine_is_not_polled_for_metrics(world: World) -> None:
    world.pod(1)
    await world.until(12.0)
    world.pod(1, ready=False)
    unready_s = world.now_s
    await world.until(30.0)
    assert all(at_s <= unready_s + 1.0 for at_s in world.times(1))
    assert world.times(1, "/about")[-1] > unready_s


async def test_running_is_last_reading_and_none_when_unready(world: World) -> None:
    world.pod(1)
    world.running["10.0.0.1"] = 3
    assert world.engines.running_requests("team", "pod-1") is None, "it has not been asked yet"
    await world.until(2 * BUSY_INTERVAL_S)
    assert world.engines.running_requests("team", "pod-1") == 3.0
    assert world.engines.running_requests("team", "pod-9") is None
    world.pod(1, ready=False)
    await world.until(2 * BUSY_INTERVAL_S)
    assert world.engines.running_requests("team", "pod-1") is None


async def test_cached_tokens_are_what_the_prefix_cache_saved(world: World) -> None:
    world.pod(1)
    for tokens in (1000, 1500):
        world.page = f'vllm:prompt_tokens_by_source_total{{source="local_cache_hit"}} {tokens}\n'.encode()
        await world.until(world.now_s + 2 * IDLE_INTERVAL_S)
    assert world.engines.cached_tokens("team", "pod-1") == 500.0
    assert world.engines.cached_tokens("team", "pod-9") == 0.0


async def test_run_polls_until_cancelled() -> None:
    store, reported = ObjectCache(), asyncio.Event()
    world = World()
    world.store = store
    engines = EnginePoller(store, world.answer, lambda *_: reported.set(), parse)
    world.pod(102, ready=False)  # whose turn comes within a hundredth of the interval
    running = asyncio.create_task(engines.run())
    async with asyncio.timeout(60):
        while engines.startup_progress("team", "pod-102") is None:
            await asyncio.sleep(0.01)
        world.pod(102)
        await reported.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


async def test_adopted_engine_is_polled_at_its_port_for_metrics_only() -> None:
    world = World()
    own = world.pod(1)
    world.store.remove(own)
    adopted = {"metricsPort": 9000, "gpus": 1, "model": "hf://a/b"}
    spec = {"containers": [{"name": "vllm", "image": "vllm:1"}]}
    world.store.put({**own, "kind": labels.ADOPTED_POD_KIND, "spec": spec, labels.ADOPTED: adopted})
    await world.until(21.0)
    assert {url for _, url in world.requested} == {"10.0.0.1:9000/metrics"}
    assert len(world.received) >= 8  # every two seconds, after a phase of at most five
    found = world.engines.engine_info("team", "pod-1")
    assert found is not None
    assert (found.engine, found.engine_version) == ("vllm", "vllm:1")


async def test_engine_without_launcher_is_polled_for_metrics_only(world: World) -> None:
    world.page = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    for number, runtime in ((1, "llama-cpp"), (2, "openai")):  # the second names no metrics
        obj = world.pod(number, "serve")
        obj["metadata"]["labels"][labels.ENGINE] = runtime
        obj["spec"] = {"containers": [{"name": "engine", "ports": [{"name": "api", "containerPort": 9000}]}]}
        world.store.put(obj)
    await world.until(2 * IDLE_INTERVAL_S)
    assert {url for _, url in world.requested} == {"10.0.0.1:9000/metrics"}
    key, role, reading = world.received[0]
    assert (key, role, reading.pod, reading.running, reading.waiting) == (KEY, "serve", "pod-1", 2.0, 1.0)
    assert world.engines.running_requests("team", "pod-1") == 3.0
    found = world.engines.engine_info("team", "pod-1")
    assert found is not None
    assert (found.engine, found.max_sequences, found.token_budget, found.self_benchmark) == ("llama-cpp", 4, 2048, None)
    assert world.engines.engine_info("team", "pod-2") is None
