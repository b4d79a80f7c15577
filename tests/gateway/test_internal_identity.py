"""The gateway's certificate inside the cluster: which files are used, and what Envoy says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest

from plimsoll.adapters.certificate_files import AUTHORITY_FILE, CERTIFICATE_FILE, InvalidCertificate
from plimsoll.adapters.internal_tls import TlsIdentity, load_identity
from plimsoll.api import labels
from plimsoll.api.contract import internal_tls_name
from plimsoll.gateway.envoy.delta import AppliedCertificate, DeltaStream
from plimsoll.gateway.envoy.tls import CERTIFICATE, ENGINE_AUTHORITY, ENGINE_CERTIFICATE
from plimsoll.gateway.envoy.xds import EMPTY_SNAPSHOT, SECRET_TYPE, with_engine_identity
from plimsoll.gateway.errors import from_header
from plimsoll.gateway.internal_identity import INTERNAL, InternalIdentityWatch
from plimsoll.telemetry import gateway_metrics
from tests.certificates import Authority, SecretVolume
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import PickerHarness, response_headers, service_with_slo

EXPIRY = gateway_metrics.GATEWAY_CERTIFICATE_EXPIRY.labels(INTERNAL)
INVALID = gateway_metrics.GATEWAY_CERTIFICATE_INVALID.labels(INTERNAL)
NAME = internal_tls_name("plimsoll-system")


class Gateway:
    """A Secret of the gateway's, its watch, and what the watch has published."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca", "plimsoll")
        self.volume = SecretVolume(folder / "secret")
        self.published: list[TlsIdentity] = []
        self.restart_picker()

    def restart_picker(self) -> None:
        self.published.clear()
        self.watch = InternalIdentityWatch(self.volume.directory, NAME, self.published.append)

    def write(self, **changed: bytes) -> None:
        self.volume.write(self.authority.issue(NAME) | changed)
        self.read()

    def read(self) -> None:
        self.watch.take(self.watch.read())

    def say(self, *names: str, error: str = "", is_present: bool = True, is_current: bool = True) -> None:
        for name in names:
            self.watch.on_applied(AppliedCertificate(is_present, error, is_current, name))


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    EXPIRY.set(0)
    return Gateway(tmp_path)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("other authority", "a server named .*: unable to get local issuer"),
        ("expired", "a server named .*: certificate has expired"),
        ("server only", "a client of servers with ca[.]crt: .*purpose"),
        ("client only", "a server named .*: .*purpose"),
        ("another name", "a server named plimsoll-internal.plimsoll-system.svc: Hostname mismatch"),
        ("wildcard", "servers, which look for the DNS name plimsoll-internal.plimsoll-system.svc"),
    ],
)
def test_identity_that_peers_would_refuse_is_invalid(tmp_path: Path, fault: str, reason: str) -> None:
    authority = Authority(tmp_path / "ca", "plimsoll")
    files = {
        "other authority": lambda: {
            **Authority(tmp_path / "other", "other").issue(NAME),
            AUTHORITY_FILE: authority.pem,
        },
        "expired": lambda: authority.issue(NAME, days=-1),
        "server only": lambda: authority.issue(NAME, usages="serverAuth"),
        "client only": lambda: authority.issue(NAME, usages="clientAuth"),
        "another name": lambda: authority.issue("plimsoll-internal.team.svc"),
        "wildcard": lambda: authority.issue(f"*.{NAME.partition('.')[2]}"),
    }[fault]()
    volume = SecretVolume(tmp_path / "secret")
    volume.write(files)
    with pytest.raises(InvalidCertificate, match=rf"tls[.]crt is not valid for {reason}"):
        load_identity(volume.directory, NAME)


def test_identity_of_unchanged_files_is_the_same(tmp_path: Path) -> None:
    authority, volume = Authority(tmp_path / "ca", "plimsoll"), SecretVolume(tmp_path / "secret")
    files = authority.issue(NAME)
    volume.write(files)
    first = load_identity(volume.directory, NAME)
    volume.write(files)  # the kubelet writes them again at times
    assert load_identity(volume.directory, NAME, first) is first
    bundle = {**files, AUTHORITY_FILE: files[AUTHORITY_FILE] + Authority(tmp_path / "new", "new").pem}
    volume.write(bundle)
    second = load_identity(volume.directory, NAME, first)
    assert (second.pair, second.authority) == (first.pair, bundle[AUTHORITY_FILE])
    volume.write(authority.issue(NAME))
    assert load_identity(volume.directory, NAME, second).pair != second.pair


def test_gateway_without_a_certificate_is_not_ready(gateway: Gateway) -> None:
    assert "not read yet" in gateway.watch.not_ready_reason
    gateway.read()
    assert "internalTls.secretName" in gateway.watch.not_ready_reason
    assert "tls.crt cannot be read" in gateway.watch.not_ready_reason
    gateway.write()
    assert gateway.watch.not_ready_reason == "", "Envoy asks for it only with the first service"


