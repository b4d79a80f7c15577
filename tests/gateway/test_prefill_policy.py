"""Remote prefill by the service's policy: the deadline follows the prediction, and strict services reject."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.prefill_policy import MAX_DEADLINE_S, MIN_DEADLINE_S, PREDICTION_FACTOR, deadline_s
from plimsoll.gateway.request_context import ForeignRequest
from plimsoll.gateway.request_parser import parse_body
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import PickerHarness, rejection_of, response_headers, service_with_slo
from tests.gateway.test_admission_manager import TRANSFER

DECODE, PREFILL = pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill")
OTHER_REVISION = pod("10.0.0.3:8000", role="prefill", revision="r2")
LONG, SHORT = "x" * 4000, "x" * 40
SECONDS, REQUIRED = "x-plimsoll-prefill-seconds", "x-plimsoll-prefill-required"


def strict(obj: Object) -> Object:
    obj["spec"]["whenPrefillUnavailable"] = "Reject"
    return obj


def with_slo(**fields: float) -> Object:
    return service_with_slo(batch=20, transfer=TRANSFER, move_token_s=fields.get("move_token_s"))


def admitted(first_token_s: float) -> AdmissionDecision:
    return AdmissionDecision("r", AdmissionOutcome.ADMITTED, "10.0.0.1:8000", first_token_s=first_token_s)


@pytest.mark.parametrize(
    ("predicted_s", "expected_s"),
    [(0.01, MIN_DEADLINE_S), (20.0, 20.0 * PREDICTION_FACTOR), (1e6, MAX_DEADLINE_S), (0.0, None), (math.inf, None)],
)
def test_deadline_follows_the_predicted_time(predicted_s: float, expected_s: float | None) -> None:
    assert deadline_s(admitted(predicted_s)) == expected_s


def test_engine_gets_the_deadline_of_its_prompt() -> None:
    world = PickerHarness(with_slo(), pods=(DECODE, PREFILL))
    sent = response_headers(world.send(prompt=LONG))
    assert float(sent[SECONDS]) >= MIN_DEADLINE_S
    assert REQUIRED not in sent


def test_service_without_slo_leaves_the_engines_deadline() -> None:
    sent = response_headers(PickerHarness(service(), pods=(DECODE, PREFILL)).send(prompt=LONG))
    assert sent["x-plimsoll-prefill"] == "10.0.0.2:8000"
    assert SECONDS not in sent


@pytest.mark.parametrize("made", [service, with_slo], ids=["without slo", "with slo"])
def test_strict_service_rejects_without_a_prefill_engine(made: Callable[[], Object]) -> None:
    """A prompt of less than one block, and several sequences, are never prefilled remotely."""
    world = PickerHarness(strict(made()), pods=(DECODE, OTHER_REVISION))
    rejected = rejection_of(world.send(prompt=LONG))
    assert rejected.status == 503
    assert rejected.error["code"] == "prefill_unavailable"
    assert "retry-after" in {name.lower() for name in rejected.headers}
    for served in (world.send(prompt=SHORT, pad=""), world.send(prompt=LONG, n=2)):
        assert response_headers(served)["x-plimsoll-endpoint"] == "10.0.0.1:8000"


@pytest.mark.parametrize("made", [service, with_slo], ids=["without slo", "with slo"])
def test_strict_service_tells_the_engine(made: Callable[[], Object]) -> None:
    sent = response_headers(PickerHarness(strict(made()), pods=(DECODE, PREFILL)).send(prompt=LONG))
    assert (sent["x-plimsoll-prefill"], sent[REQUIRED]) == ("10.0.0.2:8000", "1")


def test_strict_service_prefills_remotely_where_local_is_cheaper() -> None:
    sent = response_headers(
        PickerHarness(strict(with_slo(move_token_s=1e-2)), pods=(DECODE, PREFILL)).send(prompt=LONG)
    )
    assert sent["x-plimsoll-prefill"] == "10.0.0.2:8000"


def test_strict_service_without_any_engine_is_starting() -> None:
    assert rejection_of(PickerHarness(strict(service()), pods=(PREFILL,)).send(prompt=LONG)).error["code"] != (
        "prefill_unavailable"
    )


@pytest.mark.parametrize("made", [service, with_slo], ids=["without slo", "with slo"])
def test_strict_service_uses_paired_engines_in_a_rollout(made: Callable[[], Object]) -> None:
    """The new decode engine is idle, but the prefill engine of its revision is not ready yet."""
    idle = pod("10.0.0.4:8000", role="decode", revision="r2")
    world = PickerHarness(strict(made()), pods=(idle, DECODE, PREFILL))
    for _ in range(4):
        sent = response_headers(world.send(prompt=LONG))
        assert (sent["x-plimsoll-endpoint"], sent["x-plimsoll-prefill"]) == ("10.0.0.1:8000", "10.0.0.2:8000")


def test_strict_service_counts_tokens_without_prefill_engine() -> None:
    world = PickerHarness(strict(service()), pods=(DECODE,))
    body = json.dumps({"model": "chat", "prompt": LONG}).encode()
    reply = world.picker.check(body, {b"x-plimsoll-request-id": b"t1"}, world.clock.now(), ROUTES["/tokenize"])
    assert response_headers(reply)["x-plimsoll-endpoint"] == "10.0.0.1:8000"


@pytest.mark.parametrize("prompt", [LONG, SHORT])
def test_strict_service_without_decode_engine_is_starting(prompt: str) -> None:
    """A routable prefill engine is no reason to name the lack of one."""
    harness = PickerHarness(strict(service()), pods=(PREFILL,))
    assert rejection_of(harness.send(prompt=prompt)).error["code"] in ("model_starting", "no_endpoint")


def test_strict_service_leaves_no_subset_without_prefill() -> None:
    """The engine that another gateway allows has no prefill engine of its revision."""
    allowed = pod("10.0.0.4:8000", role="decode", revision="r2")
    world = PickerHarness(strict(service()), pods=(allowed, DECODE, PREFILL))
    body = json.dumps({"model": "chat", "prompt": LONG}).encode()
    for address, code in (("10.0.0.4:8000", "prefill_unavailable"), ("10.0.0.1:8000", None)):
        headers, foreign = {b"x-plimsoll-request-id": address.encode()}, ForeignRequest(frozenset({address}))
        identity = world.picker.authenticate(headers)
        assert isinstance(identity, Identity)
        route = ROUTES["/v1/completions"]
        reply = world.picker.decide(
            parse_body(body, route), body, headers, identity, world.clock.now(), route, foreign=foreign
        )
        if code:
            assert rejection_of(reply).error["code"] == code
        else:
            assert response_headers(reply)["x-plimsoll-prefill"] == "10.0.0.2:8000"
