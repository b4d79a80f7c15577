"""Flux delivers the service of the example, changes it, reports a refused change, rolls back and prunes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from e2e.cluster.settings import ROOT
from e2e.lib import flux, simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, uids
from e2e.lib.load import Load, poisson, unique_text
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

GITOPS = ROOT / "examples" / "gitops"
FOLDER = "examples/gitops/services"
NAME = "services"  # of the Kustomization
REFUSAL = "maxReplicas 2 must not be below minReplicas 3"
RATE = 12.0  # requests/s: one replica carries about 6
DELIVERED_S = 240.0  # an engine's start, the controller's health checks, a busy machine


def example_service() -> Object:
    """The example's service, with engines that this cluster can run, and no schedule."""
    made: Object = yaml.safe_load((GITOPS / "services" / "chat.yaml").read_text())
    tiers = {"serve": simulated_fleet.replica_bounds(1, 3)}
    simulated = simulated_fleet.fleet_manifest("chat", tiers)["spec"]
    del made["spec"]["scaling"]
    made["spec"] |= simulated
    return made


def files(service: Object | None) -> dict[str, str]:
    """The folder of the example in a source; None: without the service."""
    listed: Any = yaml.safe_load((GITOPS / "services" / "kustomization.yaml").read_text())
    found = {"namespace.yaml": (GITOPS / "services" / "namespace.yaml").read_text()}
    if service is None:
        listed["resources"].remove("chat.yaml")
    else:
        found["chat.yaml"] = yaml.safe_dump(service)
    found["kustomization.yaml"] = yaml.safe_dump(listed)
    return {f"{FOLDER}/{name}": text for name, text in found.items()}


def changed(service: Object, section: str, values: Object) -> Object:
    made = copy.deepcopy(service)
    made["spec"][section] |= values
    return made


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[None]:
    with flux.installed(cluster):
        yield


@pytest.mark.usefixtures("running")
def test_flux_delivers_changes_rolls_back_and_prunes(cluster: Cluster) -> None:
    documents = list(yaml.safe_load_all((GITOPS / "flux" / "kustomizations.yaml").read_text()))
    [kustomization] = [one for one in documents if one["metadata"]["name"] == NAME]
    original = example_service()
    chat = Service(cluster, original["metadata"]["namespace"], "chat", stack.GATEWAY_URL)

    def live() -> Object:
        return cluster.get_object("inferenceservices.plimsoll.dev", "chat", chat.namespace)

    def deliver(service: Object | None) -> None:
        revision = flux.deliver(cluster, files(service))
        wait_until("the Kustomization is Ready", lambda: flux.applied(cluster, NAME, revision), DELIVERED_S)

    first = flux.deliver(cluster, files(original))
    cluster.apply(flux.with_source(kustomization))
    wait_until("the service is delivered", lambda: flux.applied(cluster, NAME, first), DELIVERED_S)
    assert chat.condition("Ready")["status"] == "True", "Ready of the Kustomization means a ready service"
    assert chat.ready_pods("serve")

    def prompt(number: int) -> Prompt:
        return Prompt(unique_text(300, f"flux {number}"), max_tokens=48)

    with Load(chat.target, poisson(RATE, 120, prompt, seed=4)):
        wait_until("the operator scales", lambda: simulated_fleet.desired_replicas(chat) > 1, DELIVERED_S)
    for token in ("one", "two"):
        flux.request_reconciliation(cluster, NAME, token)
        wait_until("Flux reconciles", lambda token=token: flux.reconciled(cluster, NAME, token), DELIVERED_S)
    managers = {one["manager"] for one in live()["metadata"]["managedFields"] if "f:spec" in one["fieldsV1"]}
    assert (live()["metadata"]["generation"], managers) == (1, {flux.MANAGER})

    deliver(changed(original, "slo", {"ttft": "3s"}))
    assert (live()["spec"]["slo"]["ttft"], live()["metadata"]["generation"]) == ("3s", 2)

    before = uids(chat.pods("serve"))
    flux.deliver(cluster, files(changed(original, "tiers", {"serve": {"gpus": 0, "minReplicas": 3, "maxReplicas": 2}})))
    failure = wait_until(
        "the Kustomization says why",
        lambda: REFUSAL in (found := flux.ready(cluster, NAME)).get("message", "") and found,
        DELIVERED_S,
    )
    print(failure["message"])
    assert (failure["status"], live()["metadata"]["generation"]) == ("False", 2)
    assert chat.ready_pods("serve")
    assert set(uids(chat.pods("serve")).values()) & set(before.values())

    deliver(original)
    assert live()["spec"]["slo"] == original["spec"]["slo"]

    deliver(None)
    wait_until("the service is pruned", lambda: chat.get() is None and not chat.pods(), DELIVERED_S)
