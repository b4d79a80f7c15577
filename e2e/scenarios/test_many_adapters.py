"""Fifty LoRA adapters on real vLLM, ten of them hot, while engines are added, deleted and killed.

All adapters have weights of their own, from ConfigMaps in one projected volume. Most requests name one of the hot
adapters and the others one of the rest in turn. Each greedy answer is compared with the first answer of its adapter, so
that an engine that serves an adapter with the weights of another fails the scenario.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import ClosedLoop, Load
from e2e.lib.node import has_ended, main_process, signal_container
from e2e.lib.request_log import RequestLog
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.tiny_adapter import adapter_config_map
from e2e.lib.wait import wait_until
from plimsoll.api import labels

ADAPTERS, HOT, BATCH = 50, 10, 4
COLD_EVERY = 5  # one request of so many names an adapter that is not hot
USERS = 4
TEXT = "def main():"
MAX_TOKENS = 16
ENOUGH = 2 * COLD_EVERY * ADAPTERS  # requests of a phase: each cold adapter is asked twice
PHASE_S = 600.0
SLO = {"ttft": "60s", "tpot": "10s"}  # loose: no request is rejected
NAMES = [f"tiny-{n:02d}" for n in range(ADAPTERS)]


def manifest() -> Object:
    """Two engines that have the files of all adapters."""
    sources = [
        {"configMap": {"name": name, "items": [{"key": key, "path": f"{name}/{key}"} for key in FILES]}}
        for name in NAMES
    ]
    pod = {
        "volumes": [{"name": "adapters", "projected": {"sources": sources}}],
        "volumeMounts": [{"name": "adapters", "mountPath": "/adapters"}],
    }
    engine = {"lora": {"maxLoras": BATCH, "maxLoraRank": 8, "maxCpuLoras": ADAPTERS}}
    made = make_manifest("many", {"serve": {"minReplicas": 2, "maxReplicas": 2, "pod": pod}}, engine=engine, slo=SLO)
    made["spec"]["adapters"] = [
        {"name": name, "uri": f"file:///adapters/{name}", "pinned": n < HOT} for n, name in enumerate(NAMES)
    ]
    return made


FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def many(cluster: Cluster, namespace: str) -> Service:
    for seed, name in enumerate(NAMES):
        cluster.apply(adapter_config_map(name, seed), namespace=namespace)
    cluster.apply(manifest(), namespace=namespace)
    service = Service(cluster, namespace, "many", stack.GATEWAY_URL)
    service.wait_ready()
    return service


def prompts() -> Callable[[int], Prompt]:
    """Requests for the hot adapters in turn; one of COLD_EVERY for the next of the others."""
    hot, cold = itertools.cycle(NAMES[:HOT]), itertools.cycle(NAMES[HOT:])
    return lambda n: Prompt(TEXT, max_tokens=MAX_TOKENS, chat=False, model=next(hot if n % COLD_EVERY else cold))


def wait_loaded(service: Service, engines: int) -> None:
    def is_loaded() -> bool:
        loaded = {entry["name"]: entry.get("loaded", "") for entry in service.status().get("adapters", [])}
        return loaded == dict.fromkeys(NAMES, f"{engines}/{engines}")

    wait_until(f"{engines} engines have loaded {ADAPTERS} adapters", is_loaded, START_S)


def wait_requests(load: Load, count: int = ENOUGH) -> None:
    """Waits for further requests of a running load."""
    begun = len(load.ledger.records)
    wait_until(f"{count} requests more", lambda: len(load.ledger.records) >= begun + count, PHASE_S)


def wrong_answers(log: RequestLog) -> list[str]:
    """Adapters with two different answers to the one prompt, and pairs of hot adapters with the same answer."""
    answers: dict[str, set[str]] = {}
    for record in log.records:
        if record.ok:
            answers.setdefault(record.model, set()).add(record.text)
    several = [name for name, texts in answers.items() if len(texts) > 1]
    alike = Counter(text for texts in answers.values() for text in texts)
    return several + [text for text, adapters in alike.items() if adapters > 1]


def report(what: str, load: Load) -> None:
    served = Counter(record.model for record in load.ledger.records if record.ok)
    print(f"{what}: {load.ledger.summary()}, {len(served)} adapters")


def test_fifty_adapters_answer_with_their_own_weights(many: Service) -> None:
    start = time.monotonic()
    wait_loaded(many, 2)
    print(f"all adapters loaded {time.monotonic() - start:.0f} s after Ready")
    with Load(many.target, ClosedLoop(USERS, prompts())) as load:
        wait_requests(load)
    report("two engines", load)
    assert not load.ledger.failures, load.ledger.explain()
    assert {record.model for record in load.ledger.records} == set(NAMES)
    assert not wrong_answers(load.ledger)


def test_added_engine_fails_no_request_for_an_adapter(many: Service, cluster: Cluster) -> None:
    known = set(many.ready_pods("serve"))
    tiers = {"serve": {"minReplicas": 3, "maxReplicas": 3}}
    with Load(many.target, ClosedLoop(USERS, prompts())) as load:
        cluster.patch(labels.PLURAL, many.name, many.namespace, {"spec": {"tiers": tiers}})
        (added,) = wait_until("a third engine", lambda: set(many.ready_pods("serve")) - known, START_S)
        wait_loaded(many, 3)
        before = many.engine_metrics(added).total("vllm:request_success_total")
        wait_requests(load)
        served = many.engine_metrics(added).total("vllm:request_success_total") - before
    report(f"an engine added, which then answered {served:.0f} of the last {ENOUGH}", load)
    assert not load.ledger.failures, load.ledger.explain()
    assert not wrong_answers(load.ledger)
    assert served


def test_deleted_engine_fails_no_request_for_an_adapter(many: Service, cluster: Cluster) -> None:
    victim = many.ready_pods("serve")[0]
    with Load(many.target, ClosedLoop(USERS, prompts())) as load:
        wait_requests(load, USERS)
        cluster.kubectl("delete", "pod", "-n", many.namespace, victim, "--wait=false")
        wait_until("the engine is replaced", lambda: victim not in str(many.pods()) and many.is_ready(), START_S)
        wait_loaded(many, len(many.ready_pods("serve")))
    report("an engine deleted", load)
    assert not load.ledger.failures, load.ledger.explain()
    assert not wrong_answers(load.ledger)


def test_killed_engine_fails_only_its_own_requests(many: Service, cluster: Cluster) -> None:
    """A request that is at the engine when it is killed ends; those that come later find another one."""
    found = cluster.get("pods", many.ready_pods("serve")[0], many.namespace)
    assert found
    process = main_process(found, "engine")
    with Load(many.target, ClosedLoop(USERS, prompts())) as load:
        wait_requests(load, USERS)
        signal_container(found, "engine", "KILL")
        wait_until("the engine's processes have ended", lambda: has_ended(process), every_s=0.1)
        killed_by = time.time()
        many.wait_condition("Reconciling", status="True")
        wait_until("the engine is back", many.is_ready, START_S)
        wait_loaded(many, len(many.ready_pods("serve")))
    report("an engine killed", load)
    later = load.ledger.since(killed_by)
    assert not later.failures, later.explain()
    assert not wrong_answers(load.ledger)
