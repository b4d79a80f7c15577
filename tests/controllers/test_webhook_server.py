"""The webhook's server and protocol: what the API server gets whatever it sends, and whatever is broken."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, InvalidCertificate, expiry_s
from plimsoll.adapters.kube_client import KubeClient, WatchEvent
from plimsoll.api import labels
from plimsoll.controllers.isolation import ObjectErrors
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.webhook import server
from plimsoll.controllers.webhook.certificate import CertificateFiles
from plimsoll.controllers.webhook.review import MalformedReview, answer
from plimsoll.controllers.webhook.review_bodies import BodyLimits
from plimsoll.controllers.webhook.service_index import ServiceIndex, essentials
from plimsoll.controllers.webhook.validation import ValidationResult
from plimsoll.core.routing.model_names import read_claim
from plimsoll.resources.platform_config import WebhookSettings
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.certificates import make_certificate
from tests.ports import free_port

Object = dict[str, Any]


def review(obj: Object | None = None, **request: Any) -> Object:
    base: Object = {
        "uid": "u-1",
        "operation": "CREATE",
        "namespace": "team",
        "name": "chat",
        "resource": {"group": labels.GROUP, "version": labels.VERSION, "resource": labels.PLURAL},
        "object": builders.service() if obj is None else obj,
        "oldObject": None,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": base | request}


def counts() -> dict[str, float]:
    samples = next(iter(operator_metrics.OPERATOR_ADMISSION_REVIEWS.collect())).samples
    return {one.labels["result"]: one.value for one in samples if one.name.endswith("_total")}


class FakeValidator:
    """A validator that has one result, and records its arguments."""

    def __init__(self, outcome: ValidationResult | Exception = ValidationResult()) -> None:  # noqa: B008 - immutable
        self.outcome = outcome
        self.requested: list[tuple[Object, Object | None]] = []

    def __call__(self, new: Object, old: Object | None) -> ValidationResult:
        self.requested.append((new, old))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "result", "expected"),
    [
        (ValidationResult(), "allowed", {"allowed": True}),
        (ValidationResult(warnings=("careful",)), "warned", {"allowed": True, "warnings": ["careful"]}),
        (
            ValidationResult(("no", "never"), ("careful",)),
            "refused",
            {
                "allowed": False,
                "status": {"code": 403, "reason": "Forbidden", "message": "no; never"},
                "warnings": ["careful"],
            },
        ),
        (KeyError("bug"), "failed", {"allowed": True}),
    ],
)
def test_answer_has_result_and_is_counted(outcome: ValidationResult | Exception, result: str, expected: Object) -> None:
    before = counts()
    found = answer(review(), FakeValidator(outcome))
    assert found["response"] == {"uid": "u-1"} | expected
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert {name: value - before[name] for name, value in counts().items() if value != before[name]} == {result: 1}


@pytest.mark.parametrize(
    "request_part",
    [
        {"operation": "DELETE", "object": None},
        {"operation": "CONNECT"},
        {"subResource": "status"},
        {"resource": {"resource": "pods"}},
        {"object": "text"},
    ],
)
def test_answer_leaves_other_requests_alone(request_part: Object) -> None:
    validator = FakeValidator(ValidationResult(("no",)))
    assert answer(review(**request_part), validator)["response"]["allowed"] is True
    assert validator.requested == []


def test_answer_validates_normalised_objects_of_a_dry_run() -> None:
    old = builders.service()
    new = builders.service(slo=None)
    del new["metadata"]["namespace"]
    validator = FakeValidator()
    answer(review(new, operation="UPDATE", oldObject=old, dryRun=True), validator)
    [(requested, before)] = validator.requested
    assert requested["metadata"]["namespace"] == "team"
    assert "slo" not in requested["spec"]
    assert before is not None
    assert before["spec"] == old["spec"]


@given(st.recursive(st.none() | st.booleans() | st.text(), lambda one: st.dictionaries(st.text(), one) | st.lists(one)))
def test_answer_allows_whatever_object_it_gets(value: Any) -> None:
    index = ServiceIndex(SilentKube(), OperatorConfig(builders.PLATFORM, "system", "me"), ObjectErrors())

    def validator(new: Object, old: Object | None) -> ValidationResult:
        return server.validate_change(new, old, index.cluster)

    response = answer(review({"metadata": {"name": "chat"}, "spec": value}), validator)["response"]
    assert response["allowed"] or response["status"]["message"]
    assert answer(review({"metadata": value}, oldObject=value), validator)["response"]["uid"] == "u-1"


@pytest.mark.parametrize("document", [None, [], {}, {"request": 1}, {"request": {"uid": 7}}, {"request": {"uid": ""}}])
def test_answer_rejects_what_is_no_review(document: object) -> None:
    with pytest.raises(MalformedReview):
        answer(document, FakeValidator())


@asynccontextmanager
async def serving(
    folder: Path,
    validator: FakeValidator,
    limits: server.ServerLimits = server.ServerLimits(),  # noqa: B008 - immutable
) -> AsyncIterator[str]:
    """The server on a port of 127.0.0.1; yields its URL."""
    port = free_port()
    settings = WebhookSettings(port=port, certificateDirectory=str(folder))
    task = asyncio.create_task(server.serve(settings, validator, limits))
    try:
        yield f"https://127.0.0.1:{port}{server.PATH}"
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def post(url: str, pem: str, body: bytes | None = None) -> tuple[int, Object]:
    """A POST over a connection of its own, once the server listens."""
    trust = ssl.create_default_context(cadata=pem)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as session:
        for _ in range(1_000):
            try:
                async with session.post(
                    url, data=BytesIO(orjson.dumps(review()) if body is None else body)
                ) as response:
                    return response.status, await response.json()
            except aiohttp.ClientConnectorCertificateError:
                raise
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.05)
    raise AssertionError("the webhook does not listen")


async def test_serve_answers_over_tls(tmp_path: Path) -> None:
    pem, validator = make_certificate(tmp_path), FakeValidator(ValidationResult(("no",)))
    async with serving(tmp_path, validator) as url:
        status, found = await post(url, pem)
    assert status == 200
    assert found["response"]["status"]["message"] == "no"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"{}", 400), (b"x" * (BodyLimits().body_bytes + 1), 413)],
)
async def test_serve_refuses_what_it_cannot_read(tmp_path: Path, body: bytes, status: int) -> None:
    pem, before = make_certificate(tmp_path), counts()
    async with serving(tmp_path, FakeValidator()) as url:
        assert (await post(url, pem, body))[0] == status
    assert counts()["failed"] == before["failed"] + 1


async def test_serve_accepts_the_largest_objects(tmp_path: Path) -> None:
    """Two objects of the largest size that etcd stores."""
    pem, validator = make_certificate(tmp_path), FakeValidator()
    large = builders.service() | {"status": {"padding": "x" * 1_500_000}}
    async with serving(tmp_path, validator) as url:
        status, _ = await post(url, pem, orjson.dumps(review(large, operation="UPDATE", oldObject=large)))
    assert status == 200
    assert len(validator.requested) == 1


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def begin_review(url: str, pem: str, sent: bytes) -> Connection:
    """A review of which all but the last byte is sent."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context(cadata=pem))
    writer.write(f"POST {server.PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(sent) + 1}\r\n\r\n".encode() + sent)
    await writer.drain()
    return reader, writer


