"""More comes than the engines can serve: who gets in, who is told when to come back, and that the promise holds.

Light engines, slowed down until one of them carries about six requests a second, so that an overload is a load that two
cores can send. What is refused is part of every figure: goodput counts over time, never over what was let in.
Between two scenarios of one service are those of others: an overload is called over a minute after it.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.lib import sdks, simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.load import Load, OpenLoop, poisson, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import signal_container
from e2e.lib.request_log import RequestLog, RequestRecord, RequestResult
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until
from plimsoll.api import labels

SCALE = 8.0  # of the profile's step times: about 40 ms a step
OUTPUT_TOKENS = 48
WORDS = 300
TTFT_S, TPOT_S = 2.0, 0.08
SLO = {"ttft": "2s", "tpot": "80ms"}
LOW, OVERLOAD = 1.5, 11.0  # requests/s; one replica carries about 6
SETTLED_S = 20.0  # after a step in load: the gate has learned what comes
MAX_SDK_RETRY_AFTER_S = 60  # of a Retry-After; whoever is told more tries again at a time of its own
CONDITION_TIMEOUT_S = 150.0  # a minute's figures, a tick, and a busy machine
CLASS, TENANT = "x-gateway-inference-objective", "x-gateway-inference-fairness-id"
CLIENTS = Path(__file__).with_name("clients")
URGENT: Object = {"name": "urgent", "priority": 10}
DEFAULT: Object = {"name": "default"}
TENANTS = {"large": 9, "small": 1}  # and their weights
MIN_WEIGHTED_SHARE = 0.6  # of the larger tenant: 3 deviations above the half that it would have without a weight
MAX_ABOVE_FAIR = 0.08  # 4 deviations of the share of some 200 requests
SLO_SHARE = 0.95


def _service(
    name: str, most: int = 1, least: int = 1, start_s: float = 5, scale: float = SCALE, **spec: object
) -> Object:
    flags = {"--profile": "h200-8b-cool", "--profile-scale": scale, "--spread": 0, "--start-seconds": start_s}
    args = [str(word) for flag in flags.items() for word in flag]
    tiers = {"serve": {"minReplicas": least, "maxReplicas": most, "gpus": 0}}
    engine = {"runtime": "simulated", "args": args}
    made = make_manifest(name, tiers, model={"uri": "hf://example/sim-8b"}, engine=engine, slo=SLO)
    made["spec"] |= spec
    return made


def _prompts(name: str, **headers: str) -> Callable[[int], Prompt]:
    start, sent = time.time(), tuple(headers.items())
    return lambda n: Prompt(unique_text(WORDS, f"{name} {start} {n}"), OUTPUT_TOKENS, headers=sent)


def _steady(rate: float, seconds: float, name: str, seed: int) -> OpenLoop:
    return poisson(rate, seconds, _prompts(name), seed)


def _is_within_slo(record: RequestRecord) -> bool:
    """Whether the promise to this request was kept."""
    on_time = record.ttft_s is not None and record.ttft_s <= TTFT_S
    return record.ok and on_time and (record.tpot_s is None or record.tpot_s <= TPOT_S)


def _records_between(ledger: RequestLog, begin: float, end: float) -> list[RequestRecord]:
    return [record for record in ledger.records if begin <= record.sent_at < end]


def _unexpected_failures(records: list[RequestRecord]) -> list[RequestRecord]:
    """Failures of any other kind than a refusal that says whether and when to come back."""
    reported = {429, 503}
    return [
        r
        for r in records
        if not r.ok
        and (r.outcome is not RequestResult.REJECTED or r.status not in reported or "retry=None" in r.detail)
    ]


def _describe(records: list[RequestRecord]) -> str:
    origin = min((r.sent_at for r in records), default=0.0)
    return "\n".join(r.line(origin) for r in records[:20])


def _desired(service: Service) -> int:
    return int(service.status()["tiers"]["serve"]["summary"].partition("/")[2])


def _learn_capacity(service: Service) -> None:
    """Lets a service see a light load until its gateways have been told what its engines can do."""
    with Load(service.target, _steady(LOW, 200, f"learn {service.name}", seed=1)) as load:
        wait_until(
            f"{service.key} has a load line",
            lambda: "capacityPerReplica" in service.status()["tiers"]["serve"],
            CONDITION_TIMEOUT_S,
        )
        wait_until(
            f"{service.key} tells it",
            lambda: service.limits().get("costModel"),
            CONDITION_TIMEOUT_S,
        )
        sleep(SETTLED_S)
    assert not load.ledger.failures, load.ledger.explain()


def _outcomes(gateway: GatewayClient, service: Service) -> Counter[str]:
    """Of admission, since the gateways began."""
    total: Counter[str] = Counter()
    for reported in gateway.services(service.key):
        total.update(reported["admission"]["outcomes"])
    return total


@pytest.fixture(scope="module")
def learned(cluster: Cluster, namespace: str) -> dict[str, Service]:
    """All services of these scenarios, of which is known what has to be; at the same time, to save it."""
    tenants = [{"name": name, "weight": weight} for name, weight in TENANTS.items()]
    made = (
        _service("gate", admission={"classes": [URGENT, DEFAULT], "tenants": tenants}),
        _service("spare", scale=2.0),
        _service("main", admission={"whenFull": "Downgrade", "fallback": {"name": "spare"}}),
        _service("crew", most=4),
    )
    cluster.apply(*made, namespace=namespace)
    found = {name: Service(cluster, namespace, name, stack.GATEWAY_URL) for name in ("gate", "spare", "main", "crew")}
    for service in found.values():
        service.wait_ready()
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(_learn_capacity, found.values()))
    return found


@pytest.fixture
def gate(learned: dict[str, Service]) -> Service:
    """One replica, two classes, two tenants."""
    return learned["gate"]


def test_overload_admits_95_percent_within_slo(gate: Service, gateway: GatewayClient) -> None:
    """Those let in have the promise, the others are told when to come back, and nothing is left lying idle."""
    seconds, before = 70.0, _outcomes(gateway, gate)
    started = time.time()
    with Load(gate.target, _steady(OVERLOAD, seconds, "overload", seed=2)) as load:
        gate.wait_condition("Shedding", CONDITION_TIMEOUT_S, status="True")
        shedding_s = time.time() - started
        events = [e["message"] for e in gate.wait_events("SheddingStarted")]
        sleep(max(0.0, started + seconds - time.time()))
        knee = simulated_fleet.replica_capacity(gate)
    begin, end = started + SETTLED_S, started + seconds
    records = _records_between(load.ledger, begin, end)
    admitted = [r for r in records if r.outcome is not RequestResult.REJECTED]
    refused = [r for r in records if r.outcome is RequestResult.REJECTED]
    within_slo = sum(map(_is_within_slo, admitted))
    goodput = within_slo / (end - begin)
    print(
        f"{load.ledger.summary()}; outcomes {dict(_outcomes(gateway, gate) - before)}"
        f"; shedding after {shedding_s:.0f} s"
    )
    print(f"settled: {len(records)} offered, {len(refused)} refused {dict(Counter(r.reason for r in refused))}")
    print(
        f"{within_slo} of {len(admitted)} admitted within SLO; goodput {goodput:.2f} req/s, knee {knee} req/s\n{events}"
    )
    assert {r.status for r in refused} == {429}
    assert not _unexpected_failures(load.ledger.records), _describe(_unexpected_failures(load.ledger.records))
    assert within_slo >= SLO_SHARE * len(admitted)
    assert goodput >= 0.8 * knee


def test_overflow_is_downgraded_to_fallback(learned: dict[str, Service], gateway: GatewayClient) -> None:
    """While the fallback has room nothing is refused, and its answers say whose they are."""
    main, spare = learned["main"], learned["spare"]
    before, served = _outcomes(gateway, main), spare.metrics("serve")
    fallbacks = gateway.fallbacks()
    started = time.time()
    with Load(main.target, _steady(OVERLOAD, 60, "downgrade", seed=5)) as load:
        sleep(2 * SETTLED_S)
    outcomes, fallbacks = _outcomes(gateway, main) - before, gateway.fallbacks() - fallbacks
    assert outcomes["Downgraded"] > 0

    def served_by_fallback() -> float | None:
        count = (spare.metrics("serve") - served).total("vllm:request_success_total")
        return count if count >= outcomes["Downgraded"] - fallbacks else None

    served_requests = wait_until("the fallback has counted what it served", served_by_fallback)
    print(f"{load.ledger.summary()} in {time.time() - started:.0f} s; outcomes {dict(outcomes)}")
    answers = _responding_models(load.ledger.records)
    print(
        f"models of the answers {dict(answers)}; the fallback served {served_requests:.0f};"
        f" {fallbacks} decided without the owner"
    )
    assert not load.ledger.failures, load.ledger.explain()
    # An owner may have decided about a request, too late, that the other gateway then decided about.
    assert served_requests <= outcomes["Downgraded"] <= served_requests + fallbacks
    assert answers.keys() & {spare.name, spare.key}, "no answer was the fallback's"
    assert answers.keys() <= {main.name, main.key, spare.name, spare.key}


@pytest.mark.extended
def test_fallback_renamed_under_load_loses_no_request(learned: dict[str, Service], cluster: Cluster) -> None:
    """While requests go to the fallback its name is changed, then removed; its answers say the name of the time."""
    main, spare = learned["main"], learned["spare"]
    engines = uids(spare.pods())
    with Load(main.target, _steady(OVERLOAD, 140, "fallback renamed", seed=6)) as load:
        sleep(SETTLED_S)
        _rename(cluster, spare, "spare-renamed")
        renamed_at = time.time()
        sleep(SETTLED_S)
        restored_at = time.time()
        _rename(cluster, spare, None)
        removed_at = time.time()
        sleep(SETTLED_S)
    between = _records_between(load.ledger, renamed_at, restored_at)
    renamed = _responding_models([record for record in between if record.ended_at < restored_at])
    removed = _responding_models(_records_between(load.ledger, removed_at, math.inf))
    print(f"{load.ledger.summary()}; models of answers {dict(renamed)}, then {dict(removed)}")
    assert not load.ledger.failures, load.ledger.explain()
    assert "spare-renamed" in renamed, "no answer was the fallback's"
    assert renamed.keys() <= {main.name, "spare-renamed"}
    assert spare.name in removed, "no answer was the fallback's"
    assert removed.keys() <= {main.name, spare.name}
    assert uids(spare.pods()) == engines, "a change of its name replaced the fallback's engine"


def _rename(cluster: Cluster, service: Service, name: str | None) -> None:
    """Sets or removes the model's name, and waits until every gateway answers to it."""
    cluster.patch("inferenceservices", service.name, service.namespace, {"spec": {"model": {"name": name}}})
    public = name or service.name
    wait_until(f"{public} is answered", lambda: service.status()["modelNames"][0] == public)


