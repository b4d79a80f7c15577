"""The closed set of the picker's rejections, each with its status, error body and retry headers.

Problem: SDKs decide by response headers whether and when they retry. One SDK ignores a `Retry-After` above 60 s and
retries after 0.4 s. All SDKs retry a 504 at once. Without any header they retry within a second.

Idea: a reason has one status on all routes; only the JSON follows the route's API. Every 429, 503 and 504 carries
`Retry-After` of at most 60 s or `x-should-retry: false`, as `core.admission.retry_advice` decides, and the estimated
time in `x-plimsoll-eta`. Every other 4xx carries `x-should-retry: false`. An ext_authz response cannot be a 503 or 504,
because Envoy would count it as a failure of the picker. Such a rejection travels in a header to the picker's own
listener, which writes the response.

What is rejected is decided elsewhere: CONTRIBUTING.md ("Where is it?") lists who decides about which 429.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

import msgspec
import orjson

from plimsoll.core.admission.retry_advice import NO_RETRY, RetryAdvice
from plimsoll.core.ports import NO_DEMAND_REASONS
from plimsoll.gateway.api_routes import ErrorShape
from plimsoll.gateway.gateway_limit import GatewayLimit


class RejectionReason(StrEnum):
    """Why a request is rejected. The value is the error's `code` and the `x-plimsoll-reason` header."""

    INVALID_JSON = "invalid_json"
    INVALID_ENCODING = "invalid_encoding"
    INVALID_FORM = "invalid_form"
    DUPLICATE_KEY = "duplicate_key"
    MISSING_API_KEY = "missing_api_key"
    INVALID_API_KEY = "invalid_api_key"
    EXPIRED_API_KEY = "expired_api_key"
    INVALID_TOKEN = "invalid_token"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    MODEL_REQUIRED = "model_required"
    MODEL_NOT_FOUND = "model_not_found"
    ROUTE_NOT_SERVED = "route_not_served"
    UNSUPPORTED_FIELD = "unsupported_field"
    INVALID_TIMEOUT = "invalid_timeout"
    BODY_TOO_LARGE = "body_too_large"
    REQUEST_TOO_LARGE = "request_too_large"
    OVERLOADED = "overloaded"
    ADAPTERS_BUSY = "adapters_busy"
    QUOTA_EXCEEDED = "quota_exceeded"
    MODEL_STARTING = "model_starting"
    NO_ENDPOINT = "no_endpoint"
    PREFILL_UNAVAILABLE = "prefill_unavailable"
    GATEWAY_BUSY = "gateway_busy"
    GATEWAY_FULL = "gateway_full"
    DEADLINE_TOO_SHORT = "deadline_too_short"
    DEADLINE = "deadline_exceeded"

    @property
    def is_demand(self) -> bool:
        """Whether capacity would have served the request. If not, it must not add replicas."""
        return self.value not in NO_DEMAND_REASONS


STATUS_BY_REASON = {
    RejectionReason.INVALID_JSON: 400,
    RejectionReason.INVALID_ENCODING: 400,
    RejectionReason.INVALID_FORM: 400,
    RejectionReason.DUPLICATE_KEY: 400,
    RejectionReason.MISSING_API_KEY: 401,
    RejectionReason.INVALID_API_KEY: 401,
    RejectionReason.EXPIRED_API_KEY: 401,
    RejectionReason.INVALID_TOKEN: 401,
    RejectionReason.MODEL_NOT_ALLOWED: 403,
    RejectionReason.RATE_LIMIT_EXCEEDED: 429,
    RejectionReason.MODEL_REQUIRED: 400,
    RejectionReason.MODEL_NOT_FOUND: 404,
    RejectionReason.ROUTE_NOT_SERVED: 404,
    RejectionReason.UNSUPPORTED_FIELD: 400,
    RejectionReason.INVALID_TIMEOUT: 400,
    RejectionReason.BODY_TOO_LARGE: 413,
    RejectionReason.REQUEST_TOO_LARGE: 400,
    RejectionReason.OVERLOADED: 429,
    RejectionReason.ADAPTERS_BUSY: 429,
    RejectionReason.QUOTA_EXCEEDED: 429,
    RejectionReason.MODEL_STARTING: 503,
    RejectionReason.NO_ENDPOINT: 503,
    RejectionReason.PREFILL_UNAVAILABLE: 503,
    RejectionReason.GATEWAY_BUSY: 503,
    RejectionReason.GATEWAY_FULL: 429,
    RejectionReason.DEADLINE_TOO_SHORT: 400,
    RejectionReason.DEADLINE: 504,
}
# Anthropic's error types. SDKs decide by status and headers whether to retry, and show the type.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Rejection:
    """One rejection.

    `param` names the invalid field of the request body. `retry` says when the client should come back. `headers` are
    further response headers, in lower case. `code` is the error code in the body if SDKs know it by another word than
    the reason. `limit` is the bound of this gateway pod that the request would exceed.
    """

    reason: RejectionReason
    message: str
    param: str | None = None
    retry: RetryAdvice = NO_RETRY
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None
    limit: GatewayLimit | None = None


