"""The platform rolls a new engine image out: one that cannot be pulled stops at one service, the next reaches all."""

from __future__ import annotations

import time
from collections.abc import Callable

from e2e.cluster.images import reference
from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true, uids
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.simulated_fleet import engine_args
from e2e.lib.wait import wait_until

NEXT = "0.1.98"
SLO = {"ttft": "60s"}
ORDER = ("cheap", "middle", "costly")  # of importance
SPECS: dict[str, Object] = {"cheap": {}, "middle": {"scaling": {"sloMissCost": 1}}, "costly": {}}


def roll_out(cluster: Cluster, generation: int, image: str) -> None:
    rollout = f"engine.rollout.generation={generation},engine.rollout.minReadySeconds=5"
    stack.install(cluster, "--set", f"engine.simulatedImage={image}", "--set", rollout)


def rollout_reason(service: Service) -> str:
    return str(service.condition("EngineRolloutPending").get("reason", ""))


def _is_up(pod: Object) -> bool:
    return is_true(pod, "Ready") or "deletionTimestamp" in pod["metadata"]


def test_engine_rollout_stops_at_a_bad_image_and_goes_on(
    service: Callable[[str], Service], cluster: Cluster, namespace: str
) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(50, f"rollout {start} {n}"), max_tokens=16)

    start = time.time()
    fleet = {name: service(name) for name in ORDER}
    engine = {"runtime": "simulated", "args": engine_args()}
    for name, spec in SPECS.items():
        made = make_manifest(name, {"serve": {"gpus": 0}}, {"uri": "hf://example/sim-8b"}, engine)
        made["spec"] |= spec | ({} if name == "cheap" else {"slo": SLO})
        cluster.apply(made, namespace=namespace)
    for one in fleet.values():
        one.wait_ready()
    first = {name: uids(one.pods()) for name, one in fleet.items()}
    image = reference("engine-simulated")

    roll_out(cluster, 1, f"{image.rpartition(':')[0]}:missing")
    stopped = fleet["cheap"].wait_condition("EngineRolloutPending", START_S, reason="RolloutFailed")
    waits = fleet["costly"].wait_condition("EngineRolloutPending", reason="RolloutStopped")
    print(f"{stopped['message']}\n{waits['message']}")
    assert fleet["cheap"].key in waits["message"]
    assert {name: uids(fleet[name].pods()) for name in ("middle", "costly")} == {
        n: first[n] for n in ("middle", "costly")
    }
    fleet["cheap"].wait_condition("Ready", status="True")

    begun: list[str] = []

    def is_done() -> bool:
        """Whether all services are updated. It also looks who is rolled out, and that new engines start in one only."""
        reasons = {name: rollout_reason(one) for name, one in fleet.items()}
        begun.extend(name for name, reason in reasons.items() if reason == "RollingOut" and name not in begun)
        pods = {name: one.pods() for name, one in fleet.items()}
        images = {
            name: {c["image"] for pod in found for c in pod["spec"]["containers"]} for name, found in pods.items()
        }
        starting = [name for name, found in pods.items() if new in images[name] and not all(map(_is_up, found))]
        assert len(starting) <= 1, starting
        return all(found == {new} for found in images.values()) and not any(reasons.values())

    new = stack.retag("engine-simulated", "dev", NEXT)
    with Load(fleet["cheap"].target, ClosedLoop(1, prompts, think_s=0.5)) as load:
        roll_out(cluster, 2, new)
        wait_until("every service has the new engines", is_done, 3 * START_S)
    print(f"in the order {begun}; {load.ledger.summary()}")
    assert begun == list(ORDER)
    assert not load.ledger.failures, load.ledger.explain()
    for name, one in fleet.items():
        assert not uids(one.pods()).items() & first[name].items()
        cluster.delete("inferenceservices", name, namespace=namespace)
    stack.install(cluster)
