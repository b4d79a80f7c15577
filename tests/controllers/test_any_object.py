"""Any object that a cluster can hold, through every function that reads one: none raises.

An object starts whole. Then fields are removed, set to null, emptied, or get values that a later version may have.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio import client

from plimsoll.adapters.kube_client import (
    ENDPOINTSLICES,
    INFERENCESERVICEADMISSIONS,
    INFERENCESERVICES,
    KubeClient,
    WatchEvent,
    received,
)
from plimsoll.adapters.lease import RenewalLeaseLock
from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale import pod_deletion_cost
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.engine_rollout.rollout_controller import EngineRollout
from plimsoll.controllers.gateway_poller import GatewayPoller, GatewayView
from plimsoll.controllers.isolation import ObjectErrors
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.reconcile import applied_cache, condition_events, pod_diagnosis, service_status
from plimsoll.controllers.reconcile.drain_reports import DrainReports, drain_timeout_of
from plimsoll.controllers.reconcile.engine_publication import published_engines
from plimsoll.controllers.reconcile.object_plan import plan_objects
from plimsoll.controllers.reconcile.observe import affected_services, observe
from plimsoll.controllers.reconcile.status_inputs import collect_status_inputs, desired_replicas, names_of
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs, is_fully_rolled_out
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling.scale_down_candidates import ReplicaLoad
from plimsoll.gateway.service_catalog import CatalogBuilder
from plimsoll.gateway.watch_cache import WatchCache
from plimsoll.resources import object_meta, objects
from plimsoll.resources.platform_config import EngineRolloutSettings
from tests import builders
from tests.controllers.test_autoscale import NOW_S, no_event

Object = dict[str, Any]
Path = tuple[str | int, ...]

KEY = ("team", "chat")
# What a stored object always has: the API server refuses one without them, or sets them itself.
ALWAYS = {("metadata",), ("kind",), ("apiVersion",)} | {
    ("metadata", name) for name in ("name", "namespace", "uid", "creationTimestamp")
}
UNTYPED = {labels.KIND: ("status",), labels.ADMISSION_KIND: ("limits", "engines")}
# What a later version of a definition may do to the operator's part of a custom resource: nothing holds its types.
LATER: tuple[Any, ...] = ("FromALaterVersion", 7, True, [1, "x", None], {"odd": {"deep": None}}, 1e300)


def a_service() -> Object:
    found = builders.service(
        model={"uri": "file:///models/tiny", "name": "tiny"},
        slo={"ttft": "2s", "tpot": "50ms"},
        tiers={"serve": {"minReplicas": 1, "maxReplicas": 4}},
        engine={"args": ["--max-num-seqs", "8"]},
        admission={"whenFull": "Downgrade", "fallback": {"name": "other"}},
    )
    found["metadata"] |= {"labels": {"team": "a"}, "annotations": {"note": "b"}, "managedFields": [{"manager": "x"}]}
    found["status"] = {
        "observedGeneration": 1,
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "SLOMet", "status": "False", "reason": "SLOViolated", "message": "m"},
        ],
        "tiers": {"serve": {"summary": "1/1"}},
        "modelNames": ["tiny"],
        "url": "http://x",
    }
    return found


def an_admission() -> Object:
    limits = AdmissionLimits(("default",), None, 1.0, 2.0, True, {"gw": 1}, ((1.0, 2.0),))
    engines = published_engines([a_deployment()], [a_pod(), a_leaving_pod()], [])
    found = objects.admission(a_service(), codec.encode(limits), engines)
    found["metadata"] |= {"uid": "a", "resourceVersion": "7", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return found


def a_pod() -> Object:
    found = builders.pod(a_service(), "serve")
    found["metadata"] |= {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": {pod_deletion_cost.DELETION_COST_ANNOTATION: "-1"},
        "ownerReferences": [{"uid": "u", "kind": "ReplicaSet", "name": "r", "controller": True}],
    }
    found["spec"] = {
        "containers": [
            {
                "name": "engine",
                "image": "example.com/engine:1",
                "env": [{"name": "MODEL", "value": "m"}, {"name": "T", "valueFrom": {"secretKeyRef": {"key": "k"}}}],
                "resources": {"limits": {"nvidia.com/gpu": "1"}},
                "ports": [{"name": "api", "containerPort": 8000}],
            }
        ],
        "nodeSelector": {"gpu": "h200"},
    }
    state = {
        "terminated": {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:10:25Z", "message": "m"},
        "waiting": {"reason": "ErrImagePull", "message": "m"},
        "running": {"startedAt": "2026-01-01T00:00:05Z"},
    }
    container = {"name": "engine", "image": "i", "ready": False, "state": state, "lastState": copy.deepcopy(state)}
    found["status"] = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:01Z", "message": "m"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z", "reason": "r"},
        ],
        "containerStatuses": [container],
        "initContainerStatuses": [copy.deepcopy(container)],
    }
    return found


def a_leaving_pod() -> Object:
    found = a_pod()
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:10:25Z", "deletionGracePeriodSeconds": 625}
    return found


def a_slice() -> Object:
    slice_labels = {labels.SERVICE: KEY[1], labels.ROLE: "serve", labels.SLICE_SERVICE: f"{KEY[1]}-serve"}
    engine = {
        "addresses": ["10.0.0.1"],
        "conditions": {"serving": True, "terminating": False},
        "targetRef": {"name": a_pod()["metadata"]["name"], "uid": "p"},
    }
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": "s", "namespace": KEY[0], "uid": "s", "labels": slice_labels},
        "ports": [{"name": "api", "port": 8000}],
        "endpoints": [engine],
    }


def a_deployment() -> Object:
    found = builders.deployment(a_service(), "serve", replicas=2, ready=1)
    found["spec"]["template"] = {"metadata": {"labels": {}}, "spec": a_pod()["spec"]}
    found["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    found["status"]["conditions"] = [{"type": "ReplicaFailure", "status": "True", "message": "quota"}]
    return found


def a_revision() -> Object:
    parent = a_service()
    return {
        "kind": "ControllerRevision",
        "metadata": {
            **object_meta.child_metadata(parent, "chat-serve-1", object_meta.tier_labels("chat", "serve")),
            "uid": "r",
        },
        "data": {"spec": {}},
        "revision": 1,
    }


def a_lease() -> Object:
    times = {"acquireTime": "2026-01-01T00:00:00.000001Z", "renewTime": "2026-01-01T00:00:00.000001Z"}
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 15, "leaseTransitions": 3, **times}
    return {"kind": "Lease", "metadata": {"name": "plimsoll-operator", "namespace": "n", "uid": "l"}, "spec": spec}


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """The paths of all fields and items of an object."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*at, name)
        yield from paths(part, (*at, name))


