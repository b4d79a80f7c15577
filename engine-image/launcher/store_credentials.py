"""Credentials of object stores: keys of a Secret, or the workload identity of the pod.

Problem: each cloud gives a pod its identity in another way, and identities expire during long downloads.

Idea: one provider for each store looks at the environment, as the clouds' own clients do, and is asked before each
request. Keys of the environment win. Without any, a request to S3 is anonymous, for public buckets.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launcher import store_http
from launcher.model_source import SourceError

KEY_ID, SECRET_KEY, SESSION_TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
SECRET_VARIABLES: Final = (KEY_ID, SECRET_KEY, SESSION_TOKEN)
REFRESH_SECONDS: Final = 300.0  # before the end of an identity
_GCE_HOST: Final = "metadata.google.internal"
_GCE_PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/token"


@dataclass(frozen=True)
class Credentials:
    """Keys that sign requests, or a token that they carry. expires_at: Unix time, None for never."""

    key_id: str = ""
    secret_key: str = ""
    session_token: str = ""
    bearer: str = ""
    expires_at: float | None = None


class CredentialProvider:
    """Credentials that are read again before they expire. Threads may share it."""

    def __init__(self, read: Callable[[], Credentials]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._current: Credentials | None = None

    def current(self) -> Credentials:
        """The credentials; raises SourceError or TransientError."""
        with self._lock:
            found = self._current
            if found is None or (found.expires_at is not None and time.time() > found.expires_at - REFRESH_SECONDS):
                found = self._current = self._read()
            return found


def s3_provider(environment: Mapping[str, str], region: str) -> CredentialProvider:
    """Keys, a web identity (IRSA), or the container's endpoint (EKS Pod Identity, ECS)."""
    if (keys := _keys(environment)) is not None:
        return CredentialProvider(lambda: keys)
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environment.get("AWS_ROLE_ARN"):
        return CredentialProvider(lambda: _assume_role(environment, region))
    if environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        return CredentialProvider(lambda: _of_container(environment))
    return CredentialProvider(Credentials)


def gs_provider(environment: Mapping[str, str]) -> CredentialProvider:
    """HMAC keys, or the identity of the pod's service account by the metadata server."""
    if (keys := _keys(environment)) is not None:
        return CredentialProvider(lambda: keys)
    return CredentialProvider(lambda: _of_metadata_server(environment))


def _keys(environment: Mapping[str, str]) -> Credentials | None:
    key_id, secret, token = (environment.get(name, "").strip() for name in SECRET_VARIABLES)
    if bool(key_id) != bool(secret):
        raise SourceError(f"the Secret must have both {KEY_ID} and {SECRET_KEY}")
    return Credentials(key_id, secret, token) if key_id else None


def _assume_role(environment: Mapping[str, str], region: str) -> Credentials:
    token = _read_file(environment["AWS_WEB_IDENTITY_TOKEN_FILE"])
    fields = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "RoleArn": environment["AWS_ROLE_ARN"],
        "RoleSessionName": environment.get("AWS_ROLE_SESSION_NAME") or "plimsoll",
        "WebIdentityToken": token,
    }
    endpoint = environment.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    text = store_http.document(
        f"{endpoint.rstrip('/')}/", headers, method="POST", body=urllib.parse.urlencode(fields).encode()
    )
    found = store_http.parse_xml(text).find(".//Credentials")
    if found is None:
        raise SourceError(f"{endpoint} gives no credentials for role {environment['AWS_ROLE_ARN']}")
    return Credentials(
        found.findtext("AccessKeyId") or "",
        found.findtext("SecretAccessKey") or "",
        found.findtext("SessionToken") or "",
        expires_at=_time(found.findtext("Expiration")),
    )


def _of_container(environment: Mapping[str, str]) -> Credentials:
    headers = {}
    if path := environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        headers["Authorization"] = _read_file(path)
    url = environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
    found = _json(store_http.document(url, headers, direct=True), url)
    return Credentials(
        str(found.get("AccessKeyId", "")),
        str(found.get("SecretAccessKey", "")),
        str(found.get("Token", "")),
        expires_at=_time(found.get("Expiration")),
    )


def _of_metadata_server(environment: Mapping[str, str]) -> Credentials:
    url = f"http://{environment.get('GCE_METADATA_HOST') or _GCE_HOST}{_GCE_PATH}"
    found = _json(store_http.document(url, {"Metadata-Flavor": "Google"}, direct=True), url)
    seconds = found.get("expires_in")
    expires_at = time.time() + seconds if isinstance(seconds, int | float) else None
    return Credentials(bearer=str(found.get("access_token", "")), expires_at=expires_at)


def _read_file(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise SourceError(f"the token of the workload identity cannot be read: {error}") from None


def _json(text: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SourceError(f"{url} answers no credentials")
    return found


def _time(text: object) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
