"""The discovery stream: Envoy gets what it lacks, in order, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest

from plimsoll.gateway.envoy.ads_server import AdsServer
from plimsoll.gateway.envoy.delta import AppliedEndpoints, DeltaStream
from plimsoll.gateway.envoy.tls import CERTIFICATE
from plimsoll.gateway.envoy.xds import CLUSTER_TYPE, ENDPOINTS_TYPE, SECRET_TYPE, SnapshotBuilder, XdsSnapshot
from tests.gateway.kube_objects import Object, build_catalog, pod, service
from tests.gateway.picker_harness import GATEWAY


def snapshot(*names: str, pods: tuple[Object, ...] = (), **changes: Any) -> XdsSnapshot:
    return SnapshotBuilder(GATEWAY).build(build_catalog([service(name, **changes) for name in names], pods))


def send_request(stream: DeltaStream, type_url: str, current: XdsSnapshot, **fields: Any) -> AppliedEndpoints | None:
    error = fields.pop("error", "")
    request = DeltaDiscoveryRequest(type_url=type_url, **fields)
    if error:
        request.error_detail.code, request.error_detail.message = 3, error
    return next(iter(stream.on_request(request, current)), None)


def names(response: Any) -> list[str]:
    return sorted(resource.name for resource in response.resources)


def connected(current: XdsSnapshot, *services: str) -> DeltaStream:
    """A stream of an Envoy that has applied all of `current`."""
    stream = DeltaStream()
    send_request(stream, CLUSTER_TYPE, current)
    (clusters,) = stream.responses(current)
    send_request(stream, CLUSTER_TYPE, current, response_nonce=clusters.nonce)
    send_request(stream, ENDPOINTS_TYPE, current, resource_names_subscribe=[f"team/{name}" for name in services])
    (endpoints,) = stream.responses(current)
    send_request(stream, ENDPOINTS_TYPE, current, response_nonce=endpoints.nonce)
    assert stream.responses(current) == []
    return stream


def test_new_envoy_gets_clusters_then_endpoints() -> None:
    current, stream = snapshot("chat", pods=(pod("10.0.0.1:8"),)), DeltaStream()
    assert send_request(stream, CLUSTER_TYPE, current) == AppliedEndpoints({}, is_new_envoy=True)
    (clusters,) = stream.responses(current)
    assert names(clusters) == ["model/chat", "model/team/chat", "pick/team/chat"]
    assert stream.responses(current) == []
    send_request(stream, ENDPOINTS_TYPE, current, resource_names_subscribe=["team/chat"])
    (endpoints,) = stream.responses(current)
    assert names(endpoints) == ["team/chat"]
    applied = send_request(stream, ENDPOINTS_TYPE, current, response_nonce=endpoints.nonce)
    assert applied == AppliedEndpoints({"team/chat": frozenset({"10.0.0.1:8"})})


def test_endpoint_change_sends_one_resource() -> None:
    stream = connected(snapshot("chat", "other"), "chat", "other")
    (response,) = stream.responses(snapshot("chat", "other", pods=(pod("10.0.0.9:8"),)))
    assert (response.type_url, names(response), list(response.removed_resources)) == (ENDPOINTS_TYPE, ["team/chat"], [])


def test_changed_cluster_gets_its_endpoints_again() -> None:
    stream = connected(snapshot("chat", "other"), "chat", "other")
    obj = service("chat")
    obj["spec"]["engine"] = {"args": ["--max-num-seqs=7"]}
    current = SnapshotBuilder(GATEWAY).build(build_catalog([obj, service("other")], []))
    clusters, endpoints = stream.responses(current)
    assert names(clusters) == ["model/chat", "model/team/chat", "pick/team/chat"]
    assert names(endpoints) == ["team/chat"]


def test_removed_service_is_removed_once() -> None:
    stream = connected(snapshot("chat", "other"), "chat", "other")
    current = snapshot("chat")
    clusters, endpoints = stream.responses(current)
    assert sorted(clusters.removed_resources) == ["model/other", "model/team/other", "pick/team/other"]
    assert list(endpoints.removed_resources) == ["team/other"]
    assert stream.responses(current) == []
    send_request(stream, ENDPOINTS_TYPE, current, resource_names_unsubscribe=["team/other"])
    assert stream.responses(current) == []


def test_returning_envoy_gets_only_differences() -> None:
    before = snapshot("chat", "gone", pods=(pod("10.0.0.1:8"),))
    current = snapshot("chat", "new", pods=(pod("10.0.0.1:8"),))
    stream = DeltaStream()
    versions = {t: {n: r.version for n, r in before[t].items()} for t in (CLUSTER_TYPE, ENDPOINTS_TYPE)}
    assert send_request(stream, CLUSTER_TYPE, current, initial_resource_versions=versions[CLUSTER_TYPE]) is None
    applied = send_request(
        stream,
        ENDPOINTS_TYPE,
        current,
        initial_resource_versions=versions[ENDPOINTS_TYPE],
        resource_names_subscribe=["team/chat", "team/gone"],
    )
    assert applied == AppliedEndpoints({"team/chat": frozenset({"10.0.0.1:8"})})
    clusters, endpoints = stream.responses(current)
    assert names(clusters) == ["model/new", "model/team/new", "pick/team/new"]
    assert sorted(clusters.removed_resources) == ["model/gone", "model/team/gone", "pick/team/gone"]
    assert (names(endpoints), list(endpoints.removed_resources)) == ([], ["team/gone"])


def test_rejected_response_is_counted_and_not_repeated() -> None:
    current, stream = snapshot("chat"), DeltaStream()
    send_request(stream, CLUSTER_TYPE, current)
    (clusters,) = stream.responses(current)
    send_request(stream, CLUSTER_TYPE, current, response_nonce=clusters.nonce, error="no such field")
    assert stream.rejected == 1
    assert stream.responses(current) == []


def test_repeated_subscription_is_sent_again() -> None:
    current = snapshot("chat")
    stream = connected(current, "chat")
    send_request(stream, ENDPOINTS_TYPE, current, resource_names_subscribe=["team/chat"])
    (endpoints,) = stream.responses(current)
    assert names(endpoints) == ["team/chat"]


def test_discovery_that_cannot_listen_ends_the_start(tmp_path: Path) -> None:
    server = AdsServer(tmp_path / "missing" / "ads.sock", GATEWAY, lambda applied: None)
    with pytest.raises(RuntimeError, match=r"cannot listen on .*ads\.sock"):
        server.start()


def test_secret_that_does_not_exist_is_no_certificate() -> None:
    """Envoy asks for the listener's certificate before there is one, and acknowledges that."""
    current: XdsSnapshot = {SECRET_TYPE: {}}
    stream = DeltaStream()
    send_request(stream, SECRET_TYPE, current, resource_names_subscribe=[CERTIFICATE])
    [response] = stream.responses(current)
    assert list(response.removed_resources) == [CERTIFICATE]
    assert send_request(stream, SECRET_TYPE, current, response_nonce=response.nonce) is None
