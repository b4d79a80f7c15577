"""A small OpenID Connect issuer on 127.0.0.1: serves its keys over TLS, and signs tokens with the openssl program."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, KEY_FILE
from tests.certificates import make_certificate

AUDIENCE = "plimsoll"
LIFETIME_S = 600


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def openssl(*command: str, given: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *command], input=given, check=True, capture_output=True).stdout


class SigningKey:
    """An RSA key with its id."""

    def __init__(self, directory: Path, kid: str) -> None:
        self.kid = kid
        self._file = str(directory / f"{kid}.pem")
        openssl("genrsa", "-out", self._file, "2048")

    def public(self) -> dict[str, str]:
        """The key as a JSON Web Key."""
        modulus = openssl("rsa", "-in", self._file, "-noout", "-modulus").decode().strip().partition("=")[2]
        n, e = encode(bytes.fromhex(modulus)), encode(b"\x01\x00\x01")
        return {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self.kid, "n": n, "e": e}

    def sign(self, claims: dict[str, Any], **header: str | None) -> str:
        """A token with these claims. `header` replaces or removes fields of its header."""
        fields = {"alg": "RS256", "typ": "JWT", "kid": self.kid, **header}
        head = {name: value for name, value in fields.items() if value is not None}
        signed = ".".join(encode(json.dumps(part).encode()) for part in (head, claims))
        return f"{signed}.{encode(openssl('dgst', '-sha256', '-sign', self._file, given=signed.encode()))}"


class OidcIssuer:
    """The issuer. `fails`: it answers 500. `padding`: text that follows its keys. `fetches` counts requests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        self.ca_bundle = make_certificate(directory, "issuer")
        self.key = SigningKey(directory, "first")
        self.published = [self.key.public()]
        self.fails = False
        self.padding = ""
        self.fetches = 0
        self.port = 0
        self._runner: web.AppRunner

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def start(self) -> OidcIssuer:
        app = web.Application()
        app.router.add_get("/keys", self._keys)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._directory / CERTIFICATE_FILE, self._directory / KEY_FILE)
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context)
        await site.start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _keys(self, _: web.Request) -> web.Response:
        self.fetches += 1
        return web.Response(status=500) if self.fails else self._key_set()

    def _key_set(self) -> web.Response:
        return web.json_response({"keys": self.published, "padding": self.padding})

    def rotate(self, kid: str) -> SigningKey:
        """Make a new key and publish it beside the old one. Returns it; `key` stays the old one."""
        new = SigningKey(self._directory, kid)
        self.published.append(new.public())
        return new

    def claims(self, **changes: Any) -> dict[str, Any]:
        """The claims of a valid token. A change to None removes one."""
        now = int(time.time())
        found = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + LIFETIME_S, **changes}
        return {name: value for name, value in found.items() if value is not None}

    def token(self, **changes: Any) -> str:
        return self.key.sign(self.claims(**changes))

    def config(self, **changes: Any) -> dict[str, Any]:
        """The issuer as the chart declares it."""
        found = {"issuer": self.url, "audiences": [AUDIENCE], "jwksUri": f"{self.url}/keys"}
        return {**found, "caBundle": self.ca_bundle, **changes}
