"""Lists and reads the files of a model in S3, in stores with S3's API, and in Google Cloud Storage.

Both clouds have the same XML API: version 2 of its list, and GET with ranges. They differ in the address and in what
authenticates a request: a signature (AWS Signature Version 4, also with Google's HMAC keys), or a bearer token.
AWS_ENDPOINT_URL names another store with S3's API; a bucket is then in the path.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import urllib.parse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from launcher import store_http
from launcher.model_source import ModelSource, Opened, RemoteFile, SourceError
from launcher.store_credentials import CredentialProvider, Credentials, gs_provider, s3_provider

MAX_FILES: Final = 10_000
_EMPTY_SHA256: Final = hashlib.sha256(b"").hexdigest()
_GS_ENDPOINT: Final = "https://storage.googleapis.com"


class ObjectStore:
    """The objects below one prefix of a bucket, or the one object with that name. `base` is the bucket's URL."""

    def __init__(self, source: ModelSource, base: str, region: str, credentials: CredentialProvider) -> None:
        self._source = source
        self.base = base
        self._region = region
        self._credentials = credentials

    def files(self) -> list[RemoteFile]:
        """List the objects; raises SourceError if there are none, and TransientError."""
        _, prefix = self._source.location
        folder = f"{prefix}/" if prefix else ""
        found: list[RemoteFile] = []
        token = ""
        while True:
            query = {"list-type": "2", "prefix": folder, **({"continuation-token": token} if token else {})}
            page = store_http.parse_xml(store_http.document(*self._signed("", query)))
            for entry in page.iter("Contents"):
                path = (entry.findtext("Key") or "").removeprefix(folder)
                if path and not path.endswith("/"):  # a name with a slash at its end is a folder's placeholder
                    found.append(RemoteFile(path, int(entry.findtext("Size") or 0), entry.findtext("ETag") or ""))
            token = page.findtext("NextContinuationToken") or ""
            if not token or len(found) > MAX_FILES:
                break
        if len(found) > MAX_FILES:
            raise SourceError(f"{self._source.uri} has more than {MAX_FILES} files: name the folder of one model")
        if not found:
            raise SourceError(f"{self._source.uri} has no files: check bucket and path in spec.model.uri")
        return found

    def open(self, file: RemoteFile, offset: int) -> Opened:
        """Open the bytes of a file. A file that has changed since it was listed is a SourceError."""
        _, prefix = self._source.location
        key = f"{prefix}/{file.path}" if prefix else file.path
        # S3 answers a range with a checksum of checksums, in the form of one of bytes.
        asks_checksum = self._source.scheme == "s3" and not offset
        url, headers = self._signed(key, {}, {"x-amz-checksum-mode": "ENABLED"} if asks_checksum else {})
        headers |= {"If-Match": file.version} if file.version else {}
        headers |= {"Range": f"bytes={offset}-"} if offset else {}
        answer = store_http.request(url, headers)
        if offset and answer.status != 206:
            answer.close()
            raise SourceError(f"{self._source.uri} ignores ranges of bytes")
        return Opened(answer, _sha256_of(answer.headers.get("x-amz-checksum-sha256")) if asks_checksum else "")

    def _signed(
        self, key: str, query: Mapping[str, str], headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, dict[str, str]]:
        """Return URL and headers of a GET. S3 refuses a signature that leaves out an x-amz-* header."""
        path = f"/{urllib.parse.quote(key, safe='/-_.~')}" if key else ""
        ordered = "&".join(f"{_quote(name)}={_quote(value)}" for name, value in sorted(query.items()))
        url = f"{self.base}{path or '/'}{'?' if ordered else ''}{ordered}"
        credentials = self._credentials.current()
        if credentials.bearer:
            return url, {**headers, "Authorization": f"Bearer {credentials.bearer}"}
        if not credentials.key_id:
            return url, dict(headers)
        now = datetime.datetime.now(datetime.UTC)
        return url, signature_headers(url, credentials, self._region, now, headers)


def open_store(source: ModelSource, environment: Mapping[str, str]) -> ObjectStore:
    """The store of an s3:// or gs:// source, by the variables that the clouds' own clients read."""
    bucket, _ = source.location
    if source.scheme == "gs":
        endpoint = (environment.get("STORAGE_EMULATOR_HOST") or _GS_ENDPOINT).rstrip("/")
        return ObjectStore(source, f"{endpoint}/{bucket}", "auto", gs_provider(environment))
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = (environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or "").rstrip("/")
    if endpoint:
        base = f"{endpoint}/{bucket}"
    elif "." in bucket:  # no certificate fits such a host
        base = f"https://s3.{region}.amazonaws.com/{bucket}"
    else:
        base = f"https://{bucket}.s3.{region}.amazonaws.com"
    return ObjectStore(source, base, region, s3_provider(environment, region))


def signature_headers(
    url: str,
    credentials: Credentials,
    region: str,
    now: datetime.datetime,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the headers that sign a GET without body, and `extra` ones, by AWS Signature Version 4."""
    parts = urllib.parse.urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {**extra, "host": parts.netloc, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": stamp}
    if credentials.session_token:
        signed["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(signed))
    headers = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = "\n".join(("GET", parts.path, parts.query, headers, names, _EMPTY_SHA256))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    authorization = f"AWS4-HMAC-SHA256 Credential={credentials.key_id}/{scope}, SignedHeaders={names}"
    del signed["host"]  # the client sends it
    return {**signed, "Authorization": f"{authorization}, Signature={signature}"}


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe="-_.~")


def _sha256_of(checksum: str | None) -> str:
    """Return the checksum of a whole object in hexadecimal digits; "" for one of parts (`...-2`), or none."""
    try:
        raw = base64.b64decode(checksum or "", validate=True)
    except (binascii.Error, ValueError):
        return ""
    return raw.hex() if len(raw) == hashlib.sha256().digest_size else ""
