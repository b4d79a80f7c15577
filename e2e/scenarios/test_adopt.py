"""A Deployment of engines that Plimsoll did not make: recommendations, then its count, then an HPA takes over.

Another one serves behind Plimsoll's gateway, without a change to it.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import yaml

from e2e.cluster.settings import KUBECONFIG
from e2e.lib import foreign_fleets, stack
from e2e.lib.foreign_fleets import PORT, Fleet, Object
from e2e.lib.kube import Cluster
from e2e.lib.service import START_S, Service
from e2e.lib.wait import sleep, wait_until
from plimsoll.api import labels

NAME = "foreign"
ROUTED = "routed"
MODEL = "example/sim-8b"  # that the engines serve
REQUESTS = 60  # well above the 20 from which an engine's means count
WORKERS = 8
RECOMMENDATION_S = 300.0  # from the manifest to the first recommendation
QUIET_S = 30.0  # time in which nothing may change
PAIR = tuple(
    Fleet(
        f"pair-{role}",
        "apps/v1",
        "Deployment",
        "deployments",
        (("app", "pair"), ("llm-d.ai/role", role)),
        kv_role=kv_role,
    )
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
)
FLEET = Fleet(NAME, "apps/v1", "Deployment", "deployments", (("app", NAME),))


def _without_replicas(cluster: Cluster, namespace: str, name: str = NAME) -> Object:
    """What the fleet's owner has written, as the API server has it."""
    live = cluster.get("deployments", name, namespace)
    assert live is not None
    spec = {name: value for name, value in live["spec"].items() if name != "replicas"}
    meta = live["metadata"]
    annotations = {k: v for k, v in meta["annotations"].items() if k != "deployment.kubernetes.io/revision"}
    return {"spec": spec, "labels": meta["labels"], "annotations": annotations, "owners": meta.get("ownerReferences")}


def _replicas(cluster: Cluster, namespace: str) -> int:
    live = cluster.get("deployments", NAME, namespace)
    assert live is not None
    return int(live["spec"]["replicas"])


def _adopt(namespace: str) -> Object:
    arguments = ["adopt", "-n", namespace, "--kubeconfig", str(KUBECONFIG)]
    call = f"import sys; from plimsoll.cli.main import main; sys.exit(main({arguments!r}))"
    text = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True, timeout=60).stdout
    print(text)
    (manifest,) = yaml.safe_load_all(text)
    return dict(manifest)


def _send(cluster: Cluster, namespace: str) -> None:
    """Requests past the gateway, as the fleet's own clients send them."""
    (pod,) = (p["metadata"]["name"] for p in cluster.list("pods", namespace, f"app={NAME}"))
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}:{PORT}/proxy/v1/completions"

    def ask(number: int) -> None:
        cluster.call(path, {"model": MODEL, "prompt": f"{number} " * 200, "max_tokens": 16})

    with ThreadPoolExecutor(WORKERS) as workers:
        list(workers.map(ask, range(REQUESTS)))


def test_foreign_fleet_is_recommended_scaled_and_left_to_an_hpa(
    service: Callable[[str], Service], cluster: Cluster
) -> None:
    llm = service(NAME)
    namespace = llm.namespace
    cluster.apply(*FLEET.manifests(), namespace=namespace)
    wait_until("the fleet runs", lambda: cluster.list("pods", namespace, f"app={NAME}") or None, START_S)
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Available", f"deployment/{NAME}", "--timeout=300s")
    before = _without_replicas(cluster, namespace)

    manifest = _adopt(namespace)
    target = manifest["spec"]["targets"]["serve"]
    assert target["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    assert target["metricsPort"] == PORT
    target |= {"maxReplicas": 4, "gpus": 0}
    cluster.apply(manifest, namespace=namespace)
    ready = llm.wait_condition("Ready", RECOMMENDATION_S, status="True", reason="EnginesReady")
    print(ready["message"])

    def recommends() -> Object | None:
        _send(cluster, namespace)
        tier = llm.status().get("tiers", {}).get("serve", {})
        return tier if "capacityPerReplica" in tier else None

    print(wait_until("there is a recommendation", recommends, RECOMMENDATION_S, every_s=2.0))
    assert llm.condition("ScalingInactive")["reason"] == "RecommendOnly"
    assert _without_replicas(cluster, namespace) == before
    assert _replicas(cluster, namespace) == 1

    bounds = {"targets": {"serve": {"minReplicas": 2}}, "scaling": {"mode": "Auto"}}
    cluster.patch(labels.PLURAL, NAME, namespace, {"spec": bounds})
    wait_until("Plimsoll sets the count", lambda: _replicas(cluster, namespace) == 2 or None, 60)
    assert llm.wait_events("ScaledUp")
    assert _without_replicas(cluster, namespace) == before

    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "theirs"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME},
            "minReplicas": 3,
            "maxReplicas": 4,
        },
    }
    cluster.apply(autoscaler, namespace=namespace)
    yielded = llm.wait_condition("ScalingInactive", 60, status="True", reason="ReplicasOwned")
    print(yielded["message"])
    assert "HorizontalPodAutoscaler theirs" in yielded["message"]
    wait_until("the HPA has its minimum", lambda: _replicas(cluster, namespace) == 3 or None, 90)
    sleep(QUIET_S)
    assert _replicas(cluster, namespace) == 3
    assert _without_replicas(cluster, namespace) == before
    assert llm.status()["tiers"]["serve"]["yieldedTo"] == "HorizontalPodAutoscaler theirs"

    cluster.delete(labels.PLURAL, NAME, namespace=namespace)
    assert _replicas(cluster, namespace) == 3
    assert _without_replicas(cluster, namespace) == before


