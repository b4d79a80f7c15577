"""A service that nobody asks runs nothing, and loses nothing: to zero after its last request, and back with the next.

A light engine whose start takes a while, so that whoever comes while nothing runs has to be held for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import Arrival, Load, OpenLoop, poisson, unique_text
from e2e.lib.metrics import Gateway
from e2e.lib.service import Service, manifest
from e2e.lib.wait import pause, until

START_UP_S = 8
TTFT_S = 2.0
HORIZON_S = 10
PATIENCE_S = 180.0  # of the client that wakes it
ENGINE = {
    "runtime": "simulated",
    "args": ["--profile", "h200-8b-cool", "--profile-scale", "8", "--start-seconds", str(START_UP_S)],
}
ASLEEP_S = 90.0  # a hold of about the horizon, the pod's end, and a busy machine
STAYS_S = 20.0


def _sleeper(name: str) -> Object:
    tiers = {"serve": {"minReplicas": 0, "maxReplicas": 2, "gpus": 0}}
    slo = {"ttft": f"{TTFT_S:g}s", "tpot": "80ms"}
    made = manifest(name, tiers, model={"uri": "hf://example/sim-8b"}, engine=ENGINE, slo=slo)
    made["spec"]["admission"] = {"classes": [{"name": "default", "holdFor": "120s"}]}
    made["spec"]["scaling"] = {"missCost": 0, "horizon": f"{HORIZON_S}s"}
    return made


def _prompts(name: str) -> Callable[[int], Prompt]:
    start = time.time()
    return lambda n: Prompt(unique_text(300, f"{name} {start} {n}"), max_tokens=48)


def _times(service: Service, reason: str) -> int:
    """How often it was told."""
    return sum(e.get("count") or 1 for e in service.events() if e["reason"] == reason)


def _outcomes(gateway: Gateway, service: Service) -> Counter[str]:
    """Of admission, since the gateways began."""
    total: Counter[str] = Counter()
    for told in gateway.services(service.key):
        total.update(told["admission"]["outcomes"])
    return total


def _sheds(outcomes: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in outcomes.items() if name.startswith("Shed") and n}


def test_to_zero_and_back(
    cluster: Cluster, namespace: str, service: Callable[[str], Service], gateway: Gateway
) -> None:
    """It is Ready all the while: the next request waits for an engine, and is answered by it."""
    cluster.apply(_sleeper("sleeper"), namespace=namespace)
    sleeper, ready = service("sleeper"), []
    until("it is Ready", lambda: is_true(sleeper.get(), "Ready"), 120)
    awake = Load(sleeper.target, poisson(1.0, 30, _prompts("awake"), seed=6), patience_s=PATIENCE_S).run()
    assert not awake.failures, awake.explain()

    def asleep() -> bool:
        ready.append(is_true(sleeper.get(), "Ready"))
        return not sleeper.pods() and int(sleeper.status()["tiers"]["serve"]["desired"]) == 0

    quiet, slept = time.time(), _times(sleeper, "ScaledToZero")
    until("it runs nothing", asleep, ASLEEP_S)
    asleep_s = time.time() - quiet
    until("that it sleeps is told", lambda: _times(sleeper, "ScaledToZero") > slept, 30)
    told = [e["message"] for e in sleeper.events() if e["reason"] == "ScaledToZero"]
    print(f"nothing runs {asleep_s:.0f} s after the last answer: {told[-1]}")
    assert "no request for" in told[-1]
    assert sleeper.condition("Ready")["reason"] == "ScaledToZero"
    for _ in range(int(STAYS_S)):
        pause(1.0)
        assert asleep(), "it did not stay there"

    woken, before = _times(sleeper, "ScaledFromZero"), _outcomes(gateway, sleeper)
    one = OpenLoop([Arrival(0.0, _prompts("wake")(0))])
    (record,) = Load(sleeper.target, one, patience_s=PATIENCE_S).run().records
    ready.append(is_true(sleeper.get(), "Ready"))
    outcomes = _outcomes(gateway, sleeper) - before
    print(f"the next request: {record.status}, first token after {record.ttft_s} s; {dict(outcomes)}")
    assert record.ok, record.detail
    assert (record.ttft_s or 0.0) > TTFT_S, "an engine was there already"
    assert outcomes["Held"] == 1
    assert not _sheds(outcomes)
    until("that it woke is told", lambda: _times(sleeper, "ScaledFromZero") > woken, 30)

    most = 0
    for _ in range(int(2 * HORIZON_S)):
        most = max(most, int(sleeper.status()["tiers"]["serve"]["desired"]))
        pause(1.0)
    assert most <= 1, "what waited for the start passed for a lack of engines"
    until("it sleeps again", asleep, ASLEEP_S)
    assert all(ready), f"Ready was false in {ready.count(False)} of {len(ready)} looks"
    cluster.kubectl("delete", "plim", "sleeper", "-n", namespace)