def _responding_models(records: list[RequestRecord]) -> Counter[str]:
    """How many responses each model gave, by their own word.

    Requests of one kind only: a short output finds room where a longer one goes to the fallback.
    """
    return Counter(r.responding_model for r in records if r.ok)


MIX = (("urgent", "ops", 2.0), ("default", "large", 5.5), ("default", "small", 5.5))  # class, tenant, requests/s


def _mixed_prompt(n: int) -> Prompt:
    """The n-th request of the mix: each class and tenant by its rate."""
    draw = random.Random(n)
    request_class, tenant, _ = draw.choices(MIX, [rate for *_, rate in MIX])[0]
    labels = (("class", request_class), ("tenant", tenant))
    text = unique_text(WORDS, f"mix {time.time()} {n}")
    return Prompt(text, OUTPUT_TOKENS, headers=((CLASS, request_class), (TENANT, tenant)), labels=labels)


@pytest.mark.extended
def test_urgent_class_and_tenant_shares_hold_under_overload(gate: Service, gateway: GatewayClient) -> None:
    """Nobody is thrown out for the urgent: that a few who come at once find room, others must leave some."""
    seconds, before, fallbacks = 70.0, _outcomes(gateway, gate), gateway.fallbacks()
    gate.wait_condition("Shedding", CONDITION_TIMEOUT_S, status="False")
    assert gate.wait_events("SheddingStopped"), "of the overload before"
    _set_fill(gate, "80%")
    started = time.time()
    ledger = Load(gate.target, poisson(sum(rate for *_, rate in MIX), seconds, _mixed_prompt, seed=3)).run()
    _set_fill(gate, "100%")
    records = _records_between(ledger, started + SETTLED_S, started + seconds)
    urgent = [r for r in records if dict(r.labels)["class"] == "urgent"]
    others = [r for r in records if dict(r.labels)["class"] == "default"]
    let_in = Counter(dict(r.labels)["tenant"] for r in others if r.ok)
    share, fair = let_in["large"] / let_in.total(), TENANTS["large"] / sum(TENANTS.values())
    fallbacks = gateway.fallbacks() - fallbacks
    print(f"{ledger.summary()}; outcomes {dict(_outcomes(gateway, gate) - before)}; {fallbacks} decided alone")
    print(
        f"urgent: {sum(r.ok for r in urgent)} of {len(urgent)} answered, "
        f"{sum(map(_is_within_slo, urgent))} within the SLO"
    )
    print(f"others: {let_in.total()} of {len(others)} answered, by tenant {dict(let_in)}: {share:.0%}, fair {fair:.0%}")
    print(_describe([r for r in urgent if not r.ok]))
    assert not _unexpected_failures(ledger.records), _describe(_unexpected_failures(ledger.records))
    assert let_in.total() < len(others), "that was no overload"
    assert sum(r.ok for r in urgent) >= 0.95 * len(urgent)
    assert MIN_WEIGHTED_SHARE <= share <= fair + MAX_ABOVE_FAIR


