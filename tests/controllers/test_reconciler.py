"""Rounds against a real API server: what is made, put back, left alone and told."""

from __future__ import annotations

import pytest

from plimsoll.adapters.kube_client import BY_KIND, DEPLOYMENTS, INFERENCESERVICES, Resource
from plimsoll.api import labels
from plimsoll.controllers.autoscale.tracked_service import IDLE_INTERVAL_SECONDS
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.core.errors import BackendUnavailable, Conflict
from tests.controllers.conftest import NOW_S, ControllerHarness

pytestmark = pytest.mark.api

NAMESPACES = Resource("", "v1", "namespaces", "Namespace")
EVERYTHING = {
    "Deployment": ["chat-decode", "chat-prefill"],
    "Service": ["chat-decode", "chat-prefill"],
    "PodDisruptionBudget": ["chat-decode", "chat-prefill"],
    "ServiceAccount": ["chat-engine"],
    "NetworkPolicy": ["chat-engine"],
}


async def reasons(world: ControllerHarness, name: str = "chat") -> dict[str, str]:
    status = (await world.service(name))["status"]
    return {c["type"]: c["reason"] for c in status["conditions"]}


async def test_reconcile_creates_all_objects_and_status(world: ControllerHarness) -> None:
    await world.create()
    await world.reconcile_once("chat")
    assert {kind: await world.names(kind) for kind in EVERYTHING} == EVERYTHING
    status = (await world.service())["status"]
    assert status["modelNames"] == ["chat", f"{world.namespace}/chat"]
    assert status["tiers"]["decode"]["summary"] == "0/1"
    assert (await reasons(world)).keys() == {"Ready", "Reconciling"}


async def test_service_account_exists_before_the_first_workload(world: ControllerHarness) -> None:
    """A ReplicaSet that once missed the account keeps that as its reason, whatever rejects its pods later."""
    await world.create()
    await world.reconcile_once("chat")
    versions = {}
    for resource in (BY_KIND["ServiceAccount"], DEPLOYMENTS):
        items, _ = await world.kube.list(resource, world.namespace)
        versions[resource] = [int(item["metadata"]["resourceVersion"]) for item in items]
    assert max(versions[BY_KIND["ServiceAccount"]]) < min(versions[DEPLOYMENTS])


async def test_reconcile_terminating_namespace_is_in_the_status(world: ControllerHarness) -> None:
    """A namespace that is deleted keeps the service until its pods have ended, and no Deployment says so."""
    await world.create()
    operator = await world.reconcile_once("chat")
    uid = (await world.kube.get(NAMESPACES, None, world.namespace))["metadata"]["uid"]
    await world.kube.delete(NAMESPACES, None, world.namespace, uid)
    await world.reconcile_once("chat", operator)
    assert (await reasons(world))["Ready"] == "NamespaceTerminating"
    assert await world.events() == []


async def test_reconcile_second_round_writes_nothing(world: ControllerHarness) -> None:
    await world.create()
    operator = await world.reconcile_once("chat")
    await world.reconcile_once("chat", operator)
    before = world.kube.writes
    for _ in range(3):
        await world.reconcile_once("chat", operator)
    assert world.kube.writes == before


async def test_reconcile_five_restarts_add_no_event_or_change(world: ControllerHarness) -> None:
    await world.create()
    world.view = GatewayView(1, 1, {(world.namespace, "chat"): 1})
    await world.reconcile_once("chat")
    versions = {
        kind: [(await world.get(kind, n))["metadata"]["resourceVersion"] for n in names]
        for kind, names in EVERYTHING.items()
    }
    events = await world.events()
    assert events == ["Ready"]
    for _ in range(5):
        await world.reconcile_once("chat")
    assert await world.events() == events
    after = {
        kind: [(await world.get(kind, n))["metadata"]["resourceVersion"] for n in names]
        for kind, names in EVERYTHING.items()
    }
    assert after == versions