def test_picker_that_reads_no_secret_is_ready_with_envoys(gateway: Gateway) -> None:
    """Envoy has outlived the picker that gave it both."""
    gateway.write(**{CERTIFICATE_FILE: b""})
    gateway.say(ENGINE_CERTIFICATE, is_current=False)
    assert "tls.crt is empty" in gateway.watch.not_ready_reason, "the authority is missing"
    gateway.say(ENGINE_AUTHORITY, is_current=False)
    assert (gateway.watch.not_ready_reason, INVALID._value.get(), EXPIRY._value.get()) == ("", 1, 0)
    gateway.say(ENGINE_CERTIFICATE, ENGINE_AUTHORITY, is_present=False, is_current=False)
    assert "tls.crt is empty" in gateway.watch.not_ready_reason, "Envoy has restarted"


def test_rejection_is_over_once_envoy_takes_it(gateway: Gateway) -> None:
    gateway.write()
    gateway.say(ENGINE_CERTIFICATE, error="key too small", is_present=False)
    gateway.say(ENGINE_AUTHORITY)
    assert "Envoy does not accept engine-client-certificate: key too small" in gateway.watch.not_ready_reason
    assert INVALID._value.get() == 1
    gateway.say(ENGINE_CERTIFICATE)
    assert (gateway.watch.not_ready_reason, INVALID._value.get()) == ("", 0)


def test_rejected_renewal_leaves_gateway_ready(gateway: Gateway) -> None:
    gateway.write()
    gateway.say(ENGINE_CERTIFICATE, ENGINE_AUTHORITY)
    gateway.write()
    gateway.say(ENGINE_CERTIFICATE, error="no", is_present=False)
    assert (gateway.watch.not_ready_reason, INVALID._value.get()) == ("", 1)


def test_rejected_authority_stays_rejected_by_a_new_pair(gateway: Gateway) -> None:
    """Envoy is not sent again what it has rejected."""
    gateway.write()
    gateway.say(ENGINE_AUTHORITY, error="no", is_present=False)
    gateway.write()
    gateway.say(ENGINE_CERTIFICATE)
    assert INVALID._value.get() == 1
    other = Authority(gateway.volume.directory.parent / "other", "other")
    gateway.write(**{AUTHORITY_FILE: gateway.authority.pem + other.pem})
    assert INVALID._value.get() == 0


def test_expiry_is_the_earlier_of_picker_and_envoy(gateway: Gateway) -> None:
    gateway.write()
    gateway.say(ENGINE_AUTHORITY, ENGINE_CERTIFICATE)
    first_s = EXPIRY._value.get()
    assert first_s == gateway.published[-1].pair.expires_s
    gateway.volume.write(gateway.authority.issue(NAME, days=60))
    gateway.read()
    gateway.say(ENGINE_CERTIFICATE, error="no", is_present=False)
    assert EXPIRY._value.get() == first_s
    gateway.say(ENGINE_CERTIFICATE)
    assert EXPIRY._value.get() == gateway.published[-1].pair.expires_s > first_s


def test_unchanged_files_are_published_once(gateway: Gateway) -> None:
    gateway.write()
    os.utime(gateway.volume.directory / CERTIFICATE_FILE)
    gateway.read()
    assert len(gateway.published) == 1


def test_new_stream_tells_each_secret_that_envoy_has(gateway: Gateway) -> None:
    gateway.write()
    current = with_engine_identity(EMPTY_SNAPSHOT, gateway.published[-1])
    sent = DeltaDiscoveryRequest(type_url=SECRET_TYPE, resource_names_subscribe=[ENGINE_CERTIFICATE, ENGINE_AUTHORITY])
    sent.initial_resource_versions[ENGINE_CERTIFICATE] = current[SECRET_TYPE][ENGINE_CERTIFICATE].version
    sent.initial_resource_versions[ENGINE_AUTHORITY] = "earlier"
    assert DeltaStream().on_request(sent, current) == (
        AppliedCertificate(is_present=False, is_current=False, name=CERTIFICATE),
        AppliedCertificate(is_present=True, is_current=True, name=ENGINE_CERTIFICATE),
        AppliedCertificate(is_present=True, is_current=False, name=ENGINE_AUTHORITY),
    )


def secure_pod(address: str) -> Object:
    found = pod(address)
    found["metadata"]["labels"][labels.TLS] = labels.MUTUAL_TLS
    return found


@pytest.mark.parametrize(
    ("made", "code"),
    [(service(), "no_endpoint"), (service_with_slo("chat", {"whenFull": "Shed"}, ready_work=1.0), "model_starting")],
    ids=["plain", "slo"],
)
def test_engines_beyond_reach_are_named_once(made: Object, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """A rollback turns TLS off at gateways while its engines run on."""
    harness = PickerHarness(made, pods=(secure_pod("10.0.0.1:8000"),), has_engine_tls=False)
    for _ in range(2):
        reply = from_header(response_headers(harness.send())["x-plimsoll-error-response"])
        assert (reply.status, reply.error["code"]) == (503, code)
        assert str(reply.error["message"]).startswith(
            "The engines of model 'chat' require TLS, and this gateway has no client certificate for them"
            " (internalTls.secretName)."
        )
    harness.set_objects(made, pods=(secure_pod("10.0.0.1:8000"), secure_pod("10.0.0.2:8000")))
    assert [record.getMessage() for record in caplog.records if record.name.endswith("service_catalog")] == [
        "engines of InferenceService team/chat require TLS, but internalTls.secretName is not set"
    ]
    harness.set_objects(made, pods=(secure_pod("10.0.0.1:8000"), pod("10.0.0.3:8000")))
    assert response_headers(harness.send())["x-plimsoll-endpoint"] == "10.0.0.3:8000"
