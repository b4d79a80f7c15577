"""InferenceObjectives as names of classes: which class they name, for whom, and what is logged of useless ones."""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.slo import Slo
from plimsoll.gateway.admission_policy import AdmissionPolicy
from plimsoll.gateway.app import GatewayProcess
from plimsoll.gateway.identity import Authenticator
from plimsoll.gateway.objectives import ObjectiveStore
from plimsoll.gateway.picker import Picker
from plimsoll.gateway.service_catalog import ServiceCatalog
from plimsoll.gateway.settings import PickerSettings, TrustedHeaders
from plimsoll.gateway.watch_cache import WATCHED_RESOURCES
from plimsoll.telemetry.gateway_metrics import GATEWAY
from tests.gateway.endpoint_picker_harness import body_message, first_message, serve
from tests.gateway.file_source import FileSource
from tests.gateway.kube_objects import CatalogOfPods, Object, split, with_healthy
from tests.gateway.picker_harness import engine_names, service_with_slo

OBJECTIVE_HEADER = "x-gateway-inference-objective"
NAMES = ("default", "high", "batch")
CLASSES: Object = {
    "classes": [{"name": "default"}, {"name": "high", "priority": 10}, {"name": "batch", "priority": -10}]
}


def objective(name: str, pool: object = "chat", priority: object = None, **reference: object) -> Object:
    spec: Object = {"poolRef": {"name": pool, **reference}}
    if priority is not None:
        spec["priority"] = priority
    return {"metadata": {"namespace": "team", "name": name}, "spec": spec}


def store_of(*objectives: Object) -> ObjectiveStore:
    store = ObjectiveStore("team")
    store.apply(WatchEvent("SYNC", objects=objectives))
    return store


def build(catalog: CatalogOfPods, *services: Object, pods: tuple[Object, ...] = ()) -> ServiceCatalog:
    plain, admissions = split(services)
    known = catalog.set(plain, pods, admissions)
    return with_healthy(known, {key: {e.address for e in s.serving_endpoints} for key, s in known.services.items()})


def value(name: str, **labels: str) -> float:
    return GATEWAY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("priority", "expected"),
    [(100, "high"), (10, "high"), (9, "default"), (0, "default"), (-1, "batch"), (-10, "batch"), (-99, "batch")],
)
def test_priority_names_highest_class_up_to_it(priority: int, expected: str) -> None:
    slo = Slo(0.95, 1.0, 0.0, 0.05)
    classes = (ClassPolicy("default", 0, slo), ClassPolicy("high", 10, slo), ClassPolicy("batch", -10, slo))
    policy = AdmissionPolicy(classes, objectives={"theirs": priority})
    assert policy.class_of(b"theirs").name == expected
    assert not policy.is_unknown(b"theirs")
    assert policy.is_unknown(b"typo")
    assert not policy.is_unknown(b"")


def test_class_of_the_name_comes_before_an_objective() -> None:
    slo = Slo(0.95, 1.0, 0.0, 0.05)
    policy = AdmissionPolicy((ClassPolicy("default", 0, slo), ClassPolicy("high", 10, slo)), objectives={"high": 0})
    assert policy.class_of(b"high").name == "high"


def test_default_class_is_taken_among_equals() -> None:
    slo = Slo(0.95, 1.0, 0.0, 0.05)
    policy = AdmissionPolicy((ClassPolicy("other", 0, slo), ClassPolicy("default", 0, slo)), objectives={"theirs": 3})
    assert policy.class_of(b"theirs").name == "default"


def test_objectives_follow_the_watch() -> None:
    store = store_of(objective("first", priority=5), objective("second"))
    assert store.by_service() == {"team/chat": {"first": 5, "second": 0}}
    store.apply(WatchEvent("MODIFIED", objective("first", "other", 7)))
    store.apply(WatchEvent("DELETED", objective("second")))
    assert store.by_service() == {"team/other": {"first": 7}}


