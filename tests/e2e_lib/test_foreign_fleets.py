"""The fleets of the scenario on a real API server: `adopt` finds each, and a snapshot shows every change but status."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from e2e.cluster.settings import BIN
from e2e.lib import foreign_fleets
from e2e.lib.foreign_fleets import FLEETS, PORT, Fleet
from e2e.lib.kube import Cluster
from plimsoll.cli.main import main
from tests.apiserver import ApiServer

NAMESPACE = "foreign-fleets"


@pytest.fixture(scope="module")
def access(cluster: ApiServer) -> Iterator[Cluster]:
    with Cluster(cluster.kubeconfig, BIN) as found:
        found.kubectl("create", "namespace", NAMESPACE)
        foreign_fleets.install_kinds(found)
        for fleet in FLEETS:
            foreign_fleets.create(found, fleet, NAMESPACE)
            if fleet.has_controller:  # no controller runs here
                live = found.get_object(fleet.resource, fleet.name, NAMESPACE)
                found.apply(fleet.pod(live["metadata"]["uid"]), namespace=NAMESPACE)
        yield found
        foreign_fleets.remove_kinds(found)


def test_adopt_finds_all_fleets(access: Cluster, cluster: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    before = [foreign_fleets.snapshot(access, fleet, NAMESPACE) for fleet in FLEETS]
    assert main(["adopt", "-n", NAMESPACE, "--kubeconfig", str(cluster.kubeconfig)]) == 0
    found = {one["metadata"]["name"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}
    targets = {name: one["spec"]["targets"]["serve"] for name, one in found.items()}
    assert {name: one["scaleTargetRef"] for name, one in targets.items()} == {
        fleet.name: fleet.reference for fleet in FLEETS
    }
    assert {one["metricsPort"] for one in targets.values()} == {PORT}
    access.apply(*found.values(), namespace=NAMESPACE)  # the CRD accepts them
    assert [foreign_fleets.snapshot(access, fleet, NAMESPACE) for fleet in FLEETS] == before


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: fleet.name)
def test_snapshot_shows_changes_of_a_fleet_but_not_status(fleet: Fleet, access: Cluster) -> None:
    before = foreign_fleets.snapshot(access, fleet, NAMESPACE)
    argv = ("patch", fleet.resource, fleet.name, "-n", NAMESPACE, "--type=merge")
    access.kubectl(*argv, "--subresource=status", "-p", json.dumps({"status": {"replicas": 1}}))
    assert foreign_fleets.snapshot(access, fleet, NAMESPACE) == before
    access.kubectl(*argv, "-p", json.dumps({"spec": {"replicas": 2}}))
    assert foreign_fleets.snapshot(access, fleet, NAMESPACE) != before
