"""What the operator publishes of the engines of a service, for gateways that read no pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from plimsoll.adapters.kube_client import received
from plimsoll.api import labels
from plimsoll.controllers.reconcile import engine_publication
from plimsoll.controllers.reconcile.engine_publication import left_out, published_engines, template_of
from plimsoll.core import codec
from plimsoll.core.errors import ObjectRejected
from plimsoll.core.routing.published_engines import MAX_PUBLISHED, PodState, PublishedEngines
from plimsoll.resources import objects
from tests import builders
from tests.controllers.single_service import KEY, SingleService

Object = dict[str, Any]
PARENT = builders.service(tiers={"serve": {}})
DELETED = {"deletionTimestamp": "2026-06-01T00:00:00Z"}


def engine(name: str, revision: str = "r1", owner: str = "", **meta: Any) -> Object:
    """A pod of the tier. owner: its ReplicaSet."""
    made = builders.pod(PARENT, "serve", name, conditions=[{"type": "Ready", "status": "True"}])
    made["metadata"] |= {"uid": f"uid-{name}", **meta}
    made["metadata"]["labels"] |= {labels.REVISION: revision}
    if owner:
        made["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": owner, "uid": "rs", "controller": True}]
    return made


def workload(pod: Object) -> Object:
    """A Deployment with the template of a pod."""
    meta = {"labels": pod["metadata"]["labels"]}
    return {
        "kind": "Deployment",
        "metadata": {"name": "chat-serve", "labels": {labels.ROLE: "serve"}},
        "spec": {"template": {"metadata": meta, "spec": pod.get("spec", {})}},
    }


def test_pods_of_the_present_template_are_not_published() -> None:
    """So that a start or an end of an engine needs no write."""
    one, two = engine("chat-serve-a-11111", owner="chat-serve-a"), engine("chat-serve-a-22222", owner="chat-serve-a")
    found = published_engines([workload(one)], [one, two, engine("chat-serve-a-33333", **DELETED)], [])
    assert found == PublishedEngines({"serve": template_of(one)})
    assert found.current["serve"].hands_over


def test_former_template_is_published_for_its_replica_set() -> None:
    old, new = engine("chat-serve-a-11111", "r1", "chat-serve-a"), engine("chat-serve-b-11111", "r2", "chat-serve-b")
    found = published_engines([workload(new)], [old, new], [])
    assert found.others == {"chat-serve-a": template_of(old)}
    assert found.template_of("serve", "chat-serve-a-zzzzz", "unknown") == template_of(old)
    assert found.template_of("serve", "chat-serve-c-zzzzz", "unknown") == template_of(new)
    assert found.template_of("prefill", "chat-prefill-c-zzzzz", "unknown") is None


@pytest.mark.parametrize("owner", ["", f"{'a' * 70}-hash"], ids=["no ReplicaSet", "a name that was cut"])
def test_pod_whose_name_has_no_replica_set_is_published_by_uid(owner: str) -> None:
    old, new = engine("chat-serve-0", "r1", owner), engine("chat-serve-1", "r2")
    found = published_engines([workload(new)], [old, new], [])
    assert found.others == {"uid-chat-serve-0": template_of(old), "uid-chat-serve-1": template_of(new)}
    assert found.template_of("serve", "chat-serve-0", "uid-of-its-successor") is None, "it may have either template"
    alike = published_engines([workload(new)], [new], [])
    assert alike.template_of("serve", "chat-serve-0", "uid-of-its-successor") == template_of(new)


def test_leader_of_several_pods_does_not_hand_over() -> None:
    leader = builders.group_pod(builders.service(tiers={"serve": {"nodes": 2}}), "chat-serve-0")
    leader["metadata"]["labels"][labels.SET_NAME] = "chat-serve"
    assert not template_of(leader).hands_over
    group = builders.leader_worker_set(builders.service(tiers={"serve": {"nodes": 2}}))
    assert not published_engines([group], [], []).current["serve"].hands_over


@pytest.mark.parametrize(
    ("reason", "meta", "state"),
    [
        ("PreemptionByScheduler", DELETED, PodState.AT_ONCE),
        ("EvictionByEvictionAPI", DELETED, PodState.DRAINED_NODE),
        ("EvictionByEvictionAPI", {}, None),
        ("", DELETED | {"deletionGracePeriodSeconds": 30}, PodState.AT_ONCE),
        ("", DELETED | {"deletionGracePeriodSeconds": 625}, None),
    ],
    ids=["preempted", "evicted", "not deleted yet", "short grace", "full grace"],
)
def test_reason_why_a_pod_leaves_is_published(reason: str, meta: Object, state: PodState | None) -> None:
    going = engine("chat-serve-a-11111", **meta)
    going["spec"] = {"terminationGracePeriodSeconds": 625}
    going["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": reason})
    found = published_engines([workload(going)], [going], [])
    assert found.pods == ({} if state is None else {"uid-chat-serve-a-11111": state})


def test_earlier_pods_and_unplaced_roles_are_published() -> None:
    waiting = engine("chat-serve-a-11111")
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    worker = engine("chat-serve-0-1")
    del worker["metadata"]["labels"][labels.ROLE]
    found = published_engines([workload(waiting)], [waiting, worker], [engine("old"), worker])
    assert found.unplaced == ("serve",)
    assert found.pods == {"uid-old": PodState.EARLIER}
    assert codec.decode(PublishedEngines, codec.encode(found)) == found


def test_engines_beyond_the_bound_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_publication, "MAX_PUBLISHED", 10)
    new = workload(engine("x", "new"))
    pods = [engine(f"chat-serve-{n}-1", f"r{n}", f"chat-serve-{n}") for n in range(15)]
    found = published_engines([new], pods, [])
    assert len(found.others) == 10
    assert left_out(found, pods) == 5
    assert found.template_of("serve", "chat-serve-x-1", "") is None
    few = published_engines([new], pods[:10], [])
    assert left_out(few, pods[:10]) == 0
    assert few.template_of("serve", "chat-serve-x-1", "") == few.current["serve"]


def test_earlier_engines_beyond_the_bound_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve another model; what the name of a pod does not say is published by uid."""
    monkeypatch.setattr(engine_publication, "MAX_PUBLISHED", 10)
    own = engine("chat-serve-a-1", "new", "chat-serve-a")
    earlier = [engine(f"old-{n}", "r1") for n in range(11)]
    found = published_engines([workload(own)], [own], earlier)
    assert len(found.pods) == 10
    assert [found.template_of("serve", f"old-{n}", f"uid-old-{n}") for n in range(11)] == [None] * 11
    assert found.template_of("serve", "chat-serve-a-2", "") == template_of(own)