def _set_fill(service: Service, fill: str) -> None:
    """How full the engine may be for those who are not urgent."""
    admission = {"classes": [URGENT, {**DEFAULT, "maxUtilization": fill}]}
    service.cluster.patch(labels.PLURAL, service.name, service.namespace, {"spec": {"admission": admission}})


@pytest.fixture
def fleet(learned: dict[str, Service]) -> Service:
    """A fleet that needs two replicas or three for what it gets."""
    return learned["crew"]


def _settled_replicas(service: Service, seconds: float = 40.0) -> int:
    """The replicas that are wanted, once that has not changed for so long and all of them serve."""
    last, since = _desired(service), time.time()

    def unchanged() -> bool:
        nonlocal last, since
        now = _desired(service)
        if now != last or len(service.ready_pods("serve")) != now:
            last, since = now, time.time()
        return time.time() - since >= seconds

    wait_until(f"the replicas of {service.key} are settled", unchanged, 240)
    return last


def _kill_pickers(cluster: Cluster) -> int:
    """Returns how many there were."""
    pods = stack.gateway_pods(cluster)
    for pod in pods:
        signal_container(pod, "picker", "KILL")
    return len(pods)


@pytest.mark.extended
def test_gateway_restart_does_not_lower_demand(fleet: Service, cluster: Cluster) -> None:
    """What the gateways knew is gone with them, the demand is not, and nobody is turned away for it.

    The fleet may still become smaller as its engines become better known: for the load that is there.
    """
    with Load(fleet.target, _steady(OVERLOAD, 600, "anew", seed=8)) as load:
        wait_until("the fleet has grown", lambda: _desired(fleet) >= 2, CONDITION_TIMEOUT_S)
        before = _settled_replicas(fleet)
        struck_at, observed, reported = time.time(), [], len(simulated_fleet.scale_down_rates(fleet))
        pickers = _kill_pickers(cluster)
        stack.wait_for_gateways(cluster, pickers)
        whole_s = time.time() - struck_at
        for _ in range(60):
            observed.append(_desired(fleet))
            sleep(1.0)
        down = simulated_fleet.scale_down_rates(fleet)[reported:]
    after = [r for r in load.ledger.records if r.ended_at >= struck_at]
    failed = [r for r in after if not r.ok]
    print(f"{before} replicas, whole again after {whole_s:.0f} s, desired then {dict(Counter(observed))}")
    print(f"{load.ledger.summary()}; since then {len(failed)} of {len(after)} failed")
    assert all(rate >= simulated_fleet.FORECAST_SHARE * OVERLOAD for rate in down), down
    capacity = min(observed) * simulated_fleet.replica_capacity(fleet)
    assert capacity >= simulated_fleet.FORECAST_SHARE * OVERLOAD
    assert not _unexpected_failures(after), _describe(_unexpected_failures(after))
    assert len(failed) <= (1.0 - SLO_SHARE) * len(after), "a rejected request counts as missed"


