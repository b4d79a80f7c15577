"""Resources for Envoy: complete, and encoded only when they change."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.admin import ClustersParser, parse_stats
from plimsoll.gateway.envoy.body_filters import rate_policy
from plimsoll.gateway.envoy.bootstrap import write_files
from plimsoll.gateway.envoy.listener import listener_resource
from plimsoll.gateway.envoy.overload import CONNECTIONS, HEAP, overload_manager
from plimsoll.gateway.envoy.xds import (
    CLUSTER_TYPE,
    ENDPOINTS_TYPE,
    RUNTIME_TYPE,
    SnapshotBuilder,
    XdsResource,
    XdsSnapshot,
)
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.service_catalog import ServiceCatalog
from plimsoll.gateway.settings import PickerSettings, Plaintext
from tests.gateway.envoy_binary import ENVOY
from tests.gateway.kube_objects import build_catalog, catalog, pod, service
from tests.gateway.picker_harness import GATEWAY, service_with_slo

TLS: dict[str, Any] = {"tls_directory": Path("tls")}


def two_tier_catalog() -> ServiceCatalog:
    pods = [
        pod("10.0.0.1:8000", role="decode"),
        pod("10.0.0.2:8000", role="prefill"),
        pod("10.0.0.3:8000", role="decode", ready=False),
        pod("10.0.0.4:8000", role="decode", deletionTimestamp="2026-06-01T00:00:00Z"),
    ]
    return build_catalog([service(model="tiny"), service("other", model="tiny", uid="z")], pods)


def snapshot(catalog: ServiceCatalog, gateway: str = GATEWAY) -> XdsSnapshot:
    return SnapshotBuilder(gateway).build(catalog)


def decoded(resource: XdsResource) -> Any:
    """The resource as Envoy's JSON."""
    return MessageToDict(resource.message.resource, preserving_proto_field_name=True)


def test_snapshot_maps_each_name_to_endpoints() -> None:
    found = {name: decoded(resource) for name, resource in snapshot(two_tier_catalog())[CLUSTER_TYPE].items()}
    assert set(found) == {"pick/team/chat", "pick/team/other", "model/tiny", "model/team/chat", "model/team/other"}
    assert found["model/tiny"]["eds_cluster_config"] == found["pick/team/chat"]["eds_cluster_config"]
    assert found["model/tiny"]["eds_cluster_config"]["service_name"] == "team/chat"
    assert "LEAST_REQUEST" in json.dumps(found["model/tiny"])
    assert "override_host" in json.dumps(found["pick/team/chat"])


def test_isolated_tenants_have_no_cluster_without_picker() -> None:
    shared, isolated = service(), service("other")
    isolated["spec"]["engine"] = {"prefixCache": "PerTenant"}
    found = set(snapshot(build_catalog([shared, isolated], []))[CLUSTER_TYPE])
    assert found == {"pick/team/chat", "pick/team/other", "model/chat", "model/team/chat"}


def test_snapshot_lists_only_ready_client_engines() -> None:
    resource = snapshot(two_tier_catalog())[ENDPOINTS_TYPE]["team/chat"]
    assignment = decoded(resource)
    found = [e["endpoint"]["address"]["socket_address"] for e in assignment["endpoints"][0]["lb_endpoints"]]
    assert found == [{"address": "10.0.0.1", "port_value": 8000}]
    assert resource.addresses == {"10.0.0.1:8000"}


def test_snapshot_of_equal_catalog_has_equal_versions() -> None:
    builder = SnapshotBuilder(GATEWAY)
    first, second = builder.build(two_tier_catalog()), builder.build(two_tier_catalog())
    other_process = snapshot(two_tier_catalog())
    for type_url in (CLUSTER_TYPE, ENDPOINTS_TYPE, RUNTIME_TYPE):
        versions = [{n: r.version for n, r in s[type_url].items()} for s in (first, second, other_process)]
        assert versions[0] == versions[1] == versions[2]


def test_snapshot_encodes_only_what_changed() -> None:
    builder = SnapshotBuilder(GATEWAY)
    builder.build(two_tier_catalog())
    encoded = builder.encoded
    builder.build(two_tier_catalog())
    assert builder.encoded == encoded
    builder.build(build_catalog([service(model="tiny"), service("other", model="tiny", uid="z")], ready_pods(9)))
    assert builder.encoded == encoded + 1
    assert builder.build(build_catalog([], []))[CLUSTER_TYPE] == {}