def _ask_gateway(requests: int) -> Counter[int]:
    """Requests through the gateway, by status."""
    url = f"{stack.GATEWAY_URL}/v1/completions"

    def ask(number: int) -> int:
        body = {"model": MODEL, "prompt": f"{number} " * 200, "max_tokens": 16}
        return httpx.post(url, json=body, timeout=60, trust_env=False).status_code

    with ThreadPoolExecutor(WORKERS) as workers:
        return Counter(workers.map(ask, range(requests)))


def test_foreign_fleet_serves_behind_the_gateway(service: Callable[[str], Service], cluster: Cluster) -> None:
    llm, fleet = service(ROUTED), Fleet(ROUTED, "apps/v1", "Deployment", "deployments", (("app", ROUTED),))
    namespace = llm.namespace
    cluster.apply(*fleet.manifests(), namespace=namespace)
    cluster.kubectl("scale", "-n", namespace, f"deployment/{ROUTED}", "--replicas=2")
    cluster.kubectl("rollout", "status", "-n", namespace, f"deployment/{ROUTED}", "--timeout=300s")
    before = _without_replicas(cluster, namespace, ROUTED)
    target = {"scaleTargetRef": fleet.reference, "metricsPort": PORT, "port": PORT, "maxReplicas": 4, "gpus": 0}
    spec = {
        "model": {"uri": f"hf://{MODEL}", "name": MODEL},
        "slo": {"ttft": "2s", "tpot": "80ms"},
        "targets": {"serve": target},
    }
    manifest = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": ROUTED}, "spec": spec}
    cluster.apply(manifest, namespace=namespace)
    print(llm.wait_condition("Ready", 120, status="True", reason="Serving")["message"])
    assert llm.status()["tiers"]["serve"]["podSelector"] == f"app={ROUTED}"

    def is_sized() -> Object | None:
        assert _ask_gateway(REQUESTS) == {200: REQUESTS}
        return llm.limits().get("costModel")

    wait_until("gateways have admission limits", is_sized, RECOMMENDATION_S, every_s=2.0)

    def is_measured() -> Object | None:
        _ask_gateway(WORKERS)
        found = llm.status().get("slo") or {}
        return found if found.keys() >= {"offered", "ttft"} else None

    slo = wait_until("gateways report TTFT and load", is_measured, 60)
    print(f"offered {slo['offered']}, TTFT {slo['ttft']}")
    assert not llm.condition("MetricsDegraded")

    gone = cluster.list("pods", namespace, f"app={ROUTED}")[0]["metadata"]["name"]
    cluster.delete("pods", gone, namespace=namespace)
    assert _ask_gateway(REQUESTS) == {200: REQUESTS}
    assert _without_replicas(cluster, namespace, ROUTED) == before
    assert llm.condition("ScalingInactive")["reason"] == "RecommendOnly"


def _send_to_pair(cluster: Cluster, namespace: str) -> None:
    """Requests as the router of a pair sends them: the prompt to prefill, and its KV cache's place to decode."""
    paths = []
    for fleet in PAIR:
        (pod,) = (p["metadata"]["name"] for p in cluster.list("pods", namespace, fleet.selector))
        paths.append(f"/api/v1/namespaces/{namespace}/pods/{pod}:{PORT}/proxy/v1/completions")

    def ask(number: int) -> None:
        body: Object = {"model": MODEL, "prompt": f"{number} " * 200, "max_tokens": 16}
        transfer = {"do_remote_decode": True, "do_remote_prefill": False}
        first = cluster.call(paths[0], {**body, "max_tokens": 1, "kv_transfer_params": transfer})
        cluster.call(paths[1], {**body, "kv_transfer_params": first["kv_transfer_params"]})

    with ThreadPoolExecutor(WORKERS) as workers:
        list(workers.map(ask, range(REQUESTS)))


def test_foreign_pair_is_recommended_and_left_alone(service: Callable[[str], Service], cluster: Cluster) -> None:
    llm = service("pair-decode")
    namespace = llm.namespace
    for fleet in PAIR:
        foreign_fleets.create(cluster, fleet, namespace)
    for fleet in PAIR:
        cluster.kubectl("rollout", "status", "-n", namespace, f"deployment/{fleet.name}", "--timeout=300s")
    before = [foreign_fleets.snapshot(cluster, fleet, namespace) for fleet in PAIR]
    manifest = _adopt(namespace)
    targets = manifest["spec"]["targets"]
    assert {role: target["scaleTargetRef"]["name"] for role, target in targets.items()} == {
        "prefill": "pair-prefill",
        "decode": "pair-decode",
    }
    for target in targets.values():
        target |= {"maxReplicas": 4, "gpus": 0}
    cluster.apply(manifest, namespace=namespace)
    print(llm.wait_condition("Ready", RECOMMENDATION_S, status="True", reason="EnginesReady")["message"])

    def recommends() -> Object | None:
        _send_to_pair(cluster, namespace)
        tiers = llm.status().get("tiers", {})
        return tiers if all("capacityPerReplica" in tiers.get(role, {}) for role in targets) else None

    print(wait_until("there is a recommendation for both roles", recommends, RECOMMENDATION_S, every_s=2.0))
    assert llm.condition("ScalingInactive")["reason"] == "RecommendOnly"
    assert [foreign_fleets.snapshot(cluster, fleet, namespace) for fleet in PAIR] == before
