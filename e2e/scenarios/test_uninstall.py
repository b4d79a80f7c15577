"""h. Deleted and uninstalled: nothing is left. Uninstalled alone: services and engines stay, and are found again."""

from __future__ import annotations

import time

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, uids
from e2e.lib.load import Arrival, Load, OpenLoop
from e2e.lib.prober import Prober
from e2e.lib.resource_dump import difference, dump_resources, wait_stable
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until

CRDS = (
    "inferenceservices.plimsoll.dev",
    "inferenceserviceadmissions.plimsoll.dev",
    "inferenceservicecheckpoints.plimsoll.dev",
)
QUESTION = Prompt("Is anybody there?", max_tokens=8)


@pytest.fixture
def unprobed(shared: dict[str, Service], prober: Prober) -> dict[str, Service]:
    """Without a gateway there is nothing to probe, whatever a status says that nobody updates."""
    for service in shared.values():
        prober.unwatch(service.key)
    return shared


def test_uninstall_keeps_services_and_engines(unprobed: dict[str, Service], cluster: Cluster) -> None:
    solo = unprobed["solo"]
    engines = {s.key: uids(s.pods()) for s in unprobed.values()}
    stack.uninstall(cluster)
    [pod] = solo.ready_pods()
    direct = solo.ask_engine(pod, QUESTION.path, {**QUESTION.body(solo.name), "stream": False, "stream_options": None})
    assert solo.get()
    assert {s.key: uids(s.pods()) for s in unprobed.values()} == engines
    stack.install(cluster)
    for service in unprobed.values():
        service.wait_ready()
    ledger = Load(solo.target, OpenLoop([Arrival(0, QUESTION)])).run()
    print(f"engines alone answered {direct['usage']}; after the next installation: {ledger.summary()}")
    assert {s.key: uids(s.pods()) for s in unprobed.values()} == engines
    assert not ledger.failures, ledger.explain()


@pytest.mark.extended
def test_deletion_and_uninstall_leave_no_objects(
    unprobed: dict[str, Service], cluster: Cluster, namespace: str
) -> None:
    for service in unprobed.values():
        cluster.delete("inferenceservices", service.name, namespace=service.namespace)
    wait_until("the engines are gone", lambda: not any(s.pods() for s in unprobed.values()), 120)
    stack.uninstall(cluster)
    cluster.delete("customresourcedefinition", *CRDS)
    bare = wait_stable(cluster)

    stack.install(cluster)
    installed = dump_resources(cluster, namespace)
    service = Service(cluster, namespace, "brief", stack.GATEWAY_URL)
    start = time.time()
    cluster.apply(make_manifest("brief", {"serve": {}}), namespace=namespace)
    service.wait_ready()
    made = difference(installed, dump_resources(cluster, namespace))
    cluster.delete("inferenceservices", "brief", namespace=namespace)
    wait_until(
        "the namespace is as it was",
        lambda: not difference(installed, dump_resources(cluster, namespace)),
        120,
        every_s=2,
    )
    print(f"a service made {len(made)} objects and left none ({time.time() - start:.0f} s)")

    stack.uninstall(cluster)
    cluster.delete("customresourcedefinition", *CRDS)
    left = difference(bare, wait_stable(cluster))
    print(f"{len(bare)} objects before and after the chart")
    assert not left, "\n".join(left)