async def end_review(connection: Connection) -> bytes:
    """The status of its answer, without its last byte."""
    reader, writer = connection
    async with asyncio.timeout(10.0):
        status = (await reader.readline()).split()[1]
    writer.close()
    return status


async def test_serve_answers_while_many_send_slowly(tmp_path: Path) -> None:
    pem, limits = make_certificate(tmp_path), server.ServerLimits(BodyLimits(max_bodies=4, seconds=3.0))
    async with serving(tmp_path, FakeValidator(), limits) as url:
        assert (await post(url, pem))[0] == 200
        slow = [await begin_review(url, pem, b"{") for _ in range(6)]
        for _ in range(10):
            assert (await post(url, pem))[0] == 200
        statuses = [await end_review(one) for one in slow]
    assert statuses == [b"503"] * 3 + [b"408"] * 3  # beyond the number, the longest goes first


async def test_serve_bounds_bytes_of_unfinished_reviews(tmp_path: Path) -> None:
    """The largest one is given up, and reviews of a common size are answered."""
    pem, limits = make_certificate(tmp_path), server.ServerLimits(BodyLimits(max_bytes=300_000, seconds=3.0))
    async with serving(tmp_path, FakeValidator(), limits) as url:
        assert (await post(url, pem))[0] == 200
        large = await begin_review(url, pem, b" " * 200_000)
        small = [await begin_review(url, pem, b" " * 90_000) for _ in range(2)]
        assert await end_review(large) == b"503"
        assert (await post(url, pem))[0] == 200
        assert [await end_review(one) for one in small] == [b"408"] * 2


