"""A service that nobody asks runs nothing, and loses nothing: to zero after its last request, and back with the next.

Light engines whose start takes a while, so that whoever comes while nothing runs has to be held for it. One tier and a
pair side by side, to save time: the tiers of a pair go together, and come back together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import Arrival, Load, OpenLoop, poisson, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

START_UP_S = 8
TTFT_S = 2.0
HORIZON_S = 10
PATIENCE_S = 180.0  # of the client that wakes it
ENGINE = {
    "runtime": "simulated",
    "args": ["--profile", "h200-8b-cool", "--profile-scale", "8", "--start-seconds", str(START_UP_S)],
}
SCALE_TO_ZERO_TIMEOUT_S = 240.0  # a hold of about the horizon, the pod's end, and a busy machine
STAYS_AT_ZERO_S = 20.0
TIERS = {"one": ("serve",), "pair": ("prefill", "decode")}


def _service_manifest(name: str, tiers: tuple[str, ...]) -> Object:
    bounds = {tier: simulated_fleet.replica_bounds(0, 2, gpus=0) for tier in tiers}
    slo = {"ttft": f"{TTFT_S:g}s", "tpot": "80ms"}
    made = make_manifest(name, bounds, model={"uri": "hf://example/sim-8b"}, engine=ENGINE, slo=slo)
    made["spec"]["admission"] = {"classes": [{"name": "default", "maxQueueTime": "120s"}]}
    made["spec"]["scaling"] = {"sloMissCost": 0, "horizon": f"{HORIZON_S}s"}
    return made


def _prompts(name: str) -> Callable[[int], Prompt]:
    start = time.time()
    return lambda n: Prompt(unique_text(300, f"{name} {start} {n}"), max_tokens=48)


def _event_count(service: Service, reason: str) -> int:
    """How often it was told."""
    return sum(e.get("count") or 1 for e in service.events() if e["reason"] == reason)


def _outcomes(gateway: GatewayClient, service: Service) -> Counter[str]:
    """Of admission, since the gateways began."""
    total: Counter[str] = Counter()
    for reported in gateway.services(service.key):
        total.update(reported["admission"]["outcomes"])
    return total


def _rejections(outcomes: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in outcomes.items() if name.startswith("Shed") and n}


def _desired(service: Service) -> list[int]:
    """The replicas of its tiers."""
    return [int(tier["summary"].partition("/")[2]) for tier in service.status()["tiers"].values()]


def _run_cycle(sleeper: Service, gateway: GatewayClient) -> list[str]:
    """To zero, where it stays, back for one request and to zero again; Ready all the while. What was seen."""
    said, ready, expected = [], [], []
    wait_until("it is Ready", lambda: is_true(sleeper.get(), "Ready"), 240)
    awake = Load(sleeper.target, poisson(1.0, 30, _prompts(sleeper.name), seed=6), patience_s=PATIENCE_S).run()
    assert not awake.failures, awake.explain()

    def asleep() -> bool:
        ready.append(is_true(sleeper.get(), "Ready"))
        expected.append(_desired(sleeper))
        return not sleeper.pods() and not any(expected[-1])

    quiet, slept = time.time(), _event_count(sleeper, "ScaledToZero")
    wait_until("it runs nothing", asleep, SCALE_TO_ZERO_TIMEOUT_S)
    asleep_s = time.time() - quiet
    wait_until("that it sleeps is told", lambda: _event_count(sleeper, "ScaledToZero") > slept, 30)
    events = [e["message"] for e in sleeper.events() if e["reason"] == "ScaledToZero"]
    said.append(f"nothing runs {asleep_s:.0f} s after the last answer: {events[-1]}")
    assert "no request for" in events[-1]
    assert sleeper.condition("Ready")["reason"] == "ScaledToZero"
    for _ in range(int(STAYS_AT_ZERO_S)):
        sleep(1.0)
        assert asleep(), "it did not stay there"

    woken, before, roads = (
        _event_count(sleeper, "ScaledFromZero"),
        _outcomes(gateway, sleeper),
        gateway.prefill_counts(sleeper.key),
    )
    one = OpenLoop([Arrival(0.0, _prompts(f"wake {sleeper.name}")(0))])
    (record,) = Load(sleeper.target, one, patience_s=PATIENCE_S).run().records
    ready.append(is_true(sleeper.get(), "Ready"))
    outcomes, roads = _outcomes(gateway, sleeper) - before, gateway.prefill_counts(sleeper.key) - roads
    said.append(f"the next: {record.status}, first token after {record.ttft_s} s; {dict(outcomes)}, {dict(roads)}")
    assert record.ok, record.detail
    assert record.finish_reason == "length"
    assert (record.ttft_s or 0.0) > TTFT_S, "an engine was there already"
    assert outcomes["Queued"] == 1
    assert not _rejections(outcomes)
    wait_until("that it woke is told", lambda: _event_count(sleeper, "ScaledFromZero") > woken, 30)

    most = 0
    for _ in range(int(2 * HORIZON_S)):
        expected.append(_desired(sleeper))
        most = max(most, *expected[-1])
        sleep(1.0)
    assert most == 1, "what waited for the start passed for a lack of engines"
    wait_until("it sleeps again", asleep, SCALE_TO_ZERO_TIMEOUT_S)
    said.append(f"wanted {Counter(map(tuple, expected))}")
    assert all(any(tiers) == all(tiers) for tiers in expected), "one tier slept without the other"
    assert all(ready), f"Ready was false in {ready.count(False)} of {len(ready)} looks"
    return said


@pytest.fixture(scope="module")
def cycle_events(cluster: Cluster, namespace: str, gateway: GatewayClient) -> dict[str, Future[list[str]]]:
    """What both did, once both are through."""
    cluster.apply(*(_service_manifest(name, tiers) for name, tiers in TIERS.items()), namespace=namespace)
    with ThreadPoolExecutor(len(TIERS)) as pool:
        return {
            name: pool.submit(_run_cycle, Service(cluster, namespace, name, stack.GATEWAY_URL), gateway)
            for name in TIERS
        }


@pytest.mark.parametrize("name", TIERS)
def test_scale_to_zero_and_back_loses_no_request(name: str, cycle_events: dict[str, Future[list[str]]]) -> None:
    """The next request waits for an engine of each tier that answers, and is answered by it."""
    print("\n".join(cycle_events[name].result()))
