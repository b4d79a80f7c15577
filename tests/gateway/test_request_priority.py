"""The priority of a class reaches the engine, which takes the lowest number first."""

from __future__ import annotations

from plimsoll.gateway.settings import TrustedHeaders
from tests.gateway.picker_harness import PickerHarness, engine_names, response_headers, service_with_slo

PRIORITY = "x-plimsoll-priority"
CLASS_HEADER = TrustedHeaders().request_class.decode()


def test_engine_gets_the_priority_of_the_class() -> None:
    admission = {"classes": [{"name": "chat", "priority": 100}, {"name": "batch", "priority": -5}]}
    world = PickerHarness(
        service_with_slo(admission=admission, classes=("chat", "batch"), batch=8), pods=engine_names(1)
    )
    sent = [world.send(headers={CLASS_HEADER: name}) for name in ("chat", "batch", "unknown")]
    assert [response_headers(reply)[PRIORITY] for reply in sent] == ["-100", "5", "5"]


def test_service_of_one_class_names_no_priority() -> None:
    world = PickerHarness(service_with_slo(batch=8), pods=engine_names(1))
    assert PRIORITY not in response_headers(world.send())
