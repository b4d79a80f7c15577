"""The fleet sizes itself: light engines at a slow model's step times, real operator, real gateway, real pods.

A light engine takes the time that a GPU would take and hardly any of this machine's, so that a fleet of them fits on
two cores. Its steps are slowed down (SCALE) until a load that two cores can send is one that needs several replicas.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import httpx
import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import ClosedLoop, Load, poisson, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import audit_writes
from e2e.lib.operator import OperatorClient, gateways_read_at, metric_value, observed_at
from e2e.lib.request_log import RequestLog
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

SCALE = 8.0  # of the profile's step times: about 40 ms a step
START_UP_S = 15
OUTPUT_TOKENS = 48
LOW, HIGH = 0.5, 12.0  # requests/s; one replica carries about 6
ENGINE = {
    "runtime": "simulated",
    "args": ["--profile", "h200-8b", "--profile-scale", str(SCALE), "--start-seconds", str(START_UP_S)],
}
SLO = {"ttft": "2s", "tpot": "80ms"}
STREAM_TOKENS = 2000  # of about 40 ms: a stream outlasts the decision to give its engine back
STREAMS = 5  # for each replica, so that also the slowest, to which fewest go, has one
SHORT = 1.0  # requests/s while engines leave
IN_TRANSIT_S = 3.0  # for what was picked before an engine was unrouted
DRAIN_TIMEOUT_S = 180.0
SCALE_UP_TIMEOUT_S = 180.0  # horizon, a tick, and a busy machine


def _fleet(name: str, most: int, **scaling: object) -> Object:
    tiers = {"serve": {"minReplicas": 1, "maxReplicas": most, "gpus": 0}}
    made = make_manifest(name, tiers, model={"uri": "hf://example/sim-8b"}, engine=ENGINE, slo=SLO)
    made["spec"]["scaling"] = scaling
    return made


def _prompts(name: str) -> Callable[[int], Prompt]:
    start = time.time()
    return lambda n: Prompt(unique_text(300, f"{name} {start} {n}"), max_tokens=OUTPUT_TOKENS)


def _desired(service: Service, tier: str = "serve") -> int:
    return int(service.status()["tiers"][tier]["summary"].partition("/")[2])


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, namespace: str) -> Service:
    """A fleet that has told what it is and has seen some load."""
    cluster.apply(_fleet("fleet", 6), namespace=namespace)
    found = Service(cluster, namespace, "fleet", stack.GATEWAY_URL)
    found.wait_ready()
    return found


def _scales_up(document: Object) -> bool:
    tier = document["decisions"][0]["tiers"]["serve"]
    return bool(tier["before"] < tier["replicas"])


def _documents_until_scale_up(operator: OperatorClient, fleet: Service) -> list[Object]:
    """What each tick had heard and decided, up to the one that ordered more."""
    reported: dict[str, Object] = {}

    def ordered() -> bool:
        document = operator.explain(fleet.key)
        reported[document["metrics"]["at"]] = document
        return _scales_up(document) or len(fleet.pods("serve")) > 1

    def observed() -> bool:
        return ordered() and any(metric_value(one, "rate_per_s") > 0.0 for one in reported.values())

    wait_until("more is ordered, for a load that is observed", observed, SCALE_UP_TIMEOUT_S, every_s=0.2)
    return list(reported.values())


def _ordered_at(document: Object, since: float) -> float:
    """When the first decision for more was made since then, to the second below; since the epoch."""
    tiers = [(one["at"], one["tiers"]["serve"]) for one in document["decisions"]]
    up = [datetime.fromisoformat(at).timestamp() for at, tier in tiers if tier["before"] < tier["replicas"]]
    return min(at for at in up if at > since - 1.0)


@dataclass(frozen=True)
class ScaleDownResult:
    """What became of the streams that were open when a fleet gave back replicas.

    told: the Event. open: streams by pod when it was decided. counts: of each pod that went, the requests that it had
    ever had, again and again from when it was unrouted until it was gone. short: those that came meanwhile.
    """

    reported: str
    open: Counter[str]
    counts: dict[str, list[int]]
    streams: RequestLog
    short: RequestLog


def _scale_down(fleet: Service, gateway: GatewayClient, most: int) -> ScaleDownResult:
    """No load but long streams, on all replicas and not alike on all; once replicas are given back, short ones."""
    known = {e["metadata"]["name"] for e in fleet.events()}
    long, begin = simulated_fleet.prompts("long", 50, STREAM_TOKENS), Counter[str]()
    # A stream that ends before the decision, which a slow machine delays, is followed by another one.
    streams = Load(fleet.target, ClosedLoop(STREAMS * most + 1, long))

    def given_back() -> bool:
        nonlocal begin
        found = gateway.in_flight(fleet.key)
        if _desired(fleet) < most:
            return True
        begin = found
        return False

    with streams:
        wait_until("the fleet gives back what it does not need", given_back, 300)
        streams.stop()
        with Load(
            fleet.target, poisson(SHORT, 300, simulated_fleet.prompts("short", 50, OUTPUT_TOKENS), seed=4)
        ) as short:
            new = wait_until(
                "it is told", lambda: [e for e in _scale_down_events(fleet) if e["metadata"]["name"] not in known]
            )
            reported = str(min(new, key=lambda event: str(event["metadata"]["creationTimestamp"]))["message"])
            going = re.findall(r"([a-z0-9-]+) \(\d+ in flight\)", reported)
            wait_until("those that go are unrouted", lambda: not gateway.routable_pods(fleet.key) & set(going))
            sleep(IN_TRANSIT_S)
            counts: dict[str, list[int]] = {pod: [] for pod in going}
            wait_until(
                "they are gone",
                lambda: not [pod for pod in going if _sample_requests(fleet, pod, counts[pod])],
                DRAIN_TIMEOUT_S,
            )
    return ScaleDownResult(reported, begin, counts, streams.ledger, short.ledger)


def _scale_down_events(fleet: Service) -> list[Object]:
    return [e for e in fleet.events() if e["reason"] == "ScaledDown"]


def _sample_requests(fleet: Service, pod: str, counts: list[int]) -> bool:
    """Whether a pod is there still; adds the requests that it has had, as long as it tells."""
    try:
        page = fleet.engine_metrics(pod)
    except httpx.HTTPError:
        return pod in {one["metadata"]["name"] for one in fleet.pods()}
    names = [f"vllm:{name}" for name in ("request_success_total", "num_requests_running", "num_requests_waiting")]
    if page.names("vllm:").issuperset(names):  # the launcher still tells of itself when its engine has ended
        counts.append(int(sum(page.total(name) for name in names)))
    return True


def test_load_step_scales_up_then_down_without_lost_streams(
    fleet: Service, cluster: Cluster, gateway: GatewayClient
) -> None:
    """Up in one go while the load lasts, down after it; what is refused is refused while engines start, and told so.

    The emptiest replicas go. They end their streams, to the last token, and get no other request.
    """
    operator = OperatorClient(cluster, stack.SYSTEM)
    prompts = _prompts("step")
    low = Load(fleet.target, poisson(LOW, 45, prompts, seed=1)).run()
    before = _desired(fleet)
    wait_until("no request is counted", lambda: metric_value(operator.explain(fleet.key), "rate_per_s") == 0.0)
    started = time.time()
    with Load(fleet.target, poisson(HIGH, 180, prompts, seed=2)) as load:
        reported = _documents_until_scale_up(operator, fleet)
        wait_until("the fleet is told to grow", lambda: _desired(fleet) > before, SCALE_UP_TIMEOUT_S)
        scale_up_s = time.time() - started
        ordered_at = _ordered_at(operator.explain(fleet.key), started)
        wait_until(
            "all engines serve that are wanted",
            lambda: len(fleet.ready_pods("serve")) == _desired(fleet),
            SCALE_UP_TIMEOUT_S,
        )
    most = _desired(fleet)
    up = [e["message"] for e in fleet.wait_events("ScaledUp")]
    back = _scale_down(fleet, gateway, most)
    sent = min(r.sent_at for r in load.ledger.records)
    saw = next(one for one in reported if metric_value(one, "rate_per_s") > 0.0)
    name = f"{fleet.name}-serve"
    written = [call.at for call in audit_writes(started) if (call.resource, call.name) == ("deployments/scale", name)]
    times = {"observed": observed_at(saw), "ordered": ordered_at, "written": written[0]}
    print({name: f"{at - sent:.3f} s after the first request" for name, at in times.items()})
    print(
        f"{before} -> {most} replicas, scaled up {scale_up_s:.0f} s after the step;"
        f" {low.summary()}; {load.ledger.summary()}"
    )
    print("\n".join([*up, back.reported]))
    looks = {pod: f"{len(observed)} looks, requests {set(observed)}" for pod, observed in back.counts.items()}
    print(f"open streams {dict(back.open)}; those that go {looks}; {back.streams.summary()}; {back.short.summary()}")
    assert most > before
    assert gateways_read_at(saw) <= observed_at(
        saw
    )  # the oldest of the gateways' words: another one may tell of the request
    assert sent <= observed_at(saw)
    assert sent - 1.0 < ordered_at <= written[0], "each by what was before it; an order's time is in whole seconds"
    assert all("serve" in message and "->" in message and "SLO capacity" in message for message in up)
    assert not low.failures, low.explain()
    assert not back.streams.failures, back.streams.explain()
    assert not back.short.failures, back.short.explain()
    assert back.counts, "no ready replica was chosen"
    going = [back.open[pod] for pod in back.counts]
    assert 0 < max(going) <= min(streams for pod, streams in back.open.items() if pod not in back.counts)
    for pod, counts in back.counts.items():
        assert counts, f"{pod} was gone before it was looked at"
        assert set(counts) == {counts[0]}, f"{pod} took more after it was unrouted"
    assert not simulated_fleet.unexpected_failures(load.ledger.records), load.ledger.explain()


def test_status_shows_measurements(fleet: Service) -> None:
    status = fleet.status()
    tier = status["tiers"]["serve"]
    print(f"{tier}\n{status.get('slo')}")
    assert " req/s" in tier["capacityPerReplica"]
    assert status["recovery"].endswith("s")
    [checkpoint] = [
        one
        for one in fleet.cluster.list("inferenceservicecheckpoints", fleet.namespace)
        if one["metadata"]["name"] == fleet.name
    ]
    assert checkpoint["state"]["zlib"]
    assert checkpoint["metadata"]["ownerReferences"][0]["uid"] == fleet.get()["metadata"]["uid"]
    for kind in ("ScalingInactive", "MetricsDegraded", "SLOInfeasible"):
        fleet.wait_condition(kind, status="False")


def test_cli_status_and_explain_match_status(cluster: Cluster, namespace: str, fleet: Service) -> None:
    """`plimsoll status` and `plimsoll explain` as a user types them, the operator's answer through the API server."""
    plimsoll = Path(sys.executable).with_name("plimsoll")
    reported, took_s = {}, {}
    for verb in ("status", "explain"):
        began = time.monotonic()
        reported[verb] = cluster.run(str(plimsoll), verb, "fleet", "-n", namespace)
        took_s[verb] = time.monotonic() - began
    scaled = [event["message"] for event in fleet.events() if event["reason"] == "ScaledUp"]
    document = json.loads(cluster.run(str(plimsoll), "explain", "fleet", "-n", namespace, "--json"))
    print({verb: f"{seconds:.2f} s" for verb, seconds in took_s.items()}, reported["explain"], sep="\n")
    assert "Serving" in reported["status"]
    assert all(
        step in reported["explain"] for step in ("demand", "sizing", "limits", "mode", "SLO capacity", "start-up")
    )
    reasons = [message.partition(": ")[2].split(")")[0] for message in scaled]  # Events have the short reasons
    reasons_reported = [one["tiers"].get("serve", {}).get("reason", "") for one in document["decisions"]]
    assert any(why.startswith(reason) for why in reasons_reported for reason in reasons)


@pytest.mark.extended
def test_recommend_mode_changes_no_replicas(
    cluster: Cluster, namespace: str, service: Callable[[str], Service]
) -> None:
    cluster.apply(_fleet("advised", 6, mode="Recommend"), namespace=namespace)
    advised = service("advised")
    advised.wait_ready()
    with Load(advised.target, poisson(HIGH, 120, _prompts("advice"), seed=3)) as load:
        wait_until(
            "more is recommended", lambda: advised.status()["tiers"]["serve"].get("needed", 0) > 1, SCALE_UP_TIMEOUT_S
        )
    deployment = cluster.get("deployments", "advised-serve", namespace)
    assert deployment
    print(f"{advised.status()['tiers']['serve']}; {advised.condition('ScalingInactive')}; {load.ledger.summary()}")
    assert deployment["spec"]["replicas"] == 1
    assert advised.condition("ScalingInactive")["reason"] == "RecommendOnly"
    assert not [e for e in advised.events() if e["reason"] in ("ScaledUp", "ScaledDown")]
    cluster.kubectl("delete", "plim", "advised", "-n", namespace)
