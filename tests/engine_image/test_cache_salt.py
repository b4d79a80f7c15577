"""The salt by which an engine tells the KV blocks of tenants apart, from the gateway's header into the body."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.request_body import parse, with_cache_salt
from tests.engine_image.middleware_harness import CHAT_PATH, COMPLETIONS, completion_engine, make_harness

SALT = {"x-plimsoll-cache-salt": "5a17"}


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/score"])
async def test_salt_of_the_gateway_is_in_the_body(tmp_path: Path, path: str) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as one:
        await one.send({"model": "a", "input": "b"}, path, SALT)
        await one.send({"model": "a", "input": "b"}, path)
    assert one.engine.requests == [{"model": "a", "input": "b", "cache_salt": "5a17"}, {"model": "a", "input": "b"}]


async def test_salt_of_a_client_reaches_no_other_tenant(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as one:
        for own in ("5a18", "mine", "", None, 7, ["5a18"]):
            await one.send({"model": "a", "cache_salt": own}, CHAT_PATH, SALT)
        await one.send({"model": "a", "cache_salt": "mine"}, CHAT_PATH, {"x-plimsoll-cache-salt": "other"})
        await one.send({"model": "a", "cache_salt": "mine"}, CHAT_PATH)
    salts = [request["cache_salt"] for request in one.engine.requests]
    assert salts[2:6] == ["5a17"] * 4
    assert salts[7] == "mine"
    assert len({*salts[:2], salts[2], *salts[6:]}) == 5
    assert all(len(salt) == 64 for salt in (*salts[:2], salts[6]))


@pytest.mark.parametrize(
    "body",
    [
        b'{"cache_salt":"x","cache_salt":"5a18"}',
        b'{"cache\\u005fsalt":"5a18"}',
        b'{"cache_salt":"\\ud800"}',
        '{"cache_salt":"5a18"}'.encode("utf-16"),
        b"{}",
    ],
)
def test_no_spelling_keeps_the_clients_salt(body: bytes) -> None:
    assert parse(with_cache_salt(body, "5a17"))["cache_salt"] not in ("x", "5a18")


@pytest.mark.parametrize("body", [b"[]", b"1", b"no json", b""])
def test_body_that_is_no_object_is_left_to_the_engine(body: bytes) -> None:
    assert with_cache_salt(body, "5a17") is body
