"""What goes wrong while a fleet moves: silence in mid-burst, pods that fit nowhere, a changed spec, a slow fabric.

The packets that are lost are the operator's alone, on the node: clients reach the gateway, and the gateway the engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, Load, OpenLoop, poisson
from e2e.lib.metrics import GatewayClient, prompt_sources
from e2e.lib.node import drop_packets
from e2e.lib.operator import OperatorClient
from e2e.lib.request_log import RequestRecord
from e2e.lib.service import LAUNCHER_PORT, Service
from e2e.lib.wait import wait_until
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.admission.placement import TRANSFER_PROBE_INTERVAL
from plimsoll.core.engine_model.kv_transfer import HYSTERESIS_RATIO
from plimsoll.core.units import parse_duration

PICKER_PORT = 8081
ENGINE_INFO_PATH = engine_contract().paths["about"]
WORDS, TOKENS = 300, 48
LOW, HIGH = 0.5, 11.0  # requests/s; one replica carries about 6
HIGHER = 16.0  # more than two carry, also once the engines are known
OBSERVED_S = 25.0  # a fleet that starts within ten seconds gives back sooner what it does not need
SCALE_UP_TIMEOUT_S = 240.0  # patience for engines to start on a busy machine
TRANSFER_RATE = 1e8  # bytes/s between engines: a prompt token takes five times as long as computing it
KV_BYTES = 131_072  # of a token, by the light engine's profile
SLOW_FABRIC_RATE, SLOW_FABRIC_PROMPTS, SLOW_FABRIC_TOKENS = (
    1.5,
    30,
    8,
)  # fewer prompts than those after which a gateway tries the fabric again
FIGURES = (
    r"moving a prompt token takes ([\d.]+ [mun]?s) \([\d.]+ [mun]?s of it posting\), "
    r"computing it at the decode tier ([\d.]+ [mun]?s): give both tiers an RDMA device$"
)
SCALE_DOWN_TIMEOUT_S = 360.0  # for a load of seconds to be forgotten: the need falls by e a minute, and is held


def _steady(rate: float, name: str, seed: int) -> OpenLoop:
    return poisson(rate, 300, simulated_fleet.prompts(name, WORDS, TOKENS), seed)


def _wait_for_replicas(service: Service, tier: str, replicas: int) -> None:
    """Waits until a tier wants so many replicas or more, and has all that it wants."""
    wait_until(
        f"{replicas} replicas or more of {tier} serve",
        lambda: len(service.ready_pods(tier)) == simulated_fleet.desired_replicas(service, tier) >= replicas,
        SCALE_UP_TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def learned(cluster: Cluster, namespace: str) -> dict[str, Service]:
    """All services of these scenarios, of which is known what has to be; at the same time, to save it."""
    crowded = {
        "prefill": simulated_fleet.replica_bounds(1, 3, pod=_with_anti_affinity("crowded", "prefill")),
        "decode": simulated_fleet.replica_bounds(1, 3),
    }
    one_each = {"prefill": simulated_fleet.replica_bounds(1, 1), "decode": simulated_fleet.replica_bounds(1, 1)}
    made = (
        simulated_fleet.fleet_manifest("silenced", {"serve": simulated_fleet.replica_bounds(1, 6)}),
        simulated_fleet.fleet_manifest("crowded", crowded, max_num_seqs=8),
        simulated_fleet.fleet_manifest(
            "changing", {"serve": simulated_fleet.replica_bounds(1, 2, rollout={"maxSurge": 3})}
        ),
        simulated_fleet.fleet_manifest("far", one_each, transfer_rate=TRANSFER_RATE),
    )
    plans = {
        "silenced": _steady(LOW, "learn", seed=1),
        "crowded": poisson(0.5, 200, _long_prompts(), seed=3),
        "changing": _steady(LOW, "changing", seed=5),
        "far": _steady(SLOW_FABRIC_RATE, "far", seed=7),
    }
    cluster.apply(*made, namespace=namespace)
    found = {name: Service(cluster, namespace, name, stack.GATEWAY_URL) for name in plans}
    for service in found.values():
        service.wait_ready()
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(simulated_fleet.wait_calibrated, found.values(), plans.values()))
    return found


@pytest.fixture
def fleet(learned: dict[str, Service]) -> Service:
    """One tier."""
    return learned["silenced"]


@dataclass(frozen=True)
class MetricsLoss:
    """Who is not heard, and what is said of it."""

    port: int
    available: str
    inactive: str | None


ENGINES = MetricsLoss(LAUNCHER_PORT, "no ready engine of serve has sent metrics", None)
GATEWAYS = MetricsLoss(PICKER_PORT, "no gateway replica has reported request metrics", "DemandUnknown")


@pytest.mark.parametrize(
    "silence",
    [pytest.param(ENGINES, id="engines", marks=pytest.mark.extended), pytest.param(GATEWAYS, id="gateways")],
)
def test_metrics_loss_during_burst_prevents_scale_down(silence: MetricsLoss, fleet: Service, cluster: Cluster) -> None:
    """The burst ends in a silence that is known: heard, the fleet would shrink. Before, what was heard last counts."""
    operator = cluster.get("pods", OperatorClient(cluster, stack.SYSTEM).leader, stack.SYSTEM)
    assert operator
    known = {e["metadata"]["name"] for e in fleet.events()}
    with Load(fleet.target, _steady(HIGH, f"burst {silence.port}", seed=2)) as load:
        _wait_for_replicas(fleet, "serve", 2)
        with drop_packets(operator["status"]["podIP"], silence.port):
            condition = wait_until("the loss of metrics is a condition", lambda: _lost_metrics(fleet, silence))
            before = simulated_fleet.desired_replicas(fleet)
            load.stop()
            observed = simulated_fleet.sample_desired(fleet, OBSERVED_S)
            inactive = fleet.condition("ScalingInactive")
    fleet.wait_condition("MetricsDegraded", status="False")
    wait_until(
        "what is not needed is given back",
        lambda: simulated_fleet.desired_replicas(fleet) < before,
        SCALE_DOWN_TIMEOUT_S,
    )
    new = [e for e in fleet.events() if e["metadata"]["name"] not in known]
    said = {e["reason"]: e["message"] for e in new}
    print(f"{before} replicas, then {observed}; {load.ledger.summary()}\n{condition}\n{inactive}\n{said}")
    lost = simulated_fleet.unexpected_failures(load.ledger.records)
    assert not lost, simulated_fleet.format_records(lost)
    assert min(observed) >= before
    assert condition["reason"] == "MetricsMissing"
    assert inactive.get("reason") == silence.inactive
    assert condition["message"] in [e["message"] for e in new if e["reason"] == "MetricsLost"]
    assert "MetricsRecovered" in said


def _lost_metrics(fleet: Service, silence: MetricsLoss) -> Object | None:
    """The condition that names this loss; before, some new engine may not have been heard yet."""
    found = fleet.condition("MetricsDegraded")
    return found if str(found.get("message", "")).startswith(silence.available) else None


def _with_anti_affinity(name: str, tier: str) -> Object:
    """No node has two engines of the tier."""
    own = {"matchLabels": {labels.SERVICE: name, labels.ROLE: tier}}
    apart = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": own}]
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": apart}}}


def _long_prompts() -> Callable[[int], Prompt]:
    return simulated_fleet.prompts("crowded", 2000, 60)


@pytest.mark.extended
def test_unschedulable_pod_does_not_block_other_tier(learned: dict[str, Service]) -> None:
    """Prefill needs more and cannot have it; decode gets what it needs meanwhile."""
    crowded = learned["crowded"]
    with Load(crowded.target, poisson(6.0, 200, _long_prompts(), seed=4)) as load:
        limited = crowded.wait_condition("ScalingLimited", SCALE_UP_TIMEOUT_S, status="True", reason="Unschedulable")
        _wait_for_replicas(crowded, "decode", 2)
        prefill = simulated_fleet.desired_replicas(crowded, "prefill"), len(crowded.ready_pods("prefill"))
        decode = simulated_fleet.desired_replicas(crowded, "decode")
    event = [e["message"] for e in crowded.wait_events("ScalingLimited")]
    crowded.wait_condition("ScalingLimited", SCALE_DOWN_TIMEOUT_S, status="False")
    print(f"prefill wanted and had {prefill}, decode {decode}; {load.ledger.summary()}\n{limited}\n{event}")
    lost = simulated_fleet.unexpected_failures(load.ledger.records)
    assert not lost, simulated_fleet.format_records(lost)
    assert prefill[0] > prefill[1] == 1
    assert limited["message"].startswith("prefill: ")
    assert "unschedulable" in limited["message"]
    assert any(message.startswith("prefill: pods are unschedulable") for message in event)


@pytest.mark.extended
def test_spec_change_during_scaling_is_applied(learned: dict[str, Service]) -> None:
    """Bounds, promise and engine arguments, one after the other, under a load that wants more than there is."""
    changing = learned["changing"]
    with Load(changing.target, _steady(HIGHER, "changing", seed=6)) as load:
        changing.wait_condition("ScalingLimited", SCALE_UP_TIMEOUT_S, status="True", reason="AtMaxReplicas")
        _change(changing, {"tiers": {"serve": simulated_fleet.replica_bounds(1, 6)}})
        _wait_for_replicas(changing, "serve", 3)
        _change(changing, {"slo": {"tpot": "30ms"}})  # a step alone takes 40
        hopeless = changing.wait_condition("SLOInfeasible", reason="Infeasible")["message"]
        _change(changing, {"slo": {"tpot": "60ms"}})
        changing.wait_condition("SLOInfeasible", status="False")
        wait_until(
            "the new promise is judged",
            lambda: "within 60 ms" in changing.condition("SLOMet")["message"],
            SCALE_UP_TIMEOUT_S,
        )
        before = simulated_fleet.desired_replicas(changing)
        _change(changing, {"engine": {"args": simulated_fleet.engine_args(max_num_seqs=100)}})
        wait_until(
            "all engines are of the new spec", lambda: _rolled_out(changing, 100), simulated_fleet.PUBLISH_TIMEOUT_S
        )
        changing.wait_ready()
        after = simulated_fleet.desired_replicas(changing)
    print(f"{before} replicas for 60 ms, {after} of new engines; {hopeless}; {load.ledger.summary()}")
    lost = simulated_fleet.unexpected_failures(load.ledger.records)
    assert not lost, simulated_fleet.format_records(lost)
    assert "tpot" in hopeless.lower()
    assert min(before, after) >= 3


def _change(service: Service, spec: Object) -> None:
    service.cluster.patch(labels.PLURAL, service.name, service.namespace, {"spec": spec})


def _rolled_out(service: Service, slots: int) -> bool:
    """Whether every engine that serves says that it has so many slots."""
    try:
        document = [
            json.loads(service.cluster.in_pod(service.namespace, pod, LAUNCHER_PORT, ENGINE_INFO_PATH))
            for pod in service.ready_pods()
        ]
    except httpx.HTTPError:  # one of them goes
        return False
    return bool(document) and all(about["limits"]["max_sequences"] == slots for about in document)


def test_slow_kv_fabric_disables_remote_prefill(learned: dict[str, Service], gateway: GatewayClient) -> None:
    """One prompt after the other keeps nobody waiting, and is read in place but where a gateway tries the fabric.

    Among others it may be moved all the same, by design: the more streams there are to stand still for it, the sooner,
    and on a busy machine there are more.
    """
    far = learned["far"]
    with Load(far.target, _steady(SLOW_FABRIC_RATE, "far", seed=9)) as load:
        condition = far.wait_condition("PrefillDegraded", SCALE_UP_TIMEOUT_S, reason="TransferSlow")
        wait_until(
            "the gateways know what moving takes", lambda: _transfer_time_known(far, gateway), SCALE_UP_TIMEOUT_S
        )
    before = gateway.prefill_counts(far.key)
    records = load.ledger.records + _send_sequentially(far, SLOW_FABRIC_PROMPTS)
    in_all = gateway.prefill_counts(far.key)
    roads, gateways = in_all - before, len(gateway.pods)
    sources = prompt_sources(far.metrics("decode"))
    print(f"{condition['message']}\n{len(records)} requests; one after the other {dict(roads)} by {gateways} gateways")
    print(f"in all {dict(in_all)}; prompt tokens of the decode tier {sources}")
    figures = re.search(FIGURES, condition["message"])
    assert figures, condition["message"]
    moving_us, computing_us = (1e6 * parse_duration(text.replace(" ", "")) for text in figures.groups())
    assert moving_us >= 1e6 * KV_BYTES / TRANSFER_RATE > HYSTERESIS_RATIO * computing_us
    assert [e["message"] for e in far.events() if e["reason"] == "TransferSlow"] == [condition["message"]]
    assert far.condition("PrefillDegraded") == condition
    assert far.condition("Ready")["status"] == "True"
    failed = [r for r in records if not r.ok]
    assert not failed, simulated_fleet.format_records(failed)
    assert before["remote"] > 0, "nothing was ever moved"
    assert roads.total() == SLOW_FABRIC_PROMPTS < TRANSFER_PROBE_INTERVAL
    assert roads["remote"] <= gateways, "each tries the fabric once at most"


def _transfer_time_known(service: Service, gateway: GatewayClient) -> bool:
    """Whether every gateway goes by limits in which the operator tells how long KV is on its way."""
    found = service.admission()
    if (found.get("limits") or {}).get("costModel", {}).get("kv_transfer_token_s") is None:
        return False
    versions = {reported["object"]["limits_version"] for reported in gateway.services(service.key)}
    return versions == {found["metadata"]["resourceVersion"]}


def _send_sequentially(service: Service, requests: int) -> list[RequestRecord]:
    """Each is sent when the one before it has ended, over a connection of its own, so that all gateways are asked."""
    prompt = simulated_fleet.prompts("one by one", WORDS, SLOW_FABRIC_TOKENS)
    plans = (OpenLoop([Arrival(0.0, prompt(n))]) for n in range(requests))
    return [record for plan in plans for record in Load(service.target, plan).run().records]
