"""A real Prometheus scrapes operator, gateway and engines, by the configuration of the documentation and our rules.

It sees every part, every rule can be evaluated, every query of the dashboard is answered, and promtool finds the rules'
unit tests true. What an alert says when is those tests' matter; here no alert is waited for. It may hang and die in the
midst of a burst: the operator that was told to ask it for the past decides without. And it tells of engines that the
operator cannot reach.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import Load, poisson, unique_text
from e2e.lib.node import drop_packets, signal_container
from e2e.lib.operator import OperatorClient
from e2e.lib.prometheus import PrometheusClient, queries
from e2e.lib.prometheus_server import FOLDER, RULES, plimsoll_pods, start
from e2e.lib.service import LAUNCHER_PORT, Service, make_manifest
from e2e.lib.wait import sleep, wait_until

RULE_FILES = ("plimsoll.yaml", "opencost.yaml")
UNIT_TESTS = ROOT / "tests" / "chart" / "rules" / "plimsoll_test.yaml"
DASHBOARD = stack.CHART / "files" / "dashboards" / "plimsoll.json"
CORE = (
    "Ready",
    "Demand and capacity",
    "Replicas",
    "Time to first token",
    "Time per output token",
    "Within SLO",
    "Queued",
    "Outcomes",
)
PER_GPU = "service:plimsoll_goodput_tokens_per_gpu_second:rate5m"  # has no value here: the engine has no GPU
RATE, MAX_SECONDS = 3.0, 800.0  # of a load that ends with its scenario
BURST = 11.0  # requests/s; one replica carries about 6
POLL_TIMEOUT_S = 180.0  # until a new service knows what a request costs, and five seconds of patience
OBSERVED_S = 15.0
SAMPLE_INTERVAL_S = 0.5
FALLBACK_S = 40.0  # more than twice as long as a word is trusted


@pytest.fixture(scope="module")
def watched(cluster: Cluster, namespace: str) -> Service:
    """A light engine at a GPU's step times, with a promise that it keeps."""
    engine = {"runtime": "simulated", "args": ["--profile", "h200-8b", "--start-seconds", "2"]}
    tiers = {"serve": {"minReplicas": 1, "maxReplicas": 2, "gpus": 0}}
    model = {"uri": "hf://example/sim-8b"}
    made = make_manifest("watched", tiers, model=model, engine=engine, slo={"ttft": "2s", "tpot": "80ms"})
    made["spec"]["cost"] = {"gpuHour": "2.50"}
    cluster.apply(made, namespace=namespace)
    found = Service(cluster, namespace, "watched", stack.GATEWAY_URL)
    found.wait_ready()
    return found


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, namespace: str, watched: Service) -> PrometheusClient:
    """One that runs in the scenario's namespace under the restricted pod security standard."""
    unit_tests = yaml.safe_load(UNIT_TESTS.read_text()) | {"rule_files": [*RULE_FILES]}
    files = {name: (RULES / name).read_text() for name in RULE_FILES}
    files |= {"plimsoll_test.yaml": yaml.safe_dump(unit_tests)}
    return start(cluster, namespace, [*plimsoll_pods(cluster), *watched.pods()], files)


def test_prometheus_scrapes_all_parts_and_answers_all_queries(
    prometheus: PrometheusClient, watched: Service, cluster: Cluster, namespace: str
) -> None:
    began = time.time()

    def prompt(n: int) -> Prompt:
        return Prompt(unique_text(100, f"watched {began} {n}"), max_tokens=16)

    with Load(watched.target, poisson(RATE, MAX_SECONDS, prompt, seed=1)) as load:
        wait_until("operator, gateways and engine are scraped", lambda: _all_up(prometheus, cluster, watched), 180)
        for verb, file in (*(("check", name) for name in RULE_FILES), ("test", "plimsoll_test.yaml")):
            argv = ("promtool", verb, "rules", f"{FOLDER}/{file}")
            print(cluster.execute(namespace, "prometheus", "prometheus", *argv, timeout_s=180).strip())
        wait_until("each recording rule has a value", lambda: not _without_value(prometheus, watched), 300, every_s=3)
        requested = list(queries(DASHBOARD, watched.key))
        empty = [f"{q.panel} {q.ref}" for q in requested if not prometheus.query(q.expr)]
        rules = prometheus.rules()
    print(
        f"{len(requested)} queries, without an answer: {empty or 'none'}; {len(rules)} rules; {load.ledger.summary()}"
    )
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
    assert [name for name in empty if name.rsplit(" ", 1)[0] in CORE] == []
    assert not load.ledger.failures, load.ledger.explain()


