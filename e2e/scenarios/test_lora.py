"""LoRA adapters on real vLLM: several adapters, one pinned, changed while engines run, and engines that go."""

from __future__ import annotations

import time

import httpx
import pytest

from e2e.lib.client import Prompt, Target
from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.node import has_ended, main_process, signal_container
from e2e.lib.service import LAUNCHER_PORT, START_S, Service, make_manifest
from e2e.lib.tiny_adapter import adapter_config_map
from e2e.lib.wait import sleep, wait_until
from plimsoll.api import labels

SYNC_S = 240.0  # twice what a kubelet takes to bring a changed ConfigMap to its pods
USERS = 2
ONE, TWO = "lora-one", "lora-two"


def adapter(name: str, folder: str = "one", **more: object) -> Object:
    return {"name": name, "uri": f"file:///adapters/{folder}", **more}


ADAPTERS = [adapter(ONE, pinned=True), adapter(TWO, "two")]


def manifest() -> Object:
    """Two engines that have the files of two adapters, from ConfigMaps."""
    pod = {
        "volumes": [{"name": name, "configMap": {"name": f"adapter-{name}"}} for name in ("one", "two")],
        "volumeMounts": [{"name": name, "mountPath": f"/adapters/{name}"} for name in ("one", "two")],
    }
    engine = {"lora": {"maxLoras": 2, "maxLoraRank": 8, "maxCpuLoras": 8}}
    made = make_manifest("lora", {"serve": {"minReplicas": 2, "maxReplicas": 2, "pod": pod}}, engine=engine)
    made["spec"]["adapters"] = ADAPTERS
    return made


@pytest.fixture(scope="module")
def lora(cluster: Cluster, namespace: str, shared: dict[str, Service]) -> Service:
    for seed, name in enumerate(("one", "two")):
        cluster.apply(adapter_config_map(f"adapter-{name}", seed), namespace=namespace)
    cluster.apply(manifest(), namespace=namespace)
    service = Service(cluster, namespace, "lora", shared["solo"].url)
    service.wait_ready()
    return service


def answer(service: Service, model: str) -> tuple[int, str]:
    """Status, and the greedy answer or the error's code."""
    body = {"model": model, "prompt": "def main():", "max_tokens": 12, "temperature": 0}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    document = response.json()
    return response.status_code, document["choices"][0]["text"] if response.is_success else document["error"]["code"]


def set_adapters(service: Service, adapters: list[Object]) -> None:
    service.cluster.patch(labels.PLURAL, service.name, service.namespace, {"spec": {"adapters": adapters}})


def loaded(service: Service) -> dict[str, str]:
    return {entry["name"]: entry.get("loaded", "") for entry in service.status().get("adapters", [])}


def wait_loaded(service: Service, *names: str) -> None:
    expected = dict.fromkeys(names, "2/2")
    wait_until(f"both engines have loaded {names}", lambda: loaded(service) == expected, SYNC_S)


def test_adapters_are_models_with_answers_of_their_own(lora: Service) -> None:
    wait_loaded(lora, ONE, TWO)
    answers = [answer(lora, model) for model in ("lora", ONE, TWO, f"{lora.key}/{ONE}")]
    assert [status for status, _ in answers] == [200] * 4
    assert len({text for _, text in answers[:3]}) == 3, answers
    assert answers[1] == answers[3]
    listed = httpx.get(f"{lora.url}/v1/models", timeout=60).json()["data"]
    assert {"lora", ONE, TWO} <= {card["id"] for card in listed}


def test_adapters_come_and_go_without_a_restart(lora: Service) -> None:
    before = uids(lora.pods())
    set_adapters(lora, [*ADAPTERS, adapter("lora-three", "two")])
    wait_loaded(lora, ONE, TWO, "lora-three")
    assert answer(lora, "lora-three") == answer(lora, TWO)
    set_adapters(lora, ADAPTERS)
    wait_until("the name is gone", lambda: answer(lora, "lora-three") == (404, "model_not_found"))
    wait_loaded(lora, ONE, TWO)
    assert uids(lora.pods()) == before


def test_failed_adapter_is_in_the_status_and_others_go_on(lora: Service) -> None:
    set_adapters(lora, [*ADAPTERS, adapter("lora-none", "none")])
    try:
        failed = lora.wait_condition("AdapterFailed", SYNC_S, status="True")
        assert "lora-none" in failed["message"]
        assert "does not exist in the engine pod" in failed["message"]
        assert lora.wait_events("AdapterFailed")
        wait_until("requests say why", lambda: answer(lora, "lora-none") == (503, "adapter_failed"), SYNC_S)
        assert [answer(lora, model)[0] for model in ("lora", ONE, TWO)] == [200] * 3
    finally:
        set_adapters(lora, ADAPTERS)
    lora.wait_condition("AdapterFailed", SYNC_S, status="False")


def test_deleted_engine_fails_no_request(lora: Service, cluster: Cluster) -> None:
    """A drained engine answers what it has, and its successor has the pinned adapter when it is ready."""

    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(50, f"lora {n}"), max_tokens=40)

    victim = lora.ready_pods("serve")[0]
    with (
        Load(Target(lora.url, ONE), ClosedLoop(USERS, prompts)) as first,
        Load(Target(lora.url, TWO), ClosedLoop(USERS, prompts)) as second,
    ):
        sleep(5)
        cluster.kubectl("delete", "pod", "-n", lora.namespace, victim, "--wait=false")
        wait_until("the engine is replaced", lambda: victim not in str(lora.pods()) and lora.is_ready(), START_S)
        sleep(5)
    for load in (first, second):
        assert not load.ledger.failures, load.ledger.explain()


def test_killed_engine_has_its_adapters_again(lora: Service, cluster: Cluster) -> None:
    """A container that is killed restarts in its pod; requests that are sent later find the other engine."""

    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(50, f"killed {n}"), max_tokens=10)

    found = cluster.get("pods", lora.ready_pods("serve")[0], lora.namespace)
    assert found
    process = main_process(found, "engine")
    with Load(Target(lora.url, ONE), ClosedLoop(1, prompts)) as load:
        sleep(3)
        signal_container(found, "engine", "KILL")
        wait_until("the engine's processes have ended", lambda: has_ended(process), every_s=0.1)
        killed_by = time.time()
        lora.wait_condition("Reconciling", status="True")
        wait_until("the engine is back", lora.is_ready, START_S)
        sleep(5)
    later = load.ledger.since(killed_by)
    assert not later.failures, later.explain()
    wait_loaded(lora, ONE, TWO)
    samples = cluster.in_pod(lora.namespace, found["metadata"]["name"], LAUNCHER_PORT, "/metrics")
    assert f'plimsoll_engine_adapter_loaded{{adapter="{ONE}"}} 1' in samples