@pytest.mark.parametrize("after", [False, True], ids=["before the write", "after the write"])
async def test_reconcile_killed_at_any_write_converges(world: ControllerHarness, after: bool) -> None:
    world.view = GatewayView(1, 1, {(world.namespace, f"s{n}"): 1 for n in range(20)})
    killed = 0
    for n in range(1, 20):
        await world.create(f"s{n}")
        world.kube.break_at(n, after=after)
        try:
            await world.reconcile_once(f"s{n}")
        except BackendUnavailable:
            killed += 1
        world.kube.writes_until_fault = None
        await world.reconcile_once(f"s{n}")
        made = {kind: [x for x in await world.names(kind) if x.startswith(f"s{n}-")] for kind in EVERYTHING}
        assert made == {k: [x.replace("chat", f"s{n}") for x in v] for k, v in EVERYTHING.items()}
        assert (await reasons(world, f"s{n}"))["Ready"] == "Serving"
    assert killed >= 10
    assert await world.events() == ["Ready"] * 19


async def test_reconcile_reverts_edits_and_keeps_foreign_fields(world: ControllerHarness) -> None:
    await world.create()
    operator = await world.reconcile_once("chat")
    await world.edit(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": "chat-decode",
                "namespace": world.namespace,
                "annotations": {"team.example.com/note": "mine"},
            },
            "spec": {"replicas": 5, "paused": True, "progressDeadlineSeconds": 7},
        }
    )
    for _ in range(2):
        await world.reconcile_once("chat", operator)
    operator.scaler.tick(NOW_S + IDLE_INTERVAL_SECONDS)  # the service itself is as before, so it was idle
    await operator.scaler.finish_writes()
    live = await world.get("Deployment", "chat-decode")
    assert live["spec"]["replicas"] == 1
    assert live["spec"]["progressDeadlineSeconds"] == 3600
    assert live["spec"]["paused"] is True
    assert live["metadata"]["annotations"]["team.example.com/note"] == "mine"
    assert "ScaledDown" in await world.events()


async def test_reconcile_recreates_deleted_child(world: ControllerHarness) -> None:
    await world.create()
    operator = await world.reconcile_once("chat")
    live = await world.get("Deployment", "chat-decode")
    await world.kube.delete(DEPLOYMENTS, world.namespace, "chat-decode", live["metadata"]["uid"])
    await world.reconcile_once("chat", operator)
    assert (await world.get("Deployment", "chat-decode"))["metadata"]["uid"] != live["metadata"]["uid"]


@pytest.mark.parametrize("made_anew", [False, True])
async def test_reconcile_creates_nothing_for_deleted_service(world: ControllerHarness, made_anew: bool) -> None:
    """The watch of services is late: the garbage collector has deleted what the operator would create again."""
    await world.create()
    operator = await world.reconcile_once("chat")
    service, live = await world.service(), await world.get("Deployment", "chat-decode")
    await world.kube.delete(INFERENCESERVICES, world.namespace, "chat", service["metadata"]["uid"])
    await world.kube.delete(DEPLOYMENTS, world.namespace, "chat-decode", live["metadata"]["uid"])
    if made_anew:
        await world.create()
    await world.sync(operator.store)
    for services in ((), (service,)):
        operator.store.replace(labels.KIND, services)
    await operator.reconciler.reconcile((world.namespace, "chat"))  # raises nothing: nothing is left to retry
    assert await world.names("Deployment") == ["chat-prefill"]


async def test_reconcile_never_adopts_foreign_object(world: ControllerHarness) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat-decode", "namespace": world.namespace},
        "spec": {"ports": [{"port": 1234}]},
    }
    await world.kube.create(theirs)
    await world.create()
    with pytest.raises(BackendUnavailable, match="not owned by this InferenceService"):
        await world.reconcile_once("chat")
    assert (await world.get("Service", "chat-decode"))["spec"]["ports"][0]["port"] == 1234
    assert (await reasons(world))["Stalled"] == "ApplyRejected"
    assert "ApplyRejected" in await world.events()


async def test_reconcile_reports_api_server_rejection(world: ControllerHarness) -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "Near"}]}]
    node_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    tiers = {"serve": {"pod": {"affinity": {"nodeAffinity": node_affinity}}}}
    await world.create(tiers=tiers)
    with pytest.raises(BackendUnavailable):
        await world.reconcile_once("chat")
    status = (await world.service())["status"]
    stalled = next(c for c in status["conditions"] if c["type"] == "Stalled")
    assert stalled["status"] == "True"
    assert '"Near"' in stalled["message"]