@pytest.mark.parametrize("length", [40, 63, 253], ids="names of {} characters".format)
def test_engines_at_the_bound_are_within_the_size_of_an_object(length: int) -> None:
    """Of a larger object processes keep no engines at all."""
    new = workload(engine("x", "new"))
    owners = [f"{n:04d}".ljust(length, "x") for n in range(MAX_PUBLISHED)]
    leaving = {"deletionGracePeriodSeconds": 1, **DELETED}
    pods = [engine(f"{owner}-1", owner[:63], owner, **leaving, uid=owner[:36]) for owner in owners]
    for pod in pods:
        pod["spec"] = {**pod.get("spec", {}), "terminationGracePeriodSeconds": 600}
    found = published_engines([new], pods, [])
    made = objects.admission(PARENT, {"classes": ["x" * 63] * 32}, found)
    assert len(found.pods) == MAX_PUBLISHED
    assert received(made)["engines"] == made["engines"]
    assert left_out(found, pods) == MAX_PUBLISHED - len(found.others)
    assert len(found.others) == MAX_PUBLISHED or length > 40


@pytest_asyncio.fixture
async def running() -> AsyncIterator[SingleService]:
    made = SingleService(0.0, tiers={"serve": {"maxReplicas": 9}})
    await made.run(3)
    yield made
    await made.delete()


def engines_of(service: SingleService) -> PublishedEngines:
    found = service.cache.get(labels.ADMISSION_KIND, KEY)
    assert found is not None
    assert not found.get("limits")
    return codec.decode(PublishedEngines, found["engines"])


async def test_service_without_slo_publishes_its_engines(running: SingleService) -> None:
    deployment = running.deployment("serve")
    assert deployment is not None
    template = deployment["spec"]["template"]
    assert engines_of(running).current == {"serve": template_of(template)}
    assert template_of(template).revision


async def test_template_is_published_before_the_workload_gets_it(
    running: SingleService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pod of it that appears while the operator is down would count as one of the former template."""
    before, apply = running.deployment("serve"), running.kube.apply

    async def refuse(obj: Object, *arguments: Any, **options: Any) -> Object:
        if obj["kind"] == labels.ADMISSION_KIND:
            raise ObjectRejected("no", 403)
        return await apply(obj, *arguments, **options)

    monkeypatch.setattr(running.kube, "apply", refuse)
    running.edit("engine", {"args": ["--max-model-len=4096"]})
    with pytest.raises(Exception, match="no"):
        await running._reconciler.reconcile(KEY)
    assert running.deployment("serve") == before
    monkeypatch.undo()
    await running._reconciler.reconcile(KEY)
    assert running.deployment("serve") != before
    assert engines_of(running).current["serve"].max_model_len == 4096


async def test_event_says_that_engines_are_left_out(running: SingleService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_publication, "MAX_PUBLISHED", 0)
    running.edit("engine", {"args": ["--max-model-len=4096"]})
    await running._reconciler.reconcile(KEY)
    (event,) = [one for one in running.kube.events if one["reason"] == "EnginesLeftOut"]
    assert event["message"].startswith("1 of the engines get no requests, because more differ from")


async def test_invalid_spec_keeps_engines_published(running: SingleService) -> None:
    """Its engines of the last valid spec run on. The object is gone, as after an upgrade, or was deleted."""
    before = engines_of(running)
    published = running.cache.get(labels.ADMISSION_KIND, KEY)
    assert published is not None
    running.cache.remove(published)
    running.edit("model", {"name": ""})
    await running._reconciler.reconcile(KEY)
    assert running.conditions["Stalled"] == ("True", "InvalidSpec")
    assert engines_of(running) == before
    assert before.current


async def test_invalid_spec_publishes_engines_that_leave(running: SingleService) -> None:
    """The pod is of the Deployment's template, on a drained node."""
    running.edit("model", {"name": ""})
    await running._reconciler.reconcile(KEY)
    template = running.deployment("serve")["spec"]["template"]
    pod = next(iter(running.cache.children("Pod", KEY)))
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    meta = {**pod["metadata"], **DELETED, "labels": {**template["metadata"]["labels"], **pod["metadata"]["labels"]}}
    running.cache.put({**pod, "metadata": meta, "spec": template["spec"], "status": {"conditions": [evicted]}})
    deployment = running.deployment("serve")
    await running._reconciler.reconcile(KEY)
    assert engines_of(running).pods == {meta["uid"]: PodState.DRAINED_NODE}
    assert running.deployment("serve") == deployment


async def test_invalid_spec_without_workloads_publishes_nothing() -> None:
    made = SingleService(0.0, model={"name": ""}, tiers={"serve": {}})
    await made._reconciler.reconcile(KEY)
    assert made.conditions["Stalled"] == ("True", "InvalidSpec")
    assert made.cache.get(labels.ADMISSION_KIND, KEY) is None