class ErrorResponse(msgspec.Struct, frozen=True):
    """A rejection as an HTTP response."""

    status: int
    headers: dict[str, str]
    error: dict[str, str | None]
    shape: ErrorShape = ErrorShape.OPENAI

    @property
    def body(self) -> bytes:
        return orjson.dumps({"error": self.error} if self.shape is ErrorShape.OPENAI else self._anthropic())

    def _anthropic(self) -> dict[str, object]:
        is_limit = self.error["code"] in (RejectionReason.QUOTA_EXCEEDED, RejectionReason.RATE_LIMIT_EXCEEDED)
        error_type = "rate_limit_error" if is_limit else anthropic_error_type(self.status)
        return {"type": "error", "error": {"type": error_type, "message": self.error["message"]}}

    @property
    def retry_after_s(self) -> float | None:
        """The value of `Retry-After`, at most `MAX_RETRY_AFTER_S`. None if SDKs must not retry by themselves."""
        value = self.headers.get("retry-after")
        return None if value is None or "x-should-retry" in self.headers else float(value)

    @property
    def fits_ext_authz(self) -> bool:
        """Whether an ext_authz response can carry it. Envoy would count a 5xx there as a failure of the picker."""
        return self.status < 500


def anthropic_error_type(status: int) -> str:
    """Returns Anthropic's error type for a status."""
    return _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def to_response(rejection: Rejection, random: Random, shape: ErrorShape = ErrorShape.OPENAI) -> ErrorResponse:
    """Returns status, headers and error body of a rejection, in the shape of the route's API."""
    status = STATUS_BY_REASON[rejection.reason]
    headers = {"content-type": "application/json", "x-plimsoll-reason": rejection.reason.value, **rejection.headers}
    if status == 401:
        is_token = rejection.reason is RejectionReason.INVALID_TOKEN
        headers["www-authenticate"] = 'Bearer error="invalid_token"' if is_token else "Bearer"  # RFC 6750
    eta_s, message = rejection.retry.eta_s, rejection.message
    if status in (429, 503, 504) and eta_s is not None:
        headers["x-plimsoll-eta"] = str(math.ceil(eta_s))
    retry_after = rejection.retry.draw_retry_after_s(random.randint) if status in (429, 503) else None
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
        is_capped = rejection.retry.retryable and eta_s is not None and eta_s > retry_after
        message += f" Try again in {retry_after} s{', the longest wait that SDKs obey' if is_capped else ''}."
    if retry_after is None or not rejection.retry.retryable:
        headers["x-should-retry"] = "false"
    error_type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    error = {
        "message": message,
        "type": error_type,
        "param": rejection.param,
        "code": rejection.code or rejection.reason.value,
    }
    return ErrorResponse(status, headers, error, shape)


def to_header(response: ErrorResponse) -> str:
    """Returns the value of `x-plimsoll-error-response` for a response."""
    return base64.b64encode(msgspec.json.encode(response)).decode()


def from_header(value: str) -> ErrorResponse:
    """Returns the response in `x-plimsoll-error-response`. Raises ValueError for a value not made by `to_header`."""
    try:
        return msgspec.json.decode(base64.b64decode(value, validate=True), type=ErrorResponse)
    except ValueError as error:
        raise ValueError(f"x-plimsoll-error-response is not an error response of the picker: {error}") from error
