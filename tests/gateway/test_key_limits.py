"""Limits of a key: requests and tokens per minute, and one gateway's share of them."""

from __future__ import annotations

import pytest

from plimsoll.gateway.errors import RejectionReason
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.key_limits import RATE_LIMIT_HEADERS, KeyLimits


def key(requests: int | None = None, tokens: int | None = None, name: str = "ci") -> Identity:
    return Identity(name, requests_per_minute=requests, tokens_per_minute=tokens)


def accepted(limits: KeyLimits, identity: Identity, count: int, now: float, tokens: int = 1) -> int:
    return sum(limits.take(identity, tokens, now) is None for _ in range(count))


def test_key_without_limits_is_never_limited() -> None:
    limits = KeyLimits()
    assert accepted(limits, key(), 10_000, 0.0) == 10_000
    assert limits.headers(key(), 0.0) == {}


def test_requests_of_a_minute_may_come_at_once() -> None:
    limits = KeyLimits()
    assert accepted(limits, key(requests=60), 100, 0.0) == 60
    assert accepted(limits, key(requests=60), 100, 10.0) == 10
    rejection = limits.take(key(requests=60), 1, 10.25)
    assert rejection is not None
    assert rejection.reason is RejectionReason.RATE_LIMIT_EXCEEDED
    assert rejection.retry.eta_s == pytest.approx(0.75)
    assert accepted(limits, key(requests=60, name="other"), 100, 10.25) == 60


def test_tokens_are_booked_and_may_go_below_zero() -> None:
    limits = KeyLimits()
    assert accepted(limits, key(tokens=1000), 3, 0.0, tokens=600) == 2
    rejection = limits.take(key(tokens=1000), 1, 0.0)
    assert rejection is not None
    assert "1000 tokens per minute" in rejection.message
    assert rejection.retry.eta_s == pytest.approx(12.0)
    assert rejection.headers["x-ratelimit-remaining-tokens"] == "0"
    assert rejection.headers["x-ratelimit-reset-tokens"] == "72s"


def test_one_request_books_all_its_tokens() -> None:
    limits = KeyLimits()
    assert limits.take(key(tokens=600), 6000, 0.0) is None
    for now, wait_s in ((30.0, 510.0), (539.0, 1.0)):
        rejection = limits.take(key(tokens=600), 1, now)
        assert rejection is not None
        assert rejection.retry.eta_s == pytest.approx(wait_s)
    assert limits.take(key(tokens=600), 1, 541.0) is None


@pytest.mark.parametrize("gateways", [1, 3])
def test_bucket_below_zero_is_kept_until_it_is_full(gateways: int) -> None:
    limits = KeyLimits()
    limits.gateways = lambda name: gateways
    identity = key(tokens=600)
    assert limits.take(identity, 6000, 0.0) is None
    for now in range(600 * gateways - 61):  # 200 of each 600 tokens are this gateway's, of three
        limits.expire(float(now))
    assert limits.headers(identity, 0.0) != {}
    limits.expire(700.0 * gateways)
    assert limits.headers(identity, 700.0 * gateways) == {}


@pytest.mark.parametrize("gateways", [2, 3])
def test_gateways_enforce_equal_shares(gateways: int) -> None:
    each = [KeyLimits() for _ in range(gateways)]
    for limits in each:
        limits.gateways = lambda name: gateways
    total = sum(accepted(limits, key(requests=60), 100, 0.0) for limits in each)
    assert total == 60
    refilled = sum(accepted(limits, key(requests=60), 100, 30.0) for limits in each)
    assert refilled == 30
    fresh = KeyLimits()
    fresh.gateways = lambda name: gateways
    fresh.take(key(requests=60), 1, 0.0)
    assert fresh.headers(key(requests=60), 0.0)["x-ratelimit-limit-requests"] == "60"
    assert fresh.headers(key(requests=60), 0.0)["x-ratelimit-remaining-requests"] == str(60 - gateways)


def test_headers_are_those_of_openai() -> None:
    limits = KeyLimits()
    identity = key(requests=10, tokens=1000)
    limits.take(identity, 250, 0.0)
    assert limits.headers(identity, 0.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "750",
        "x-ratelimit-reset-tokens": "15s",
    }
    assert set(limits.headers(identity, 0.0)) == set(RATE_LIMIT_HEADERS)


def test_idle_buckets_are_dropped_when_full() -> None:
    limits = KeyLimits()
    identity = key(requests=2)
    assert accepted(limits, identity, 3, 0.0) == 2
    limits.expire(59.0)
    assert limits.headers(identity, 0.0) != {}
    limits.expire(61.0)
    assert limits.headers(identity, 61.0) == {}
