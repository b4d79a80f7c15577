"""What clients learn about the next engine while none is ready: the time that the operator expects, and no other."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.gateway.envoy.local_reply import local_reply_config
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import (
    START_UNIX_S,
    PickerHarness,
    engine_names,
    rejection_of,
    response_headers,
    service_with_slo,
)

NEXT_ENGINE = "x-plimsoll-next-engine-seconds"
ENGINE = pod("10.0.0.1:8000")


def with_status(obj: Object, next_ready_s: float | None = None, startup: str | None = None, **status: Any) -> Object:
    """The service with what its status says of the serve tier; next_ready_s is on the test's clock."""
    tier: Object = {}
    if next_ready_s is not None:
        due = datetime.fromtimestamp(START_UNIX_S + next_ready_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        tier["startingPods"] = f"1, next at {due}"
    return obj | {
        "status": {
            **obj.get("status", {}),
            "tiers": {"serve": tier},
            **({"recovery": startup} if startup else {}),
            **status,
        }
    }


def deleted(obj: Object) -> Object:
    ready = {"type": "Ready", "status": "False", "reason": "NamespaceTerminating"}
    return with_status(obj, 30.0, conditions=[ready])


def test_starting_without_slo_waits_for_next_engine() -> None:
    reply = rejection_of(PickerHarness(with_status(service(), 45.0)).send())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert (reply.headers["retry-after"], reply.headers["x-plimsoll-eta"]) == ("45", "45")
    assert reply.error["message"] == (
        "Model 'chat' is starting: none of its engines is ready yet. The next one is expected in 45 s."
        " Try again in 45 s."
    )


def test_starting_engine_beyond_a_minute_is_bounded() -> None:
    reply = rejection_of(PickerHarness(with_status(service(), 100.0)).send())
    assert (reply.headers["retry-after"], reply.headers["x-plimsoll-eta"]) == ("60", "100")
    assert reply.error["message"] == (
        "Model 'chat' is starting: none of its engines is ready yet. The next one is expected in 100 s."
        " Try again in 60 s, the longest wait that SDKs obey."
    )
    late = rejection_of(PickerHarness(with_status(service(), 600.0)).send())
    assert late.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("expected_s", [20, 50, 90, 600])
def test_later_start_than_admission_expects_moves_retry(expected_s: int) -> None:
    """The reservation of a client is due at the time that was expected when it came first."""
    obj = service_with_slo("chat", {"whenFull": "Shed"}, ready_at_s=7.0, ready_work=1.0)
    reply = rejection_of(PickerHarness(with_status(obj, expected_s)).send())
    assert f"The next one is expected in {expected_s} s." in str(reply.error["message"])
    assert reply.headers["retry-after"] == str(60 if expected_s == 90 else expected_s)
    assert reply.headers["x-plimsoll-eta"] == str(expected_s)
    assert ("x-should-retry" in reply.headers) is (expected_s == 600)


def test_later_reservation_outlasts_the_next_start() -> None:
    obj = service_with_slo("chat", {"whenFull": "Shed"}, ready_at_s=40.0, ready_work=1.0)
    reply = rejection_of(PickerHarness(with_status(obj, 20.0)).send())
    assert int(reply.headers["retry-after"]) >= 40


def test_local_reply_without_healthy_engine_uses_next_time() -> None:
    """Envoy has noticed the failure (flag UH) before the picker: it must not say "1 s" then."""
    mappers = json.dumps([m for m in local_reply_config(1)["mappers"] if '"UH"' in json.dumps(m)])
    assert mappers.count(f"%REQ({NEXT_ENGINE.upper()})%") >= 2


def test_passed_time_of_late_engine_is_not_repeated() -> None:
    """The engine is late and the operator has published nothing since: a second from now is no better a guess."""
    late = service_with_slo("chat", {"whenFull": "Shed"}, ready_at_s=-5.0, ready_work=1.0)
    for obj in (late, with_status(service(), -5.0)):
        reply = rejection_of(PickerHarness(obj).send())
        assert (reply.status, reply.error["code"]) == (503, "model_starting")
        assert 10 <= int(reply.headers["retry-after"]) <= 30
        assert "expected" not in str(reply.error["message"])


def test_passed_time_leaves_the_later_engines() -> None:
    starts = ((-5.0, 1.0), (40.0, 2.0))
    late = service_with_slo("chat", {"whenFull": "Shed"}, ready_at_s=-5.0, ready_work=2.0, starts=starts)
    reply = rejection_of(PickerHarness(late).send())
    assert 40 <= int(reply.headers["retry-after"]) <= 60


async def test_queued_until_deadline_says_that_model_starts() -> None:
    obj = service_with_slo("chat", {"classes": [{"name": "default", "maxQueueTime": "20s"}]}, ready_work=1.0)
    harness = PickerHarness(obj)
    reply = harness.send_queued()
    harness.set_objects(with_status(obj, 65.0))
    harness.advance(21.0)
    found = rejection_of(reply)
    assert (found.status, found.error["code"]) == (503, "model_starting")
    assert found.error["message"] == (
        "The request waited 20 s. Model 'chat' is starting: none of its engines is ready yet. The next one is expected"
        " in 45 s. Try again in 45 s."
    )
    assert found.headers["x-plimsoll-eta"] == "45"
    assert found.headers["retry-after"] == "45"


@pytest.mark.parametrize("obj", [service(), service_with_slo("chat", ready_at_s=30.0, ready_work=1.0)])
def test_terminating_namespace_is_a_final_rejection(obj: Object) -> None:
    reply = rejection_of(PickerHarness(deleted(obj)).send())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "no_endpoint", "false")
    assert (
        reply.error["message"]
        == "Model 'chat' is being deleted with its namespace, and none of its engines is ready. Use another model."
    )
    assert "x-plimsoll-eta" not in reply.headers


