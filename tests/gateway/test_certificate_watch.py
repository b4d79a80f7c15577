"""What the gateway says of its certificate, whatever the Secret holds and Envoy answers."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest
from envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, CertificatePair
from plimsoll.adapters.internal_tls import TlsIdentity
from plimsoll.gateway.certificate_watch import LISTENER, CertificateWatch, read_pair
from plimsoll.gateway.envoy.delta import AppliedCertificate, DeltaStream
from plimsoll.gateway.envoy.tls import CERTIFICATE, ENGINE_AUTHORITY, ENGINE_CERTIFICATE
from plimsoll.gateway.envoy.xds import EMPTY_SNAPSHOT, SECRET_TYPE, XdsSnapshot, with_certificate, with_engine_identity
from plimsoll.telemetry import gateway_metrics
from tests.certificates import make_certificate

CONTEXT = ssl.create_default_context()


def pair_in(directory: Path, name: str = "test") -> CertificatePair:
    make_certificate(directory, name)
    found = read_pair(directory)
    assert isinstance(found, CertificatePair)
    return found


def request(stream: DeltaStream, snapshot: XdsSnapshot, nonce: str = "", error: str = "") -> object:
    sent = DeltaDiscoveryRequest(type_url=SECRET_TYPE, response_nonce=nonce)
    if not nonce:
        sent.resource_names_subscribe.append(CERTIFICATE)
    if error:
        sent.error_detail.code, sent.error_detail.message = 3, error
    return next(iter(stream.on_request(sent, snapshot)), None)


def test_new_envoy_gets_certificate_and_says_so(tmp_path: Path) -> None:
    stream, current = DeltaStream(), with_certificate(EMPTY_SNAPSHOT, pair_in(tmp_path))
    assert request(stream, current) == AppliedCertificate(is_present=False, is_current=False)
    (response,) = stream.responses(current)
    assert request(stream, current, response.nonce) == AppliedCertificate(is_present=True)
    assert stream.responses(current) == []


def test_certificate_of_old_envoy_is_never_removed(tmp_path: Path) -> None:
    """A new picker that cannot read the Secret says nothing: Envoy keeps its certificate."""
    known, stream = with_certificate(EMPTY_SNAPSHOT, pair_in(tmp_path)), DeltaStream()
    sent = DeltaDiscoveryRequest(type_url=SECRET_TYPE, resource_names_subscribe=[CERTIFICATE])
    sent.initial_resource_versions[CERTIFICATE] = known[SECRET_TYPE][CERTIFICATE].version
    assert stream.on_request(sent, EMPTY_SNAPSHOT)[0] == AppliedCertificate(is_present=True, is_current=False)
    assert DeltaStream().on_request(sent, known)[0] == AppliedCertificate(is_present=True)
    assert stream.responses(EMPTY_SNAPSHOT) == []
    assert stream.responses(known) == []


@pytest.mark.parametrize("unread", [CERTIFICATE, ENGINE_CERTIFICATE])
def test_unreadable_secret_is_not_removed_beside_another(tmp_path: Path, unread: str) -> None:
    """A new picker can read the Secret for clients or that for engines, and Envoy has both."""
    pair = pair_in(tmp_path)
    identity = TlsIdentity(pair, pair.certificate, CONTEXT, CONTEXT)
    clients, engines = with_certificate(EMPTY_SNAPSHOT, pair), with_engine_identity(EMPTY_SNAPSHOT, identity)
    stream, versions = DeltaStream(), clients[SECRET_TYPE] | engines[SECRET_TYPE]
    sent = DeltaDiscoveryRequest(type_url=SECRET_TYPE, resource_names_subscribe=versions)
    sent.initial_resource_versions.update({name: resource.version for name, resource in versions.items()})
    current = engines if unread == CERTIFICATE else clients
    stream.on_request(sent, current)
    assert stream.responses(current) == []


def test_rejected_certificate_leaves_the_one_before(tmp_path: Path) -> None:
    stream, first = DeltaStream(), with_certificate(EMPTY_SNAPSHOT, pair_in(tmp_path))
    request(stream, first)
    request(stream, first, stream.responses(first)[0].nonce)
    second = with_certificate(EMPTY_SNAPSHOT, pair_in(tmp_path, "second"))
    (response,) = stream.responses(second)
    assert request(stream, second, response.nonce, "no") == AppliedCertificate(is_present=True, error="no")


def test_watch_publishes_each_pair_once_and_keeps_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    published: list[CertificatePair] = []
    watch = CertificateWatch(tmp_path, published.append)
    watch.take(read_pair(tmp_path))
    assert "gateway.tls.secretName" in watch.not_ready_reason
    assert "tls.crt cannot be read" in watch.not_ready_reason
    assert gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER)._value.get() == 1
    first = pair_in(tmp_path)
    for _ in range(2):
        watch.take(read_pair(tmp_path))
    assert published == [first]
    assert "Envoy has not taken" in watch.not_ready_reason
    watch.on_applied(AppliedCertificate(is_present=True))
    assert watch.not_ready_reason == ""
    assert gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(LISTENER)._value.get() == first.expires_s
    (tmp_path / CERTIFICATE_FILE).write_text("garbage")
    caplog.clear()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            watch.take(read_pair(tmp_path))
    assert len(caplog.records) == 1
    assert (published, watch.not_ready_reason) == ([first], "")
    assert gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER)._value.get() == 1


def test_expiry_of_a_new_picker_is_that_of_envoys_pair(tmp_path: Path) -> None:
    """Envoy serves the pair of an earlier picker, and rejects the present one."""
    gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(LISTENER).set(1.0)
    watch = CertificateWatch(tmp_path, lambda _: None)
    watch.take(pair_in(tmp_path))
    watch.on_applied(AppliedCertificate(is_present=True, is_current=False))
    watch.on_applied(AppliedCertificate(is_present=True, error="no"))
    assert gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(LISTENER)._value.get() == 1.0
    assert gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER)._value.get() == 1


def test_watch_tells_what_envoy_rejects(tmp_path: Path) -> None:
    watch = CertificateWatch(tmp_path, lambda _: None)
    watch.take(pair_in(tmp_path))
    watch.on_applied(AppliedCertificate(is_present=False, error="key too small"))
    assert "key too small" in watch.not_ready_reason
    assert gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER)._value.get() == 1
    watch.take(pair_in(tmp_path, "second"))
    watch.on_applied(AppliedCertificate(is_present=True))
    assert watch.not_ready_reason == ""
    assert gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(LISTENER)._value.get() == 0


def test_each_secret_is_acknowledged_by_itself(tmp_path: Path) -> None:
    """A client certificate for engines that Envoy rejects says nothing about that for clients."""
    pair = pair_in(tmp_path)
    current = with_engine_identity(
        with_certificate(EMPTY_SNAPSHOT, pair), TlsIdentity(pair, pair.certificate, CONTEXT, CONTEXT)
    )
    stream = DeltaStream()
    names = [CERTIFICATE, ENGINE_CERTIFICATE, ENGINE_AUTHORITY]
    stream.on_request(DeltaDiscoveryRequest(type_url=SECRET_TYPE, resource_names_subscribe=names), current)
    responses = {response.resources[0].name: response.nonce for response in stream.responses(current)}
    assert responses.keys() == set(names)
    assert request(stream, current, responses[CERTIFICATE]) == AppliedCertificate(is_present=True)
    rejected = request(stream, current, responses[ENGINE_CERTIFICATE], "too small")
    assert rejected == AppliedCertificate(is_present=False, error="too small", name=ENGINE_CERTIFICATE)
    assert request(stream, current, responses[ENGINE_AUTHORITY]) == AppliedCertificate(
        is_present=True, name=ENGINE_AUTHORITY
    )
