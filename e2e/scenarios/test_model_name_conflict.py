"""Two services claim one model name: the older one goes on, the younger one says so, and takes over when it may."""

from __future__ import annotations

from collections.abc import Callable

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import sleep, wait_until

NOWHERE = {"serve": {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}}
QUESTION = Prompt("Who owns the name?", max_tokens=8)


def test_older_service_keeps_model_name(solo: Service, service: Callable[[str], Service], cluster: Cluster) -> None:
    late = service("late")
    names = solo.status()["modelNames"]
    cluster.apply(make_manifest("late", NOWHERE, model={"name": solo.name}), namespace=late.namespace)
    told = late.wait_condition("ModelNameAccepted", status="False")
    events = late.wait_events("ModelNameTaken")
    ledger = Load(solo.target, OpenLoop([Arrival(0.2 * n, QUESTION) for n in range(10)])).run()
    print(f"{told['reason']}: {told['message']}")
    print(f"{ledger.summary()}; names of the younger one {late.status()['modelNames']}")
    assert solo.key in told["message"]
    assert len(events) == 1
    assert late.status()["modelNames"] == [late.key]
    assert solo.status()["modelNames"] == names
    assert solo.condition("ModelNameAccepted")["status"] == "True"
    assert not ledger.failures, ledger.explain()
    cluster.delete("inferenceservices", "late", namespace=late.namespace)


def test_model_name_passes_on_when_owner_is_deleted(service: Callable[[str], Service], cluster: Cluster) -> None:
    first, second = service("first"), service("second")
    cluster.apply(make_manifest("first", NOWHERE, model={"name": "heirloom"}), namespace=first.namespace)
    first.wait_condition("ModelNameAccepted", status="True")
    sleep(1.1)  # creation times are whole seconds
    cluster.apply(make_manifest("second", NOWHERE, model={"name": "heirloom"}), namespace=second.namespace)
    second.wait_condition("ModelNameAccepted", status="False")
    cluster.delete("inferenceservices", "first", namespace=first.namespace)
    second.wait_condition("ModelNameAccepted", status="True")
    events = second.wait_events("ModelNameAccepted")
    print(f"second: {second.status()['modelNames']}, {events[0]['message']}")
    wait_until("every gateway answers to it", lambda: second.status()["modelNames"] == ["heirloom", second.key])
    cluster.delete("inferenceservices", "second", namespace=second.namespace)
