"""Every refusal the picker can give: a closed set, with its status, OpenAI's error body and its retry headers.

Problem: SDKs decide by headers whether and when they come back. Above 60 s one of them ignores `Retry-After` and is
back after 0.4 s; all repeat a 504 at once; without any header they come back within a second.

Idea: every 429, 503 and 504 carries either `Retry-After` of at most 60 s or `x-should-retry: false`, and the true
time in `x-plimsoll-eta`; every other 4xx says that trying again does not help. ext_authz cannot say 503 or 504 (Envoy
would take these for the picker's own failure): such a refusal travels as a header to the picker's own listener and is
written there.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random

import msgspec
import orjson

LONGEST_WAIT = 60  # seconds; what every SDK honours
LONGEST_TWO_STEPS = 120  # seconds; told as one wait of 60 and what is then left
UNKNOWN_WAIT = (10, 30)  # seconds; spread, so that callers do not all come back at once


class Reason(StrEnum):
    """Why a request is refused; the value is the error's `code` and the `x-plimsoll-reason` header."""

    INVALID_JSON = "invalid_json"
    INVALID_ENCODING = "invalid_encoding"
    DUPLICATE_KEY = "duplicate_key"
    MODEL_REQUIRED = "model_required"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_TOO_LARGE = "body_too_large"
    REQUEST_TOO_LARGE = "request_too_large"
    OVERLOADED = "overloaded"
    QUOTA_EXCEEDED = "quota_exceeded"
    MODEL_STARTING = "model_starting"
    NO_ENDPOINT = "no_endpoint"
    GATEWAY_BUSY = "gateway_busy"
    DEADLINE = "deadline_exceeded"


STATUS = {
    Reason.INVALID_JSON: 400,
    Reason.INVALID_ENCODING: 400,
    Reason.DUPLICATE_KEY: 400,
    Reason.MODEL_REQUIRED: 400,
    Reason.MODEL_NOT_FOUND: 404,
    Reason.BODY_TOO_LARGE: 413,
    Reason.REQUEST_TOO_LARGE: 400,
    Reason.OVERLOADED: 429,
    Reason.QUOTA_EXCEEDED: 429,
    Reason.MODEL_STARTING: 503,
    Reason.NO_ENDPOINT: 503,
    Reason.GATEWAY_BUSY: 503,
    Reason.DEADLINE: 504,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refusal. eta_seconds: when the request could succeed, None if nobody knows; param: the field at fault.

    again: False where the client had better not come back, whatever the status.
    """

    reason: Reason
    message: str
    param: str | None = None
    eta_seconds: float | None = None
    again: bool = True


class Answer(msgspec.Struct, frozen=True):
    """A refusal as HTTP."""

    status: int
    headers: dict[str, str]
    error: dict[str, str | None]

    @property
    def body(self) -> bytes:
        return orjson.dumps({"error": self.error})

    @property
    def wait_s(self) -> float | None:
        """Seconds that the client is told to wait; None where it is told not to come back."""
        told = self.headers.get("retry-after")
        return None if told is None else float(told)

    @property
    def deniable(self) -> bool:
        """Can ext_authz say it? A 5xx there would count as the picker's failure."""
        return self.status < 500


def answer(refusal: Refusal, random: Random) -> Answer:
    """Status, headers and error of a refusal."""
    status = STATUS[refusal.reason]
    headers = {"content-type": "application/json", "x-plimsoll-reason": refusal.reason.value}
    if status in (429, 503, 504) and refusal.eta_seconds is not None:
        headers["x-plimsoll-eta"] = str(math.ceil(refusal.eta_seconds))
    wait = _wait(status, refusal.eta_seconds, random) if refusal.again else None
    message = refusal.message
    if wait is None:
        headers["x-should-retry"] = "false"
    else:
        headers["retry-after"] = str(wait)
        message += f" Try again in {wait} s."
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": refusal.param, "code": refusal.reason.value}
    return Answer(status, headers, error)


def _wait(status: int, eta_seconds: float | None, random: Random) -> int | None:
    """Seconds for `Retry-After`, or None where the client had better not come back."""
    if status not in (429, 503):
        return None
    if eta_seconds is None:
        return random.randint(*UNKNOWN_WAIT)
    if eta_seconds > LONGEST_TWO_STEPS:
        return None
    return min(LONGEST_WAIT, max(1, math.ceil(eta_seconds)))


def to_header(reply: Answer) -> str:
    """An answer as the value of `x-plimsoll-reply`."""
    return base64.b64encode(msgspec.json.encode(reply)).decode()


def from_header(value: str) -> Answer:
    """The answer in an `x-plimsoll-reply`. Raises ValueError for anything that `to_header` did not make."""
    try:
        return msgspec.json.decode(base64.b64decode(value, validate=True), type=Answer)
    except ValueError as error:
        raise ValueError(f"not an answer of the picker: {error}") from error
