"""Tokens of an OpenID Connect issuer through real Envoy: who may enter, as whom, and what happens when keys change."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from plimsoll.gateway.envoy import bootstrap, jwt
from plimsoll.gateway.settings import ApiKeyMode
from tests.gateway.api_key_secrets import bearer, key_of, key_secret
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod, service
from tests.gateway.oidc_issuer import LIFETIME_S, OidcIssuer, SigningKey, encode
from tests.gateway.stack import GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SDK = Path(__file__).with_name("clients") / "with_keys.py"
CLAIMS = {"tenant": "org.name", "class": "class", "models": "models"}


class Locked:
    """A gateway that takes tokens of an issuer and API keys, and its one engine."""

    def __init__(self, stack: GatewayStack, engine: FakeEngine, issuer: OidcIssuer) -> None:
        self.stack, self.engine, self.issuer = stack, engine, issuer

    async def ask(self, token: str, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        return await self.stack.ask_fully(sent={"authorization": f"Bearer {token}", **headers})

    async def status(self, token: str) -> int:
        return (await self.ask(token))[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: object, quick_keys: None) -> AsyncIterator[Locked]:
    directory = make_directory(tmp_path_factory)
    issuer = await OidcIssuer(directory / "issuer").start()
    issuers = json.dumps([issuer.config(claims=CLAIMS)])
    stack = GatewayStack(
        directory, api_keys=ApiKeyMode.REQUIRED, trust_identity_headers=False, jwt_issuers_json=issuers
    )
    try:
        engine = await stack.engine()
        stack.write_secrets(key_secret("ci"))
        await stack.start([service(), service("large")], [pod(engine.address)])
        await stack.wait_routable(engine)
        yield Locked(stack, engine, issuer)
    finally:
        await stack.shut_down()
        await issuer.stop()
        print(stack.log.read_text()[-4000:])


async def test_valid_token_enters_and_engines_never_see_it(locked: Locked) -> None:
    token = locked.issuer.token(org={"name": "acme"}, models=["*"])
    assert await locked.status(token) == 200
    head = locked.engine.received[-1].headers
    assert not head.keys() & {b"authorization", jwt.PAYLOAD_HEADER.encode()}
    assert not any(part.encode() in value for value in head.values() for part in token.split("."))
    assert token.split(".")[1] not in locked.stack.log.read_text()


async def test_invalid_tokens_get_401(locked: Locked) -> None:
    issuer, now, seen = locked.issuer, int(time.time()), len(locked.engine.received)
    stranger = SigningKey(issuer._directory, "stranger")
    forged = SigningKey(issuer._directory, "forged")
    forged.kid = issuer.key.kid
    good = issuer.claims(models="*")
    unsigned = ".".join(encode(json.dumps(part).encode()) for part in ({"alg": "none", "typ": "JWT"}, good))
    changed = issuer.token(models="chat").split(".")
    changed[1] = encode(json.dumps(good).encode())
    tokens = {
        "expired": issuer.token(models="*", exp=now - 2 * LIFETIME_S),
        "not yet valid": issuer.token(models="*", nbf=now + 2 * LIFETIME_S),
        "no expiry": issuer.token(models="*", exp=None),
        "wrong audience": issuer.token(models="*", aud="other"),
        "wrong issuer": issuer.token(models="*", iss="https://other.example"),
        "unknown key id": stranger.sign(good),
        "key of another": forged.sign(good),
        "no signature": f"{unsigned}.",
        "other algorithm": issuer.key.sign(good, alg="HS256"),
        "changed claims": ".".join(changed),
        "large": issuer.token(models="*", aud="other", pad="x" * 30_000),
    }
    for name, token in tokens.items():
        status, body, reply_headers = await locked.ask(token)
        assert (name, status, body["error"]["code"]) == (name, 401, "invalid_token")
        assert reply_headers["www-authenticate"] == 'Bearer error="invalid_token"'
        assert reply_headers["x-should-retry"] == "false"
        assert ("expired at" in body["error"]["message"]) == (name == "expired")
    huge = issuer.token(models="*", pad="x" * 80_000)
    async with locked.stack.ask(sent={"authorization": f"Bearer {huge}"}) as answer:
        assert answer.status == 431
    assert len(locked.engine.received) == seen


async def test_claims_header_of_client_is_ignored(locked: Locked) -> None:
    forged = encode(json.dumps(locked.issuer.claims(models="*")).encode())
    sent = {jwt.PAYLOAD_HEADER: forged}
    assert (await locked.stack.ask_fully(sent=sent))[0] == 401
    async with locked.stack.http.get(f"{locked.stack.url}/v1/models", headers=sent) as answer:
        assert answer.status == 401
    narrow = locked.issuer.token(models=["team/large"])
    assert (await locked.ask(narrow, **sent))[0] == 403


async def test_anthropic_route_answers_in_its_shape(locked: Locked) -> None:
    body = {"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {locked.issuer.token(aud='other')}"}
    async with locked.stack.http.post(f"{locked.stack.url}/v1/messages", json=body, headers=headers) as answer:
        found = await answer.json()
    assert (answer.status, found["type"], found["error"]["type"]) == (401, "error", "authentication_error")


async def test_models_claim_limits_models(locked: Locked) -> None:
    for models, allowed in (("chat", True), (["team/chat"], True), (["large"], False), (None, False), ([], False)):
        status, body, _ = await locked.ask(locked.issuer.token(models=models))
        assert status == (200 if allowed else 403)
        assert allowed or body["error"]["code"] == "model_not_allowed"
        assert allowed or "token of 'alice'" in body["error"]["message"]
    headers = {"authorization": f"Bearer {locked.issuer.token(models='large')}"}
    async with locked.stack.http.get(f"{locked.stack.url}/v1/models", headers=headers) as answer:
        assert [card["id"] for card in (await answer.json())["data"]] == ["large"]
    status, body, _ = await locked.ask(locked.issuer.token(models={"chat": True}))
    assert (status, body["error"]["code"]) == (401, "invalid_token")


async def test_keys_and_tokens_are_both_accepted(locked: Locked) -> None:
    assert (await locked.stack.ask_fully(sent=bearer("ci")))[0] == 200
    assert (await locked.stack.ask_fully(sent={"x-api-key": key_of("ci")}))[0] == 200
    status, body, _ = await locked.stack.ask_fully()
    assert (status, body["error"]["code"]) == (401, "missing_api_key")
    assert "an API key or a token" in body["error"]["message"]
    assert (await locked.stack.ask_fully(sent=bearer("unknown")))[1]["error"]["code"] == "invalid_api_key"


async def test_large_body_with_token_enters(locked: Locked) -> None:
    token = locked.issuer.token(models="*")
    for sent, status in ((token, 200), (locked.issuer.token(aud="other"), 401)):
        headers = {"authorization": f"Bearer {sent}"}
        assert (await locked.stack.ask_fully(sent=headers, pad="x" * 100_000))[0] == status


async def test_openai_sdk_authenticates_with_token(locked: Locked) -> None:
    tokens = locked.issuer.token(models="*"), locked.issuer.token(aud="other")
    command = (sys.executable, str(SDK), locked.stack.url, "chat", *tokens)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().splitlines() == ["answered", "AuthenticationError invalid_token"]


async def test_new_signing_key_is_accepted_and_outage_opens_nothing(locked: Locked) -> None:
    issuer, old = locked.issuer, locked.issuer.token(models="*")
    new = issuer.rotate("second")
    token = new.sign(issuer.claims(models="*"))

    async def is_accepted() -> bool:
        return await locked.status(token) == 200

    await wait_until(is_accepted, "the new key is known")
    assert await locked.status(old) == 200
    issuer.fails, fetches = True, issuer.fetches
    await wait_until(lambda: issuer.fetches >= fetches + 3, "fetches fail")
    assert (await locked.status(token), await locked.status(old)) == (200, 200)
    unknown = SigningKey(issuer._directory, "third").sign(issuer.claims(models="*"))
    assert await locked.status(unknown) == 401

    async def is_counted() -> bool:
        async with locked.stack.http.get(f"{locked.stack.picker_url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        name = "plimsoll_gateway_jwks_fetch_failures_total "
        return next(float(line.split()[1]) for line in lines if line.startswith(name)) >= 1

    await wait_until(is_counted, "the failures are counted")
    issuer.fails = False
    issuer.published = [new.public()]

    async def is_refused() -> bool:
        return await locked.status(old) == 401

    await wait_until(is_refused, "the old key is withdrawn")


async def test_too_large_key_set_is_not_read(locked: Locked) -> None:
    issuer = locked.issuer
    [known] = issuer.published
    issuer.padding, fetches = "x" * bootstrap.MAX_FETCHED_BYTES, issuer.fetches
    token = issuer.rotate("large").sign(issuer.claims(models="*"))
    await wait_until(lambda: issuer.fetches >= fetches + 3, "the fetch is tried again, as after a failure")
    assert await locked.status(token) == 401
    issuer.padding = ""

    async def is_accepted() -> bool:
        return await locked.status(token) == 200

    await wait_until(is_accepted, "the key is known")
    issuer.published = [known]


async def test_without_picker_nothing_passes(locked: Locked) -> None:
    """Runs last: the picker does not come back."""
    token, seen = locked.issuer.token(models="*"), len(locked.engine.received)
    assert locked.stack.picker is not None
    locked.stack.picker.kill()
    locked.stack.picker.wait()
    status, body, _ = await locked.ask(token)
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert len(locked.engine.received) == seen


async def test_tokens_alone_need_no_keys_and_stay_closed(tmp_path_factory: object) -> None:
    """Without API keys a token is required, also while the issuer has never answered or has another certificate."""
    directory = make_directory(tmp_path_factory)
    issuer = await OidcIssuer(directory / "issuer").start()
    other = await OidcIssuer(directory / "other").start()
    inline = SigningKey(directory, "inline")
    issuers = [
        issuer.config(caBundle=other.ca_bundle),
        {"issuer": "inline", "audiences": ["plimsoll"], "jwks": json.dumps({"keys": [inline.public()]})},
    ]
    stack = GatewayStack(directory, jwt_issuers_json=json.dumps(issuers))
    try:
        engine = await stack.engine()
        await stack.start([service()], [pod(engine.address)])
        await stack.wait_routable(engine)
        locked = Locked(stack, engine, issuer)
        assert await locked.status(issuer.token()) == 401
        assert issuer.fetches == 0
        assert await locked.status(inline.sign(issuer.claims(iss="inline"))) == 200
        assert await locked.status(inline.sign(issuer.claims())) == 401
        for sent, code in (({}, "missing_api_key"), (bearer("ci"), "invalid_token")):
            status, body, _ = await stack.ask_fully(sent=sent)
            assert (status, body["error"]["code"]) == (401, code)
        async with stack.http.get(f"{stack.url}/healthz") as answer:
            assert answer.status == 200
    finally:
        await stack.shut_down()
        await issuer.stop()
        await other.stop()
        print(stack.log.read_text()[-4000:])