def damaged(whole: Object, draw: Random) -> Object:
    """The object with some optional fields changed in ways that the API allows."""
    found = copy.deepcopy(whole)
    free = [p for p in paths(whole) if p not in ALWAYS and labels.SERVICE not in p and labels.ROLE not in p]
    for path in draw.sample(free, draw.choice([1, 1, 2, 4])):
        *way, last = path
        holder: Any = found
        try:
            for name in way:
                holder = holder[name]
            _damage(holder, last, draw, loose=path[0] in UNTYPED.get(whole["kind"], ()))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed it
    return found


def _damage(holder: Any, last: Any, draw: Random, *, loose: bool) -> None:
    old = holder[last]
    empty: Any = {dict: {}, list: [], str: ""}.get(type(old))
    match draw.choice(["remove", "null", "empty", "extra", "later"]):
        case "remove" if isinstance(holder, dict):
            del holder[last]
        case "null":
            holder[last] = None
        case "empty" if empty is not None and "T00:" not in old:
            holder[last] = empty
        case "extra" if isinstance(old, dict):
            old["fieldOfALaterVersion"] = draw.choice(LATER)
        case "later" if loose:
            holder[last] = copy.deepcopy(draw.choice(LATER))
        case "later" if isinstance(old, str):
            holder[last] = "2027-01-01T00:00:00.123456+02:00" if "T00:" in old else "FromALaterVersion"


