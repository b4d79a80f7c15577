"""A model name stays with its holder: other claims and edits do not move it, and it goes on when it is freed."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

NOWHERE = {"serve": {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}}
QUESTION = Prompt("Who owns the name?", max_tokens=8)
OTHER_NAMESPACE = "plimsoll-e2e-names"


def test_holder_keeps_model_name(solo: Service, service: Callable[[str], Service], cluster: Cluster) -> None:
    late = service("late")
    names = solo.status()["modelNames"]
    since = solo.status()["nameClaim"].partition(" since ")[2].partition(".")[0]
    cluster.apply(make_manifest("late", NOWHERE, model={"name": solo.name}), namespace=late.namespace)
    condition = late.wait_condition("ModelNameRejected", status="True")
    events = late.wait_events("ModelNameTaken")
    ledger = Load(solo.target, OpenLoop([Arrival(0.2 * n, QUESTION) for n in range(10)])).run()
    print(f"{condition['reason']}: {condition['message']}")
    print(f"{ledger.summary()}; names of the later one {late.status()['modelNames']}")
    assert solo.key in condition["message"]
    assert since in condition["message"]
    assert len(events) == 1
    assert late.status()["modelNames"] == [late.key]
    assert "nameClaim" not in late.status()
    assert solo.status()["modelNames"] == names
    assert not solo.condition("ModelNameRejected")
    assert not ledger.failures, ledger.explain()
    cluster.delete("inferenceservices", "late", namespace=late.namespace)


def test_edited_older_service_takes_no_model_name(service: Callable[[str], Service], cluster: Cluster) -> None:
    old, young = service("older"), service("younger")
    cluster.apply(make_manifest("older", NOWHERE, model={"name": "playground"}), namespace=old.namespace)
    wait_until("it has its name", lambda: old.status().get("modelNames", [""])[0] == "playground")
    sleep(1.1)  # creation times are whole seconds
    cluster.apply(make_manifest("younger", NOWHERE, model={"name": "contested"}), namespace=young.namespace)
    wait_until("it is listed", lambda: young.status().get("modelNames", [""])[0] == "contested")
    claim = young.status()["nameClaim"]
    cluster.patch("inferenceservices", old.name, old.namespace, {"spec": {"model": {"name": "contested"}}})
    condition = old.wait_condition("ModelNameRejected", status="True")
    print(f"{condition['reason']}: {condition['message']}")
    assert young.key in condition["message"]
    assert young.status()["nameClaim"] == claim
    assert young.status()["modelNames"][0] == "contested"
    for one in (old, young):
        cluster.delete("inferenceservices", one.name, namespace=one.namespace)


def test_qualified_name_stays_in_its_namespace(service: Callable[[str], Service], cluster: Cluster) -> None:
    """Another namespace claims NAMESPACE/NAME, also while the service is deleted to be created again."""
    owner = service("owned")
    cluster.apply(make_manifest("owned", NOWHERE), namespace=owner.namespace)
    wait_until("it has its names", lambda: owner.status().get("modelNames"))
    stack.make_namespace(cluster, OTHER_NAMESPACE)
    thief = Service(cluster, OTHER_NAMESPACE, "thief", owner.url)
    cluster.apply(make_manifest("thief", NOWHERE, model={"name": owner.key}), namespace=OTHER_NAMESPACE)
    condition = thief.wait_condition("ModelNameRejected", status="True")
    print(f"{condition['reason']}: {condition['message']}")
    assert condition["reason"] == "ModelNameReserved"
    thief.wait_events("ModelNameRejected")
    cluster.delete("inferenceservices", owner.name, namespace=owner.namespace)
    wait_until("it is gone", lambda: owner.get() is None)
    wait_until("no gateway lists it", lambda: owner.key not in _listed(owner))
    sleep(3.0)  # time in which the operator could grant it
    assert owner.key not in _listed(owner)
    assert thief.status()["modelNames"] == [thief.key]
    cluster.apply(make_manifest("owned", NOWHERE), namespace=owner.namespace)
    wait_until("it is listed again", lambda: owner.key in owner.status().get("modelNames", ()))
    cluster.delete("inferenceservices", owner.name, namespace=owner.namespace)
    stack.drop_namespace(cluster, OTHER_NAMESPACE)


def test_model_name_passes_on_when_holder_is_deleted(service: Callable[[str], Service], cluster: Cluster) -> None:
    first, second = service("first"), service("second")
    cluster.apply(make_manifest("first", NOWHERE, model={"name": "heirloom"}), namespace=first.namespace)
    wait_until("it has its name", lambda: first.status().get("modelNames", [""])[0] == "heirloom")
    cluster.apply(make_manifest("second", NOWHERE, model={"name": "heirloom"}), namespace=second.namespace)
    second.wait_condition("ModelNameRejected", status="True")
    cluster.delete("inferenceservices", "first", namespace=first.namespace)
    second.wait_condition("ModelNameRejected", status="False")
    events = second.wait_events("ModelNameAccepted")
    print(f"second: {second.status()['modelNames']}, {events[0]['message']}")
    wait_until("every gateway answers to it", lambda: second.status()["modelNames"] == ["heirloom", second.key])
    cluster.delete("inferenceservices", "second", namespace=second.namespace)


def _listed(service: Service) -> set[str]:
    """The names in the gateway's list of models."""
    found = httpx.get(f"{service.url}/v1/models", timeout=60, trust_env=False).json()["data"]
    return {model["id"] for model in found}