@pytest.mark.extended
def test_openai_sdk_default_retries_are_admitted(gate: Service) -> None:
    """Default retries, unpatched: whoever was told to come back within what SDKs wait gets in when it does."""
    sdks.require_package("openai")
    gate.wait_condition("Shedding", CONDITION_TIMEOUT_S, status="False")
    argv = [sys.executable, str(CLIENTS / "openai_retries.py"), gate.url, gate.name]
    env, pipe = {**os.environ, "NO_PROXY": "*"}, subprocess.PIPE
    with subprocess.Popen(argv, text=True, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as sdk:
        assert sdk.stdout
        assert sdk.stdout.readline() == "ready\n", sdk.communicate()
        with Load(gate.target, _steady(OVERLOAD, 45, "beside the SDK", seed=4)) as load:
            sleep(SETTLED_S)
            printed, errors = sdk.communicate("go\n", timeout=300)
    assert sdk.returncode == 0, printed + errors
    users = json.loads(printed.splitlines()[-1])
    reported = [user for user in users if user["waits"] and 0 < (user["waits"][0] or 0) <= MAX_SDK_RETRY_AFTER_S]
    came_back = [user for user in reported if user["succeeded"]]
    first_time = sum(user["statuses"][1:2] == [200] for user in reported)
    print(f"{len(users)} users, {len(reported)} told to wait {sorted(user['waits'][0] for user in reported)} s")
    print(f"{len(came_back)} of these got in, {first_time} at the first retry; {load.ledger.summary()}")
    assert reported, "nobody was told to come back: that was no overload"
    assert all(status in (200, 429, 503) for user in users for status in user["statuses"])
    assert len(reported) - len(came_back) <= max(1, len(reported) // 10)