def stored(*objects: Object) -> ObjectCache:
    store = ObjectCache()
    for obj in (a_service(), a_deployment(), *objects):
        store.put(normalize(copy.deepcopy(obj)))
    return store


def round_of(store: ObjectCache) -> None:
    """A round of the reconciler without its writes."""
    observed = observe(store, GatewayView(), KEY)
    plan = None
    if observed is not None and observed.service is not None:
        plan = plan_objects(
            observed, observed.service, desired_replicas(observed, observed.service, None, {}), builders.PLATFORM
        )
    if observed is not None:
        names = names_of(observed, datetime.fromtimestamp(NOW_S, UTC))
        inputs = collect_status_inputs(observed, plan, None, None, builders.PLATFORM, names)
        old = observed.service_object.get("status") or {}
        stated, recovered = service_status.build_conditions(inputs), service_status.recovery_messages(inputs)
        condition_events.changed_events(old.get("conditions", []), stated, recovered, "7")
        service_status.tiers_status(inputs)
        service_status.scaling_fields(inputs, old)


def ticks_of(store: ObjectCache) -> None:
    """Two ticks of the autoscaler, without the isolation of services."""
    sources = SignalSources(lambda: ((), ()), lambda namespace, pod: None, lambda namespace, pod: None)
    scaler = Autoscaler(store, KubeClient.__new__(KubeClient), sources, no_event, lambda key: None)
    for second in range(2):
        scaler.decide(NOW_S + second)
    for known in scaler._entries.values():
        assert known.last_failure_s < NOW_S


def rollout_of(store: ObjectCache) -> None:
    """A plan of the platform's rollout, which needs every service."""
    settings, found = EngineRolloutSettings(generation=2), ObjectErrors()
    EngineRollout(store, settings, lambda key: None, errors=found).plan()
    assert not found.present


def in_engines(pod: Object) -> None:
    engines = EnginePoller(stored(pod), lambda *_: asyncio.sleep(0, b""), lambda *_: None)
    asyncio.run(engines._relist(0.0))


def in_gateways(pod: Object) -> None:
    gateways = GatewayPoller(None, builders.PLATFORM.gateway, lambda *_: asyncio.sleep(0, b""), lambda key: None)  # type: ignore[arg-type]
    for event in (WatchEvent("SYNC", {}, (pod,)), WatchEvent("MODIFIED", pod), WatchEvent("DELETED", pod)):
        gateways.on_pod_event(event)


def in_endings(pod: Object) -> None:
    endings = DrainReports(stored(pod))
    for event in (WatchEvent("SYNC", {}, (pod,)), WatchEvent("MODIFIED", pod), WatchEvent("DELETED", pod)):
        endings.on_pod_event(event)
    endings.forget(KEY)


def in_a_smaller_tier(pod: Object) -> None:
    other = {**pod, "metadata": {**pod["metadata"], "name": "q"}}
    assert pod_deletion_cost.select_pods([pod, other], 1, lambda name: ReplicaLoad(0.0, 0.0)).summary is not None


def in_a_start(pod: Object) -> None:
    pod_startup.startup_state(pod, None)
    pod_startup.phase_durations(pod, None)
    pod_startup.ready_for_s(pod, NOW_S)
    pod_startup.startup_variant(pod)
    assert pod_startup.is_terminating(pod) in (True, False)


@functools.cache
def api_client() -> Any:
    """One for all examples: each reads the system's certificate authorities, for a tenth of a second."""
    return client.ApiClient(client.Configuration())


def in_the_lease(lease: Object) -> None:
    found = api_client()._ApiClient__deserialize(json.loads(json.dumps(lease)), "V1Lease")
    RenewalLeaseLock("n", "ns", "me", api_client(), 1.0).election_record(found)


