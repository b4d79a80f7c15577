"""The object from which gateways read admission limits: written when it changes, made again, withdrawn with the SLO."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from plimsoll.adapters.kube_client import INFERENCESERVICEADMISSIONS, Resource
from plimsoll.api import labels
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.errors import NotFound, ObjectRejected
from plimsoll.resources import object_meta
from tests.controllers.conftest import ControllerHarness
from tests.controllers.single_service import DELETE, KEY, SingleService

Object = dict[str, Any]

SPEC: Object = {"slo": {"ttft": "2s", "tpot": "50ms"}, "tiers": {"serve": {"maxReplicas": 9}}}


@pytest_asyncio.fixture
async def service() -> AsyncIterator[SingleService]:
    """A service under load, with published limits."""
    made = SingleService(20.0, **SPEC)
    await made.run(25)
    assert made.limits is not None
    yield made
    await made.delete()


def admission(service: SingleService) -> Object:
    found = service.cache.get(labels.ADMISSION_KIND, KEY)
    assert found is not None
    return found


async def test_limits_are_in_an_object_that_the_service_owns(service: SingleService) -> None:
    found = admission(service)
    assert object_meta.owner_uid(found) == service.object["metadata"]["uid"]
    assert found["metadata"]["name"] == service.object["metadata"]["name"]
    assert found["metadata"]["labels"] == object_meta.service_labels(KEY[1])
    limits = codec.decode(AdmissionLimits, found["limits"])
    assert limits.cost_model is not None
    assert limits.shares == {"gw-1": limits.cost_model.batch}
    assert "admission" not in service.status
    document = service.scaler.explain(KEY)
    assert document is not None
    assert document["admission"] == found["limits"]


async def test_unchanged_limits_are_not_written_again(service: SingleService) -> None:
    await service.run(60)
    unchanged = 0
    for _ in range(20):
        before = admission(service)
        service._dirty = True  # a reconcile for any other reason
        await service.run(1)
        after = admission(service)
        if after["limits"] == before["limits"]:
            unchanged += 1
            assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert unchanged > 10


async def test_deleted_or_edited_limits_are_restored(service: SingleService) -> None:
    before = service.limits
    service.cache.remove(admission(service))
    service._dirty = True
    await service.run(1)
    assert service.limits == before
    service.cache.put({**admission(service), "limits": {"version": 0}})
    service._dirty = True
    await service.run(1)
    assert service.limits == before


async def test_removed_slo_withdraws_limits_and_added_slo_publishes(service: SingleService) -> None:
    service.edit("slo", DELETE)
    await service.run(2)
    assert service.limits is None
    service.edit("slo", SPEC["slo"])
    await service.run(3)
    assert service.limits is not None


def figures(part: Any) -> Iterator[float]:
    """All numbers of a document, in its order."""
    if isinstance(part, dict | list):
        for one in part.values() if isinstance(part, dict) else part:
            yield from figures(one)
    elif isinstance(part, int | float):
        yield part


async def test_restarted_operator_keeps_limits_until_its_first_report(service: SingleService) -> None:
    before = service.limits
    service.start_operator()
    await service._reconciler.reconcile(KEY)
    assert service.limits == before
    await service.run(1)
    assert service.limits is not None
    kept = pytest.approx(list(figures((before or {})["costModel"])), rel=0.01)
    assert list(figures(service.limits["costModel"])) == kept, "a new process has no better model"


async def test_slo_removed_while_operator_was_away_withdraws_limits(service: SingleService) -> None:
    service.edit("slo", DELETE)
    service.start_operator()
    await service.run(2)
    assert service.limits is None


async def test_limits_in_status_of_earlier_release_are_cleared(service: SingleService) -> None:
    old = {**service.object, "status": {**service.status, "admission": {"version": 4}}}
    service.cache.put(old)
    service.start_operator()
    await service._reconciler.reconcile(KEY)
    assert "admission" not in service.status


async def test_rejected_object_does_not_block_limits(service: SingleService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's Service under a name of ours must not leave gateways with old limits."""

    stored = service.kube.get

    async def get(resource: Resource, namespace: str | None, name: str) -> Object:
        if resource.kind == labels.KIND:
            return await stored(resource, namespace, name)
        if resource.kind == "Service":
            return {"kind": "Service", "metadata": {"name": name, "namespace": namespace, "uid": "foreign"}}
        raise NotFound(name)

    monkeypatch.setattr(service.kube, "get", get)
    for kind in ("Service", labels.ADMISSION_KIND):
        for child in service.cache.children(kind, KEY):
            service.cache.remove(child)
    with pytest.raises(Exception, match="is not owned by this InferenceService"):
        await service._reconciler.reconcile(KEY)
    assert service.limits is not None


async def test_rejected_limits_are_reported_as_stalled(service: SingleService, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = service.kube.apply

    async def refuse(obj: Object, *arguments: Any, **options: Any) -> Object:
        if obj["kind"] == labels.ADMISSION_KIND:
            raise ObjectRejected("exceeded quota: count/inferenceserviceadmissions.plimsoll.dev", 403)
        return await apply(obj, *arguments, **options)

    monkeypatch.setattr(service.kube, "apply", refuse)
    service.cache.remove(admission(service))
    with pytest.raises(Exception, match="exceeded quota"):
        await service._reconciler.reconcile(KEY)
    assert service.conditions["Stalled"] == ("True", "ApplyRejected")


@pytest.mark.api
async def test_limits_are_stored_and_stay_as_written(world: ControllerHarness) -> None:
    parent = await world.create(slo={"ttft": "2s", "tpot": "50ms"}, tiers={"serve": {"minReplicas": 1}})
    first = await world.reconcile_once("chat")
    await world.sync(first.store)
    await first.reconciler.reconcile((world.namespace, "chat"))
    stored = await world.kube.get(INFERENCESERVICEADMISSIONS, world.namespace, "chat")
    assert object_meta.owner_uid(stored) == parent["metadata"]["uid"]
    assert codec.decode(AdmissionLimits, stored["limits"]).classes == ("default",)
    assert "admission" not in (await world.service())["status"]
    writes = world.kube.writes
    await world.sync(first.store)
    await first.reconciler.reconcile((world.namespace, "chat"))
    assert world.kube.writes == writes
