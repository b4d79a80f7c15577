"""One lagging signal and nothing else that is known: the tier that it speaks of grows, and the other one does not.

The operator does not hear the gateways, and each service's engines export one family of metrics, so that neither demand
nor what requests are made of is ever known. Clients reach the gateway, and the gateway the engines, all the while.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, ClosedLoop, Load, OpenLoop, Plan
from e2e.lib.node import drop_packets
from e2e.lib.request_log import RequestLog
from e2e.lib.service import LAUNCHER_PORT, Service
from e2e.lib.wait import sleep, wait_until
from plimsoll.adapters import engine_metrics
from plimsoll.api.contract import engine_contract
from plimsoll.core.ports import EngineReading
from plimsoll.engines import launched

PICKER_PORT = 8081
OPERATOR = "app.kubernetes.io/component=operator"
METRICS = engine_contract().paths["metrics"]
TIERS = ("prefill", "decode")
SCALE_UP_TIMEOUT_S = (
    150.0  # of which a minute until what is measured of requests counts, and up to ten seconds between two looks
)
OBSERVED_S = 12.0  # in which all engines have been asked again
USERS = 8  # of whom each waits for half a second of every other's prefill: four seconds, and a leg may take ten
ARRIVE_S = 300.0

# A step computes a third of a long prompt, so that those behind it wait; 5,000 tokens are five or six long answers.
LONG_PROMPTS: Object = {"max_num_batched_tokens": 1024}
SMALL_KV_CACHE: Object = {"num_gpu_blocks_override": 40}


@dataclass(frozen=True)
class Signal:
    """What engines export, what the operator reads it as and says of it, and the tier that it is about.

    flags: of the engines. slo: what is promised, where it matters. words, tokens: of a prompt and its answer. every_s:
    between two arrivals; None for so many users as there are, each of whom asks again at once.
    """

    name: str
    family: str
    reads: str
    says: str
    tier: str
    words: int
    tokens: int
    every_s: float | None = None
    flags: Object = field(default_factory=dict)
    slo: Object = field(default_factory=dict)

    def service(self) -> Object:
        """The InferenceService."""
        tiers = {tier: simulated_fleet.replica_bounds(1, 2) for tier in TIERS}
        made = simulated_fleet.fleet_manifest(self.name, tiers, export=f"vllm:{self.family}", **self.flags)
        made["spec"]["slo"] |= self.slo
        return made

    def plan(self) -> Plan:
        """A load that the one replica of the tier has too much of."""
        prompts = simulated_fleet.prompts(self.name, self.words, self.tokens)
        if self.every_s is None:
            return ClosedLoop(USERS, prompts, seconds=ARRIVE_S)
        return OpenLoop([Arrival(n * self.every_s, prompts(n)) for n in range(int(ARRIVE_S / self.every_s))])


SIGNALS = (
    Signal(
        *("queue", "num_requests_waiting", "waiting", "waiting requests for 1 ready", "prefill"),
        words=2500,
        tokens=4,
        flags=LONG_PROMPTS,
    ),
    Signal(
        *("ttft", "time_to_first_token_seconds", "ttft_s", "p95 TTFT", "prefill"),
        words=2500,
        tokens=4,
        flags=LONG_PROMPTS,
    ),
    Signal(
        *("tpot", "request_time_per_output_token_seconds", "tpot_s", "p95 TPOT", "decode"),
        words=150,
        tokens=20,
        every_s=1.0,
        slo={"tpot": "25ms"},  # a step alone takes 37
    ),
    Signal(
        *("kv", "kv_cache_usage_perc", "kv_used", "KV cache", "decode"),
        words=150,
        tokens=500,  # of 37 ms: eleven or twelve of them at a time, each of two to six blocks
        every_s=1.6,
        flags=SMALL_KV_CACHE,
    ),
)


@dataclass(frozen=True)
class RunResult:
    """What became of one service. counts: replicas that its tiers should have, at every look. told: what was read of
    the engines' metrics. moves: what was said of every change of a count. inactive: the condition ScalingInactive."""

    ledger: RequestLog
    counts: list[tuple[int, ...]]
    reported: dict[str, set[str]]
    moves: list[str]
    inactive: Object