def in_a_gateway(*found: Object) -> None:
    """A service, a slice and an InferenceServiceAdmission, in two versions."""
    cache, builder = WatchCache(), CatalogBuilder()
    for resource, obj in zip((INFERENCESERVICES, ENDPOINTSLICES, INFERENCESERVICEADMISSIONS), found, strict=True):
        cache.apply(resource, None, WatchEvent("SYNC", {}, (received(obj),)))
    for _ in range(2):
        changes = cache.take_changes()
        builder.update(changes.services, changes.slices, changes.admissions)
        cache.apply(ENDPOINTSLICES, None, WatchEvent("MODIFIED", received(found[1])))


PODS: dict[str, Callable[[Object], object]] = {
    "store": stored,
    "endings": in_endings,
    "ending of a pod": drain_timeout_of,
    "starts": in_a_start,
    "troubles": lambda pod: pod_diagnosis.most_severe(None, [pod]),
    "victims": in_a_smaller_tier,
    "engines": in_engines,
    "gateways": in_gateways,
    "reconcile": lambda pod: round_of(stored(pod)),
    "autoscale": lambda pod: ticks_of(stored(pod)),
}
DEPLOYMENTS: dict[str, Callable[[Object], object]] = {
    "store": stored,
    "drift": lambda obj: (applied_cache.fingerprint(obj), applied_cache.has_foreign_replicas_owner(obj)),
    "rollout": lambda obj: is_fully_rolled_out(TierStatusInputs("serve", 2, obj, ())),
    "rollout of engines": lambda obj: rollout_of(stored(obj)),
    "troubles": lambda obj: pod_diagnosis.most_severe(obj, []),
    "reconcile": lambda obj: round_of(stored(obj)),
    "autoscale": lambda obj: ticks_of(stored(obj)),
}
SERVICES: dict[str, Callable[[Object], object]] = {
    "store": lambda obj: stored(obj).parsed(obj),
    "rivals": lambda obj: affected_services(stored(obj), None, obj),
    "rollout of engines": lambda obj: rollout_of(stored(obj)),
    "reconcile": lambda obj: round_of(stored(obj)),
    "autoscale": lambda obj: ticks_of(stored(obj)),
    "gateway": lambda obj: in_a_gateway(obj, a_slice(), an_admission()),
}
ADMISSIONS: dict[str, Callable[[Object], object]] = {
    "reconcile": lambda obj: round_of(stored(obj)),
    "autoscale": lambda obj: ticks_of(stored(obj)),
    "gateway": lambda obj: in_a_gateway(a_service(), a_slice(), obj),
}
READERS = [
    *(pytest.param(a_pod, read, id=f"Pod, {name}") for name, read in PODS.items()),
    *(pytest.param(a_leaving_pod, PODS[name], id=f"leaving Pod, {name}") for name in ("ending of a pod", "endings")),
    *(pytest.param(a_deployment, read, id=f"Deployment, {name}") for name, read in DEPLOYMENTS.items()),
    *(pytest.param(a_service, read, id=f"InferenceService, {name}") for name, read in SERVICES.items()),
    *(pytest.param(an_admission, read, id=f"InferenceServiceAdmission, {name}") for name, read in ADMISSIONS.items()),
    pytest.param(a_slice, lambda obj: in_a_gateway(a_service(), obj, an_admission()), id="EndpointSlice, gateway"),
    pytest.param(a_revision, lambda obj: round_of(stored(obj)), id="ControllerRevision, reconcile"),
    pytest.param(a_lease, in_the_lease, id="Lease, election"),
]


@pytest.mark.parametrize(("whole", "read"), READERS)
@settings(max_examples=150, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_reader_of_any_object_does_not_raise(
    whole: Callable[[], Object], read: Callable[[Object], object], draw: Random
) -> None:
    read(normalize(damaged(whole(), draw)))
