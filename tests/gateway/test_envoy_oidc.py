"""Tokens of an OpenID Connect provider that is not ours: discovery, code flow, real Envoy, keys that it replaces."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.gateway.conftest import make_directory
from tests.gateway.kube_objects import pod
from tests.gateway.logged_gateway import LoggedGateway
from tests.gateway.oidc_provider import OidcProvider, clock_behind, discover, sign_in
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import wait_until

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the provider uses old names of its own library
]

SDK = Path(__file__).with_name("clients") / "with_keys.py"
CLIENT = "plimsoll"
USER = "alice@example.com"
CLAIMS = {"tenant": "org.name", "class": "llm_class", "models": "llm_models"}
OLD_S = 2 * 3600  # the provider's tokens are valid for an hour


class Protected:
    """A gateway that takes the tokens of a provider."""

    def __init__(self, stack: LoggedGateway, provider: OidcProvider) -> None:
        self.stack, self.provider = stack, provider

    async def token(self, client: str = CLIENT, user: str = USER) -> str:
        return await sign_in(self.stack.http, self.provider.url, client, user)

    async def ask(self, token: str, request_id: str = "any") -> tuple[int, str]:
        """Status and code of the error."""
        sent = {"authorization": f"Bearer {token}", "x-request-id": request_id}
        status, body, _ = await self.stack.ask_fully(sent=sent)
        return status, body.get("error", {}).get("code", "")

    async def wait_status(self, token: str, status: int) -> None:
        async def has_status() -> bool:
            return (await self.ask(token))[0] == status

        await wait_until(has_status, f"the token gets {status}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def protected(tmp_path_factory: object, quick_keys: None) -> AsyncIterator[Protected]:
    directory = make_directory(tmp_path_factory)
    provider = OidcProvider(directory / "provider")
    provider.add_user(USER, org={"name": "acme"}, llm_class="low", llm_models=["chat"])
    provider.add_user("bob@example.com", org={"name": "other"}, llm_models=["large"])
    issuer = {"issuer": provider.url, "audiences": [CLIENT], "jwksUri": f"{provider.url}/jwks", "claims": CLAIMS}
    issuers = json.dumps([{**issuer, "caBundle": provider.ca_bundle}])
    stack = LoggedGateway(directory, access_log=True, trust_identity_headers=False, jwt_issuers_json=issuers)
    try:
        engine = await stack.engine()
        made = service_with_slo(admission={"classes": [{"name": "high"}, {"name": "low"}]}, classes=("high", "low"))
        await stack.start([made], [pod(engine.address)])
        found = Protected(stack, provider)
        await found.wait_status(await found.token(), 200)
        yield found
    finally:
        await stack.shut_down()
        provider.stop()
        print(stack.log.read_text()[-4000:])


async def test_discovery_names_the_declared_issuer(protected: Protected) -> None:
    found = await discover(protected.stack.http, protected.provider.url)
    assert (found["issuer"], found["jwks_uri"]) == (protected.provider.url, f"{protected.provider.url}/jwks")


async def test_claims_become_tenant_and_class(protected: Protected) -> None:
    assert await protected.ask(await protected.token(), "signed-in") == (200, "")
    line = await protected.stack.line_of("signed-in")
    assert (line["tenant"], line["class"], line["model"]) == ("acme", "low", "chat")
    assert await protected.ask(await protected.token(user="bob@example.com")) == (403, "model_not_allowed")


async def test_token_of_another_client_gets_401(protected: Protected) -> None:
    assert await protected.ask(await protected.token(client="wiki")) == (401, "invalid_token")


async def test_expired_token_gets_401(protected: Protected) -> None:
    with clock_behind(OLD_S):
        old = await protected.token()
    status, body, _ = await protected.stack.ask_fully(sent={"authorization": f"Bearer {old}"})
    assert (status, body["error"]["code"]) == (401, "invalid_token")
    assert "expired at" in body["error"]["message"]


async def test_openai_sdk_uses_signed_in_token(protected: Protected) -> None:
    tokens = await protected.token(), await protected.token(client="wiki")
    command = (sys.executable, str(SDK), protected.stack.url, "chat", *tokens)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["answered", "AuthenticationError invalid_token"]


async def test_replaced_signing_key_is_followed(protected: Protected) -> None:
    before = await protected.token()
    protected.provider.rotate()
    after = await protected.token()
    await protected.wait_status(after, 200)
    await protected.wait_status(before, 401)