def test_terminating_namespace_with_ready_engine_still_serves() -> None:
    sent = response_headers(PickerHarness(deleted(service()), pods=(ENGINE,)).send())
    assert sent["x-plimsoll-endpoint"] == "10.0.0.1:8000"


@pytest.mark.parametrize(
    ("next_ready_s", "startup", "expected"),
    [(45.0, "90s", "45"), (None, "40s", "40"), (None, "90s", "60"), (-5.0, "40s", "40")],
)
def test_only_engine_carries_time_of_next_one(next_ready_s: float | None, startup: str, expected: str) -> None:
    for obj in (service(), service_with_slo()):
        harness = PickerHarness(with_status(obj, next_ready_s, startup), pods=(ENGINE,))
        assert response_headers(harness.send())[NEXT_ENGINE] == expected


def test_only_engine_without_known_times_spreads_retries() -> None:
    sent = response_headers(PickerHarness(service(), pods=(ENGINE,)).send())
    assert 10 <= int(sent[NEXT_ENGINE]) <= 30


def test_several_engines_carry_no_time() -> None:
    for obj in (service(), service_with_slo()):
        assert NEXT_ENGINE not in response_headers(PickerHarness(obj, pods=engine_names(2)).send())


@pytest.mark.parametrize("startup", ["soon", 5, None, ["1s"]])
def test_unreadable_startup_time_counts_as_unknown(startup: Any) -> None:
    broken = with_status(service(), recovery=startup)
    sent = response_headers(PickerHarness(broken, pods=(ENGINE,)).send())
    assert 10 <= int(sent[NEXT_ENGINE]) <= 30


def not_ready(obj: Object, reason: str) -> Object:
    ready = {"type": "Ready", "status": "False", "reason": reason}
    return with_status(obj, conditions=[*obj.get("status", {}).get("conditions", []), ready])


def test_service_that_nothing_starts_is_a_final_rejection() -> None:
    """Without an SLO, or in another mode than Auto, no request starts an engine of a service with 0 replicas."""
    reply = rejection_of(PickerHarness(not_ready(service(), "ScaledToZero")).send())
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (503, "no_endpoint", "false")
    assert "retry-after" not in reply.headers
    assert reply.error["message"] == (
        "Model 'chat' has no engine and none is starting. Check the status of its InferenceService."
    )


@pytest.mark.parametrize(
    "reason", ["ImageUnavailable", "PodsRejected", "Unschedulable", "EngineFailing", "ConfigError"]
)
@pytest.mark.parametrize("made", [service, lambda: service_with_slo("chat", {"whenFull": "Shed"}, ready_work=1.0)])
def test_engine_that_cannot_start_is_not_called_starting(made: Any, reason: str) -> None:
    reply = rejection_of(PickerHarness(not_ready(made(), reason)).send())
    assert (reply.status, reply.error["code"]) == (503, "model_starting")
    assert str(reply.error["message"]).startswith(
        f"Model 'chat' has no ready engine: its InferenceService reports {reason}. Try again in "
    )