def test_network_policies_admit_metrics_from_peers(watched: Service, cluster: Cluster, namespace: str) -> None:
    """The local network does not enforce them: that they are there, for every part that is scraped."""
    peer = yaml.safe_load(stack.VALUES.read_text())["metrics"]["from"][0]
    pod = cluster.get("pods", "prometheus", namespace)
    assert pod
    assert peer["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {"operator": 8081, "gateway": 8081, "engine": 8001}
    admitted = set()
    for where in (stack.SYSTEM, namespace):
        for policy in cluster.list("networkpolicies", where):
            rules = policy["spec"].get("ingress") or []
            part = policy["metadata"]["name"].rsplit("-", 1)[-1]
            open_to = {port["port"] for rule in rules if peer in rule.get("from", ()) for port in rule["ports"]}
            if ports.get(part) in open_to:
                admitted.add(part)
    assert admitted == set(ports)


@pytest.fixture
def asking(
    cluster: Cluster, namespace: str, watched: Service, prometheus: PrometheusClient
) -> Iterator[OperatorClient]:
    """An operator that asks this Prometheus; it leads when it is given."""
    operator = OperatorClient(cluster, stack.SYSTEM)
    before = operator.leader
    stack.install(cluster, "--set", f"monitoring.prometheus.url=http://prometheus.{namespace}:9090")
    wait_until("the new operator leads", lambda: operator.leader not in ("", before), 180)
    yield operator
    stack.install(cluster)
    wait_until("the operator of the others decides", lambda: _is_deciding(operator, watched), 180)


@pytest.mark.extended
def test_unreachable_engines_are_read_through_prometheus(
    asking: OperatorClient, prometheus: PrometheusClient, watched: Service, cluster: Cluster
) -> None:
    """The operator's way to the engines' port is cut: what they do is known all the same, and so is which way."""
    prompts = simulated_fleet.prompts("second hand", 100, 200)
    with Load(watched.target, poisson(RATE, MAX_SECONDS, prompts, seed=7)) as load:
        wait_until(
            "the operator knows its engines", lambda: _engines(asking, watched).get("coverage") == 1.0, POLL_TIMEOUT_S
        )
        before = {event["metadata"]["name"] for event in watched.events()}
        operator = cluster.get("pods", asking.leader, stack.SYSTEM)
        assert operator
        with drop_packets(operator["status"]["podIP"], LAUNCHER_PORT):
            said = wait_until("that it is so is told", lambda: _fallback_message(watched), POLL_TIMEOUT_S)
            began, reported = time.time(), []
            while time.time() < began + FALLBACK_S:
                if one := _engines(asking, watched):
                    read_at = time.time() - one["age_s"]
                    reported.append(
                        one | {"told": watched.condition("MetricsDegraded").get("reason"), "is_after": read_at > began}
                    )
                sleep(SAMPLE_INTERVAL_S)
        scraped = prometheus.samples(f'vllm:num_requests_running{{service="{watched.key}"}}[2m]')
        wait_until("it hears them itself", lambda: not _fallback_message(watched), POLL_TIMEOUT_S)
    reasons = {event["reason"] for event in watched.events() if event["metadata"]["name"] not in before}
    ages = [one["age_s"] for one in reported]
    running = {one["running"] for one in reported if one["is_after"]}  # before, it had read the engine itself
    print(f"{said}\nages {min(ages):.1f} to {max(ages):.1f} s, running {sorted(running)}; {load.ledger.summary()}")
    assert {(one["coverage"], one["told"]) for one in reported} == {(1.0, "MetricsDelayed")}
    assert len(running) > 1, "it hears nothing new"
    assert running <= set(scraped)
    watched.wait_condition("MetricsDegraded", status="False")
    assert "MetricsLost" not in reasons
    assert not load.ledger.failures, load.ledger.explain()


@pytest.mark.extended
def test_prometheus_outage_in_burst_changes_no_decision(
    asking: OperatorClient, prometheus: PrometheusClient, cluster: Cluster, namespace: str
) -> None:
    """It hangs when it is asked, then it is gone: ticks go on, the fleet grows, nothing goes back, the log tells it."""
    cluster.apply(
        simulated_fleet.fleet_manifest("burst", {"serve": simulated_fleet.replica_bounds(1, 3)}), namespace=namespace
    )
    burst = Service(cluster, namespace, "burst", stack.GATEWAY_URL)
    burst.wait_ready()
    signal_container(_prometheus(cluster, namespace), "prometheus", "STOP")
    with Load(burst.target, poisson(BURST, MAX_SECONDS, simulated_fleet.prompts("burst", 300, 48), seed=5)) as load:
        said = wait_until(
            "that the past is not known is told", lambda: _backfill_failures(asking, burst), POLL_TIMEOUT_S
        )
        wait_until("the fleet grows", lambda: simulated_fleet.desired_replicas(burst) > 1, POLL_TIMEOUT_S)
        signal_container(_prometheus(cluster, namespace), "prometheus", "KILL")
        began, ticks, desired, earlier = time.time(), set(), [], len(simulated_fleet.scale_down_rates(burst))
        while time.time() < began + OBSERVED_S:
            ticks.add(asking.explain(burst.key)["metrics"]["at"])
            desired.append(simulated_fleet.desired_replicas(burst))
        known = {kind: burst.condition(kind) for kind in ("MetricsDegraded", "ScalingInactive")}
        down = simulated_fleet.scale_down_rates(burst)[earlier:]
    wait_until("Prometheus is back", lambda: is_true(cluster.get("pods", "prometheus", namespace), "Ready"), 180)
    wait_until("and scrapes", lambda: prometheus.query("sum(up) > 0"), 180)
    print(f"{said}\n{len(ticks)} ticks in {OBSERVED_S:.0f} s without it, {known}")
    print(f"replicas {sorted(set(desired))}, down for {down}")
    print(load.ledger.summary())
    lost = simulated_fleet.unexpected_failures(load.ledger.records)
    assert not lost, simulated_fleet.format_records(lost)
    assert all(rate >= simulated_fleet.FORECAST_SHARE * BURST for rate in down), "replicas went back in the burst"
    assert len(ticks) >= OBSERVED_S / 5, "it decides no more"
    assert known["ScalingInactive"] == {}
    assert "Prometheus" not in str(known["MetricsDegraded"].get("message", ""))  # new engines may be without metrics
    assert [line["message"] for line in said] == ["request history is not available"], "asked once, told once"
    cluster.kubectl("delete", "plim", "burst", "-n", namespace)


def _engines(operator: OperatorClient, service: Service) -> Object:
    """What was heard of the engines by the last tick; empty before the first one."""
    try:
        return dict(operator.explain(service.key)["metrics"]["tiers"]["serve"])
    except (httpx.HTTPError, KeyError, TypeError):
        return {}


def _fallback_message(service: Service) -> str:
    """The words for it, "" where it is not so."""
    message = str(service.condition("MetricsDegraded").get("message", ""))
    return message if "engines of serve do not answer the operator" in message else ""


def _is_deciding(operator: OperatorClient, service: Service) -> bool:
    try:
        return bool(operator.explain(service.key)["decisions"])
    except httpx.HTTPError:
        return False


def _prometheus(cluster: Cluster, namespace: str) -> Object:
    found = cluster.get("pods", "prometheus", namespace)
    assert found
    return found


def _backfill_failures(operator: OperatorClient, service: Service) -> list[Object]:
    return [line for line in operator.log() if line.get("service") == service.key and "history" in line["message"]]


def _all_up(prometheus: PrometheusClient, cluster: Cluster, watched: Service) -> bool:
    """Every pod is one target, named by its labels, and answers."""
    expected = {pod["metadata"]["name"] for pod in plimsoll_pods(cluster)} | set(watched.ready_pods())
    targets = prometheus.targets()
    own = {t["labels"]["pod"] for t in targets if t["labels"].get("service") == watched.key}
    up = [target["labels"]["pod"] for target in targets if target["health"] == "up"]
    return sorted(up) == sorted(expected) and own == set(watched.ready_pods())


def _without_value(prometheus: PrometheusClient, watched: Service) -> list[str]:
    names = [rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"]
    return [name for name in names if name != PER_GPU and not prometheus.query(f'{name}{{service="{watched.key}"}}')]
