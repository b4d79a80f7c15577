"""An OpenID Connect provider on 127.0.0.1 that is not ours, and a client that gets its tokens by the code flow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import aiohttp
import oidc_provider_mock
from werkzeug.serving import WSGIRequestHandler, make_server

from plimsoll.adapters.certificate_files import CERTIFICATE_FILE, KEY_FILE
from tests.certificates import make_certificate

REDIRECT = "http://127.0.0.1/callback"  # nothing listens there: the client reads the address
_CLOCK = "authlib.oidc.core.grants._legacy.time"  # of the library that makes the tokens


class _QuietHandler(WSGIRequestHandler):
    """Writes no line for a request: Envoy asks for keys also while a test's output is being closed."""

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class OidcProvider:
    """The provider, with TLS. Users have the claims that `add_user` gives them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.ca_bundle = make_certificate(directory, "provider")
        files = (str(directory / CERTIFICATE_FILE), str(directory / KEY_FILE))
        self._users: dict[str, oidc_provider_mock.User] = {}
        self._server = make_server(
            "127.0.0.1", 0, self._made(), threaded=True, request_handler=_QuietHandler, ssl_context=files
        )
        self.url = f"https://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def _made(self) -> Any:
        return oidc_provider_mock.app(user_claims=list(self._users.values()))

    def add_user(self, name: str, **claims: Any) -> None:
        """A user who may sign in. The provider gets another key, see `rotate`."""
        self._users[name] = oidc_provider_mock.User(sub=name, claims=claims)
        self.rotate()

    def rotate(self) -> None:
        """Replace the signing key. The one before is no longer published."""
        self._server.app = self._made()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def clock_behind(seconds: float) -> Iterator[None]:
    """The provider's clock is behind: what it issues now is as old as that."""
    with mock.patch(_CLOCK, SimpleNamespace(time=lambda: time.time() - seconds)):
        yield


async def discover(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The provider's discovery document."""
    async with http.get(f"{url}/.well-known/openid-configuration", ssl=False) as answer:
        found: dict[str, Any] = await answer.json()
    return found


async def sign_in(http: aiohttp.ClientSession, url: str, client: str, user: str) -> str:
    """The ID token of a user who signs in to a client application."""
    places = await discover(http, url)
    asked = {"response_type": "code", "client_id": client, "redirect_uri": REDIRECT, "state": "s", "scope": "openid"}
    page = places["authorization_endpoint"]
    async with http.post(page, params=asked, data={"sub": user}, allow_redirects=False, ssl=False) as answer:
        assert answer.status == 302, await answer.text()
        returned = parse_qs(urlsplit(answer.headers["location"]).query)
    assert returned["state"] == ["s"]
    given = {"grant_type": "authorization_code", "code": returned["code"][0], "redirect_uri": REDIRECT}
    given |= {"client_id": client, "client_secret": "secret"}
    async with http.post(places["token_endpoint"], data=given, ssl=False) as answer:
        assert answer.status == 200, await answer.text()
        token: str = (await answer.json())["id_token"]
    return token