def circuit_breaker_limits(built: XdsSnapshot) -> dict[str, int]:
    """The most requests at once by cluster, as Envoy looks them up."""
    layer = decoded(built[RUNTIME_TYPE]["bounds"]).get("layer", {})
    begin, end = "circuit_breakers.", ".default.max_requests"
    assert all(key.startswith(begin) and key.endswith(end) for key in layer)
    return {key[len(begin) : -len(end)]: most for key, most in layer.items()}


def ready_pods(count: int) -> list[dict[str, object]]:
    return [pod(f"10.0.0.{n + 1}:8000") for n in range(count)]


def test_circuit_breaker_is_an_equal_share() -> None:
    """Demand does not count: the owner of a service reports that of all gateways."""
    known = catalog([service_with_slo(batch=20, shares={GATEWAY: 7, "gateway-1": 13})], ready_pods(3))
    assert circuit_breaker_limits(snapshot(known)) == {"model/chat": 30, "model/team/chat": 30}
    assert circuit_breaker_limits(snapshot(known, "gateway-1")) == {"model/chat": 30, "model/team/chat": 30}


def test_circuit_breakers_of_all_services_are_merged() -> None:
    objects = [
        service_with_slo(batch=20),
        service("free"),
        service_with_slo(batch=5) | {name: service("b")[name] for name in ("metadata", "status")},
    ]
    pods = [*ready_pods(2), pod("10.0.1.1:8000", service="b")]
    found = circuit_breaker_limits(snapshot(catalog(objects, pods)))
    assert found == {"model/chat": 40, "model/team/chat": 40, "model/b": 5, "model/team/b": 5}


def test_capacity_change_keeps_clusters() -> None:
    builder = SnapshotBuilder(GATEWAY)
    before = builder.build(catalog([service_with_slo(batch=20)], ready_pods(3)))
    fewer = builder.build(catalog([service_with_slo(batch=20)], ready_pods(2)))
    assert circuit_breaker_limits(fewer)["model/chat"] == 40
    none = builder.build(catalog([service_with_slo(batch=20)], []))
    assert circuit_breaker_limits(none)["model/chat"] == 0
    assert before[CLUSTER_TYPE] == fewer[CLUSTER_TYPE] == none[CLUSTER_TYPE]


@pytest.mark.parametrize("obj", [service(), service_with_slo(model=False), service_with_slo(classes=("of", "before"))])
def test_service_without_limits_sets_no_circuit_breaker(obj: dict[str, object]) -> None:
    assert circuit_breaker_limits(snapshot(catalog([obj], ready_pods(2)))) == {}


