"""Limits come in an object of their own, by a watch of its own: whatever it brings, no gate opens that was closed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plimsoll.core.admission.publication import FORMAT_VERSION
from tests.gateway.kube_objects import LIMITS, Object, admission, split, without_limits
from tests.gateway.picker_harness import PickerHarness, engine_names, service_with_slo


def deleted(obj: Object) -> Object:
    """A service of the same name that existed before."""
    return {**obj, "metadata": {**obj["metadata"], "uid": "old"}}


LOST: dict[str, Callable[[Object], list[Object]]] = {
    "absent": lambda obj: [without_limits(obj)],
    "of a deleted service": lambda obj: [admission(deleted(obj), obj[LIMITS])],
    "without an owner": lambda obj: [admission(obj, obj[LIMITS], ownerReferences=[])],
    "of a newer format": lambda obj: [admission(obj, {"version": FORMAT_VERSION + 1}, resourceVersion="12")],
    "broken": lambda obj: [admission(obj, obj[LIMITS] | {"shares": 3}, resourceVersion="12")],
}


@pytest.mark.parametrize("lost", LOST)
async def test_unusable_limits_leave_the_last_ones_in_force(lost: str) -> None:
    """Two watches deliver the service and its limits: neither may open the gate when the other lags or restarts."""
    obj = service_with_slo(batch=1)
    world = PickerHarness(obj, pods=engine_names(1))
    world.send()
    queued = world.send_queued()
    [plain], _ = split([obj])
    world.set_api_objects([plain], LOST[lost](obj), engine_names(1))
    assert not queued.done()
    reported = world.service()["object"]
    assert reported["admission_active"]
    assert (reported["limits_version"], bool(reported["parse_error"])) == (
        ("12", True) if lost in UNREADABLE else ("", False)
    )
    fresh = PickerHarness()
    fresh.set_api_objects([plain], LOST[lost](obj), engine_names(1))
    assert not fresh.service()["object"]["admission_active"], "a new gateway has no earlier limits"
    world.set_api_objects([plain], [admission(obj, obj[LIMITS], resourceVersion="13")], engine_names(1))
    assert world.service()["object"]["limits_version"] == "13"
    queued.cancel()


UNREADABLE = ("of a newer format", "broken")


async def test_limits_of_a_deleted_service_end_with_it() -> None:
    """A new service of the same name, or one that had no SLO in between, starts without limits."""
    obj = service_with_slo(batch=1)
    [plain], limits = split([obj])
    successor = {**plain, "metadata": {**plain["metadata"], "uid": "next"}}
    without = {**plain, "spec": {name: part for name, part in plain["spec"].items() if name != "slo"}}
    for services, admissions in (([successor], limits), ([without], limits), ([], limits)):
        world = PickerHarness(obj, pods=engine_names(1))
        world.set_api_objects(services, admissions, engine_names(1))
        assert world.picker.admission.services == {}
        if services == [successor]:
            continue
        world.set_api_objects([plain], [], engine_names(1))
        assert world.picker.admission.services == {}