async def test_reconcile_sets_minimum_through_scale_subresource(world: ControllerHarness) -> None:
    service = await world.create()
    operator = await world.reconcile_once("chat")
    service["spec"]["tiers"]["decode"]["minReplicas"] = 3
    await world.edit(service)
    await world.reconcile_once("chat", operator)
    live = await world.get("Deployment", "chat-decode")
    owners = {
        entry["manager"]
        for entry in live["metadata"]["managedFields"]
        if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    assert live["spec"]["replicas"] == 3
    assert labels.SCALER_FIELD_MANAGER in owners
    await world.reconcile_once("chat", operator)
    assert (await world.get("Deployment", "chat-decode"))["spec"]["replicas"] == 3


async def test_reconcile_default_image_change_keeps_pod_template(world: ControllerHarness) -> None:
    await world.create()
    await world.reconcile_once("chat")
    before = (await world.get("Deployment", "chat-decode"))["spec"]["template"]
    parts = world.operator()
    reconciler = parts.reconciler
    other = reconciler._platform.engine.model_copy(update={"image": "example.com/engine:2"})
    reconciler._platform = reconciler._platform.model_copy(update={"engine": other})
    await world.reconcile_once("chat", parts)
    assert (await world.get("Deployment", "chat-decode"))["spec"]["template"] == before


async def test_reconcile_spec_change_creates_new_template(world: ControllerHarness) -> None:
    service = await world.create()
    operator = await world.reconcile_once("chat")
    service["spec"]["engine"] = {"args": ["--max-num-seqs=4"]}
    await world.edit(service)
    await world.reconcile_once("chat", operator)
    live = await world.get("Deployment", "chat-decode")
    assert "--max-num-seqs=4" in str(live["spec"]["template"])
    assert len(await world.names("ControllerRevision")) == 4


async def test_renamed_model_keeps_template_and_old_name(world: ControllerHarness) -> None:
    service = await world.create(model={"uri": "file:///models/tiny", "name": f"{world.namespace}-old"})
    operator = await world.reconcile_once("chat")
    before = (await world.get("Deployment", "chat-decode"))["spec"]["template"]
    service["spec"]["model"]["name"] = f"{world.namespace}-new"
    await world.edit(service)
    await world.reconcile_once("chat", operator)
    assert (await world.get("Deployment", "chat-decode"))["spec"]["template"] == before
    status = (await world.service())["status"]
    old, new = f"{world.namespace}-old", f"{world.namespace}-new"
    assert status["modelNames"] == [new, f"{world.namespace}/chat", old]
    assert [one.partition(" until ")[0] for one in status["formerNames"]] == [old]
    writes = world.kube.writes
    await world.reconcile_once("chat", operator)
    assert world.kube.writes == writes


async def test_former_name_of_old_end_leaves_the_status(world: ControllerHarness) -> None:
    await world.create()
    operator = await world.reconcile_once("chat")
    live = await world.service()
    past = "gone until 2020-01-01T00:00:00Z"
    names = [*live["status"]["modelNames"], "gone"]
    status = {**live["status"], "modelNames": names, "formerNames": [past]}
    body = {key: live[key] for key in ("apiVersion", "kind")} | {"metadata": {"name": "chat"}, "status": status}
    body["metadata"]["namespace"] = world.namespace
    await world.kube.apply(body, labels.FIELD_MANAGER, subresource="status")
    await world.reconcile_once("chat", operator)
    found = (await world.service())["status"]
    assert found["modelNames"] == ["chat", f"{world.namespace}/chat"]
    assert "formerNames" not in found


async def test_reconcile_older_service_keeps_model_name(world: ControllerHarness) -> None:
    await world.create("first", model={"uri": "file:///models/tiny", "name": "shared"})
    await world.create("second", model={"uri": "file:///models/tiny", "name": "shared"})
    operator = await world.reconcile_once("first")
    await world.reconcile_once("second", operator)
    both = [await reasons(world, name) for name in ("first", "second")]
    rejections = [r.get("ModelNameRejected") for r in both]
    assert sorted(map(str, rejections)) == ["ModelNameTaken", "None"]
    loser = ("first", "second")[rejections.index("ModelNameTaken")]
    assert (await world.service(loser))["status"]["modelNames"] == [f"{world.namespace}/{loser}"]
    assert (await world.events()).count("ModelNameTaken") == 1


async def test_edited_older_service_takes_no_model_name(world: ControllerHarness) -> None:
    name = f"{world.namespace}-chat"
    old = await world.create("old")
    await world.create("young", model={"uri": "file:///models/tiny", "name": name})
    operator = await world.reconcile_once("old")
    await world.reconcile_once("young", operator)
    claim = (await world.service("young"))["status"]["nameClaim"]
    old["spec"]["model"]["name"] = name
    await world.edit(old)
    operator = world.operator()  # it knows what the API server has
    await world.reconcile_once("old", operator)
    await world.reconcile_once("young", operator)
    young, edited = (await world.service("young"))["status"], (await world.service("old"))["status"]
    assert (young["nameClaim"], young["modelNames"][0]) == (claim, name)
    assert "nameClaim" not in edited
    reported = {one["type"]: one for one in edited["conditions"]}["ModelNameRejected"]
    assert reported["status"] == "True"
    since = claim.partition(" since ")[2].partition(".")[0]
    assert f"service {world.namespace}/young holds the name since {since}Z" in reported["message"]


async def test_status_of_replaced_service_is_not_written(world: ControllerHarness) -> None:
    """The successor of a deleted service of the same name gets no status, and so no model name, of that one."""
    await world.create()
    operator = await world.reconcile_once("chat")
    stale = await world.service()
    await world.kube.delete(INFERENCESERVICES, world.namespace, "chat", stale["metadata"]["uid"])
    await operator.reconciler.status.write(stale, stale["status"])
    await world.create()
    with pytest.raises(Conflict):
        await operator.reconciler.status.write(stale, stale["status"])
    assert not (await world.service()).get("status")


async def test_event_of_a_conflicting_status_write_is_one(world: ControllerHarness) -> None:
    """The retry sees another version of the object, and the same change."""
    made = await world.create(slo={"ttft": "1s"})
    operator = await world.reconcile_once("chat")
    made["spec"]["admission"] = {"whenFull": "Downgrade", "fallback": {"name": "nobody"}}
    await world.edit(made)
    await world.sync(operator.store)
    made["metadata"]["annotations"] = {"edited": "meanwhile"}
    await world.edit(made)
    with pytest.raises(Conflict):
        await operator.reconciler.reconcile((world.namespace, "chat"))
    assert await world.events() == ["FallbackUnusable"]
    await world.reconcile_once("chat", operator)
    assert await world.events() == ["FallbackUnusable"]


async def test_reconcile_deletes_disabled_network_policy(world: ControllerHarness) -> None:
    await world.create()
    parts = await world.reconcile_once("chat")
    reconciler = parts.reconciler
    off = reconciler._platform.network_policy.model_copy(update={"enabled": False})
    reconciler._platform = reconciler._platform.model_copy(update={"network_policy": off})
    await world.reconcile_once("chat", parts)
    assert await world.names("NetworkPolicy") == []


async def test_watch_starts_with_full_list(world: ControllerHarness) -> None:
    await world.create()
    event = await world.first(labels.KIND)
    assert event.type == "SYNC"
    assert [o["metadata"]["name"] for o in event.objects] == ["chat"]


async def test_conditions_of_an_earlier_release_are_removed(world: ControllerHarness) -> None:
    """One round of the new operator leaves none of another type in the API server."""
    live = await world.create()
    old = [
        {"type": kind, "status": status, "reason": reason, "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, status, reason in (
            ("Ready", "True", "Serving"),
            ("DecodeReady", "True", "AllReplicasReady"),
            ("ModelNameAccepted", "True", "Accepted"),
            ("ScalingActive", "True", "ScalingOnForecast"),
            ("MetricsAvailable", "False", "MetricsMissing"),
            ("SLOFeasible", "Unknown", "NotMeasured"),
            ("AdmissionHealthy", "Unknown", "GatewayConfigStale"),
            ("FallbackResolved", "True", "FallbackResolved"),
        )
    ]
    meta = {name: live["metadata"][name] for name in ("namespace", "name")}
    body = {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": meta}
    status = {"observedGeneration": live["metadata"]["generation"], "conditions": old}
    await world.kube.apply({**body, "status": status}, labels.FIELD_MANAGER, subresource="status")
    await world.reconcile_once("chat")
    stored = (await world.service())["status"]["conditions"]
    assert {one["type"] for one in stored} == {"Ready", "Reconciling"}