def test_atomic_write_replaces_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert write_if_changed(path, b"one")
    before = path.stat().st_ino
    assert not write_if_changed(path, b"one")
    assert path.stat().st_ino == before
    assert write_if_changed(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_init_is_idempotent(tmp_path: Path) -> None:
    settings = PickerSettings(directory=tmp_path)
    write_files(settings)
    before = settings.bootstrap.stat().st_ino
    write_files(settings)
    assert settings.bootstrap.stat().st_ino == before
    assert settings.fifo.is_fifo()


@pytest.mark.envoy
def test_envoy_accepts_bootstrap_and_clusters(tmp_path: Path) -> None:
    settings = PickerSettings(directory=tmp_path)
    write_files(settings)
    document = json.loads(settings.bootstrap.read_bytes())
    document["static_resources"]["clusters"] += [
        {key: value for key, value in decoded(resource).items() if key != "@type"}
        for resource in snapshot(two_tier_catalog())[CLUSTER_TYPE].values()
    ]
    settings.bootstrap.write_text(json.dumps(document))
    reader = os.open(settings.fifo, os.O_RDWR | os.O_NONBLOCK)  # Envoy opens its log even to validate
    try:
        command = [ENVOY, "--mode", "validate", "-c", str(settings.bootstrap), "-l", "error"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(reader)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout


def test_limits_follow_memory_of_envoy() -> None:
    settings = PickerSettings.from_environment({"PLIMSOLL_ENVOY_MEMORY_BYTES": str(2 << 30)})
    found = (settings.max_heap_bytes, settings.body_budget_bytes, settings.max_connections)
    assert found == (1825361100, 256 << 20, 65536)
    assert settings.max_connections_per_source == 8192
    small = PickerSettings.from_environment({"PLIMSOLL_ENVOY_MEMORY_BYTES": "1"})
    assert small.body_budget_bytes == small.max_body_bytes
    monitors = {one["name"]: one["typed_config"] for one in overload_manager(settings)["resource_monitors"]}
    assert monitors[HEAP]["max_heap_size_bytes"] == settings.max_heap_bytes
    assert monitors[CONNECTIONS]["max_active_downstream_connections"] == 65536


@pytest.mark.parametrize("memory_bytes", [1, 256 << 20, 1 << 30])
@pytest.mark.parametrize(("tls", "chains"), [({}, 8), (TLS, 8), (TLS | {"plaintext": Plaintext.ALLOW}, 16)])
def test_source_budgets_stay_within_body_budget(memory_bytes: int, tls: dict[str, Any], chains: int) -> None:
    """The sum over all filter chains that serve the API, each of which has a bucket."""
    settings = PickerSettings(envoy_memory_bytes=memory_bytes, **tls)
    buckets = _values(listener_resource(settings), "descriptors")
    sizes = [descriptor["token_bucket"]["max_tokens"] for found in buckets for descriptor in found]
    assert len(sizes) == chains
    assert 0 < sum(sizes) <= settings.body_budget_bytes
    default = PickerSettings(**tls)
    assert default.source_body_budget_bytes >= default.max_body_bytes


@pytest.mark.parametrize("memory_bytes", [256 << 20, 1 << 30, 4 << 30])
def test_unfinished_bodies_without_picker_stay_in_budget(memory_bytes: int) -> None:
    """A source that takes each token at once: its bodies may all last until the time limit of the first one."""
    settings = PickerSettings(envoy_memory_bytes=memory_bytes, body_timeout_seconds=7.0)
    bucket = rate_policy(settings)["descriptors"][0]["token_bucket"]
    assert bucket["fill_interval"] == "1s"
    admitted = bucket["max_tokens"] + math.floor(settings.body_timeout_seconds * bucket["tokens_per_fill"])
    assert 0.99 * settings.source_body_budget_bytes < admitted <= settings.source_body_budget_bytes


def test_largest_body_passes_without_picker() -> None:
    settings = PickerSettings()
    assert rate_policy(settings)["descriptors"][0]["token_bucket"]["max_tokens"] >= settings.max_body_bytes


@pytest.mark.parametrize("tls", [{}, {"PLIMSOLL_TLS_DIR": "/tls", "PLIMSOLL_TLS_PLAINTEXT": "Allow"}])
def test_unfinished_requests_end_within_a_minute(tls: dict[str, str]) -> None:
    """By default, on all filter chains: 10 s for the first byte and the headers, 60 s for the whole request."""
    document = listener_resource(PickerSettings.from_environment(tls))
    assert document["listener_filters_timeout"] == "10.000s"
    assert set(_values(document["filter_chains"], "request_headers_timeout")) == {"10.000s"}
    assert set(_values(document["filter_chains"], "request_timeout")) == {"60.000s"}
    assert len(_values(document["filter_chains"], "request_timeout")) == len(document["filter_chains"])


def test_source_is_network_of_ipv6_address() -> None:
    document = listener_resource(PickerSettings())
    [source] = _values(document["listener_filters"][0], "inline_string")
    assert source == "%DOWNSTREAM_DIRECT_REMOTE_ADDRESS_WITHOUT_PORT(64)%"
    keys = set(_values(document["filter_chain_matcher"], "key"))
    assert keys == set(_values(document["listener_filters"], "object_key"))


def _values(document: Any, name: str) -> list[Any]:
    """The values of all fields of a name, at any depth."""
    if isinstance(document, list):
        return [value for item in document for value in _values(item, name)]
    if not isinstance(document, dict):
        return []
    own = [document[name]] if name in document else []
    return own + [value for item in document.values() for value in _values(item, name)]


STATS_TEXT = """http.gateway.ext_authz.failure_mode_allowed: 3
http.gateway.ext_authz.reserve.failure_mode_allowed: 9
http.gateway.downstream_rq_active: 4
http.gateway.downstream_cx_active: 5
http.gateway.downstream_rq_time: P0(nan,1) P25(nan,1.025)
http.gateway.downstream_rq_timeout: 6
http.gateway.downstream_rq_header_timeout: 7
http.gateway.downstream_rq_overload_close: 8
listener.0.0.0.0_8080.downstream_global_cx_overflow: 10
listener.admin.downstream_global_cx_overflow: 99
listener.0.0.0.0_8080.worker_0.downstream_global_cx_overflow: 99
listener.0.0.0.0_8080.downstream_pre_cx_timeout: 11
listener.0.0.0.0_8080.downstream_cx_overload_reject: 12
overload.envoy.overload_actions.reset_high_memory_stream.count: 13
overload.envoy.resource_monitors.fixed_heap.pressure: 42
bodies.http_local_rate_limit.rate_limited: 14
connection_limit.source.limited_connections: 15
listener.0.0.0.0_8080.downstream_pre_cx_active: 16
"""


def test_stats_parser_reads_limits() -> None:
    stats = parse_stats(STATS_TEXT)
    assert (stats.failed_open, stats.active, stats.connections, stats.heap_ratio) == (3, 4, 5 + 16, 0.42)
    assert stats.reached == {
        GatewayLimit.BODY_BYTES_WITHOUT_PICKER: 14,
        GatewayLimit.CONNECTIONS: 10,
        GatewayLimit.SOURCE_CONNECTIONS: 15,
        GatewayLimit.FIRST_BYTE_TIME: 11,
        GatewayLimit.HEADERS_TIME: 7,
        GatewayLimit.BODY_TIME: 6,
        GatewayLimit.HEAP_REQUESTS: 8,
        GatewayLimit.HEAP_CONNECTIONS: 12,
        GatewayLimit.HEAP_STREAMS: 13,
    }
    assert set(parse_stats("").reached.values()) == {0}


CLUSTERS_TEXT = b"""pick/team/chat::observability_name::pick/team/chat
pick/team/chat::default_priority::max_requests::1000000
pick/team/chat::10.0.0.1:8::cx_connect_fail::1
pick/team/chat::10.0.0.1:8::rq_active::2
pick/team/chat::10.0.0.1:8::health_flags::healthy
model/chat::10.0.0.1:8::cx_connect_fail::1
model/chat::10.0.0.1:8::rq_active::3
model/a::b::[fd00::1]:9::cx_connect_fail::0
model/a::b::[fd00::1]:9::rq_active::0
model/a::b::[fd00::1]:9::health_flags::/failed_outlier_check
discovery::/run/ads.sock::rq_active::1
picker::/run/picker.sock::health_flags::healthy
"""


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_clusters_parser_sums_clusters_of_endpoint(size: int) -> None:
    parser = ClustersParser()
    for at in range(0, len(CLUSTERS_TEXT), size):
        parser.feed(CLUSTERS_TEXT[at : at + size])
    state = parser.state
    assert state.active == {"10.0.0.1:8": 5, "[fd00::1]:9": 0}
    assert state.connect_failures == {"10.0.0.1:8": 2}
    assert (state.unhealthy, state.picker_healthy) == ({"[fd00::1]:9"}, True)


def test_clusters_parser_reports_unhealthy_picker() -> None:
    parser = ClustersParser()
    parser.feed(b"picker::/run/picker.sock::health_flags::/failed_active_hc\n")
    assert not parser.state.picker_healthy


@pytest.mark.parametrize("is_logged", [False, True])
def test_refused_plain_http_is_in_the_access_log(tmp_path: Path, is_logged: bool) -> None:
    settings = PickerSettings(directory=tmp_path, tls_directory=tmp_path, access_log=is_logged)
    secure, plain = (
        chain["filters"][1]["typed_config"]
        for chain in listener_resource(settings)["filter_chains"]
        if chain["name"].endswith("-0")
    )
    assert plain["stat_prefix"] == "plain_http"
    assert plain["access_log"] == (secure["access_log"][:1] if is_logged else [])
    assert "tracing" not in plain
