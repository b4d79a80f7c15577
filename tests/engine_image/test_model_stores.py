"""Stores of models over HTTP: S3, Google Cloud Storage, web servers, and the identities by which they are read.

The signature's expected value was computed with botocore. `test_s3_server_*` run against moto's server, if
`moto_server` is on the PATH or MOTO_SERVER names it. It cannot be in the environment of these tests, because botocore
and kubernetes need other releases of python-dateutil.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from launcher import fetch, object_store
from launcher.model_cache import ModelCache
from launcher.model_source import ModelSource, RemoteFile, SourceError
from launcher.store_credentials import Credentials, gs_provider, s3_provider
from launcher.web_archive import WebArchive
from tests.engine_image.middleware_harness import CONTRACT

FILES = {"config.json": b"{}", "weights/model-1.safetensors": b"w" * 300_000, "a file+1.txt": b"x"}
ROOT = Path(__file__).parents[2]
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


@dataclass
class Web:
    """What a web server has by path, and what it was asked: path with query, and headers in lower case."""

    bodies: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    checksum: str = ""

    def headers_of(self, path: str) -> dict[str, str]:
        return next(headers for asked, headers in self.asked if asked.split("?")[0] == path)


@contextlib.contextmanager
def web_server() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            web.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            path = self.path if self.path in web.bodies else urllib.parse.unquote(self.path.split("?")[0])
            status, body = (200, web.bodies[path]) if path in web.bodies else (404, b"")
            if path in web.redirects:
                status = 302
            start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.send_response(206 if start and status == 200 else status)
            if path in web.redirects:
                self.send_header("Location", web.redirects[path])
            if web.checksum:
                self.send_header("x-amz-checksum-sha256", web.checksum)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[start:])

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def listing(prefix: str) -> bytes:
    rows = "".join(
        f"<Contents><Key>{prefix}/{path}</Key><Size>{len(body)}</Size></Contents>" for path, body in FILES.items()
    )
    return f"<ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'>{rows}</ListBucketResult>".encode()


def bucket(web: Web) -> None:
    web.bodies["/models/"] = listing("team/chat")
    web.bodies |= {f"/models/team/chat/{path}": body for path, body in FILES.items()}


def downloaded(source: ModelSource, environment: dict[str, str], folder: Path) -> dict[str, bytes]:
    store = fetch.store_of(source, environment, CONTRACT)
    files = fetch.fetch(source, store, ModelCache(folder), pause=lambda _: None).files
    return {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("url", "signature"),
    [
        (
            "https://models.s3.eu-west-1.amazonaws.com/team/a%20file%2B1.txt",
            "bfbebaf814dae11490bbb872f95d58480ecc101cc8a0aa25032b442a9f869d86",
        ),
        (
            "http://minio:9000/models/?list-type=2&prefix=team%2Fchat%2F",
            "32f154797ffbf87599b34318c663c88cce2f35867dbbf45b5bbcd12b15d9c76b",
        ),
    ],
)
def test_signature_is_that_of_botocore(url: str, signature: str) -> None:
    headers = object_store.signature_headers(url, Credentials("AKID", "SECRET", "TOKEN"), "eu-west-1", NOW)
    assert headers["Authorization"].endswith(f"Signature={signature}")


@pytest.mark.parametrize(
    ("bucket_name", "environment", "base"),
    [
        ("models", {}, "https://models.s3.us-east-1.amazonaws.com"),
        ("models", {"AWS_REGION": "eu-west-1"}, "https://models.s3.eu-west-1.amazonaws.com"),
        ("my.models", {}, "https://s3.us-east-1.amazonaws.com/my.models"),
        ("models", {"AWS_ENDPOINT_URL": "http://minio:9000/"}, "http://minio:9000/models"),
    ],
)
def test_address_of_a_bucket(bucket_name: str, environment: dict[str, str], base: str) -> None:
    assert object_store.open_store(ModelSource(f"s3://{bucket_name}/x"), environment).base == base


def test_public_bucket_is_read_without_signature(tmp_path: Path) -> None:
    with web_server() as web:
        bucket(web)
        assert downloaded(ModelSource("s3://models/team/chat"), {"AWS_ENDPOINT_URL": web.url}, tmp_path) == FILES
        assert "authorization" not in web.headers_of("/models/")
        assert "list-type=2&prefix=team%2Fchat%2F" in web.asked[0][0]


def test_every_amazon_header_is_signed(tmp_path: Path) -> None:
    """S3 answers 403 "There were headers present in the request which were not signed" otherwise."""
    with web_server() as web:
        bucket(web)
        downloaded(ModelSource("s3://models/team/chat"), {"AWS_ENDPOINT_URL": web.url, **KEYS}, tmp_path)
        assert len(web.asked) == 1 + len(FILES)
        for _, headers in web.asked:
            names = headers["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
            assert {name for name in headers if name.startswith("x-amz-")} <= set(names)


def test_checksum_of_a_range_is_not_that_of_the_file() -> None:
    """S3 gives a range of a file that was uploaded in parts the checksum of their checksums, without `-PARTS`."""
    body = b"w" * 10
    with web_server() as web:
        web.bodies["/models/chat/w"] = body
        web.checksum = base64.b64encode(hashlib.sha256(b"of parts").digest()).decode()
        store = object_store.open_store(ModelSource("s3://models/chat"), {"AWS_ENDPOINT_URL": web.url, **KEYS})
        remote = RemoteFile("w", len(body), "")
        with contextlib.closing(store.open(remote, 0).body), contextlib.closing((rest := store.open(remote, 4)).body):
            assert rest.sha256 == ""
        assert ["x-amz-checksum-mode" in headers for _, headers in web.asked] == [True, False]


def test_pages_of_a_listing_are_followed(tmp_path: Path) -> None:
    with web_server() as web:
        page = "<R>{}<Contents><Key>chat/{}</Key><Size>1</Size></Contents></R>"
        web.bodies["/models/"] = page.format("<NextContinuationToken>a+b</NextContinuationToken>", 1).encode()
        web.bodies["/models/?continuation-token=a%2Bb&list-type=2&prefix=chat%2F"] = page.format("", 2).encode()
        web.bodies |= {"/models/chat/1": b"x", "/models/chat/2": b"y"}
        found = downloaded(ModelSource("s3://models/chat"), {"AWS_ENDPOINT_URL": web.url}, tmp_path)
        assert found == {"1": b"x", "2": b"y"}


def test_web_identity_signs_with_the_keys_of_its_role(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("jwt\n")
    keys = "<AccessKeyId>ASIA1</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>session</SessionToken>"
    answer = f"<R xmlns='x'><Credentials>{keys}<Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></R>"
    with web_server() as web:
        bucket(web)
        web.bodies["/sts/"] = answer.encode()
        environment = {
            "AWS_ENDPOINT_URL": web.url,
            "AWS_ENDPOINT_URL_STS": f"{web.url}/sts",
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/engines",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        }
        assert downloaded(ModelSource("s3://models/team/chat"), environment, tmp_path) == FILES
        assert "Credential=ASIA1/" in web.headers_of("/models/")["authorization"]
        assert web.headers_of("/models/")["x-amz-security-token"] == "session"
        assert [path for path, _ in web.asked].count("/sts/") == 1


def test_pod_identity_that_expires_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("jwt")
    with web_server() as web:
        bucket(web)
        keys = {"AccessKeyId": "ASIA2", "SecretAccessKey": "s", "Token": "t", "Expiration": "2020-01-01T00:00:00Z"}
        web.bodies["/credentials"] = json.dumps(keys).encode()
        environment = {
            "AWS_ENDPOINT_URL": web.url,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{web.url}/credentials",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
        }
        assert downloaded(ModelSource("s3://models/team/chat"), environment, tmp_path) == FILES
        assert web.headers_of("/credentials")["authorization"] == "jwt"
        assert [path for path, _ in web.asked].count("/credentials") == 1 + len(FILES)


def test_google_identity_is_a_bearer_token(tmp_path: Path) -> None:
    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    with web_server() as web:
        bucket(web)
        web.bodies[token] = b'{"access_token": "ya29", "expires_in": 3600}'
        environment = {"STORAGE_EMULATOR_HOST": web.url, "GCE_METADATA_HOST": web.url.removeprefix("http://")}
        assert downloaded(ModelSource("gs://models/team/chat"), environment, tmp_path) == FILES
        assert web.headers_of(token)["metadata-flavor"] == "Google"
        assert web.headers_of("/models/")["authorization"] == "Bearer ya29"


@pytest.mark.parametrize("cloud", ["aws", "google"])
def test_identity_of_the_pod_is_asked_for_without_a_proxy(monkeypatch: pytest.MonkeyPatch, cloud: str) -> None:
    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    with web_server() as web, web_server() as proxy:
        web.bodies[token] = b'{"access_token": "ya29", "expires_in": 3600}'
        web.bodies["/credentials"] = b'{"AccessKeyId": "ASIA2", "SecretAccessKey": "s"}'
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        if cloud == "google":
            found = gs_provider({"GCE_METADATA_HOST": web.url.removeprefix("http://")}).current()
            assert found.bearer == "ya29"
        else:
            found = s3_provider({"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{web.url}/credentials"}, "eu-west-1").current()
            assert found.key_id == "ASIA2"
        assert proxy.asked == []


def test_half_a_key_pair_is_refused() -> None:
    with pytest.raises(SourceError, match="must have both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        object_store.open_store(ModelSource("s3://models/x"), {"AWS_ACCESS_KEY_ID": "AKID"})


def test_empty_folder_names_what_to_check(tmp_path: Path) -> None:
    with web_server() as web:
        web.bodies["/models/"] = b"<ListBucketResult/>"
        with pytest.raises(SourceError, match=r"s3://models/team/chat has no files: check bucket and path"):
            downloaded(ModelSource("s3://models/team/chat"), {"AWS_ENDPOINT_URL": web.url}, tmp_path)


def archive(members: dict[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path, body in members.items():
            info = tarfile.TarInfo(path)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
        if link:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = tarfile.SYMTYPE, link
            tar.addfile(info)
    return out.getvalue()


def unpacked(web: Web, body: bytes, folder: Path, digest: str = "") -> dict[str, bytes]:
    web.bodies["/m/chat.tar.gz"] = body
    source = ModelSource("https://host/m/chat.tar.gz", digest)
    store = WebArchive(ModelSource(f"{web.url}/m/chat.tar.gz"), "secret")
    files = fetch.fetch(source, store, ModelCache(folder), pause=lambda _: None).files
    return {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}


def test_archive_is_unpacked_without_its_single_folder(tmp_path: Path) -> None:
    body = archive({f"chat-1.0/{path}": content for path, content in FILES.items()})
    with web_server() as web:
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        assert unpacked(web, body, tmp_path, digest) == FILES
        assert web.headers_of("/m/chat.tar.gz")["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (archive({"../x": b"x"}), "cannot be unpacked"),
        (archive({}, link="/etc/passwd"), "link, which is no file and no folder"),
        (b"no archive", "cannot be unpacked"),
    ],
    ids=["path above the folder", "link", "no archive"],
)
def test_archive_that_leaves_its_folder_is_refused(tmp_path: Path, body: bytes, reason: str) -> None:
    with web_server() as web, pytest.raises(SourceError, match=reason):
        unpacked(web, body, tmp_path)
    assert not (tmp_path / "x").exists()


def test_token_does_not_follow_a_redirect(tmp_path: Path) -> None:
    with web_server() as web, web_server() as other:
        other.bodies["/elsewhere"] = archive(FILES)
        web.redirects["/m/chat.tar.gz"] = f"{other.url}/elsewhere"
        assert unpacked(web, b"", tmp_path) == FILES
        assert "authorization" not in other.headers_of("/elsewhere")


def test_program_gets_the_model_but_no_keys(tmp_path: Path) -> None:
    contract = json.loads((ROOT / "engine-image" / "contract.json").read_text())
    contract["paths"] |= {"model_cache": str(tmp_path / "cache"), "model_link": str(tmp_path / "model")}
    (tmp_path / "contract.json").write_text(json.dumps(contract))
    program = f"import os; print(os.listdir('{tmp_path}/model')); print('AWS_SECRET_ACCESS_KEY' in os.environ)"
    with web_server() as web:
        bucket(web)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "engine-image"),
            "PLIMSOLL_CONTRACT": str(tmp_path / "contract.json"),
            "PLIMSOLL_MODEL_SOURCE": "s3://models/team/chat",
            "AWS_ENDPOINT_URL": web.url,
            "AWS_ACCESS_KEY_ID": "AKID",
            "AWS_SECRET_ACCESS_KEY": "s",
        }
        command = [sys.executable, "-P", "-m", "launcher.fetch", sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert "config.json" in done.stdout
        assert "False" in done.stdout
        assert "model files are complete: digest sha256:" in done.stderr
        environment["PLIMSOLL_MODEL_DIGEST"] = "sha256:" + "0" * 64
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == fetch.FAILED
        assert "ModelSourceError: s3://models/team/chat has digest sha256:" in done.stderr


def test_hugging_face_model_is_prefetched_into_its_own_cache(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / "files" / name).write_bytes(b"{}")
    hub, port = ROOT / "e2e" / "scenarios" / "hub" / "hub.py", _free_port()
    command = [sys.executable, str(hub), str(tmp_path / "files"), "org/gated", "hf_secret", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://127.0.0.1:{port}/healthz", server)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "engine-image"),
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": "hf_secret",
            "PLIMSOLL_MODEL": "org/gated",
        }
        subprocess.run([sys.executable, "-P", "-m", "launcher.fetch"], env=environment, check=True)
    finally:
        server.kill()
        server.wait()
    assert {path.name for path in tmp_path.rglob("snapshots/*/*")} == {"config.json", "model.safetensors"}


MOTO = os.environ.get("MOTO_SERVER") or shutil.which("moto_server")
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
needs_moto = pytest.mark.skipif(MOTO is None, reason="no moto_server")


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of moto's server with a bucket `models`."""
    assert MOTO is not None
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": os.environ["MOTO_PATH"]} if "MOTO_PATH" in os.environ else {}
    process = subprocess.Popen(
        [MOTO, "-p", str(port)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _wait_for(f"{url}/moto-api/data.json", process)
        _put(url, "models", b"")
        for path, body in FILES.items():
            _put(url, f"models/team/chat/{path}", body)
        yield url
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _put(url: str, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    asked = urllib.request.Request(f"{url}/{urllib.parse.quote(path)}", body, headers, method="PUT")
    urllib.request.urlopen(asked, timeout=30).close()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        time.sleep(0.05)  # between two attempts to connect
    raise AssertionError(f"{url} does not answer")


@needs_moto
def test_s3_server_files_are_downloaded(s3: str, tmp_path: Path) -> None:
    assert downloaded(ModelSource("s3://models/team/chat"), {"AWS_ENDPOINT_URL": s3, **KEYS}, tmp_path) == FILES


@needs_moto
def test_s3_server_refuses_without_keys(s3: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"answers 403"):
        downloaded(ModelSource("s3://models/team/chat"), {"AWS_ENDPOINT_URL": s3}, tmp_path)


@needs_moto
def test_s3_server_says_that_a_bucket_is_absent(s3: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"answers 404 NoSuchBucket"):
        downloaded(ModelSource("s3://absent/team"), {"AWS_ENDPOINT_URL": s3}, tmp_path)