async def test_serve_counts_client_that_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pem, before = make_certificate(tmp_path), counts()
    async with serving(tmp_path, FakeValidator()) as url:
        assert (await post(url, pem))[0] == 200
        _, writer = await begin_review(url, pem, b"{")
        await asyncio.sleep(0.2)
        writer.close()
        async with asyncio.timeout(5.0):
            while counts()["failed"] == before["failed"]:
                await asyncio.sleep(0.01)
        assert (await post(url, pem))[0] == 200
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("sent", [None, b"", b"POST /validate HT"], ids=["no handshake", "silent", "slow head"])
async def test_serve_cuts_connection_without_request(tmp_path: Path, sent: bytes | None) -> None:
    pem = make_certificate(tmp_path)
    trust = None if sent is None else ssl.create_default_context(cadata=pem)
    async with serving(tmp_path, FakeValidator(), server.ServerLimits(head_seconds=0.2)) as url:
        assert (await post(url, pem))[0] == 200
        port = int(url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(sent or b"")
        async with asyncio.timeout(5.0):
            with suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


async def test_serve_bounds_connections_without_handshake(tmp_path: Path) -> None:
    pem, limits = make_certificate(tmp_path), server.ServerLimits(connections=2, head_seconds=60.0)
    async with serving(tmp_path, FakeValidator(), limits) as url:
        assert (await post(url, pem))[0] == 200
        port = int(url.rpartition(":")[2].partition("/")[0])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert (await post(url, pem))[0] == 200
        async with asyncio.timeout(20.0):
            for reader, _ in silent[:3]:
                with suppress(ConnectionError):
                    assert await reader.read() == b""
        for _, writer in silent:
            writer.close()


async def test_serve_keeps_connection_of_answered_reviews(tmp_path: Path) -> None:
    """The API server has one connection for many reviews. Their bodies come in parts."""
    pem = make_certificate(tmp_path)
    async with serving(tmp_path, FakeValidator(), server.ServerLimits(head_seconds=0.2)) as url:
        assert (await post(url, pem))[0] == 200
        port = int(url.rpartition(":")[2].partition("/")[0])
        trust = ssl.create_default_context(cadata=pem)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        body = orjson.dumps(review())
        head = f"POST {server.PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(2):
            writer.write(head + body[:10])
            await asyncio.sleep(0.4)
            writer.write(body[10:])
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            assert orjson.loads(await reader.readuntil(b"}}"))["response"]["allowed"] is True
            await asyncio.sleep(0.4)
        writer.close()


async def test_serve_waits_for_certificate_and_takes_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def certificate_refused() -> None:
        """Returns once the files have been looked at again and found unusable."""
        caplog.clear()
        while not any("cannot read the webhook's certificate" in record.getMessage() for record in caplog.records):
            await asyncio.sleep(0.01)

    limits = server.ServerLimits(certificate_seconds=0.05, no_certificate_seconds=0.05)
    async with serving(tmp_path, FakeValidator(), limits) as url:
        await certificate_refused()
        first = make_certificate(tmp_path, "first")
        assert (await post(url, first))[0] == 200
        second = make_certificate(tmp_path, "second", days=40)
        for _ in range(1_000):
            try:
                assert (await post(url, second))[0] == 200
                break
            except aiohttp.ClientConnectorCertificateError:
                await asyncio.sleep(0.05)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await post(url, first)
        (tmp_path / CERTIFICATE_FILE).write_text("garbage")
        await certificate_refused()
        assert (await post(url, second))[0] == 200
        (tmp_path / CERTIFICATE_FILE).write_text(first)  # not the key's: the one before stays in use
        await certificate_refused()
        assert (await post(url, second))[0] == 200


async def test_expiry_metric_is_of_the_loaded_certificate(tmp_path: Path) -> None:
    files = CertificateFiles(tmp_path)
    assert not await files.load()
    pem = make_certificate(tmp_path, days=30)
    assert await files.load()
    exported = operator_metrics.OPERATOR_WEBHOOK_CERTIFICATE_EXPIRY._value.get()
    assert exported == ssl.cert_time_to_seconds(end_date(pem))


def end_date(pem: str) -> str:
    command = ["openssl", "x509", "-noout", "-enddate"]
    shown = subprocess.run(command, input=pem, capture_output=True, text=True, check=True).stdout
    return shown.strip().partition("=")[2]


def test_expiry_reads_times_after_2049(tmp_path: Path) -> None:
    """RFC 5280 writes them as GeneralizedTime."""
    days = 50 * 366
    found = datetime.fromtimestamp(expiry_s("preamble\n" + make_certificate(tmp_path, days=days)), UTC)
    assert abs((found - datetime.now(UTC)).days - days) <= 1


@given(st.binary(max_size=200))
def test_expiry_rejects_what_is_no_certificate(der: bytes) -> None:
    with pytest.raises(InvalidCertificate):
        expiry_s(ssl.DER_cert_to_PEM_cert(der))


class SilentKube(KubeClient):
    """An API server that is never asked."""

    def __init__(self) -> None:
        pass


@pytest.fixture
def two_scopes() -> ServiceIndex:
    platform = builders.PLATFORM.model_copy(update={"watch_namespaces": ("team", "other")})
    return ServiceIndex(SilentKube(), OperatorConfig(platform, "system", "me"), ObjectErrors())


def test_index_is_unknown_until_every_namespace_is_listed(two_scopes: ServiceIndex) -> None:
    two_scopes.take("team", WatchEvent("SYNC", objects=(builders.service(),)))
    assert two_scopes.cluster is None
    two_scopes.take("other", WatchEvent("SYNC"))
    assert two_scopes.cluster is not None
    assert [one.qualified_name for one in two_scopes.cluster.cache.claims_of(["chat"])] == ["team/chat"]
    assert two_scopes.cluster.rules.service_namespaces == {"team"}


def test_index_follows_changes(two_scopes: ServiceIndex) -> None:
    for scope in ("team", "other"):
        two_scopes.take(scope, WatchEvent("SYNC"))
    service = builders.service(model={"uri": "file:///models/tiny", "name": "first"})
    two_scopes.take("team", WatchEvent("ADDED", service))
    renamed = builders.service(model={"uri": "file:///models/tiny", "name": "second"})
    two_scopes.take(
        "team", WatchEvent("MODIFIED", renamed | {"metadata": renamed["metadata"] | {"resourceVersion": "2"}})
    )
    assert two_scopes.cluster is not None
    cache = two_scopes.cluster.cache
    assert [one.model for one in cache.claims_of(["first", "second", "team/chat"])] == ["second"]
    two_scopes.take("team", WatchEvent("DELETED", renamed))
    assert cache.claims_of(["second", "team/chat"]) == []


def test_essentials_have_the_claim_of_the_whole_object() -> None:
    service = builders.service(
        model={"uri": "file:///models/tiny", "name": "first"},
        admission={"whenFull": "Downgrade", "fallback": {"name": "spare"}},
    )
    service["status"] = {
        "nameClaim": "first since 2026-02-01T10:00:00.000001Z",
        "modelNames": ["first", "former"],
        "conditions": [{"type": "Ready"}] * 20,
    }
    kept = essentials(service)
    assert read_claim(kept) == read_claim(service)
    assert kept["spec"]["admission"] == {"fallback": {"name": "spare"}}
    assert "conditions" not in kept["status"]
    assert "tiers" not in kept["spec"]