def _counts(service: Service) -> tuple[int, ...]:
    tiers = service.status()["tiers"]
    return tuple(int(tiers[tier]["summary"].partition("/")[2]) for tier in TIERS)


def _signals_by_tier(service: Service) -> dict[str, set[str]]:
    """By tier, what the operator gets out of an engine's metrics."""
    return {tier: _signals_of_pod(service, service.ready_pods(tier)[0]) for tier in TIERS}


def _signals_of_pod(service: Service, pod: str) -> set[str]:
    page = service.cluster.in_pod(service.namespace, pod, LAUNCHER_PORT, METRICS)
    read = engine_metrics.parse_metrics(page.encode(), pod, 0.0, launched.METRICS)
    figures = {one.name for one in fields(EngineReading)} - {"pod", "at_s", "instance_id"}
    return {name for name in figures if getattr(read, name) is not None}


def _run(service: Service, signal: Signal) -> RunResult:
    """The load lasts until more is ordered; then all engines are asked once more."""
    counts = [_counts(service)]

    def grows() -> bool:
        counts.append(_counts(service))
        return counts[-1] != counts[0]

    with Load(service.target, signal.plan(), source=signal.name) as load:
        reported = _signals_by_tier(service)
        try:
            wait_until(f"{signal.name} alone moves a tier", grows, SCALE_UP_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{load.ledger.summary()}\n{service.status()}") from None
        load.stop()
        inactive = service.condition("ScalingInactive")
        for _ in range(round(OBSERVED_S)):
            counts.append(_counts(service))
            sleep(1.0)
        service.wait_events("ScaledUp")
    moves = [e["message"] for e in service.events() if e["reason"].startswith("Scaled")]
    return RunResult(load.ledger, counts, reported, moves, inactive)


@pytest.fixture(scope="module")
def observed(cluster: Cluster, namespace: str) -> dict[str, Future[RunResult]]:
    """By signal; all at the same time, to save it, and all over. A service is Ready when a gateway has said so."""
    cluster.apply(*(signal.service() for signal in SIGNALS), namespace=namespace)
    services = {signal.name: Service(cluster, namespace, signal.name, stack.GATEWAY_URL) for signal in SIGNALS}
    for service in services.values():
        service.wait_ready()
    (operator,) = cluster.list("pods", stack.SYSTEM, OPERATOR)
    with drop_packets(operator["status"]["podIP"], PICKER_PORT):
        for service in services.values():
            service.wait_condition("MetricsDegraded", simulated_fleet.PUBLISH_TIMEOUT_S, reason="MetricsMissing")
        with ThreadPoolExecutor(len(SIGNALS)) as pool:
            return {signal.name: pool.submit(_run, services[signal.name], signal) for signal in SIGNALS}


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_single_engine_signal_scales_only_its_tier(signal: Signal, observed: dict[str, Future[RunResult]]) -> None:
    found = observed[signal.name].result()
    print(f"read of engines: {found.reported}\n{TIERS} wanted, in turn: {list(dict.fromkeys(found.counts))}")
    print("\n".join([*found.moves, found.inactive["message"], found.ledger.summary()]))
    lost = simulated_fleet.unexpected_failures(found.ledger.records)
    assert found.reported == {tier: {signal.reads} for tier in TIERS}
    assert found.inactive["reason"] == "DemandUnknown"
    grown = tuple(2 if tier == signal.tier else 1 for tier in TIERS)
    assert list(dict.fromkeys(found.counts)) == [(1, 1), grown]
    assert all(said.startswith(f"{signal.tier} 1 -> 2: ") and signal.says in said for said in found.moves), found.moves
    assert not lost, simulated_fleet.format_records(lost)
