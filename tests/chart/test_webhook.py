"""The admission webhook's objects: off by default, harmless when it is down, and trusted by its certificate alone."""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, KEY_FILE
from plimsoll.controllers.webhook.certificate import CertificateFiles
from plimsoll.controllers.webhook.server import PATH
from tests.chart.rendering import NAMESPACE, Object, containers, find, of_kind, pod_specs, render
from tests.chart.test_objects import settings

ON: Object = {"webhook": {"enabled": True}}
OBJECTS = (("ValidatingWebhookConfiguration", None), ("Secret", "plimsoll-webhook"))


def webhook(values: Object, *options: str) -> Object:
    [found] = find(render(values, *options), "ValidatingWebhookConfiguration")["webhooks"]
    assert isinstance(found, dict)
    return found


def test_webhook_is_off_by_default() -> None:
    objects = render()
    assert [one for kind, name in OBJECTS for one in of_kind(objects, kind, name)] == []
    assert settings().webhook is None
    assert find(objects, "NetworkPolicy", "plimsoll-operator")["spec"]["ingress"] == []


def test_rendering_that_a_test_changes_is_of_that_test_alone() -> None:
    webhook(ON)["clientConfig"].pop("service")
    assert "service" in webhook(ON)["clientConfig"]


def test_webhook_never_blocks_and_reviews_only_new_specs() -> None:
    found = webhook(ON)
    assert (found["failurePolicy"], found["sideEffects"]) == ("Ignore", "None")
    assert 1 <= found["timeoutSeconds"] <= 5
    [rule] = found["rules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert rule["resources"] == ["inferenceservices"]


def test_webhook_service_reaches_the_port_of_every_operator_pod() -> None:
    objects = render(ON | {"operator": {"replicas": 2}})
    service, operator = find(objects, "Service", "plimsoll-webhook"), find(objects, "Deployment", "plimsoll-operator")
    client = webhook(ON)["clientConfig"]["service"]
    configured = settings(ON).webhook
    assert configured is not None
    [port] = service["spec"]["ports"]
    assert client == {"name": "plimsoll-webhook", "namespace": NAMESPACE, "path": PATH, "port": port["port"]}
    assert port["targetPort"] == configured.port
    assert service["spec"]["selector"].items() <= operator["spec"]["template"]["metadata"]["labels"].items()
    [container] = containers(pod_specs(objects)["plimsoll-operator"])
    assert configured.port in [one["containerPort"] for one in container["ports"]]
    assert configured.certificate_directory in [one["mountPath"] for one in container["volumeMounts"]]
    [rule] = find(objects, "NetworkPolicy", "plimsoll-operator")["spec"]["ingress"]
    assert rule == {"ports": [{"port": configured.port, "protocol": "TCP"}]}


def test_values_of_an_earlier_chart_are_enough() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    assert of_kind(render({"webhook": None}), "ValidatingWebhookConfiguration") == []
    partial: Object = {"enabled": True}
    partial |= dict.fromkeys(("timeoutSeconds", "namespaceSelector", "annotations", "certificate"))
    objects = render({"webhook": partial})
    assert find(objects, "ValidatingWebhookConfiguration")["webhooks"][0]["timeoutSeconds"] == 3
    assert find(objects, "Secret", "plimsoll-webhook")["metadata"]["name"] == "plimsoll-webhook"


def test_webhook_grants_the_operator_no_further_right() -> None:
    roles = [[o for o in render(values) if o["kind"] in ("Role", "ClusterRole")] for values in ({}, ON)]
    assert roles[0] == roles[1]


@pytest.mark.parametrize(("release", "fullname"), [("plimsoll", "plimsoll"), ("llm", "llm-plimsoll")])
async def test_own_certificate_is_of_the_service_and_trusted(release: str, fullname: str, tmp_path: Path) -> None:
    objects = render(ON, "--name-template", release)
    secret = find(objects, "Secret", f"{fullname}-webhook")
    service = find(objects, "Service", secret["metadata"]["name"])
    for name in (CERTIFICATE_FILE, KEY_FILE):
        (tmp_path / name).write_bytes(base64.b64decode(secret["data"][name]))
    bundle = find(objects, "ValidatingWebhookConfiguration")["webhooks"][0]["clientConfig"]["caBundle"]
    files = CertificateFiles(tmp_path)
    assert await files.load()
    trust = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    shake_hands(files.context, trust, f"{service['metadata']['name']}.{NAMESPACE}.svc")
    [volume] = [one for one in pod_specs(objects)[f"{release_name(release)}-operator"]["volumes"] if "secret" in one]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert volume["secret"]["optional"] is True


def release_name(release: str) -> str:
    return release if "plimsoll" in release else f"{release}-plimsoll"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """A TLS handshake in memory. Raises SSLCertVerificationError."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)]
    for side in sides * 4:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert sides[0].getpeercert()


def test_other_names_are_not_trusted() -> None:
    """The certificate is for one name, whatever a Service of another name does."""
    secret = find(render(ON), "Secret", "plimsoll-webhook")
    text = base64.b64decode(secret["data"][CERTIFICATE_FILE])
    openssl = shutil.which("openssl")
    assert openssl
    shown = subprocess.run([openssl, "x509", "-noout", "-text"], input=text, capture_output=True, check=True).stdout
    assert shown.count(b"DNS:") == 1


def test_existing_secret_replaces_the_charts_own() -> None:
    certificate = {"secretName": "theirs", "caBundle": "-----BEGIN CERTIFICATE-----\nx"}
    values = {"webhook": {"enabled": True, "certificate": certificate, "annotations": {"a": "b"}}}
    objects = render(values)
    assert of_kind(objects, "Secret", "plimsoll-webhook") == []
    assert base64.b64decode(webhook(values)["clientConfig"]["caBundle"]).decode() == certificate["caBundle"]
    assert find(objects, "ValidatingWebhookConfiguration")["metadata"]["annotations"] == {"a": "b"}
    [volume] = [one for one in pod_specs(objects)["plimsoll-operator"]["volumes"] if "secret" in one]
    assert volume["secret"]["secretName"] == "theirs"
    injected = webhook({"webhook": {"enabled": True, "certificate": {"secretName": "theirs"}}})
    assert "caBundle" not in injected["clientConfig"]


def test_webhook_asks_about_managed_namespaces_only() -> None:
    selector = {"matchExpressions": [{"key": "team", "operator": "Exists"}]}
    values = {"watchNamespaces": ["a", "b"], "webhook": {"enabled": True, "namespaceSelector": selector}}
    managed = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}
    expected = {"matchExpressions": [*selector["matchExpressions"], managed]}
    assert webhook(values)["namespaceSelector"] == expected
    assert webhook(ON | {"watchNamespaces": ["a", "b"]})["namespaceSelector"] == {"matchExpressions": [managed]}
    assert "namespaceSelector" not in webhook(ON)


def test_webhooks_of_two_releases_have_two_names() -> None:
    names = {
        find(render(ON, *options), "ValidatingWebhookConfiguration")["metadata"]["name"]
        for options in ((), ("--name-template", "llm"), ("--namespace", "other"))
    }
    assert len(names) == 3