@pytest.mark.parametrize(
    ("useless", "reason"),
    [
        (objective("theirs", "typo"), "spec.poolRef.name: no InferenceService typo in namespace team"),
        (objective("theirs", "plain"), "InferenceService plain has no spec.slo, so it has no classes"),
        (objective("theirs", kind="Service"), "names inference.networking.k8s.io/Service, not"),
        (objective("theirs", None), "spec.poolRef.name is missing"),
        (objective("theirs", priority=True), "spec.priority is True, not an integer"),
    ],
    ids=["unknown pool", "no classes", "other kind", "no name", "no integer"],
)
def test_useless_objective_is_counted_and_logged_once(
    useless: Object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = service_with_slo("plain")
    del plain["spec"]["slo"]
    catalog = build(CatalogOfPods(), service_with_slo(admission=CLASSES, classes=NAMES), plain)
    store = store_of(useless, objective("good"))
    with caplog.at_level(logging.WARNING):
        store.report(catalog)
        store.report(catalog)
    [line] = [record.message for record in caplog.records]
    assert line.startswith("InferenceObjective team/theirs is ignored: ")
    assert reason in line
    assert value("plimsoll_gateway_inference_objectives", state="ignored") == 1
    assert value("plimsoll_gateway_inference_objectives", state="used") == 1


def test_changed_objective_changes_the_class_at_once() -> None:
    catalog = CatalogOfPods()
    build(catalog, service_with_slo(admission=CLASSES, classes=NAMES))
    for priority, expected in ((10, "high"), (-10, "batch")):
        catalog.builder.set_objectives(store_of(objective("theirs", priority=priority)).by_service())
        policy = catalog.builder.update({}, {}, {}).services["team/chat"].policy
        assert policy is not None
        assert policy.class_of(b"theirs").name == expected
    catalog.builder.set_objectives({})
    policy = catalog.builder.update({}, {}, {}).services["team/chat"].policy
    assert policy is not None
    assert policy.is_unknown(b"theirs")


@pytest.mark.parametrize(
    ("named", "expected", "unknown"),
    [("urgent", "high", 0), ("nightly", "batch", 0), ("high", "high", 0), ("typo", "default", 1), ("", "default", 0)],
)
async def test_objective_of_a_header_decides_the_class(named: str, expected: str, unknown: int) -> None:
    """Through the endpoint picker, as a gateway of another product asks it."""
    catalog = CatalogOfPods()
    catalog.builder.set_objectives(
        store_of(objective("urgent", priority=50), objective("nightly", priority=-5)).by_service()
    )
    picker = Picker(Random(1), "gateway-0", Authenticator(trusted=TrustedHeaders()))
    picker.set_catalog(build(catalog, service_with_slo(admission=CLASSES, classes=NAMES), pods=engine_names(1)))
    before = value("plimsoll_gateway_unknown_classes_total", service="team/chat")
    async with serve(picker=picker) as server:
        await server.ask(first_message({OBJECTIVE_HEADER: named} if named else None), body_message())
        [forwarded] = picker.admission._forwarded.values()
        assert forwarded.request.request_class == expected
    assert value("plimsoll_gateway_unknown_classes_total", service="team/chat") - before == unknown


def test_gateway_is_ready_once_objectives_are_known(tmp_path: Path) -> None:
    settings = PickerSettings(directory=tmp_path, namespace="team", inference_objectives=True)
    gateway = GatewayProcess(settings, FileSource(tmp_path / "none"))
    gateway._ads._loop.close()  # it is not started
    for resource, _ in WATCHED_RESOURCES:
        gateway._watch_cache.apply(resource, None, WatchEvent("SYNC"))
    assert "InferenceObjectives" in gateway.not_ready_reason()
    assert gateway._objectives is not None
    gateway._objectives.apply(WatchEvent("SYNC"))
    assert "InferenceObjectives" not in gateway.not_ready_reason()
