"""The admission.k8s.io/v1 protocol: from an AdmissionReview to its answer.

An unexpected error lets the change through, because a fault of the operator must not keep anyone from working.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from plimsoll.adapters.kube_client import received
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.controllers.webhook.validation import ValidationResult
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
Validator = Callable[[Object, Object | None], ValidationResult]  # of the new and the old object

log = ServiceLog(__name__)

API_VERSION: Final = "admission.k8s.io/v1"
KIND: Final = "AdmissionReview"
MAX_MESSAGE_CHARS: Final = 4096
_REVIEWED_OPERATIONS: Final = ("CREATE", "UPDATE")


class MalformedReview(ValueError):
    """A request that is no AdmissionReview, so that there is nothing to answer."""


def answer(review: object, validator: Validator) -> Object:
    """Return the answer to an AdmissionReview, whatever `validator` raises. Raises MalformedReview."""
    request = value_at(review, "request")
    uid = value_at(request, "uid")
    if not isinstance(request, dict) or not isinstance(uid, str) or not uid:
        raise MalformedReview("not an AdmissionReview: request.uid is missing")
    namespace, name = (str(request.get(field) or "") for field in ("namespace", "name"))
    try:
        found = _validate(request, validator)
    except Exception:
        log.exception((namespace, name), "unexpected error in the admission webhook; the change is let through")
        operator_metrics.OPERATOR_ADMISSION_REVIEWS.labels("failed").inc()
        found = None
    response: Object = {"uid": uid, "allowed": True}
    if found is not None:
        response |= _outcome(found)
        operator_metrics.OPERATOR_ADMISSION_REVIEWS.labels(_result(found)).inc()
        if found.errors:
            log.info((namespace, name), "change refused by the admission webhook", errors="; ".join(found.errors))
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _validate(request: Object, validator: Validator) -> ValidationResult:
    new = request.get("object")
    is_service = value_at(request, "resource", "resource") == labels.PLURAL and not request.get("subResource")
    if not is_service or request.get("operation") not in _REVIEWED_OPERATIONS or not isinstance(new, dict):
        return ValidationResult()
    old = request.get("oldObject")
    return validator(_complete(new, request), _complete(old, request) if isinstance(old, dict) else None)


def _complete(obj: Object, request: Object) -> Object:
    """The normalised object, with the namespace of the request where it has none of its own."""
    found = received({"apiVersion": labels.API_VERSION, "kind": labels.KIND} | obj)
    found["metadata"] = {"namespace": str(request.get("namespace") or "")} | found["metadata"]
    return found


def _outcome(found: ValidationResult) -> Object:
    warnings: Object = {"warnings": list(found.warnings)} if found.warnings else {}
    if not found.errors:
        return warnings
    message = "; ".join(found.errors)[:MAX_MESSAGE_CHARS]
    status = {"code": HTTPStatus.FORBIDDEN.value, "reason": "Forbidden", "message": message}
    return {"allowed": False, "status": status, **warnings}


def _result(found: ValidationResult) -> str:
    return "refused" if found.errors else "warned" if found.warnings else "allowed"
