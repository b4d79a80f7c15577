"""The closed set of refusals: status, shape, and when a client may come back."""

from __future__ import annotations

from random import Random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.admission.retry_advice import UNKNOWN_TIME, advise_retry
from plimsoll.gateway.errors import (
    STATUS_BY_REASON,
    ErrorResponse,
    Rejection,
    RejectionReason,
    from_header,
    to_header,
    to_response,
)


def test_status_covers_every_reason() -> None:
    assert STATUS_BY_REASON.keys() == set(RejectionReason)


START_OR_QUOTA = {RejectionReason.MODEL_STARTING, RejectionReason.QUOTA_EXCEEDED}


@pytest.mark.parametrize("reason", RejectionReason)
@pytest.mark.parametrize("eta", [None, 0.2, 45.0, 95.0, 500.0])
def test_response_says_whether_to_retry(reason: RejectionReason, eta: float | None) -> None:
    reply = to_response(
        Rejection(reason, "Words.", "model", advise_retry(eta, is_time_known=reason in START_OR_QUOTA)), Random(1)
    )
    assert reply.status == STATUS_BY_REASON[reason]
    assert reply.fits_ext_authz == (reply.status in (400, 401, 403, 404, 413, 429))
    error = orjson.loads(reply.body)["error"]
    assert error["message"].startswith("Words.")
    assert (error["param"], error["code"]) == ("model", reason.value)
    assert reply.headers["x-plimsoll-reason"] == reason.value
    scheme, _, detail = reply.headers.get("www-authenticate", "").partition(" ")
    assert scheme == ("Bearer" if reply.status == 401 else "")
    assert detail == ('error="invalid_token"' if reason is RejectionReason.INVALID_TOKEN else "")
    wait, never = reply.headers.get("retry-after"), reply.headers.get("x-should-retry")
    assert never in (None, "false")
    if wait is None:
        assert never
    else:
        assert reply.status in (429, 503)
        assert int(wait) >= 1
        assert bool(never) == (int(wait) > 60), "SDKs do not wait longer, and would retry at once"
        assert reply.retry_after_s == (None if never else float(wait))


@pytest.mark.parametrize(
    ("reason", "eta", "wait", "expected_eta"),
    [
        (RejectionReason.OVERLOADED, 0.2, "1", "1"),
        (RejectionReason.MODEL_STARTING, 41.2, "42", "42"),
        (RejectionReason.MODEL_STARTING, 95.0, "60", "95"),
        (RejectionReason.MODEL_STARTING, 120.2, "121", "121"),
        (RejectionReason.MODEL_STARTING, 3601.0, None, "3601"),
        (RejectionReason.OVERLOADED, 121.0, None, "121"),
        (RejectionReason.DEADLINE, 5.0, None, "5"),
    ],
)
def test_response_eta_bounds_retry_after(
    reason: RejectionReason, eta: float, wait: str | None, expected_eta: str
) -> None:
    retry = advise_retry(eta, is_time_known=reason in START_OR_QUOTA)
    headers = to_response(Rejection(reason, "Words.", retry=retry), Random(1)).headers
    assert headers.get("retry-after") == wait
    assert headers["x-plimsoll-eta"] == expected_eta


def test_response_unknown_eta_is_spread() -> None:
    random = Random(1)
    waits = {
        to_response(Rejection(RejectionReason.MODEL_STARTING, "Words.", retry=UNKNOWN_TIME), random).headers[
            "retry-after"
        ]
        for _ in range(500)
    }
    assert waits == {str(seconds) for seconds in range(10, 31)}


@given(st.text())
def test_response_round_trips_through_header(message: str) -> None:
    reply = ErrorResponse(503, {"retry-after": "1"}, {"message": message, "type": "t", "param": None, "code": "c"})
    value = to_header(reply)
    assert value.isascii()
    assert "\n" not in value
    assert from_header(value) == reply


@given(st.text())
def test_from_header_rejects_other_values(value: str) -> None:
    with pytest.raises(ValueError, match="not an error response"):
        from_header(value)


@pytest.mark.parametrize(
    "reason", [RejectionReason.OVERLOADED, RejectionReason.MODEL_STARTING, RejectionReason.NO_ENDPOINT]
)
@pytest.mark.parametrize("eta", [None, 5.0])
def test_response_no_retry_sets_x_should_retry_false(reason: RejectionReason, eta: float | None) -> None:
    retry = advise_retry(eta, is_time_known=reason in START_OR_QUOTA, sdk_limit_s=0.0)
    headers = to_response(Rejection(reason, "Words.", retry=retry), Random(1)).headers
    assert headers["x-should-retry"] == "false"
    is_time_known = eta is not None and reason is RejectionReason.MODEL_STARTING
    assert headers.get("retry-after") == ("5" if is_time_known else None)
